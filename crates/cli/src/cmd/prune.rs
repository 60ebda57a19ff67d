//! `bodkin prune`: a model with fewer weights, and what that cost.

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

use super::perplexity::{CHUNK_TOKENS, Run, windows};
use super::quantize::threads;
use crate::arguments::{Machine, TokenizerArgs, find_decoder, fraction};
use crate::output;
use crate::progress::reporter;
use bodkin::ModelFile;
use bodkin::memory::human_bytes;

const AFTER: &str = r#"Matrices of layers are pruned; embeddings, head, norms and routers stay.
What is left is stored in a format that leaves zeros out, or with --dense in one that other programs
read. With --evaluate, the table at the end compares with the model before, with the same precision
unpruned, and with the dense type of about the same size.

A surgery file is TOML. Of its rules the first counts whose pattern is found in a tensor's name:

  imatrix = "model.imatrix.gguf"  # if a method needs one; beside this file
  [[rule]]
  tensors = 'attn_(k|v)'          # a regular expression
  keep = true                     # these stay as they are
  [[rule]]                        # without `tensors`: all others
  method = "ria"                  # magnitude, wanda, ria or sparsegpt
  sparsity = 0.5                  # or pattern = "2:4"
  format = "Q8_0"                 # if another than by default
  dense = false                   # whether zeros are stored too"#;

/// The most memory for sums of products of inputs: larger models are read several times.
const PRODUCTS_BYTES: u64 = 2 << 30;

/// Arguments of `prune`.
#[derive(clap::Args)]
#[command(after_help = AFTER)]
#[command(mut_arg("ctx_size", |arg| arg.help("Tokens of a chunk [default: 512]")))]
pub(crate) struct Args {
    /// A path, or any name that `pull` and `list` know
    input: String,
    /// The file to write
    output: PathBuf,
    /// The share of weights that becomes zero
    #[arg(long, value_name = "SHARE", value_parser = fraction)]
    sparsity: Option<f64>,
    /// magnitude, wanda, ria or sparsegpt
    #[arg(long, default_value = "ria")]
    method: String,
    /// unstructured, or N:M: N of M are kept
    #[arg(long, default_value = "unstructured")]
    pattern: String,
    /// F16, Q8_0 or Q4_0 [default: about as many bits as the input]
    #[arg(long)]
    format: Option<String>,
    /// Store zeros too, so that other programs can read the file
    #[arg(long)]
    dense: bool,
    /// Do what this file says, tensor by tensor
    #[arg(long, value_name = "FILE",
          conflicts_with_all = ["sparsity", "method", "pattern", "format", "dense"])]
    surgery: Option<PathBuf>,
    /// Statistics of activations, as `imatrix` writes them
    #[arg(long, value_name = "FILE")]
    imatrix: Option<PathBuf>,
    /// Collect statistics while reading this text
    #[arg(long, value_name = "TEXT", conflicts_with = "imatrix")]
    calibrate: Option<PathBuf>,
    /// Stop calibrating after so many chunks
    #[arg(long, value_name = "N", default_value_t = 64)]
    chunks: usize,
    /// Measure perplexity and speed with this text
    #[arg(long, value_name = "TEXT")]
    evaluate: Option<PathBuf>,
    /// Stop measuring after so many chunks
    #[arg(long, value_name = "N", default_value_t = 16)]
    evaluate_chunks: usize,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    tokenizer: TokenizerArgs,
    #[command(flatten)]
    machine: Machine,
}

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
    check_knowledge(&jobs, surgery.imatrix.is_some(), text.is_some(), &FLAGS)?;
    let evaluated = report::windows(&args, &opened)?;
    let source = source(args.calibrate.as_ref().or(surgery.imatrix.as_ref()));
    let file = opened.file.clone();
    let start = Instant::now();
    let mut pruner = Pruner::new(&file, folder(&args.output))?;
    let imatrix = imatrix(&surgery, &opened)?;
    prune_all(&mut pruner, &jobs, &args.machine, &mut opened, imatrix, text.as_ref())?;
    write(pruner, &jobs, &source, &args.output)?;
    report::print(&args, &opened, &jobs, evaluated.as_ref(), start.elapsed())
}

