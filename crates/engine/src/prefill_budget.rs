//! How many prompt tokens may join a step with decode rows. Each of them delays the next token of
//! every request that decodes, so the budget follows from measured times. Its target is a mixed
//! step of at most `1 + SHARE * fairness` times a decode step: somewhat less than two, and more
//! where more requests prefill than decode. Where that is less than `MIXED_SECONDS`, that is the
//! target: on a GPU a step with a prompt has a fixed cost, and smaller chunks pay it more often, so
//! that not only the prompt but also the requests beside it end later.
//!
//! Behind a long context a token costs more than elsewhere. There the budget has a lower bound that
//! follows from the best speed of prefill, so that a long prompt does not slow down without end,
//! and a step may exceed the target. This file must not know requests.

/// The weight of the newest measurement in an exponential moving average.
const AVERAGE_WEIGHT: f64 = 0.2;

/// The share of a decode step's time that prefill may add to it, a little below 1, because the
/// next measurement varies.
const SHARE: f64 = 0.8;

/// Seconds that a mixed step may take however fast decode is: 33 tokens a second are more than
/// people read.
const MIXED_SECONDS: f64 = 0.03;

/// Mixed steps until a decode step is measured alone again: prompts may follow one another.
const MIXED_STEPS: usize = 32;

/// The fewest tokens, so that prompts go on however slow the model is.
const MIN_TOKENS: usize = 8;

/// The budget while no prompt was measured, beside requests whose prompts were cached.
const INITIAL_TOKENS: usize = 64;

/// Measured times of steps.
#[derive(Debug)]
pub(crate) struct PrefillBudget {
    /// The most rows of a step, of prompts or not.
    limit: usize,
    /// Seconds of a step of decode rows alone; 0 before the first.
    decode_seconds: f64,
    /// Steps of decode rows and prompts since then.
    mixed_steps: usize,
    /// Seconds that a token of a prompt adds to a step, its fixed cost included; 0 before the
    /// first.
    token_seconds: f64,
    /// The fewest seconds per token of any step without decode rows; infinite before the
    /// first.
    best_token_seconds: f64,
}

impl PrefillBudget {
    pub(crate) fn new(limit: usize) -> PrefillBudget {
        PrefillBudget {
            limit,
            decode_seconds: 0.0,
            mixed_steps: 0,
            token_seconds: 0.0,
            best_token_seconds: f64::INFINITY,
        }
    }

    /// The most prompt tokens beside `decode_rows`, for `prefilling` requests; the caller sees that
    /// both fit the step. Where more requests wait for their first token than for their next, they
    /// get more of the time. None where a decode step has to be measured alone.
    pub(crate) fn tokens(&self, decode_rows: usize, prefilling: usize) -> usize {
        if decode_rows == 0 {
            return self.limit;
        }
        if self.token_seconds == 0.0 {
            return INITIAL_TOKENS.min(self.limit);
        }
        if self.decode_seconds == 0.0 || self.mixed_steps >= MIXED_STEPS {
            return 0;
        }
        let fairness = (prefilling as f64 / decode_rows as f64).max(1.0);
        let relative = SHARE * fairness * self.decode_seconds;
        let seconds = relative.max(MIXED_SECONDS - self.decode_seconds);
        let tokens = seconds / self.token_seconds;
        // Half, because a token costs more behind a long context than in the best step.
        let fewest = 0.5 * seconds / self.best_token_seconds;
        (tokens.max(fewest) as usize).max(MIN_TOKENS).min(self.limit)
    }

