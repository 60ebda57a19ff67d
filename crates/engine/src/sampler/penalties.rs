//! Which tokens are penalised for having been there already.

use bodkin_backend::Penalties as Factors;
use rustc_hash::FxHashMap;

use super::history::History;
use super::options::SamplerOptions;

/// Counts of the tokens in a window.
#[derive(Debug)]
pub(super) struct Penalties {
    /// How many of the latest tokens count.
    pub(super) window: usize,
    pub(super) factors: Factors,
    counts: FxHashMap<u32, u32>,
}

impl Penalties {
    /// None if the options penalise nothing.
    pub(super) fn new(options: &SamplerOptions) -> Option<Penalties> {
        let factors = Factors {
            repeat: options.repeat_penalty,
            frequency: options.frequency_penalty,
            presence: options.presence_penalty,
        };
        let window = usize::try_from(options.repeat_last_n).unwrap_or(usize::MAX);
        let does_something = factors != Factors::NONE && window > 0;
        does_something.then(|| Penalties { window, factors, counts: FxHashMap::default() })
    }

    /// Counts the latest token of the history and forgets the one that left the window.
    pub(super) fn accept(&mut self, history: &History) {
        if let Some(new) = history.back(0) {
            *self.counts.entry(new).or_default() += 1;
        }
        if let Some(old) = history.back(self.window)
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
            *logit = self.factors.apply(*logit, count);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn penalised(options: SamplerOptions, accepted: &[u32]) -> Vec<f32> {
        let mut penalties = Penalties::new(&options).unwrap();
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
        assert!(Penalties::new(&SamplerOptions::default()).is_none());
    }
}
