//! The measurements of `quality`: perplexities of quantised and pruned models.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use crate::compare::{append, commit, cpu_name};
use crate::peer::{PACKAGE, set_up_package};

pub(super) const RESULTS: &str = "benches/results/quality.jsonl";

/// Types of file that both make, from the largest to the smallest.
const TYPES: &str = "F16,Q8_0,Q6_K,Q5_K_M,Q5_K_S,Q5_1,Q5_0,Q4_K_M,Q4_K_S,Q4_1,Q4_0,IQ4_NL,IQ4_XS,\
                     Q3_K_L,Q3_K_M,Q3_K_S,Q2_K,Q2_K_S";

/// What to measure.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// A model: a path, or a name that `bodkin pull` knows.
    pub(super) model: String,
    /// A long text. Its first half is for measuring, its second half for calibrating.
    pub(super) text: PathBuf,
    /// Types of files to quantise to; none for no such rows.
    #[arg(long, value_delimiter = ',', default_value = TYPES)]
    pub(super) types: Vec<String>,
    /// Ways to prune, METHOD:SHARE:FORMAT or METHOD:N:M:FORMAT, such as ria:0.5:Q8_0.
    #[arg(long, value_delimiter = ',')]
    pub(super) prune: Vec<String>,
    /// Chunks of 512 tokens to measure with.
    #[arg(long, default_value_t = 20)]
    pub(super) chunks: usize,
    /// Chunks of 512 tokens to calibrate with.
    #[arg(long, default_value_t = 64)]
    pub(super) calibrate: usize,
    /// Threads.
    #[arg(short, long, default_value_t = 2)]
    pub(super) threads: usize,
    /// Measure speeds, in this number of rounds: nothing else may run on this machine.
    #[arg(long, value_name = "ROUNDS")]
    pub(super) speeds: Option<usize>,
    /// The binary; without it, one is built.
    #[arg(long)]
    pub(super) binary: Option<PathBuf>,
    /// A Python that has the peer's package; without it, one is set up under `target`.
    #[arg(long)]
    pub(super) python: Option<PathBuf>,
    /// What the rows call the peer, if another build of it is used.
    #[arg(long, default_value = PACKAGE)]
    pub(super) peer: String,
}

/// A way to prune.
pub(super) struct Way<'a> {
    pub(super) method: &'a str,
    /// A share, or N:M.
    pub(super) amount: &'a str,
    pub(super) format: &'a str,
    /// The flag that takes the amount.
    pub(super) flag: &'static str,
}

impl Way<'_> {
    pub(super) fn of(text: &str) -> Result<Way<'_>> {
        let expected =
            || format!("--prune {text}: expected METHOD:SHARE:FORMAT or METHOD:N:M:FORMAT");
        let (method, rest) = text.split_once(':').with_context(expected)?;
        let (amount, format) = rest.rsplit_once(':').with_context(expected)?;
        let flag = if amount.contains(':') { "--pattern" } else { "--sparsity" };
        Ok(Way { method, amount, format, flag })
    }
}

/// What all rows share.
pub(super) struct Bench<'a> {
    pub(super) root: &'a Path,
    pub(super) args: &'a Args,
    pub(super) binary: PathBuf,
    pub(super) model: PathBuf,
    pub(super) folder: tempfile::TempDir,
}

