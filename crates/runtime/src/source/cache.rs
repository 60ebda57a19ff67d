//! The cache of fetched models. An entry is a folder with the model's files and a record of their
//! sizes and hashes. It gets its name in one rename, after its files are verified and synced, so a
//! folder whose name does not begin with `.` is always complete. This module must not know where
//! models come from.

use std::fs::{self, File, TryLockError};
use std::io::{ErrorKind, Read, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use tempfile::TempDir;

use crate::cleanup::{self, Guard};
use crate::error::{Error, Result};
use crate::progress::Reporter;

const RECORD: &str = "entry.json";
/// Larger records are not read.
const RECORD_BYTES_MAX: u64 = 1 << 20;
/// Separates the entry's id from a random suffix in the name of an unfinished entry's folder.
const UNFINISHED: char = '~';

/// How a model that is already on this machine is verified.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Check {
    /// By size: enough to use a model.
    Size,
    /// By size and hash.
    Hash,
}

/// The required size and hash of a file, whichever source delivers it.
#[derive(Clone, Copy)]
pub(crate) struct Pin {
    pub(crate) bytes: u64,
    /// Lower-case hexadecimal.
    pub(crate) sha256: &'static str,
}

/// One verified file.
#[derive(Clone, Serialize, Deserialize)]
pub(crate) struct StoredFile {
    /// Plain file name inside the entry's folder.
    pub(crate) name: String,
    pub(crate) bytes: u64,
    /// Lower-case hexadecimal.
    pub(crate) sha256: String,
}

impl StoredFile {
    /// Fails unless the file is the pinned one.
    pub(crate) fn must_be(&self, pin: &Pin) -> Result<()> {
        expect_bytes(&self.name, pin.bytes, self.bytes)?;
        expect_sha256(&self.name, pin.sha256, &self.sha256)
    }
}

/// The files that a fetch put into its staging folder.
pub(crate) struct Fetched {
    /// The name that a user types for exactly these files.
    pub(crate) name: String,
    /// The kind of source, for people.
    pub(crate) source: String,
    /// The first is the file to open.
    pub(crate) files: Vec<StoredFile>,
}

/// The record of an entry.
#[derive(Serialize, Deserialize)]
pub(crate) struct Record {
    /// What a user types to get this model.
    pub(crate) name: String,
    /// Where it came from, for people.
    pub(crate) source: String,
    /// The model's files; the first is the one to open.
    pub(crate) files: Vec<StoredFile>,
}

/// A model in the cache.
pub(crate) struct Entry {
    folder: PathBuf,
    pub(crate) record: Record,
}

impl Entry {
    /// The file to open: the model, or the first part of a split one.
    pub(crate) fn path(&self) -> PathBuf {
        self.folder.join(&self.record.files[0].name)
    }

    /// Size of all files together.
    pub(crate) fn bytes(&self) -> u64 {
        self.record.files.iter().map(|file| file.bytes).sum()
    }

    fn read(folder: PathBuf) -> Result<Option<Entry>> {
        let path = folder.join(RECORD);
        let shown = path.display().to_string();
        let text = match File::open(&path) {
            Ok(file) => std::io::read_to_string(file.take(RECORD_BYTES_MAX)),
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => Err(error),
        };
        let text = text.map_err(Error::io(&shown))?;
        let record: Record = serde_json::from_str(&text)
            .map_err(|error| Error::mismatch(&shown, "the record of an entry", error))?;
        if record.files.is_empty() {
            return Err(Error::mismatch(&shown, "at least one file", "none"));
        }
        let is_plain = |name: &str| Path::new(name).file_name().is_some_and(|file| *file == *name);
        if let Some(file) = record.files.iter().find(|file| !is_plain(&file.name)) {
            return Err(Error::mismatch(&shown, "plain file names", format!("`{}`", file.name)));
        }
        Ok(Some(Entry { folder, record }))
    }

    /// Compares the sizes of the files with the record, and their hashes if `check` includes them.
    fn verify(&self, check: Check, reporter: &Reporter) -> Result<()> {
        self.record.files.iter().try_for_each(|file| {
            let path = self.folder.join(&file.name);
            verify_file(&path, file.bytes, &file.sha256, check, reporter)
        })
    }
}

/// The folder of all entries.
pub(crate) struct Cache<'a> {
    folder: PathBuf,
    reporter: &'a Reporter,
}

