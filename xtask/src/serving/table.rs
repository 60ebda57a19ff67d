//! The table of docs/performance.md, made from the rows of `serving`.

use std::fmt::Write;
use std::path::Path;

use anyhow::Result;
use serde_json::Value;

use crate::peer::spelled;
use crate::results::{newest, number, replace, text};

/// Replaces the table by the newest row of each load, server and machine.
pub(super) fn rewrite(document: &Path, results: &Path) -> Result<()> {
    let rows = newest(results, &["device", "threads", "file", "load", "ctx_size", "server"])?;
    let mut table = String::from(
        "| machine | file | load | server | tok/s | first token, ms | inter-token, ms | ratio |\n\
         | --- | --- | --- | --- | ---: | ---: | ---: | ---: |\n",
    );
    for row in &rows {
        let ratio = row["ratio"].as_f64();
        let ratio = ratio.map_or("-".to_owned(), |ratio| format!("**{ratio:.2}x**"));
        writeln!(
            table,
            "| {} | {} | {} | {} | {:.0} | {} | {} | {ratio} |",
            machine(row),
            text(row, "file"),
            load(row),
            spelled(text(row, "server")),
            number(row, "total_tok_s"),
            percentiles(&row["first_token_ms"], 0),
            percentiles(&row["inter_token_ms"], 1),
        )?;
    }
    replace(document, "serving", &table)
}

fn machine(row: &Value) -> String {
    let device = text(row, "device");
    match row["threads"].as_u64() {
        Some(threads) => format!("{threads} threads of {device}"),
        None => device.to_owned(),
    }
}

/// What the streams do, and the context of each.
fn load(row: &Value) -> String {
    let load = text(row, "load");
    row["ctx_size"].as_u64().map_or(load.to_owned(), |tokens| format!("{load} ctx{tokens}"))
}

/// `p50, p95, p99`; requests for embeddings have no time between tokens.
fn percentiles(numbers: &Value, digits: usize) -> String {
    if numbers["p50"].is_null() {
        return "-".to_owned();
    }
    ["p50", "p95", "p99"].map(|name| format!("{:.digits$}", number(numbers, name))).join(", ")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn percentiles_are_in_order() {
        let numbers = json!({ "p99": 3.25, "p50": 1.0, "p95": 2.0 });
        assert_eq!(percentiles(&numbers, 1), "1.0, 2.0, 3.2");
        assert_eq!(percentiles(&json!({ "p50": null }), 1), "-");
    }
}
