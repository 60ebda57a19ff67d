//! Samples the next token from its logits: a chain of samplers in llama.cpp's order, with its
//! defaults. It must not know models or requests.
//!
//! Logit bias, penalties and DRY change single logits, and top-n-sigma masks some. Top-k, typical,
//! top-p, min-p and XTC truncate the candidates. Temperature and a random number select one of
//! them. Buffers are reused from token to token. [`Candidates`] belongs to the backend crate:
//! backends sample the options that [`SamplingParams`] covers.

mod dry;
mod history;
mod options;
mod penalties;
mod random;

pub use self::options::SamplerOptions;

use bodkin_backend::candidates::{Candidates, top_n_sigma};
use bodkin_backend::{SamplingParams, are_samplable, argmax};

use self::dry::Dry;
use self::history::History;
use self::penalties::PenaltyState;
use self::random::Random;
use crate::error::Result;
use crate::tokenizer::Tokenizer;

/// Samples the tokens of one sequence. What advances it:
///
/// | | random numbers | history and penalty counts | mirostat |
/// | --- | --- | --- | --- |
/// | `sample` | yes, unless greedy | no | yes |
/// | `accept` | no | yes | no |
/// | `accept_sampled` | one, unless greedy | yes | no |
/// | `params` | no | no | no |
#[derive(Debug)]
pub struct Sampler {
    options: SamplerOptions,
    penalties: Option<PenaltyState>,
    dry: Option<Dry>,
    history: History,
    /// Scratch: the logits after bias, penalties, DRY and top-n-sigma.
    adjusted: Vec<f32>,
    candidates: Candidates,
    random: Random,
    /// Mirostat's current limit of surprise, in bits.
    max_surprise: f32,
}

impl Sampler {
    /// Checks the options and starts with an empty history. Fails if an option is out of range.
    pub fn new(options: SamplerOptions, tokenizer: &Tokenizer) -> Result<Sampler> {
        options.check(tokenizer.vocab_size())?;
        let dry = Dry::new(&options, tokenizer);
        Ok(Sampler::with_dry(options, dry))
    }

    fn with_dry(mut options: SamplerOptions, dry: Option<Dry>) -> Sampler {
        options.logit_bias = summed(&options.logit_bias);
        let penalties = PenaltyState::new(&options);
        let windows =
            [penalties.as_ref().map_or(0, |p| p.window), dry.as_ref().map_or(0, |dry| dry.window)];
        Sampler {
            penalties,
            dry,
            history: History::new(windows.into_iter().max().unwrap_or(0)),
            adjusted: Vec::new(),
            candidates: Candidates::default(),
            random: Random::new(options.seed.unwrap_or_else(random::any_seed)),
            max_surprise: 2.0 * options.mirostat_tau,
            options,
        }
    }

    /// Samples a token from the logits of the whole vocabulary. Does not [`Sampler::accept`] it.
    /// None if one is NaN or +inf, or all are -inf.
    pub fn sample(&mut self, logits: &[f32]) -> Option<u32> {
        if !are_samplable(logits) {
            return None;
        }
        let mut adjusted = std::mem::take(&mut self.adjusted);
        let logits = match self.adjust(logits, &mut adjusted) {
            true => adjusted.as_slice(),
            false => logits,
        };
        let token = if self.options.mirostat == 2 {
            self.sample_mirostat(logits)
        } else if self.options.is_greedy() {
            argmax(logits)
        } else {
            self.truncate(logits);
            self.candidates.temperature(self.options.temperature);
            self.candidates.sample(self.random.unit()).0
        };
        self.adjusted = adjusted;
        Some(token)
    }

    /// Whether a backend can sample the next tokens with [`Sampler::params`].
    pub(crate) fn can_run_on_backend(&self) -> bool {
        let options = &self.options;
        let is_long = |p: &PenaltyState| self.history.latest(p.window).count() > MAX_HISTORY;
        options.mirostat == 0
            && self.dry.is_none()
            && options.top_n_sigma <= 0.0
            && options.typical_p >= 1.0
            && options.xtc_probability <= 0.0
            && options.min_keep <= 1
            && !self.penalties.as_ref().is_some_and(is_long)
    }