impl<'a> Cache<'a> {
    /// The cache of this user: `$BODKIN_CACHE`, or `bodkin` in the platform's cache folder.
    pub(crate) fn of_user(reporter: &'a Reporter) -> Result<Cache<'a>> {
        let root = match std::env::var_os("BODKIN_CACHE").filter(|value| !value.is_empty()) {
            Some(folder) => std::path::absolute(folder).map_err(Error::io("BODKIN_CACHE"))?,
            None => dirs::cache_dir()
                .ok_or_else(|| Error::mismatch("BODKIN_CACHE", "a folder", "none for this user"))?
                .join("bodkin"),
        };
        Ok(Cache { folder: root.join("models"), reporter })
    }

    /// The entry `id`, if it is there; an error if it is there but damaged or not the pinned one.
    pub(crate) fn look(&self, id: &str, pin: Option<&Pin>, check: Check) -> Result<Option<Entry>> {
        let entry = Entry::read(self.folder.join(id))?;
        if let Some(entry) = &entry {
            pin.map_or(Ok(()), |pin| entry.record.files[0].must_be(pin))?;
            entry.verify(check, self.reporter)?;
        }
        Ok(entry)
    }

    /// As [`Cache::look`], but a damaged entry counts as absent, with a note.
    pub(crate) fn find(&self, id: &str, pin: Option<&Pin>, check: Check) -> Option<Entry> {
        self.look(id, pin, check).unwrap_or_else(|error| {
            self.reporter.note(&format!("the cached {id} is not used: {error}"));
            None
        })
    }

    /// All readable entries with their ids, sorted by id. A cache that does not exist yet is empty.
    pub(crate) fn entries(&self) -> Vec<(String, Entry)> {
        let mut entries: Vec<(String, Entry)> = self
            .names()
            .filter(|name| !name.starts_with('.'))
            .filter_map(|name| {
                let entry = Entry::read(self.folder.join(&name)).ok()??;
                entry.verify(Check::Size, self.reporter).ok()?;
                Some((name, entry))
            })
            .collect();
        entries.sort_by(|(a, _), (b, _)| a.cmp(b));
        entries
    }

    /// Takes the right to write entry `id`, waiting for another process that holds it.
    pub(crate) fn lock(&self, id: &str) -> Result<Slot<'_>> {
        let failed = |error| Error::io(unwritable(&self.folder))(error);
        fs::create_dir_all(&self.folder).map_err(failed)?;
        let lock = self.lock_file(id).map_err(failed)?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                self.reporter.note(&format!("waiting for another process that is fetching {id}"));
                lock.lock().map_err(failed)?;
            }
            Err(TryLockError::Error(error)) => return Err(failed(error)),
        }
        let slot = Slot { cache: self, id: id.to_owned(), _lock: lock };
        slot.remove_leftovers();
        Ok(slot)
    }

    fn lock_file(&self, id: &str) -> std::io::Result<File> {
        let path = self.folder.join(format!(".{id}.lock"));
        File::options().create(true).truncate(false).write(true).open(path)
    }

    fn names(&self) -> impl Iterator<Item = String> {
        let entries = fs::read_dir(&self.folder).into_iter().flatten();
        entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok())
    }
}

/// The right to write one entry. It ends when this is dropped or the process dies.
pub(crate) struct Slot<'a> {
    cache: &'a Cache<'a>,
    id: String,
    _lock: File,
}

impl Slot<'_> {
    /// A new folder to collect the entry's files in.
    pub(crate) fn stage(&self) -> Result<Staging> {
        let folder = &self.cache.folder;
        let root = tempfile::Builder::new()
            .prefix(&format!(".{}{UNFINISHED}", self.id))
            .tempdir_in(folder)
            .map_err(Error::io(unwritable(folder)))?;
        let path = root.path().to_owned();
        let guard = cleanup::register(move || fs::remove_dir_all(&path).unwrap_or_default());
        for part in ["files", "scratch"] {
            fs::create_dir(root.path().join(part)).map_err(Error::io(unwritable(folder)))?;
        }
        Ok(Staging { root, _guard: guard, reporter: self.cache.reporter.clone() })
    }

    /// Makes the staged files the entry, in place of a damaged one if there is one.
    pub(crate) fn commit(&self, staging: Staging, record: Record) -> Result<Entry> {
        let files = staging.files();
        let target = self.cache.folder.join(&self.id);
        let failed = |error| Error::io(format!("cannot store {}", target.display()))(error);
        let mut file = File::create(files.join(RECORD)).map_err(failed)?;
        serde_json::to_writer_pretty(&mut file, &record).map_err(|error| failed(error.into()))?;
        file.sync_all().map_err(failed)?;
        sync_folder(&files);
        if target.exists() {
            fs::remove_dir_all(&target).map_err(failed)?;
        }
        fs::rename(&files, &target).map_err(failed)?;
        sync_folder(&self.cache.folder);
        Ok(Entry { folder: target, record })
    }

    /// Removes the folders of killed processes: those of this entry, since only the holder of its
    /// lock creates them, and those of entries that no process has locked.
    fn remove_leftovers(&self) {
        for name in self.cache.names() {
            let Some((id, _)) =
                name.strip_prefix('.').and_then(|name| name.rsplit_once(UNFINISHED))
            else {
                continue;
            };
            let other = (id != self.id).then(|| self.cache.lock_file(id));
            let ours = match &other {
                None => true,
                Some(lock) => lock.as_ref().is_ok_and(|lock| lock.try_lock().is_ok()),
            };
            if ours {
                // The next fetch tries again to remove the rest.
                fs::remove_dir_all(self.cache.folder.join(&name)).unwrap_or_default();
            }
        }
    }
}

