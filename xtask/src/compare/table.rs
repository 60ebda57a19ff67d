//! The table of docs/performance.md, made from the rows of `compare`.

use std::fmt::Write;
use std::path::Path;

use anyhow::Result;
use serde_json::Value;

use crate::results::{newest, number, replace, text};

/// One row in Markdown.
pub(crate) fn line(row: &Value) -> String {
    let share = 100.0 * number(row, "gb_s") / number(row, "bandwidth_gb_s");
    let share = match text(row, "test").starts_with("tg") {
        true => format!("{share:.0} %"),
        false => "-".to_owned(),
    };
    format!(
        "| {} | {} | {:.0} | {:.0} | **{:.2}x** | {share} |",
        text(row, "model"),
        text(row, "test"),
        number(row, "tok_s"),
        number(row, "peer_tok_s"),
        number(row, "ratio"),
    )
}

/// Replaces the table by the newest row of each model, test and machine.
pub(crate) fn rewrite(document: &Path, results: &Path) -> Result<()> {
    let newest = newest(results, &["cpu", "threads", "model", "test", "peer"])?;
    let mut table = String::from(
        "| model | test | bodkin, tok/s | llama.cpp, tok/s | ratio | of memory bandwidth |\n\
         | --- | --- | ---: | ---: | ---: | ---: |\n",
    );
    for row in &newest {
        writeln!(table, "{}", line(row))?;
    }
    if let Some(row) = newest.last() {
        let (cpu, threads, peer) = (text(row, "cpu"), &row["threads"], text(row, "peer"));
        writeln!(
            table,
            "\nInterleaved A/B medians; {threads} threads of {cpu}; the peer is {peer}."
        )?;
    }
    replace(document, "compare", &table)
}
