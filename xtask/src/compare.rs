//! `cargo xtask compare`: bodkin and llama.cpp on the same files and threads, interleaved, because
//! the machine may be shared: only ratios of neighbouring runs say something. Appends rows to
//! `benches/results/cpu.jsonl` and rewrites the table of docs/performance.md from that file.

mod table;

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

/// The peer: a source package that builds llama.cpp for this machine.
pub(crate) const PEER: &str = "llama_cpp_python==0.3.36";
const RESULTS: &str = "benches/results/cpu.jsonl";

/// What to compare.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Models: paths, or names that `bodkin pull` knows.
    #[arg(required = true)]
    models: Vec<String>,
    /// Threads of both.
    #[arg(short, long, default_value_t = 2)]
    threads: usize,
    /// Pairs of runs for each test.
    #[arg(short, long, default_value = "5")]
    pairs: std::num::NonZeroUsize,
    /// Tests, named as llama-bench names them.
    #[arg(long, value_delimiter = ',', default_value = "pp512,tg128")]
    tests: Vec<String>,
    /// Tokens in the context before a test.
    #[arg(short, long, default_value_t = 0)]
    depth: usize,
    /// A Python that has the peer's package; without it, one is set up under `target`.
    #[arg(long)]
    python: Option<PathBuf>,
    /// What the rows call the peer, if another build of it is measured.
    #[arg(long, default_value = PEER)]
    peer: String,
}

/// The runs of one test, pair by pair.
struct Pairs {
    ours: Vec<f64>,
    theirs: Vec<f64>,
    /// Gigabytes a second that memory gave, measured with each pair.
    bandwidth: Vec<f64>,
    /// Bytes of memory that our run read, per second.
    gb_s: Vec<f64>,
    model: String,
}

/// Runs all tests.
pub(crate) fn run(root: &Path, args: &Args) -> Result<()> {
    run_cargo(root, &["build", "--release", "--quiet", "-p", "bodkin"])?;
    let python = match &args.python {
        Some(python) => python.clone(),
        None => set_up_peer(root)?,
    };
    for model in &args.models {
        let path = pull(root, model)?;
        for test in &args.tests {
            let pairs = measure(root, &python, &path, test, args)?;
            let row = row(root, &path, test, args, &pairs)?;
            append(&root.join(RESULTS), &row)?;
            println!("{}", table::line(&row));
        }
    }
    table::rewrite(&root.join("docs/performance.md"), &root.join(RESULTS))
}

/// Runs cargo at the root.
pub(crate) fn run_cargo(root: &Path, args: &[&str]) -> Result<()> {
    let status = Command::new("cargo").args(args).current_dir(root).status()?;
    ensure!(status.success(), "cargo {} failed", args.join(" "));
    Ok(())
}

/// A virtual environment with the peer, built for this machine; it takes minutes the first time.
pub(crate) fn set_up_peer(root: &Path) -> Result<PathBuf> {
    let folder = root.join("target/peer");
    let python = folder.join("bin/python3");
    if !python.exists() {
        eprintln!("building {PEER} under {}", folder.display());
        let venv = Command::new("python3").args(["-m", "venv"]).arg(&folder).status()?;
        ensure!(venv.success(), "python3 -m venv failed");
    }
    let packages = [PEER, "typing_extensions"];
    let mut pip = Command::new(&python);
    pip.args(["-m", "pip", "install", "-q", "--no-deps"]).args(packages);
    ensure!(pip.status().context("cannot run pip")?.success(), "pip could not install {PEER}");
    Ok(python)
}

/// The file behind a model's name.
pub(crate) fn pull(root: &Path, model: &str) -> Result<PathBuf> {
    if Path::new(model).exists() {
        return Ok(PathBuf::from(model).canonicalize()?);
    }
    let args = ["run", "--quiet", "-p", "bodkin", "--", "pull", model];
    let output = Command::new("cargo").args(args).current_dir(root).output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "bodkin pull {model}: {}", said.trim());
    Ok(PathBuf::from(String::from_utf8(output.stdout)?.trim()))
}

