//! The sizes and losses of pruning in one table: the original model, the pruned one, the same
//! precision unpruned, and the dense type of about the same size.

use std::io::{BufWriter, Write};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use bodkin_compress::mixture::{FILE_TYPES, FileType};
use bodkin_compress::prune::Job;
use bodkin_compress::quantize::{self, Choice, Conversion, Options};
use bodkin_eval::{Base, BaseWriter, Divergence, Perplexity, Windows, compare, measure};
use serde_json::json;
use tempfile::TempDir;

use super::super::bench::generation_speed;
use super::super::chunks::{self, CHUNK_TOKENS, Run};
use super::arguments::Args;
use crate::arguments::{Machine, describe, find_decoder, threads};
use crate::output::{self, TemporaryFolder};
use crate::progress::reporter;
use bodkin::ModelFile;
use bodkin::memory::human_bytes;

/// The largest relative difference of sizes that count as about the same.
const ABOUT: f64 = 0.05;

/// One model of the table.
struct Row {
    what: String,
    bytes: u64,
    elements: u64,
    measured: Option<Measured>,
}

#[derive(Clone, Copy)]
struct Measured {
    perplexity: f64,
    /// KL divergence from the original model; none for the original.
    divergence: Option<f64>,
    tokens_per_second: f64,
}

impl Row {
    fn new(what: String, opened: &ModelFile) -> Row {
        let elements = opened.file.tensors().iter().map(|tensor| tensor.elements()).sum();
        Row { what, bytes: opened.file.bytes(), elements, measured: None }
    }

    fn bits(&self) -> f64 {
        self.bytes as f64 * 8.0 / self.elements as f64
    }
}

/// The evaluation text, if one is given.
pub(super) fn windows(args: &Args, before: &ModelFile) -> Result<Option<Windows>> {
    let Some(text) = &args.evaluate else { return Ok(None) };
    let chunks = args.evaluate_chunks;
    ensure!(chunks > 0, "--evaluate-chunks: expected at least 1 chunk, found 0");
    let tokenizer = args.tokenizer.open(&before.file)?;
    let size = args.machine.context()?.unwrap_or(CHUNK_TOKENS);
    let windows = chunks::windows(&tokenizer, text, size, Some(chunks));
    windows.context("--evaluate").map(Some)
}

/// Prints the table of a pruned file; `taken` is how long pruning took.
pub(super) fn print(
    args: &Args,
    before: &ModelFile,
    jobs: &[Job],
    windows: Option<&Windows>,
    taken: Duration,
) -> Result<()> {
    let pruned = ModelFile::open(&args.output, reporter())?;
    let mut rows = vec![
        Row::new(format!("before: {}", describe(before)), before),
        Row::new(pruned_name(jobs, &pruned), &pruned),
    ];
    let mut equal = None;
    if let Some(windows) = windows {
        let TemporaryFolder { folder, .. } =
            &output::temporary_folder(output::folder(&args.output))?;
        let scale = Scale { machine: &args.machine, windows, folder };
        rows[0].measured = Some(scale.base(&args.input)?);
        rows[1].measured = Some(scale.compare(pruned)?);
        let same = same_precision(before, jobs);
        let name = format!("the same, unpruned: {}", formats(jobs));
        rows.push(scale.row(name, before, &same)?);
        let (kind, choices) = same_size(before, rows[1].bytes)?;
        rows.push(scale.row(format!("dense: {}", kind.name), before, &choices)?);
        equal = Some(kind);
    }
    match args.json {
        true => print_json(&rows, equal, taken),
        false => print_table(&rows, equal, taken),
    }
}

fn pruned_name(jobs: &[Job], pruned: &ModelFile) -> String {
    let sparsity = pruned.file.metadata().f32("bodkin.prune.sparsity").ok().flatten();
    let share = 100.0 * sparsity.unwrap_or(0.0);
    let method = pruned.file.metadata().str("bodkin.prune.method").ok().flatten();
    format!("pruned: {} {share:.1} % {}", method.unwrap_or(""), formats(jobs))
}

