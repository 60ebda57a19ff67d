//! What an engine says of its experts. The answer waits for the engine's step, so it is asked
//! seldom, and not again before it has answered.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bodkin_backend::{ExpertStats, ExpertTimes};
use bodkin_engine::ExpertReport;

/// How often an engine is asked at most.
const EVERY: Duration = Duration::from_secs(5);

/// The last answer of an engine.
#[derive(Default)]
pub(crate) struct ExpertSample(Mutex<State>);

#[derive(Default)]
struct State {
    layers: Vec<ExpertStats>,
    /// Of a step that metrics have not counted yet.
    times: Vec<ExpertTimes>,
    /// When the engine was last asked.
    asked: Option<Instant>,
    /// Whether it has not answered yet.
    is_waiting: bool,
}

impl ExpertSample {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The last answer, layer by layer.
    pub(crate) fn layers(&self) -> Vec<ExpertStats> {
        self.state().layers.clone()
    }

    /// The times of each layer in the step of the last answer, once.
    pub(crate) fn take_times(&self) -> Vec<ExpertTimes> {
        std::mem::take(&mut self.state().times)
    }

    /// Whether the engine is to be asked now; if so, [`ExpertSample::end`] must follow.
    pub(crate) fn begin(&self) -> bool {
        let mut state = self.state();
        if state.is_waiting || state.asked.is_some_and(|asked| asked.elapsed() < EVERY) {
            return false;
        }
        (state.is_waiting, state.asked) = (true, Some(Instant::now()));
        true
    }

    /// Stores the answer; none if the engine has failed.
    pub(crate) fn end(&self, answer: Option<ExpertReport>) {
        let mut state = self.state();
        state.is_waiting = false;
        if let Some(answer) = answer {
            (state.layers, state.times) = (answer.layers, answer.times);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_engine_that_does_not_answer_is_not_asked_again() {
        let sample = ExpertSample::default();
        let begin_later = || {
            sample.state().asked = None;
            sample.begin()
        };
        assert!(sample.begin());
        assert!(!begin_later());
        sample.end(Some(ExpertReport::default()));
        assert!(begin_later());
        sample.end(None);
        assert!(!sample.begin(), "it was asked a short time ago");
    }
}
