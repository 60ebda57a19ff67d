//! The cache folder: where fetched models live. An entry is a folder that holds the model's files
//! and a record of their sizes and hashes. It appears under its name in one rename, after
//! everything in it was verified and synced, so a folder without the `.` of a working name is
//! always whole. This module must not know where models come from.

use std::fs::{self, File, TryLockError};
use std::io::{ErrorKind, Read, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use tempfile::TempDir;

use super::Check;
use crate::interrupt::{self, Guard};
use crate::progress::Progress;

const RECORD: &str = "entry.json";
/// No honest record comes near this size.
const RECORD_BYTES_MAX: u64 = 1 << 20;
/// Stands between the entry and a random part in the name of an unfinished entry's folder.
const UNFINISHED: char = '~';

/// What a file must be, whoever delivers it.
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
        let (name, found) = (&self.name, &self.sha256);
        ensure!(
            self.bytes == pin.bytes,
            "{name}: expected {} bytes, found {}",
            pin.bytes,
            self.bytes
        );
        ensure!(found == pin.sha256, "{name}: expected SHA-256 {}, found {found}", pin.sha256);
        Ok(())
    }
}

/// What stands in an entry's record.
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
        let text = match File::open(&path) {
            Ok(file) => std::io::read_to_string(file.take(RECORD_BYTES_MAX)),
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => Err(error),
        };
        let text = text.with_context(|| path.display().to_string())?;
        let record: Record =
            serde_json::from_str(&text).with_context(|| path.display().to_string())?;
        ensure!(!record.files.is_empty(), "{}: names no file", path.display());
        for file in &record.files {
            let plain = Path::new(&file.name).file_name().is_some_and(|name| *name == *file.name);
            ensure!(plain, "{}: `{}` is no plain file name", path.display(), file.name);
        }
        Ok(Some(Entry { folder, record }))
    }

    /// Compares the files with the record: always their sizes, and their hashes if asked for.
    fn verify(&self, check: Check) -> Result<()> {
        for file in &self.record.files {
            let path = self.folder.join(&file.name);
            verify_file(&path, file.bytes, &file.sha256, check)?;
        }
        Ok(())
    }
}

/// The folder of all entries.
pub(crate) struct Cache {
    folder: PathBuf,
}

impl Cache {
    /// The cache of this user: `$BODKIN_CACHE`, or `bodkin` in the platform's cache folder.
    pub(crate) fn of_user() -> Result<Cache> {
        let root = match std::env::var_os("BODKIN_CACHE").filter(|value| !value.is_empty()) {
            Some(folder) => std::path::absolute(folder)?,
            None => dirs::cache_dir()
                .context("no cache folder is known for this user: set BODKIN_CACHE")?
                .join("bodkin"),
        };
        Ok(Cache { folder: root.join("models") })
    }

    /// The entry `id`, if it is there; an error if it is there but damaged or not the pinned one.
    pub(crate) fn look(&self, id: &str, pin: Option<&Pin>, check: Check) -> Result<Option<Entry>> {
        let entry = Entry::read(self.folder.join(id))?;
        if let Some(entry) = &entry {
            pin.map_or(Ok(()), |pin| entry.record.files[0].must_be(pin))?;
            entry.verify(check)?;
        }
        Ok(entry)
    }

    /// As [`Cache::look`], but a damaged entry counts as absent, with a word on stderr.
    pub(crate) fn find(&self, id: &str, pin: Option<&Pin>, check: Check) -> Option<Entry> {
        self.look(id, pin, check).unwrap_or_else(|error| {
            eprintln!("the cached {id} is not used: {error:#}");
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
                entry.verify(Check::Size).ok()?;
                Some((name, entry))
            })
            .collect();
        entries.sort_by(|(a, _), (b, _)| a.cmp(b));
        entries
    }

