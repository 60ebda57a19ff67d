//! Which pages a folder holds, of all models together, and which of them go first.

use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::io::Result;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::SystemTime;

/// What names a page: the hash of its tokens and all before them.
pub(crate) type PageKey = [u8; 32];

/// A page of a model: the name of the model's folder, and the page's key.
pub(super) type Place = (Arc<str>, PageKey);

/// The ledgers that are in use, so that the models of a process share one budget.
static LEDGERS: Mutex<Vec<(PathBuf, Weak<Mutex<Ledger>>)>> = Mutex::new(Vec::new());

/// The pages of a folder, with a limit on their bytes.
pub(super) struct Ledger {
    root: PathBuf,
    limit_bytes: u64,
    bytes: u64,
    /// The size of each page and when it was used.
    pages: HashMap<Place, (u64, u64)>,
    /// The least recently used first.
    order: BTreeSet<(u64, Place)>,
    clock: u64,
}

/// Locks, also after a thread panicked while it held the lock: no change is left half made.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Ledger {
    /// The ledger of a folder, which is the same one for all models of this process.
    ///
    /// # Errors
    /// If the folder cannot be made or read.
    pub(super) fn of(root: &Path, limit_bytes: u64) -> Result<Arc<Mutex<Ledger>>> {
        fs::create_dir_all(root)?;
        let root = root.canonicalize()?;
        let mut ledgers = lock(&LEDGERS);
        ledgers.retain(|(_, ledger)| ledger.strong_count() > 0);
        let found = ledgers.iter().find(|(of, _)| *of == root).and_then(|(_, it)| it.upgrade());
        if let Some(ledger) = found {
            lock(&ledger).limit_bytes = limit_bytes;
            return Ok(ledger);
        }
        let mut ledger = Ledger {
            root: root.clone(),
            limit_bytes,
            bytes: 0,
            pages: HashMap::new(),
            order: BTreeSet::new(),
            clock: 0,
        };
        ledger.scan()?;
        let ledger = Arc::new(Mutex::new(ledger));
        ledgers.push((root, Arc::downgrade(&ledger)));
        Ok(ledger)
    }

    /// Adds the pages of all models that are in the folder. What cannot be read there is of others,
    /// or another process has removed it.
    fn scan(&mut self) -> Result<()> {
        let mut found: Vec<(SystemTime, Place, u64)> = Vec::new();
        for folder in fs::read_dir(&self.root)?.flatten() {
            let Ok(name) = folder.file_name().into_string() else { continue };
            let Ok(entries) = fs::read_dir(folder.path()) else { continue };
            let name: Arc<str> = name.into();
            found.extend(entries.flatten().filter_map(|entry| {
                let key = entry.file_name().to_str().and_then(parse_name)?;
                let metadata = entry.metadata().ok()?;
                Some((metadata.modified().ok()?, (Arc::clone(&name), key), metadata.len()))
            }));
        }
        found.sort_unstable();
        for (_, place, bytes) in found {
            self.note(place, bytes);
        }
        Ok(())
    }

    /// The file of a page.
    pub(super) fn path(&self, (folder, key): &Place) -> PathBuf {
        let name: String = key.iter().map(|byte| format!("{byte:02x}")).collect();
        self.root.join(&**folder).join(name + ".page")
    }

    /// The size of a page, if it is there or waits to be written.
    pub(super) fn bytes_of(&self, place: &Place) -> Option<u64> {
        Some(self.pages.get(place)?.0)
    }

    /// Adds a page, or makes it the most recently used one.
    pub(super) fn note(&mut self, place: Place, bytes: u64) {
        self.forget(&place);
        self.clock += 1;
        self.pages.insert(place.clone(), (bytes, self.clock));
        self.order.insert((self.clock, place));
        self.bytes += bytes;
    }

    pub(super) fn forget(&mut self, place: &Place) {
        if let Some((bytes, used)) = self.pages.remove(place) {
            self.order.remove(&(used, place.clone()));
            self.bytes -= bytes;
        }
    }

    /// Removes the least recently used pages, of whatever model, until the rest is within the
    /// limit.
    pub(super) fn shrink(&mut self) {
        while self.bytes > self.limit_bytes
            && let Some((_, place)) = self.order.first().cloned()
        {
            self.forget(&place);
            // It may wait to be written, or another process may have removed it.
            let _ = fs::remove_file(self.path(&place));
        }
    }

    /// Whether a ledger of this folder is in use.
    #[cfg(test)]
    pub(super) fn is_open(root: &Path) -> bool {
        lock(&LEDGERS).iter().any(|(of, ledger)| of == root && ledger.strong_count() > 0)
    }

    #[cfg(test)]
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// The key in a file's name.
pub(super) fn parse_name(name: &str) -> Option<PageKey> {
    let digits = name.strip_suffix(".page").filter(|digits| digits.len() == 64)?;
    if !digits.bytes().all(|digit| digit.is_ascii_hexdigit()) {
        return None;
    }
    let mut key = PageKey::default();
    for (byte, pair) in key.iter_mut().zip(digits.as_bytes().chunks_exact(2)) {
        *byte = u8::from_str_radix(str::from_utf8(pair).ok()?, 16).ok()?;
    }
    Some(key)
}
