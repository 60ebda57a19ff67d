//! The arguments of `prune`.

use std::path::PathBuf;

use crate::arguments::{Machine, TokenizerArgs, fraction};

const AFTER: &str = r#"Matrices of layers are pruned; embeddings, LM head, norms and routers stay.
Pruned matrices are stored in a sparse format, or with --dense in one that other programs read. With
--evaluate, the table at the end compares with the original model, with the same precision
unpruned, and with the dense type of about the same size.

SparseGPT loses least (docs/quality.md) and reads a calibration text; best is text of the kind that
the model will be used for. With --imatrix, the default method is wanda. With --pack, no weight
changes: F16, Q8_0 and Q4_0 matrices that have zeros already are stored in the sparse format that
takes the fewest bytes, if one is smaller.

A surgery file is TOML. The first rule whose pattern matches a tensor's name applies:

  imatrix = "model.imatrix.gguf"  # for wanda and ria; relative to this file
  [[rule]]
  tensors = 'attn_(k|v)'          # a regular expression
  keep = true                     # not pruned
  [[rule]]                        # without `tensors`: all other tensors
  method = "ria"                  # magnitude, wanda, ria or sparsegpt
  sparsity = 0.5                  # or pattern = "2:4"
  format = "Q8_0"                 # instead of the default
  dense = false                   # whether zeros are stored"#;

/// Arguments of `prune`.
#[derive(clap::Args)]
#[command(after_help = AFTER)]
#[command(mut_arg("ctx_size", |arg| arg.help("Chunk size in tokens [default: 512]")))]
pub(crate) struct Args {
    /// Path to a GGUF file, or a model name as in `list`
    pub(super) input: String,
    /// Output file
    pub(super) output: PathBuf,
    /// Fraction of weights to zero [default: 0.5]
    #[arg(long, value_name = "FRACTION", value_parser = fraction)]
    pub(super) sparsity: Option<f64>,
    /// magnitude, wanda, ria or sparsegpt [default: sparsegpt]
    #[arg(long)]
    pub(super) method: Option<String>,
    /// unstructured, or N:M (keep N of M)
    #[arg(long, default_value = "unstructured")]
    pub(super) pattern: String,
    /// F16, Q8_0 or Q4_0 [default: closest to the input]
    #[arg(long)]
    pub(super) format: Option<String>,
    /// Store existing zeros sparsely; no weight changes
    #[arg(long, conflicts_with_all = ["sparsity", "method", "pattern", "format", "dense", "surgery",
          "imatrix", "calibrate", "evaluate"])]
    pub(super) pack: bool,
    /// Store zeros, so that other programs can read the file
    #[arg(long)]
    pub(super) dense: bool,
    /// Rules for each tensor (TOML)
    #[arg(long, value_name = "FILE",
          conflicts_with_all = ["sparsity", "method", "pattern", "format", "dense"])]
    pub(super) surgery: Option<PathBuf>,
    /// Importance matrix written by `imatrix`
    #[arg(long, value_name = "FILE")]
    pub(super) imatrix: Option<PathBuf>,
    /// Calibration text [default: a built-in text]
    #[arg(long, value_name = "TEXT", conflicts_with = "imatrix")]
    pub(super) calibrate: Option<PathBuf>,
    /// Maximum number of calibration chunks
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub(super) chunks: usize,
    /// Evaluation text for perplexity and KL divergence
    #[arg(long, value_name = "TEXT")]
    pub(super) evaluate: Option<PathBuf>,
    /// Number of evaluation chunks
    #[arg(long, value_name = "N", default_value_t = 16)]
    pub(super) evaluate_chunks: usize,
    /// Print JSON
    #[arg(long)]
    pub(super) json: bool,
    #[command(flatten)]
    pub(super) tokenizer: TokenizerArgs,
    #[command(flatten)]
    pub(super) machine: Machine,
}
