//! `cargo xtask ci`: everything that must pass before a change goes in, in the order in which
//! failures are cheapest to find.

use std::env;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Instant;

use anyhow::{Context, Result, ensure};

/// What a step is called, and the arguments of cargo, or of this program after `xtask`.
type Step = (&'static str, &'static str);

const CHECKS: &[Step] = &[
    ("format", "fmt --all --check"),
    ("tidy", "xtask tidy"),
    ("clippy", "clippy --workspace --all-targets --all-features --quiet -- -D warnings"),
];

/// Two sequences of steps that run at the same time: a build of many crates ends with some that
/// wait for each other, and leaves the other cores to the emulated GPUs.
const EMULATED: &[Step] = &[("kernels", "xtask kernels --check"), ("cuda", "xtask emulate")];
const COMPILED: &[Step] = &[
    ("build", "test --workspace --all-features --quiet --no-run"),
    ("docs", "doc --workspace --all-features --no-deps --document-private-items --quiet"),
    ("windows", "check --quiet --target x86_64-pc-windows-gnu"),
    // What needs no C compiler for it; the server and downloads need one, for cryptography.
    (
        "macos",
        "check --quiet --target aarch64-apple-darwin -p bodkin-cpu -p bodkin-cuda -p bodkin-wgpu \
         -p bodkin-engine -p bodkin-eval -p bodkin-convert",
    ),
    ("arm", "xtask arm"),
];

/// Some of the tests have a time limit, so nothing else runs meanwhile.
const TESTS: Step = ("tests", "test --workspace --all-features --quiet");

/// Tests that download several hundred megabytes of other people's packages, and need Java.
const FULL: Step = ("systems", "test -p bodkin --all-features --quiet --test flight -- --ignored");

/// What to run.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Also test with vector stores and data frames, whose packages are large
    #[arg(long)]
    full: bool,
}

/// Runs every step in the workspace at `root`, and begins none after one has failed.
pub(crate) fn run(root: &Path, options: &Args) -> Result<()> {
    let failed = AtomicBool::new(false);
    let run_all = |steps| {
        let result = run_each(root, steps, &failed);
        failed.fetch_or(result.is_err(), Ordering::Relaxed);
        result
    };
    run_all(CHECKS)?;
    thread::scope(|scope| {
        let emulated = scope.spawn(|| run_all(EMULATED));
        let compiled = run_all(COMPILED);
        compiled.and(emulated.join().expect("a step panicked"))
    })?;
    run_all(&[TESTS])?;
    if options.full { run_all(&[FULL]) } else { Ok(()) }
}

/// Runs one step after another, until one of these or of those beside them has failed.
fn run_each(root: &Path, steps: &[Step], failed: &AtomicBool) -> Result<()> {
    for (name, args) in steps {
        if failed.load(Ordering::Relaxed) {
            return Ok(());
        }
        println!("{name}: cargo {args}");
        let start = Instant::now();
        let status = command(args)?
            .current_dir(root)
            .env("RUSTDOCFLAGS", "-D warnings")
            .status()
            .context("cannot run cargo")?;
        let seconds = start.elapsed().as_secs_f64();
        ensure!(status.success(), "{name} failed after {seconds:.1} s");
        println!("{name}: ok, {seconds:.1} s");
    }
    Ok(())
}

/// Cargo, or this program, without the variables that `cargo run` set: build scripts that read them
/// would run again, and everything that depends on their crates would be compiled again.
fn command(args: &str) -> Result<Command> {
    let (program, args) = match args.strip_prefix("xtask ") {
        Some(args) => (env::current_exe()?, args),
        None => ("cargo".into(), args),
    };
    let mut command = Command::new(program);
    command.args(args.split(' '));
    for (variable, _) in env::vars_os() {
        let name = variable.to_string_lossy();
        if name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_") {
            command.env_remove(&variable);
        }
    }
    Ok(command)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::workspace::root;

    /// Otherwise a run compiles them twice, with all that depends on them.
    #[test]
    fn this_program_and_the_tests_have_crates_with_the_same_features() {
        let crates = |args: &str| {
            let args = format!("tree --prefix none --format {{p}}:{{f}} {args}");
            let output = Command::new("cargo").args(args.split(' ')).current_dir(root()).output();
            let text = String::from_utf8(output.unwrap().stdout).unwrap();
            let lines = text.lines().map(|line| line.trim_end_matches(" (*)").to_owned());
            lines.collect::<BTreeSet<String>>()
        };
        let own = crates("--package xtask --edges normal,no-proc-macro");
        let all = crates("--workspace --all-features --edges normal,dev,no-proc-macro");
        assert!(own.len() > 100);
        assert_eq!(own.difference(&all).collect::<Vec<_>>(), [""; 0]);
    }
}
