//! Progress on a terminal while a prompt is read.

use std::io::{IsTerminal, stderr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use indicatif::ProgressBar;

use crate::progress::style;

/// A prompt that is read in this time shows no progress.
const DELAY: Duration = Duration::from_secs(1);
const TICK: Duration = Duration::from_millis(200);

/// The progress of one prompt after the other. Nothing is shown if standard error is no terminal.
#[derive(Default)]
pub(super) struct PrefillProgress(Arc<Mutex<State>>);

#[derive(Default)]
enum State {
    /// No prompt is being read.
    #[default]
    Idle,
    /// These tokens of all are read, and the bar is not shown yet.
    Early(u64, u64),
    Shown(ProgressBar),
}

impl PrefillProgress {
    /// `done` of `total` tokens are read.
    pub(super) fn set(&self, done: usize, total: usize) {
        let (done, total) = (done as u64, total as u64);
        let mut state = lock(&self.0);
        match &mut *state {
            State::Idle if stderr().is_terminal() => {
                *state = State::Early(done, total);
                show_later(&self.0);
            }
            State::Idle => (),
            State::Early(early, _) => *early = done,
            State::Shown(bar) => {
                // There is an estimate when a part has been read.
                bar.set_style(style("{msg} [{bar:30}] {pos}/{len} tokens, {eta} left"));
                bar.set_position(done);
            }
        }
    }

    /// The prompt is read.
    pub(super) fn end(&self) {
        if let State::Shown(bar) = std::mem::take(&mut *lock(&self.0)) {
            bar.finish_and_clear();
        }
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Shows a bar after a while, if the prompt is still being read.
fn show_later(state: &Arc<Mutex<State>>) {
    let state = Arc::downgrade(state);
    std::thread::spawn(move || {
        std::thread::sleep(DELAY);
        let Some(state) = state.upgrade() else { return };
        let mut state = lock(&state);
        if let State::Early(done, total) = *state {
            let bar = ProgressBar::new(total).with_position(done);
            bar.set_style(style("{msg} [{bar:30}] {pos}/{len} tokens"));
            bar.set_message("reading the prompt");
            bar.enable_steady_tick(TICK);
            *state = State::Shown(bar);
        }
    });
}
