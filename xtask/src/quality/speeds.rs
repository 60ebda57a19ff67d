//! How fast the models of `quality` generate: each is made once, then all are timed interleaved,
//! so that a change of the machine's speed affects all of them. Which weights are zero matters
//! little to speed, so pruned models are made by magnitude, which needs no text.

use std::path::PathBuf;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::bench::{Bench, Way};
use crate::compare::median;

/// Tokens that a run generates.
const TOKENS: &str = "128";

/// A model that is timed.
struct Variant {
    /// What was done to it: nothing, a type, or the amount and the format of pruning.
    name: String,
    path: PathBuf,
    /// Whether it is also timed with its zeros.
    is_pruned: bool,
    speeds: Vec<f64>,
    dense_speeds: Vec<f64>,
}

/// Times the model as it is, the types, and the ways to prune of the arguments.
pub(super) fn measure(bench: &Bench<'_>, types: &[&String], rounds: usize) -> Result<()> {
    let mut variants = vec![Variant::new("before".to_owned(), bench.model.clone(), false)];
    let source = bench.path("source.gguf");
    if !types.is_empty() {
        bench.bodkin(|c| c.arg("quantize").arg(&bench.model).arg(&source).arg("F16"))?;
    }
    for kind in types {
        let path = bench.path(&format!("{kind}.gguf"));
        bench.bodkin(|c| c.arg("quantize").arg(&source).arg(&path).arg(kind))?;
        variants.push(Variant::new((*kind).clone(), path, false));
    }
    for way in &bench.args.prune {
        let Way { amount, format, flag, .. } = Way::of(way)?;
        let name = format!("{amount}:{format}");
        if variants.iter().any(|variant| variant.name == name) {
            continue;
        }
        let path = bench.path(&format!("{}.gguf", variants.len()));
        bench.bodkin(|c| {
            c.arg("prune").arg(&bench.model).arg(&path);
            c.args(["--method", "magnitude", flag, amount, "--format", format])
        })?;
        variants.push(Variant::new(name, path, true));
    }
    for _ in 0..rounds {
        variants.iter_mut().try_for_each(|variant| variant.run(bench))?;
    }
    variants.iter().try_for_each(|variant| bench.append(variant.row()))
}

impl Variant {
    fn new(name: String, path: PathBuf, is_pruned: bool) -> Variant {
        Variant { name, path, is_pruned, speeds: Vec::new(), dense_speeds: Vec::new() }
    }

    /// Times it once.
    fn run(&mut self, bench: &Bench<'_>) -> Result<()> {
        let speed = |sparse: &str| -> Result<f64> {
            let threads = bench.args.threads.to_string();
            let output = bench.bodkin(|c| {
                c.arg("bench").arg(&self.path).args(["-p", "0", "-n", TOKENS, "-r", "1"]);
                c.args(["-o", "json", "-t", &threads, "--sparse", sparse])
            })?;
            let rows: Value = serde_json::from_slice(&output.stdout)?;
            rows[0]["avg_ts"].as_f64().context("bodkin bench printed no `avg_ts`")
        };
        let fastest = speed("auto")?;
        if self.is_pruned {
            self.dense_speeds.push(speed("never")?);
        }
        self.speeds.push(fastest);
        Ok(())
    }

    fn row(&self) -> Value {
        let dense = (!self.dense_speeds.is_empty()).then(|| median(&self.dense_speeds));
        json!({
            "kind": "speed",
            "variant": self.name,
            "tokens_per_second": median(&self.speeds),
            "dense_tokens_per_second": dense,
        })
    }
}
