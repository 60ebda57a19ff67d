//! `cargo xtask ci`: everything that must pass before a change goes in, in the order in which
//! failures are cheapest to find.

use std::path::Path;
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, ensure};

/// What each step is called, and the arguments of cargo.
const STEPS: &[(&str, &str)] = &[
    ("format", "fmt --all --check"),
    ("tidy", "xtask tidy"),
    ("clippy", "clippy --workspace --all-targets --all-features --quiet -- -D warnings"),
    ("kernels", "xtask kernels --check"),
    ("cuda", "xtask emulate"),
    ("arm", "xtask arm"),
    ("windows", "check --quiet --target x86_64-pc-windows-gnu"),
    // What needs no C compiler for it; the server and downloads need one, for cryptography.
    (
        "macos",
        "check --quiet --target aarch64-apple-darwin -p bodkin-cpu -p bodkin-cuda -p bodkin-wgpu \
         -p bodkin-engine -p bodkin-eval -p bodkin-convert",
    ),
    ("tests", "test --workspace --all-features --quiet"),
    ("docs", "doc --workspace --all-features --no-deps --document-private-items --quiet"),
];

/// Tests that download several hundred megabytes of other people's packages, and need Java.
const FULL: (&str, &str) =
    ("systems", "test -p bodkin --all-features --quiet --test flight -- --ignored");

/// What to run.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Also test with vector stores and data frames, whose packages are large
    #[arg(long)]
    full: bool,
}

/// Runs every step in the workspace at `root` and stops at the first that fails.
pub(crate) fn run(root: &Path, options: &Args) -> Result<()> {
    for (name, args) in STEPS.iter().chain(options.full.then_some(&FULL)) {
        println!("{name}: cargo {args}");
        let start = Instant::now();
        let status = Command::new("cargo")
            .args(args.split(' '))
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
