//! Progress on a terminal while a prompt is read.

use std::cell::RefCell;
use std::io::{IsTerminal, stderr};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget};

use crate::progress::style;

/// A prompt that is read in this time shows no progress.
const DELAY: Duration = Duration::from_secs(1);
const TICK: Duration = Duration::from_millis(200);

/// The progress of one prompt. Nothing is shown if standard error is no terminal.
#[derive(Default)]
pub(super) struct PrefillProgress(RefCell<Option<Shown>>);

struct Shown {
    bar: ProgressBar,
    /// Dropped when the prompt is read.
    _reading: Sender<()>,
}

impl PrefillProgress {
    /// `done` of `total` tokens are read.
    pub(super) fn set(&self, done: usize, total: usize) {
        let mut shown = self.0.borrow_mut();
        if let Some(Shown { bar, .. }) = &*shown {
            bar.set_style(style("{msg} [{bar:30}] {pos}/{len} tokens, {eta} left"));
            bar.set_position(done as u64);
        } else if stderr().is_terminal() {
            *shown = Some(begin(done as u64, total as u64));
        }
    }

    /// The prompt is read.
    pub(super) fn end(&self) {
        if let Some(Shown { bar, .. }) = self.0.borrow_mut().take() {
            bar.finish_and_clear();
        }
    }
}

/// A bar that appears after a while. There is no estimate before the first part is read.
fn begin(done: u64, total: u64) -> Shown {
    let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::hidden());
    bar.set_style(style("{msg} [{bar:30}] {pos}/{len} tokens"));
    bar.set_message("reading the prompt");
    bar.set_position(done);
    bar.reset_eta();
    let (reading, ended) = channel();
    let late = bar.clone();
    std::thread::spawn(move || {
        if ended.recv_timeout(DELAY) == Err(RecvTimeoutError::Timeout) {
            late.set_draw_target(ProgressDrawTarget::stderr());
            late.enable_steady_tick(TICK);
        }
    });
    Shown { bar, _reading: reading }
}
