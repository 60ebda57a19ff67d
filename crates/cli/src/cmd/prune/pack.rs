//! `--pack`: leaves out the zeros that a model has already. No weight changes.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;

use anyhow::{Context, Result, ensure};
use bodkin::memory::human_bytes;
use bodkin_compress::prune::Pruner;
use bodkin_gguf::File;
use serde_json::json;

use super::arguments::Args;
use crate::arguments::{find_path, threads};
use crate::progress::computing;
use crate::{output, text};

/// Tensors of one format, and their bytes.
#[derive(Default)]
struct Sum {
    tensors: usize,
    bytes: u64,
}

pub(super) fn run(args: &Args) -> Result<()> {
    let file = bodkin_model::open(&find_path(&args.input)?)?;
    output::check(&args.output, [file.path()])?;
    let threads = threads(args.machine.threads)?;
    let mut pruner = Pruner::new(&file, output::folder(&args.output))?;
    let mut packed = Vec::new();
    let progress = computing("packing", Some(file.bytes()));
    for tensor in file.tensors() {
        if pruner.pack(tensor, threads)? {
            packed.push(tensor.name.clone());
        }
        progress.add(tensor.bytes);
    }
    drop(progress);
    ensure!(
        !packed.is_empty(),
        "{}: expected F16, Q8_0 or Q4_0 matrices that a sparse format makes smaller, found {}",
        file.path().display(),
        found(&file)
    );
    let sparsity = pruner.sparsity();
    let metadata = pruner.packed_metadata();
    output::write(&args.output, |out| {
        let failed = || format!("cannot write {}", args.output.display());
        pruner.write(&metadata, out).with_context(failed)
    })?;
    report(args, &file, &packed, sparsity)
}

/// What a file has where no tensor can be packed.
fn found(file: &File) -> String {
    let sparse = file.tensors().iter().map(|tensor| tensor.format);
    let sparse: Vec<_> = sparse.filter(|format| format.base().is_some()).collect();
    let names: BTreeSet<&str> = sparse.iter().map(|format| format.name()).collect();
    let names = names.into_iter().collect::<Vec<_>>().join(", ");
    match sparse.len() {
        0 => "none".to_owned(),
        1 => format!("1 that is packed already ({names}) and no other"),
        n => format!("{n} that are packed already ({names}) and no other"),
    }
}

/// Prints the formats of the packed tensors, and the sizes of the files.
fn report(args: &Args, before: &File, packed: &[String], sparsity: f64) -> Result<()> {
    let after = File::open(&args.output)?;
    let mut formats = BTreeMap::<&str, Sum>::new();
    for name in packed {
        let tensor = after.tensor(name).context("a packed tensor is in the file")?;
        let sum = formats.entry(tensor.format.name()).or_default();
        sum.tensors += 1;
        sum.bytes += tensor.bytes;
    }
    let mut out = std::io::stdout().lock();
    if args.json {
        let formats = formats.iter().map(|(name, Sum { tensors, bytes })| {
            json!({ "format": name, "tensors": tensors, "bytes": bytes })
        });
        let value = json!({
            "source_bytes": before.bytes(),
            "bytes": after.bytes(),
            "tensors": before.tensors().len(),
            "sparsity": sparsity,
            "formats": formats.collect::<Vec<_>>(),
        });
        return Ok(writeln!(out, "{value:#}")?);
    }
    for (name, Sum { tensors, bytes }) in formats {
        let (tensors, size) = (text::count(tensors, "tensor"), human_bytes(bytes));
        writeln!(out, "{name:<12} {tensors:>12} {size:>10}")?;
    }
    let (from, to, zeros) = (before.bytes(), after.bytes(), 100.0 * sparsity);
    let (packed, all) = (packed.len(), before.tensors().len());
    writeln!(out, "\n{packed} of {all} tensors packed, {zeros:.1} % zeros in them")?;
    Ok(writeln!(out, "{} -> {}", human_bytes(from), human_bytes(to))?)
}
