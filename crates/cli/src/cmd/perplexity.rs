//! `bodkin perplexity`: perplexity on a text, and KL divergence from another model, in
//! llama-perplexity's output format.

mod divergence;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use bodkin_backend::Model;
use bodkin_engine::Tokenizer;
use bodkin_eval::{BaseWriter, Perplexity, Windows, limits};
use serde_json::json;

use super::quantize::threads;
use crate::arguments::{Machine, TokenizerArgs, find_decoder};
use crate::output;
use bodkin::{MAX_TOKENS, ModelFile, within};

const AFTER: &str = "\
The text is split into chunks of --ctx-size tokens. Each chunk begins with BOS if the model uses it,
and its second half is scored, as by llama-perplexity. --kl-divergence takes the chunks and the
log-probabilities to compare with from the file of --kl-divergence-base.";

/// Default chunk size.
pub(super) const CHUNK_TOKENS: usize = 512;

/// Arguments of `perplexity`.
#[derive(clap::Args)]
#[command(after_help = AFTER)]
#[command(mut_arg("ctx_size", |arg| arg.help("Chunk size in tokens [default: 512]")))]
pub(crate) struct Args {
    /// Path to a GGUF file, or a model name as in `list`
    model: String,
    /// The text
    #[arg(short, long, value_name = "FILE", required_unless_present = "kl_divergence")]
    file: Option<PathBuf>,
    /// Number of chunks to read [default: the whole text]
    #[arg(long, value_name = "N")]
    chunks: Option<usize>,
    /// File of log-probabilities, written or compared with
    #[arg(long, value_name = "FILE", alias = "save-all-logits")]
    kl_divergence_base: Option<PathBuf>,
    /// Compare with the file of --kl-divergence-base
    #[arg(long, requires = "kl_divergence_base", conflicts_with = "file")]
    kl_divergence: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    tokenizer: TokenizerArgs,
    #[command(flatten)]
    machine: Machine,
}

pub(crate) fn run(args: Args) -> Result<()> {
    let mut opened = find_decoder(&args.model)?;
    let tokenizer = args.tokenizer.open(&opened.file)?;
    if args.kl_divergence {
        return divergence::run(&args, &mut opened, &tokenizer);
    }
    let size = args.machine.context()?.unwrap_or(CHUNK_TOKENS);
    let file = args.file.as_deref().context("--file: expected a text")?;
    let windows = windows(&tokenizer, file, size, args.chunks)?;
    if let Some(base) = &args.kl_divergence_base {
        output::check(base, [opened.file.path(), file])?;
    }
    let mut run = Run::new(&mut opened, &args.machine, size)?;
    let Some(base) = &args.kl_divergence_base else {
        return measure::<std::io::Sink>(&args, &mut run, &windows, None);
    };
    output::write(base, |out| {
        let failed = || format!("cannot write {}", base.display());
        let vocabulary = opened.plan.output_width();
        let mut writer = BaseWriter::new(out, &windows, vocabulary).with_context(failed)?;
        measure(&args, &mut run, &windows, Some(&mut writer))?;
        writer.finish().with_context(failed)
    })
}

/// The chunks of a text file, at most `chunks` of them.
pub(super) fn windows(
    tokenizer: &Tokenizer,
    file: &Path,
    size: usize,
    chunks: Option<usize>,
) -> Result<Windows> {
    ensure!(chunks != Some(0), "--chunks: expected at least 1 chunk, found 0");
    let text = std::fs::read_to_string(file)
        .with_context(|| format!("cannot read the text from {}", file.display()))?;
    // The final newline of the file is not part of the text.
    let text = text.strip_suffix('\n').unwrap_or(&text);
    let tokens = tokenizer.encode(text, true, false);
    let mut windows = Windows::of_text(tokens, size, first_token(tokenizer))
        .with_context(|| file.display().to_string())?;
    windows.truncate(chunks.unwrap_or(usize::MAX));
    Ok(windows)
}

/// The BOS token that replaces the first token of each chunk, if the model uses one.
fn first_token(tokenizer: &Tokenizer) -> Option<u32> {
    tokenizer.bos().filter(|_| tokenizer.add_bos())
}

/// A loaded model and its start time.
pub(super) struct Run {
    pub(super) model: Box<dyn Model>,
    threads: usize,
    start: Instant,
}

impl Run {
    /// Loads a model for chunks of `size` tokens.
    pub(super) fn new(opened: &mut ModelFile, machine: &Machine, size: usize) -> Result<Run> {
        let step = machine.step_tokens()?;
        within("ctx_size", size, MAX_TOKENS)?;
        opened.plan_for(size)?;
        let backend = machine.backend()?;
        let model = opened.load(backend.as_ref(), &limits(&opened.plan, size, step))?;
        let threads = threads(machine.threads)?;
        Ok(Run { model, threads, start: Instant::now() })
    }

    /// CPU threads that evaluate logits.
    pub(super) fn threads(&self) -> usize {
        self.threads
    }

    /// Prints an estimate of the total time after the first chunk.
    pub(super) fn estimate_time(&self, chunk: usize, windows: &Windows) {
        if chunk == 0 {
            let (count, size) = (windows.count(), windows.size());
            let seconds = self.start.elapsed().as_secs_f64();
            let minutes = seconds * count as f64 / 60.0;
            eprintln!("{count} chunks of {size} tokens: {seconds:.2} s each, {minutes:.2} minutes");
        }
    }
}

/// Measures the perplexity and prints it chunk by chunk. `base` receives the log-probabilities.
fn measure<W: Write>(
    args: &Args,
    run: &mut Run,
    windows: &Windows,
    mut base: Option<&mut BaseWriter<W>>,
) -> Result<()> {
    let mut out = std::io::stdout().lock();
    let (mut perplexity, mut running) = (Perplexity::default(), Vec::new());
    for window in 0..windows.count() {
        let (threads, base) = (run.threads(), base.as_deref_mut());
        bodkin_eval::measure(run.model.as_mut(), windows, window, threads, &mut perplexity, base)?;
        run.estimate_time(window, windows);
        running.push(perplexity.value());
        if !args.json {
            write!(out, "[{}]{:.4},", window + 1, perplexity.value())?;
            out.flush()?;
        }
    }
    if args.json {
        let report = json!({
            "perplexity": perplexity.value(),
            "standard_error": perplexity.standard_error(),
            "tokens_scored": perplexity.count(),
            "chunks": windows.count(),
            "chunk_tokens": windows.size(),
            "running": running,
            "seconds": run.start.elapsed().as_secs_f64(),
        });
        writeln!(out, "{report:#}")?;
        return Ok(());
    }
    writeln!(out)?;
    match perplexity.standard_error() {
        Some(error) => {
            writeln!(out, "Final estimate: PPL = {:.4} +/- {error:.5}", perplexity.value())?;
        }
        None => writeln!(out, "Final estimate: PPL = {:.4}", perplexity.value())?,
    }
    Ok(())
}
