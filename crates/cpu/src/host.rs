//! What this machine has: free memory, and how fast it is read.

use std::time::Instant;

use crate::pool::Pool;

/// Larger than most last-level caches.
const BYTES: usize = 512 << 20;
/// Passes, of which the fastest counts: others may be using the memory too.
const PASSES: usize = 4;

/// Bytes a second that all threads of `pool` read together.
pub(crate) fn bandwidth(pool: &mut Pool) -> f64 {
    let words = vec![1u64; BYTES / 8];
    let mut best = f64::MAX;
    for _ in 0..PASSES {
        let start = Instant::now();
        pool.run(&|worker| {
            let part = &words[worker.share(words.len())];
            let sums = part.chunks_exact(64).fold([0u64; 64], |mut sums, chunk| {
                sums.iter_mut().zip(chunk).for_each(|(s, w)| *s = s.wrapping_add(*w));
                sums
            });
            assert_ne!(sums.iter().sum::<u64>(), 0, "the words were read");
        });
        best = best.min(start.elapsed().as_secs_f64());
    }
    BYTES as f64 / best
}

/// Bytes that programs can still take, where the system says so.
pub(crate) fn available_memory() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kilobytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kilobytes * 1024)
}
