//! Progress on a terminal while a prompt is read.

use std::fmt::Write;
use std::io::{IsTerminal, stderr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use indicatif::{HumanDuration, ProgressBar, ProgressState};

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
    /// The bar is not shown yet.
    Early(Pace),
    Shown(Pace, ProgressBar),
}

/// How fast a prompt is read.
struct Pace {
    done: u64,
    total: u64,
    /// When `done` was reached.
    at: Instant,
    /// The times of the first and of the last tokens that were read together.
    first: Option<TokenTime>,
    last: Option<TokenTime>,
}

/// The time of a token at some position: the more tokens are before it, the longer.
#[derive(Clone, Copy)]
struct TokenTime {
    position: f64,
    seconds: f64,
}

impl Pace {
    fn new(done: u64, total: u64) -> Pace {
        Pace { done, total, at: Instant::now(), first: None, last: None }
    }

    /// `done` tokens are read, `elapsed` after the others.
    fn advance(&mut self, done: u64, elapsed: Duration) {
        if done < self.done {
            // Cached tokens of a preempted request were lost.
            (self.first, self.last) = (None, None);
        } else if done > self.done {
            let seconds = elapsed.as_secs_f64() / (done - self.done) as f64;
            let time = TokenTime { position: (self.done + done) as f64 / 2.0, seconds };
            self.first.get_or_insert(time);
            self.last = Some(time);
        }
        self.done = done;
        self.at += elapsed;
    }

    /// The time of the tokens that are left, once some are read: it grows by token as it has so
    /// far.
    fn left(&self) -> Option<Duration> {
        let (first, last) = (self.first?, self.last?);
        let distance = last.position - first.position;
        let growth = if distance > 0.0 { (last.seconds - first.seconds) / distance } else { 0.0 };
        let middle = (self.done + self.total) as f64 / 2.0;
        let seconds = last.seconds + growth.max(0.0) * (middle - last.position);
        let left = self.total.saturating_sub(self.done) as f64;
        Duration::try_from_secs_f64(seconds * left).ok()
    }
}

impl PrefillProgress {
    /// `done` of `total` tokens are read.
    pub(super) fn set(&self, done: usize, total: usize) {
        let (done, total) = (done as u64, total as u64);
        let mut state = lock(&self.0);
        match &mut *state {
            State::Idle if stderr().is_terminal() => {
                *state = State::Early(Pace::new(done, total));
                show_later(&self.0);
            }
            State::Idle => (),
            State::Early(pace) => pace.advance(done, pace.at.elapsed()),
            State::Shown(pace, bar) => {
                pace.advance(done, pace.at.elapsed());
                show(pace, bar);
            }
        }
    }

    /// The prompt is read.
    pub(super) fn end(&self) {
        if let State::Shown(_, bar) = std::mem::take(&mut *lock(&self.0)) {
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
        *state = match std::mem::take(&mut *state) {
            State::Early(pace) => {
                let bar = ProgressBar::new(pace.total).with_message("reading the prompt");
                show(&pace, &bar);
                bar.enable_steady_tick(TICK);
                State::Shown(pace, bar)
            }
            other => other,
        };
    });
}

/// Shows how far the prompt is read, and how long the rest takes if that can be said.
fn show(pace: &Pace, bar: &ProgressBar) {
    let end = pace.left().map(|left| pace.at + left);
    let left = move |_: &ProgressState, out: &mut dyn Write| {
        if let Some(end) = end {
            let left = end.saturating_duration_since(Instant::now());
            // The bar has no use for an error of its own text.
            let _ = write!(out, ", {:#} left", HumanDuration(left));
        }
    };
    bar.set_style(style("{msg} [{bar:30}] {pos}/{len} tokens{left}").with_key("left", left));
    bar.set_position(pace.done);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_grows_with_the_tokens_before() {
        let mut pace = Pace::new(0, 400);
        assert_eq!(pace.left(), None);
        pace.advance(100, Duration::from_secs(1));
        assert_eq!(pace.left(), Some(Duration::from_secs(3)));
        // A hundred tokens took one second more than those before: 3 and 4 s are left.
        pace.advance(200, Duration::from_secs(2));
        assert_eq!(pace.left().unwrap().as_secs_f64().round(), 7.0);
        pace.advance(400, Duration::from_secs(7));
        assert_eq!(pace.left(), Some(Duration::ZERO));
        pace.advance(100, Duration::from_secs(1));
        assert_eq!(pace.left(), None);
    }
}
