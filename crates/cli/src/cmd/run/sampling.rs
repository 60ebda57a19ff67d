//! The flags of sampling. The defaults are the model file's recommendations, or else llama.cpp's.
//! Aliases are the names that llama.cpp's tools use.

use anyhow::{Context, Result, anyhow, bail};
use bodkin_engine::SamplerOptions;

/// Sampling flags.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct Sampling {
    /// Temperature; 0 is greedy
    #[arg(long, alias = "temp", value_name = "T", allow_negative_numbers = true)]
    temperature: Option<f32>,
    /// Sample from the K most likely tokens; 0 for all
    #[arg(long, value_name = "K", allow_negative_numbers = true)]
    top_k: Option<u32>,
    /// Nucleus sampling: cumulative probability P
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    top_p: Option<f32>,
    /// Minimum probability relative to the most likely token
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    min_p: Option<f32>,
    /// Locally typical sampling: cumulative probability P
    #[arg(long, alias = "typical-p", value_name = "P", allow_negative_numbers = true)]
    typical: Option<f32>,
    /// Logits within N standard deviations of the maximum
    #[arg(long, alias = "top-nsigma", value_name = "N", allow_negative_numbers = true)]
    top_n_sigma: Option<f32>,
    /// Repeat window: last N tokens to penalize; -1 for all
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    repeat_last_n: Option<i32>,
    /// Repetition penalty: divides logits of repeated tokens
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    repeat_penalty: Option<f32>,
    /// Frequency penalty: subtracts X for each occurrence
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    frequency_penalty: Option<f32>,
    /// Presence penalty: subtracts X from tokens that occurred
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    presence_penalty: Option<f32>,
    /// DRY multiplier: penalty on repeated sequences
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    dry_multiplier: Option<f32>,
    /// DRY base: growth of the penalty with each repeated token
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    dry_base: Option<f32>,
    /// DRY allowed length of a repetition
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    dry_allowed_length: Option<u32>,
    /// XTC probability: chance to exclude top choices
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    xtc_probability: Option<f32>,
    /// XTC threshold: minimum probability of a top choice
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    xtc_threshold: Option<f32>,
    /// Mirostat version: 2, or 0 for none
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    mirostat: Option<u32>,
    /// Mirostat target entropy (tau)
    #[arg(long, alias = "mirostat-ent", value_name = "X", allow_negative_numbers = true)]
    mirostat_tau: Option<f32>,
    /// Mirostat learning rate (eta)
    #[arg(long, alias = "mirostat-lr", value_name = "X", allow_negative_numbers = true)]
    mirostat_eta: Option<f32>,
    /// Add X to the logit of a token (may be repeated)
    #[arg(short, long, value_name = "ID+X or ID-X")]
    logit_bias: Vec<String>,
    /// Random seed; -1 for a random one [default: -1]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = seed)]
    seed: Option<Seed>,
}

/// A random seed in words.
const RANDOM: &str = "random";
/// No value of a flag that may be repeated, for `/set`.
pub(super) const EMPTY: &str = "\"\"";

/// A seed; none for a random one.
#[derive(Clone, Copy, Debug)]
struct Seed(Option<u64>);

/// Parses a [`Seed`]; a random one also as [`values`] has it.
fn seed(text: &str) -> Result<Seed, String> {
    match text {
        "-1" | RANDOM => Ok(Seed(None)),
        _ => match text.parse() {
            Ok(seed) => Ok(Seed(Some(seed))),
            Err(_) => Err("expected a number of 0 or more, or -1".to_owned()),
        },
    }
}

impl Sampling {
    /// Takes all logit biases back.
    pub(super) fn clear_biases(&mut self) {
        self.logit_bias.clear();
    }

