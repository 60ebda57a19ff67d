//! `bodkin prune`: unstructured and N:M pruning, and the loss of quality.

mod arguments;
mod report;

use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use bodkin_compress::imatrix::Imatrix;
use bodkin_compress::prune::{self, Calibration, Cut, Job, Method, Pruner, Rule, Structure};
use bodkin_compress::surgery::{self, Surgery};
use bodkin_eval::{Windows, read};
use bodkin_gguf::File;

use super::chunks::{CHUNK_TOKENS, Run, windows};
use crate::arguments::{Machine, find_decoder, threads};
use crate::output;
use crate::progress::reporter;
pub(crate) use arguments::Args;
use bodkin::ModelFile;
use bodkin::memory::human_bytes;

/// Memory limit of the Hessians of SparseGPT: larger models are read several times.
const PRODUCTS_BYTES: u64 = 2 << 30;

pub(crate) fn run(args: Args) -> Result<()> {
    let mut surgery = match &args.surgery {
        Some(path) => Surgery::open(path)?,
        None => Surgery { imatrix: None, rules: vec![rule(&args)?] },
    };
    surgery.imatrix = args.imatrix.clone().or(surgery.imatrix);
    let mut opened = find_decoder(&args.input)?;
    let texts = [&args.calibrate, &args.evaluate, &args.surgery, &surgery.imatrix];
    let read = texts.into_iter().flatten().map(PathBuf::as_path);
    output::check(&args.output, read.chain([opened.file.path()]))?;
    let jobs = plan(&opened, &surgery, args.surgery.as_deref())?;
    let text = match &args.calibrate {
        Some(text) => {
            let tokenizer = args.tokenizer.open(&opened.file)?;
            let size = args.machine.context()?.unwrap_or(CHUNK_TOKENS);
            Some(windows(&tokenizer, text, size, Some(args.chunks))?)
        }
        None => None,
    };
    check_inputs(&jobs, surgery.imatrix.is_some(), text.is_some(), &FLAGS)?;
    let evaluated = report::windows(&args, &opened)?;
    let source = source(args.calibrate.as_ref().or(surgery.imatrix.as_ref()));
    let file = opened.file.clone();
    let start = Instant::now();
    let mut pruner = Pruner::new(&file, output::folder(&args.output))?;
    let imatrix = imatrix(&surgery, &opened)?;
    prune_all(&mut pruner, &jobs, &args.machine, &mut opened, imatrix, text.as_ref())?;
    write(pruner, &jobs, &source, &args.output)?;
    report::print(&args, &opened, &jobs, evaluated.as_ref(), start.elapsed())
}

/// Prunes all tensors, with calibration passes if there is a text.
fn prune_all(
    pruner: &mut Pruner<'_>,
    jobs: &[Job],
    machine: &Machine,
    opened: &mut ModelFile,
    imatrix: Option<Imatrix>,
    text: Option<&Windows>,
) -> Result<()> {
    let threads = threads(machine.threads)?;
    let known = Calibration::of(imatrix.unwrap_or_default());
    let bytes = jobs.iter().map(|job| job.tensor.bytes).sum();
    let mut progress = None;
    for pass in prune::passes(jobs, PRODUCTS_BYTES) {
        let collected = match text {
            Some(text) => {
                drop(progress.take());
                Some(calibrate(machine, opened, text, &prune::with_products(&pass))?)
            }
            None => None,
        };
        let progress = progress.get_or_insert_with(|| reporter().begin("pruning", Some(bytes)));
        for job in pass {
            pruner.prune(job, collected.as_ref().unwrap_or(&known), threads)?;
            progress.add(job.tensor.bytes);
        }
    }
    Ok(())
}

/// The rule that the flags describe.
fn rule(args: &Args) -> Result<Rule> {
    let structure: Structure = args.pattern.parse().context("--pattern")?;
    let method: Method = args.method.parse().context("--method")?;
    let format = args.format.as_deref().map(surgery::parse_format).transpose()?;
    let asked = args.sparsity.map(|share| share as f32);
    let sparsity = surgery::sparsity(structure, asked).context(match asked {
        Some(_) => "--sparsity",
        None => "--sparsity FRACTION, --pattern N:M or --surgery FILE",
    })?;
    let cut = Cut { method, sparsity, structure, format, dense: args.dense };
    Ok(Rule { tensors: None, cut: Some(cut) })
}

