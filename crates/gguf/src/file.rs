//! An open GGUF file: the header and the bytes, mapped, owned or derived. Every check is done
//! before a [`File`] exists. It must not know block layouts.

mod edit;
mod map;

use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use self::map::Map;
pub use self::map::{exit_on_truncation, kind_of_file};
use crate::error::{Error, Mismatch, Result};
use crate::format::fp4::unpair_mxfp4;
use crate::header::{self, Header};
use crate::metadata::Metadata;
use crate::split::PartName;
use crate::tensor::Tensor;

/// A GGUF file, whole or split, open for reading.
#[derive(Debug)]
pub struct File {
    path: PathBuf,
    version: u32,
    alignment: u64,
    metadata: Metadata,
    tensors: Vec<Tensor>,
    by_name: HashMap<String, usize>,
    shards: Vec<Bytes>,
}

#[derive(Debug)]
enum Bytes {
    Mapped(Map),
    Owned(Vec<u8>),
    /// One tensor, computed from others.
    Derived(Derived),
}

/// Computes a tensor's data from those of others, which must not depend on the result.
type Recipe = Box<dyn Fn(&File) -> Vec<u8> + Send + Sync>;

/// Data that are computed on first use; [`File::data`] caches them, [`File::read`] does not.
struct Derived {
    recipe: Recipe,
    cached: OnceLock<Vec<u8>>,
}

impl fmt::Debug for Derived {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Derived").field(&self.cached.get().map(Vec::len)).finish()
    }
}

impl File {
    /// Maps a file. The first part of a split file opens all parts as one file.
    pub fn open(path: impl AsRef<Path>) -> Result<File> {
        let path = path.as_ref();
        let bytes = Map::open(path)?;
        let header = header::parse(path, &bytes)?;
        let count = split_number(path, &header.metadata, "split.count")?.unwrap_or(1);
        let mut file = File::from_part(path, Bytes::Mapped(bytes), header);
        if count > 1 {
            file.load_other_parts(count)?;
        }
        file.index()
    }

    /// Reads a file from memory. `name` is for errors. A part of a split file is an error, because
    /// the other parts cannot be found.
    pub fn from_bytes(name: &str, bytes: Vec<u8>) -> Result<File> {
        let path = Path::new(name);
        let header = header::parse(path, &bytes)?;
        match split_number(path, &header.metadata, "split.count")? {
            None | Some(0 | 1) => File::from_part(path, Bytes::Owned(bytes), header).index(),
            Some(count) => {
                let found = format!("one of {count} parts");
                Err(Error::invalid(path, "metadata key `split.count`", "a whole file", found))
            }
        }
    }

    /// The path or name that opened the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Version of the container format, 2 or 3.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// The metadata; of the first part if the file is split.
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// Alignment of tensor data, in bytes.
    pub fn alignment(&self) -> u64 {
        self.alignment
    }

    /// All tensors in the order of the file.
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    /// The tensor of a name.
    pub fn tensor(&self, name: &str) -> Option<&Tensor> {
        self.by_name.get(name).map(|&index| &self.tensors[index])
    }

    /// The bytes of a tensor, at any alignment.
    ///
    /// # Panics
    /// If the tensor is not from this file.
    pub fn data(&self, tensor: &Tensor) -> &[u8] {
        let bytes: &[u8] = match &self.shards[tensor.shard] {
            Bytes::Mapped(map) => map,
            Bytes::Owned(vec) => vec,
            Bytes::Derived(derived) => derived.cached.get_or_init(|| (derived.recipe)(self)),
        };
        &bytes[tensor.offset as usize..][..tensor.bytes as usize]
    }

