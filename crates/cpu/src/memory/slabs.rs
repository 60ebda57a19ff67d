//! A slab allocator over huge pages. A mapping of a few megabytes per weight would start and end
//! between huge pages and use small pages there: a quarter of the bytes of a 1B model. Slabs start
//! on a huge page and hold contiguous weights. A slab is unmapped when it is empty.

use std::io;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

use memmap2::{Advice, MmapMut};

/// The least size of a slab. The system commits only pages that were written.
const SLAB_BYTES: usize = 64 << 20;
/// A huge page.
const PAGE_BYTES: usize = 2 << 20;
/// The alignment of parts.
const LINE_BYTES: usize = 64;

struct Slab {
    map: MmapMut,
    /// The usable bytes of the map, from the first huge page on.
    bytes: Range<usize>,
    /// Free ranges, sorted and coalesced.
    free: Vec<Range<usize>>,
    /// The first byte that was never allocated: from here on, memory is zero.
    fresh: usize,
}

static SLABS: Mutex<Vec<Slab>> = Mutex::new(Vec::new());

fn slabs() -> MutexGuard<'static, Vec<Slab>> {
    // Nothing panics while slabs are changed.
    SLABS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Bytes of all allocations.
pub(super) fn allocated_bytes() -> usize {
    let used = |slab: &Slab| slab.bytes.len() - slab.free.iter().map(Range::len).sum::<usize>();
    slabs().iter().map(used).sum()
}

/// An allocation in a slab.
pub(super) struct Part {
    start: *mut u8,
    bytes: usize,
    is_locked: bool,
}

// SAFETY: a part is memory that it alone owns.
unsafe impl Send for Part {}
// SAFETY: it only hands out the pointer.
unsafe impl Sync for Part {}

impl Part {
    /// `bytes` zeros; none if the system has no memory to map.
    pub(super) fn zeroed(bytes: usize) -> Option<Part> {
        let bytes = bytes.next_multiple_of(LINE_BYTES);
        let mut slabs = slabs();
        let start = match slabs.iter_mut().find_map(|slab| slab.take(bytes)) {
            Some(start) => start,
            None => {
                slabs.push(Slab::with(bytes)?);
                slabs.last_mut()?.take(bytes)?
            }
        };
        Some(Part { start, bytes, is_locked: false })
    }

    pub(super) fn start(&self) -> *mut u8 {
        self.start
    }

    /// Lets the system swap out none of its pages, from when each is first written.
    pub(super) fn lock(&mut self) -> io::Result<()> {
        // SAFETY: the range is mapped, and its bytes stay as they are.
        let failed = unsafe { libc::mlock2(self.start.cast(), self.bytes, libc::MLOCK_ONFAULT) };
        self.is_locked = failed == 0;
        if self.is_locked { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        if self.is_locked {
            // SAFETY: the range is mapped. A page that a neighbour has a part of is only unlocked.
            let _ = unsafe { libc::munlock(self.start.cast(), self.bytes) };
        }
        let mut slabs = slabs();
        let owner = slabs.iter().position(|slab| slab.has(self.start));
        let owner = owner.expect("a part lies in a slab until it is dropped");
        slabs[owner].give_back(self.start, self.bytes);
        if slabs[owner].is_free() {
            slabs.swap_remove(owner);
        }
    }
}

impl Slab {
    /// A slab that fits a part.
    fn with(bytes: usize) -> Option<Slab> {
        let bytes = bytes.next_multiple_of(PAGE_BYTES).max(SLAB_BYTES);
        let map = MmapMut::map_anon(bytes + PAGE_BYTES).ok()?;
        // Huge pages are optional: without them there are more TLB misses.
        let _ = map.advise(Advice::HugePage);
        let first = map.as_ptr().addr().next_multiple_of(PAGE_BYTES) - map.as_ptr().addr();
        let bytes = first..first + bytes;
        Some(Slab { map, free: vec![bytes.clone()], fresh: bytes.start, bytes })
    }