/// Prunes all tensors, collecting what has to be known of them.
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

/// The rule that flags make.
fn rule(args: &Args) -> Result<Rule> {
    let structure: Structure = args.pattern.parse().context("--pattern")?;
    let method: Method = args.method.parse().context("--method")?;
    let format = args.format.as_deref().map(surgery::parse_format).transpose()?;
    let asked = args.sparsity.map(|share| share as f32);
    let sparsity = surgery::sparsity(structure, asked).context(match asked {
        Some(_) => "--sparsity",
        None => "--sparsity SHARE, --pattern N:M or --surgery FILE",
    })?;
    let cut = Cut { method, sparsity, structure, format, dense: args.dense };
    Ok(Rule { tensors: None, cut: Some(cut) })
}

/// What rules do to a model; `path` is the file that they are from.
fn plan(opened: &ModelFile, surgery: &Surgery, path: Option<&Path>) -> Result<Vec<Job>> {
    let jobs = prune::plan(&opened.file, &surgery.rules);
    let jobs = match path {
        Some(path) => jobs.with_context(|| path.display().to_string())?,
        None => jobs?,
    };
    ensure!(!jobs.is_empty(), "{}: no tensor that a rule would prune", opened.name);
    Ok(jobs)
}

/// How a method is told what it has to know: a text, and statistics.
const FLAGS: [&str; 2] = ["--calibrate TEXT", "--imatrix FILE, or --calibrate TEXT"];
/// The same of a model that is pruned when it is loaded.
const AT_LOAD: [&str; 2] =
    ["`prune --calibrate TEXT` reads one", "imatrix = FILE in the surgery file"];

/// Checks that there is what the methods have to know, or says how to give it.
fn check_knowledge(
    jobs: &[Job],
    has_imatrix: bool,
    has_text: bool,
    [text, statistics]: &[&str; 2],
) -> Result<()> {
    for job in jobs {
        match job.method {
            Method::Magnitude => (),
            Method::SparseGpt if !has_text => bail!("sparsegpt needs a text: {text}"),
            method if !has_imatrix && !has_text => bail!("{method} needs statistics: {statistics}"),
            _ => (),
        }
    }
    Ok(())
}

/// Reads the text for statistics.
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
        run.tell(window, text);
    }
    Ok(calibration)
}

/// The statistics that a surgery file or a flag names, as the model's weights need them.
fn imatrix(surgery: &Surgery, opened: &ModelFile) -> Result<Option<Imatrix>> {
    let Some(path) = &surgery.imatrix else { return Ok(None) };
    Ok(Some(Imatrix::open(path)?.fit(&opened.plan, path)?))
}

/// What is said of where statistics come from.
fn source(path: Option<&PathBuf>) -> String {
    path.map_or("none".to_owned(), |path| path.display().to_string())
}

/// Where a file lies.
fn folder(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

fn write(pruner: Pruner<'_>, jobs: &[Job], source: &str, path: &Path) -> Result<()> {
    let metadata = pruner.metadata(jobs, source);
    output::write(path, |out| {
        let failed = || format!("cannot write {}", path.display());
        pruner.write(jobs, &metadata, out).with_context(failed)
    })
}

/// Does what a surgery file says to a model that is about to run. The pruned file is written to the
/// system's folder for such files and has no name: it is gone when the model is.
pub(crate) fn at_load(opened: ModelFile, surgery: &Path, machine: &Machine) -> Result<ModelFile> {
    let path = surgery;
    let surgery = Surgery::open(path)?;
    let jobs = plan(&opened, &surgery, Some(path))?;
    check_knowledge(&jobs, surgery.imatrix.is_some(), false, &AT_LOAD)?;
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
