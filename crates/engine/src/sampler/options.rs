//! What can be chosen about sampling.

use bodkin_gguf::{Metadata, Value};

use crate::error::{Error, Result};

/// The options of a [`super::Sampler`]. The defaults are llama.cpp's.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplerOptions {
    /// What logits are divided by; at 0 or below the best token is taken.
    pub temperature: f32,
    /// Keeps this many tokens with the largest logits; 0 keeps all.
    pub top_k: u32,
    /// Only the best tokens that have this probability together; 1 is all.
    pub top_p: f32,
    /// Only tokens with this share of the best one's probability; 0 is all.
    pub min_p: f32,
    /// Only the most typical tokens that have this probability together; 1 is all.
    pub typical_p: f32,
    /// Keeps tokens within this many standard deviations of the largest logit; 0 or below keeps
    /// all.
    pub top_n_sigma: f32,
    /// How many of the latest tokens are penalised; below 0 is all.
    pub repeat_last_n: i32,
    /// What logits of tokens that were there are divided by; 1 is off.
    pub repeat_penalty: f32,
    /// What is subtracted for each time that a token was there; 0 is off.
    pub frequency_penalty: f32,
    /// What is subtracted if a token was there; 0 is off.
    pub presence_penalty: f32,
    /// DRY's penalty for the shortest repetition; 0 is off.
    pub dry_multiplier: f32,
    /// What DRY's penalty is multiplied by for each further token; below 1 is off.
    pub dry_base: f32,
    /// Tokens that may be repeated for nothing.
    pub dry_allowed_length: u32,
    /// How many of the latest tokens DRY looks at; below 0 is all.
    pub dry_penalty_last_n: i32,
    /// Texts that no repetition goes across.
    pub dry_sequence_breakers: Vec<String>,
    /// How often XTC happens; 0 is never.
    pub xtc_probability: f32,
    /// What probability makes a token a top choice; above 0.5 is off.
    pub xtc_threshold: f32,
    /// 2 for mirostat 2, which then takes the place of all other steps but temperature; 0 is off.
    pub mirostat: u32,
    /// Mirostat's target, in bits.
    pub mirostat_tau: f32,
    /// How fast mirostat gets there.
    pub mirostat_eta: f32,
    /// What is added to the logits of single tokens.
    pub logit_bias: Vec<(u32, f32)>,
    /// The start of the random numbers; another one each time without it.
    pub seed: Option<u64>,
    /// The fewest tokens that a step may leave.
    pub min_keep: usize,
}

impl Default for SamplerOptions {
    fn default() -> SamplerOptions {
        SamplerOptions {
            temperature: 0.8,
            top_k: 40,
            top_p: 0.95,
            min_p: 0.05,
            typical_p: 1.0,
            top_n_sigma: -1.0,
            repeat_last_n: 64,
            repeat_penalty: 1.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            dry_multiplier: 0.0,
            dry_base: 1.75,
            dry_allowed_length: 2,
            dry_penalty_last_n: 64,
            dry_sequence_breakers: ["\n", ":", "\"", "*"].map(str::to_owned).to_vec(),
            xtc_probability: 0.0,
            xtc_threshold: 0.1,
            mirostat: 0,
            mirostat_tau: 5.0,
            mirostat_eta: 0.1,
            logit_bias: Vec::new(),
            seed: None,
            min_keep: 0,
        }
    }
}

impl SamplerOptions {
    /// The defaults, with what a model's metadata recommends (`general.sampling.*`). Values that
    /// make no sense are found by [`super::Sampler::new`].
    pub fn from_metadata(metadata: &Metadata) -> Result<SamplerOptions> {
        let mut options = SamplerOptions::default();
        let key = |name: &str| format!("general.sampling.{name}");
        let floats = [
            ("temp", &mut options.temperature),
            ("top_p", &mut options.top_p),
            ("min_p", &mut options.min_p),
            ("xtc_probability", &mut options.xtc_probability),
            ("xtc_threshold", &mut options.xtc_threshold),
            ("penalty_repeat", &mut options.repeat_penalty),
            ("mirostat_tau", &mut options.mirostat_tau),
            ("mirostat_eta", &mut options.mirostat_eta),
        ];
        for (name, option) in floats {
            *option = metadata.f32(&key(name))?.unwrap_or(*option);
        }
        // Below zero is written for "all" and "off".
        if let Some(Value::I32(top_k)) = metadata.get(&key("top_k")) {
            options.top_k = u32::try_from(*top_k).unwrap_or(0);
        } else {
            options.top_k = metadata.u32(&key("top_k"))?.unwrap_or(options.top_k);
        }
        if let Some(Value::I32(last_n)) = metadata.get(&key("penalty_last_n")) {
            options.repeat_last_n = *last_n;
        } else if let Some(last_n) = metadata.u32(&key("penalty_last_n"))? {
            options.repeat_last_n = i32::try_from(last_n).unwrap_or(-1);
        }
        options.mirostat = metadata.u32(&key("mirostat"))?.unwrap_or(options.mirostat);
        Ok(options)
    }

