//! The arguments of `check`.

use std::path::PathBuf;

use bodkin_eval::check::coherence::Rules;

use crate::arguments::{Machine, TokenizerArgs, largest_fraction, limit};

const AFTER: &str = r#"A model that generates text answers a few fixed prompts, reads a fixed text
while activations and logits are checked for NaN and outliers, reads past its sliding window, and
fills a small context. An encoder embeds fixed texts, alone and together. --baseline compares
logits and perplexity, or embeddings, with an earlier run. --speed measures prefill and decode
interleaved with a small reference model, up to three times. The medians of the ratios of their
tokens a second are compared, so that other load on the machine does not decide;
what makes all models slower alike is not seen.
--reference compares the most likely tokens with a server that has OpenAI's
/v1/completions with logprobs. Sampling uses fixed seeds. The exit status is 1 if a check fails.

A suite is TOML. Its answers are greedy:

  [[answer]]                      # for models that generate text
  prompt = "What is the capital of France?"
  system = "You are terse."       # optional, as are max_tokens and all but one of these:
  contains = ["Paris"]            # each of these texts
  excludes = ["London"]           # none of these
  matches = '(?i)\bparis\b'       # a regular expression
  equals = "Paris"                # the whole answer, without white space around it
  [[similarity]]                  # for encoders
  texts = ["a dog", "a puppy"]
  min = 0.7                       # least cosine similarity, or max, or both"#;

/// Arguments of `check`.
#[derive(clap::Args)]
#[command(after_help = AFTER)]
#[command(mut_arg("ctx_size", |arg| {
    arg.help("Tokens of the sliding-window test").default_value("8192")
}))]
pub(crate) struct Args {
    /// Paths to GGUF files, or model names as in `list`
    #[arg(required = true)]
    pub(super) models: Vec<String>,
    /// Check the answers or similarities of a file (TOML)
    #[arg(long, value_name = "FILE")]
    pub(super) suite: Option<PathBuf>,
    /// Compare with the model of the same name in this file
    #[arg(long, value_name = "FILE")]
    pub(super) baseline: Option<PathBuf>,
    /// Write logits, perplexities and speeds to this file
    #[arg(long, value_name = "FILE")]
    pub(super) save_baseline: Option<PathBuf>,
    /// Measure the speed, and compare it with the baseline's
    #[arg(long)]
    pub(super) speed: bool,
    /// Compare with a server, such as http://127.0.0.1:8080
    #[arg(long, value_name = "URL")]
    pub(super) reference: Option<String>,
    /// The model's name on the server
    #[arg(long, value_name = "NAME", default_value = "default", requires = "reference")]
    pub(super) reference_model: String,
    /// Print one JSON object
    #[arg(long)]
    pub(super) json: bool,
    #[command(flatten)]
    pub(super) tokenizer: TokenizerArgs,
    #[command(flatten, next_help_heading = "Thresholds")]
    pub(super) thresholds: Thresholds,
    #[command(flatten, next_help_heading = "Machine")]
    pub(super) machine: Machine,
}

/// Limits of the checks.
#[derive(clap::Args, Clone, Copy, Debug)]
pub(super) struct Thresholds {
    /// Mean squared error of the logits, against the baseline
    #[arg(long, value_parser = limit, value_name = "X", default_value_t = 0.05)]
    pub(super) max_mse: f64,
    /// Mean KL divergence from the baseline
    #[arg(long, value_parser = limit, value_name = "X", default_value_t = 0.01)]
    pub(super) max_kl: f64,
    /// Change of perplexity in percent
    #[arg(long, value_parser = limit, value_name = "PERCENT", default_value_t = 1.0)]
    pub(super) max_perplexity_change: f64,
    /// Mean cosine distance of embeddings from the baseline
    #[arg(long, value_parser = limit, value_name = "X", default_value_t = 0.001)]
    pub(super) max_cosine_distance: f64,
    /// Slowdown in percent, against the baseline
    #[arg(long, value_parser = limit, value_name = "PERCENT", default_value_t = 10.0)]
    pub(super) max_slowdown: f64,
    /// Fraction of repeated 4-grams
    #[arg(long, value_parser = largest_fraction, value_name = "FRACTION",
          default_value_t = Rules::default().repetition)]
    pub(super) max_repetition: f64,
    /// Fraction of letters outside the main script
    #[arg(long, value_parser = largest_fraction, value_name = "FRACTION",
          default_value_t = Rules::default().foreign_letters)]
    pub(super) max_foreign_letters: f64,
    /// Mean difference of log-probabilities, against the server
    #[arg(long, value_parser = limit, value_name = "X", default_value_t = 0.2)]
    pub(super) max_logprob_difference: f64,
    /// Difference of log-probabilities that counts as a tie
    #[arg(long, value_parser = limit, value_name = "X", default_value_t = 0.3)]
    pub(super) near_tie: f64,
    /// Maximum number of tokens of an answer
    #[arg(short = 'n', long, value_name = "N", default_value_t = 48)]
    pub(super) max_tokens: usize,
}