impl Bench<'_> {
    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Calibrates and measures on different halves of the text.
    pub(super) fn cut_text(&self) -> Result<()> {
        let text = std::fs::read_to_string(&self.args.text)
            .with_context(|| self.args.text.display().to_string())?;
        let half = text.floor_char_boundary(text.len() / 2);
        std::fs::write(self.path("measure.txt"), &text[..half])?;
        Ok(std::fs::write(self.path("calibrate.txt"), &text[half..])?)
    }

    pub(super) fn quantize_all(&self, types: &[&String]) -> Result<()> {
        let python = match &self.args.python {
            Some(python) => python.clone(),
            None => set_up_package(self.root)?,
        };
        let source = self.path("source.gguf");
        let threads = self.args.threads.to_string();
        self.bodkin(|c| c.arg("quantize").arg(&self.model).arg(&source).args(["F16"]))?;
        let before = self.perplexity(&source)?;
        for kind in types {
            let (ours, theirs) = (self.path("ours.gguf"), self.path("theirs.gguf"));
            let made = self.bodkin(|c| {
                c.arg("quantize").arg(&source).arg(&ours).args([kind, "--json", "-t", &threads])
            })?;
            let made: Value = serde_json::from_slice(&made.stdout)?;
            let peer = self.root.join("benches/peer/llama_cpp_quantize.py");
            let mut command = Command::new(&python);
            command.arg(peer).arg(&source).arg(&theirs).args([kind, "--threads", &threads]);
            succeed(&mut command)?;
            let (ours, theirs) = (self.perplexity(&ours)?, self.perplexity(&theirs)?);
            self.append(json!({
                "kind": "quantize",
                "type": kind,
                "bits_per_weight": made["bits_per_weight"],
                "source_perplexity": before,
                "perplexity": ours,
                "peer": self.args.peer,
                "peer_perplexity": theirs,
                "ratio": ours / theirs,
            }))?;
        }
        Ok(())
    }

    /// Prunes once; the row is the table of `bodkin prune`.
    pub(super) fn prune(&self, way: &str) -> Result<()> {
        let Way { method, amount, format, flag } = Way::of(way)?;
        let (calibrate, evaluate) = (self.path("calibrate.txt"), self.path("measure.txt"));
        let numbers = [self.args.calibrate, self.args.chunks, self.args.threads];
        let [chunks, measured, threads] = numbers.map(|number| number.to_string());
        let output = self.bodkin(|c| {
            c.arg("prune").arg(&self.model).arg(self.path("pruned.gguf"));
            c.args(["--method", method, flag, amount, "--format", format, "--json"]);
            c.arg("--calibrate").arg(calibrate).args(["--chunks", &chunks]);
            c.arg("--evaluate").arg(evaluate).args(["--evaluate-chunks", &measured]);
            c.args(["-t", &threads])
        })?;
        let table: Value = serde_json::from_slice(&output.stdout)?;
        let mut row = json!({
            "kind": "prune",
            "method": method,
            "amount": amount,
            "format": format,
            "calibrate_chunks": self.args.calibrate,
        });
        let fields = row.as_object_mut().context("an object")?;
        fields.extend(table.as_object().cloned().unwrap_or_default());
        self.append(row)
    }

    fn perplexity(&self, model: &Path) -> Result<f64> {
        let chunks = self.args.chunks.to_string();
        let text = self.path("measure.txt");
        let output = self.bodkin(|c| {
            c.arg("perplexity").arg(model).arg("-f").arg(text).args(["--chunks", &chunks, "--json"])
        })?;
        let value: Value = serde_json::from_slice(&output.stdout)?;
        value["perplexity"].as_f64().context("bodkin perplexity printed no `perplexity`")
    }

    pub(super) fn bodkin(&self, args: impl FnOnce(&mut Command) -> &mut Command) -> Result<Output> {
        succeed(args(&mut Command::new(&self.binary)))
    }

    /// Appends a row, with what it was measured on.
    pub(super) fn append(&self, row: Value) -> Result<()> {
        let mut whole = json!({
            "commit": commit(self.root)?,
            "cpu": cpu_name(),
            "threads": self.args.threads,
            "file": self.model.file_name().map(|name| name.to_string_lossy().into_owned()),
            "chunks": self.args.chunks,
        });
        let fields = whole.as_object_mut().context("an object")?;
        fields.extend(row.as_object().cloned().unwrap_or_default());
        println!("{whole}");
        append(&self.root.join(RESULTS), &whole)
    }
}

/// Runs a command; its stderr is the error if it fails.
fn succeed(command: &mut Command) -> Result<Output> {
    let output = command.output().with_context(|| format!("cannot run {command:?}"))?;
    let stderr = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{command:?}: {}", stderr.trim());
    Ok(output)
}
