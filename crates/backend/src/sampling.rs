//! How a token is sampled from a row of logits, as data that a device can follow, and the reference
//! implementation. [`SamplingParams`] covers the common options; the engine builds rarer samplers
//! from the same [`Candidates`]. This file must not know the random generator, nor the tokenizer.

use std::collections::VecDeque;

use crate::candidates::Candidates;

/// Penalties for tokens of the window: repetition (Keskar et al. 2019), frequency and presence
/// (OpenAI's). Tokens of the prompt count in all three, as in llama.cpp; vLLM counts only generated
/// tokens for the last two.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Penalties {
    /// Divides the positive and multiplies the other logits of tokens in the window; 1 is off.
    pub repeat: f32,
    /// Subtracted once for each occurrence of the token; 0 is off.
    pub frequency: f32,
    /// Subtracted once if the token occurred; 0 is off.
    pub presence: f32,
}

impl Penalties {
    /// Penalties that change nothing.
    pub const NONE: Penalties = Penalties { repeat: 1.0, frequency: 0.0, presence: 0.0 };

    /// The penalised logit of a token that occurred `count` times, at least once.
    pub fn apply(&self, logit: f32, count: u32) -> f32 {
        // Dividing a negative logit would make the token likelier.
        let logit = if logit <= 0.0 { logit * self.repeat } else { logit / self.repeat };
        logit - (count as f32 * self.frequency + self.presence)
    }
}

/// How one row's tokens are sampled, in this order: biases, penalties, top-k, top-p, min-p,
/// temperature, sample.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// Divisor of the logits. At 0 sampling is greedy: the argmax, and `top_k`, `top_p` and `min_p`
    /// have no effect.
    pub temperature: f32,
    /// Keeps this many tokens with the largest logits; 0 keeps all.
    pub top_k: usize,
    /// Keeps the most probable tokens whose probabilities add up to this; 1 keeps all.
    pub top_p: f32,
    /// Keeps tokens with at least this fraction of the most probable token's probability; 0 keeps
    /// all.
    pub min_p: f32,
    /// Token ids, each at most once, and what is added to their logits.
    pub biases: Vec<(u32, f32)>,
    /// Applied to the tokens of the penalty window.
    pub penalties: Penalties,
    /// How many of the latest tokens are penalised; 0 is none, `usize::MAX` all.
    pub penalty_window: usize,
    /// The latest tokens before the first sampled one, oldest first, up to and including the token
    /// that the first step reads; at most `penalty_window` of them.
    pub history: Vec<u32>,
    /// One uniform random number per step, in units of 2^-32; empty where sampling is greedy.
    pub uniforms: Vec<u32>,
}

impl SamplingParams {
    /// Greedy sampling: the argmax of the logits.
    pub fn greedy() -> SamplingParams {
        SamplingParams {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            biases: Vec::new(),
            penalties: Penalties::NONE,
            penalty_window: 0,
            history: Vec::new(),
            uniforms: Vec::new(),
        }
    }

    /// Whether logits are changed before a token is sampled.
    pub fn adjusts_logits(&self) -> bool {
        !self.biases.is_empty() || self.penalty_window > 0
    }
}

/// Samples the tokens of one row on the host: the definition of [`SamplingParams`].
#[derive(Clone, Debug, Default)]
pub struct ReferenceSampler {
    history: VecDeque<u32>,
    step: usize,
    /// The tokens of the penalty window in order of their ids.
    sorted_window: Vec<u32>,
}

impl ReferenceSampler {
    /// Begins a call of several steps: takes its history, and its first random number is next.
    pub fn begin(&mut self, params: &SamplingParams) {
        self.step = 0;
        self.history.clear();
        self.history.extend(&params.history);
    }

    /// Samples the next token and appends it to the history. Biases and penalties change `logits`
    /// in place; `candidates` is scratch.
    ///
    /// # Panics
    /// If sampling is not greedy and there is no random number for this step.
    pub fn sample(
        &mut self,
        params: &SamplingParams,
        logits: &mut [f32],
        candidates: &mut Candidates,
    ) -> u32 {
        self.adjust(params, logits);
        let token = if params.temperature <= 0.0 {
            argmax(logits)
        } else {
            candidates.fill(logits, params.top_k);
            candidates.top_p(params.top_p, 0);
            candidates.min_p(params.min_p, 0);
            candidates.temperature(params.temperature);
            candidates.sample(f64::from(params.uniforms[self.step]) / 4_294_967_296.0).0
        };
        self.step += 1;
        self.history.push_back(token);
        token
    }

    fn adjust(&mut self, params: &SamplingParams, logits: &mut [f32]) {
        for &(id, bias) in &params.biases {
            if let Some(logit) = logits.get_mut(id as usize) {
                *logit += bias;
            }
        }
        let passed = self.history.len().saturating_sub(params.penalty_window);
        self.history.drain(..passed);
        self.sorted_window.clear();
        self.sorted_window.extend(&self.history);
        self.sorted_window.sort_unstable();
        for same in self.sorted_window.chunk_by(|a, b| a == b) {
            if let Some(logit) = logits.get_mut(same[0] as usize) {
                *logit = params.penalties.apply(*logit, same.len() as u32);
            }
        }
    }
}

/// Whether a token can be sampled from a row of logits: it has no NaN or +inf, and at least one
/// finite logit. One vectorised pass.
pub fn are_samplable(logits: &[f32]) -> bool {
    let below_inf = logits.iter().map(|&logit| u32::from(logit < f32::INFINITY)).sum::<u32>();
    below_inf as usize == logits.len() && logits.iter().any(|logit| logit.is_finite())
}

/// The index of the largest logit, the first of equals. NaN is never the largest; if all are NaN
/// the index is 0.
pub fn argmax(logits: &[f32]) -> u32 {
    // Independent lanes let the compiler use vectors.
    const LANES: usize = 16;
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let (chunks, rest) = logits.as_chunks::<LANES>();
    for chunk in chunks {
        for (lane, &logit) in lanes.iter_mut().zip(chunk) {
            *lane = if logit > *lane { logit } else { *lane };
        }
    }
    let max = lanes.iter().chain(rest).copied().fold(f32::NEG_INFINITY, f32::max);
    logits.iter().position(|&logit| logit == max).unwrap_or(0) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_sampled_from_nan_and_infinity() {
        assert!(are_samplable(&[0.5, f32::NEG_INFINITY, f32::MAX]));
        assert!(!are_samplable(&[0.5, f32::NEG_INFINITY, f32::INFINITY]));
        assert!(!are_samplable(&[1.0, f32::NAN, 0.0]));
        assert!(!are_samplable(&[f32::NEG_INFINITY; 3]));
    }

    #[test]
    fn argmax_is_the_first_of_the_largest() {
        assert_eq!(argmax(&[0.5, f32::NAN, 2.0, -1.0, 2.0]), 2);
        assert_eq!(argmax(&[f32::NAN, f32::NEG_INFINITY]), 1);
        assert_eq!(argmax(&[f32::NAN]), 0);
        // Beyond one vector, and with equals in several.
        let mut many = [-1.0; 40];
        (many[3], many[21], many[22], many[39]) = (f32::NAN, 4.0, 4.0, 4.0);
        assert_eq!(argmax(&many), 21);
        many[39] = 5.0;
        assert_eq!(argmax(&many), 39);
    }
}