/// The jobs of the rules for a model; `path` is the surgery file.
fn plan(opened: &ModelFile, surgery: &Surgery, path: Option<&Path>) -> Result<Vec<Job>> {
    let jobs = prune::plan(&opened.file, &surgery.rules);
    let jobs = match path {
        Some(path) => jobs.with_context(|| path.display().to_string())?,
        None => jobs?,
    };
    ensure!(!jobs.is_empty(), "{}: expected a tensor that a rule prunes, found none", opened.name);
    Ok(jobs)
}

/// The flags that provide a calibration text, and statistics.
const FLAGS: [&str; 2] = ["--calibrate TEXT", "--imatrix FILE, or --calibrate TEXT"];
/// The same for a model that is pruned when it is loaded.
const AT_LOAD: [&str; 2] = ["use `prune --calibrate TEXT`", "imatrix = FILE in the surgery file"];

/// Checks that the inputs of all methods are given.
fn check_inputs(
    jobs: &[Job],
    has_imatrix: bool,
    has_text: bool,
    [text, statistics]: &[&str; 2],
) -> Result<()> {
    for job in jobs {
        match job.method {
            Method::Magnitude => (),
            Method::SparseGpt if !has_text => bail!("sparsegpt needs a calibration text: {text}"),
            method if !has_imatrix && !has_text => bail!("{method} needs statistics: {statistics}"),
            _ => (),
        }
    }
    Ok(())
}

/// Collects statistics over the calibration text.
fn calibrate(
    machine: &Machine,
    opened: &mut ModelFile,
    text: &Windows,
    names: &std::collections::BTreeSet<String>,
) -> Result<Calibration> {
    let mut run = Run::new(opened, machine, text.size())?;
    let mut calibration = Calibration::new(&opened.plan, names, threads(machine.threads)?);
    for window in 0..text.count() {
        read(run.model.as_mut(), text, window, |_| false, &mut calibration)?;
        calibration.check()?;
        run.estimate_time(window, text);
    }
    Ok(calibration)
}

/// The importance matrix that a surgery file or a flag names, for the weights of the model.
fn imatrix(surgery: &Surgery, opened: &ModelFile) -> Result<Option<Imatrix>> {
    let Some(path) = &surgery.imatrix else { return Ok(None) };
    Ok(Some(Imatrix::open(path)?.fit(&opened.plan, path)?))
}

/// The source of statistics, for the metadata.
fn source(path: Option<&PathBuf>) -> String {
    path.map_or("none".to_owned(), |path| path.display().to_string())
}

fn write(pruner: Pruner<'_>, jobs: &[Job], source: &str, path: &Path) -> Result<()> {
    let metadata = pruner.metadata(jobs, source);
    output::write(path, |out| {
        let failed = || format!("cannot write {}", path.display());
        pruner.write(jobs, &metadata, out).with_context(failed)
    })
}

/// Prunes a model by a surgery file before it runs. The pruned weights are in an unnamed temporary
/// file, which the system deletes when the model is freed.
pub(crate) fn at_load(opened: ModelFile, surgery: &Path, machine: &Machine) -> Result<ModelFile> {
    let path = surgery;
    let surgery = Surgery::open(path)?;
    let jobs = plan(&opened, &surgery, Some(path))?;
    check_inputs(&jobs, surgery.imatrix.is_some(), false, &AT_LOAD)?;
    let imatrix = imatrix(&surgery, &opened)?;
    let (file, mut opened) = (opened.file.clone(), opened);
    let mut pruner = Pruner::new(&file, &std::env::temp_dir())?;
    prune_all(&mut pruner, &jobs, machine, &mut opened, imatrix, None)?;
    let metadata = pruner.metadata(&jobs, &source(surgery.imatrix.as_ref()));
    let pruned = tempfile::NamedTempFile::new().context("cannot make a temporary file")?;
    let mut out = BufWriter::new(&pruned);
    pruner.write(&jobs, &metadata, &mut out)?;
    out.flush().context("cannot write the pruned model")?;
    drop(out);
    let file = File::open(pruned.path())?;
    let (folder, size) = (std::env::temp_dir(), human_bytes(file.bytes()));
    eprintln!("pruned into {size} under {}", folder.display());
    Ok(opened.with_file(file)?)
}
