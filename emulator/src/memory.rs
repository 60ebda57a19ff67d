//! Memory that kernels reach by addresses: the device's, which is the host's here, and, by generic
//! addresses, a block's and a thread's own. Every access must lie within something that was taken.

use std::alloc::{Layout, alloc, dealloc};
use std::collections::BTreeMap;

use crate::Fault;

/// Where generic addresses of a block's shared memory begin.
pub(crate) const SHARED: u64 = 1 << 60;
/// Where those of a thread's own memory begin.
pub(crate) const LOCAL: u64 = 2 << 60;
/// Where those of a kernel's parameters begin.
pub(crate) const PARAMETERS: u64 = 3 << 60;
/// Which of them an address belongs to.
pub(crate) const WINDOW: u64 = 15 << 60;

/// What addresses are aligned to.
const ALIGNMENT: usize = 256;

/// Everything that was taken of the device, by its start.
#[derive(Default)]
pub(crate) struct Memory {
    taken: BTreeMap<u64, usize>,
    bytes: usize,
}

impl Memory {
    /// Takes memory; what is in it is anything.
    pub(crate) fn take(&mut self, bytes: usize, most: usize) -> Option<u64> {
        if bytes > most - self.bytes.min(most) {
            return None;
        }
        let layout = Layout::from_size_align(bytes.max(1), ALIGNMENT).ok()?;
        // SAFETY: the size is not zero.
        let start = unsafe { alloc(layout) };
        if start.is_null() {
            return None;
        }
        // Numbers that are not numbers, whatever their type.
        // SAFETY: taken just now.
        unsafe { start.write_bytes(0xff, bytes) };
        self.bytes += bytes;
        self.taken.insert(start as u64, bytes);
        Some(start as u64)
    }

    /// Gives back what was taken, if it was.
    pub(crate) fn give_back(&mut self, start: u64) -> bool {
        let Some(bytes) = self.taken.remove(&start) else { return false };
        self.bytes -= bytes;
        let layout = Layout::from_size_align(bytes.max(1), ALIGNMENT).expect("as it was taken");
        // SAFETY: taken with this layout.
        unsafe { dealloc(start as *mut u8, layout) };
        true
    }

    /// Bytes that are taken.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// The range that holds so many bytes from an address on.
    pub(crate) fn range(&self, address: u64, bytes: usize) -> Result<[u64; 2], Fault> {
        let found = self.taken.range(..=address).next_back();
        let within = found.filter(|&(start, len)| {
            address.checked_add(bytes as u64).is_some_and(|end| end <= start + *len as u64)
        });
        within.map(|(&start, &len)| [start, start + len as u64]).ok_or_else(|| match found {
            Some((start, len)) => {
                let past = address - start;
                Fault(format!("{bytes} bytes {past} behind the start of {len} that were taken"))
            }
            None => Fault(format!("{bytes} bytes at {address:#x}, where nothing was taken")),
        })
    }
}
