//! `--kl-divergence`: KL divergence from a file of log-probabilities, chunk by chunk, and its
//! statistics, in llama-perplexity's output format.

use std::io::Write;

use anyhow::{Context, Result, ensure};
use bodkin_engine::Tokenizer;
use bodkin_eval::{Base, Divergence, Estimate, compare};
use serde_json::{Value, json};

use super::super::chunks::{Run, first_token};
use super::arguments::Args;
use bodkin::ModelFile;

const HEAD: &str = "chunk             PPL               ln(PPL(Q)/PPL(base))          KL Divergence\
                    \u{20}             \u{394}p RMS            Same top p";

/// The least number of predictions for statistics.
const LEAST: usize = 100;

pub(super) fn run(args: &Args, opened: &mut ModelFile, tokenizer: &Tokenizer) -> Result<()> {
    let path = args.kl_divergence_base.as_deref().context("--kl-divergence-base: no file")?;
    let mut base = Base::open(path, first_token(tokenizer))?;
    base.check_vocabulary(opened.plan.output_width())?;
    let mut windows = base.windows().clone();
    if let Some(context) = args.machine.context()? {
        let size = windows.size();
        ensure!(
            size <= context,
            "--ctx-size: expected at least the {size} tokens of the file's chunks, found {context}"
        );
    }
    ensure!(args.chunks != Some(0), "--chunks: expected at least 1 chunk, found 0");
    windows.truncate(args.chunks.unwrap_or(usize::MAX));
    let mut run = Run::new(opened, &args.machine, windows.size())?;
    let mut out = std::io::stdout().lock();
    let mut divergence = Divergence::default();
    if !args.json {
        writeln!(out, "{HEAD}")?;
    }
    for window in 0..windows.count() {
        let threads = run.threads();
        compare(run.model.as_mut(), &windows, window, threads, &mut divergence, &mut base)?;
        run.estimate_time(window, &windows);
        if !args.json {
            line(&mut out, window + 1, &divergence)?;
        }
    }
    if args.json {
        writeln!(out, "{:#}", report(&divergence))?;
        return Ok(());
    }
    writeln!(out)?;
    if divergence.count() >= LEAST {
        perplexities(&mut out, &divergence)?;
        divergences(&mut out, &divergence)?;
        changes(&mut out, &divergence)?;
    }
    Ok(())
}

/// The perplexity of a log-perplexity.
fn exp(log: Estimate) -> Estimate {
    let value = log.value.exp();
    Estimate { value, error: value * log.error }
}

fn percent(share: Estimate) -> Estimate {
    Estimate { value: 100.0 * share.value, error: 100.0 * share.error }
}

/// Prints the running statistics after a chunk.
fn line(out: &mut dyn Write, chunk: usize, d: &Divergence) -> Result<()> {
    let (ppl, ratio, kl) = (exp(d.log_perplexity()), d.log_ratio(), d.mean_divergence());
    let (rms, top) = (percent(d.change_rms()), percent(d.same_top()));
    write!(out, "{chunk:4}    {:9.4} ± {:9.4}", ppl.value, ppl.error)?;
    write!(out, "    {:10.5} ± {:10.5}", ratio.value, ratio.error)?;
    write!(out, "    {:10.5} ± {:10.5}", kl.value, kl.error)?;
    write!(out, "    {:6.3} ± {:6.3} %", rms.value, rms.error)?;
    writeln!(out, "    {:6.3} ± {:6.3} %", top.value, top.error)?;
    Ok(out.flush()?)
}