    /// The parameters with which a backend samples the next `steps` tokens, if it can.
    /// [`Sampler::accept_sampled`] advances the sampler.
    pub(crate) fn params(&self, steps: usize) -> SamplingParams {
        let options = &self.options;
        let mut params = SamplingParams {
            temperature: options.temperature.max(0.0),
            top_k: options.top_k as usize,
            top_p: options.top_p,
            min_p: options.min_p,
            ..SamplingParams::greedy()
        };
        params.biases.clone_from(&options.logit_bias);
        if let Some(penalties) = &self.penalties {
            params.penalties = penalties.penalties;
            params.penalty_window = penalties.window;
            params.history.extend(self.history.latest(penalties.window));
            params.history.reverse();
        }
        if !options.is_greedy() {
            let mut random = self.random.clone();
            params.uniforms.extend((0..steps).map(|_| random.next()));
        }
        params
    }

    /// Adds a token that a backend sampled with [`Sampler::params`] to the history.
    pub(crate) fn accept_sampled(&mut self, id: u32) {
        if !self.options.is_greedy() {
            self.random.next();
        }
        self.accept(id);
    }

    /// Adds a token to the history, from the prompt or sampled.
    pub fn accept(&mut self, id: u32) {
        self.history.push(id);
        if let Some(penalties) = &mut self.penalties {
            penalties.accept(&self.history);
        }
    }

    /// Copies the logits to `adjusted` and applies bias, penalties, DRY and top-n-sigma. Returns
    /// false, without a copy, if all of them are off.
    fn adjust(&mut self, logits: &[f32], adjusted: &mut Vec<f32>) -> bool {
        let options = &self.options;
        // With mirostat, llama.cpp's chain has none of the other steps.
        let uses_mirostat = options.mirostat != 0;
        let uses_top_n_sigma = !uses_mirostat && options.top_n_sigma > 0.0;
        let penalties = self.penalties.as_ref().filter(|_| !uses_mirostat);
        let dry = self.dry.as_mut().filter(|_| !uses_mirostat);
        let has_biases = !options.logit_bias.is_empty();
        if !has_biases && penalties.is_none() && dry.is_none() && !uses_top_n_sigma {
            return false;
        }
        adjusted.clear();
        adjusted.extend_from_slice(logits);
        for &(id, bias) in &options.logit_bias {
            if let Some(logit) = adjusted.get_mut(id as usize) {
                *logit += bias;
            }
        }
        if let Some(penalties) = penalties {
            penalties.apply(adjusted);
        }
        if let Some(dry) = dry {
            dry.apply(&self.history, adjusted);
        }
        if uses_top_n_sigma {
            top_n_sigma(adjusted, options.top_n_sigma);
        }
        true
    }

    /// Applies the truncation samplers, from top-k to XTC.
    fn truncate(&mut self, logits: &[f32]) {
        let (options, candidates) = (&self.options, &mut self.candidates);
        candidates.fill(logits, options.top_k as usize);
        candidates.typical(options.typical_p, options.min_keep);
        candidates.top_p(options.top_p, options.min_keep);
        candidates.min_p(options.min_p, options.min_keep);
        let (probability, threshold) = (options.xtc_probability, options.xtc_threshold);
        let xtc_applies = probability > 0.0 && threshold <= 0.5 && candidates.count() > 1;
        if xtc_applies && self.random.unit() <= f64::from(probability) {
            candidates.xtc(threshold, options.min_keep);
        }
    }

    /// Mirostat 2 (Basu et al. 2021): samples from the tokens whose surprise is below a limit, and
    /// moves the limit so that the mean surprise is `tau`.
    fn sample_mirostat(&mut self, logits: &[f32]) -> u32 {
        if self.options.temperature <= 0.0 {
            return argmax(logits);
        }
        self.candidates.fill(logits, 0);
        self.candidates.temperature(self.options.temperature);
        self.candidates.limit_surprise(self.max_surprise);
        let (token, p) = self.candidates.sample(self.random.unit());
        let error = -p.log2() - self.options.mirostat_tau;
        self.max_surprise -= self.options.mirostat_eta * error;
        token
    }
}

