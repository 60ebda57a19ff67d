//! Writes GGUF files: the exact inverse of the reader. Tensor data are streamed, so a file may be
//! larger than memory. It must not know what tensors mean.

use std::collections::HashSet;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use crate::error::{Error, Mismatch, Result, quoted};
use crate::format::Format;
use crate::header::{MAX_NAME_BYTES, read_alignment};
use crate::metadata::{Array, Metadata, Value, each_array, kind};
use crate::tensor::{bytes_of, checked_bytes, fixed_bytes};

/// Bytes that are written at once.
const BUFFER_BYTES: usize = 1 << 20;

/// Writes the data of one tensor: exactly the bytes that its format and shape require.
type Source<'a> = Box<dyn FnOnce(&mut dyn Write) -> io::Result<()> + 'a>;

/// A GGUF file to be written: metadata, then tensors in the order of their addition. Tensor data
/// start at multiples of the metadata's `general.alignment`.
pub struct Writer<'a> {
    path: PathBuf,
    version: u32,
    metadata: &'a Metadata,
    alignment: u64,
    names: HashSet<String>,
    tensors: Vec<Entry<'a>>,
    /// The offset of the next tensor's data within the data section.
    next_offset: u64,
}

struct Entry<'a> {
    name: String,
    format: Format,
    shape: Vec<u64>,
    /// Within the data section, in bytes.
    offset: u64,
    bytes: u64,
    source: Source<'a>,
}

impl<'a> Writer<'a> {
    /// A file of version 3 without tensors. Nothing is written before [`Writer::save`], which
    /// creates `path`. Fails if a key is empty or too long, or if the alignment is invalid.
    pub fn new(path: impl Into<PathBuf>, metadata: &'a Metadata) -> Result<Writer<'a>> {
        let path = path.into();
        for (key, _) in metadata.iter() {
            check_name(&path, "metadata key", key)?;
        }
        let alignment = read_alignment(&path, metadata)?;
        let (names, tensors) = (HashSet::new(), Vec::new());
        Ok(Writer { path, version: 3, metadata, alignment, names, tensors, next_offset: 0 })
    }

    /// Sets the version of the container, 2 or 3; their layout is the same.
    pub fn version(mut self, version: u32) -> Result<Writer<'a>> {
        if !(2..=3).contains(&version) {
            let found = format!("version {version}");
            return Err(Error::invalid(&self.path, "header", "version 2 or 3", found));
        }
        self.version = version;
        Ok(self)
    }

    /// Adds a tensor whose data are in memory. `shape` has the columns first.
    pub fn tensor(
        &mut self,
        name: &str,
        format: Format,
        shape: &[u64],
        data: &'a [u8],
    ) -> Result<()> {
        let bytes = bytes_of(format, shape, data);
        self.add(name, format, shape, bytes, Box::new(move |out| out.write_all(data)))
    }

    /// Adds a tensor whose data `source` writes while the file is saved: exactly the bytes that
    /// format and shape require. Fails for a format whose rows differ in length: see
    /// [`Writer::tensor_with_bytes`].
    pub fn tensor_with(
        &mut self,
        name: &str,
        format: Format,
        shape: &[u64],
        source: impl FnOnce(&mut dyn Write) -> io::Result<()> + 'a,
    ) -> Result<()> {
        let bytes = fixed_bytes(format, shape);
        self.add(name, format, shape, bytes, Box::new(source))
    }

    /// As [`Writer::tensor_with`], for any format: `source` writes `bytes` bytes.
    pub fn tensor_with_bytes(
        &mut self,
        name: &str,
        format: Format,
        shape: &[u64],
        bytes: u64,
        source: impl FnOnce(&mut dyn Write) -> io::Result<()> + 'a,
    ) -> Result<()> {
        let bytes = checked_bytes(format, shape).and_then(|wanted| match wanted {
            Some(wanted) if wanted != bytes => Err(Mismatch {
                expected: format!("{wanted} bytes"),
                found: format!("{bytes} bytes"),
            }),
            _ => Ok(bytes),
        });
        self.add(name, format, shape, bytes, Box::new(source))
    }

