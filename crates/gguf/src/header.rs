//! Reads everything of a GGUF file that comes before the tensor data. Counts and lengths come from
//! a stranger: each is held against the bytes that are left before anything is allocated. It must
//! not know where the bytes come from, nor that a file can have parts.

use std::collections::HashSet;
use std::path::Path;

use crate::metadata::{Array, Metadata, Value, kind};
use crate::tensor::{MAX_DIMS, Tensor, checked_bytes, indexed_bytes};
use crate::{Error, Format, Result};

/// Alignment of tensor data where a file does not give its own, in bytes.
pub(crate) const DEFAULT_ALIGNMENT: u64 = 32;
/// The largest alignment that is taken for real, in bytes.
const MAX_ALIGNMENT: u64 = 1 << 24;
/// The longest key that the format allows, in bytes; tensors' names are held to it as well.
pub(crate) const MAX_NAME_BYTES: usize = 65535;
/// How many arrays may lie in each other. Real files have one.
const MAX_ARRAY_DEPTH: usize = 8;
/// A key of one byte, a type, and a value of one byte.
const MIN_ENTRY_BYTES: u64 = 8 + 1 + 4 + 1;
/// A name of one byte, a dimension count, one dimension, a type and an offset.
const MIN_TENSOR_BYTES: u64 = 8 + 1 + 4 + 8 + 4 + 8;

/// The type id under which Ollama's first files of GPT-OSS have MXFP4, with the codes of a block in
/// pairs of neighbours. GGML had given up a type of this number before GGUF existed.
const PAIRED_MXFP4: u32 = 4;

/// What the bytes before the tensor data say.
pub(crate) struct Header {
    pub(crate) version: u32,
    pub(crate) metadata: Metadata,
    /// Offsets are absolute already; `shard` is 0.
    pub(crate) tensors: Vec<Tensor>,
    /// The tensors, by index, that are [`PAIRED_MXFP4`].
    pub(crate) paired: Vec<usize>,
    /// In bytes.
    pub(crate) alignment: u64,
}

/// Reads and checks the header of one file, or of one part of a split file. `file` is for messages.
pub(crate) fn parse(file: &Path, bytes: &[u8]) -> Result<Header> {
    let mut cursor = Cursor { file, bytes, at: 0, item: "header".to_string() };
    let magic = cursor.array::<4>()?;
    if &magic != b"GGUF" {
        return Err(Error::Magic { file: file.to_path_buf(), found: magic });
    }
    let version = cursor.u32()?;
    check_version(&cursor, version)?;
    let tensor_count = cursor.u64()?;
    let entry_count = cursor.u64()?;
    cursor.expect_items("metadata entries", entry_count, MIN_ENTRY_BYTES)?;
    cursor.expect_items("tensors", tensor_count, MIN_TENSOR_BYTES)?;

    let metadata = read_metadata(&mut cursor, entry_count)?;
    let alignment = read_alignment(file, &metadata)?;
    let (mut tensors, paired) = read_tensors(&mut cursor, tensor_count, alignment)?;
    place_tensors(&cursor, &mut tensors, alignment)?;
    Ok(Header { version, metadata, tensors, paired, alignment })
}

/// The alignment that metadata ask for, in bytes: a power of two within reason.
pub(crate) fn read_alignment(file: &Path, metadata: &Metadata) -> Result<u64> {
    let item = "metadata key `general.alignment`";
    let expected = format!("a power of two up to {MAX_ALIGNMENT}");
    match metadata.u64("general.alignment") {
        Ok(None) => Ok(DEFAULT_ALIGNMENT),
        Ok(Some(bytes)) if bytes.is_power_of_two() && bytes <= MAX_ALIGNMENT => Ok(bytes),
        Ok(Some(bytes)) => Err(Error::invalid(file, item, expected, bytes.to_string())),
        Err(Error::WrongType { found, .. }) => Err(Error::invalid(file, item, expected, found)),
        Err(other) => Err(other),
    }
}

