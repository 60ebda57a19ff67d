//! Where embeddings go: lines of JSON, NumPy's format, or what [`super::arrow`] adds. A file is
//! written beside its name as `FILE.partial`, which can be gone on with, and renamed when complete.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, BufWriter, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use bodkin_gguf::quoted;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::rows::Row;
use crate::npy;
use crate::text::count;

/// Where embeddings go.
pub(super) trait Output {
    /// Whether an interrupted run has this row already.
    fn has(&mut self, number: u64, row: &Row) -> Result<bool>;

    /// How many rows from the first on an interrupted run has left.
    fn resumed(&self) -> u64;

    /// The vector of the last of those rows, if it is at hand.
    fn last(&self) -> Option<&[f32]>;

    /// Of a store that is resumed: the dataset, and the text and the vector of its last row.
    fn present(&self) -> Option<(&str, &str, &[f32])> {
        None
    }

    /// Takes the next row.
    fn push(&mut self, number: u64, row: &Row, tokens: usize, vector: &[f32]) -> Result<()>;

    /// A window of rows is complete.
    fn flush(&mut self) -> Result<()>;

    /// All rows are there. What to tell the user, if anything.
    fn finish(&mut self) -> Result<Option<String>>;

    /// The run ends early, maybe because `finish` failed. What has become of the rows, if it is
    /// worth telling.
    fn stop(&mut self) -> Option<String>;
}

/// A file that is being written, or standard output.
pub(super) struct Target {
    /// None for standard output.
    path: Option<PathBuf>,
    /// None where there is nothing to rename: standard output, pipes and devices.
    partial: Option<PathBuf>,
}

impl Target {
    pub(super) fn new(path: Option<&Path>, inputs: &[PathBuf]) -> Result<Target> {
        if let Some(path) = path {
            crate::output::check(path, inputs.iter().map(PathBuf::as_path))?;
        }
        let is_special = |path: &&Path| fs::metadata(path).is_ok_and(|found| !found.is_file());
        let partial = path.filter(|path| !is_special(path)).map(|path| {
            let mut name = path.as_os_str().to_owned();
            name.push(".partial");
            PathBuf::from(name)
        });
        Ok(Target { path: path.map(Path::to_owned), partial })
    }

    /// The name of what is written.
    pub(super) fn name(&self) -> String {
        let path = self.partial.as_ref().or(self.path.as_ref());
        path.map_or("standard output".to_owned(), |path| path.display().to_string())
    }

    pub(super) fn failed(&self) -> String {
        format!("cannot write {}", self.name())
    }

    #[cfg(feature = "flight")]
    pub(super) fn partial(&self) -> Option<&Path> {
        self.partial.as_deref()
    }

    /// The file to write, with what an interrupted run has left in it if `resume`.
    pub(super) fn open(&self, resume: bool) -> Result<File> {
        let path = self.partial.as_ref().or(self.path.as_ref());
        let path = path.context("this format needs --out FILE")?;
        let mut options = File::options();
        options.write(true);
        if let Some(partial) = &self.partial {
            ensure!(
                !resume || partial.exists(),
                "there is nothing to resume: {} does not exist",
                partial.display()
            );
            options.read(true).create(true).truncate(!resume);
        } else {
            ensure!(!resume, "--resume: {} is not a file", self.name());
        }
        options.open(path).with_context(|| self.failed())
    }

    /// Gives a complete file its name.
    pub(super) fn complete(&self) -> Result<()> {
        let (Some(partial), Some(path)) = (&self.partial, &self.path) else { return Ok(()) };
        fs::rename(partial, path).with_context(|| format!("cannot write {}", path.display()))
    }

    /// What to say of an incomplete file of `rows`, of which an earlier run wrote the `first`.
    pub(super) fn kept(&self, first: u64, rows: u64) -> Option<String> {
        let partial = self.partial.as_ref().filter(|_| rows > first)?;
        let rows = count(usize::try_from(rows).unwrap_or(usize::MAX), "row");
        Some(format!("{} has {rows}; --resume goes on from there", partial.display()))
    }
}

/// One object per line.
pub(super) struct JsonLines {
    out: BufWriter<Box<dyn Write>>,
    target: Target,
    /// Rows of the run before, and the vector of the last.
    first: u64,
    last: Option<Vec<f32>>,
    /// Rows that are in the file, and those that may be only in a buffer.
    rows: u64,
    buffered: u64,
}

