//! Tables of documents that are made from files of results: which rows count, and where the table
//! is. It must not know what was measured.

use std::path::Path;

use anyhow::{Context, Result};
use serde_json::Value;

const END: &str = "<!-- end of table -->";

/// The rows of a file. A later row replaces an earlier one with the same `keys`.
pub(crate) fn newest(results: &Path, keys: &[&str]) -> Result<Vec<Value>> {
    let mut newest: Vec<Value> = Vec::new();
    for line in std::fs::read_to_string(results)?.lines() {
        let row: Value = serde_json::from_str(line)?;
        let same = |other: &Value| keys.iter().all(|&key| other[key] == row[key]);
        match newest.iter().position(same) {
            Some(i) => newest[i] = row,
            None => newest.push(row),
        }
    }
    Ok(newest)
}

/// A number of a row; NaN if it has none of that name.
pub(crate) fn number(row: &Value, name: &str) -> f64 {
    row[name].as_f64().unwrap_or(f64::NAN)
}

/// A text of a row.
pub(crate) fn text<'a>(row: &'a Value, name: &str) -> &'a str {
    row[name].as_str().unwrap_or("?")
}

/// Puts a table in the place in a document that is marked with the command which makes it.
pub(crate) fn replace(document: &Path, command: &str, table: &str) -> Result<()> {
    let start = format!("<!-- table: cargo xtask {command} -->\n");
    let name = document.display();
    let text = std::fs::read_to_string(document)?;
    let parts = text.split_once(&start);
    let (before, rest) = parts.with_context(|| format!("{name}: no {}", start.trim_end()))?;
    let (_, after) = rest.split_once(END).with_context(|| format!("{name}: no {END}"))?;
    std::fs::write(document, format!("{before}{start}{table}{END}{after}"))?;
    Ok(())
}