/// A name from a file as messages show it: on one line and not too long.
pub(crate) fn quoted(name: &str) -> String {
    let mut shown: String = name.chars().take(80).flat_map(char::escape_debug).collect();
    if name.chars().nth(80).is_some() {
        shown.push_str("...");
    }
    format!("`{shown}`")
}

fn check_version(cursor: &Cursor, version: u32) -> Result<()> {
    let found = match version {
        2 | 3 => return Ok(()),
        _ if (1..=3).contains(&version.swap_bytes()) => {
            format!("version {} in big-endian byte order", version.swap_bytes())
        }
        _ => format!("version {version}"),
    };
    Err(cursor.invalid("version 2 or 3 in little-endian byte order", found))
}

fn read_metadata(cursor: &mut Cursor, count: u64) -> Result<Metadata> {
    let mut metadata = Metadata::new();
    for number in 0..count {
        cursor.item = format!("metadata entry {number}");
        let key = cursor.name()?;
        cursor.item = format!("metadata key {}", quoted(&key));
        if metadata.get(&key).is_some() {
            return Err(cursor.invalid("one entry", "a second one"));
        }
        let value = read_value(cursor)?;
        metadata.insert(key, value);
    }
    Ok(metadata)
}

fn read_value(cursor: &mut Cursor) -> Result<Value> {
    Ok(match cursor.u32()? {
        kind::U8 => Value::U8(u8::from_le_bytes(cursor.array()?)),
        kind::I8 => Value::I8(i8::from_le_bytes(cursor.array()?)),
        kind::U16 => Value::U16(u16::from_le_bytes(cursor.array()?)),
        kind::I16 => Value::I16(i16::from_le_bytes(cursor.array()?)),
        kind::U32 => Value::U32(u32::from_le_bytes(cursor.array()?)),
        kind::I32 => Value::I32(i32::from_le_bytes(cursor.array()?)),
        kind::F32 => Value::F32(f32::from_le_bytes(cursor.array()?)),
        kind::BOOL => Value::Bool(cursor.bool()?),
        kind::STRING => Value::String(cursor.string()?.into()),
        kind::ARRAY => Value::Array(read_array(cursor, 1)?),
        kind::U64 => Value::U64(u64::from_le_bytes(cursor.array()?)),
        kind::I64 => Value::I64(i64::from_le_bytes(cursor.array()?)),
        kind::F64 => Value::F64(f64::from_le_bytes(cursor.array()?)),
        other => return Err(cursor.invalid("a value type from 0 to 12", other.to_string())),
    })
}

fn read_array(cursor: &mut Cursor, depth: usize) -> Result<Array> {
    if depth > MAX_ARRAY_DEPTH {
        return Err(cursor.invalid(format!("at most {MAX_ARRAY_DEPTH} nested arrays"), "more"));
    }
    let element = cursor.u32()?;
    let count = cursor.u64()?;
    let Some(&min_bytes) = kind::MIN_BYTES.get(element as usize) else {
        return Err(cursor.invalid("an element type from 0 to 12", element.to_string()));
    };
    // What is left of the file bounds the count, and so every allocation below.
    cursor.expect_bytes(count.saturating_mul(min_bytes))?;
    Ok(match element {
        kind::U8 => Array::U8(cursor.numbers(count, u8::from_le_bytes)?),
        kind::I8 => Array::I8(cursor.numbers(count, i8::from_le_bytes)?),
        kind::U16 => Array::U16(cursor.numbers(count, u16::from_le_bytes)?),
        kind::I16 => Array::I16(cursor.numbers(count, i16::from_le_bytes)?),
        kind::U32 => Array::U32(cursor.numbers(count, u32::from_le_bytes)?),
        kind::I32 => Array::I32(cursor.numbers(count, i32::from_le_bytes)?),
        kind::F32 => Array::F32(cursor.numbers(count, f32::from_le_bytes)?),
        kind::BOOL => Array::Bool((0..count).map(|_| cursor.bool()).collect::<Result<_>>()?),
        kind::STRING => {
            let strings = (0..count).map(|_| Ok(cursor.string()?.into()));
            Array::String(strings.collect::<Result<_>>()?)
        }
        kind::U64 => Array::U64(cursor.numbers(count, u64::from_le_bytes)?),
        kind::I64 => Array::I64(cursor.numbers(count, i64::from_le_bytes)?),
        kind::F64 => Array::F64(cursor.numbers(count, f64::from_le_bytes)?),
        _ => {
            let arrays = (0..count).map(|_| read_array(cursor, depth + 1));
            Array::Array(arrays.collect::<Result<_>>()?)
        }
    })
}