    /// The model file's recommendation, overridden by the flags that are given.
    pub(crate) fn options(&self, recommended: &SamplerOptions) -> Result<SamplerOptions> {
        let mut options = recommended.clone();
        set(&mut options.temperature, self.temperature);
        set(&mut options.top_k, self.top_k);
        set(&mut options.top_p, self.top_p);
        set(&mut options.min_p, self.min_p);
        set(&mut options.typical_p, self.typical);
        set(&mut options.top_n_sigma, self.top_n_sigma);
        set(&mut options.repeat_last_n, self.repeat_last_n);
        set(&mut options.repeat_penalty, self.repeat_penalty);
        set(&mut options.frequency_penalty, self.frequency_penalty);
        set(&mut options.presence_penalty, self.presence_penalty);
        set(&mut options.dry_multiplier, self.dry_multiplier);
        set(&mut options.dry_base, self.dry_base);
        set(&mut options.dry_allowed_length, self.dry_allowed_length);
        set(&mut options.xtc_probability, self.xtc_probability);
        set(&mut options.xtc_threshold, self.xtc_threshold);
        set(&mut options.mirostat, self.mirostat);
        set(&mut options.mirostat_tau, self.mirostat_tau);
        set(&mut options.mirostat_eta, self.mirostat_eta);
        options.seed = self.seed.map_or(options.seed, |seed| seed.0);
        for bias in &self.logit_bias {
            options.logit_bias.push(parse_bias(bias)?);
        }
        Ok(options)
    }
}

/// The values of the options by the names of their flags.
pub(crate) fn values(options: &SamplerOptions) -> [(&'static str, String); 20] {
    let seed = options.seed.map_or(RANDOM.to_owned(), |seed| seed.to_string());
    let bias = |(id, bias): &(u32, f32)| format!("{id}{bias:+}");
    [
        ("temperature", options.temperature.to_string()),
        ("top-k", options.top_k.to_string()),
        ("top-p", options.top_p.to_string()),
        ("min-p", options.min_p.to_string()),
        ("typical", options.typical_p.to_string()),
        ("top-n-sigma", options.top_n_sigma.to_string()),
        ("repeat-last-n", options.repeat_last_n.to_string()),
        ("repeat-penalty", options.repeat_penalty.to_string()),
        ("frequency-penalty", options.frequency_penalty.to_string()),
        ("presence-penalty", options.presence_penalty.to_string()),
        ("dry-multiplier", options.dry_multiplier.to_string()),
        ("dry-base", options.dry_base.to_string()),
        ("dry-allowed-length", options.dry_allowed_length.to_string()),
        ("xtc-probability", options.xtc_probability.to_string()),
        ("xtc-threshold", options.xtc_threshold.to_string()),
        ("mirostat", options.mirostat.to_string()),
        ("mirostat-tau", options.mirostat_tau.to_string()),
        ("mirostat-eta", options.mirostat_eta.to_string()),
        ("logit-bias", list(options.logit_bias.iter().map(bias))),
        ("seed", seed),
    ]
}

/// The values of a flag that may be repeated.
pub(super) fn list(values: impl Iterator<Item = String>) -> String {
    let values: Vec<String> = values.collect();
    if values.is_empty() { EMPTY.to_owned() } else { values.join(", ") }
}

/// An error of the sampler, by the flag unless the model's file recommends the value.
pub(crate) fn of_flag(
    error: bodkin_engine::Error,
    options: &SamplerOptions,
    recommended: &SamplerOptions,
) -> anyhow::Error {
    if let bodkin_engine::Error::Sampling { option, expected, found } = &error {
        let flag = option.replace("typical_p", "typical").replace('_', "-");
        let value = |of| values(of).into_iter().find(|(name, _)| *name == flag);
        if value(options) != value(recommended) {
            return anyhow!("--{flag}: expected {expected}, found {found}");
        }
    }
    error.into()
}

fn set<T>(option: &mut T, given: Option<T>) {
    if let Some(given) = given {
        *option = given;
    }
}

/// `15043+1.5` or `15043-inf`.
fn parse_bias(text: &str) -> Result<(u32, f32)> {
    let Some(at) = text.find(['+', '-']) else {
        bail!("--logit-bias: expected ID+X or ID-X, found `{text}`");
    };
    let wrong = || format!("--logit-bias: expected ID+X or ID-X, found `{text}`");
    let id = text[..at].parse().with_context(wrong)?;
    let bias: f32 = text[at..].parse().with_context(wrong)?;
    Ok((id, bias))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn biases() {
        assert_eq!(parse_bias("12+1.5").unwrap(), (12, 1.5));
        assert_eq!(parse_bias("12-inf").unwrap(), (12, f32::NEG_INFINITY));
        for bad in ["12", "+1", "a+1", "12+x"] {
            assert!(parse_bias(bad).is_err(), "{bad}");
        }
    }
}
