//! Embeddings as Arrow: streams, Parquet files, and a vector store over Flight.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::{Context, Result, ensure};

use bodkin_flight::BatchBuilder;
use bodkin_flight::file::{StreamFile, parquet_of, torn_stream};
use bodkin_flight::store::{Upload, UploadOptions};

use super::output::{Output, Target};
use super::rows::{Columns, Row};
use crate::interrupt::Interrupted;
use crate::store::StoreArgs;
use crate::text::count;

/// An Arrow stream, of which a Parquet file may be made at the end.
pub(super) struct ArrowFile {
    builder: BatchBuilder,
    /// None until the first batch, whose schema it needs.
    stream: Option<StreamFile<Box<dyn Write>>>,
    out: Option<Box<dyn Write>>,
    target: Target,
    /// The Parquet file to make.
    parquet: Option<PathBuf>,
    first: u64,
    /// The vector of the last row that was there before.
    last: Option<Vec<f32>>,
    rows: u64,
}

impl ArrowFile {
    pub(super) fn open(
        target: Target,
        resume: bool,
        dimension: usize,
        parquet: Option<&Path>,
    ) -> Result<ArrowFile> {
        let mut builder = BatchBuilder::new(dimension, false);
        let (mut stream, mut out, mut first, mut last) = (None, None, 0, None);
        if target.name() == "standard output" {
            ensure!(!resume, "--resume: expected --out FILE or --flight HOST");
            out = Some(Box::new(std::io::stdout()) as Box<dyn Write>);
        } else {
            let mut file: File = target.open(resume)?;
            let path = target.partial().unwrap_or(Path::new("")).to_owned();
            let torn = if resume { torn_stream(&mut file, &path)? } else { None };
            match torn {
                None => out = Some(Box::new(file) as Box<dyn Write>),
                Some(torn) => {
                    ensure!(
                        torn.dimension == dimension,
                        "{}: expected vectors of {dimension}, as the model gives, found {}",
                        path.display(),
                        torn.dimension
                    );
                    (first, last) = (torn.rows, torn.last);
                    let file = Box::new(file) as Box<dyn Write>;
                    stream = Some(StreamFile::go_on(file, &torn.schema)?);
                    builder = builder.with_schema(torn.schema);
                }
            }
        }
        let parquet = parquet.map(Path::to_owned);
        Ok(ArrowFile { builder, stream, out, target, parquet, first, last, rows: first })
    }
}

impl Output for ArrowFile {
    fn has(&mut self, number: u64, _row: &Row) -> Result<bool> {
        Ok(number < self.first)
    }

    fn resumed(&self) -> u64 {
        self.first
    }

    fn last(&self) -> Option<&[f32]> {
        self.last.as_deref()
    }

    fn push(&mut self, number: u64, row: &Row, _tokens: usize, vector: &[f32]) -> Result<()> {
        Ok(self.builder.push(arrow_row(number, row, vector))?)
    }

    fn flush(&mut self) -> Result<()> {
        if self.builder.rows() == 0 {
            return Ok(());
        }
        let batch = self.builder.finish()?;
        let failed = || self.target.failed();
        if let Some(out) = self.out.take() {
            self.stream = Some(StreamFile::begin(out, &batch.schema()).with_context(failed)?);
        }
        if let Some(stream) = &mut self.stream {
            stream.write(&batch).with_context(failed)?;
        }
        self.rows += batch.num_rows() as u64;
        Ok(())
    }

    fn finish(&mut self) -> Result<Option<String>> {
        self.flush()?;
        if let Some(stream) = self.stream.take() {
            stream.finish().with_context(|| self.target.failed())?;
        }
        match (&self.parquet, self.target.partial()) {
            (Some(parquet), Some(stream)) => {
                let failed = || format!("cannot write {}", parquet.display());
                crate::output::write(parquet, |out| parquet_of(stream, out).with_context(failed))?;
                std::fs::remove_file(stream).with_context(|| self.target.failed())?;
            }
            _ => self.target.complete()?,
        }
        Ok(None)
    }