    fn add(
        &mut self,
        name: &str,
        format: Format,
        shape: &[u64],
        bytes: Result<u64, Mismatch>,
        source: Source<'a>,
    ) -> Result<()> {
        check_name(&self.path, "tensor", name)?;
        let mismatch = |expected: &str, found: String| {
            Mismatch { expected: expected.to_owned(), found }.in_tensor(&self.path, name)
        };
        if !self.names.insert(name.to_string()) {
            return Err(mismatch("one tensor of this name", "a second one".to_owned()));
        }
        let bytes = bytes.map_err(|mismatch| mismatch.in_tensor(&self.path, name))?;
        let offset = self.next_offset;
        let end = bytes.checked_next_multiple_of(self.alignment);
        self.next_offset = end.and_then(|end| end.checked_add(offset)).ok_or_else(|| {
            let found = format!("{bytes} bytes from byte {offset}");
            mismatch("data that end before byte 2^64", found)
        })?;
        let (name, shape) = (name.to_string(), shape.to_vec());
        self.tensors.push(Entry { name, format, shape, offset, bytes, source });
        Ok(())
    }

    /// Writes to a temporary file in the same folder, syncs it to disk, and renames it. After an
    /// error the temporary file is gone and an older file at the path is unchanged.
    pub fn save(self) -> Result<()> {
        let path = self.path.clone();
        let fail = |action: &'static str| {
            let file = path.clone();
            move |source| Error::Io { file, action: action.to_string(), source }
        };
        let folder = match path.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        let mut builder = tempfile::Builder::new();
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            // The user's umask decides, as for any other new file.
            builder.permissions(std::fs::Permissions::from_mode(0o666));
        }
        let mut temporary = builder
            .prefix(".bodkin-tmp-")
            .tempfile_in(folder)
            .map_err(fail("create a file in its folder"))?;
        // A lock ends with its process, so others can tell a file that was left behind.
        let _ = temporary.as_file().lock();
        self.write_to(&mut temporary)?;
        temporary.as_file().sync_all().map_err(fail("write"))?;
        temporary.persist(&path).map_err(|error| fail("rename")(error.error))?;
        Ok(())
    }

    /// Writes the file to a stream.
    pub fn write_to(self, out: &mut dyn Write) -> Result<()> {
        let mut out = Counted { out: BufWriter::with_capacity(BUFFER_BYTES, out), written: 0 };
        let path = self.path;
        let failed = |source| Error::io(&path, "write", source);
        let mut header = Vec::new();
        put_header(&mut header, self.version, self.metadata, &self.tensors);
        out.write_all(&header).map_err(failed)?;
        if !self.tensors.is_empty() {
            out.pad(self.alignment).map_err(failed)?;
        }
        for tensor in self.tensors {
            let start = out.written;
            (tensor.source)(&mut out).map_err(|source| {
                Error::io(&path, format!("write tensor {}", quoted(&tensor.name)), source)
            })?;
            if out.written - start != tensor.bytes {
                return Err(Error::invalid(
                    &path,
                    format!("data of tensor {}", quoted(&tensor.name)),
                    format!("{} bytes", tensor.bytes),
                    format!("{} bytes", out.written - start),
                ));
            }
            out.pad(self.alignment).map_err(failed)?;
        }
        out.flush().map_err(failed)
    }
}

/// Checks the length of a key or a tensor's name.
fn check_name(path: &Path, what: &str, name: &str) -> Result<()> {
    if (1..=MAX_NAME_BYTES).contains(&name.len()) {
        return Ok(());
    }
    let expected = format!("a name of 1 to {MAX_NAME_BYTES} bytes");
    let found = format!("{} bytes", name.len());
    Err(Error::invalid(path, format!("{what} {}", quoted(name)), expected, found))
}

