//! Arrow streams and Parquet files of rows. An Arrow stream may be torn anywhere: what came before
//! the tear is whole batches, after which it can go on. A Parquet file is nothing until its end is
//! written, so it is made of a complete Arrow stream.

use std::fs::File;
use std::io::{BufReader, Read, Seek, SeekFrom, Write};
use std::path::Path;

use arrow_array::RecordBatch;
use arrow_ipc::reader::StreamReader;
use arrow_ipc::writer::StreamWriter;
use arrow_json::LineDelimitedWriter;
use arrow_schema::SchemaRef;
use parquet::arrow::ArrowWriter;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use parquet::basic::{Compression, ZstdLevel};
use parquet::file::properties::WriterProperties;
use serde_json::{Map, Value};

use crate::batch::dimension_of;
use crate::error::{Error, Result};

/// The rows of a Parquet file that are decoded at a time.
const READ_ROWS: usize = 1024;

/// The most rows of a row group, which a writer keeps in memory.
const GROUP_ROWS: usize = 64 << 10;

fn failed<E: std::fmt::Display>(path: &Path) -> impl Fn(E) -> Error {
    move |error| Error::File { path: path.display().to_string(), reason: error.to_string() }
}

/// The rows of a Parquet file as JSON objects, in order.
///
/// # Errors
/// If it cannot be read or is no Parquet file; each row, if the file is damaged there.
pub fn read_parquet(
    path: &Path,
) -> Result<impl Iterator<Item = Result<Map<String, Value>>> + use<>> {
    let file = File::open(path).map_err(failed(path))?;
    let wrong = |reason: &dyn std::fmt::Display| Error::File {
        path: path.display().to_string(),
        reason: format!("no complete Parquet file: {reason}"),
    };
    let reader = ParquetRecordBatchReaderBuilder::try_new(file).map_err(|error| wrong(&error))?;
    let reader = reader.with_batch_size(READ_ROWS).build().map_err(|error| wrong(&error))?;
    let path = path.to_owned();
    Ok(reader.flat_map(move |batch| {
        let rows = batch.map_err(failed(&path)).and_then(|batch| objects(&batch));
        let (rows, error) = match rows {
            Ok(rows) => (rows, None),
            Err(error) => (Vec::new(), Some(Err(error))),
        };
        rows.into_iter().map(Ok).chain(error)
    }))
}

/// The rows of a batch as JSON objects; null values are absent.
///
/// # Errors
/// If a column has no form in JSON.
pub fn objects(batch: &RecordBatch) -> Result<Vec<Map<String, Value>>> {
    let mut writer = LineDelimitedWriter::new(Vec::new());
    writer.write(batch)?;
    writer.finish()?;
    let text = writer.into_inner();
    let rows = serde_json::Deserializer::from_slice(&text).into_iter();
    let rows: std::result::Result<Vec<_>, _> = rows.collect();
    rows.map_err(|error| Error::Arrow(arrow_schema::ArrowError::JsonError(error.to_string())))
}

/// Writes an Arrow stream batch by batch.
pub struct StreamFile<W: Write> {
    /// Encodes into memory, so that a stream can go on without a second schema.
    writer: StreamWriter<Vec<u8>>,
    out: W,
}

impl<W: Write> StreamFile<W> {
    /// Begins a stream.
    ///
    /// # Errors
    /// Those of the system.
    pub fn begin(out: W, schema: &SchemaRef) -> Result<StreamFile<W>> {
        let mut stream = StreamFile { writer: StreamWriter::try_new(Vec::new(), schema)?, out };
        stream.pass_on()?;
        Ok(stream)
    }

    /// Goes on with a stream at its last whole batch, where `out` stands.
    ///
    /// # Errors
    /// If the schema cannot be encoded.
    pub fn go_on(out: W, schema: &SchemaRef) -> Result<StreamFile<W>> {
        let mut stream = StreamFile { writer: StreamWriter::try_new(Vec::new(), schema)?, out };
        stream.writer.get_mut().clear();
        Ok(stream)
    }

    /// Writes a batch.
    ///
    /// # Errors
    /// Those of the system, and if the batch has another schema.
    pub fn write(&mut self, batch: &RecordBatch) -> Result<()> {
        self.writer.write(batch)?;
        self.pass_on()
    }

    /// Ends the stream.
    ///
    /// # Errors
    /// Those of the system.
    pub fn finish(mut self) -> Result<W> {
        self.writer.finish()?;
        self.pass_on()?;
        Ok(self.out)
    }

    fn pass_on(&mut self) -> Result<()> {
        let bytes = self.writer.get_mut();
        let written = self.out.write_all(bytes).and_then(|()| self.out.flush());
        bytes.clear();
        written.map_err(|error| Error::Arrow(error.into()))
    }
}

/// The beginning of a stream that was not finished.
pub struct Torn {
    /// The schema of its batches.
    pub schema: SchemaRef,
    /// The length of its vectors.
    pub dimension: usize,
    /// Rows of its whole batches.
    pub rows: u64,
}

/// Reads the beginning of a stream and leaves `file` where its last whole batch ends. None if not
/// even the schema is there.
///
/// # Errors
/// Those of the system, and if the file is no such stream.
pub fn torn_stream(file: &mut File, path: &Path) -> Result<Option<Torn>> {
    if file.metadata().map_err(failed(path))?.len() == 0 {
        return Ok(None);
    }
    file.rewind().map_err(failed(path))?;
    let counted = Counted { reader: BufReader::new(&mut *file), bytes: 0 };
    let Ok(mut reader) = StreamReader::try_new(counted, None) else { return Ok(None) };
    let schema = reader.schema();
    let mut end = reader.get_ref().bytes;
    let mut rows = 0;
    while let Some(Ok(batch)) = reader.next() {
        rows += batch.num_rows() as u64;
        end = reader.get_ref().bytes;
    }
    let Some(dimension) = dimension_of(&schema) else {
        return Err(failed(path)("expected an Arrow stream with the column `vector`"));
    };
    file.set_len(end).and_then(|()| file.seek(SeekFrom::Start(end))).map_err(failed(path))?;
    Ok(Some(Torn { schema, dimension, rows }))
}

/// Counts the bytes that are read.
struct Counted<R> {
    reader: R,
    bytes: u64,
}

impl<R: Read> Read for Counted<R> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let read = self.reader.read(buffer)?;
        self.bytes += read as u64;
        Ok(read)
    }
}

/// Writes the batches of a complete Arrow stream as a Parquet file.
///
/// # Errors
/// Those of the system, and if the stream is damaged.
pub fn parquet_of(stream: &Path, out: impl Write + Send) -> Result<()> {
    let file = File::open(stream).map_err(failed(stream))?;
    let reader = StreamReader::try_new(BufReader::new(file), None)?;
    let properties = WriterProperties::builder()
        .set_compression(Compression::ZSTD(ZstdLevel::default()))
        .set_max_row_group_row_count(Some(GROUP_ROWS))
        .build();
    let writer = ArrowWriter::try_new(out, reader.schema(), Some(properties));
    let as_arrow = |error: parquet::errors::ParquetError| Error::Arrow(error.into());
    let mut writer = writer.map_err(as_arrow)?;
    for batch in reader {
        writer.write(&batch?).map_err(as_arrow)?;
    }
    writer.close().map_err(as_arrow)?;
    Ok(())
}