/// The base formats of pruned tensors, without their sparse layout.
fn formats(jobs: &[Job]) -> String {
    let mut names: Vec<&str> =
        jobs.iter().map(|job| job.format.base().unwrap_or(job.format).name()).collect();
    names.sort_unstable();
    names.dedup();
    names.join(", ")
}

/// The original model, with pruned tensors in the base format of the result.
fn same_precision(before: &ModelFile, jobs: &[Job]) -> Vec<Choice> {
    let choice = |tensor: &bodkin_gguf::Tensor| {
        let job = jobs.iter().find(|job| job.tensor.name == tensor.name);
        let format = job.map_or(tensor.format, |job| job.format.base().unwrap_or(job.format));
        Choice { tensor: tensor.clone(), format, instead_of: None }
    };
    before.file.tensors().iter().map(choice).collect()
}

/// The file type whose size is closest to `bytes`.
fn same_size(before: &ModelFile, bytes: u64) -> Result<(FileType, Vec<Choice>)> {
    let of = |kind: &FileType| -> Result<(u64, FileType, Vec<Choice>)> {
        let options =
            Options { kind: Some(*kind), pure: false, overrides: Vec::new(), has_imatrix: false };
        let choices = quantize::choose(&*before.file, &options)?;
        let found: u64 = choices.iter().map(Choice::bytes).sum();
        Ok((found.abs_diff(bytes), *kind, choices))
    };
    let all = FILE_TYPES.iter().map(of).collect::<Result<Vec<_>>>()?;
    let nearest = all.into_iter().min_by_key(|(distance, ..)| *distance);
    let (_, kind, choices) = nearest.context("there are file types")?;
    Ok((kind, choices))
}

/// The inputs of every evaluation.
struct Scale<'a> {
    machine: &'a Machine,
    windows: &'a Windows,
    folder: &'a TempDir,
}

impl Scale<'_> {
    fn base_path(&self) -> std::path::PathBuf {
        self.folder.path().join("base.kld")
    }

    /// Evaluates the original model and stores its predictions.
    fn base(&self, model: &str) -> Result<Measured> {
        let mut opened = find_decoder(model)?;
        let file = std::fs::File::create(self.base_path()).context("cannot write predictions")?;
        let mut out = BufWriter::new(file);
        let vocabulary = opened.plan.output_width();
        let mut writer = BaseWriter::new(&mut out, self.windows, vocabulary)?;
        let mut run = Run::new(&mut opened, self.machine, self.windows.size())?;
        let mut perplexity = Perplexity::default();
        for window in 0..self.windows.count() {
            let (threads, windows) = (run.threads(), self.windows);
            let base = Some(&mut writer);
            measure(run.model.as_mut(), windows, window, threads, &mut perplexity, base)?;
        }
        writer.finish().context("cannot write predictions")?;
        drop(run);
        let tokens_per_second = generation_speed(&opened, self.machine)?;
        Ok(Measured { perplexity: perplexity.value(), divergence: None, tokens_per_second })
    }

    /// Evaluates a model against the original.
    fn compare(&self, mut opened: ModelFile) -> Result<Measured> {
        let mut base = Base::open(&self.base_path(), None)?;
        let windows = self.windows;
        let mut run = Run::new(&mut opened, self.machine, windows.size())?;
        let mut divergence = Divergence::default();
        for window in 0..windows.count() {
            let threads = run.threads();
            compare(run.model.as_mut(), windows, window, threads, &mut divergence, &mut base)?;
        }
        drop(run);
        Ok(Measured {
            perplexity: divergence.log_perplexity().value.exp(),
            divergence: Some(divergence.mean_divergence().value),
            tokens_per_second: generation_speed(&opened, self.machine)?,
        })
    }

    /// Quantizes the original model and evaluates it.
    fn row(&self, what: String, before: &ModelFile, choices: &[Choice]) -> Result<Row> {
        let path = self.folder.path().join("other.gguf");
        make(before, choices, threads(self.machine.threads)?, &path)?;
        let opened = ModelFile::open(&path, reporter())?;
        let mut row = Row::new(what, &opened);
        row.measured = Some(self.compare(opened)?);
        Ok(row)
    }
}

