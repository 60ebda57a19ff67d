//! `cargo xtask sparse`: bodkin on files with sparse formats, without their zeros and with them, in
//! turns of a few tokens in one process, because the machine may be shared: only ratios of what is
//! measured side by side say something.
//! Appends rows to `benches/results/sparse.jsonl`. The dense runs are of the same file made dense
//! while it is loaded: the same kernels, on the same bytes, as a dense file of the base format has.
//! Rewrites the tables of `docs/sparsity.md` from the rows.
//!
//! With `--activations`, any file is run by the binary with shares of its activations skipped and
//! without, and its perplexity measured if there is a text.

mod interleaved;
mod table;

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use bodkin_gguf::File;
use bodkin_model::{Plan, Weight};
use serde_json::{Value, json};

use interleaved::{Pairs, Test};
pub(crate) use table::KEYS;

use crate::compare::{append, commit, cpu_name, median, run_cargo};

const RESULTS: &str = "benches/results/sparse.jsonl";

/// What to measure.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Files with weights in sparse formats, such as `synth` makes them; none for the table alone.
    #[arg(value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Threads.
    #[arg(short, long, default_value_t = 2)]
    threads: usize,
    /// Pairs of runs for each test.
    #[arg(short, long, default_value = "3")]
    pairs: std::num::NonZeroUsize,
    /// Tests, named as llama-bench names them.
    #[arg(long, value_delimiter = ',', default_value = "tg128,pp512")]
    tests: Vec<String>,
    /// Shares of activations to skip, such as 0.25,0.5; the weights stay as they are then.
    #[arg(long, value_delimiter = ',')]
    activations: Vec<String>,
    /// A text to measure the perplexity with that skipping costs.
    #[arg(long, requires = "activations")]
    text: Option<PathBuf>,
    /// Chunks of 512 tokens of the text.
    #[arg(long, default_value_t = 20)]
    chunks: usize,
    /// The binary that skips activations; without it, one is built.
    #[arg(long)]
    binary: Option<PathBuf>,
}

impl Pairs {
    /// Runs both ways interleaved.
    fn of(
        binary: &Path,
        path: &Path,
        test: &str,
        ways: [&[&str]; 2],
        args: &Args,
    ) -> Result<Pairs> {
        let mut pairs = Pairs::default();
        for _ in 0..args.pairs.get() {
            let [dense, sparse] = ways.map(|flags| bench(binary, path, test, flags, args.threads));
            let (dense, sparse) = (dense?, sparse?);
            pairs.dense.push(number(&dense, "avg_ts")?);
            pairs.sparse.push(number(&sparse, "avg_ts")?);
            pairs.bandwidth.push(number(&sparse, "bandwidth_gb_s")?);
        }
        Ok(pairs)
    }

    /// The row of a test, with what else is to be said.
    fn row(&self, root: &Path, path: &Path, test: &str, args: &Args, more: Value) -> Result<Value> {
        let ratios: Vec<f64> = self.sparse.iter().zip(&self.dense).map(|(s, d)| s / d).collect();
        let mut row = json!({
            "commit": commit(root)?,
            "cpu": cpu_name(),
            "threads": args.threads,
            "file": path.file_name().map(|name| name.to_string_lossy().into_owned()),
            "test": test,
            "dense_tok_s": median(&self.dense),
            "sparse_tok_s": median(&self.sparse),
            "ratio": median(&ratios),
            "ratios": ratios,
            "bandwidth_gb_s": median(&self.bandwidth),
        });
        let fields = row.as_object_mut().context("an object")?;
        fields.extend(more.as_object().cloned().unwrap_or_default());
        Ok(row)
    }
}

/// Runs all tests.
pub(crate) fn run(root: &Path, args: &Args) -> Result<()> {
    let binary = match &args.binary {
        Some(binary) => binary.clone(),
        None if args.files.is_empty() || args.activations.is_empty() => PathBuf::new(),
        None => {
            run_cargo(root, &["build", "--release", "--quiet", "-p", "bodkin"])?;
            root.join("target/release/bodkin")
        }
    };
    let results = root.join(RESULTS);
    for path in &args.files {
        if !args.activations.is_empty() {
            activations(root, &binary, path, args)?;
            continue;
        }
        let about = about(path)?;
        for test in &args.tests {
            let file = std::sync::Arc::new(bodkin_model::open(path)?);
            let pairs =
                interleaved::run(&file, Test::parse(test)?, args.threads, args.pairs.get())?;
            let more = json!({
                "kind": "weights",
                "format": about.format,
                "sparsity": about.sparsity,
                "bytes_ratio": about.dense_bytes as f64 / about.bytes as f64,
                "bytes_per_token": about.bytes,
            });
            let row = pairs.row(root, path, test, args, more)?;
            append(&results, &row)?;
            println!("{row}");
        }
    }
    table::rewrite(&root.join("docs/sparsity.md"), &results)
}

