//! Read-only memory maps of files. The only module of this crate with `unsafe` code.

#![allow(unsafe_code)]

use std::fs;
use std::path::Path;

use memmap2::Mmap;

use crate::error::{Error, Result};

/// Maps a regular file into memory.
pub(super) fn map(path: &Path) -> Result<Mmap> {
    let metadata = fs::metadata(path).map_err(|source| Error::io(path, "open", source))?;
    if metadata.is_dir() {
        return Err(Error::Directory { file: path.to_path_buf() });
    }
    if !metadata.is_file() {
        let found = "a device, pipe or socket";
        return Err(Error::invalid(path, "file type", "a regular file", found));
    }
    let file = fs::File::open(path).map_err(|source| Error::io(path, "open", source))?;
    // SAFETY: the map is only read. Another process that truncates the file while it is mapped ends
    // this process with SIGBUS, and one that writes to it changes weights. Neither can be prevented
    // here, and both are the price of not copying gigabytes.
    let mapped = unsafe { Mmap::map(&file) };
    mapped.map_err(|source| Error::io(path, "map", source))
}

/// Releases the pages that are wholly in the range: the system reads them again when needed.
#[cfg(unix)]
pub(super) fn release_pages(map: &Mmap, offset: usize, len: usize) {
    // Where pages are larger, the system refuses, and the pages stay.
    const PAGE: usize = 4096;
    let (start, end) = (offset.next_multiple_of(PAGE), (offset + len) / PAGE * PAGE);
    if start < end {
        let advice = memmap2::UncheckedAdvice::DontNeed;
        // SAFETY: the map is shared with the file and never written, so released pages are read
        // again with the same bytes.
        let _ = unsafe { map.unchecked_advise_range(advice, start, end - start) };
    }
}
