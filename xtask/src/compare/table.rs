//! The README's table, made from the rows of `compare`.

use std::fmt::Write;
use std::path::Path;

use anyhow::{Context, Result};
use serde_json::Value;

const START: &str = "<!-- table: cargo xtask compare -->\n";
const END: &str = "<!-- end of table -->";

/// One row in Markdown.
pub(crate) fn line(row: &Value) -> String {
    let number = |name: &str| row[name].as_f64().unwrap_or(f64::NAN);
    let text = |name: &str| row[name].as_str().unwrap_or("?").to_owned();
    let share = 100.0 * number("gb_s") / number("bandwidth_gb_s");
    let share = match text("test").starts_with("tg") {
        true => format!("{share:.0} %"),
        false => "-".to_owned(),
    };
    format!(
        "| {} | {} | {:.0} | {:.0} | **{:.2}x** | {share} |",
        text("model"),
        text("test"),
        number("tok_s"),
        number("peer_tok_s"),
        number("ratio"),
    )
}

/// Replaces the table in the README by the newest row of each model, test and machine.
pub(crate) fn rewrite(readme: &Path, results: &Path) -> Result<()> {
    let rows = std::fs::read_to_string(results)?;
    let mut newest: Vec<Value> = Vec::new();
    for line in rows.lines() {
        let row: Value = serde_json::from_str(line)?;
        let same = |other: &Value| {
            ["cpu", "threads", "model", "test", "peer"].iter().all(|&key| other[key] == row[key])
        };
        match newest.iter().position(same) {
            Some(i) => newest[i] = row,
            None => newest.push(row),
        }
    }
    let text = std::fs::read_to_string(readme)?;
    let (before, rest) = text.split_once(START).context("README.md has no table to rewrite")?;
    let (_, after) = rest.split_once(END).context("README.md's table has no end")?;
    let mut table = String::from(
        "| model | test | bodkin, tok/s | llama.cpp, tok/s | ratio | of memory bandwidth |\n\
         | --- | --- | ---: | ---: | ---: | ---: |\n",
    );
    for row in &newest {
        writeln!(table, "{}", line(row))?;
    }
    if let Some(row) = newest.last() {
        let text = |name: &str| row[name].as_str().unwrap_or("?").to_owned();
        let (cpu, threads, peer) = (text("cpu"), &row["threads"], text("peer"));
        writeln!(
            table,
            "\nMedians of pairs in turns; {threads} threads of {cpu}; the peer is {peer}."
        )?;
    }
    std::fs::write(readme, format!("{before}{START}{table}{END}{after}"))?;
    Ok(())
}
