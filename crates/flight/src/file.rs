//! Arrow streams and Parquet files that are written. An Arrow stream may be torn anywhere: what
//! came before the tear is whole batches, after which it can go on. A Parquet file is nothing until
//! its end is written, so it is made of a complete Arrow stream.

use std::fs::File;
use std::io::{BufReader, Read, Seek, SeekFrom, Write};
use std::path::Path;

use arrow_array::RecordBatch;
use arrow_ipc::reader::StreamReader;
use arrow_ipc::writer::StreamWriter;
use arrow_schema::SchemaRef;
use parquet::arrow::ArrowWriter;
use parquet::basic::{Compression, ZstdLevel};
use parquet::errors::ParquetError;
use parquet::file::properties::WriterProperties;

use crate::batch::{dimension_of, vector_at};
use crate::error::{Error, Result};

/// The most rows of a row group, which a writer keeps in memory.
const GROUP_ROWS: usize = 64 << 10;

pub(crate) fn failed<E: std::fmt::Display>(path: &Path) -> impl Fn(E) -> Error {
    move |error| Error::File { path: path.display().to_string(), reason: error.to_string() }
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
    /// The vector of the last of them.
    pub last: Option<Vec<f32>>,
}

/// Reads the beginning of a stream and leaves `file` where its last whole batch ends. None if not
/// even the schema is whole; the file is then empty.
///
/// # Errors
/// Those of the system, and if the file is no such stream.
pub fn torn_stream(file: &mut File, path: &Path) -> Result<Option<Torn>> {
    file.rewind().map_err(failed(path))?;
    let counted = Counted { reader: BufReader::new(&mut *file), bytes: 0 };
    let Ok(mut reader) = StreamReader::try_new(counted, None) else {
        if !is_torn_schema(file).map_err(failed(path))? {
            return Err(failed(path)("expected an Arrow stream, found another kind of file"));
        }
        file.set_len(0).and_then(|()| file.rewind()).map_err(failed(path))?;
        return Ok(None);
    };
    let schema = reader.schema();
    let mut end = reader.get_ref().bytes;
    let (mut rows, mut last) = (0, None);
    while let Some(Ok(batch)) = reader.next() {
        rows += batch.num_rows() as u64;
        last = batch.num_rows().checked_sub(1).and_then(|row| vector_at(&batch, row)).or(last);
        end = reader.get_ref().bytes;
    }
    let Some(dimension) = dimension_of(&schema) else {
        return Err(failed(path)("expected an Arrow stream with the column `vector`"));
    };
    file.set_len(end).and_then(|()| file.seek(SeekFrom::Start(end))).map_err(failed(path))?;
    Ok(Some(Torn { schema, dimension, rows, last }))
}

/// Whether a file is the beginning of a stream whose schema is not whole. A stream begins with a
/// mark of four bytes and the length of the schema's message.
fn is_torn_schema(file: &mut File) -> std::io::Result<bool> {
    const MARK: [u8; 4] = [0xff; 4];
    file.rewind()?;
    let mut start = Vec::new();
    (&mut *file).take(8).read_to_end(&mut start)?;
    let Some((mark, length)) = start.split_first_chunk::<4>() else {
        return Ok(MARK.starts_with(&start));
    };
    let Ok(length) = <[u8; 4]>::try_from(length) else { return Ok(*mark == MARK) };
    let end = u64::from(u32::from_le_bytes(length)) + start.len() as u64;
    Ok(*mark == MARK && end > file.metadata()?.len())
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
    let mut writer = writer.map_err(of_parquet)?;
    for batch in reader {
        writer.write(&batch?).map_err(of_parquet)?;
    }
    writer.close().map_err(of_parquet)?;
    Ok(())
}

/// An error of the system stays one.
fn of_parquet(error: ParquetError) -> Error {
    match error {
        ParquetError::External(cause) => match cause.downcast::<std::io::Error>() {
            Ok(error) => Error::Arrow((*error).into()),
            Err(cause) => Error::Arrow(ParquetError::External(cause).into()),
        },
        error => Error::Arrow(error.into()),
    }
}
