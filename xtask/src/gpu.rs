//! `cargo xtask gpu`: bodkin on an NVIDIA device, with model files as `synth` makes them. Appends
//! rows to `benches/results/gpu.jsonl` and rewrites the table of docs/performance.md from them.

use std::collections::HashSet;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use crate::compare::{append, commit, median, release_binary};
use crate::peer::{Peer, Run, spelled};
use crate::results::{newest, number, replace, text};

const RESULTS: &str = "benches/results/gpu.jsonl";

/// Measurements of each test.
const REPETITIONS: usize = 5;

/// What to measure.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Files named SHAPE-FORMAT.gguf; without any, only the table is made
    files: Vec<PathBuf>,
    /// Where to compute
    #[arg(long, default_value = "cuda")]
    device: String,
    /// Tokens in the context before tests begin
    #[arg(long, default_value = "0,4096")]
    depths: String,
    /// Sequences that generate at the same time
    #[arg(long, default_value = "1")]
    sequences: String,
    /// The binary; without it, one is built
    #[arg(long)]
    binary: Option<PathBuf>,
    /// The commit that the binary was built from [default: that of the checkout]
    #[arg(long)]
    commit: Option<String>,
    /// A folder with `llama-bench` and `llama-batched-bench` of llama.cpp, which run each test
    /// after bodkin
    #[arg(long, value_name = "DIR")]
    peer: Option<PathBuf>,
    /// Where rows are appended [default: benches/results/gpu.jsonl]
    #[arg(long)]
    output: Option<PathBuf>,
}

/// Runs all tests.
pub(crate) fn run(root: &Path, args: &Args) -> Result<()> {
    if !args.files.is_empty() {
        measure(root, args)?;
    }
    table(&root.join("docs/performance.md"), &root.join(RESULTS))
}

fn measure(root: &Path, args: &Args) -> Result<()> {
    let binary = release_binary(root, args.binary.as_deref())?;
    let commit = args.commit.clone().map_or_else(|| commit(root), Ok)?;
    let output = args.output.clone().unwrap_or_else(|| root.join(RESULTS));
    let driver = driver()?;
    let peer = args.peer.as_deref().map(|folder| Peer::open(root, Some(folder))).transpose()?;
    for path in &args.files {
        let stem = path.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default();
        let (shape, format) = stem.split_once('-').with_context(|| {
            format!("{}: expected a name like SHAPE-FORMAT.gguf", path.display())
        })?;
        for row in bench(&binary, path, args)? {
            let samples: Vec<f64> = serde_json::from_value(row["samples_ts"].clone())?;
            let tok_s = median(&samples);
            let mean = row["avg_ts"].as_f64().context("no avg_ts")?;
            let gb_s = row["gb_s"].as_f64().context("no gb_s")? * tok_s / mean;
            let mut row = json!({
                "commit": commit, "driver": driver, "device": row["backends"],
                "shape": shape, "format": format, "test": row["test"],
                "tok_s": tok_s, "gb_s": gb_s, "samples_ts": samples,
                "bandwidth_gb_s": row["bandwidth_gb_s"], "time": row["test_time_unix_s"],
            });
            if let Some(peer) = &peer {
                add_peer(root, peer, path, &mut row)?;
            }
            append(&output, &row)?;
            println!("{row}");
        }
    }
    Ok(())
}

/// Runs the test of a row with the peer.
fn add_peer(root: &Path, peer: &Peer, model: &Path, row: &mut Value) -> Result<()> {
    let test = Test::parse(text(row, "test"))?;
    let Test { prompt, generate, sequences, depth } = test;
    let (threads, repetitions) = (None, REPETITIONS);
    let is_on_gpu = true;
    let run = Run { model, prompt, generate, sequences, depth, threads, repetitions, is_on_gpu };
    let report = peer.run(root, &run)?;
    row["peer"] = report.name.into();
    row["peer_tok_s"] = median(&report.samples).into();
    row["peer_samples_ts"] = report.samples.into();
    Ok(())
}

/// What the name of a test of `bodkin bench` says.
#[derive(Debug, PartialEq)]
struct Test {
    prompt: usize,
    generate: usize,
    sequences: usize,
    depth: usize,
}

impl Test {
    /// From a name such as `pp512`, `tg128 x8` or `tg128 x8 @ d4096`.
    fn parse(name: &str) -> Result<Test> {
        let (test, depth) = name.split_once(" @ d").unwrap_or((name, "0"));
        let (test, sequences) = test.split_once(" x").unwrap_or((test, "1"));
        let expected = || format!("expected a test such as tg128 x8 @ d4096, found {name}");
        let (kind, count) = test.split_at_checked(2).with_context(expected)?;
        let count = count.parse().with_context(expected)?;
        Ok(Test {
            prompt: if kind == "pp" { count } else { 0 },
            generate: if kind == "pp" { 0 } else { count },
            sequences: sequences.parse().with_context(expected)?,
            depth: depth.parse().with_context(expected)?,
        })
    }
}