    /// Takes the right to write entry `id`, waiting for another process that holds it.
    pub(crate) fn lock(&self, id: &str) -> Result<Slot<'_>> {
        let failed = || format!("cannot write in the cache folder {}", self.folder.display());
        fs::create_dir_all(&self.folder).with_context(failed)?;
        let lock = self.lock_file(id).with_context(failed)?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                eprintln!("waiting for another bodkin that is fetching {id}");
                lock.lock().with_context(failed)?;
            }
            Err(TryLockError::Error(error)) => return Err(error).with_context(failed),
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
    cache: &'a Cache,
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
            .with_context(|| format!("cannot write in the cache folder {}", folder.display()))?;
        let path = root.path().to_owned();
        let guard = interrupt::on_interrupt(move || fs::remove_dir_all(&path).unwrap_or_default());
        for part in ["files", "scratch"] {
            fs::create_dir(root.path().join(part))?;
        }
        Ok(Staging { root, _guard: guard })
    }

    /// Makes what was staged the entry, in place of a damaged one if there is one.
    pub(crate) fn commit(&self, staging: Staging, record: Record) -> Result<Entry> {
        let files = staging.files();
        let target = self.cache.folder.join(&self.id);
        let failed = || format!("cannot store {}", target.display());
        let mut file = File::create(files.join(RECORD)).with_context(failed)?;
        serde_json::to_writer_pretty(&mut file, &record).with_context(failed)?;
        file.sync_all().with_context(failed)?;
        sync_folder(&files);
        if target.exists() {
            fs::remove_dir_all(&target).with_context(failed)?;
        }
        fs::rename(&files, &target).with_context(failed)?;
        sync_folder(&self.cache.folder);
        Ok(Entry { folder: target, record })
    }

    /// Removes the folders that processes left behind when they were killed: those of this entry,
    /// since only the holder of its lock makes them, and those of entries that nobody has locked.
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
                // What cannot be removed now is tried again at the next fetch.
                fs::remove_dir_all(self.cache.folder.join(&name)).unwrap_or_default();
            }
        }
    }
}

/// An entry in the making. It goes away with everything in it when dropped, and on Ctrl-C.
pub(crate) struct Staging {
    // Declared first, so that the folder is gone before Ctrl-C stops removing it.
    root: TempDir,
    _guard: Guard,
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
        let file =
            File::create_new(&path).with_context(|| format!("cannot create {}", path.display()))?;
        Ok(Intake { name: name.to_owned(), file, hash: Sha256::new(), bytes: 0 })
    }

    /// Takes a file that already lies in the scratch folder into the entry.
    pub(crate) fn adopt(&self, name: &str, from: &Path) -> Result<StoredFile> {
        let failed = || format!("cannot store {name}");
        let file = File::options().write(true).open(from).with_context(failed)?;
        file.sync_all().with_context(failed)?;
        let bytes = file.metadata().with_context(failed)?.len();
        let sha256 = hash(from, bytes)?;
        fs::rename(from, self.files().join(name)).with_context(failed)?;
        Ok(StoredFile { name: name.to_owned(), bytes, sha256 })
    }
}

/// A file being written, hashed on the way.
pub(crate) struct Intake {
    name: String,
    file: File,
    hash: Sha256,
    bytes: u64,
}

impl Intake {
    /// Puts the file safely on the disk.
    pub(crate) fn finish(self) -> Result<StoredFile> {
        self.file.sync_all().with_context(|| format!("cannot write {}", self.name))?;
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

/// Fails unless the file at `path` has this size and, if asked for, this SHA-256.
pub(crate) fn verify_file(path: &Path, bytes: u64, sha256: &str, check: Check) -> Result<()> {
    let shown = path.display();
    let found = fs::metadata(path).with_context(|| shown.to_string())?.len();
    ensure!(found == bytes, "{shown}: expected {bytes} bytes, found {found}");
    if check == Check::Hash {
        let found = hash(path, bytes)?;
        if !found.eq_ignore_ascii_case(sha256) {
            bail!("{shown}: expected SHA-256 {sha256}, found {found}");
        }
    }
    Ok(())
}

/// SHA-256 of a file of about `bytes` bytes.
fn hash(path: &Path, bytes: u64) -> Result<String> {
    let shown = path.display();
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let progress = Progress::start(&format!("verifying {name}"), Some(bytes));
    let mut file = File::open(path).with_context(|| shown.to_string())?;
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        match file.read(&mut buffer).with_context(|| shown.to_string())? {
            0 => return Ok(hex(hash)),
            read => {
                hash.update(&buffer[..read]);
                progress.add(read as u64);
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

/// A name of an entry's folder for any text: letters, digits, `.`, `_` and `-` stay, all else is
/// written as `%` and two hexadecimal digits, so that different texts never meet.
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