/// One line: the columns of the caller, if there are any, then these.
#[derive(Serialize)]
struct Line<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<&'a str>,
    #[serde(flatten)]
    columns: Option<&'a Map<String, Value>>,
    embedding: &'a [f32],
    tokens: usize,
}

impl JsonLines {
    pub(super) fn open(target: Target, resume: bool, dimension: usize) -> Result<JsonLines> {
        let (mut first, mut last) = (0, None);
        let out: Box<dyn Write> = match target.path {
            None => {
                ensure!(!resume, "--resume: expected --out FILE or --flight HOST");
                Box::new(std::io::stdout())
            }
            Some(_) => {
                let mut file = target.open(resume)?;
                if resume {
                    (first, last) = whole_lines(&mut file, dimension, &target.name())?;
                }
                Box::new(file)
            }
        };
        let out = BufWriter::new(out);
        Ok(JsonLines { out, target, first, last, rows: first, buffered: 0 })
    }

    /// An error of standard output is printed as such.
    fn written(&self, result: std::io::Result<()>) -> Result<()> {
        match self.target.path {
            None => Ok(result?),
            Some(_) => result.with_context(|| self.target.failed()),
        }
    }
}

impl Output for JsonLines {
    fn has(&mut self, number: u64, _row: &Row) -> Result<bool> {
        Ok(number < self.first)
    }

    fn resumed(&self) -> u64 {
        self.first
    }

    fn last(&self) -> Option<&[f32]> {
        self.last.as_deref()
    }

    fn push(&mut self, number: u64, row: &Row, tokens: usize, vector: &[f32]) -> Result<()> {
        let columns = row.columns.to_json()?;
        let columns = columns.as_deref();
        if let Some(name) = ["text", "embedding", "tokens"]
            .iter()
            .find(|name| columns.is_some_and(|columns| columns.contains_key(**name)))
        {
            let row = number + 1;
            anyhow::bail!("row {row}: the column `{name}` is made here: rename the caller's");
        }
        let text = columns.map(|_| row.text.as_str());
        let line = Line { text, columns, embedding: vector, tokens };
        let line = serde_json::to_string(&line).context("cannot write an embedding as JSON")?;
        self.buffered += 1;
        let result = writeln!(self.out, "{line}");
        self.written(result)
    }

    fn flush(&mut self) -> Result<()> {
        let result = self.out.flush();
        self.written(result)?;
        self.rows += std::mem::take(&mut self.buffered);
        Ok(())
    }

    fn finish(&mut self) -> Result<Option<String>> {
        self.flush()?;
        self.target.complete()?;
        Ok(None)
    }

    fn stop(&mut self) -> Option<String> {
        // The error that ended the run is the one to tell.
        let _ = self.flush();
        self.target.kept(self.first, self.rows)
    }
}

/// What is checked of a line that an interrupted run has left.
#[derive(Deserialize)]
struct KeptLine {
    embedding: Vec<f32>,
}

/// Counts the whole lines of a file and cuts off the rest. Each must have an embedding of this
/// dimension, the last of which is returned.
fn whole_lines(file: &mut File, dimension: usize, name: &str) -> Result<(u64, Option<Vec<f32>>)> {
    let failed = || format!("cannot go on with {name}");
    let mut reader = BufReader::new(&mut *file);
    let (mut lines, mut end, mut last) = (0, 0, None);
    let mut line = Vec::new();
    loop {
        line.clear();
        let read = reader.read_until(b'\n', &mut line).with_context(failed)?;
        let is_whole = line.last() == Some(&b'\n');
        if line.is_empty() || !is_whole && line[0] == b'{' {
            break;
        }
        lines += 1;
        let kept: Option<KeptLine> = serde_json::from_slice(&line).ok().filter(|_| is_whole);
        let kept = kept.filter(|kept| kept.embedding.len() == dimension);
        ensure!(
            kept.is_some(),
            "{name}: expected a JSON object with an embedding of {dimension} numbers in line \
             {lines}; it is not of such a run"
        );
        last = kept.map(|kept| kept.embedding);
        end += read as u64;
    }
    file.set_len(end).with_context(failed)?;
    file.seek(SeekFrom::Start(end)).with_context(failed)?;
    Ok((lines, last))
}