/// All tensors, and which of them are [`PAIRED_MXFP4`].
fn read_tensors(
    cursor: &mut Cursor,
    count: u64,
    alignment: u64,
) -> Result<(Vec<Tensor>, Vec<usize>)> {
    let (mut tensors, mut paired) = (Vec::new(), Vec::new());
    let mut names = HashSet::new();
    for number in 0..count {
        cursor.item = format!("tensor number {number}");
        let name = cursor.name()?;
        cursor.item = format!("tensor {}", quoted(&name));
        if !names.insert(name.clone()) {
            return Err(cursor.invalid("one tensor of this name", "a second one"));
        }
        let (tensor, id) = read_tensor(cursor, name, alignment)?;
        if id == PAIRED_MXFP4 {
            paired.push(tensors.len());
        }
        tensors.push(tensor);
    }
    Ok((tensors, paired))
}

/// A tensor, and the id of its type.
fn read_tensor(cursor: &mut Cursor, name: String, alignment: u64) -> Result<(Tensor, u32)> {
    let dims = cursor.u32()?;
    if dims == 0 || dims as usize > MAX_DIMS {
        let expected = format!("1 to {MAX_DIMS} dimensions");
        return Err(cursor.invalid(expected, dims.to_string()));
    }
    let shape = cursor.numbers(dims.into(), u64::from_le_bytes)?;
    let id = cursor.u32()?;
    let format = if id == PAIRED_MXFP4 { Some(Format::MXFP4) } else { Format::from_id(id) };
    let Some(format) = format else {
        return Err(cursor.invalid("a known type", format!("type {id}")));
    };
    let bytes = checked_bytes(format, &shape)
        .map_err(|problem| cursor.invalid(problem.expected, problem.found))?;
    // What only the data can tell is asked when they are placed.
    let bytes = bytes.unwrap_or(0);
    let offset = cursor.u64()?;
    if !offset.is_multiple_of(alignment) {
        let expected = format!("an offset that is a multiple of {alignment}");
        return Err(cursor.invalid(expected, offset.to_string()));
    }
    Ok((Tensor { name, format, shape, offset, bytes, shard: 0 }, id))
}

