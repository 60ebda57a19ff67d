//! `cargo xtask parity`: runs the cases of a parity kit, whose results come from other engines,
//! and says which fail. One file per folder of the kit.

mod chat;
mod models;
mod quants;
mod real;
mod tokenizers;

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::{Context, Result, bail, ensure};
use bodkin_cuda::Cuda;

/// How the kit is found.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The folder of the kit.
    #[arg(long)]
    kit: PathBuf,
    /// Only backends whose name begins so run models; on a GPU they run only if it is named, on
    /// several that share them if their numbers are: cuda:0,1.
    #[arg(long, default_value = "")]
    backend: String,
    /// Only models whose name begins so run.
    #[arg(long, default_value = "")]
    model: String,
    /// Only these folders of the kit.
    only: Vec<String>,
}

/// The outcome for one folder of the kit.
#[derive(Debug, Default)]
pub(crate) struct Report {
    /// Comparisons that were equal.
    pub(crate) passed: usize,
    /// One line for each comparison that was not.
    pub(crate) failures: Vec<String>,
    /// Names of what the engine does not support, each with the reason.
    pub(crate) not_covered: Vec<String>,
    /// Limits of numeric comparisons, each with the largest value found.
    pub(crate) worst: Vec<(f64, f64)>,
}

impl Report {
    /// Counts a comparison; `describe` is asked only if it was not equal.
    pub(crate) fn check(&mut self, is_equal: bool, describe: impl FnOnce() -> String) {
        match is_equal {
            true => self.passed += 1,
            false => self.failures.push(describe()),
        }
    }

    /// Notes a value that is to stay below a limit.
    pub(crate) fn worst(&mut self, limit: f64, value: f64) {
        match self.worst.iter_mut().find(|(other, _)| *other == limit) {
            Some((_, worst)) => *worst = worst.max(value),
            None => self.worst.push((limit, value)),
        }
    }
}

/// The GPU, or those, that the name of a backend begins with.
fn cuda(backend: &str) -> Result<Cuda> {
    // A name goes on with what the device is called.
    let name = backend.split_whitespace().next().unwrap_or("");
    let numbers = name.strip_prefix("cuda").unwrap_or(name);
    let numbers = numbers.strip_prefix(':').unwrap_or(numbers);
    let ordinals = bodkin_cuda::ordinals(if numbers.is_empty() { "0" } else { numbers });
    let ordinals = ordinals.with_context(|| {
        format!("--backend: expected numbers after `cuda:`, divided by commas, found `{numbers}`")
    })?;
    Ok(Cuda::open_all(&ordinals)?)
}

pub(crate) fn main(args: &Args) -> Result<()> {
    for only in &args.only {
        ensure!(PARTS.iter().any(|(name, _)| name == only), "the kit has no part `{only}`");
    }
    let is_run = |part: &str| args.only.is_empty() || args.only.iter().any(|only| only == part);
    let needs_real = is_run("tokenizers") || is_run("real");
    let real = if needs_real { models(&args.model)? } else { BTreeMap::new() };
    let chosen = Chosen { real, backend: args.backend.clone(), model: args.model.clone() };
    let (mut failed, mut compared) = (0, 0);
    for (name, run) in PARTS {
        if !is_run(name) {
            continue;
        }
        let report = run(&args.kit, &chosen).with_context(|| format!("parity of {name}"))?;
        report.not_covered.iter().for_each(|line| println!("{name}: not covered: {line}"));
        report.failures.iter().for_each(|line| println!("{name}: FAILED: {line}"));
        let (passed, failures) = (report.passed, report.failures.len());
        for (limit, worst) in report.worst {
            println!("{name}: worst {worst:.2e}, at most {limit:.0e}");
        }
        println!("{name}: {passed} passed, {failures} failed");
        failed += failures;
        compared += passed + failures;
    }
    ensure!(compared > 0, "nothing was compared: no model or backend has such a name");
    if failed > 0 {
        bail!("{failed} comparisons failed");
    }
    Ok(())
}

/// The folders of the kit, and what runs them.
const PARTS: [(&str, Run); 5] = [
    ("quants", quants::run),
    ("models", models::run),
    ("tokenizers", tokenizers::run),
    ("chat", chat::run),
    ("real", real::run),
];

type Run = fn(&std::path::Path, &Chosen) -> Result<Report>;

/// What there is to run besides the kit itself.
#[derive(Default)]
pub(crate) struct Chosen {
    /// Files of the real models, by name.
    pub(crate) real: BTreeMap<String, PathBuf>,
    /// The start of the names of the backends that run models.
    pub(crate) backend: String,
    /// The start of the names of the models that run.
    pub(crate) model: String,
}

/// The real models that a kit has references for, and the names that `bodkin pull` has for them.
const REAL: [(&str, &str); 2] =
    [("SmolLM2-135M-Instruct.Q4_1", "smollm2"), ("gemma3-270m-q4_k_m", "gemma3-270m")];

/// Real model files by name, of those whose names begin so, fetched if need be.
fn models(start: &str) -> Result<BTreeMap<String, PathBuf>> {
    let pull = |(name, pulled): (&str, &str)| {
        Ok((name.to_owned(), crate::compare::pull(&crate::root(), pulled)?))
    };
    REAL.into_iter().filter(|(name, _)| name.starts_with(start)).map(pull).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The selection of the kit that is kept with the sources.
    fn all_pass(run: Run, at_least: usize) {
        let kit = crate::root().join("tests/parity");
        let report = run(&kit, &Chosen::default()).unwrap();
        assert!(report.failures.is_empty(), "{}", report.failures.join("\n"));
        assert!(report.not_covered.is_empty(), "{:?}", report.not_covered);
        assert!(report.passed >= at_least, "only {} comparisons", report.passed);
    }

    #[test]
    fn models_agree() {
        all_pass(models::run, 1000);
    }

    #[test]
    fn quants_agree() {
        all_pass(quants::run, 27 * 18);
    }
}
