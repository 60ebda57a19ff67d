//! `bodkin check`: the regression suite of one or more models, and its table.

mod arguments;
mod decoder;
mod encoder;
mod reference;
mod table;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use bodkin::ModelFile;
use bodkin_backend::Backend;
use bodkin_eval::check::baseline::{self, Record, Speed, find, names};
use bodkin_eval::check::suite::Suite;

use super::bench::speeds;
use crate::arguments::{find as find_model, find_path};
use crate::{errors, output};
pub(crate) use arguments::Args;
use arguments::Thresholds;
use table::Report;

/// Measurements of a speed that is too far below the baseline's.
const SPEED_MEASUREMENTS: usize = 3;

pub(crate) fn run(args: Args) -> Result<()> {
    ensure!(
        (2..=4096).contains(&args.thresholds.max_tokens),
        "--max-tokens: expected 2 to 4096 tokens, found {}",
        args.thresholds.max_tokens
    );
    let before = args.baseline.as_deref().map(baseline::open).transpose()?.unwrap_or_default();
    let suite = args.suite.as_deref().map(Suite::open).transpose().context("--suite")?;
    let backend = args.machine.backend()?;
    let (mut reports, mut records) = (Vec::new(), Vec::new());
    // An unknown name fails later, when its model is checked.
    let path = |model: &String| find_path(model).unwrap_or_else(|_| model.into());
    let paths: Vec<PathBuf> = args.models.iter().map(path).collect();
    if let Some(output) = &args.save_baseline {
        output::check(output, paths.iter().map(PathBuf::as_path))?;
    }
    let names = names(&paths);
    for (model, name) in args.models.iter().zip(names) {
        let mut report = Report { model: name, ..Report::default() };
        let done = check(&args, backend.as_ref(), model, suite.as_ref(), &before, &mut report);
        match done.with_context(|| format!("cannot check {model}")) {
            Ok(record) => records.push(record),
            Err(error) => report.faults.push(errors::causes(&error)),
        }
        reports.push(report);
    }
    match args.json {
        true => table::json(&reports)?,
        false => table::print(&reports)?,
    }
    // The baseline is also written if a check failed.
    if let Some(path) = args.save_baseline.as_ref().filter(|_| !records.is_empty()) {
        baseline::save(path, &records)?;
    }
    let failed = reports.iter().filter(|report| !report.faults.is_empty()).count();
    ensure!(failed == 0, "{failed} of {} models failed", reports.len());
    Ok(())
}

/// Checks one model.
fn check(
    args: &Args,
    backend: &dyn Backend,
    model: &str,
    suite: Option<&Suite>,
    before: &[Record],
    report: &mut Report,
) -> Result<Record> {
    let mut opened = find_model(model)?;
    eprintln!("checking {}", report.model);
    let tokenizer = args.tokenizer.open(&opened.file)?;
    let is_encoder = opened.plan.is_encoder();
    let mut record = match is_encoder {
        true => encoder::check(args, backend, &opened, &tokenizer, suite, report)?,
        false => decoder::numbers(args, backend, &mut opened, &tokenizer, report)?,
    };
    let earlier = earlier(args, &opened, before);
    if args.speed {
        let earlier = earlier.and_then(|earlier| earlier.speed.as_ref());
        record.speed = Some(speed(args, &opened, backend, earlier)?);
    }
    if args.baseline.is_some() {
        compare_with_baseline(args, &opened, &record, earlier, before, report);
    }
    report.speed.clone_from(&record.speed);
    if !is_encoder {
        decoder::words(args, backend, &mut opened, &tokenizer, report)?;
        if let Some(suite) = suite {
            let cases = &suite.answers;
            decoder::suite(args, backend, &mut opened, &tokenizer, cases, report)?;
        }
    }
    Ok(record)
}

/// The speed of a model. One that is too far below the earlier one is measured again: other load
/// may explain it, but not every time.
fn speed(
    args: &Args,
    opened: &ModelFile,
    backend: &dyn Backend,
    earlier: Option<&Speed>,
) -> Result<Speed> {
    let change = |speed: &Speed| earlier.and_then(|earlier| speed.change_from(earlier));
    let is_enough = |change: f64| -100.0 * change <= args.thresholds.max_slowdown;
    let mut best = speeds(opened, backend)?;
    for _ in 1..SPEED_MEASUREMENTS {
        if change(&best).is_none_or(is_enough) {
            break;
        }
        let again = speeds(opened, backend)?;
        if change(&again) > change(&best) {
            best = again;
        }
    }
    Ok(best)
}

/// The baseline's record of the same model, or the only one.
fn earlier<'a>(args: &Args, opened: &ModelFile, before: &'a [Record]) -> Option<&'a Record> {
    find(before, Path::new(&opened.name)).or(match before {
        [only] if args.models.len() == 1 => Some(only),
        _ => None,
    })
}

/// Compares with a record of the baseline `before`.
fn compare_with_baseline(
    args: &Args,
    opened: &ModelFile,
    record: &Record,
    earlier: Option<&Record>,
    before: &[Record],
    report: &mut Report,
) {
    match earlier {
        Some(found) => {
            if !Path::new(&opened.name).ends_with(&found.name) {
                eprintln!("comparing with the baseline of {}", found.name);
            }
            compare(args, record, found, report);
        }
        None => {
            let names: Vec<&str> = before.iter().map(|record| record.name.as_str()).collect();
            let names = names.join(", ");
            report.faults.push(format!("the baseline does not have this model, only {names}"));
        }
    }
}

/// Compares two records of a model.
fn compare(args: &Args, record: &Record, before: &Record, report: &mut Report) {
    let Thresholds { max_mse, max_kl, max_perplexity_change, .. } = args.thresholds;
    let Some(change) = record.change_from(before) else {
        let fault = "other tokens or another vocabulary than in the baseline";
        return report.faults.push(fault.to_owned());
    };
    let distance = args.thresholds.max_cosine_distance;
    let percent = change.perplexity.map(|change| 100.0 * change.abs());
    let mse = change.perplexity.map(|_| change.mse);
    for (what, value, limit) in [
        ("logits: mean squared error", mse, max_mse),
        ("predictions: KL divergence", change.divergence, max_kl),
        ("perplexity: change in percent", percent, max_perplexity_change),
        ("embeddings: cosine distance", change.cosine_distance, distance),
    ] {
        // NaN exceeds every limit.
        if let Some(value) = value.filter(|value| value.is_nan() || *value > limit) {
            report.faults.push(format!("{what} {value:.4}, at most {limit}"));
        }
    }
    report.change = Some(change);
    if let Some(speed) = &record.speed {
        compare_speeds(args, speed, before.speed.as_ref(), report);
    }
}

fn compare_speeds(args: &Args, speed: &Speed, before: Option<&Speed>, report: &mut Report) {
    let Some(before) = before else {
        let fault = "the baseline has no speed; --speed --save-baseline writes it";
        return report.faults.push(fault.to_owned());
    };
    let Some(change) = speed.change_from(before) else {
        let fault =
            format!("the baseline's speed is of {}, this is {}", before.backend, speed.backend);
        return report.faults.push(fault);
    };
    let (percent, limit) = (-100.0 * change, args.thresholds.max_slowdown);
    if percent.is_nan() || percent > limit {
        report.faults.push(format!("speed: {percent:.1} % less, at most {limit}"));
    }
    report.speed_change = Some(change);
}
