//! `cargo xtask instructions`: how many instructions the kernels of 64-bit Arm execute for a byte
//! of weights in the file, one token at a time, beside those of llama.cpp. An emulator counts them:
//! no clock of this machine says anything about Arm.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use bodkin_cpu::linear::PackedLayout;

use super::{LIBRARIES, LINKER, QEMU, TARGET};

/// What to count.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The processor of qemu: `max`, or `cortex-a72`, which has no int8 dot product
    #[arg(long, default_value = "max")]
    processor: String,
    /// Where llama.cpp was built for that processor, with `-DBUILD_SHARED_LIBS=OFF
    /// -DGGML_OPENMP=OFF`, and its sources
    #[arg(long, num_args = 2, value_names = ["BUILD", "SOURCE"])]
    peer: Option<Vec<PathBuf>>,
}

/// Counts for every packed layout, and prints a table.
pub(crate) fn run(root: &Path, args: &Args) -> Result<()> {
    super::check_installed(root)?;
    let own = build(root)?;
    let peer = args.peer.as_ref().map(|peer| build_peer(root, &peer[0], &peer[1])).transpose()?;
    println!("| format | bodkin | llama.cpp | ratio |\n| --- | ---: | ---: | ---: |");
    for layout in PackedLayout::ALL {
        let name = layout.format().name();
        let count = |program: &Path, words: &[&str]| per_byte(&args.processor, program, words);
        let found = count(&own, &[&format!("{layout:?}")])?.context("no rows")?;
        let least = match &peer {
            Some(peer) => {
                let format = peer_name(name);
                let [gemv, dot] = ["gemv", "dot"].map(|kernel| count(peer, &[&format, kernel]));
                gemv?.into_iter().chain(dot?).reduce(f64::min)
            }
            None => None,
        };
        let [theirs, ratio] = match least {
            Some(least) => [format!("{least:.2}"), format!("{:.2}", found / least)],
            None => ["-", "-"].map(str::to_owned),
        };
        println!("| {name} | {found:.2} | {theirs} | {ratio} |");
    }
    Ok(())
}

/// What llama.cpp calls a format: `q4_K`, `iq4_xs`, `f16`.
fn peer_name(format: &str) -> String {
    match format.strip_prefix('Q') {
        Some(rest) => format!("q{rest}"),
        None => format.to_lowercase(),
    }
}

/// Builds our program, and gives its path.
fn build(root: &Path) -> Result<PathBuf> {
    let output = super::cargo(root)
        .args(["bench", "--no-run", "--message-format=json", "--target", TARGET])
        .args(["-p", "bodkin-cpu", "--bench", "instructions"])
        .stderr(Stdio::inherit())
        .output()
        .context("cannot run cargo")?;
    ensure!(output.status.success(), "the program cannot be built");
    let messages = String::from_utf8(output.stdout)?;
    let messages = messages.lines().filter_map(|line| serde_json::from_str(line).ok());
    let mut paths = messages.filter_map(|message: serde_json::Value| {
        let is_it = message["target"]["name"] == "instructions";
        is_it.then(|| message["executable"].as_str().map(PathBuf::from)).flatten()
    });
    paths.next().context("cargo names no program")
}

/// Builds the program that calls llama.cpp's kernels, and gives its path.
fn build_peer(root: &Path, build: &Path, source: &Path) -> Result<PathBuf> {
    let folder = root.join("target/arm");
    std::fs::create_dir_all(&folder)?;
    let program = folder.join("ggml");
    let status = Command::new(LINKER)
        .args(["-O2", "-static", "-o"])
        .args([&program, &root.join("xtask/src/arm/ggml.c")])
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
    let (short, bytes) = count(processor, program, words, TIMES[0])?;
    if bytes == 0 {
        return Ok(None);
    }
    let (long, _) = count(processor, program, words, TIMES[1])?;
    let more = (TIMES[1] - TIMES[0]) * bytes;
    Ok(Some(long.saturating_sub(short) as f64 / more as f64))
}

/// The instructions of one run, and the bytes of the weights that it prints: 0 without a kernel.
fn count(processor: &str, program: &Path, words: &[&str], times: usize) -> Result<(u64, usize)> {
    // In single steps each line of the log is an instruction.
    let mut child = Command::new(QEMU)
        .args(["-L", LIBRARIES, "-cpu", processor, "-singlestep", "-d", "exec,nochain"])
        .arg(program)
        .args(words)
        .arg(times.to_string())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot run {QEMU}"))?;
    let mut log = BufReader::new(child.stderr.take().context("no log")?);
    let (mut lines, mut line, mut last) = (0, Vec::new(), Vec::new());
    while log.read_until(b'\n', &mut line)? > 0 {
        lines += 1;
        std::mem::swap(&mut line, &mut last);
        line.clear();
    }
    let output = child.wait_with_output()?;
    let last = String::from_utf8_lossy(&last);
    let what = || format!("{} {}: {}", program.display(), words.join(" "), last.trim());
    ensure!(output.status.success(), "{}", what());
    let bytes = String::from_utf8(output.stdout)?.trim().parse().with_context(what)?;
    Ok((lines, bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_have_the_names_of_llama_cpp() {
        let names = ["F16", "Q4_K", "Q8_0", "IQ4_XS", "MXFP4"].map(peer_name);
        assert_eq!(names, ["f16", "q4_K", "q8_0", "iq4_xs", "mxfp4"]);
    }
}
