//! What this machine has: free memory, and how fast it is read.

use std::path::Path;
use std::time::Instant;

use crate::isa::Isa;
use crate::memory::AlignedMemory;
use crate::pool::Pool;
use crate::shared::Shared;
use crate::vector::{Vector, dispatch};

/// Larger than most last-level caches; less where memory is short.
const BYTES_MAX: u64 = 512 << 20;
/// Passes, of which the fastest counts: others may be using the memory too.
const PASSES: usize = 4;

/// Bytes a second that all threads of `pool` read together.
pub(crate) fn bandwidth(isa: Isa, pool: &mut Pool) -> f64 {
    let quarter = available_memory().map_or(BYTES_MAX, |bytes| bytes / 4);
    let len = quarter.clamp(1 << 20, BYTES_MAX) as usize;
    let mut memory = AlignedMemory::zeroed(len);
    let bytes = Shared::new(memory.bytes_mut());
    let part = |share: std::ops::Range<usize>| share.start / 64 * 64..share.end / 64 * 64;
    // Pages that were never written are all the same page of zeros.
    // SAFETY: the shares do not overlap.
    pool.run(&|worker| unsafe { bytes.part_mut(part(worker.share(len))) }.fill(1));
    let mut best = f64::MAX;
    for _ in 0..PASSES {
        let start = Instant::now();
        pool.run(&|worker| {
            // SAFETY: nobody writes any more.
            let bytes = unsafe { bytes.part(part(worker.share(len))) };
            let sum = dispatch!(isa, read_all(bytes: &[u8]) -> f32);
            assert!(sum >= 0.0, "the bytes were read");
        });
        best = best.min(start.elapsed().as_secs_f64());
    }
    len as f64 / best
}

/// The sum of the bytes read as f32, by eight sums that do not wait for each other.
#[inline(always)]
unsafe fn read_all<V: Vector>(bytes: &[u8]) -> f32 {
    // SAFETY: whole vectors of the slice; the caller keeps the contract of `Vector`.
    unsafe {
        let mut sums = [V::splat(0.0); 8];
        for chunk in bytes.chunks_exact(8 * 64) {
            for (i, sum) in sums.iter_mut().enumerate() {
                *sum = sum.add(V::load(chunk.as_ptr().add(64 * i).cast()));
            }
        }
        sums.into_iter().fold(V::splat(0.0), |a, b| a.add(b)).sum()
    }
}

/// Bytes that programs can still take, where the system says so: of the machine, or of the
/// container if that has a limit.
pub(crate) fn available_memory() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kilobytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    let machine = kilobytes * 1024;
    Some(container_memory().map_or(machine, |container| container.min(machine)))
}

/// What control groups of version 2 leave, if they set a limit: the least that this process's group
/// or any around it has left.
fn container_memory() -> Option<u64> {
    let groups = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    let own = groups.lines().find_map(|line| line.strip_prefix("0::/"))?;
    let left = |group: &Path| {
        let read = |name: &str| {
            let text = std::fs::read_to_string(group.join(name)).ok()?;
            text.trim().parse::<u64>().ok()
        };
        Some(read("memory.max")?.saturating_sub(read("memory.current")?))
    };
    let root = Path::new("/sys/fs/cgroup");
    let around = Path::new(own).ancestors().map(|group| root.join(group));
    around.filter_map(|group| left(&group)).min()
}
