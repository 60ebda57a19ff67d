//! `bodkin perplexity`: perplexity on a text, and KL divergence from another model, in
//! llama-perplexity's output format.

mod arguments;
mod divergence;

use std::io::Write;

use anyhow::{Context, Result};
use bodkin_eval::{BaseWriter, Perplexity, Windows};
use serde_json::json;

use super::chunks::{CHUNK_TOKENS, Run, windows};
use crate::arguments::find_decoder;
use crate::output;
pub(crate) use arguments::Args;

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
