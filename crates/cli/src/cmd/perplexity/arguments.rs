//! The arguments of `perplexity`.

use std::path::PathBuf;

use crate::arguments::{Machine, TokenizerArgs};

const AFTER: &str = "\
The text is split into chunks of --ctx-size tokens. Each chunk begins with BOS if the model uses it,
and its second half is scored, as by llama-perplexity. --kl-divergence takes the chunks and the
log-probabilities to compare with from the file of --kl-divergence-base.";

/// Arguments of `perplexity`.
#[derive(clap::Args)]
#[command(after_help = AFTER)]
#[command(mut_arg("ctx_size", |arg| arg.help("Chunk size in tokens [default: 512]")))]
pub(crate) struct Args {
    /// Path to a GGUF file, or a model name as in `list`
    pub(super) model: String,
    /// Evaluation text
    #[arg(short, long, value_name = "FILE", required_unless_present = "kl_divergence")]
    pub(super) file: Option<PathBuf>,
    /// Number of chunks to read [default: the whole text]
    #[arg(long, value_name = "N")]
    pub(super) chunks: Option<usize>,
    /// File of log-probabilities, written or compared with
    #[arg(long, value_name = "FILE", alias = "save-all-logits")]
    pub(super) kl_divergence_base: Option<PathBuf>,
    /// Compare with the file of --kl-divergence-base
    #[arg(long, requires = "kl_divergence_base", conflicts_with = "file")]
    pub(super) kl_divergence: bool,
    /// Print one JSON object
    #[arg(long)]
    pub(super) json: bool,
    #[command(flatten)]
    pub(super) tokenizer: TokenizerArgs,
    #[command(flatten)]
    pub(super) machine: Machine,
}