/// Replaces the tables by the newest row of each device, shape, format and test: a table for each
/// device, with a line for each model.
fn table(document: &Path, results: &Path) -> Result<()> {
    let rows = newest(results, &["device", "shape", "format", "test"])?;
    let devices = distinct(rows.iter().map(|row| text(row, "device").to_owned()));
    let tables = devices.iter().map(|device| {
        let of_device = rows.iter().filter(|row| text(row, "device") == device);
        device_table(&of_device.collect::<Vec<_>>())
    });
    replace(document, "gpu", &tables.collect::<Result<Vec<_>>>()?.join("\n"))
}

/// The table of a device.
fn device_table(rows: &[&Value]) -> Result<String> {
    let tests = distinct(rows.iter().map(|row| text(row, "test").to_owned()));
    let models = distinct(rows.iter().map(|row| model(row)));
    let mut table = format!("| tokens a second | {} |\n", tests.join(" | "));
    writeln!(table, "| --- |{}", " ---: |".repeat(tests.len()))?;
    for name in &models {
        write!(table, "| {name} |")?;
        for test in &tests {
            let row = rows.iter().find(|row| model(row) == *name && text(row, "test") == *test);
            write!(table, " {} |", row.map_or("-".to_owned(), |row| cell(row)))?;
        }
        writeln!(table)?;
    }
    if let Some(row) = rows.last() {
        let (device, driver) = (text(row, "device"), text(row, "driver"));
        let peer = rows.iter().map(|row| text(row, "peer")).rfind(|peer| *peer != "?");
        writeln!(
            table,
            "\nMedians of five; {device}, driver {driver}; random weights in usual shapes; in \
             brackets what was read, as a share of the bandwidth measured with it; bold is the \
             ratio to {} with flash attention, measured after each test.",
            peer.map_or("a peer".to_owned(), spelled)
        )?;
    }
    Ok(table)
}

/// Each name once, in the order of their first places.
fn distinct(names: impl Iterator<Item = String>) -> Vec<String> {
    let mut seen = HashSet::new();
    names.filter(|name| seen.insert(name.clone())).collect()
}

fn model(row: &Value) -> String {
    format!("{} {}", text(row, "shape"), text(row, "format"))
}

fn cell(row: &Value) -> String {
    let speed = number(row, "tok_s");
    let share = 100.0 * number(row, "gb_s") / number(row, "bandwidth_gb_s");
    let share = text(row, "test").starts_with("tg").then(|| format!(" ({share:.0} %)"));
    let ratio = speed / number(row, "peer_tok_s");
    let ratio = ratio.is_finite().then(|| format!(", **{ratio:.2}x**"));
    format!("{speed:.0}{}{}", share.unwrap_or_default(), ratio.unwrap_or_default())
}

/// The rows that `bodkin bench` gives.
fn bench(binary: &Path, path: &Path, args: &Args) -> Result<Vec<Value>> {
    let output = Command::new(binary)
        .arg("bench")
        .arg(path)
        .args(["-p", "512", "-n", "128", "-d", &args.depths, "-o", "json"])
        .args(["-r", &REPETITIONS.to_string()])
        .args(["--device", &args.device, "--n-sequences", &args.sequences])
        .output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "bodkin bench: {}", said.trim());
    Ok(serde_json::from_slice(&output.stdout)?)
}

/// The driver's version.
fn driver() -> Result<String> {
    query("driver_version").context("nvidia-smi gives no version of the driver")
}

/// The name of the first device, if there is one.
pub(crate) fn name() -> Option<String> {
    query("name")
}

/// A property of the first device.
fn query(property: &str) -> Option<String> {
    let output = Command::new("nvidia-smi")
        .args([&format!("--query-gpu={property}"), "--format=csv,noheader"])
        .output()
        .ok()?;
    let text = String::from_utf8(output.stdout).ok().filter(|_| output.status.success())?;
    Some(text.lines().next()?.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_tests_are_parsed() {
        let parsed = Test::parse("tg128 x8 @ d4096").unwrap();
        assert_eq!(parsed, Test { prompt: 0, generate: 128, sequences: 8, depth: 4096 });
        let parsed = Test::parse("pp512").unwrap();
        assert_eq!(parsed, Test { prompt: 512, generate: 0, sequences: 1, depth: 0 });
        assert!(Test::parse("p").is_err());
        assert!(Test::parse("tg128 kv q8_0").is_err());
    }
}