/// The longest history that parameters hold. Beyond it, counting tokens as they are accepted is
/// cheaper than sorting the window in each step.
const MAX_HISTORY: usize = 1024;

/// Sums the biases of each token.
fn summed(biases: &[(u32, f32)]) -> Vec<(u32, f32)> {
    let mut sums: Vec<(u32, f32)> = Vec::new();
    for &(id, bias) in biases {
        match sums.iter_mut().find(|(other, _)| *other == id) {
            Some((_, sum)) => *sum += bias,
            None => sums.push((id, bias)),
        }
    }
    sums
}

#[cfg(test)]
mod tests {
    use bodkin_backend::ReferenceSampler;

    use super::*;

    /// The fraction of 20000 samples that each token gets.
    fn shares(options: &SamplerOptions, p: &[f32], accepted: &[u32]) -> Vec<f32> {
        let mut sampler = Sampler::with_dry(options.clone(), None);
        accepted.iter().for_each(|&id| sampler.accept(id));
        let logits: Vec<f32> = p.iter().map(|p| p.ln()).collect();
        let mut counts = vec![0.0; p.len()];
        for _ in 0..20_000 {
            counts[sampler.sample(&logits).unwrap() as usize] += 1.0 / 20_000.0;
        }
        counts
    }

    fn assert_close(found: &[f32], expected: &[f32]) {
        let is_close = found.iter().zip(expected).all(|(a, b)| (a - b).abs() < 0.02);
        assert!(is_close && found.len() == expected.len(), "{found:?} {expected:?}");
    }

    fn open() -> SamplerOptions {
        SamplerOptions {
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            seed: Some(1),
            ..SamplerOptions::default()
        }
    }

    #[test]
    fn samples_follow_the_probabilities() {
        let p = [0.1, 0.2, 0.3, 0.4];
        assert_close(&shares(&open(), &p, &[]), &p);
        // Squared and normalised: half the temperature.
        let half = SamplerOptions { temperature: 0.5, ..open() };
        assert_close(&shares(&half, &p, &[]), &[0.0333, 0.1333, 0.3, 0.5333]);
        let greedy = SamplerOptions { temperature: 0.0, ..open() };
        assert_eq!(shares(&greedy, &p, &[])[..3], [0.0; 3]);
        let biased = SamplerOptions { logit_bias: vec![(3, f32::NEG_INFINITY)], ..open() };
        assert_close(&shares(&biased, &p, &[]), &[0.1667, 0.3333, 0.5, 0.0]);
    }

    #[test]
    fn the_chain_truncates_in_order() {
        let p = [0.1, 0.2, 0.3, 0.4];
        let three = SamplerOptions { top_k: 3, ..open() };
        assert_close(&shares(&three, &p, &[]), &[0.0, 0.2222, 0.3333, 0.4444]);
        // Of the three, the best two have 7/9 of the probability.
        let both = SamplerOptions { top_k: 3, top_p: 0.75, ..open() };
        assert_close(&shares(&both, &p, &[]), &[0.0, 0.0, 0.4286, 0.5714]);
        let sigma = SamplerOptions { top_n_sigma: 1.0, ..open() };
        assert_close(&shares(&sigma, &p, &[]), &[0.0, 0.0, 0.4286, 0.5714]);
    }

    #[test]
    fn penalties_see_what_was_accepted() {
        let p = [0.2; 5];
        let repeat = SamplerOptions { repeat_penalty: 50.0, ..open() };
        assert_close(&shares(&repeat, &p, &[0]), &[0.0, 0.25, 0.25, 0.25, 0.25]);
        let short = SamplerOptions { repeat_last_n: 2, ..repeat };
        assert_close(&shares(&short, &p, &[0, 1, 2]), &[0.3333, 0.0, 0.0, 0.3333, 0.3333]);
    }