fn perplexities(out: &mut dyn Write, d: &Divergence) -> Result<()> {
    let (log, log_base, log_ratio) = (d.log_perplexity(), d.base_log_perplexity(), d.log_ratio());
    let (ppl, base, ratio) = (exp(log), exp(log_base), exp(log_ratio));
    let correlation = d.covariance() / (log.error * log_base.error);
    let variance =
        ppl.error.powi(2) + base.error.powi(2) - 2.0 * ppl.value * base.value * d.covariance();
    let change = Estimate { value: ppl.value - base.value, error: variance.max(0.0).sqrt() };
    let line = |out: &mut dyn Write, what: &str, e: Estimate| {
        writeln!(out, "{what:30}: {:10.6} ± {:10.6}", e.value, e.error)
    };
    writeln!(out, "====== Perplexity statistics ======")?;
    line(out, "Mean PPL(Q)", ppl)?;
    line(out, "Mean PPL(base)", base)?;
    writeln!(out, "Cor(ln(PPL(Q)), ln(PPL(base))): {:6.2}%", 100.0 * correlation)?;
    line(out, "Mean ln(PPL(Q)/PPL(base))", log_ratio)?;
    line(out, "Mean PPL(Q)/PPL(base)", ratio)?;
    line(out, "Mean PPL(Q)-PPL(base)", change)?;
    Ok(writeln!(out)?)
}

fn divergences(out: &mut dyn Write, d: &Divergence) -> Result<()> {
    let (mean, all) = (d.mean_divergence(), d.divergences());
    writeln!(out, "====== KL divergence statistics ======")?;
    writeln!(out, "Mean    KLD: {:10.6} ± {:10.6}", mean.value, mean.error)?;
    for (what, part) in [
        ("Maximum", 1.0),
        ("99.9%  ", 0.999),
        ("99.0%  ", 0.99),
        ("95.0%  ", 0.95),
        ("90.0%  ", 0.9),
        ("Median ", 0.5),
        ("10.0%  ", 0.1),
        (" 5.0%  ", 0.05),
        (" 1.0%  ", 0.01),
        (" 0.1%  ", 0.001),
        ("Minimum", 0.0),
    ] {
        writeln!(out, "{what} KLD: {:10.6}", Divergence::percentile(&all, part))?;
    }
    Ok(writeln!(out)?)
}

fn changes(out: &mut dyn Write, d: &Divergence) -> Result<()> {
    let (mean, all) = (percent(d.mean_change()), d.changes());
    writeln!(out, "====== Token probability statistics ======")?;
    writeln!(out, "Mean    \u{394}p: {:6.3} ± {:5.3} %", mean.value, mean.error)?;
    for (what, part) in [
        ("Maximum", 1.0),
        ("99.9%  ", 0.999),
        ("99.0%  ", 0.99),
        ("95.0%  ", 0.95),
        ("90.0%  ", 0.9),
        ("75.0%  ", 0.75),
        ("Median ", 0.5),
        ("25.0%  ", 0.25),
        ("10.0%  ", 0.1),
        (" 5.0%  ", 0.05),
        (" 1.0%  ", 0.01),
        (" 0.1%  ", 0.001),
        ("Minimum", 0.0),
    ] {
        writeln!(out, "{what} \u{394}p: {:6.3}%", 100.0 * Divergence::percentile(&all, part))?;
    }
    let (rms, top) = (percent(d.change_rms()), percent(d.same_top()));
    writeln!(out, "RMS \u{394}p    : {:6.3} ± {:5.3} %", rms.value, rms.error)?;
    Ok(writeln!(out, "Same top p: {:6.3} ± {:5.3} %", top.value, top.error)?)
}

/// The statistics as JSON, in fractions.
fn report(d: &Divergence) -> Value {
    let estimate = |e: Estimate| json!({ "value": e.value, "standard_error": e.error });
    let percentiles = |all: &[f64]| -> Value {
        let parts = [0.0, 0.001, 0.01, 0.05, 0.1, 0.5, 0.9, 0.95, 0.99, 0.999, 1.0];
        parts.map(|part| json!([part, Divergence::percentile(all, part)])).to_vec().into()
    };
    json!({
        "tokens_scored": d.count(),
        "perplexity": estimate(exp(d.log_perplexity())),
        "base_perplexity": estimate(exp(d.base_log_perplexity())),
        "log_ratio": estimate(d.log_ratio()),
        "divergence": estimate(d.mean_divergence()),
        "divergence_percentiles": percentiles(&d.divergences()),
        "probability_change": estimate(d.mean_change()),
        "probability_change_rms": estimate(d.change_rms()),
        "probability_change_percentiles": percentiles(&d.changes()),
        "same_top": estimate(d.same_top()),
    })
}