/// Turns offsets within the data section into offsets within the file, and checks that the data
/// lie inside the file and apart from each other. The section starts at the header's end, rounded
/// up to the alignment.
fn place_tensors(cursor: &Cursor, tensors: &mut [Tensor], alignment: u64) -> Result<()> {
    let (file, actual) = (cursor.file, cursor.bytes.len() as u64);
    let data_start = (cursor.at as u64).next_multiple_of(alignment);
    // In the order of the data, so that no byte of an index is read for two tensors.
    let mut in_order: Vec<&mut Tensor> = tensors.iter_mut().collect();
    in_order.sort_by_key(|tensor| tensor.offset);
    let (mut end_before, mut before) = (0, String::new());
    for tensor in in_order {
        let start = tensor.offset.checked_add(data_start);
        if let Some(start) = start.filter(|&start| start < end_before) {
            return Err(Error::invalid(
                file,
                format!("tensor {}", quoted(&tensor.name)),
                format!("data from byte {end_before}, after those of {before}"),
                format!("an overlap from byte {start}"),
            ));
        }
        if let Some(start) = start.filter(|&start| start <= actual && tensor.format.has_index()) {
            let data = &cursor.bytes[start as usize..];
            let bytes = indexed_bytes(tensor.format, &tensor.shape, data).map_err(|bad| {
                let item = format!("tensor {}", quoted(&tensor.name));
                Error::invalid(file, item, bad.expected, bad.found)
            })?;
            tensor.bytes = bytes;
        }
        let end = start.and_then(|start| start.checked_add(tensor.bytes));
        match (start, end) {
            (Some(start), Some(end)) if end <= actual => {
                tensor.offset = start;
                (end_before, before) = (end, quoted(&tensor.name));
            }
            _ => {
                return Err(Error::Truncated {
                    file: file.to_path_buf(),
                    item: format!("tensor {}", quoted(&tensor.name)),
                    expected: end.unwrap_or(u64::MAX),
                    actual,
                });
            }
        }
    }
    Ok(())
}

/// A position in the bytes of a file, and what is being read there.
struct Cursor<'a> {
    file: &'a Path,
    bytes: &'a [u8],
    at: usize,
    item: String,
}

impl<'a> Cursor<'a> {
    fn invalid(&self, expected: impl Into<String>, found: impl Into<String>) -> Error {
        Error::invalid(self.file, self.item.clone(), expected, found)
    }

    /// Fails unless the file has this many bytes more.
    fn expect_bytes(&self, count: u64) -> Result<()> {
        self.expect_bytes_for(&self.item, count)
    }

    /// Fails unless the file has room for so many items of at least so many bytes each.
    fn expect_items(&self, name: &str, count: u64, min_bytes: u64) -> Result<()> {
        self.expect_bytes_for(&format!("{count} {name}"), count.saturating_mul(min_bytes))
    }

    fn expect_bytes_for(&self, item: &str, count: u64) -> Result<()> {
        if count <= (self.bytes.len() - self.at) as u64 {
            return Ok(());
        }
        Err(Error::Truncated {
            file: self.file.to_path_buf(),
            item: item.to_string(),
            expected: count.saturating_add(self.at as u64),
            actual: self.bytes.len() as u64,
        })
    }

    fn take(&mut self, count: u64) -> Result<&'a [u8]> {
        self.expect_bytes(count)?;
        let taken = &self.bytes[self.at..][..count as usize];
        self.at += taken.len();
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N as u64)?);
        Ok(array)
    }

    fn u32(&mut self) -> Result<u32> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn u64(&mut self) -> Result<u64> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    fn bool(&mut self) -> Result<bool> {
        match self.array()? {
            [0] => Ok(false),
            [1] => Ok(true),
            [other] => Err(self.invalid("a bool of 0 or 1", other.to_string())),
        }
    }

    fn string(&mut self) -> Result<&'a [u8]> {
        let length = self.u64()?;
        self.take(length)
    }

    fn name(&mut self) -> Result<String> {
        let bytes = self.string()?;
        if bytes.is_empty() || bytes.len() > MAX_NAME_BYTES {
            let expected = format!("a name of 1 to {MAX_NAME_BYTES} bytes");
            return Err(self.invalid(expected, format!("{} bytes", bytes.len())));
        }
        match std::str::from_utf8(bytes) {
            Ok(name) => Ok(name.to_string()),
            Err(error) => Err(self.invalid("a name in UTF-8", error.to_string())),
        }
    }

    fn numbers<const N: usize, T>(&mut self, count: u64, read: fn([u8; N]) -> T) -> Result<Vec<T>> {
        let bytes = self.take(count.saturating_mul(N as u64))?;
        let (numbers, _) = bytes.as_chunks::<N>();
        Ok(numbers.iter().map(|&number| read(number)).collect())
    }
}
