//! llama.cpp, or a fork of it, that benchmarks run beside bodkin.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

/// A source package that builds llama.cpp for this machine.
pub(crate) const PACKAGE: &str = "llama_cpp_python==0.3.36";

/// A build of the peer.
pub(crate) enum Peer {
    /// The package, and the Python that has it.
    Package { python: PathBuf },
    /// A folder with `llama-bench`.
    Folder(PathBuf),
}

/// What the peer is to run.
pub(crate) struct Run<'a> {
    pub(crate) model: &'a Path,
    /// Tokens of a prompt, or none.
    pub(crate) prompt: usize,
    /// Tokens to generate, or none.
    pub(crate) generate: usize,
    /// Sequences that do so at the same time.
    pub(crate) sequences: usize,
    /// Tokens in the context of each before.
    pub(crate) depth: usize,
    pub(crate) threads: Option<usize>,
    /// Measurements, after one that does not count.
    pub(crate) repetitions: usize,
    /// Whether all layers are on a GPU.
    pub(crate) is_on_gpu: bool,
}

/// What the peer reports.
pub(crate) struct Report {
    /// Tokens a second of each measurement.
    pub(crate) samples: Vec<f64>,
    /// The build.
    pub(crate) name: String,
}

impl Peer {
    /// The build in a folder; without one, the package, which is built if it is not there.
    pub(crate) fn open(root: &Path, folder: Option<&Path>) -> Result<Peer> {
        let Some(folder) = folder else {
            return Ok(Peer::Package { python: set_up_package(root)? });
        };
        let candidates = [folder.to_owned(), folder.join("bin"), folder.join("build/bin")];
        let found = candidates.into_iter().find(|folder| folder.join("llama-bench").is_file());
        let found = found.with_context(|| {
            format!(
                "{}: expected llama-bench in it, bin or build/bin, found none",
                folder.display()
            )
        })?;
        Ok(Peer::Folder(found.canonicalize()?))
    }

    /// Runs a test once.
    pub(crate) fn run(&self, root: &Path, run: &Run<'_>) -> Result<Report> {
        match self {
            Peer::Folder(folder) if run.sequences > 1 => batched(folder, run),
            Peer::Package { python } => {
                ensure!(
                    run.sequences == 1,
                    "{PACKAGE}: expected one sequence, as it has no \
                    llama-batched-bench, found {}",
                    run.sequences
                );
                let mut command = Command::new(python);
                command.arg(root.join("benches/peer/llama_cpp_bench.py")).arg(run.model);
                command.args(["--prompt", &run.prompt.to_string()]);
                command.args(["--generate", &run.generate.to_string()]);
                command.args(["--depth", &run.depth.to_string()]);
                command.args(["--threads", &run.threads.unwrap_or(1).to_string()]);
                command.args(["--runs", &run.repetitions.to_string()]);
                let seconds: Vec<f64> = serde_json::from_value(json(command)?["seconds"].take())?;
                let tokens = (run.prompt + run.generate) as f64;
                let samples = seconds.iter().map(|seconds| tokens / seconds).collect();
                Ok(Report { samples, name: PACKAGE.to_owned() })
            }
            Peer::Folder(folder) => {
                let mut command = Command::new(folder.join("llama-bench"));
                command.arg("--model").arg(run.model).args(["-o", "json"]);
                command.args(["-r", &run.repetitions.to_string()]);
                command.args(["-p", &run.prompt.to_string(), "-n", &run.generate.to_string()]);
                if run.depth > 0 {
                    command.args(["-d", &run.depth.to_string()]);
                }
                if let Some(threads) = run.threads {
                    command.args(["-t", &threads.to_string()]);
                }
                if run.is_on_gpu {
                    command.args(["-ngl", "99", "-fa", "1"]);
                }
                let row = &mut json(command)?[0];
                let samples = serde_json::from_value(row["samples_ts"].take())?;
                let project = project(folder);
                let name = match row["build_commit"].as_str() {
                    // A source package has no commit; its folder may have a version.
                    None | Some("unknown") => project,
                    Some(commit) => format!("{project} {commit}"),
                };
                Ok(Report { samples, name })
            }
        }
    }

    /// The vector instruction sets that the build uses.
    pub(crate) fn instruction_sets(&self, root: &Path) -> Result<String> {
        let (python, folder) = match self {
            Peer::Package { python } => {
                let package = python.with_file_name("..").join("lib");
                (python.clone(), package)
            }
            Peer::Folder(folder) => (PathBuf::from("python3"), build(folder)),
        };
        let mut command = Command::new(python);
        command.arg(root.join("benches/peer/system_info.py")).arg(folder);
        Ok(vector_sets(&String::from_utf8(stdout(command)?)?))
    }
}