/// Skips shares of the activations of a file.
fn activations(root: &Path, binary: &Path, path: &Path, args: &Args) -> Result<()> {
    for share in &args.activations {
        let skip = ["--activation-sparsity", share];
        let perplexity = |flags: &[&str]| -> Result<Option<f64>> {
            let text = args.text.as_deref();
            text.map(|text| perplexity(binary, path, text, flags, args)).transpose()
        };
        let (before, after) = (perplexity(&[])?, perplexity(&skip)?);
        for test in &args.tests {
            let pairs = Pairs::of(binary, path, test, [&[], &skip], args)?;
            let more = json!({
                "kind": "activations",
                "share": share.parse::<f64>()?,
                "chunks": args.chunks,
                "dense_perplexity": before,
                "perplexity": after,
            });
            let row = pairs.row(root, path, test, args, more)?;
            append(&root.join(RESULTS), &row)?;
            println!("{row}");
        }
    }
    Ok(())
}

/// A file's sparse weights.
struct About {
    format: &'static str,
    /// The share of their elements that is left out.
    sparsity: f64,
    /// Bytes that a token reads.
    bytes: u64,
    /// Bytes that it would read if they were dense.
    dense_bytes: u64,
}

fn about(path: &Path) -> Result<About> {
    let file = bodkin_model::open(path)?;
    let plan: Plan = bodkin_model::plan(file.metadata(), file.tensors())?;
    let sparse = || plan.weights.iter().filter(|weight| weight.format.base().is_some());
    let first = sparse().next();
    let first = first.with_context(|| format!("{}: no sparse weight", path.display()))?;
    let dense_of = |weight: &Weight| {
        let base = weight.format.base().unwrap_or(weight.format);
        base.row_bytes(weight.cols).unwrap_or(0) as u64 * weight.rows as u64
    };
    let bytes = plan.cost().step_weight_bytes;
    let saved: i64 = sparse().map(|weight| dense_of(weight) as i64 - weight.bytes as i64).sum();
    let dense_bytes = bytes.saturating_add_signed(saved);
    let (format, sparsity) = (first.format.name(), sparsity(&file, first)?);
    Ok(About { format, sparsity, bytes, dense_bytes })
}

fn sparsity(file: &File, weight: &Weight) -> Result<f64> {
    let tensor = file.tensor(&weight.name).context("a weight of the plan is in the file")?;
    let row = |i| weight.format.row(file.data(tensor), weight.rows, i);
    let stored = |i| weight.format.stored_elements(row(i), weight.cols);
    let stored: usize = (0..weight.rows).filter_map(stored).sum();
    Ok(1.0 - stored as f64 / (weight.rows * weight.cols) as f64)
}

/// A row of `bodkin bench` with one run.
fn bench(binary: &Path, path: &Path, test: &str, flags: &[&str], threads: usize) -> Result<Value> {
    let (prompt, generate) = match Test::parse(test)? {
        Test::Prompt(count) => (count, 0),
        Test::Generate(count) => (0, count),
    };
    let (prompt, generate) = (prompt.to_string(), generate.to_string());
    let rows = said(
        Command::new(binary)
            .arg("bench")
            .arg(path)
            .args(["-p", &prompt, "-n", &generate, "-r", "1", "-o", "json"])
            .args(flags)
            .args(["-t", &threads.to_string()]),
    )?;
    Ok(rows[0].clone())
}

/// The perplexity of a text.
fn perplexity(binary: &Path, path: &Path, text: &Path, flags: &[&str], args: &Args) -> Result<f64> {
    let numbers = ["--chunks", &args.chunks.to_string(), "-t", &args.threads.to_string()];
    let mut command = Command::new(binary);
    command.arg("perplexity").arg(path).arg("-f").arg(text).args(numbers).arg("--json");
    number(&said(command.args(flags))?, "perplexity")
}

/// What a command prints, as JSON.
fn said(command: &mut Command) -> Result<Value> {
    let output = command.output().with_context(|| format!("cannot run {command:?}"))?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{command:?}: {}", errors.trim());
    Ok(serde_json::from_slice(&output.stdout)?)
}

fn number(row: &Value, name: &str) -> Result<f64> {
    row[name].as_f64().with_context(|| format!("no `{name}` in what bodkin printed"))
}