    /// As [`File::data`], for data that are read once: derived data are not cached, so that memory
    /// never holds a model's weights twice.
    ///
    /// # Panics
    /// If the tensor is not from this file.
    pub fn read(&self, tensor: &Tensor) -> Cow<'_, [u8]> {
        match &self.shards[tensor.shard] {
            Bytes::Derived(Derived { recipe, cached }) if cached.get().is_none() => {
                Cow::Owned(recipe(self))
            }
            _ => Cow::Borrowed(self.data(tensor)),
        }
    }

    /// Releases the memory of a tensor's mapped pages (`madvise`): the system reads them again when
    /// needed.
    ///
    /// # Panics
    /// If the tensor is not from this file.
    pub fn release(&self, tensor: &Tensor) {
        self.release_part(tensor, 0..tensor.bytes as usize);
    }

    /// As [`File::release`], of some of the tensor's bytes.
    ///
    /// # Panics
    /// If the tensor is not from this file, or has fewer bytes.
    pub fn release_part(&self, tensor: &Tensor, bytes: Range<usize>) {
        if let Some((map, offset)) = self.mapped(tensor, &bytes) {
            map.release(offset, bytes.len());
        }
    }

    /// Whether the data of a tensor are made of others when they are read.
    pub fn is_derived(&self, tensor: &Tensor) -> bool {
        matches!(self.shards[tensor.shard], Bytes::Derived(_))
    }

    /// Tells the system to read mapped pages that hold some bytes of a tensor, without waiting for
    /// them (`madvise`).
    ///
    /// # Panics
    /// As [`File::release_part`].
    pub fn will_need(&self, tensor: &Tensor, bytes: Range<usize>) {
        if let Some((map, offset)) = self.mapped(tensor, &bytes) {
            map.will_need(offset, bytes.len());
        }
    }

    /// The map that holds some bytes of a tensor, and where in it they begin.
    fn mapped(&self, tensor: &Tensor, bytes: &Range<usize>) -> Option<(&Map, usize)> {
        assert!(bytes.end <= tensor.bytes as usize, "{} has {} bytes", tensor.name, tensor.bytes);
        match &self.shards[tensor.shard] {
            Bytes::Mapped(map) => Some((map, tensor.offset as usize + bytes.start)),
            Bytes::Owned(_) | Bytes::Derived(_) => None,
        }
    }

    /// Fails if another process has truncated a mapped part, or has written to it, since it was
    /// opened.
    ///
    /// # Errors
    /// [`Error::Truncated`], [`Error::Changed`], or an I/O error of the operating system.
    pub fn check_unchanged(&self) -> Result<()> {
        self.shards.iter().try_for_each(|bytes| match bytes {
            Bytes::Mapped(map) => map.check_unchanged(),
            Bytes::Owned(_) | Bytes::Derived(_) => Ok(()),
        })
    }

    /// The size of all tensor data, in bytes.
    pub fn bytes(&self) -> u64 {
        self.tensors.iter().map(|tensor| tensor.bytes).sum()
    }

    fn from_part(path: &Path, bytes: Bytes, header: Header) -> File {
        let mut file = File {
            path: path.to_path_buf(),
            version: header.version,
            alignment: header.alignment,
            metadata: header.metadata,
            tensors: header.tensors,
            by_name: HashMap::new(),
            shards: vec![bytes],
        };
        file.release_header(0);
        header.paired.into_iter().for_each(|index| file.convert_tensor(index, unpair_mxfp4));
        file
    }

    /// Releases the header's pages of a mapped part.
    fn release_header(&self, shard: usize) {
        let in_shard = self.tensors.iter().filter(|tensor| tensor.shard == shard);
        let len = in_shard.map(|tensor| tensor.offset as usize).min();
        if let (Bytes::Mapped(map), Some(len)) = (&self.shards[shard], len) {
            map.release(0, len);
        }
    }

    /// Adds parts 2 to `count` to a file that holds the first.
    fn load_other_parts(&mut self, count: u32) -> Result<()> {
        let first = self.path.clone();
        let names = check_first_part(&first, &self.metadata, count)?;
        for number in 2..=count {
            let path = names.path_of(number);
            let bytes = Map::open(&path)?;
            let header = header::parse(&path, &bytes)?;
            check_part(&path, &header.metadata, number, count)?;
            let (shard, first) = (self.shards.len(), self.tensors.len());
            self.tensors.extend(header.tensors.into_iter().map(|t| Tensor { shard, ..t }));
            self.shards.push(Bytes::Mapped(bytes));
            self.release_header(shard);
            let paired = header.paired.into_iter();
            paired.for_each(|index| self.convert_tensor(first + index, unpair_mxfp4));
        }
        let expected = split_number(&first, &self.metadata, "split.tensors.count")?;
        match expected {
            Some(expected) if expected as usize != self.tensors.len() => Err(Error::invalid(
                &first,
                "metadata key `split.tensors.count`",
                format!("{expected} tensors in all {count} parts"),
                self.tensors.len().to_string(),
            )),
            _ => Ok(()),
        }
    }

    /// Fills `by_name`. Names are unique within a part; this checks them across parts.
    fn index(mut self) -> Result<File> {
        for (index, tensor) in self.tensors.iter().enumerate() {
            if self.by_name.insert(tensor.name.clone(), index).is_some() {
                let expected = "one tensor of this name".to_owned();
                let found = format!("a second one in part {}", tensor.shard + 1);
                return Err(Mismatch { expected, found }.in_tensor(&self.path, &tensor.name));
            }
        }
        Ok(self)
    }
}

/// Reads one of the `split.*` keys as a number.
fn split_number(file: &Path, metadata: &Metadata, key: &str) -> Result<Option<u32>> {
    metadata.u32(key).map_err(|error| match error {
        Error::WrongType { expected, found, .. } => {
            Error::invalid(file, format!("metadata key `{key}`"), expected, found)
        }
        other => other,
    })
}

/// Checks that a path is the first part of a split file, by its name and its metadata.
fn check_first_part(path: &Path, metadata: &Metadata, count: u32) -> Result<PartName> {
    let number = split_number(path, metadata, "split.no")?.unwrap_or(0).saturating_add(1);
    let names = PartName::parse(path).filter(|names| names.count == count);
    if number != 1 {
        let first = match &names {
            Some(names) => names.path_of(1).display().to_string(),
            None => format!("*-00001-of-{count:05}.gguf"),
        };
        let found = format!("part {number} of {count}");
        return Err(Error::invalid(path, "split file", format!("the first part, {first}"), found));
    }
    match names {
        Some(names) if names.number == 1 => Ok(names),
        _ => {
            let expected = format!("the name *-00001-of-{count:05}.gguf");
            let found = format!("the first of {count} parts under another name");
            Err(Error::invalid(path, "split file", expected, found))
        }
    }
}

/// Checks that the metadata of a further part agree with its name.
fn check_part(path: &Path, metadata: &Metadata, number: u32, count: u32) -> Result<()> {
    let found_number = split_number(path, metadata, "split.no")?;
    let found_count = split_number(path, metadata, "split.count")?;
    if found_number == Some(number - 1) && found_count == Some(count) {
        return Ok(());
    }
    let show = |value: Option<u32>| value.map_or("none".to_string(), |value| value.to_string());
    Err(Error::invalid(
        path,
        "split file",
        format!("split.no {} and split.count {count}", number - 1),
        format!("split.no {} and split.count {}", show(found_number), show(found_count)),
    ))
}
