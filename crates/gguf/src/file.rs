//! An open GGUF file: the bytes, mapped or owned, and what the header says about them. All checks
//! have been made by the time a [`File`] exists. It must not know block layouts.

mod edit;

use std::borrow::Cow;
use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use memmap2::Mmap;

use crate::format::fp4::unpair_mxfp4;
use crate::header::{self, Header, quoted};
use crate::metadata::Metadata;
use crate::split::PartName;
use crate::{Error, Result, Tensor};

/// A GGUF file, whole or in parts, open for reading.
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
    Mapped(Mmap),
    Owned(Vec<u8>),
    Made(edit::Made),
}

impl Bytes {
    /// The bytes of a shard of `file`.
    fn of<'a>(&'a self, file: &'a File) -> &'a [u8] {
        match self {
            Bytes::Mapped(map) => map,
            Bytes::Owned(vec) => vec,
            Bytes::Made(made) => made.bytes(file),
        }
    }
}

impl File {
    /// Maps a file. The first part of a split file brings all its parts along, as one.
    pub fn open(path: impl AsRef<Path>) -> Result<File> {
        let path = path.as_ref();
        let bytes = map(path)?;
        let header = header::parse(path, &bytes)?;
        let count = split_number(path, &header.metadata, "split.count")?.unwrap_or(1);
        let mut file = File::from_part(path, Bytes::Mapped(bytes), header);
        if count > 1 {
            file.load_other_parts(count)?;
        }
        file.index()
    }

    /// Reads a file that is in memory already. `name` is for messages. A part of a split file is
    /// refused, because the others cannot be found.
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

    /// The path or name that the file was opened by.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Version of the container format, 2 or 3.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// The metadata; those of the first part if the file is split.
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

    /// The stored bytes of a tensor of this file. Nothing is promised about their address.
    ///
    /// # Panics
    /// If the tensor is none of this file's.
    pub fn data(&self, tensor: &Tensor) -> &[u8] {
        let bytes = self.shards[tensor.shard].of(self);
        &bytes[tensor.offset as usize..][..tensor.bytes as usize]
    }

    /// As [`File::data`], to be read once: what is made of other data is made for the caller and
    /// not kept, so that a model's weights are never held a second time.
    ///
    /// # Panics
    /// If the tensor is none of this file's.
    pub fn read(&self, tensor: &Tensor) -> Cow<'_, [u8]> {
        match &self.shards[tensor.shard] {
            Bytes::Made(made) => made.read(self),
            Bytes::Mapped(_) | Bytes::Owned(_) => Cow::Borrowed(self.data(tensor)),
        }
    }

    /// Says that a tensor's bytes are not needed soon, so that the process need not hold them in
    /// memory: the system reads them again if they are. An advice; nothing changes but speed.
    ///
    /// # Panics
    /// If the tensor is none of this file's.
    pub fn release(&self, tensor: &Tensor) {
        #[cfg(unix)]
        if let Bytes::Mapped(map) = &self.shards[tensor.shard] {
            advise_unneeded(map, tensor.offset as usize, tensor.bytes as usize);
        }
    }

    /// How many bytes all tensor data take together.
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
        header.paired.into_iter().for_each(|index| file.remake(index, unpair_mxfp4));
        file
    }

    /// Gives back what a mapped part has before its data: it has been read.
    fn release_header(&self, shard: usize) {
        let of_part = self.tensors.iter().filter(|tensor| tensor.shard == shard);
        let len = of_part.map(|tensor| tensor.offset as usize).min();
        #[cfg(unix)]
        if let (Bytes::Mapped(map), Some(len)) = (&self.shards[shard], len) {
            advise_unneeded(map, 0, len);
        }
    }

    /// Adds parts 2 to `count` to a file that holds the first.
    fn load_other_parts(&mut self, count: u32) -> Result<()> {
        let first = self.path.clone();
        let names = check_first_part(&first, &self.metadata, count)?;
        for number in 2..=count {
            let path = names.path_of(number);
            let bytes = map(&path)?;
            let header = header::parse(&path, &bytes)?;
            check_part(&path, &header.metadata, number, count)?;
            let (shard, first) = (self.shards.len(), self.tensors.len());
            self.tensors.extend(header.tensors.into_iter().map(|t| Tensor { shard, ..t }));
            self.shards.push(Bytes::Mapped(bytes));
            self.release_header(shard);
            header.paired.into_iter().for_each(|index| self.remake(first + index, unpair_mxfp4));
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

    /// Fills `by_name`. Within a part names are unique already; here it is about all of them.
    fn index(mut self) -> Result<File> {
        for (index, tensor) in self.tensors.iter().enumerate() {
            if self.by_name.insert(tensor.name.clone(), index).is_some() {
                return Err(Error::invalid(
                    &self.path,
                    format!("tensor {}", quoted(&tensor.name)),
                    "one tensor of this name",
                    format!("a second one in part {}", tensor.shard + 1),
                ));
            }
        }
        Ok(self)
    }
}

/// Gives back the pages that lie wholly in the range.
#[cfg(unix)]
#[allow(unsafe_code)]
fn advise_unneeded(map: &Mmap, offset: usize, len: usize) {
    // Where pages are larger, the system refuses, and they stay.
    const PAGE: usize = 4096;
    let (start, end) = (offset.next_multiple_of(PAGE), (offset + len) / PAGE * PAGE);
    if start < end {
        let advice = memmap2::UncheckedAdvice::DontNeed;
        // SAFETY: the mapping is shared with the file and never written, so pages that are given
        // back come again with the same bytes.
        let _ = unsafe { map.unchecked_advise_range(advice, start, end - start) };
    }
}

/// Maps a regular file into memory.
#[allow(unsafe_code)]
fn map(path: &Path) -> Result<Mmap> {
    let about = fs::metadata(path).map_err(|source| Error::io(path, "open", source))?;
    if about.is_dir() {
        return Err(Error::Directory { file: path.to_path_buf() });
    }
    if !about.is_file() {
        return Err(Error::invalid(
            path,
            "file type",
            "a regular file",
            "a device, pipe or socket",
        ));
    }
    let file = fs::File::open(path).map_err(|source| Error::io(path, "open", source))?;
    // SAFETY: the map is only read. Another process that shortens the file while it is mapped ends
    // this one with a signal, and one that writes to it changes weights; neither can be prevented
    // here, and both are the accepted price of not copying gigabytes.
    let mapped = unsafe { Mmap::map(&file) };
    mapped.map_err(|source| Error::io(path, "map", source))
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

/// Checks that a path of a split file is the first part and is named like one.
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

/// Checks that a further part is what its name says.
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
