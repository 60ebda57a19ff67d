//! The result of `check`: a table with a row for each model and a line for each fault, or JSON.

use std::io::Write;

use anyhow::Result;
use bodkin_eval::check::baseline::{Change, Speed};
use bodkin_eval::check::health::Health;
use serde_json::{Value, json};

use super::reference::Agreement;

/// How many of several cases passed.
#[derive(Clone, Copy)]
pub(super) struct Cases {
    pub(super) good: usize,
    pub(super) all: usize,
}

/// The results of one model. What was not checked is none.
#[derive(Default)]
pub(super) struct Report {
    pub(super) model: String,
    /// Answers to the fixed prompts.
    pub(super) answers: Option<Cases>,
    /// The cases of a suite.
    pub(super) suite: Option<Cases>,
    pub(super) health: Option<Health>,
    /// Length of the sequence that exceeds the sliding window, or of an encoder's longest text.
    pub(super) long_tokens: Option<usize>,
    /// Size of the context that was filled.
    pub(super) context: Option<usize>,
    pub(super) change: Option<Change>,
    pub(super) speed: Option<Speed>,
    /// The relative change of the speed.
    pub(super) speed_change: Option<f64>,
    pub(super) agreement: Option<Agreement>,
    /// One line for each failed check.
    pub(super) faults: Vec<String>,
}

const HEAD: [&str; 14] = [
    "model",
    "answers",
    "suite",
    "activation",
    "logit",
    "perplexity",
    "long run",
    "context",
    "MSE",
    "KL",
    "cosine",
    "speed",
    "reference",
    "result",
];

/// Prints the table, then the faults.
pub(super) fn print(reports: &[Report]) -> Result<()> {
    let mut rows = vec![HEAD.map(str::to_owned)];
    rows.extend(reports.iter().map(row));
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max();
    let widths: Vec<usize> = (0..HEAD.len()).map(|column| width(column).unwrap_or(0)).collect();
    let mut out = std::io::stdout().lock();
    for row in &rows {
        let cells = row.iter().zip(&widths).enumerate().map(|(column, (cell, &width))| {
            if column == 0 { format!("{cell:width$}") } else { format!("{cell:>width$}") }
        });
        writeln!(out, "{}", cells.collect::<Vec<_>>().join("  "))?;
    }
    for report in reports {
        for fault in &report.faults {
            writeln!(out, "{}: {fault}", report.model)?;
        }
    }
    Ok(())
}

fn row(report: &Report) -> [String; HEAD.len()] {
    let or_none = |cell: Option<String>| cell.unwrap_or_else(|| "-".to_owned());
    let health = report.health.as_ref();
    let largest = health.map(|health| {
        let ranges = health.ranges.layers.values();
        ranges.map(|range| range.magnitude()).fold(0.0, f32::max)
    });
    let change = report.change;
    let with_change = |value: String| match change.and_then(|change| change.perplexity) {
        Some(change) => format!("{value} ({:+.2} %)", 100.0 * change),
        None => value,
    };
    let cases = |cases: Option<Cases>| cases.map(|Cases { good, all }| format!("{good}/{all}"));
    let speed = report.speed.as_ref().map(|speed| match report.speed_change {
        Some(change) => format!("{:+.1} %", 100.0 * change),
        None => format!("{:.1}", speed.decode.unwrap_or(speed.prefill).tokens),
    });
    [
        report.model.clone(),
        or_none(cases(report.answers)),
        or_none(cases(report.suite)),
        or_none(largest.map(|x| format!("{x:.1}"))),
        or_none(health.map(|health| format!("{:.1}", health.logits.magnitude))),
        or_none(health.map(|health| with_change(format!("{:.4}", health.perplexity.value())))),
        or_none(report.long_tokens.map(|tokens| tokens.to_string())),
        or_none(report.context.map(|tokens| tokens.to_string())),
        or_none(change.map(|change| format!("{:.2e}", change.mse))),
        or_none(change.and_then(|change| change.divergence).map(|kl| format!("{kl:.2e}"))),
        or_none(change.and_then(|change| change.cosine_distance).map(|x| format!("{x:.2e}"))),
        or_none(speed),
        or_none(report.agreement.as_ref().map(|a| format!("{}/{}", a.same, a.tokens))),
        if report.faults.is_empty() { "ok" } else { "FAILED" }.to_owned(),
    ]
}

/// Prints all results, with the activation range of each layer.
pub(super) fn json(reports: &[Report]) -> Result<()> {
    let models: Vec<Value> = reports.iter().map(object).collect();
    writeln!(std::io::stdout().lock(), "{:#}", json!({ "models": models }))?;
    Ok(())
}

fn object(report: &Report) -> Value {
    let health = report.health.as_ref().map(|health| {
        let layers = health.ranges.layers.iter().map(|(layer, range)| {
            json!({
                "layer": layer,
                "min": range.min,
                "max": range.max,
                "not_finite": range.not_finite,
            })
        });
        let logits = health.logits;
        json!({
            "layers": layers.collect::<Vec<_>>(),
            "perplexity": health.perplexity.value(),
            "logits": {
                "rows": logits.rows,
                "not_finite": logits.not_finite,
                "flat": logits.flat,
                "saturated": logits.saturated,
                "magnitude": logits.magnitude,
            },
        })
    });
    let change = report.change.map(|change| {
        json!({
            "mse": change.mse,
            "divergence": change.divergence,
            "perplexity_change": change.perplexity,
            "cosine_distance": change.cosine_distance,
        })
    });
    let reference = report.agreement.as_ref().map(|agreement| {
        json!({
            "tokens": agreement.tokens,
            "same": agreement.same,
            "near_ties": agreement.near_ties,
            "mean_logprob_difference": agreement.mean_difference(),
        })
    });
    let cases = |cases: Option<Cases>| cases.map(|Cases { good, all }| json!([good, all]));
    let speed = report.speed.as_ref().map(|speed| {
        let Speed { backend, prefill, decode } = speed;
        json!({
            "backend": backend,
            "prefill_tok_s": prefill.tokens,
            "prefill_over_reference": prefill.ratio,
            "decode_tok_s": decode.map(|decode| decode.tokens),
            "decode_over_reference": decode.map(|decode| decode.ratio),
            "change": report.speed_change,
        })
    });
    json!({
        "model": report.model,
        "answers": cases(report.answers),
        "suite": cases(report.suite),
        "health": health,
        "long_tokens": report.long_tokens,
        "context": report.context,
        "baseline": change,
        "speed": speed,
        "reference": reference,
        "faults": report.faults,
    })
}
