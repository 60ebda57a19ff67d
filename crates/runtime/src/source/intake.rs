//! Files on their way into the cache, hashed while they are written, and the verification of files
//! that are there. This module must not know where files come from.

use std::fs::{self, File};
use std::io::{Read, Seek, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::error::{Error, Result};
use crate::progress::Reporter;

/// How a model that is already on this machine is verified.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Check {
    /// By size: enough to use a model.
    Size,
    /// By size and hash.
    Hash,
}

/// The required size and hash of a file, whichever source delivers it.
#[derive(Clone, Deserialize)]
pub(crate) struct Pin {
    pub(crate) bytes: u64,
    /// Lower-case hexadecimal.
    pub(crate) sha256: String,
}

/// One verified file.
#[derive(Clone, Serialize, Deserialize)]
pub(crate) struct StoredFile {
    /// Plain file name inside the entry's folder.
    pub(crate) name: String,
    pub(crate) bytes: u64,
    /// Lower-case hexadecimal.
    pub(crate) sha256: String,
    /// The kind of a layer beside the model's own files.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) layer: Option<String>,
}

impl StoredFile {
    /// Fails unless the file is the pinned one.
    pub(crate) fn must_be(&self, pin: &Pin) -> Result<()> {
        expect_bytes(&self.name, pin.bytes, self.bytes)?;
        expect_sha256(&self.name, &pin.sha256, &self.sha256)
    }
}

/// A file that is hashed while it is written.
pub(crate) struct Intake {
    path: PathBuf,
    file: File,
    hash: Sha256,
    bytes: u64,
}

impl Intake {
    /// A new file, in place of any other.
    pub(crate) fn create(path: PathBuf) -> Result<Intake> {
        let mut intake = Intake::open(path)?;
        intake.restart()?;
        Ok(intake)
    }

    /// Continues a file of which this may be the beginning; a longer one starts again.
    pub(crate) fn resume(path: PathBuf, bytes: u64, reporter: &Reporter) -> Result<Intake> {
        let mut intake = Intake::open(path)?;
        let found = intake.file.metadata().map_err(Error::io(intake.shown()))?.len();
        if found > bytes {
            intake.restart()?;
        } else if found > 0 {
            intake.bytes = found;
            let shown = intake.shown();
            let what = "what was downloaded before";
            hash(&mut intake.file, &mut intake.hash, &shown, what, found, reporter)?;
        }
        Ok(intake)
    }

    fn open(path: PathBuf) -> Result<Intake> {
        let mut options = File::options();
        let file = options.create(true).truncate(false).read(true).write(true).open(&path);
        let file = file.map_err(Error::io(format!("cannot create {}", path.display())))?;
        Ok(Intake { path, file, hash: Sha256::new(), bytes: 0 })
    }

    /// Starts again with an empty file.
    pub(crate) fn restart(&mut self) -> Result<()> {
        let emptied = self.file.set_len(0).and_then(|()| self.file.rewind());
        emptied.map_err(Error::io(self.shown()))?;
        (self.hash, self.bytes) = (Sha256::new(), 0);
        Ok(())
    }

    /// The bytes that the file has.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The hash of these bytes, in lower-case hexadecimal.
    pub(crate) fn sha256(&self) -> String {
        hex(self.hash.clone())
    }

    /// Syncs the file to the disk. It is to become `name`.
    pub(crate) fn finish(self, name: &str) -> Result<Staged> {
        self.file.sync_all().map_err(Error::io(format!("cannot write {}", self.shown())))?;
        let (name, sha256) = (name.to_owned(), self.sha256());
        let file = StoredFile { name, bytes: self.bytes, sha256, layer: None };
        Ok(Staged { file, path: self.path })
    }

    fn shown(&self) -> String {
        self.path.display().to_string()
    }
}

impl Write for Intake {
    fn write(&mut self, data: &[u8]) -> std::io::Result<usize> {
        let written = self.file.write(data)?;
        self.hash.update(&data[..written]);
        self.bytes += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.file.flush()
    }
}

/// A whole file that waits for its entry to be whole.
pub(crate) struct Staged {
    pub(crate) file: StoredFile,
    pub(crate) path: PathBuf,
}

/// Opens a file of a store. A pipe is an error, as reading it would wait for a writer.
pub(super) fn open_stored(path: &Path) -> Result<File> {
    let shown = path.display().to_string();
    let metadata = fs::metadata(path).map_err(Error::io(&shown))?;
    if !metadata.is_file() {
        let found = bodkin_gguf::kind_of_file(metadata.file_type());
        return Err(Error::mismatch(shown, "a file", found));
    }
    File::open(path).map_err(Error::io(shown))
}

/// Fails unless the file at `path` has this size, and this SHA-256 if `check` includes it.
pub(crate) fn verify_file(
    path: &Path,
    bytes: u64,
    sha256: &str,
    check: Check,
    reporter: &Reporter,
) -> Result<()> {
    let shown = path.display().to_string();
    let metadata = fs::metadata(path).map_err(Error::io(&shown))?;
    expect_bytes(&shown, bytes, metadata.len())?;
    if check == Check::Hash {
        let mut file = open_stored(path)?;
        let mut found = Sha256::new();
        let what = path.file_name().unwrap_or_default().to_string_lossy();
        hash(&mut file, &mut found, &shown, &what, bytes, reporter)?;
        expect_sha256(&shown, sha256, &hex(found))?;
    }
    Ok(())
}

/// Fails unless a file has the expected size.
pub(super) fn expect_bytes(name: &str, expected: u64, found: u64) -> Result<()> {
    match found == expected {
        true => Ok(()),
        false => Err(Error::mismatch(name, format!("{expected} bytes"), found)),
    }
}

/// Fails unless a file has the expected SHA-256.
pub(super) fn expect_sha256(name: &str, expected: &str, found: &str) -> Result<()> {
    match found.eq_ignore_ascii_case(expected) {
        true => Ok(()),
        false => Err(Error::mismatch(name, format!("SHA-256 {expected}"), found)),
    }
}

/// The SHA-256 of a text.
pub(crate) fn sha256_of(text: &str) -> String {
    hex(Sha256::new_with_prefix(text))
}

/// The bytes of a file, unless a list of files says that there are more than any model has.
pub(crate) fn plausible_bytes(what: &str, bytes: u64) -> Result<u64> {
    const MOST: u64 = 1 << 44;
    match bytes {
        ..=MOST => Ok(bytes),
        _ => Err(Error::mismatch(what, format!("at most {MOST} bytes"), bytes)),
    }
}

/// Whether this is a SHA-256 in hexadecimal.
pub(crate) fn is_sha256(text: &str) -> bool {
    text.len() == 64 && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// Adds the rest of a file of about `bytes` bytes to a hash.
fn hash(
    file: &mut File,
    into: &mut Sha256,
    shown: &str,
    what: &str,
    bytes: u64,
    reporter: &Reporter,
) -> Result<()> {
    let phase = reporter.begin(&format!("verifying {what}"), Some(bytes));
    let mut buffer = vec![0; 1 << 20];
    loop {
        match file.read(&mut buffer).map_err(Error::io(shown))? {
            0 => return Ok(()),
            read => {
                into.update(&buffer[..read]);
                phase.add(read as u64);
            }
        }
    }
}

fn hex(hash: Sha256) -> String {
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(unix)]
#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pipe_in_a_store_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("latest");
        assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
        let error = open_stored(&path).unwrap_err().to_string();
        assert!(error.contains("expected a file, found a named pipe"), "{error}");
    }
}