    /// Notes the time of a step of `prefill_rows` and `decode_rows`; of one of the steps where
    /// multi-step decode ran several.
    pub(crate) fn observe(&mut self, prefill_rows: usize, decode_rows: usize, seconds: f64) {
        let average = |old: &mut f64, new: f64| {
            *old = if *old == 0.0 { new } else { *old + AVERAGE_WEIGHT * (new - *old) };
        };
        match (prefill_rows, decode_rows) {
            (0, _) => {
                average(&mut self.decode_seconds, seconds);
                // The first one may have been slow.
                self.decode_seconds = self.decode_seconds.min(seconds);
                self.mixed_steps = 0;
            }
            (_, 0) => {
                let per_token = seconds / prefill_rows as f64;
                average(&mut self.token_seconds, per_token);
                self.best_token_seconds = self.best_token_seconds.min(per_token);
            }
            _ => {
                self.mixed_steps += 1;
                // Never 0, which would mean that nothing was measured.
                let added = (seconds - self.decode_seconds).max(0.01 * seconds);
                average(&mut self.token_seconds, added / prefill_rows as f64);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fixed_cost_of_prefill_does_not_shrink_chunks() {
        // A GPU on which a decode step takes 3 ms, and a step with a prompt 3 ms and 30 us for each
        // token more than that: twice a decode step would have no tokens.
        let added = |prefill: usize| 3e-3 + 3e-5 * prefill as f64;
        let mut budget = PrefillBudget::new(2048);
        budget.observe(512, 0, 3e-3 + added(512));
        for _ in 0..50 {
            budget.observe(0, 8, 3e-3);
            let prefill = budget.tokens(8, 1);
            budget.observe(prefill, 8, 3e-3 + added(prefill));
        }
        let step = 3e-3 + added(budget.tokens(8, 1));
        assert!((0.028..0.031).contains(&step), "{step} s");
        // Behind a long context a token costs four times as much.
        for _ in 0..MIXED_STEPS - 2 {
            let prefill = budget.tokens(8, 1);
            budget.observe(prefill, 8, 6e-3 + 1.2e-4 * prefill as f64);
        }
        assert_eq!(budget.tokens(8, 1), 323);
    }

    #[test]
    fn the_first_decode_step_is_measured_alone() {
        let mut budget = PrefillBudget::new(512);
        // A prompt of which all but the last token was cached, beside another one.
        assert_eq!(budget.tokens(1, 1), INITIAL_TOKENS);
        budget.observe(512, 0, 0.015);
        // Prompts follow one another, so that no other step would be without one.
        assert_eq!(budget.tokens(1, 63), 0);
        budget.observe(0, 1, 0.0015);
        assert_eq!(budget.tokens(1, 63), 512);
    }

    #[test]
    fn a_slow_first_decode_step_is_forgotten() {
        let mut budget = PrefillBudget::new(2048);
        budget.observe(512, 0, 0.015);
        budget.observe(0, 1, 0.1);
        assert_eq!(budget.tokens(4, 1), 2048);
        // A step takes 2 ms, and 30 us more for each token.
        for _ in 0..2 * MIXED_STEPS {
            let prefill = budget.tokens(4, 1);
            budget.observe(prefill, 4, 2e-3 + 3e-5 * prefill as f64);
        }
        let step = 2e-3 + 3e-5 * budget.tokens(4, 1) as f64;
        assert!((0.02..0.04).contains(&step), "{step} s");
    }

    #[test]
    fn chunks_of_one_prompt_less_than_double_a_long_step() {
        let mut budget = PrefillBudget::new(2048);
        assert_eq!(budget.tokens(0, 1), 2048);
        // A device on which a step takes 30 ms, and 150 us more for each token.
        let seconds = |prefill: usize, decoding: usize| 0.03 + 1.5e-4 * (prefill + decoding) as f64;
        budget.observe(512, 0, seconds(512, 0));
        for _ in 0..50 {
            budget.observe(0, 8, seconds(0, 8));
            let prefill = budget.tokens(8, 1);
            budget.observe(prefill, 8, seconds(prefill, 8));
        }
        let step = seconds(budget.tokens(8, 1), 8) / seconds(0, 8);
        assert!((1.6..2.0).contains(&step), "{step} times as long");
        // Fifteen prompts beside one request that decodes are worth more.
        assert_eq!(budget.tokens(1, 15), 2048);
        // A device on which one token of a prompt takes longer than a step still goes on.
        let mut budget = PrefillBudget::new(2048);
        budget.observe(1, 0, 10.0);
        budget.observe(0, 8, 1.0);
        assert_eq!(budget.tokens(8, 1), MIN_TOKENS);
    }
}
