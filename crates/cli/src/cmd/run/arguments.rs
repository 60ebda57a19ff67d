//! The arguments of `run`.

use std::num::NonZeroUsize;
use std::path::PathBuf;

use super::sampling::Sampling;
use crate::arguments::{Machine, TokenizerArgs};

const SAMPLING_HEADING: &str =
    "Sampling [default: the model file's recommendation, or llama.cpp's]";

/// Arguments of `run`.
#[derive(clap::Args)]
#[command(after_help = "Ctrl-C stops an answer and keeps its text; the exit status is then 130.")]
pub(crate) struct Args {
    /// Path to a GGUF file, or a model name as in `list`
    pub(super) model: String,
    /// Prompt [default: standard input, or a chat]
    pub(super) prompt: Option<String>,
    /// Read the prompt from a file
    #[arg(short, long, value_name = "FILE", conflicts_with = "prompt")]
    pub(super) file: Option<PathBuf>,
    /// System prompt
    #[arg(short, long, value_name = "TEXT")]
    pub(super) system: Option<String>,
    /// Continue the prompt without the chat template
    #[arg(long, conflicts_with = "system")]
    pub(super) raw: bool,
    /// Maximum tokens of an answer [default: no limit]
    #[arg(short = 'n', long, value_name = "N")]
    pub(super) max_tokens: Option<NonZeroUsize>,
    /// Stop text (may be repeated)
    #[arg(long, value_name = "TEXT")]
    pub(super) stop: Vec<String>,
    /// Ignore end-of-generation tokens
    #[arg(long)]
    pub(super) ignore_eos: bool,
    /// Print only the answer
    #[arg(short, long)]
    pub(super) quiet: bool,
    /// Print answer, token ids and timings as JSON
    #[arg(long)]
    pub(super) json: bool,
    /// Prune the model by the rules of this file before it runs
    #[arg(long, value_name = "FILE")]
    pub(super) surgery: Option<PathBuf>,
    #[command(flatten)]
    pub(super) tokenizer: TokenizerArgs,
    #[command(flatten, next_help_heading = SAMPLING_HEADING)]
    pub(super) sampling: Sampling,
    #[command(flatten, next_help_heading = "Machine")]
    pub(super) machine: Machine,
}
