//! Repetition, frequency and presence penalties over the latest tokens, the prompt's included.

use bodkin_backend::Penalties;
use rustc_hash::FxHashMap;

use super::history::History;
use super::options::SamplerOptions;

/// The penalties of a request, and the counts of the tokens in their window.
#[derive(Debug)]
pub(super) struct PenaltyState {
    /// How many of the latest tokens count; `usize::MAX` is all.
    pub(super) window: usize,
    pub(super) penalties: Penalties,
    counts: FxHashMap<u32, u32>,
}

impl PenaltyState {
    /// None if the options penalise nothing.
    pub(super) fn new(options: &SamplerOptions) -> Option<PenaltyState> {
        let penalties = Penalties {
            repeat: options.repeat_penalty,
            frequency: options.frequency_penalty,
            presence: options.presence_penalty,
        };
        let window = usize::try_from(options.repeat_last_n).unwrap_or(usize::MAX);
        let does_something = penalties != Penalties::NONE && window > 0;
        does_something.then(|| PenaltyState { window, penalties, counts: FxHashMap::default() })
    }

    /// Counts the latest token of the history, which has already been pushed, and forgets the one
    /// that left the window: the history has one token more than the window.
    pub(super) fn accept(&mut self, history: &History) {
        if let Some(new) = history.tokens_ago(0) {
            *self.counts.entry(new).or_default() += 1;
        }
        if let Some(old) = history.tokens_ago(self.window)
            && let Some(count) = self.counts.get_mut(&old)
        {
            *count -= 1;
            if *count == 0 {
                self.counts.remove(&old);
            }
        }
    }

    pub(super) fn apply(&self, logits: &mut [f32]) {
        for (&id, &count) in &self.counts {
            let Some(logit) = logits.get_mut(id as usize) else { continue };
            *logit = self.penalties.apply(*logit, count);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn penalised(options: SamplerOptions, accepted: &[u32]) -> Vec<f32> {
        let mut penalties = PenaltyState::new(&options).unwrap();
        let mut history = History::new(penalties.window);
        for &id in accepted {
            history.push(id);
            penalties.accept(&history);
        }
        let mut logits = vec![2.0, 2.0, -2.0, -2.0];
        penalties.apply(&mut logits);
        logits
    }

    #[test]
    fn repetition_divides_or_multiplies() {
        let options = SamplerOptions { repeat_penalty: 2.0, ..SamplerOptions::default() };
        assert_eq!(penalised(options, &[0, 2, 2, 9]), [1.0, 2.0, -4.0, -2.0]);
    }

    #[test]
    fn frequency_counts_and_presence_does_not() {
        let frequency = SamplerOptions { frequency_penalty: 0.5, ..SamplerOptions::default() };
        assert_eq!(penalised(frequency, &[0, 2, 2]), [1.5, 2.0, -3.0, -2.0]);
        let presence = SamplerOptions { presence_penalty: 0.5, ..SamplerOptions::default() };
        assert_eq!(penalised(presence, &[0, 2, 2]), [1.5, 2.0, -2.5, -2.0]);
    }

    #[test]
    fn the_window_moves() {
        let options =
            SamplerOptions { presence_penalty: 1.0, repeat_last_n: 2, ..SamplerOptions::default() };
        assert_eq!(penalised(options.clone(), &[0, 1, 2]), [2.0, 1.0, -3.0, -2.0]);
        let all = SamplerOptions { repeat_last_n: -1, ..options };
        assert_eq!(penalised(all, &[0, 1, 2]), [1.0, 1.0, -3.0, -2.0]);
    }

    #[test]
    fn nothing_to_do_is_nothing() {
        assert!(PenaltyState::new(&SamplerOptions::default()).is_none());
    }
}
