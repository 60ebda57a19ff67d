//! The writing of cache entries. A fetch collects its files in a staging folder, which becomes the
//! entry in one rename. Whole and half downloads stay there when a fetch fails or is killed: their
//! names are the hashes that they are to have, or of their addresses with a version beside them, so
//! the next fetch of the entry goes on from them.
//! Everything else is removed. This module must not know where models come from.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use super::cache::{Cache, Entry, RECORD, Record, entry_name, unwritable};
use super::download::{Client, Remote};
use super::intake::{Intake, Staged, is_sha256, sha256_of};
use super::version::{EXTENSION, Version};
use crate::cleanup::{self, Guard};
use crate::error::{Error, Result};
use crate::progress::Reporter;

/// Ends the name of a staging folder, after its entry's id.
const STAGING: char = '~';
/// Ends the name of a download, after its hash.
const PART: &str = ".part";
/// Downloads that have not been resumed for this long are removed.
const ABANDONED: Duration = Duration::from_secs(7 * 24 * 3600);

/// The right to write one entry. It ends when this is dropped or the process dies.
pub(crate) struct Slot<'a> {
    cache: &'a Cache<'a>,
    id: String,
    _lock: File,
}

impl<'a> Slot<'a> {
    /// Takes the right to write entry `id`, waiting for another process that has it.
    pub(crate) fn take(cache: &'a Cache<'a>, id: &str) -> Result<Slot<'a>> {
        let slot = Slot { cache, id: id.to_owned(), _lock: cache.lock(id)? };
        tidy(&slot.root());
        remove_leftovers(cache);
        Ok(slot)
    }

    fn root(&self) -> PathBuf {
        self.cache.folder.join(format!(".{}{STAGING}", self.id))
    }

    /// The folder to collect the entry's files in.
    pub(crate) fn stage(&self) -> Result<Staging<'a>> {
        let root = self.root();
        let failed = Error::io(unwritable(&self.cache.folder));
        fs::create_dir_all(root.join("scratch")).map_err(failed)?;
        let path = root.clone();
        let guard = cleanup::register(move || tidy(&path));
        Ok(Staging { root, _guard: guard, reporter: self.cache.reporter })
    }

    /// Makes the staged files the entry, in place of another one if there is one. `check` gets the
    /// path of the first file.
    pub(crate) fn commit(
        &self,
        staging: &Staging<'_>,
        (name, source): (String, String),
        staged: Vec<Staged>,
        check: impl FnOnce(&Path) -> Result<()>,
    ) -> Result<Entry> {
        let (folder, target) = (staging.root.join("files"), self.cache.folder.join(&self.id));
        let failed = |error| Error::io(format!("cannot store {}", target.display()))(error);
        let none = || Error::mismatch(&name, "a fetched file", "none");
        let first = staged.first().ok_or_else(none)?.file.name.clone();
        fs::create_dir(&folder).map_err(failed)?;
        for staged in &staged {
            fs::rename(&staged.path, folder.join(&staged.file.name)).map_err(failed)?;
        }
        check(&folder.join(first))?;
        let files = staged.into_iter().map(|staged| staged.file).collect();
        let record = Record { name, source, files };
        let mut file = File::create(folder.join(RECORD)).map_err(failed)?;
        serde_json::to_writer_pretty(&mut file, &record).map_err(|error| failed(error.into()))?;
        file.sync_all().map_err(failed)?;
        sync_folder(&folder);
        if target.exists() {
            fs::rename(&target, staging.root.join("replaced")).map_err(failed)?;
        }
        fs::rename(&folder, &target).map_err(failed)?;
        sync_folder(&self.cache.folder);
        // Parts of another version of the model may be there.
        fs::remove_dir_all(&staging.root).map_err(failed)?;
        Ok(Entry { folder: target, record })
    }

    /// Removes the entry and what is staged of it, and returns how many bytes that freed.
    pub(crate) fn remove(&self) -> Result<u64> {
        let (root, target) = (self.root(), self.cache.folder.join(&self.id));
        let failed = |error| Error::io(format!("cannot remove {}", target.display()))(error);
        let bytes = folder_bytes(&target) + folder_bytes(&root);
        fs::create_dir_all(&root).map_err(failed)?;
        // A folder that is removed step by step must not look like an entry.
        match fs::rename(&target, root.join("removed")) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(failed(error));
            }
            _ => fs::remove_dir_all(&root).map_err(failed)?,
        }
        Ok(bytes)
    }
}