    /// Whether the best logit is all that matters.
    pub(super) fn is_greedy(&self) -> bool {
        self.temperature <= 0.0 && self.typical_p >= 1.0 && self.xtc_probability <= 0.0
    }

    /// Checks the options against each other and a vocabulary of `tokens`.
    pub(super) fn check(&self, tokens: usize) -> Result<()> {
        let shares = [
            ("top_p", self.top_p),
            ("min_p", self.min_p),
            ("typical_p", self.typical_p),
            ("xtc_probability", self.xtc_probability),
            ("xtc_threshold", self.xtc_threshold),
        ];
        for (option, value) in shares {
            expect((0.0..=1.0).contains(&value), option, "a number from 0 to 1", value)?;
        }
        let numbers = [
            ("temperature", self.temperature),
            ("top_n_sigma", self.top_n_sigma),
            ("frequency_penalty", self.frequency_penalty),
            ("presence_penalty", self.presence_penalty),
        ];
        for (option, value) in numbers {
            expect(value.is_finite(), option, "a number", value)?;
        }
        let not_negative = [
            ("dry_multiplier", self.dry_multiplier),
            ("dry_base", self.dry_base),
            ("mirostat_tau", self.mirostat_tau),
            ("mirostat_eta", self.mirostat_eta),
        ];
        for (option, value) in not_negative {
            let is_valid = value.is_finite() && value >= 0.0;
            expect(is_valid, option, "a number not below 0", value)?;
        }
        let is_valid = self.repeat_penalty.is_finite() && self.repeat_penalty > 0.0;
        expect(is_valid, "repeat_penalty", "a number above 0", self.repeat_penalty)?;
        expect(self.repeat_last_n >= -1, "repeat_last_n", "-1 or more", self.repeat_last_n)?;
        expect(matches!(self.mirostat, 0 | 2), "mirostat", "0 or 2", self.mirostat)?;
        for &(id, bias) in &self.logit_bias {
            expect((id as usize) < tokens, "logit_bias", "a token of the vocabulary", id)?;
            expect(bias < f32::INFINITY, "logit_bias", "a number or -inf", bias)?;
        }
        Ok(())
    }
}

fn expect(
    is_valid: bool,
    option: &'static str,
    expected: &'static str,
    found: impl std::fmt::Display,
) -> Result<()> {
    match is_valid {
        true => Ok(()),
        false => Err(Error::Sampling { option, expected, found: found.to_string() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_can_recommend() {
        let mut metadata = Metadata::new();
        assert_eq!(SamplerOptions::from_metadata(&metadata).unwrap(), SamplerOptions::default());
        metadata.insert("general.sampling.temp", Value::F32(0.6));
        metadata.insert("general.sampling.top_k", Value::I32(-1));
        metadata.insert("general.sampling.penalty_last_n", Value::I32(-1));
        metadata.insert("general.sampling.top_p", Value::F64(0.9));
        let options = SamplerOptions::from_metadata(&metadata).unwrap();
        assert_eq!((options.temperature, options.top_k, options.repeat_last_n), (0.6, 0, -1));
        assert_eq!(options.top_p, 0.9);
        metadata.insert("general.sampling.min_p", Value::Bool(true));
        assert!(SamplerOptions::from_metadata(&metadata).is_err());
    }

    #[test]
    fn nonsense_is_named() {
        let error = |options: SamplerOptions| options.check(10).unwrap_err().to_string();
        let default = SamplerOptions::default;
        assert!(default().check(10).is_ok());
        assert!(error(SamplerOptions { top_p: -0.1, ..default() }).contains("top_p"));
        assert!(error(SamplerOptions { min_p: f32::NAN, ..default() }).contains("NaN"));
        assert!(error(SamplerOptions { temperature: f32::INFINITY, ..default() }).contains("inf"));
        assert!(error(SamplerOptions { repeat_penalty: 0.0, ..default() }).contains("above 0"));
        assert!(error(SamplerOptions { mirostat: 1, ..default() }).contains("mirostat"));
        let bias = |bias| SamplerOptions { logit_bias: vec![bias], ..default() };
        assert!(error(bias((10, 0.0))).contains("vocabulary"));
        assert!(error(bias((1, f32::NAN))).contains("logit_bias"));
        assert!(bias((1, f32::NEG_INFINITY)).check(10).is_ok());
    }
}
