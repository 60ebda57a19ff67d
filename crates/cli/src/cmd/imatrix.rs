//! `bodkin imatrix`: activation statistics over a text, for quantising and pruning.

use std::io::Write;
use std::path::PathBuf;

use anyhow::Result;
use bodkin_backend::{Matmul, Observer};
use bodkin_compress::imatrix::Imatrix;
use bodkin_engine::FirstNonFinite;
use bodkin_eval::read;
use bodkin_model::{Op, Plan};

use super::chunks::{CHUNK_TOKENS, Run, windows};
use crate::arguments::{Machine, TokenizerArgs, find_decoder};
use crate::output;

const AFTER: &str = "\
Writes the importance matrix in llama-imatrix's GGUF layout: for each weight of a layer, or each of
its experts, the sum of squares of every input column and the number of rows. The text is read in
chunks of --ctx-size tokens, as by `perplexity`.";

/// Arguments of `imatrix`.
#[derive(clap::Args)]
#[command(after_help = AFTER)]
#[command(mut_arg("ctx_size", |arg| arg.help("Chunk size in tokens [default: 512]")))]
pub(crate) struct Args {
    /// Path to a GGUF file, or a model name as in `list`
    model: String,
    /// Calibration text
    #[arg(short, long, value_name = "FILE")]
    file: PathBuf,
    /// Output file
    #[arg(short, long, value_name = "FILE", default_value = "imatrix.gguf")]
    output: PathBuf,
    /// Number of chunks to read [default: the whole text]
    #[arg(long, value_name = "N")]
    chunks: Option<usize>,
    /// Importance matrix to continue
    #[arg(long, value_name = "FILE")]
    in_file: Option<PathBuf>,
    /// Include the output projection (LM head)
    #[arg(long)]
    process_output: bool,
    #[command(flatten)]
    tokenizer: TokenizerArgs,
    #[command(flatten)]
    machine: Machine,
}

/// Observes the weights of layers, and optionally the output projection.
struct Chosen<'a> {
    imatrix: &'a mut Imatrix,
    /// Name of the output projection, which may be the token embedding, if it is included.
    head: Option<&'a str>,
    /// Where the activations stop being finite: their sums would not be, either.
    non_finite: FirstNonFinite,
}

impl Observer for Chosen<'_> {
    fn matmul(&mut self, matmul: &Matmul<'_>) {
        let name = &matmul.weight.name;
        if name.starts_with("blk.") || self.head == Some(name.as_str()) {
            self.non_finite.matmul(matmul);
            self.imatrix.matmul(matmul);
        }
    }
}

/// The name of the output projection.
fn head(plan: &Plan) -> Option<String> {
    plan.ops.iter().find_map(|op| match *op {
        Op::Logits { weight, .. } => Some(plan.weight(weight).name.clone()),
        _ => None,
    })
}

pub(crate) fn run(args: Args) -> Result<()> {
    let mut opened = find_decoder(&args.model)?;
    output::check(&args.output, [opened.file.path(), &args.file])?;
    let tokenizer = args.tokenizer.open(&opened.file)?;
    let size = args.machine.context()?.unwrap_or(CHUNK_TOKENS);
    let windows = windows(&tokenizer, &args.file, size, args.chunks)?;
    let mut imatrix = match &args.in_file {
        Some(path) => Imatrix::open(path)?.fit(&opened.plan, path)?,
        None => Imatrix::default(),
    };
    let head = args.process_output.then(|| head(&opened.plan)).flatten();
    let mut run = Run::new(&mut opened, &args.machine, size)?;
    for window in 0..windows.count() {
        let mut observer = Chosen {
            imatrix: &mut imatrix,
            head: head.as_deref(),
            non_finite: FirstNonFinite::default(),
        };
        let wanted = |_| args.process_output;
        read(run.model.as_mut(), &windows, window, wanted, &mut observer)?;
        observer.non_finite.check()?;
        run.estimate_time(window, &windows);
    }
    imatrix.chunk_tokens = size as u32;
    imatrix.chunks += windows.count() as u32;
    imatrix.datasets.push(args.file.display().to_string());
    imatrix.save(&args.output)?;
    let (entries, output) = (imatrix.entries.len(), args.output.display());
    let unseen: usize =
        imatrix.entries.values().map(|e| e.counts.iter().filter(|&&c| c == 0).count()).sum();
    let mut out = std::io::stdout().lock();
    writeln!(out, "{output}: {entries} weights over {} chunks", imatrix.chunks)?;
    if unseen > 0 {
        writeln!(out, "{unseen} matrices of experts that no token chose have no data")?;
    }
    Ok(())
}