/// The files of an unfinished entry.
pub(crate) struct Staging<'a> {
    root: PathBuf,
    pub(super) reporter: &'a Reporter,
    _guard: Guard,
}

impl Staging<'_> {
    /// A folder for intermediate files, on the same disk.
    pub(crate) fn scratch(&self) -> PathBuf {
        self.root.join("scratch")
    }

    /// Opens a file of the entry for writing.
    pub(crate) fn create(&self, name: &str) -> Result<Intake> {
        Intake::create(self.root.join(name))
    }

    /// Downloads a file of the entry. It goes on from an earlier download if its hash is known, or
    /// else the version that the server had.
    pub(crate) fn download(&self, client: &Client, remote: &Remote, name: &str) -> Result<Staged> {
        let of_address = || sha256_of(&remote.url);
        let id = remote.sha256.map_or_else(of_address, str::to_owned);
        let path = self.root.join(format!("{id}{PART}"));
        let version = remote.sha256.is_none().then(|| Version::of(&path));
        let file = Intake::resume(path, remote.bytes, self.reporter)?;
        client.download(remote, file, version)?.finish(name)
    }
}

impl Drop for Staging<'_> {
    fn drop(&mut self) {
        tidy(&self.root);
    }
}

/// Removes from a staging folder what the next fetch cannot go on from, and the folder if nothing
/// is left. What cannot be removed is left to the next fetch.
fn tidy(root: &Path) {
    for entry in fs::read_dir(root).into_iter().flatten().flatten() {
        let path = entry.path();
        let of_version = path.extension().is_some_and(|extension| extension == EXTENSION);
        let part = if of_version { path.with_extension(&PART[1..]) } else { path.clone() };
        let is_begun = part.metadata().is_ok_and(|metadata| metadata.len() > 0);
        if !is_part(&part) || !is_begun {
            drop(if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) });
        }
    }
    drop(fs::remove_dir(root));
}

/// Whether this is a download that the hash in its name identifies: its own, or its address's.
fn is_part(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str()?.strip_suffix(PART));
    name.is_some_and(is_sha256)
}

/// The staging folders of entries that no process has locked, with the entries' ids.
fn unlocked<'a>(cache: &'a Cache<'_>) -> impl Iterator<Item = (String, PathBuf, File)> + 'a {
    cache.names().filter_map(|name| {
        let id = name.strip_prefix('.')?.strip_suffix(STAGING)?.to_owned();
        let lock = cache.lock_file(&id).ok()?;
        lock.try_lock().ok()?;
        Some((id, cache.folder.join(&name), lock))
    })
}

/// Removes what killed processes left, but for downloads that may be gone on with.
fn remove_leftovers(cache: &Cache<'_>) {
    for (_, root, _lock) in unlocked(cache) {
        tidy(&root);
        let changed = |entry: fs::DirEntry| entry.metadata().ok()?.modified().ok();
        let parts = fs::read_dir(&root).into_iter().flatten().flatten();
        let last = parts.filter_map(changed).max();
        let age = last.and_then(|last| SystemTime::now().duration_since(last).ok());
        if age.is_some_and(|age| age > ABANDONED) {
            drop(fs::remove_dir_all(root));
        }
    }
}

/// The names of entries whose downloads have begun and are not going on, with the bytes so far.
pub(crate) fn unfinished(cache: &Cache<'_>) -> Vec<(String, u64)> {
    unlocked(cache).map(|(id, root, _lock)| (entry_name(&id), folder_bytes(&root))).collect()
}

/// The size of the files in a folder and those below it.
pub(super) fn folder_bytes(folder: &Path) -> u64 {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries
        .map(|entry| match entry.metadata() {
            Ok(metadata) if metadata.is_dir() => folder_bytes(&entry.path()),
            metadata => metadata.map_or(0, |metadata| metadata.len()),
        })
        .sum()
}

/// Makes a rename in `folder` durable, where the platform lets folders be opened.
fn sync_folder(folder: &Path) {
    if let Ok(folder) = File::open(folder) {
        folder.sync_all().unwrap_or_default();
    }
}
