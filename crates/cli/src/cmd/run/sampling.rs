//! The flags that say how the next token is chosen. What is not given is the file's own
//! recommendation, or else the default of the field.

use anyhow::{Context, Result, bail};
use bodkin_engine::SamplerOptions;
use bodkin_gguf::Metadata;

/// Sampling flags.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct Sampling {
    /// 0 always takes the most likely token
    #[arg(long, value_name = "T", allow_negative_numbers = true)]
    temperature: Option<f32>,
    /// Only the K most likely tokens; 0 for all
    #[arg(long, value_name = "K", allow_negative_numbers = true)]
    top_k: Option<u32>,
    /// Only the most likely tokens that together have probability P
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    top_p: Option<f32>,
    /// Only tokens at least P times as likely as the most likely one
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    min_p: Option<f32>,
    /// Locally typical sampling
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    typical: Option<f32>,
    /// Only logits within N standard deviations of the largest
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    top_n_sigma: Option<f32>,
    /// Tokens back to which the penalties look
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    repeat_last_n: Option<i32>,
    /// Divide the logits of repeated tokens
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    repeat_penalty: Option<f32>,
    /// Lower the logits of tokens by how often they were said
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    frequency_penalty: Option<f32>,
    /// Lower the logits of tokens that were said
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    presence_penalty: Option<f32>,
    /// Strength of the penalty on repeated sequences
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    dry_multiplier: Option<f32>,
    /// Growth of that penalty with each repeated token
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    dry_base: Option<f32>,
    /// Length of a repetition that goes unpunished
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    dry_allowed_length: Option<u32>,
    /// Chance of leaving out the most likely tokens
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    xtc_probability: Option<f32>,
    /// Probability from which on they count as most likely
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    xtc_threshold: Option<f32>,
    /// 2 for Mirostat 2, 0 for none
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    mirostat: Option<u32>,
    /// Mirostat's target surprise
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    mirostat_tau: Option<f32>,
    /// Mirostat's learning rate
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    mirostat_eta: Option<f32>,
    /// Add X to the logit of a token (may be repeated)
    #[arg(long, value_name = "ID+X or ID-X")]
    logit_bias: Vec<String>,
    /// The same seed gives the same answer [default: random]
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
}

impl Sampling {
    /// The file's recommendations with what was given on top.
    pub(crate) fn options(&self, metadata: &Metadata) -> Result<SamplerOptions> {
        let mut options = SamplerOptions::from_metadata(metadata)?;
        let given = self.clone();
        set(&mut options.temperature, given.temperature);
        set(&mut options.top_k, given.top_k);
        set(&mut options.top_p, given.top_p);
        set(&mut options.min_p, given.min_p);
        set(&mut options.typical_p, given.typical);
        set(&mut options.top_n_sigma, given.top_n_sigma);
        set(&mut options.repeat_last_n, given.repeat_last_n);
        set(&mut options.repeat_penalty, given.repeat_penalty);
        set(&mut options.frequency_penalty, given.frequency_penalty);
        set(&mut options.presence_penalty, given.presence_penalty);
        set(&mut options.dry_multiplier, given.dry_multiplier);
        set(&mut options.dry_base, given.dry_base);
        set(&mut options.dry_allowed_length, given.dry_allowed_length);
        set(&mut options.xtc_probability, given.xtc_probability);
        set(&mut options.xtc_threshold, given.xtc_threshold);
        set(&mut options.mirostat, given.mirostat);
        set(&mut options.mirostat_tau, given.mirostat_tau);
        set(&mut options.mirostat_eta, given.mirostat_eta);
        options.seed = given.seed.or(options.seed);
        for bias in &self.logit_bias {
            options.logit_bias.push(parse_bias(bias)?);
        }
        Ok(options)
    }
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
