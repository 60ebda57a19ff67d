//! The rows that `embed` reads, one at a time: a text and the other columns of its line.

use std::borrow::Cow;
use std::cell::Cell;
use std::collections::{HashSet, VecDeque};
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::rc::Rc;

use anyhow::{Context, Result, bail, ensure};
use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde_json::{Map, Value};

use crate::text;

/// The longest line, in bytes.
const LINE_BYTES: u64 = 16_000_000;
/// The longest line of JSON. Its values take up to a hundred times as much.
const JSON_LINE_BYTES: usize = 4_000_000;
/// The most columns of a CSV file.
const COLUMNS_MAX: usize = 10_000;
/// The most commas of a row of a CSV file: those of long texts and of all columns.
const COMMAS_MAX: usize = 1_000_000;

/// A text to embed.
pub(super) struct Row {
    pub(super) text: String,
    pub(super) columns: Columns,
}

/// The columns of a row besides its text.
pub(super) enum Columns {
    /// The source has none.
    None,
    Json(Map<String, Value>),
    /// Those of a Parquet file, with their types.
    #[cfg(feature = "flight")]
    Stored(bodkin_flight::StoredRow),
}

impl Columns {
    /// The columns as a JSON object; None if the source has none.
    pub(super) fn to_json(&self) -> Result<Option<Cow<'_, Map<String, Value>>>> {
        Ok(match self {
            Columns::None => None,
            Columns::Json(columns) => Some(Cow::Borrowed(columns)),
            #[cfg(feature = "flight")]
            Columns::Stored(row) => Some(Cow::Owned(row.to_json()?)),
        })
    }

    pub(super) fn names(&self) -> Vec<&str> {
        match self {
            Columns::None => Vec::new(),
            Columns::Json(columns) => columns.keys().map(String::as_str).collect(),
            #[cfg(feature = "flight")]
            Columns::Stored(row) => row.names(),
        }
    }
}

impl Row {
    fn plain(text: String) -> Row {
        Row { text, columns: Columns::None }
    }

    /// Bytes of memory that it takes, nearly.
    pub(super) fn bytes(&self) -> usize {
        // A value and a place in the map, both of which have room for more.
        const ENTRY: usize = 128;
        let column = |(name, value): (&String, &Value)| {
            let nested = value.is_array() || value.is_object();
            let value = match value {
                Value::String(text) => text.len(),
                // As long as the text of it would be, and several times that in memory.
                other if nested => 16 * other.to_string().len(),
                _ => 0,
            };
            ENTRY + name.len() + value
        };
        let columns = match &self.columns {
            Columns::None => 0,
            Columns::Json(columns) => columns.iter().map(column).sum(),
            #[cfg(feature = "flight")]
            Columns::Stored(row) => row.bytes(),
        };
        self.text.len() + columns
    }
}

/// How a file holds rows.
#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Format {
    // One text per line.
    Txt,
    // One JSON object per line.
    Jsonl,
    // A line of names, then one row per line.
    Csv,
    Parquet,
}

impl Format {
    /// What the name of a file says.
    fn of(path: &Path) -> Format {
        let extension = path.extension().unwrap_or_default().to_ascii_lowercase();
        match extension.to_str() {
            Some("jsonl" | "ndjson") => Format::Jsonl,
            Some("csv") => Format::Csv,
            Some("parquet") => Format::Parquet,
            _ => Format::Txt,
        }
    }
}

/// Which rows to read.
pub(super) struct Sources {
    /// Texts of the command line, which come first.
    pub(super) texts: Vec<String>,
    pub(super) files: Vec<PathBuf>,
    /// Each file is one text.
    pub(super) whole: bool,
    /// How files hold rows, if their names do not tell.
    pub(super) format: Option<Format>,
    /// The column with the text.
    pub(super) column: String,
}

type RowIterator = Box<dyn Iterator<Item = Result<Row>>>;

