//! `bodkin imatrix`: activation statistics over a text, for quantising and pruning.

use std::io::Write;
use std::path::PathBuf;

use anyhow::Result;
use bodkin_backend::{Matmul, Observer};
use bodkin_compress::imatrix::Imatrix;
use bodkin_eval::read;
use bodkin_model::{Op, Plan};

use super::perplexity::{CHUNK_TOKENS, Run, windows};
use crate::arguments::{Machine, TokenizerArgs, find_decoder};
use crate::output;

const AFTER: &str = "\
Writes the GGUF layout of llama-imatrix: for each weight of a layer, and for each expert of those
that have some, the sum of the squares of each input column and the number of rows. The text is
read as `perplexity` reads it, in chunks of --ctx-size tokens.";

/// Arguments of `imatrix`.
#[derive(clap::Args)]
#[command(after_help = AFTER)]
#[command(mut_arg("ctx_size", |arg| arg.help("Tokens of a chunk [default: 512]")))]
pub(crate) struct Args {
    /// A path, or any name that `pull` and `list` know
    model: String,
    /// The text
    #[arg(short, long, value_name = "FILE")]
    file: PathBuf,
    /// The file to write
    #[arg(short, long, value_name = "FILE", default_value = "imatrix.gguf")]
    output: PathBuf,
    /// Stop after so many chunks [default: the whole text]
    #[arg(long, value_name = "N")]
    chunks: Option<usize>,
    /// Go on from this file: its sums and the new ones are added up
    #[arg(long, value_name = "FILE")]
    in_file: Option<PathBuf>,
    /// Watch the weight of the head too
    #[arg(long)]
    process_output: bool,
    #[command(flatten)]
    tokenizer: TokenizerArgs,
    #[command(flatten)]
    machine: Machine,
}

/// The weights of layers, and perhaps that of the head.
struct Chosen<'a> {
    imatrix: &'a mut Imatrix,
    /// The name of the head's weight, which may be that of the embedding, if it is wanted.
    head: Option<&'a str>,
}

impl Observer for Chosen<'_> {
    fn matmul(&mut self, matmul: &Matmul<'_>) {
        let name = &matmul.weight.name;
        if name.starts_with("blk.") || self.head == Some(name.as_str()) {
            self.imatrix.matmul(matmul);
        }
    }
}

/// The name of the weight that makes logits.
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
        let mut observer = Chosen { imatrix: &mut imatrix, head: head.as_deref() };
        let wanted = |_| args.process_output;
        read(run.model.as_mut(), &windows, window, wanted, &mut observer)?;
        run.tell(window, &windows);
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
