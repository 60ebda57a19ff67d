//! DRY, "don't repeat yourself" (p-e-w's, with the restart sequences of KoboldCpp): a token that
//! would go on with a repetition is penalised, the more the longer the repetition is.

use rustc_hash::FxHashMap;

use super::history::History;
use super::options::SamplerOptions;
use crate::tokenizer::Tokenizer;

/// The most bytes of a breaker that count.
const BREAKER_BYTES: usize = 40;
/// The most tokens after the first one of a breaker.
const BREAKER_TOKENS: usize = 20;
/// The logarithm of the highest f32.
const LOG_MAX: f32 = 88.722_84;

/// Breakers and buffers.
#[derive(Debug)]
pub(super) struct Dry {
    /// How many of the latest tokens count.
    pub(super) window: usize,
    multiplier: f32,
    base: f32,
    allowed: usize,
    /// The first token of each breaker, with the tokens that must follow it.
    breakers: FxHashMap<u32, Vec<Vec<u32>>>,
    /// The window, the latest token first.
    latest: Vec<u32>,
    /// How many tokens from each place on are the same as from the start.
    lengths: Vec<usize>,
    /// The longest repetition that each token would go on with.
    repeats: FxHashMap<u32, usize>,
}

impl Dry {
    /// None if the options say that it is off.
    pub(super) fn new(options: &SamplerOptions, tokenizer: &Tokenizer) -> Option<Dry> {
        let mut new = Dry::without_breakers(options)?;
        for breaker in &options.dry_sequence_breakers {
            new.add_breaker(breaker, tokenizer);
        }
        Some(new)
    }

    fn without_breakers(options: &SamplerOptions) -> Option<Dry> {
        let is_on = options.dry_multiplier != 0.0
            && options.dry_base >= 1.0
            && options.dry_penalty_last_n != 0;
        is_on.then(|| Dry {
            window: usize::try_from(options.dry_penalty_last_n).unwrap_or(usize::MAX),
            multiplier: options.dry_multiplier,
            base: options.dry_base,
            allowed: options.dry_allowed_length as usize,
            breakers: FxHashMap::default(),
            latest: Vec::new(),
            lengths: Vec::new(),
            repeats: FxHashMap::default(),
        })
    }

    /// Finds the tokens that hold the breaker, and those that end with its start; after the
    /// latter, the rest of it must follow.
    fn add_breaker(&mut self, breaker: &str, tokenizer: &Tokenizer) {
        let mut end = breaker.len().min(BREAKER_BYTES);
        while !breaker.is_char_boundary(end) {
            end -= 1;
        }
        let breaker = &breaker[..end];
        if breaker.is_empty() {
            return;
        }
        let mut piece = Vec::new();
        for id in 0..tokenizer.vocab_size() as u32 {
            piece.clear();
            tokenizer.push_piece(id, true, &mut piece);
            if piece.windows(breaker.len()).any(|window| window == breaker.as_bytes()) {
                self.breakers.entry(id).or_default().push(Vec::new());
                continue;
            }
            let starts = (1..breaker.len()).filter(|&n| breaker.is_char_boundary(n));
            let tails = starts.filter(|&n| piece.ends_with(&breaker.as_bytes()[..n])).map(|n| {
                let mut tail = tokenizer.encode(&breaker[n..], false, false);
                tail.truncate(BREAKER_TOKENS);
                tail
            });
            let tails: Vec<Vec<u32>> = tails.collect();
            if !tails.is_empty() {
                self.breakers.entry(id).or_default().extend(tails);
            }
        }
    }

    /// Penalises tokens, given what came before.
    pub(super) fn apply(&mut self, history: &History, logits: &mut [f32]) {
        self.latest.clear();
        self.latest.extend(history.latest(self.window));
        let limit = self.limit();
        if self.latest.len() <= self.allowed || limit < self.allowed {
            return;
        }
        self.find_repeats(limit);
        let max_exponent = match self.base > 1.000_001 {
            true => (LOG_MAX / self.base.ln()) as usize,
            false => usize::MAX,
        };
        for (&id, &length) in &self.repeats {
            let breakers = self.breakers.get(&id);
            let is_breaker = breakers.is_some_and(|tails| tails.iter().any(Vec::is_empty));
            if let Some(logit) = logits.get_mut(id as usize)
                && !is_breaker
            {
                let exponent = (length - self.allowed).min(max_exponent);
                *logit -= self.multiplier * self.base.powf(exponent as f32);
            }
        }
    }