/// All rows, in order; files are opened when their turn comes.
pub(super) struct Rows {
    files: VecDeque<PathBuf>,
    whole: bool,
    format: Option<Format>,
    column: String,
    current: RowIterator,
    /// Lines of text that held none.
    blank_lines: Rc<Cell<usize>>,
}

impl Rows {
    pub(super) fn new(sources: Sources) -> Result<Rows> {
        let Sources { texts, files, whole, format, column } = sources;
        for path in files.iter().filter(|path| path.as_path() != Path::new("-")) {
            File::open(path).with_context(|| cannot(path))?;
        }
        let plain = texts.into_iter().enumerate().map(|(i, text)| {
            ensure!(!text.is_empty(), "text {} of the command line is empty", i + 1);
            Ok(Row::plain(text))
        });
        let (files, blank_lines) = (files.into(), Rc::default());
        Ok(Rows { files, whole, format, column, current: Box::new(plain), blank_lines })
    }

    /// Lines of text so far that held none, and gave no row.
    pub(super) fn blank_lines(&self) -> usize {
        self.blank_lines.get()
    }

    fn open(&self, path: &Path) -> Result<RowIterator> {
        if self.whole {
            let text = text::read_trimmed(path, "the text")?;
            ensure!(!text.is_empty(), "the text from {} is empty", name(path));
            return Ok(Box::new(std::iter::once(Ok(Row::plain(text)))));
        }
        let format = self.format.unwrap_or_else(|| Format::of(path));
        if format == Format::Parquet {
            return parquet(path, &self.column);
        }
        let reader: Box<dyn Read> = match path == Path::new("-") {
            true => Box::new(std::io::stdin()),
            false => Box::new(File::open(path).with_context(|| cannot(path))?),
        };
        let name = name(path);
        match format {
            Format::Csv => csv(reader, name, self.column.clone()),
            Format::Jsonl => {
                let column = self.column.clone();
                // A blank line holds no row.
                let is_row = |line: &Result<(String, String)>| {
                    line.as_ref().map_or(true, |(_, line)| !line.trim_ascii().is_empty())
                };
                Ok(Box::new(Lines::new(reader, name).filter(is_row).map(move |line| {
                    let (place, line) = line?;
                    ensure!(
                        line.len() <= JSON_LINE_BYTES,
                        "{place}: expected at most {JSON_LINE_BYTES} bytes, found {}",
                        line.len()
                    );
                    json_row(&line, &column).with_context(|| place)
                })))
            }
            _ => {
                let blank_lines = Rc::clone(&self.blank_lines);
                Ok(Box::new(Lines::new(reader, name).filter_map(move |line| match line {
                    Ok((_, text)) if text.trim_ascii().is_empty() => {
                        blank_lines.set(blank_lines.get() + 1);
                        None
                    }
                    line => Some(line.map(|(_, text)| Row::plain(text))),
                })))
            }
        }
    }
}

impl Iterator for Rows {
    type Item = Result<Row>;

    fn next(&mut self) -> Option<Result<Row>> {
        loop {
            if let Some(row) = self.current.next() {
                return Some(row);
            }
            let path = self.files.pop_front()?;
            match self.open(&path) {
                Ok(rows) => self.current = rows,
                Err(error) => return Some(Err(error)),
            }
        }
    }
}

fn cannot(path: &Path) -> String {
    format!("cannot read the text from {}", path.display())
}

fn name(path: &Path) -> String {
    match path == Path::new("-") {
        true => "standard input".to_owned(),
        false => path.display().to_string(),
    }
}

/// Lines of bounded length, each with its place: `FILE:LINE`.
struct Lines {
    reader: BufReader<Box<dyn Read>>,
    name: String,
    number: usize,
}

impl Lines {
    fn new(reader: Box<dyn Read>, name: String) -> Lines {
        Lines { reader: BufReader::with_capacity(1 << 16, reader), name, number: 0 }
    }

