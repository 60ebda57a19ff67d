//! Memory: global memory, which is host memory here, and the address windows of shared, local and
//! parameter memory. Every access must be inside one allocation.

use std::alloc::{Layout, alloc, dealloc};
use std::collections::{BTreeMap, BTreeSet};

use crate::Fault;

/// The generic address window of a block's shared memory.
pub(crate) const SHARED: u64 = 1 << 60;
/// The generic address window of a thread's local memory.
pub(crate) const LOCAL: u64 = 2 << 60;
/// The generic address window of kernel parameters.
pub(crate) const PARAMETERS: u64 = 3 << 60;
/// The bits of an address that select its window.
pub(crate) const WINDOW: u64 = 15 << 60;

/// The alignment of allocations, in bytes.
const ALIGNMENT: usize = 256;

/// Allocations of global memory, and memory of the program that is registered as such.
#[derive(Default)]
pub(crate) struct Memory {
    /// The bytes of each, by its address.
    allocations: BTreeMap<u64, usize>,
    /// The addresses of those that the program owns.
    registered: BTreeSet<u64>,
    bytes: usize,
}

impl Memory {
    /// Allocates memory, if the total does not exceed `capacity`.
    pub(crate) fn allocate(&mut self, bytes: usize, capacity: usize) -> Option<u64> {
        if bytes > capacity - self.bytes.min(capacity) {
            return None;
        }
        let layout = Layout::from_size_align(bytes.max(1), ALIGNMENT).ok()?;
        // SAFETY: the size is not zero.
        let start = unsafe { alloc(layout) };
        if start.is_null() {
            return None;
        }
        // All ones are NaN in every float type, so reads of uninitialised memory show.
        // SAFETY: just allocated.
        unsafe { start.write_bytes(0xff, bytes) };
        self.bytes += bytes;
        self.allocations.insert(start as u64, bytes);
        Some(start as u64)
    }

    /// Registers memory of the program, if it is not known yet and the total does not exceed
    /// `capacity`.
    pub(crate) fn register(&mut self, start: u64, bytes: usize, capacity: usize) -> bool {
        let has_room = bytes <= capacity - self.bytes.min(capacity);
        let is_new = has_room && self.allocation(start, bytes).is_err();
        if is_new {
            self.registered.insert(start);
            self.bytes += bytes;
            self.allocations.insert(start, bytes);
        }
        is_new
    }

    /// Forgets registered memory; false if there is none at the address.
    pub(crate) fn unregister(&mut self, start: u64) -> bool {
        let is_registered = self.registered.remove(&start);
        if is_registered {
            self.bytes -= self.allocations.remove(&start).unwrap_or(0);
        }
        is_registered
    }

    /// Frees an allocation; false if there is none at the address.
    pub(crate) fn free(&mut self, start: u64) -> bool {
        if self.registered.contains(&start) {
            return false;
        }
        let Some(bytes) = self.allocations.remove(&start) else { return false };
        self.bytes -= bytes;
        let layout = Layout::from_size_align(bytes.max(1), ALIGNMENT).expect("as allocated");
        // SAFETY: allocated with this layout.
        unsafe { dealloc(start as *mut u8, layout) };
        true
    }

    /// Bytes of all allocations.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// The start and end of the allocation that contains the bytes.
    pub(crate) fn allocation(&self, address: u64, bytes: usize) -> Result<[u64; 2], Fault> {
        let before = self.allocations.range(..=address).next_back();
        let found = before.filter(|&(start, len)| {
            address.checked_add(bytes as u64).is_some_and(|end| end <= start + *len as u64)
        });
        found.map(|(&start, &len)| [start, start + len as u64]).ok_or_else(|| match before {
            Some((start, len)) => {
                let offset = address - start;
                Fault(format!("out of bounds: {bytes} bytes at offset {offset} of {len} bytes"))
            }
            None => Fault(format!("out of bounds: {bytes} bytes at {address:#x}, not allocated")),
        })
    }
}
