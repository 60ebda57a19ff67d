//! Reads the header of a GGUF file: everything before the tensor data. Counts and lengths are
//! untrusted: each is checked against the remaining bytes before anything is allocated. It must not
//! know where the bytes come from, nor that a file can be split.

use std::collections::HashSet;
use std::path::Path;

use crate::error::{Error, Result, quoted};
use crate::format::Format;
use crate::metadata::{Array, Metadata, Value, kind};
use crate::tensor::{MAX_DIMS, Tensor, checked_bytes, indexed_bytes};

/// Alignment of tensor data without `general.alignment`, in bytes.
pub(crate) const DEFAULT_ALIGNMENT: u64 = 32;
/// The largest accepted alignment, in bytes.
const MAX_ALIGNMENT: u64 = 1 << 24;
/// The longest key that GGUF allows, in bytes; the limit applies to tensor names too.
pub(crate) const MAX_NAME_BYTES: usize = 65535;
/// The deepest nesting of arrays. Real files have one level.
const MAX_ARRAY_DEPTH: usize = 8;
/// Bytes that a header takes in memory; that of a large vocabulary takes 50 MB.
const MAX_MEMORY_BYTES: u64 = 160_000_000;
/// Bytes that an entry of the metadata takes in memory, beside its key and value.
const ENTRY_BYTES: u64 = 128;
/// Bytes that a tensor takes in memory, beside its name, which is there twice.
const TENSOR_BYTES: u64 = 256;
/// Bytes that a text or an array takes in memory, beside its content.
const OWNED_BYTES: u64 = 48;
/// Bytes of the smallest entry: a key of one byte, a type, and a value of one byte.
const MIN_ENTRY_BYTES: u64 = 8 + 1 + 4 + 1;
/// Bytes of the smallest tensor: a name of one byte, the number of dimensions, one dimension, a
/// type and an offset.
const MIN_TENSOR_BYTES: u64 = 8 + 1 + 4 + 8 + 4 + 8;

/// The type id of MXFP4 in Ollama's first files of GPT-OSS, where a byte of a block holds the codes
/// of neighbouring elements. GGML abandoned its own type 4 before GGUF existed.
const PAIRED_MXFP4: u32 = 4;

/// The content of a header.
pub(crate) struct Header {
    pub(crate) version: u32,
    pub(crate) metadata: Metadata,
    /// Offsets are from the start of the file; `shard` is 0.
    pub(crate) tensors: Vec<Tensor>,
    /// The indices of the tensors of type [`PAIRED_MXFP4`].
    pub(crate) paired: Vec<usize>,
    /// In bytes.
    pub(crate) alignment: u64,
}

/// Reads and checks the header of one file, or of one part of a split file. `file` is for messages.
pub(crate) fn parse(file: &Path, bytes: &[u8]) -> Result<Header> {
    let item = "header".to_string();
    let mut cursor = Cursor { file, bytes, at: 0, item, memory_bytes: 0 };
    let magic = cursor.array::<4>()?;
    if &magic != b"GGUF" {
        return Err(Error::Magic { file: file.to_path_buf(), found: magic });
    }
    let version = cursor.u32()?;
    check_version(&cursor, version)?;
    let tensor_count = cursor.u64()?;
    let entry_count = cursor.u64()?;
    cursor.expect_items(["metadata entry", "metadata entries"], entry_count, MIN_ENTRY_BYTES)?;
    cursor.expect_items(["tensor", "tensors"], tensor_count, MIN_TENSOR_BYTES)?;

    let metadata = read_metadata(&mut cursor, entry_count)?;
    let alignment = read_alignment(file, &metadata)?;
    let (mut tensors, paired) = read_tensors(&mut cursor, tensor_count, alignment)?;
    place_tensors(&cursor, &mut tensors, alignment)?;
    Ok(Header { version, metadata, tensors, paired, alignment })
}

/// The alignment of tensor data, in bytes: a power of two up to 16 MiB.
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
        cursor.charge(ENTRY_BYTES + key.len() as u64)?;
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
        kind::STRING => Value::String(cursor.owned_string()?),
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
    // The remaining bytes bound the count, and so every allocation below.
    cursor.expect_bytes(count.saturating_mul(min_bytes))?;
    cursor.charge(match element {
        kind::STRING | kind::ARRAY => count.saturating_mul(OWNED_BYTES),
        _ => count.saturating_mul(min_bytes),
    })?;
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
            let strings = (0..count).map(|_| cursor.owned_string());
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

/// All tensors, and the indices of those of type [`PAIRED_MXFP4`].
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
        cursor.charge(TENSOR_BYTES + 2 * name.len() as u64)?;
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
    // `place_tensors` sets sizes that depend on the data.
    let bytes = bytes.unwrap_or(0);
    let offset = cursor.u64()?;
    if !offset.is_multiple_of(alignment) {
        let expected = format!("an offset that is a multiple of {alignment}");
        return Err(cursor.invalid(expected, offset.to_string()));
    }
    Ok((Tensor { name, format, shape, offset, bytes, shard: 0 }, id))
}

/// Converts offsets within the data section to offsets within the file, and checks that the data of
/// all tensors are inside the file and do not overlap. The section starts at the header's end,
/// rounded up to the alignment.
fn place_tensors(cursor: &Cursor, tensors: &mut [Tensor], alignment: u64) -> Result<()> {
    let (file, actual) = (cursor.file, cursor.bytes.len() as u64);
    let data_start = (cursor.at as u64).next_multiple_of(alignment);
    // Sorted by offset, so that overlaps are found before an index is read twice.
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
            tensor.bytes = indexed_bytes(tensor.format, &tensor.shape, data)
                .map_err(|mismatch| mismatch.in_tensor(file, &tensor.name))?;
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

/// A position in the bytes of a file, and the item at that position, for errors.
struct Cursor<'a> {
    file: &'a Path,
    bytes: &'a [u8],
    at: usize,
    item: String,
    /// What the header takes in memory so far.
    memory_bytes: u64,
}

impl<'a> Cursor<'a> {
    fn invalid(&self, expected: impl Into<String>, found: impl Into<String>) -> Error {
        Error::invalid(self.file, self.item.clone(), expected, found)
    }

    /// Fails unless `count` bytes remain.
    fn expect_bytes(&self, count: u64) -> Result<()> {
        self.expect_bytes_for(&self.item, count)
    }

    /// Fails unless the remaining bytes can hold `count` items of at least `min_bytes` each, which
    /// are called this if they are one and if they are more.
    fn expect_items(&self, [one, many]: [&str; 2], count: u64, min_bytes: u64) -> Result<()> {
        let name = if count == 1 { one } else { many };
        let item = format!("a header of {count} {name}");
        self.expect_bytes_for(&item, count.saturating_mul(min_bytes))
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

    /// Accounts for memory of the header.
    fn charge(&mut self, bytes: u64) -> Result<()> {
        self.memory_bytes = self.memory_bytes.saturating_add(bytes);
        if self.memory_bytes <= MAX_MEMORY_BYTES {
            return Ok(());
        }
        let expected = format!("a header of at most {MAX_MEMORY_BYTES} bytes in memory");
        Err(self.invalid(expected, format!("{} or more", self.memory_bytes)))
    }

    /// A text of the metadata.
    fn owned_string(&mut self) -> Result<Box<[u8]>> {
        let bytes = self.string()?;
        self.charge(bytes.len() as u64)?;
        Ok(bytes.into())
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