    fn read(&mut self) -> Result<Option<(String, String)>> {
        self.number += 1;
        let place = format!("{}:{}", self.name, self.number);
        let mut line = Vec::new();
        let read = (&mut self.reader).take(LINE_BYTES + 1).read_until(b'\n', &mut line);
        if read.with_context(|| place.clone())? == 0 {
            return Ok(None);
        }
        ensure!(
            line.len() as u64 <= LINE_BYTES,
            "{place}: expected at most {LINE_BYTES} bytes, found more"
        );
        let mut line = String::from_utf8(line)
            .map_err(|_| anyhow::anyhow!("{place}: stream did not contain valid UTF-8"))?;
        line.truncate(line.trim_end_matches(['\r', '\n']).len());
        // Some editors begin a file with this mark, which is no part of its text.
        if self.number == 1 && line.starts_with('\u{feff}') {
            line.remove(0);
        }
        Ok(Some((place, line)))
    }
}

impl Iterator for Lines {
    type Item = Result<(String, String)>;

    fn next(&mut self) -> Option<Self::Item> {
        self.read().transpose()
    }
}

/// The row of a JSON object.
fn json_row(line: &str, column: &str) -> Result<Row> {
    match serde_json::from_str(line) {
        Ok(Object::Columns(columns)) => record(columns, column),
        Ok(Object::Twice(name)) => bail!("two columns `{name}`"),
        Err(error) => match serde_json::from_str::<Value>(line) {
            Ok(other) => bail!("expected a JSON object, found {other}"),
            Err(_) => Err(error).context("expected a JSON object"),
        },
    }
}

/// A JSON object, in which a key may not come twice.
enum Object {
    Columns(Map<String, Value>),
    Twice(String),
}

impl<'de> Deserialize<'de> for Object {
    fn deserialize<D: Deserializer<'de>>(input: D) -> Result<Object, D::Error> {
        input.deserialize_map(ObjectVisitor)
    }
}

struct ObjectVisitor;

impl<'de> Visitor<'de> for ObjectVisitor {
    type Value = Object;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a JSON object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Object, A::Error> {
        let (mut columns, mut twice) = (Map::new(), None);
        while let Some((name, value)) = entries.next_entry::<String, Value>()? {
            if columns.insert(name.clone(), value).is_some() {
                twice.get_or_insert(name);
            }
        }
        Ok(twice.map_or(Object::Columns(columns), Object::Twice))
    }
}

/// Takes the text out of the columns of a row.
fn record(mut columns: Map<String, Value>, column: &str) -> Result<Row> {
    match columns.shift_remove(column) {
        Some(Value::String(text)) => {
            ensure!(!text.is_empty(), "the text is empty");
            Ok(Row { text, columns: Columns::Json(columns) })
        }
        Some(other) => bail!("`{column}`: expected a string, found {other}"),
        None => {
            let found: Vec<&str> = columns.keys().map(String::as_str).collect();
            bail!("expected a column `{column}` (--column names another), found {found:?}")
        }
    }
}

/// A CSV file, read until a row is too long, or has too many commas: the parser would read such a
/// row into memory.
struct BoundedRows {
    reader: Box<dyn Read>,
    /// Of the row so far.
    bytes: u64,
    commas: usize,
    place: CsvPlace,
}

/// Where a CSV parser is in a row. Line ends between quotes do not end it, and a quote inside of a
/// field is text.
enum CsvPlace {
    FieldStart,
    Unquoted,
    Quoted,
    /// After a quote in a quoted field: its end, or half of a quote in the text.
    Quote,
}

impl BoundedRows {
    fn new(reader: Box<dyn Read>) -> BoundedRows {
        BoundedRows { reader, bytes: 0, commas: 0, place: CsvPlace::FieldStart }
    }

    fn advance(&mut self, byte: u8) {
        self.bytes += 1;
        self.commas += usize::from(byte == b',');
        self.place = match (&self.place, byte) {
            (CsvPlace::Quoted, b'"') => CsvPlace::Quote,
            (CsvPlace::Quoted, _) => CsvPlace::Quoted,
            (CsvPlace::Quote | CsvPlace::FieldStart, b'"') => CsvPlace::Quoted,
            (_, b'\n' | b'\r') => {
                (self.bytes, self.commas) = (0, 0);
                CsvPlace::FieldStart
            }
            (_, b',') => CsvPlace::FieldStart,
            _ => CsvPlace::Unquoted,
        };
    }
}