fn put_header(out: &mut Vec<u8>, version: u32, metadata: &Metadata, tensors: &[Entry]) {
    out.extend(b"GGUF");
    out.extend(version.to_le_bytes());
    out.extend((tensors.len() as u64).to_le_bytes());
    out.extend((metadata.len() as u64).to_le_bytes());
    for (key, value) in metadata.iter() {
        put_string(out, key.as_bytes());
        put_value(out, value);
    }
    for tensor in tensors {
        put_string(out, tensor.name.as_bytes());
        out.extend((tensor.shape.len() as u32).to_le_bytes());
        for dim in &tensor.shape {
            out.extend(dim.to_le_bytes());
        }
        out.extend(tensor.format.id().to_le_bytes());
        out.extend(tensor.offset.to_le_bytes());
    }
}

fn put_string(out: &mut Vec<u8>, string: &[u8]) {
    out.extend((string.len() as u64).to_le_bytes());
    out.extend(string);
}

fn put_value(out: &mut Vec<u8>, value: &Value) {
    let (kind, bytes): (u32, &[u8]) = match value {
        Value::U8(v) => (kind::U8, &v.to_le_bytes()),
        Value::I8(v) => (kind::I8, &v.to_le_bytes()),
        Value::U16(v) => (kind::U16, &v.to_le_bytes()),
        Value::I16(v) => (kind::I16, &v.to_le_bytes()),
        Value::U32(v) => (kind::U32, &v.to_le_bytes()),
        Value::I32(v) => (kind::I32, &v.to_le_bytes()),
        Value::F32(v) => (kind::F32, &v.to_le_bytes()),
        Value::Bool(v) => (kind::BOOL, &[u8::from(*v)]),
        Value::U64(v) => (kind::U64, &v.to_le_bytes()),
        Value::I64(v) => (kind::I64, &v.to_le_bytes()),
        Value::F64(v) => (kind::F64, &v.to_le_bytes()),
        Value::String(v) => {
            out.extend(kind::STRING.to_le_bytes());
            return put_string(out, v);
        }
        Value::Array(v) => {
            out.extend(kind::ARRAY.to_le_bytes());
            return put_array(out, v);
        }
    };
    out.extend(kind.to_le_bytes());
    out.extend(bytes);
}

fn put_array(out: &mut Vec<u8>, array: &Array) {
    out.extend(array.kind().to_le_bytes());
    out.extend((array.len() as u64).to_le_bytes());
    each_array!(array, items => items.iter().for_each(|item| item.put(out)));
}

/// An element of an array, as the file holds it.
trait Put {
    fn put(&self, out: &mut Vec<u8>);
}

macro_rules! put_numbers {
    ($($number:ty)*) => {$(
        impl Put for $number {
            fn put(&self, out: &mut Vec<u8>) {
                out.extend(self.to_le_bytes());
            }
        }
    )*};
}
put_numbers!(u8 i8 u16 i16 u32 i32 f32 u64 i64 f64);

impl Put for bool {
    fn put(&self, out: &mut Vec<u8>) {
        out.push(u8::from(*self));
    }
}

impl Put for Box<[u8]> {
    fn put(&self, out: &mut Vec<u8>) {
        put_string(out, self);
    }
}

impl Put for Array {
    fn put(&self, out: &mut Vec<u8>) {
        put_array(out, self);
    }
}

/// A stream that counts its bytes.
struct Counted<W> {
    out: W,
    written: u64,
}

impl<W: Write> Counted<W> {
    /// Writes zeros up to a multiple of `alignment` bytes.
    fn pad(&mut self, alignment: u64) -> io::Result<()> {
        let gap = self.written.next_multiple_of(alignment) - self.written;
        io::copy(&mut io::Read::take(io::repeat(0), gap), self).map(|_| ())
    }
}

impl<W: Write> Write for Counted<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        // The buffer passes on what is as large as itself. A write of mapped bytes that another
        // process has cut off fails without the name of their file, where a copy raises SIGBUS.
        let count = self.out.write(&bytes[..bytes.len().min(BUFFER_BYTES / 2)])?;
        self.written += count as u64;
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}
