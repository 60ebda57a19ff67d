//! The rows of Parquet files.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow_array::RecordBatch;
use arrow_schema::Schema;
use parquet::arrow::arrow_reader::{ParquetRecordBatchReader, ParquetRecordBatchReaderBuilder};
use parquet::file::metadata::{ColumnChunkMetaData, ParquetMetaData};
use serde_json::Value;

use crate::columns::{StoredBatch, StoredRow, holds_text, objects};
use crate::error::{Error, Result};
use crate::file::failed;

/// The rows that are decoded at a time, and their bytes, nearly.
const READ_ROWS: usize = 1024;
const READ_BYTES: u64 = 16_000_000;

/// The longest text, in bytes: that of lines of text files.
const TEXT_BYTES: usize = 16_000_000;

/// The rows of a Parquet file, in order: texts of the column `column`, and the other columns.
///
/// # Errors
/// If it cannot be read, is no Parquet file, or has no such texts; each row, if the file is damaged
/// there, or the row has no text.
pub fn read_parquet(
    path: &Path,
    column: &str,
) -> Result<impl Iterator<Item = Result<(String, StoredRow)>> + use<>> {
    let file = File::open(path).map_err(failed(path))?;
    let wrong = |reason: &dyn std::fmt::Display| Error::File {
        path: path.display().to_string(),
        reason: format!("no complete Parquet file: {reason}"),
    };
    let builder = ParquetRecordBatchReaderBuilder::try_new(file).map_err(|error| wrong(&error))?;
    check_schema(builder.schema(), column).map_err(failed(path))?;
    let rows = rows_to_read(builder.metadata(), column).map_err(failed(path))?;
    let reader = builder.with_batch_size(rows).build().map_err(|error| wrong(&error))?;
    Ok(Rows {
        reader,
        path: path.to_owned(),
        column: column.to_owned(),
        rows_before: 0,
        batch: Vec::new().into_iter(),
    })
}

struct Rows {
    reader: ParquetRecordBatchReader,
    path: PathBuf,
    /// With the text.
    column: String,
    /// Rows of the batches before.
    rows_before: usize,
    batch: std::vec::IntoIter<Result<(String, StoredRow)>>,
}

impl Iterator for Rows {
    type Item = Result<(String, StoredRow)>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            if let Some(row) = self.batch.next() {
                return Some(row);
            }
            let batch = self.reader.next()?.map_err(failed(&self.path));
            match batch.and_then(|batch| self.rows_of(&batch)) {
                Ok(rows) => self.batch = rows.into_iter(),
                Err(error) => return Some(Err(error)),
            }
        }
    }
}

impl Rows {
    fn rows_of(&mut self, batch: &RecordBatch) -> Result<Vec<Result<(String, StoredRow)>>> {
        let texts = values(batch, &self.column)?.unwrap_or_default();
        let ids = if self.column == "id" { None } else { values(batch, "id")? };
        let schema = batch.schema();
        let others = schema.fields().iter().enumerate();
        let others = others.filter(|(_, field)| *field.name() != self.column);
        let others: Vec<usize> = others.map(|(i, _)| i).collect();
        let stored = Arc::new(StoredBatch { columns: batch.project(&others)?, ids });
        let first = self.rows_before;
        self.rows_before += batch.num_rows();
        let row = |(row, text): (usize, Value)| {
            let reason = match text {
                Value::String(text) if text.is_empty() => "the text is empty".to_owned(),
                Value::String(text) if text.len() > TEXT_BYTES => {
                    format!("expected a text of at most {TEXT_BYTES} bytes, found {}", text.len())
                }
                Value::String(text) => {
                    return Ok((text, StoredRow { batch: Arc::clone(&stored), row }));
                }
                other => format!("`{}`: expected a string, found {other}", self.column),
            };
            Err(failed(&self.path)(format!("row {}: {reason}", first + row + 1)))
        };
        Ok(texts.into_iter().enumerate().map(row).collect())
    }
}

/// The values of a column in JSON. None if there is no such column.
fn values(batch: &RecordBatch, name: &str) -> Result<Option<Vec<Value>>> {
    let Ok(index) = batch.schema().index_of(name) else { return Ok(None) };
    let rows = objects(&batch.project(&[index])?)?.into_iter();
    Ok(Some(rows.map(|mut row| row.shift_remove(name).unwrap_or_default()).collect()))
}

/// Whether the file has the texts, and no two columns of one name.
fn check_schema(schema: &Schema, column: &str) -> Result<(), String> {
    let names: Vec<&str> = schema.fields().iter().map(|field| field.name().as_str()).collect();
    if let Some(i) = (0..names.len()).find(|&i| names[..i].contains(&names[i])) {
        return Err(format!("two columns `{}`", names[i]));
    }
    let Ok(field) = schema.field_with_name(column) else {
        return Err(format!(
            "expected a column `{column}` (--column names another), found {names:?}"
        ));
    };
    match field.data_type() {
        kind if holds_text(kind) => Ok(()),
        kind => Err(format!("`{column}`: expected strings, found {kind}")),
    }
}

/// How many rows to decode at a time, so that they take bounded memory.
fn rows_to_read(metadata: &ParquetMetaData, column: &str) -> Result<usize, String> {
    let bytes = |chunk: &ColumnChunkMetaData| {
        // Values that repeat are once in the file, and often in memory.
        let unpacked = chunk.unencoded_byte_array_data_bytes().unwrap_or(0);
        u64::try_from(chunk.uncompressed_size().max(unpacked)).unwrap_or(0)
    };
    let mut most = 0;
    for (number, group) in metadata.row_groups().iter().enumerate() {
        let rows = u64::try_from(group.num_rows()).unwrap_or(0).max(1);
        let named = |name: &str| {
            let mut chunks = group.columns().iter();
            let name = name.to_owned();
            chunks.find(move |chunk| chunk.column_path().parts() == [name.clone()])
        };
        let of_texts = named(column).map_or(0, bytes) / rows;
        if of_texts > TEXT_BYTES as u64 {
            return Err(format!(
                "row group {}: expected texts of at most {TEXT_BYTES} bytes, found {of_texts} on \
                 average",
                number + 1
            ));
        }
        // What can be known before the first row is embedded is said then.
        let statistics =
            named("id").filter(|_| column != "id").and_then(|chunk| chunk.statistics());
        if let Some(nulls) = statistics.and_then(|it| it.null_count_opt()).filter(|n| *n > 0) {
            return Err(format!("`id`: expected a value in every row, found {nulls} without one"));
        }
        most = most.max(group.columns().iter().map(bytes).fold(0, u64::saturating_add) / rows);
    }
    Ok(usize::try_from(READ_BYTES / most.max(1)).unwrap_or(READ_ROWS).clamp(1, READ_ROWS))
}
