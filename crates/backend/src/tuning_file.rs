//! The file of what a backend has measured of a device: lines of text, which decide speed and never
//! results.

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

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

/// Writes a file in one rename. Without it the next load measures again, so it may fail.
pub fn write(path: &Path, text: &str) {
    let temporary = path.with_extension(format!("{}.tmp", std::process::id()));
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