/// An unfinished entry. Its folder is removed when it is dropped, and by [`cleanup::run`].
pub(crate) struct Staging {
    // Declared first, so that the folder is gone before its cleanup is unregistered.
    root: TempDir,
    _guard: Guard,
    pub(super) reporter: Reporter,
}

impl Staging {
    /// The folder that becomes the entry.
    pub(crate) fn files(&self) -> PathBuf {
        self.root.path().join("files")
    }

    /// A folder for intermediate files, on the same disk.
    pub(crate) fn scratch(&self) -> PathBuf {
        self.root.path().join("scratch")
    }

    /// Opens a file of the entry for writing.
    pub(crate) fn create(&self, name: &str) -> Result<Intake> {
        let path = self.files().join(name);
        let failed = Error::io(format!("cannot create {}", path.display()));
        let file = File::create_new(&path).map_err(failed)?;
        Ok(Intake { name: name.to_owned(), file, hash: Sha256::new(), bytes: 0 })
    }

    /// Moves a file from the scratch folder into the entry.
    pub(crate) fn adopt(&self, name: &str, from: &Path) -> Result<StoredFile> {
        let failed = |error| Error::io(format!("cannot store {name}"))(error);
        let file = File::options().write(true).open(from).map_err(failed)?;
        file.sync_all().map_err(failed)?;
        let bytes = file.metadata().map_err(failed)?.len();
        let sha256 = hash(from, bytes, &self.reporter)?;
        fs::rename(from, self.files().join(name)).map_err(failed)?;
        Ok(StoredFile { name: name.to_owned(), bytes, sha256 })
    }
}

/// A file that is hashed while it is written.
pub(crate) struct Intake {
    name: String,
    file: File,
    hash: Sha256,
    bytes: u64,
}

impl Intake {
    /// Syncs the file to the disk.
    pub(crate) fn finish(self) -> Result<StoredFile> {
        let failed = Error::io(format!("cannot write {}", self.name));
        self.file.sync_all().map_err(failed)?;
        Ok(StoredFile { name: self.name, bytes: self.bytes, sha256: hex(self.hash) })
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
    match check {
        Check::Size => Ok(()),
        Check::Hash => expect_sha256(&shown, sha256, &hash(path, bytes, reporter)?),
    }
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

fn unwritable(folder: &Path) -> String {
    format!("cannot write in the cache folder {}", folder.display())
}

/// SHA-256 of a file of about `bytes` bytes.
fn hash(path: &Path, bytes: u64, reporter: &Reporter) -> Result<String> {
    let failed = |error| Error::io(path.display().to_string())(error);
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let phase = reporter.begin(&format!("verifying {name}"), Some(bytes));
    let mut file = File::open(path).map_err(failed)?;
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        match file.read(&mut buffer).map_err(failed)? {
            0 => return Ok(hex(hash)),
            read => {
                hash.update(&buffer[..read]);
                phase.add(read as u64);
            }
        }
    }
}

fn hex(hash: Sha256) -> String {
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Makes a rename in `folder` durable, where the platform lets folders be opened.
fn sync_folder(folder: &Path) {
    if let Ok(folder) = File::open(folder) {
        folder.sync_all().unwrap_or_default();
    }
}

/// The folder name of an entry: letters, digits, `.`, `_` and `-` stay, and any other byte becomes
/// `%` and two hexadecimal digits, so that different names have different folders.
pub(crate) fn entry_id(text: &str) -> String {
    text.bytes()
        .map(|byte| match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'.' | b'_' | b'-' => {
                char::from(byte).to_string()
            }
            _ => format!("%{byte:02X}"),
        })
        .collect()
}
