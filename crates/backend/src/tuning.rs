//! What backends measure when a model is loaded to launch kernels faster: how it is measured, and
//! the file that keeps it, lines of text. It decides speed and never results.

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// The time for the measurements of a load; the next load makes those that are missing.
pub const TIME_LIMIT: Duration = Duration::from_secs(2);
/// Bytes of weights that a measurement reads, so that they come from memory and not from a cache.
pub const MEASURED_BYTES: usize = 128 << 20;
/// Interleaved runs of each candidate, of which the fastest counts.
pub const RUNS: usize = 3;
/// What another candidate may take, of the built-in one's time, to take its place.
const FASTER: f64 = 0.97;

/// The index of the candidate to use, from the seconds of each, the built-in one first.
pub fn fastest(seconds: &[f64]) -> usize {
    let limit = FASTER * seconds[0];
    let others = (1..seconds.len()).filter(|&i| seconds[i] < limit);
    others.min_by(|&a, &b| seconds[a].total_cmp(&seconds[b])).unwrap_or(0)
}

/// A checksum of kernels (FNV-1a): those of another version have another one.
pub fn checksum(bytes: impl IntoIterator<Item = u8>) -> u64 {
    let add = |sum: u64, byte| (sum ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
    bytes.into_iter().fold(0xcbf2_9ce4_8422_2325, add)
}

/// Larger files are not read.
const MAX_BYTES: u64 = 1 << 20;

/// The file in `folder` of a device, its driver, and a checksum of the backend's kernels.
pub fn path(folder: &Path, device: &str, driver: &str, kernels: u64) -> PathBuf {
    let plain = |c: char| if c.is_ascii_alphanumeric() { c } else { '-' };
    let name: String = format!("{device} {driver}").chars().map(plain).collect();
    folder.join(format!("{name}-{kernels:016x}.txt"))
}

/// The text of a file; none of one that cannot be read, or is too large.
pub fn read(path: &Path) -> String {
    let mut text = String::new();
    let file = File::open(path).map(|file| file.take(MAX_BYTES + 1));
    match file.and_then(|mut file| file.read_to_string(&mut text)) {
        Ok(bytes) if bytes as u64 <= MAX_BYTES => text,
        _ => String::new(),
    }
}

/// Writes a file in one rename. Without it the next load measures again, so it may fail, or lose
/// what another process has measured meanwhile.
pub fn write(path: &Path, text: &str) {
    static WRITES: AtomicU64 = AtomicU64::new(0);
    let (process, write) = (std::process::id(), WRITES.fetch_add(1, Relaxed));
    let temporary = path.with_extension(format!("{process}-{write}.tmp"));
    let folder = path.parent().map_or(Ok(()), fs::create_dir_all);
    let written = folder.and_then(|()| fs::write(&temporary, text));
    if written.and_then(|()| fs::rename(&temporary, path)).is_err() {
        let _ = fs::remove_file(&temporary);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_candidate_has_to_be_clearly_faster() {
        assert_eq!(fastest(&[1.0]), 0);
        assert_eq!(fastest(&[1.0, 0.98, 2.0]), 0);
        assert_eq!(fastest(&[1.0, 0.9, 0.8, 0.85]), 2);
        assert_eq!(fastest(&[1.0, f64::NAN, f64::MAX]), 0);
        assert_eq!(checksum(*b"a"), 0xaf63_dc4c_8601_ec8c);
    }

    #[test]
    fn a_file_is_written_whole_or_not_at_all() {
        let folder = std::env::temp_dir().join(format!("bodkin-tuning-{}", std::process::id()));
        let path = path(&folder.join("tuning"), "NVIDIA A100/80GB ..\\x", "12.4", 0xab);
        assert!(path.ends_with("tuning/NVIDIA-A100-80GB----x-12-4-00000000000000ab.txt"));
        assert_eq!(read(&path), "");
        write(&path, "a line\n");
        assert_eq!(read(&path), "a line\n");
        let names = fs::read_dir(path.parent().expect("a folder")).expect("it");
        assert_eq!(names.count(), 1);
        write(&path.join("below a file"), "lost");
        assert_eq!(read(&path), "a line\n");
        fs::write(&path, "x".repeat(MAX_BYTES as usize + 1)).expect("a file");
        assert_eq!(read(&path), "", "too large");
        fs::remove_dir_all(&folder).expect("a folder");
    }
}