impl Read for BoundedRows {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let count = self.reader.read(buffer)?;
        for &byte in &buffer[..count] {
            self.advance(byte);
            if self.bytes > LINE_BYTES || self.commas > COMMAS_MAX {
                let expected = format!("rows of at most {LINE_BYTES} bytes, {COMMAS_MAX} commas");
                return Err(std::io::Error::other(format!("expected {expected}, found more")));
            }
        }
        Ok(count)
    }
}

fn csv(reader: Box<dyn Read>, name: String, column: String) -> Result<RowIterator> {
    let mut reader = csv::Reader::from_reader(BoundedRows::new(reader));
    let names = reader.headers().with_context(|| name.clone())?.clone();
    let found = names.len();
    ensure!(found <= COLUMNS_MAX, "{name}: expected at most {COLUMNS_MAX} columns, found {found}");
    ensure!(
        names.iter().any(|name| name == column),
        "{name}: expected a column `{column}` (--column names another), found {:?}",
        names.iter().collect::<Vec<_>>()
    );
    let mut seen = HashSet::new();
    if let Some(twice) = names.iter().find(|name| !seen.insert(*name)) {
        bail!("{name}: two columns `{twice}`");
    }
    // Ids are integers if the first is: a store can search for those alone.
    let mut are_integers = None;
    Ok(Box::new(reader.into_records().map(move |fields| {
        let fields = fields.with_context(|| name.clone())?;
        let line = fields.position().map_or(0, csv::Position::line);
        let values = fields.iter().map(|value| Value::String(value.to_owned()));
        let mut columns: Map<String, Value> = names.iter().map(str::to_owned).zip(values).collect();
        if let Some(id) = columns.get_mut("id").filter(|_| column != "id") {
            let integer = id.as_str().and_then(canonical_integer);
            let expected = *are_integers.get_or_insert(integer.is_some());
            ensure!(
                integer.is_some() || !expected,
                "{name}:{line}: `id`: expected an integer, as in the first row, found {id}"
            );
            if let Some(integer) = integer.filter(|_| expected) {
                *id = Value::from(integer);
            }
        }
        record(columns, &column).with_context(|| format!("{name}:{line}"))
    })))
}

/// The integer that a text is; not of one such as `007`, which would be written as another text.
fn canonical_integer(text: &str) -> Option<i64> {
    text.parse().ok().filter(|integer: &i64| integer.to_string() == text)
}

#[cfg(feature = "flight")]
fn parquet(path: &Path, column: &str) -> Result<RowIterator> {
    ensure!(path != Path::new("-"), "a Parquet file cannot be read from standard input");
    let rows = bodkin_flight::input::read_parquet(path, column)?;
    Ok(Box::new(rows.map(|row| {
        let (text, row) = row?;
        Ok(Row { text, columns: Columns::Stored(row) })
    })))
}

#[cfg(not(feature = "flight"))]
fn parquet(path: &Path, _column: &str) -> Result<RowIterator> {
    bail!("{}: {}", path.display(), crate::store::WITHOUT_ARROW)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_a_long_file_are_counted_one_by_one() {
        let read = |row: &str| {
            let file = format!("text\n{}", row.repeat(20_000_000 / row.len()));
            std::io::copy(
                &mut BoundedRows::new(Box::new(std::io::Cursor::new(file))),
                &mut std::io::sink(),
            )
        };
        // A quote inside of a field does not begin one.
        for row in ["5\" nails\n", "5\"\" nails\r\n", "\"two \"\"hens\"\"\n\",1\n"] {
            assert!(read(row).is_ok(), "{row}");
        }
        for row in ["x", "x,", "\"\n\""] {
            assert!(read(row).is_err(), "{row}");
        }
    }
}
