//! `cargo xtask instructions`: how many instructions the kernels of 64-bit Arm execute for a byte
//! of weights in the file, one token at a time, beside those of llama.cpp. An emulator counts them:
//! no clock of this machine says anything about Arm.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use bodkin_cpu::linear::PackedLayout;

use super::{LINKER, QEMU, TARGET};

/// What to count.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The processor of qemu: `max`, or `cortex-a72`, which has no int8 dot product
    #[arg(long, default_value = "max")]
    processor: String,
    /// A folder where llama.cpp was built for Arm as static libraries, and its sources
    #[arg(long, num_args = 2, value_names = ["BUILD", "SOURCE"])]
    peer: Option<Vec<PathBuf>>,
}

/// Counts for every packed layout, and prints a table.
pub(crate) fn run(root: &Path, args: &Args) -> Result<()> {
    let own = build(root)?;
    let peer = args.peer.as_ref().map(|peer| build_peer(root, &peer[0], &peer[1])).transpose()?;
    println!("| format | bodkin | llama.cpp | ratio |\n| --- | ---: | ---: | ---: |");
    for layout in PackedLayout::ALL {
        let name = layout.format().name();
        let found = per_byte(&args.processor, &own, &[&format!("{layout:?}")])?
            .with_context(|| format!("{name}: not counted"))?;
        let mut least: Option<f64> = None;
        for kernel in ["gemv", "dot"] {
            let Some(peer) = &peer else { continue };
            let format = if name.starts_with('Q') {
                name.replacen('Q', "q", 1)
            } else {
                name.to_lowercase()
            };
            let count = per_byte(&args.processor, peer, &[&format, kernel])?;
            least = count.into_iter().chain(least).reduce(f64::min);
        }
        let [theirs, ratio] = match least {
            Some(least) => [format!("{least:.2}"), format!("{:.2}", found / least)],
            None => ["-", "-"].map(str::to_owned),
        };
        println!("| {name} | {found:.2} | {theirs} | {ratio} |");
    }
    Ok(())
}

/// Builds our program, and gives its path.
fn build(root: &Path) -> Result<PathBuf> {
    let output = Command::new("cargo")
        .args(["bench", "--no-run", "--message-format=json", "--target", TARGET])
        .args(["-p", "bodkin-cpu", "--bench", "instructions"])
        .current_dir(root)
        .env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER", LINKER)
        .stderr(Stdio::inherit())
        .output()
        .context("cannot run cargo")?;
    ensure!(output.status.success(), "the program cannot be built");
    let messages = String::from_utf8(output.stdout)?;
    let messages = messages.lines().filter_map(|line| serde_json::from_str(line).ok());
    let paths = messages.filter_map(|message: serde_json::Value| {
        let is_it = message["target"]["name"] == "instructions";
        is_it.then(|| message["executable"].as_str().map(PathBuf::from)).flatten()
    });
    paths.last().context("cargo names no program")
}

/// Builds the program that calls llama.cpp's kernels, and gives its path.
fn build_peer(root: &Path, build: &Path, source: &Path) -> Result<PathBuf> {
    let folder = root.join("target/arm");
    std::fs::create_dir_all(&folder)?;
    let (code, program) = (folder.join("ggml.c"), folder.join("ggml"));
    std::fs::write(&code, include_str!("ggml.c"))?;
    let status = Command::new(LINKER)
        .args(["-O2", "-static", "-o"])
        .args([&program, &code])
        .arg("-I")
        .arg(source.join("ggml/include"))
        .args(["ggml-cpu", "ggml-base"].map(|name| build.join(format!("ggml/src/lib{name}.a"))))
        .args(["-lstdc++", "-lm"])
        .status()
        .with_context(|| format!("cannot run {LINKER}"))?;
    ensure!(status.success(), "llama.cpp's kernels cannot be linked");
    Ok(program)
}

/// Instructions for a byte; none if the program has no such kernel. Those of starting and of
/// ending cancel out between runs of different length.
fn per_byte(processor: &str, program: &Path, words: &[&str]) -> Result<Option<f64>> {
    const TIMES: [usize; 2] = [1, 3];
    let Some((short, bytes)) = count(processor, program, words, TIMES[0])? else {
        return Ok(None);
    };
    let long = count(processor, program, words, TIMES[1])?.map_or(short, |(lines, _)| lines);
    Ok(Some((long - short) as f64 / ((TIMES[1] - TIMES[0]) * bytes) as f64))
}

/// The instructions of one run, and the bytes of the weights that it prints; none if it ends with
/// status 2.
fn count(
    processor: &str,
    program: &Path,
    words: &[&str],
    times: usize,
) -> Result<Option<(u64, usize)>> {
    // In single steps each line of the log is an instruction.
    let mut child = Command::new(QEMU)
        .args(["-L", "/usr/aarch64-linux-gnu", "-cpu", processor, "-singlestep"])
        .args(["-d", "exec,nochain"])
        .arg(program)
        .args(words)
        .arg(times.to_string())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot run {QEMU}"))?;
    let mut log = BufReader::new(child.stderr.take().context("no log")?);
    let (mut lines, mut line) = (0, Vec::new());
    while log.read_until(b'\n', &mut line)? > 0 {
        lines += 1;
        line.clear();
    }
    let output = child.wait_with_output()?;
    if output.status.code() == Some(2) {
        return Ok(None);
    }
    ensure!(output.status.success(), "{} {} failed", program.display(), words.join(" "));
    let bytes = String::from_utf8(output.stdout)?.trim().parse().context("the weights' bytes")?;
    Ok(Some((lines, bytes)))
}
