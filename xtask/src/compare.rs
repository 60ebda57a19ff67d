//! `cargo xtask compare`: bodkin and llama.cpp, or a fork of it, on the same files and threads,
//! interleaved, because the machine may be shared: only ratios of neighbouring runs say something.
//! Appends rows to `benches/results/cpu.jsonl` and rewrites the tables of docs/performance.md from
//! that file, one for each machine.

mod table;

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use crate::peer::{Peer, Run};
pub(crate) use table::KEYS;

const RESULTS: &str = "benches/results/cpu.jsonl";

/// What to compare.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Models: paths, or names that `bodkin pull` knows; without any, only the tables are
    /// rewritten.
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
    /// A folder with `llama-bench` of llama.cpp or ik_llama.cpp; without it, llama.cpp is built
    /// for this machine from its Python package.
    #[arg(long, value_name = "DIR")]
    peer: Option<PathBuf>,
    /// The binary; without it, one is built
    #[arg(long)]
    binary: Option<PathBuf>,
    /// The commit that the binary was built from [default: that of the checkout]
    #[arg(long)]
    commit: Option<String>,
    /// Where rows are appended [default: benches/results/cpu.jsonl]
    #[arg(long)]
    output: Option<PathBuf>,
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
    /// The peer's build.
    peer: String,
}

/// Runs all tests, and rewrites the tables.
pub(crate) fn run(root: &Path, args: &Args) -> Result<()> {
    if !args.models.is_empty() {
        measure_all(root, args)?;
    }
    table::rewrite(&root.join("docs/performance.md"), &root.join(RESULTS))
}

fn measure_all(root: &Path, args: &Args) -> Result<()> {
    let binary = release_binary(root, args.binary.as_deref())?;
    let commit = args.commit.clone().map_or_else(|| commit(root), Ok)?;
    let output = args.output.clone().unwrap_or_else(|| root.join(RESULTS));
    let peer = Peer::open(root, args.peer.as_deref())?;
    let instruction_sets = [own_instruction_set(&binary)?, peer.instruction_sets(root)?];
    for model in &args.models {
        let path = pull(root, model)?;
        for test in &args.tests {
            let pairs = measure(root, &binary, &peer, &path, test, args)?;
            let row = row(&commit, &path, test, args, &pairs, &instruction_sets);
            append(&output, &row)?;
            println!("{}", table::line(&row));
        }
    }
    Ok(())
}

/// Runs cargo at the root.
pub(crate) fn run_cargo(root: &Path, args: &[&str]) -> Result<()> {
    let status = Command::new("cargo").args(args).current_dir(root).status()?;
    ensure!(status.success(), "cargo {} failed", args.join(" "));
    Ok(())
}

/// The given binary of bodkin; without one, it is built.
pub(crate) fn release_binary(root: &Path, given: Option<&Path>) -> Result<PathBuf> {
    if let Some(binary) = given {
        return Ok(binary.to_owned());
    }
    run_cargo(root, &["build", "--release", "--quiet", "-p", "bodkin"])?;
    Ok(root.join("target/release/bodkin"))
}

/// The file behind a model's name.
pub(crate) fn pull(root: &Path, model: &str) -> Result<PathBuf> {
    if Path::new(model).exists() {
        return Ok(PathBuf::from(model).canonicalize()?);
    }
    let output = bodkin()?.args(["pull", model]).current_dir(root).output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "bodkin pull {model}: {}", said.trim());
    Ok(PathBuf::from(String::from_utf8(output.stdout)?.trim()))
}

/// The program beside this one, which tests have built. With the features that it has on its own,
/// cargo would compile it again, which it does where there is none.
fn bodkin() -> Result<Command> {
    let built = env::current_exe()?.with_file_name("bodkin");
    let built = built.with_extension(env::consts::EXE_EXTENSION);
    if built.exists() {
        return Ok(Command::new(built));
    }
    let mut command = Command::new("cargo");
    command.args(["run", "--quiet", "-p", "bodkin", "--"]);
    Ok(command)
}

fn measure(
    root: &Path,
    binary: &Path,
    peer: &Peer,
    model: &Path,
    test: &str,
    args: &Args,
) -> Result<Pairs> {
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
        peer: String::new(),
    };
    let (prompt, generate) = if kind == "pp" { (count, 0) } else { (0, count) };
    let (depth, threads, repetitions) = (args.depth, Some(args.threads), 1);
    let (sequences, is_on_gpu) = (1, false);
    let run = Run { model, prompt, generate, sequences, depth, threads, repetitions, is_on_gpu };
    for _ in 0..args.pairs.get() {
        let row = run_ours(binary, &run)?;
        let number = |name: &str| row[name].as_f64().with_context(|| format!("no `{name}`"));
        pairs.ours.push(number("avg_ts")?);
        pairs.bandwidth.push(number("bandwidth_gb_s")?);
        pairs.gb_s.push(number("gb_s")?);
        pairs.model = row["model_type"].as_str().unwrap_or_default().to_owned();
        let report = peer.run(root, &run)?;
        pairs.theirs.push(median(&report.samples));
        pairs.peer = report.name;
    }
    Ok(pairs)
}

fn run_ours(binary: &Path, run: &Run<'_>) -> Result<Value> {
    let threads = run.threads.unwrap_or(1);
    let output = Command::new(binary)
        .arg("bench")
        .arg(run.model)
        .args(["-p", &run.prompt.to_string(), "-n", &run.generate.to_string()])
        .args(["-d", &run.depth.to_string(), "-t", &threads.to_string()])
        .args(["-r", "1", "-o", "json", "--device", "cpu"])
        .output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "bodkin bench: {}", said.trim());
    let rows: Value = serde_json::from_slice(&output.stdout)?;
    Ok(rows[0].clone())
}

/// The instruction set that bodkin's kernels use here, from a line such as `cpu (avx2, 2 threads)`.
fn own_instruction_set(binary: &Path) -> Result<String> {
    let output = Command::new(binary).arg("--version").output()?;
    let text = String::from_utf8(output.stdout)?;
    let level = text.lines().find_map(|line| line.trim().strip_prefix("cpu (")?.split_once(','));
    Ok(level.context("bodkin --version names no instruction set")?.0.to_owned())
}

fn row(
    commit: &str,
    path: &Path,
    test: &str,
    args: &Args,
    pairs: &Pairs,
    [own, peer]: &[String; 2],
) -> Value {
    let ratios: Vec<f64> = pairs.ours.iter().zip(&pairs.theirs).map(|(a, b)| a / b).collect();
    let depth = if args.depth > 0 { format!(" @ d{}", args.depth) } else { String::new() };
    json!({
        "commit": commit,
        "cpu": cpu_name(),
        "threads": args.threads,
        "model": pairs.model,
        "file": path.file_name().map(|n| n.to_string_lossy().into_owned()),
        "test": format!("{test}{depth}"),
        "tok_s": median(&pairs.ours),
        "instruction_sets": own,
        "peer": pairs.peer,
        "peer_instruction_sets": peer,
        "peer_tok_s": median(&pairs.theirs),
        "ratio": median(&ratios),
        "ratios": ratios,
        "gb_s": median(&pairs.gb_s),
        "bandwidth_gb_s": median(&pairs.bandwidth),
    })
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