    #[test]
    fn the_same_seed_gives_the_same_tokens() {
        let p = [0.1, 0.2, 0.3, 0.4];
        let run = |seed| {
            let options = SamplerOptions { seed: Some(seed), ..open() };
            let mut sampler = Sampler::with_dry(options, None);
            let logits: Vec<f32> = p.iter().map(|p: &f32| p.ln()).collect();
            (0..64).map(|_| sampler.sample(&logits).unwrap()).collect::<Vec<u32>>()
        };
        assert_eq!(run(7), run(7));
        assert_ne!(run(7), run(8));
    }

    #[test]
    fn mirostat_keeps_the_surprise_near_its_target() {
        let p: Vec<f32> = (1..=1000).map(|rank| 1.0 / rank as f32).collect();
        let sum: f32 = p.iter().sum();
        let logits: Vec<f32> = p.iter().map(|p| p.ln()).collect();
        let options = SamplerOptions { mirostat: 2, mirostat_tau: 3.0, ..open() };
        let mut sampler = Sampler::with_dry(options, None);
        let tokens: Vec<u32> = (0..4000).map(|_| sampler.sample(&logits).unwrap()).collect();
        // Far into the run the limit has settled well below the whole vocabulary.
        let late = &tokens[2000..];
        let highest = late.iter().max().copied().unwrap_or(0);
        assert!((4..200).contains(&highest), "{highest}");
        assert!(sampler.max_surprise > -(p[0] / sum).log2(), "{}", sampler.max_surprise);
    }

    #[test]
    fn parameters_give_the_tokens_of_the_sampler() {
        let mut logits = Vec::new();
        let mut random = Random::new(5);
        (0..300).for_each(|_| logits.push(random.unit() as f32 * 9.0));
        let penalised = SamplerOptions {
            repeat_penalty: 1.3,
            frequency_penalty: 0.4,
            presence_penalty: 0.2,
            repeat_last_n: 6,
            logit_bias: vec![(3, 4.0), (7, 2.0), (3, 3.0), (9, f32::NEG_INFINITY)],
            seed: Some(3),
            ..SamplerOptions::default()
        };
        let greedy = SamplerOptions { temperature: -1.0, ..penalised.clone() };
        let usual = SamplerOptions { seed: Some(9), ..SamplerOptions::default() };
        for options in [usual, open(), penalised, greedy] {
            let new = || {
                let mut sampler = Sampler::with_dry(options.clone(), None);
                (0..9).for_each(|id| sampler.accept(id));
                sampler
            };
            let mut plain = new();
            let plain: Vec<u32> = (0..40)
                .map(|_| {
                    let id = plain.sample(&logits).unwrap();
                    plain.accept(id);
                    id
                })
                .collect();
            let mut ruled = new();
            let mut found = Vec::new();
            while found.len() < 40 {
                let params = ruled.params(16);
                let mut sampler = ReferenceSampler::default();
                sampler.begin(&params);
                // Fewer steps are taken than the parameters are for.
                for _ in 0..8 {
                    let mut logits = logits.clone();
                    let id = sampler.sample(&params, &mut logits, &mut Candidates::default());
                    ruled.accept_sampled(id);
                    found.push(id);
                }
            }
            assert_eq!(found, plain, "{options:?}");
        }
        let typical = SamplerOptions { typical_p: 0.9, ..open() };
        assert!(!Sampler::with_dry(typical, None).can_run_on_backend());
    }

    #[test]
    fn nothing_is_sampled_from_logits_that_are_not_finite() {
        for options in [open(), SamplerOptions::default(), SamplerOptions { mirostat: 2, ..open() }]
        {
            let mut sampler = Sampler::with_dry(options, None);
            assert_eq!(sampler.sample(&[f32::NAN, f32::NAN]), None);
            assert_eq!(sampler.sample(&[f32::NEG_INFINITY; 3]), None);
            assert_eq!(sampler.sample(&[f32::NAN, 1.0, f32::NEG_INFINITY]), None);
            assert_eq!(sampler.sample(&[0.0, f32::INFINITY]), None);
            assert_eq!(sampler.sample(&[1.0, f32::NEG_INFINITY]), Some(0));
        }
    }
}