/// Tokens a second of all sequences of a run, by `llama-batched-bench`.
fn batched(folder: &Path, run: &Run<'_>) -> Result<Report> {
    ensure!(run.prompt == 0, "expected a test of decode for several sequences");
    // It cannot begin with an empty context.
    let depth = run.depth.max(1);
    let sequences = vec![run.sequences.to_string(); run.repetitions].join(",");
    let cells = run.sequences * (depth + run.generate);
    let mut command = Command::new(folder.join("llama-batched-bench"));
    command.arg("--model").arg(run.model).args(["--output-format", "jsonl"]);
    command.args(["-npp", &depth.to_string(), "-ntg", &run.generate.to_string()]);
    command.args(["-npl", &sequences, "-c", &cells.to_string()]);
    if let Some(threads) = run.threads {
        command.args(["-t", &threads.to_string()]);
    }
    if run.is_on_gpu {
        command.args(["-ngl", "99", "-fa", "on"]);
    }
    let text = String::from_utf8(stdout(command)?)?;
    let mut samples = Vec::new();
    for line in text.lines().filter(|line| line.starts_with('{')) {
        let row: Value = serde_json::from_str(line)?;
        samples.push(row["speed_tg"].as_f64().context("llama-batched-bench: no speed_tg")?);
    }
    ensure!(samples.len() == run.repetitions, "llama-batched-bench: {} rows", samples.len());
    Ok(Report { samples, name: project(folder) })
}

/// A virtual environment with the package, built for this machine; it takes minutes the first
/// time.
pub(crate) fn set_up_package(root: &Path) -> Result<PathBuf> {
    let folder = root.join("target/peer");
    let python = folder.join("bin/python3");
    if !python.exists() {
        eprintln!("building {PACKAGE} under {}", folder.display());
        let venv = Command::new("python3").args(["-m", "venv"]).arg(&folder).status()?;
        ensure!(venv.success(), "python3 -m venv failed");
    }
    let packages = [PACKAGE, "typing_extensions"];
    let mut pip = Command::new(&python);
    pip.args(["-m", "pip", "install", "-q", "--no-deps"]).args(packages);
    ensure!(pip.status().context("cannot run pip")?.success(), "pip could not install {PACKAGE}");
    Ok(python)
}

/// The folder of the whole build, of which the programs lie in `folder`.
fn build(folder: &Path) -> PathBuf {
    let is_bin = folder.file_name().is_some_and(|name| name == "bin");
    folder.parent().filter(|_| is_bin).unwrap_or(folder).to_owned()
}

/// The project that was built, by the names of the folders that it lies in.
fn project(folder: &Path) -> String {
    let names = folder.iter().filter_map(|name| name.to_str());
    let names: Vec<&str> = names.filter(|name| name.contains("llama")).collect();
    if names.is_empty() { "llama.cpp".to_owned() } else { names.join("/") }
}

/// The name of a build as tables print it. Rows have several spellings of the same one: that of
/// pip, which builds the package for the machine, and those of folders, with or without a commit.
pub(crate) fn spelled(name: &str) -> String {
    let is_separator = |c: char| matches!(c, '=' | '-');
    let Some(rest) = name.strip_prefix("llama_cpp_python") else { return name.to_owned() };
    let rest = rest.trim_start_matches(is_separator);
    let (version, build) = match rest.split_once("/llama.cpp") {
        Some((version, build)) => (version, build.replace(", native", ", built natively")),
        None => (rest, ", built natively".to_owned()),
    };
    let build = match build.strip_prefix(' ') {
        Some(commit) => format!(", commit {commit}"),
        None => build,
    };
    format!("llama.cpp of llama_cpp_python {version}{build}")
}

/// The vector extensions that a line such as `AVX2 = 1 | AVX512 = 0` says are used.
fn vector_sets(text: &str) -> String {
    let used = text.split(['|', ':', '\n']).filter_map(|part| part.trim().strip_suffix(" = 1"));
    let is_vector =
        |name: &&str| ["AVX", "AMX", "NEON", "DOTPROD", "SVE"].iter().any(|set| name.contains(set));
    used.filter(is_vector).collect::<Vec<_>>().join(" ")
}

/// The JSON that a command prints.
fn json(command: Command) -> Result<Value> {
    Ok(serde_json::from_slice(&stdout(command)?)?)
}

fn stdout(mut command: Command) -> Result<Vec<u8>> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command.output().with_context(|| format!("cannot run {program}"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{program}: {}", said.trim());
    Ok(output.stdout)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_build_has_one_spelling() {
        let of = "llama.cpp of llama_cpp_python 0.3.36";
        for (name, build) in [
            ("llama_cpp_python==0.3.36", ", built natively"),
            ("llama_cpp_python-0.3.36/llama.cpp", ""),
            ("llama_cpp_python-0.3.36/llama.cpp 0c1e570", ", commit 0c1e570"),
            ("llama_cpp_python-0.3.36/llama.cpp, native", ", built natively"),
            ("llama_cpp_python-0.3.36/llama.cpp, CUDA 13.0, sm_90", ", CUDA 13.0, sm_90"),
        ] {
            assert_eq!(spelled(name), format!("{of}{build}"));
        }
        for name in ["ik_llama.cpp", "bodkin", "llama.cpp 0c1e570"] {
            assert_eq!(spelled(name), name);
        }
    }

    #[test]
    fn builds_are_named() {
        let folder = Path::new("/home/user/ik_llama.cpp/build/bin");
        assert_eq!(project(folder), "ik_llama.cpp");
        assert_eq!(build(folder), Path::new("/home/user/ik_llama.cpp/build"));
        let text = "CPU : SSE3 = 1 | AVX2 = 1 | AVX512 = 1 | AMX_INT8 = 0 | FMA = 1 |\n";
        assert_eq!(vector_sets(text), "AVX2 AVX512");
    }
}
