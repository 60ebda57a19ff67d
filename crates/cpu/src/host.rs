//! Measurements of the machine: memory bandwidth, available memory and cores.

#[cfg(target_os = "linux")]
#[path = "host/linux.rs"]
mod system;
#[cfg(target_os = "macos")]
#[path = "host/macos.rs"]
mod system;
#[cfg(windows)]
#[path = "host/windows.rs"]
mod system;
#[cfg(not(any(target_os = "linux", target_os = "macos", windows)))]
#[path = "host/other.rs"]
mod system;

use std::time::Instant;

use bodkin_backend::Pool;

use crate::isa::Isa;
use crate::memory::AlignedMemory;
use crate::shared::Shared;
use crate::vector::{Vector, dispatch};

/// Larger than most last-level caches; clamped where memory is short.
const BYTES_MAX: u64 = 512 << 20;
/// Passes, of which the fastest counts: other programs use the memory too.
const PASSES: usize = 4;

/// Measures the bytes per second that all threads of `pool` read together.
pub(crate) fn measure_bandwidth(isa: Isa, pool: &mut Pool) -> f64 {
    let quarter = available_memory().map_or(BYTES_MAX, |bytes| bytes / 4);
    let len = quarter.clamp(1 << 20, BYTES_MAX) as usize;
    let mut memory = AlignedMemory::zeroed(len);
    let bytes = Shared::new(memory.bytes_mut());
    let part = |share: std::ops::Range<usize>| share.start / 64 * 64..share.end / 64 * 64;
    // Untouched pages would all map to the same page of zeros.
    // SAFETY: the shares do not overlap.
    pool.run(&|worker| unsafe { bytes.part_mut(part(worker.share(len))) }.fill(1));
    let mut best = f64::MAX;
    for _ in 0..PASSES {
        let start = Instant::now();
        pool.run(&|worker| {
            // SAFETY: all writes happened in the run before.
            let bytes = unsafe { bytes.part(part(worker.share(len))) };
            let sum = dispatch!(isa, read_all(bytes: &[u8]) -> f32);
            assert!(sum >= 0.0, "the bytes were read");
        });
        best = best.min(start.elapsed().as_secs_f64());
    }
    len as f64 / best
}

/// The sum of the bytes as f32, in eight independent accumulators.
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

/// Bytes that this process can still allocate, if the system says: those of the machine, or of the
/// container or the process if they have a limit.
pub fn available_memory() -> Option<u64> {
    system::available_memory()
}

/// Bytes of the machine's memory, if the system says.
pub(crate) fn total_memory() -> Option<u64> {
    system::total_memory()
}

/// Cores that run at the same speed: a slower one would keep all others waiting at each barrier.
pub(crate) fn equal_cores() -> usize {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    system::performance_cores().map_or(cores, |fast| fast.clamp(1, cores))
}