/// A matrix of f32, `[rows, dimension]`.
pub(super) struct Npy {
    out: BufWriter<File>,
    target: Target,
    dimension: usize,
    first: u64,
    last: Option<Vec<f32>>,
    /// As those of [`JsonLines`].
    rows: u64,
    buffered: u64,
    /// The user knows which columns are left out.
    is_told: bool,
}

impl Npy {
    pub(super) fn open(target: Target, resume: bool, dimension: usize) -> Result<Npy> {
        ensure!(target.partial.is_some(), "--output npy: expected --out FILE");
        let mut file = target.open(resume)?;
        let failed = || target.failed();
        let row_bytes = (4 * dimension) as u64;
        let header = npy::HEADER_BYTES as u64;
        let length = file.metadata().with_context(failed)?.len();
        let first = match length >= header && row_bytes > 0 {
            true => (length - header) / row_bytes,
            false => 0,
        };
        // A header that is torn is the beginning of one.
        let mut found = vec![0; npy::HEADER_BYTES.min(length as usize)];
        file.read_exact(&mut found).with_context(failed)?;
        ensure!(
            // One that was complete, but could not be renamed, has its rows.
            [0, first as usize].iter().any(|&n| npy::header(n, dimension).starts_with(&found)),
            "{}: expected vectors of {dimension}, as the model gives",
            target.name()
        );
        let mut last = None;
        if first > 0 {
            let mut bytes = vec![0; row_bytes as usize];
            file.seek(SeekFrom::Start(header + (first - 1) * row_bytes)).with_context(failed)?;
            file.read_exact(&mut bytes).with_context(failed)?;
            let values = bytes.as_chunks::<4>().0.iter();
            last = Some(values.map(|value| f32::from_le_bytes(*value)).collect());
        }
        let set = |file: &mut File| {
            file.rewind()?;
            file.write_all(&npy::header(0, dimension))?;
            file.set_len(header + first * row_bytes)?;
            file.seek(SeekFrom::End(0))
        };
        set(&mut file).with_context(failed)?;
        let out = BufWriter::new(file);
        let is_told = false;
        Ok(Npy { out, target, dimension, first, last, rows: first, buffered: 0, is_told })
    }

    /// Names the columns that are not written, once.
    fn tell(&mut self, row: &Row) {
        if self.is_told {
            return;
        }
        let names: Vec<String> = row.columns.names().into_iter().map(quoted).collect();
        if !names.is_empty() {
            self.is_told = true;
            eprintln!(
                "--output npy has vectors alone: the text and {} are left out",
                count_named(&names)
            );
        }
    }
}

/// A few names, and how many more there are.
fn count_named(names: &[String]) -> String {
    const SHOWN_MAX: usize = 5;
    let shown = names[..names.len().min(SHOWN_MAX)].join(", ");
    match names.len().saturating_sub(SHOWN_MAX) {
        0 => shown,
        more => format!("{shown} and {}", count(more, "other column")),
    }
}

impl Output for Npy {
    fn has(&mut self, number: u64, _row: &Row) -> Result<bool> {
        Ok(number < self.first)
    }

    fn resumed(&self) -> u64 {
        self.first
    }

    fn last(&self) -> Option<&[f32]> {
        self.last.as_deref()
    }

    fn push(&mut self, _number: u64, row: &Row, _tokens: usize, vector: &[f32]) -> Result<()> {
        self.tell(row);
        self.buffered += 1;
        let written = vector.iter().try_for_each(|x| self.out.write_all(&x.to_le_bytes()));
        written.with_context(|| self.target.failed())
    }

    fn flush(&mut self) -> Result<()> {
        self.out.flush().with_context(|| self.target.failed())?;
        self.rows += std::mem::take(&mut self.buffered);
        Ok(())
    }

    fn finish(&mut self) -> Result<Option<String>> {
        self.flush()?;
        let rows = usize::try_from(self.rows).unwrap_or(usize::MAX);
        let header = npy::header(rows, self.dimension);
        let file = self.out.get_mut();
        let written = file.rewind().and_then(|()| file.write_all(&header));
        written.with_context(|| self.target.failed())?;
        self.target.complete()?;
        Ok(None)
    }

    fn stop(&mut self) -> Option<String> {
        // The error that ended the run is the one to tell.
        let _ = self.flush();
        self.target.kept(self.first, self.rows)
    }
}
