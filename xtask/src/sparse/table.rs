//! The tables of `docs/sparsity.md`, made from the rows of `sparse`.

use std::fmt::Write;
use std::path::Path;

use anyhow::Result;
use serde_json::Value;

use crate::results::{newest, number, replace, text};

/// The fields that identify a measurement.
pub(crate) const KEYS: [&str; 6] = ["kind", "cpu", "threads", "file", "test", "share"];

/// Replaces the tables by the newest row of each measurement.
pub(super) fn rewrite(document: &Path, results: &Path) -> Result<()> {
    let rows = newest(results, &KEYS)?;
    replace(document, "sparse", &(weights(&rows)? + "\n" + &activations(&rows)?))
}

/// The columns that both tables have: the test, both speeds, their ratio, and the least and the
/// largest one of the pairs.
fn speeds(row: &Value) -> String {
    let mut ratios: Vec<f64> =
        row["ratios"].as_array().into_iter().flatten().filter_map(Value::as_f64).collect();
    ratios.sort_by(f64::total_cmp);
    let spread = match (ratios.first(), ratios.last()) {
        (Some(least), Some(most)) => format!("{least:.2} to {most:.2}"),
        _ => "-".to_owned(),
    };
    format!(
        "{} | {:.1} | {:.1} | **{:.2}x** | {spread}",
        text(row, "test"),
        number(row, "dense_tok_s"),
        number(row, "sparse_tok_s"),
        number(row, "ratio"),
    )
}

/// Zeros that are left out.
fn weights(rows: &[Value]) -> Result<String> {
    let mut out = String::from(
        "| format | zeros | test | dense, tok/s | sparse, tok/s | ratio | of pairs | \
         bytes allow |\n\
         | --- | ---: | --- | ---: | ---: | ---: | ---: | ---: |\n",
    );
    for row in rows.iter().filter(|row| row["kind"] == "weights") {
        // What bounds prompts is arithmetic.
        let bound = match text(row, "test").starts_with("tg") {
            true => format!("{:.2}", number(row, "bytes_ratio")),
            false => "-".to_owned(),
        };
        writeln!(
            out,
            "| {} | {:.0} % | {} | {bound} |",
            text(row, "format"),
            100.0 * number(row, "sparsity"),
            speeds(row),
        )?;
    }
    Ok(out)
}

/// Activations that are skipped.
fn activations(rows: &[Value]) -> Result<String> {
    let mut out = String::from(
        "| file | skipped | test | dense, tok/s | skipping, tok/s | ratio | of pairs | \
         perplexity (all inputs) |\n\
         | --- | ---: | --- | ---: | ---: | ---: | ---: | ---: |\n",
    );
    for row in rows.iter().filter(|row| row["kind"] == "activations") {
        let perplexity = match row["perplexity"].as_f64() {
            Some(value) => format!("{value:.2} ({:.2})", number(row, "dense_perplexity")),
            None => "-".to_owned(),
        };
        writeln!(
            out,
            "| {} | {:.0} % | {} | {perplexity} |",
            text(row, "file"),
            100.0 * number(row, "share"),
            speeds(row),
        )?;
    }
    Ok(out)
}
