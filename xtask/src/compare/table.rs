//! The table of docs/performance.md, made from the rows of `compare`.

use std::fmt::Write;
use std::path::Path;

use anyhow::Result;
use serde_json::Value;

use crate::peer::spelled;
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

/// What a row is of: a later row with the same values replaces it in the tables.
pub(crate) const KEYS: [&str; 7] =
    ["cpu", "threads", "model", "test", "peer", "peer_instruction_sets", "instruction_sets"];

/// Replaces the tables by the newest row of each model, test and builds, a table for each machine.
pub(crate) fn rewrite(document: &Path, results: &Path) -> Result<()> {
    let newest = newest(results, &KEYS)?;
    let mut machines: Vec<[&Value; 2]> = Vec::new();
    for row in &newest {
        let machine = [&row["cpu"], &row["threads"]];
        if !machines.contains(&machine) {
            machines.push(machine);
        }
    }
    let mut tables = String::new();
    for [cpu, threads] in machines {
        let rows = newest.iter().filter(|row| row["cpu"] == *cpu && row["threads"] == *threads);
        write_machine(&mut tables, &rows.collect::<Vec<_>>())?;
    }
    replace(document, "compare", &tables)
}

/// The table of one machine, with the builds of its rows under it.
fn write_machine(out: &mut String, rows: &[&Value]) -> Result<()> {
    let (cpu, threads) = (text(rows[0], "cpu"), &rows[0]["threads"]);
    writeln!(out, "\n{threads} threads of {cpu}:\n")?;
    out.push_str(
        "| model | test | bodkin, tok/s | peer, tok/s | ratio | of memory bandwidth | builds |\n\
         | --- | --- | ---: | ---: | ---: | ---: | --- |\n",
    );
    let mut builds: Vec<String> = Vec::new();
    for row in rows {
        let pair = format!(
            "{} with {}; bodkin with {}",
            spelled(text(row, "peer")),
            text(row, "peer_instruction_sets"),
            text(row, "instruction_sets")
        );
        let known = builds.iter().position(|other| *other == pair).unwrap_or(builds.len());
        if known == builds.len() {
            builds.push(pair);
        }
        writeln!(out, "{} {} |", line(row), known + 1)?;
    }
    writeln!(out)?;
    for (i, pair) in builds.iter().enumerate() {
        writeln!(out, "{}. {pair}", i + 1)?;
    }
    Ok(())
}
