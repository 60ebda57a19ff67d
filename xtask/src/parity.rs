//! `cargo xtask parity`: runs the cases of a parity kit, whose results come from other engines,
//! and says which fail. One file per folder of the kit.

mod chat;
mod kit;
mod models;
mod quants;
mod real;
mod tokenizers;

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::{Context, Result, bail, ensure};

use self::kit::{Report, Selection};
use crate::workspace::root;

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
    /// Only prompts of at most this many tokens run.
    #[arg(long, default_value_t = usize::MAX, hide_default_value = true)]
    tokens: usize,
    /// Only these folders of the kit.
    only: Vec<String>,
}

pub(crate) fn main(args: &Args) -> Result<()> {
    for only in &args.only {
        ensure!(PARTS.iter().any(|(name, _)| name == only), "the kit has no part `{only}`");
    }
    let is_run = |part: &str| args.only.is_empty() || args.only.iter().any(|only| only == part);
    let needs_real = is_run("tokenizers") || is_run("real");
    let real = if needs_real { models(&args.model)? } else { BTreeMap::new() };
    let (backend, model) = (args.backend.clone(), args.model.clone());
    let chosen = Selection { real, backend, model, tokens: args.tokens };
    let (mut failed, mut compared) = (0, 0);
    for (name, run) in PARTS {
        if !is_run(name) {
            continue;
        }
        let report = run(&args.kit, &chosen).with_context(|| format!("parity of {name}"))?;
        report.not_covered.iter().for_each(|line| println!("{name}: not covered: {line}"));
        report.failures.iter().for_each(|line| println!("{name}: FAILED: {line}"));
        let (passed, failures) = (report.passed, report.failures.len());
        for (what, worst) in report.worst {
            println!("{name}: worst of {what}: {worst}");
        }
        println!("{name}: {passed} passed, {failures} failed");
        failed += failures;
        compared += passed + failures;
    }
    ensure!(
        compared > 0,
        "nothing was compared: no model with logits in the kit, or no backend, has such a name"
    );
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

type Run = fn(&std::path::Path, &Selection) -> Result<Report>;

/// The real models that a kit has references for, and the names that `bodkin pull` has for them.
const REAL: [(&str, &str); 2] =
    [("SmolLM2-135M-Instruct.Q4_1", "smollm2"), ("gemma3-270m-q4_k_m", "gemma3-270m")];

/// Real model files by name, of those whose names begin so, fetched if need be.
fn models(start: &str) -> Result<BTreeMap<String, PathBuf>> {
    let pull = |(name, pulled): (&str, &str)| {
        Ok((name.to_owned(), crate::compare::pull(&root(), pulled)?))
    };
    REAL.into_iter().filter(|(name, _)| name.starts_with(start)).map(pull).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The checked-in part of the kit.
    fn all_pass(run: Run, at_least: usize) {
        let kit = root().join("tests/parity");
        let report = run(&kit, &Selection::default()).unwrap();
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