    /// How many of the latest tokens a repetition may have: those after the latest breaker.
    fn limit(&self) -> usize {
        for (age, id) in self.latest.iter().enumerate() {
            let Some(tails) = self.breakers.get(id) else { continue };
            let follows = |tail: &&Vec<u32>| {
                // The token after the one of age `age` has the age before it.
                tail.len() <= age
                    && tail.iter().eq(self.latest[..age].iter().rev().take(tail.len()))
            };
            if let Some(longest) = tails.iter().filter(follows).map(Vec::len).max() {
                return age - longest;
            }
        }
        self.latest.len()
    }

    /// Finds for each token the longest end of the window that it followed before, with the
    /// Z-algorithm on the reversed window, which is linear.
    fn find_repeats(&mut self, limit: usize) {
        let (latest, lengths) = (&self.latest, &mut self.lengths);
        lengths.clear();
        lengths.resize(latest.len(), 0);
        self.repeats.clear();
        // The match that reaches furthest: from `left` to before `right`.
        let (mut left, mut right) = (0, 0);
        for at in 1..latest.len() {
            let mut length = 0;
            if at < right {
                length = lengths[at - left].min(right - at);
            }
            while at + length < latest.len() && latest[length] == latest[at + length] {
                length += 1;
            }
            lengths[at] = length;
            if at + length > right {
                (left, right) = (at, at + length);
            }
            let length = length.min(limit);
            if length >= self.allowed {
                let longest = self.repeats.entry(latest[at - 1]).or_default();
                *longest = length.max(*longest);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is subtracted from each of five logits.
    fn penalties(multiplier: f32, allowed: u32, seen: &[u32], breakers: &[&[u32]]) -> Vec<f32> {
        let options = SamplerOptions {
            dry_multiplier: multiplier,
            dry_base: 1.1,
            dry_allowed_length: allowed,
            ..SamplerOptions::default()
        };
        let mut dry = Dry::without_breakers(&options).unwrap();
        for breaker in breakers {
            dry.breakers.entry(breaker[0]).or_default().push(breaker[1..].to_vec());
        }
        let mut history = History::new(dry.window);
        seen.iter().for_each(|&id| history.push(id));
        let mut logits = vec![0.0; 5];
        dry.apply(&history, &mut logits);
        logits.iter().map(|logit| 0.0 - logit).collect()
    }

    #[test]
    fn a_repetition_costs_what_its_length_says() {
        assert_eq!(penalties(1.0, 2, &[0, 1], &[]), [0.0; 5]);
        // `0 1` came before, and 2 after it: 1.1 to the power of 0.
        assert_eq!(penalties(1.0, 2, &[0, 1, 2, 0, 1], &[]), [0.0, 0.0, 1.0, 0.0, 0.0]);
        assert_eq!(penalties(2.0, 2, &[0, 1, 2, 0, 1], &[]), [0.0, 0.0, 2.0, 0.0, 0.0]);
        assert_eq!(penalties(1.0, 4, &[0, 1, 2, 3, 4, 0, 1], &[]), [0.0; 5]);
        let longer = penalties(1.0, 2, &[3, 0, 1, 2, 3, 0, 1], &[]);
        assert!((longer[2] - 1.1).abs() < 1e-6, "{longer:?}");
    }

    #[test]
    fn repetitions_end_at_breakers() {
        let seen = [0, 1, 3, 0, 1];
        assert_eq!(penalties(1.0, 2, &seen, &[]), [0.0, 0.0, 0.0, 1.0, 0.0]);
        // The token itself is a breaker.
        assert_eq!(penalties(1.0, 2, &seen, &[&[3]]), [0.0; 5]);
        // A breaker inside the repetition leaves one token of it.
        assert_eq!(penalties(1.0, 2, &seen, &[&[0]]), [0.0; 5]);
        assert_eq!(penalties(1.0, 1, &seen, &[&[0]]), [0.0, 0.0, 0.0, 1.0, 0.0]);
        // Of two tokens, which stand in the repetition, so that nothing is left.
        assert_eq!(penalties(1.0, 2, &seen, &[&[0, 1]]), [0.0; 5]);
        assert_eq!(penalties(1.0, 2, &seen, &[&[0, 2]]), [0.0, 0.0, 0.0, 1.0, 0.0]);
    }

    #[test]
    fn the_penalty_stays_finite() {
        let seen = vec![1; 64];
        let found = penalties(1.0, 1, &seen, &[]);
        assert!(found[1] > 100.0 && found[1].is_finite(), "{found:?}");
    }
}
