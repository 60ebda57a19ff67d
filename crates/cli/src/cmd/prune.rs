//! `bodkin prune`: unstructured and N:M pruning, and the loss of quality.

mod arguments;
mod pack;
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

use super::chunks::{CHUNK_TOKENS, Run, windows, windows_of};
use crate::arguments::{Machine, find_decoder, threads};
use crate::output;
use crate::progress::computing;
pub(crate) use arguments::Args;
use bodkin::ModelFile;
use bodkin::memory::human_bytes;

/// Memory limit of the Hessians of SparseGPT: larger models are read several times.
const PRODUCTS_BYTES: u64 = 2 << 30;

/// Sparsity where neither a flag nor a pattern gives one.
const SPARSITY: f64 = 0.5;

/// The text that calibrates where no other is given: prose, dialogue, lists, code and some other
/// languages.
const TEXT: &str = include_str!("prune/calibration.txt");
const TEXT_NAME: &str = "the built-in text";

pub(crate) fn run(args: Args) -> Result<()> {
    if args.pack {
        return pack::run(&args);
    }
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
    let text = calibration_text(&args, &opened, &jobs, surgery.imatrix.is_some())?;
    check_inputs(&jobs, surgery.imatrix.is_some(), text.is_some(), &FLAGS)?;
    let evaluated = report::windows(&args, &opened)?;
    let source = match (&args.calibrate, &surgery.imatrix, &text) {
        (Some(path), ..) | (_, Some(path), _) => path.display().to_string(),
        (.., Some(_)) => TEXT_NAME.to_owned(),
        _ => "none".to_owned(),
    };
    let file = opened.file.clone();
    let start = Instant::now();
    let mut pruner = Pruner::new(&file, output::folder(&args.output))?;
    let imatrix = imatrix(&surgery, &opened)?;
    prune_all(&mut pruner, &jobs, &args.machine, &mut opened, imatrix, text.as_ref())?;
    let metadata = pruner.metadata(&jobs, &source);
    output::write(&args.output, |out| {
        let failed = || format!("cannot write {}", args.output.display());
        pruner.write(&metadata, out).with_context(failed)
    })?;
    report::print(&args, &opened, &jobs, evaluated.as_ref(), start.elapsed())
}

/// The text to calibrate with: the given one, or the built-in one where methods need statistics
/// that no importance matrix has.
fn calibration_text(
    args: &Args,
    opened: &ModelFile,
    jobs: &[Job],
    has_imatrix: bool,
) -> Result<Option<Windows>> {
    let needs_text = !has_imatrix && jobs.iter().any(|job| job.method != Method::Magnitude);
    if args.calibrate.is_none() && !needs_text {
        return Ok(None);
    }
    let tokenizer = args.tokenizer.open(&opened.file)?;
    let size = args.machine.context()?.unwrap_or(CHUNK_TOKENS);
    ensure!(args.chunks > 0, "--chunks: expected at least 1 chunk, found 0");
    let mut windows = match &args.calibrate {
        Some(path) => windows(&tokenizer, path, size, None)?,
        None => windows_of(&tokenizer, TEXT, TEXT_NAME, size)?,
    };
    windows.truncate(args.chunks);
    Ok(Some(windows))
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
        let progress = progress.get_or_insert_with(|| computing("pruning", Some(bytes)));
        for job in pass {
            pruner.prune(job, collected.as_ref().unwrap_or(&known), threads)?;
            progress.add(job.tensor.bytes);
        }
    }
    Ok(())
}

/// The rule that the flags describe.
fn rule(args: &Args) -> Result<Rule> {
    let structure: Structure = args.pattern.parse().map_err(of_flag)?;
    let default = if args.imatrix.is_some() { "wanda" } else { "sparsegpt" };
    let method: Method = args.method.as_deref().unwrap_or(default).parse().map_err(of_flag)?;
    let format = args.format.as_deref().map(surgery::parse_format).transpose().map_err(of_flag)?;
    let default = (structure == Structure::Unstructured).then_some(SPARSITY);
    let asked = args.sparsity.or(default).map(|share| share as f32);
    let sparsity = surgery::sparsity(structure, asked).map_err(of_flag)?;
    let cut = Cut { method, sparsity, structure, format, dense: args.dense };
    Ok(Rule { tensors: None, cut: Some(cut) })
}

/// The error of an option, whose name begins its text, as that of its flag.
fn of_flag(error: bodkin_compress::Error) -> anyhow::Error {
    anyhow::anyhow!("--{error}")
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

/// What provides a calibration text, and statistics.
const FLAGS: [&str; 2] = ["leave the importance matrix out", "an importance matrix"];
/// The same for a model that is pruned when it is loaded.
const AT_LOAD: [&str; 2] = ["use `prune`", "imatrix = FILE in the surgery file, or `prune`"];

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
    // The tokens of the text, as a progress bar counts bytes.
    let progress = computing("calibrating", Some((4 * text.count() * text.size()) as u64));
    for window in 0..text.count() {
        read(run.model.as_mut(), text, window, |_| false, &mut calibration)?;
        calibration.check()?;
        progress.add(4 * text.size() as u64);
    }
    Ok(calibration)
}

/// The importance matrix that a surgery file or a flag names, for the weights of the model.
fn imatrix(surgery: &Surgery, opened: &ModelFile) -> Result<Option<Imatrix>> {
    let Some(path) = &surgery.imatrix else { return Ok(None) };
    Ok(Some(Imatrix::open(path)?.fit(&opened.plan, path)?))
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
    let source = surgery.imatrix.map_or("none".to_owned(), |path| path.display().to_string());
    let metadata = pruner.metadata(&jobs, &source);
    let pruned = output::temporary(&std::env::temp_dir())?;
    let mut out = BufWriter::new(&pruned);
    pruner.write(&metadata, &mut out)?;
    out.flush().context("cannot write the pruned model")?;
    drop(out);
    let file = File::open(pruned.path())?;
    let (folder, size) = (std::env::temp_dir(), human_bytes(file.bytes()));
    eprintln!("pruned into {size} under {}", folder.display());
    Ok(opened.with_file(file)?)
}