    fn has(&self, part: *mut u8) -> bool {
        self.map.as_ptr_range().contains(&part.cast_const())
    }

    fn is_free(&self) -> bool {
        self.free == [self.bytes.clone()]
    }

    /// Allocates zeros in the first free range that is long enough.
    fn take(&mut self, bytes: usize) -> Option<*mut u8> {
        let place = self.free.iter().position(|free| free.len() >= bytes)?;
        let start = self.free[place].start;
        let end = start + bytes;
        self.free[place].start = end;
        if self.free[place].is_empty() {
            self.free.remove(place);
        }
        let part = self.map.as_mut_ptr().wrapping_add(start);
        // Memory that was allocated before is not zero.
        // SAFETY: the range was free.
        unsafe { part.write_bytes(0, end.min(self.fresh).saturating_sub(start)) };
        self.fresh = self.fresh.max(end);
        Some(part)
    }

    fn give_back(&mut self, part: *mut u8, bytes: usize) {
        let start = part.addr() - self.map.as_ptr().addr();
        let place = self.free.partition_point(|free| free.start < start);
        self.free.insert(place, start..start + bytes);
        for place in [place, place.wrapping_sub(1)] {
            if let Some([before, after]) = self.free.get(place..).and_then(<[_]>::first_chunk)
                && before.end == after.start
            {
                self.free[place].end = after.end;
                self.free.remove(place + 1);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_zero_and_come_back() {
        let mut slab = Slab::with(1).unwrap();
        let sizes = [64, 4096, 128, 1 << 20];
        for round in 0..3 {
            let parts: Vec<_> = sizes.iter().map(|&bytes| slab.take(bytes).unwrap()).collect();
            for (i, (&part, &bytes)) in parts.iter().zip(&sizes).enumerate() {
                assert!(slab.has(part) && part.addr() % LINE_BYTES == 0);
                // SAFETY: the slab gave this part, and nobody else has it.
                let part = unsafe { std::slice::from_raw_parts_mut(part, bytes) };
                assert!(part.iter().all(|&byte| byte == 0), "part {i} of round {round}");
                part.fill(1);
            }
            assert!(!slab.is_free());
            for i in [1, 3, 0, 2] {
                slab.give_back(parts[i], sizes[i]);
            }
            assert!(slab.is_free(), "{:?}", slab.free);
        }
        assert!(slab.take(SLAB_BYTES).is_some() && slab.take(64).is_none());
    }

    #[test]
    fn a_locked_part_is_locked_until_it_is_dropped() {
        let mut part = Part::zeroed(SLAB_BYTES).unwrap();
        let start = part.start().addr();
        // Emulators, and users without the right to lock memory, cannot.
        if part.lock().is_err() {
            return;
        }
        // SAFETY: no other part has the byte.
        unsafe { part.start().write(1) };
        // The flags of the mapping with the part's first byte.
        let is_locked = || {
            let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
            let mut lines = maps.lines().skip_while(|line| {
                let range = line.split(' ').next().and_then(|range| range.split_once('-'));
                let bound = |text| usize::from_str_radix(text, 16).ok();
                let range = range.and_then(|(from, to)| Some(bound(from)?..bound(to)?));
                !range.is_some_and(|range| range.contains(&start))
            });
            let flags = lines.find(|line| line.starts_with("VmFlags:"));
            flags.is_some_and(|flags| flags.split(' ').any(|flag| flag == "lo"))
        };
        assert!(is_locked());
        drop(part);
        assert!(!is_locked());
    }

    #[test]
    fn slabs_begin_with_a_huge_page() {
        let mut slab = Slab::with(3 * SLAB_BYTES + 1).unwrap();
        assert_eq!(slab.take(3 * SLAB_BYTES + 1).unwrap().addr() % PAGE_BYTES, 0);
    }
}