fn make(before: &ModelFile, choices: &[Choice], threads: usize, path: &Path) -> Result<()> {
    let metadata = quantize::metadata(&before.file, None);
    let mut out = BufWriter::new(std::fs::File::create(path).context("cannot make a file")?);
    // The model before was measured, and has no NaN.
    let conversion = Conversion { choices, importance: None, threads, allows_nan: true };
    conversion.write(&*before.file, &metadata, &|_| (), &mut out)?;
    Ok(out.flush()?)
}

fn print_table(rows: &[Row], equal: Option<FileType>, taken: Duration) -> Result<()> {
    let mut out = std::io::stdout().lock();
    let width = rows.iter().map(|row| row.what.chars().count()).max().unwrap_or(0);
    write!(out, "{:width$} {:>10} {:>6}", "", "size", "bits")?;
    match equal {
        Some(_) => writeln!(out, " {:>10} {:>9} {:>8}", "perplexity", "KL", "tok/s")?,
        None => writeln!(out)?,
    }
    for row in rows {
        write!(out, "{:width$} {:>10} {:>6.2}", row.what, human_bytes(row.bytes), row.bits())?;
        if let Some(measured) = row.measured {
            let divergence = measured.divergence.map_or("-".to_owned(), |d| format!("{d:.5}"));
            let (perplexity, speed) = (measured.perplexity, measured.tokens_per_second);
            write!(out, " {perplexity:>10.4} {divergence:>9} {speed:>8.1}")?;
        }
        writeln!(out)?;
    }
    match equal {
        Some(kind) => writeln!(out, "{}", verdict(rows, kind))?,
        None => writeln!(out, "--evaluate TEXT measures what that cost, and the speed.")?,
    }
    if rows[1].bytes >= rows[0].bytes {
        writeln!(out, "The pruned file is no smaller than the one before.")?;
    }
    writeln!(out, "Pruned in {:.1} s.", taken.as_secs_f64())?;
    Ok(())
}

/// Whether the dense type of about the same size is better, by perplexity and by KL divergence.
/// None if these disagree or are missing.
fn dense_is_better(rows: &[Row]) -> Option<bool> {
    let (pruned, dense) = (rows.get(1)?.measured?, rows.get(3)?.measured?);
    let predicts = dense.perplexity.partial_cmp(&pruned.perplexity)?;
    let is_near = dense.divergence?.partial_cmp(&pruned.divergence?)?;
    (predicts == is_near && predicts.is_ne()).then_some(predicts.is_lt())
}

fn verdict(rows: &[Row], equal: FileType) -> String {
    let more = rows[3].bytes as f64 / rows[1].bytes as f64 - 1.0;
    let size = match more.abs() > ABOUT {
        true => format!("nearest in size, {:+.0} %", 100.0 * more),
        false => "of about this size".to_owned(),
    };
    let name = format!("dense {} ({size})", equal.name);
    match dense_is_better(rows) {
        Some(true) => format!("The {name} is better, in perplexity and in KL."),
        Some(false) => format!("Better than the {name}, in perplexity and in KL."),
        None => format!("Neither this nor the {name} is better both in perplexity and in KL."),
    }
}

fn print_json(rows: &[Row], equal: Option<FileType>, taken: Duration) -> Result<()> {
    let values = rows.iter().map(|row| {
        let measured = row.measured;
        json!({
            "what": row.what,
            "bytes": row.bytes,
            "bits_per_weight": row.bits(),
            "perplexity": measured.map(|m| m.perplexity),
            "divergence": measured.and_then(|m| m.divergence),
            "tokens_per_second": measured.map(|m| m.tokens_per_second),
        })
    });
    let value = json!({
        "rows": values.collect::<Vec<_>>(),
        "dense_type_of_the_size": equal.map(|kind| kind.name),
        "dense_is_better": dense_is_better(rows),
        "seconds": taken.as_secs_f64(),
    });
    Ok(writeln!(std::io::stdout().lock(), "{value:#}")?)
}
