//! The cache of fetched models. An entry is a folder with the model's files and a record of their
//! sizes and hashes. It gets its name in one rename, after its files are verified and synced, so a
//! folder whose name does not begin with `.` was complete then. This module must not know where
//! models come from.

use std::fs::{self, File, TryLockError};
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use serde::{Deserialize, Serialize};

use super::intake::{Check, Pin, StoredFile, verify_file};
use super::layers::Layer;
use crate::error::{Error, Result};
use crate::progress::Reporter;

pub(super) const RECORD: &str = "entry.json";
/// Larger records are not read.
const RECORD_BYTES_MAX: u64 = 1 << 20;

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
    pub(super) folder: PathBuf,
    pub(crate) record: Record,
}

impl Entry {
    /// The file to open: the model, or the first part of a split one.
    pub(crate) fn path(&self) -> PathBuf {
        self.folder.join(&self.record.files[0].name)
    }

    /// The layers beside the model's own files.
    pub(crate) fn layers(&self) -> Vec<Layer> {
        let layer = |file: &StoredFile| {
            let (kind, path) = (file.layer.clone()?, self.folder.join(&file.name));
            Some(Layer { kind, path, bytes: file.bytes })
        };
        self.record.files.iter().filter_map(layer).collect()
    }

    /// Size of all files together.
    pub(crate) fn bytes(&self) -> u64 {
        self.record.files.iter().map(|file| file.bytes).sum()
    }

    /// When the entry was last used, or else fetched.
    pub(crate) fn last_used(&self) -> Option<SystemTime> {
        fs::metadata(self.folder.join(RECORD)).and_then(|record| record.modified()).ok()
    }

    /// Records that the entry is used now. A cache that cannot be written stays as it is.
    pub(crate) fn touch(&self) {
        let record = File::options().append(true).open(self.folder.join(RECORD));
        drop(record.and_then(|record| record.set_modified(SystemTime::now())));
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

/// What this user caches: `$BODKIN_CACHE`, or `bodkin` in the platform's cache folder.
pub(crate) fn user_folder() -> Result<PathBuf> {
    match std::env::var_os("BODKIN_CACHE").filter(|value| !value.is_empty()) {
        Some(folder) => std::path::absolute(folder).map_err(Error::io("BODKIN_CACHE")),
        None => match dirs::cache_dir() {
            Some(folder) => Ok(folder.join("bodkin")),
            None => Err(Error::mismatch("BODKIN_CACHE", "a folder", "none for this user")),
        },
    }
}

/// The folder of all entries.
pub(crate) struct Cache<'a> {
    pub(super) folder: PathBuf,
    pub(super) reporter: &'a Reporter,
}

impl<'a> Cache<'a> {
    /// The cache of this user.
    pub(crate) fn of_user(reporter: &'a Reporter) -> Result<Cache<'a>> {
        Ok(Cache { folder: user_folder()?.join("models"), reporter })
    }

    /// The entry `id`, if it is there; an error if it is there but damaged or not the pinned one.
    pub(crate) fn look(&self, id: &str, pin: Option<&Pin>, check: Check) -> Result<Option<Entry>> {
        let entry = Entry::read(self.folder.join(id))?;
        if let Some(entry) = &entry {
            pin.map_or(Ok(()), |pin| entry.record.files[0].must_be(pin))?;
            entry.verify(check, self.reporter)?;
            entry.touch();
        }
        Ok(entry)
    }

    /// As [`Cache::look`], but a damaged entry counts as absent, with a note.
    pub(crate) fn find(&self, id: &str, pin: Option<&Pin>, check: Check) -> Option<Entry> {
        self.look(id, pin, check).unwrap_or_else(|error| {
            self.reporter.note(&format!("the cached {} is not used: {error}", entry_name(id)));
            None
        })
    }

    /// All entries with their ids, sorted by id; none for those that are damaged. A folder without
    /// a record is no entry. A cache that does not exist yet is empty.
    pub(crate) fn entries(&self) -> Vec<(String, Option<Entry>)> {
        let read = |id: String| {
            let entry = Entry::read(self.folder.join(&id)).transpose()?.ok();
            let whole = entry.filter(|entry| entry.verify(Check::Size, self.reporter).is_ok());
            Some((id, whole))
        };
        let is_entry = |name: &String| !name.starts_with('.') && self.folder.join(name).is_dir();
        let mut entries: Vec<_> = self.names().filter(is_entry).filter_map(read).collect();
        entries.sort_by(|(a, _), (b, _)| a.cmp(b));
        entries
    }

    /// Locks entry `id` for writing, waiting for another process that has done so. The lock ends
    /// when the file is closed, or its process dies.
    pub(super) fn lock(&self, id: &str) -> Result<File> {
        let failed = |error| Error::io(unwritable(&self.folder))(error);
        fs::create_dir_all(&self.folder).map_err(failed)?;
        let lock = self.lock_file(id).map_err(failed)?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                self.reporter.note(&format!(
                    "waiting for another process that is fetching {}",
                    entry_name(id)
                ));
                lock.lock().map_err(failed)?;
            }
            Err(TryLockError::Error(error)) => return Err(failed(error)),
        }
        Ok(lock)
    }

    pub(super) fn lock_file(&self, id: &str) -> std::io::Result<File> {
        let path = self.folder.join(format!(".{id}.lock"));
        File::options().create(true).truncate(false).write(true).open(path)
    }

    /// The names in the folder.
    pub(super) fn names(&self) -> impl Iterator<Item = String> {
        let entries = fs::read_dir(&self.folder).into_iter().flatten();
        entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok())
    }
}

pub(super) fn unwritable(folder: &Path) -> String {
    format!("cannot write in the cache folder {}", folder.display())
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

/// The text whose [`entry_id`] this is.
pub(crate) fn entry_name(id: &str) -> String {
    let mut parts = id.split('%');
    let mut name = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let (code, rest) = part.split_at_checked(2).unwrap_or((part, ""));
        name.push(u8::from_str_radix(code, 16).map_or('\u{fffd}', char::from));
        name.push_str(rest);
    }
    name
}