fn measure(root: &Path, python: &Path, model: &Path, test: &str, args: &Args) -> Result<Pairs> {
    let (kind, count) = test.split_at_checked(2).unwrap_or((test, ""));
    let count: usize =
        count.parse().with_context(|| format!("a test is ppN or tgN, not {test}"))?;
    ensure!(matches!(kind, "pp" | "tg"), "a test is ppN or tgN, not {test}");
    let mut pairs = Pairs {
        ours: vec![],
        theirs: vec![],
        bandwidth: vec![],
        gb_s: vec![],
        model: String::new(),
    };
    for _ in 0..args.pairs.get() {
        let row = run_ours(root, model, kind, count, args)?;
        let number = |name: &str| row[name].as_f64().with_context(|| format!("no `{name}`"));
        pairs.ours.push(number("avg_ts")?);
        pairs.bandwidth.push(number("bandwidth_gb_s")?);
        pairs.gb_s.push(number("gb_s")?);
        pairs.model = row["model_type"].as_str().unwrap_or_default().to_owned();
        if let Ok(level) = std::env::var("BODKIN_CPU") {
            pairs.model.push_str(&format!(", only {level}"));
        }
        pairs.theirs.push(count as f64 / run_theirs(root, python, model, kind, count, args)?);
    }
    Ok(pairs)
}

fn run_ours(root: &Path, model: &Path, kind: &str, count: usize, args: &Args) -> Result<Value> {
    let (prompt, generate) = if kind == "pp" { (count, 0) } else { (0, count) };
    let output = Command::new("cargo")
        .args(["run", "--quiet", "--release", "-p", "bodkin", "--", "bench"])
        .arg(model)
        .args(["-p", &prompt.to_string(), "-n", &generate.to_string()])
        .args(["-d", &args.depth.to_string(), "-t", &args.threads.to_string()])
        .args(["-r", "1", "-o", "json"])
        .current_dir(root)
        .output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "bodkin bench: {}", said.trim());
    let rows: Value = serde_json::from_slice(&output.stdout)?;
    Ok(rows[0].clone())
}

/// Seconds of one run of the peer.
fn run_theirs(
    root: &Path,
    python: &Path,
    model: &Path,
    kind: &str,
    count: usize,
    args: &Args,
) -> Result<f64> {
    let flag = if kind == "pp" { "--prompt" } else { "--generate" };
    let output = Command::new(python)
        .arg(root.join("benches/peer/llama_cpp_bench.py"))
        .arg(model)
        .args([flag, &count.to_string(), "--depth", &args.depth.to_string()])
        .args(["--threads", &args.threads.to_string()])
        .output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "llama.cpp: {}", said.trim());
    let result: Value = serde_json::from_slice(&output.stdout)?;
    result["seconds"][0].as_f64().context("llama.cpp's bench printed no seconds")
}

fn row(root: &Path, path: &Path, test: &str, args: &Args, pairs: &Pairs) -> Result<Value> {
    let ratios: Vec<f64> = pairs.ours.iter().zip(&pairs.theirs).map(|(a, b)| a / b).collect();
    let depth = if args.depth > 0 { format!(" @ d{}", args.depth) } else { String::new() };
    Ok(json!({
        "commit": commit(root)?,
        "cpu": cpu_name(),
        "threads": args.threads,
        "model": pairs.model,
        "file": path.file_name().map(|n| n.to_string_lossy().into_owned()),
        "test": format!("{test}{depth}"),
        "tok_s": median(&pairs.ours),
        "peer": args.peer,
        "peer_tok_s": median(&pairs.theirs),
        "ratio": median(&ratios),
        "ratios": ratios,
        "gb_s": median(&pairs.gb_s),
        "bandwidth_gb_s": median(&pairs.bandwidth),
    }))
}

/// The commit that the tree is at.
pub(crate) fn commit(root: &Path) -> Result<String> {
    let git = ["rev-parse", "--short", "HEAD"];
    let output = Command::new("git").args(git).current_dir(root).output()?;
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// The middle of some values; of an even number of them, between the two in the middle.
pub(crate) fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let n = sorted.len();
    if n == 0 { f64::NAN } else { (sorted[(n - 1) / 2] + sorted[n / 2]) / 2.0 }
}

/// The processor, as the system calls it.
pub(crate) fn cpu_name() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let field = |name: &str| {
        let line = text.lines().find(|line| line.starts_with(name))?;
        Some(line.split_once(':')?.1.trim().to_owned())
    };
    let name = field("model name").unwrap_or_else(|| std::env::consts::ARCH.to_owned());
    match (field("cpu family"), field("model\t")) {
        (Some(family), Some(model)) => format!("{name}, family {family} model {model}"),
        _ => name,
    }
}

/// Appends a row to a file of rows.
pub(crate) fn append(path: &Path, row: &Value) -> Result<()> {
    use std::io::Write;
    let folder = path.parent().context("a file in a folder")?;
    std::fs::create_dir_all(folder)?;
    let mut file = std::fs::OpenOptions::new().create(true).append(true).open(path)?;
    writeln!(file, "{row}")?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
    }
}