    fn stop(&mut self) -> Option<String> {
        // The error that ended the run is the one to tell.
        let _ = self.flush();
        self.target.kept(self.first, self.rows)
    }
}

fn arrow_row<'a>(number: u64, row: &'a Row, vector: &'a [f32]) -> bodkin_flight::Row<'a> {
    bodkin_flight::Row { number, text: &row.text, columns: columns(row), vector }
}

fn columns(row: &Row) -> bodkin_flight::Columns<'_> {
    match &row.columns {
        Columns::None => bodkin_flight::Columns::None,
        Columns::Json(columns) => bodkin_flight::Columns::Json(columns),
        Columns::Stored(row) => bodkin_flight::Columns::Stored(row),
    }
}

/// An error of an upload. That the user ended it has a status of its own.
fn failed(error: bodkin_flight::Error) -> anyhow::Error {
    match error {
        bodkin_flight::Error::Interrupted => Interrupted.into(),
        error => error.into(),
    }
}

/// A vector store.
pub(super) struct StoreOutput {
    upload: Upload,
    dataset: String,
    /// A row came back changed: how many have landed says nothing any more.
    is_changed: bool,
}

impl StoreOutput {
    pub(super) fn open(
        args: &StoreArgs,
        resume: bool,
        dimension: usize,
        batch_rows: usize,
        stop: Arc<AtomicBool>,
    ) -> Result<StoreOutput> {
        let dataset = args.dataset()?.to_owned();
        let options = UploadOptions {
            address: args.address()?,
            dataset: dataset.clone(),
            resume,
            batch_rows: batch_rows.max(1),
            stop,
            note: Arc::new(|text| eprintln!("{text}")),
        };
        let upload = Upload::begin(options, dimension)?;
        Ok(StoreOutput { upload, dataset, is_changed: false })
    }
}

impl Output for StoreOutput {
    fn has(&mut self, number: u64, row: &Row) -> Result<bool> {
        Ok(self.upload.has(number, &row.text, columns(row))?)
    }

    fn resumed(&self) -> u64 {
        // The store says of each row whether it has it.
        0
    }

    fn last(&self) -> Option<&[f32]> {
        None
    }

    fn present(&self) -> Option<(&str, &str, &[f32])> {
        let (text, vector) = self.upload.last_present()?;
        Some((&self.dataset, text, vector))
    }

    fn push(&mut self, number: u64, row: &Row, _tokens: usize, vector: &[f32]) -> Result<()> {
        self.upload.push(arrow_row(number, row, vector)).map_err(failed)
    }

    fn flush(&mut self) -> Result<()> {
        Ok(())
    }

    fn finish(&mut self) -> Result<Option<String>> {
        let landed = self.upload.finish();
        self.is_changed = matches!(landed, Err(bodkin_flight::Error::Changed { .. }));
        let landed = landed.map_err(failed)?;
        let dataset = &self.dataset;
        let had = match landed.skipped {
            0 => String::new(),
            n => format!(", which had {n} others already"),
        };
        let rows = |n| count(n, "row");
        let index = match landed.indexed < landed.rows {
            true => format!("; its index has {} of {} so far", landed.indexed, landed.rows),
            false => String::new(),
        };
        Ok(Some(format!(
            "{} landed in `{dataset}`{had}; {} read back with the same bits{index}",
            rows(usize::try_from(landed.sent).unwrap_or(usize::MAX)),
            rows(landed.compared),
        )))
    }

    fn stop(&mut self) -> Option<String> {
        let stopped = self.upload.stop();
        if self.is_changed {
            return None;
        }
        let rows = |n| count(usize::try_from(n).unwrap_or(usize::MAX), "row");
        let dataset = &self.dataset;
        let landed = match stopped.landed {
            Some(landed) => format!("{} landed in `{dataset}`", rows(landed)),
            None => format!(
                "{} acknowledged by the store, which does not say how many landed in `{dataset}`",
                rows(stopped.acknowledged)
            ),
        };
        Some(format!("{landed}; --resume sends the others"))
    }
}
