//! The tables of `docs/quality.md`, made from the rows of `quality`.

use std::fmt::Write;
use std::path::Path;

use anyhow::{Context, Result};
use serde_json::Value;

use crate::results::{newest, number, replace, text};

/// The fields that identify a measurement.
pub(crate) const KEYS: [&str; 8] =
    ["kind", "file", "cpu", "type", "method", "amount", "format", "variant"];

/// Replaces the tables by the newest row of each model and way.
pub(super) fn rewrite(docs: &Path, results: &Path) -> Result<()> {
    let rows = newest(results, &KEYS)?;
    let tables = pruned(&rows)? + "\n" + &quantized(&rows)?;
    replace(&docs.join("quality.md"), "quality", &tables)?;
    Ok(())
}

fn of_kind<'a>(rows: &'a [Value], kind: &str) -> impl Iterator<Item = &'a Value> {
    let kind = kind.to_owned();
    rows.iter().filter(move |row| row["kind"] == kind.as_str())
}

/// The models of a run of `bodkin prune`: before, pruned, as precise, as large.
fn models(row: &Value) -> Result<[&Value; 4]> {
    let rows = row["rows"].as_array().context("a row of pruning has rows")?;
    let [before, pruned, precise, large] = rows.as_slice() else {
        anyhow::bail!("expected 4 rows of pruning, found {}", rows.len());
    };
    Ok([before, pruned, precise, large])
}

/// A table of ways to prune.
fn pruned(rows: &[Value]) -> Result<String> {
    let mut out = String::from(
        "| model | pruned | bits | perplexity (before) | KL | tok/s (before) | as precise, dense: \
         bits, perplexity, tok/s | as large, dense: type, perplexity, tok/s | better |\n\
         | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |\n",
    );
    for row in of_kind(rows, "prune") {
        let [before, pruned, precise, large] = models(row)?;
        let cell = |model: &Value, name: &str| number(model, name);
        let perplexity = |model| cell(model, "perplexity");
        let kind = row["dense_type_of_the_size"].as_str().unwrap_or("?");
        let speeds = |variant: &str| speeds_of(rows, row, variant);
        let ours = speeds(&format!("{}:{}", text(row, "amount"), text(row, "format")));
        let shown = |speed: f64| match speed.is_nan() {
            true => "-".to_owned(),
            false => format!("{speed:.0}"),
        };
        let better = match row["dense_is_better"].as_bool() {
            Some(true) => kind,
            Some(false) => "pruned",
            None => "neither",
        };
        writeln!(
            out,
            "| {} | {} | {:.2} | {:.2} ({:.2}) | {:.4} | {} ({}) | {:.2}, {:.2}, {} | \
             {kind}, {:.2}, {} | {better} |",
            row["file"].as_str().unwrap_or("?"),
            way(row),
            cell(pruned, "bits_per_weight"),
            perplexity(pruned),
            perplexity(before),
            cell(pruned, "divergence"),
            shown(ours[0]),
            shown(speeds("before")[0]),
            cell(precise, "bits_per_weight"),
            perplexity(precise),
            shown(ours[1]),
            perplexity(large),
            shown(speeds(kind)[0]),
        )?;
    }
    Ok(out)
}

/// Tokens a second of a variant of a row's model, and of the same with its zeros.
fn speeds_of(rows: &[Value], row: &Value, variant: &str) -> [f64; 2] {
    let mut speeds = of_kind(rows, "speed");
    let found = speeds.find(|speed| {
        ["file", "cpu", "threads"].iter().all(|&key| speed[key] == row[key])
            && speed["variant"] == variant
    });
    let names = ["tokens_per_second", "dense_tokens_per_second"];
    names.map(|name| found.map_or(f64::NAN, |speed| number(speed, name)))
}

/// A way to prune in a few words.
fn way(row: &Value) -> String {
    let amount = match text(row, "amount").parse::<f64>() {
        Ok(share) => format!("{:.0} %", 100.0 * share),
        Err(_) => text(row, "amount").to_owned(),
    };
    format!("{} {amount} {}", text(row, "method"), text(row, "format"))
}

/// A table of types of files.
fn quantized(rows: &[Value]) -> Result<String> {
    let mut out = String::from(
        "| model | type | chunks | bits | perplexity | of F16 | made by llama.cpp | ratio |\n\
         | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |\n",
    );
    for row in of_kind(rows, "quantize") {
        writeln!(
            out,
            "| {} | {} | {} | {:.2} | {:.3} | {:.3} | {:.3} | {:.4} |",
            row["file"].as_str().unwrap_or("?"),
            row["type"].as_str().unwrap_or("?"),
            row["chunks"],
            number(row, "bits_per_weight"),
            number(row, "perplexity"),
            number(row, "source_perplexity"),
            number(row, "peer_perplexity"),
            number(row, "ratio"),
        )?;
    }
    Ok(out)
}
