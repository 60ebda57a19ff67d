//! Pages of the KV cache on disk, so that a restarted server does not compute its prompts again. A
//! page is named by the hash of its tokens and all before them; the folder belongs to one model on
//! one kind of device. Files are written by a thread of their own, under a temporary name first,
//! and end with their hash, so that one that is torn is ignored. This file must not know sequences.

use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use sha2::{Digest, Sha256};

/// What names a page: the hash of its tokens and all before them.
pub(crate) type PageKey = [u8; 32];

/// The first bytes of a file.
const MAGIC: &[u8; 8] = b"bodkinP1";

/// The bytes of the hash at the end of a file.
const HASH_BYTES: usize = 32;

/// Pages that wait to be written; further ones are not kept.
const QUEUE: usize = 64;

/// The key of a page behind another one.
pub(crate) fn page_key(before: &PageKey, tokens: &[u32]) -> PageKey {
    let mut hash = Sha256::new();
    hash.update(before);
    tokens.iter().for_each(|token| hash.update(token.to_le_bytes()));
    hash.finalize().into()
}

/// A page as it is stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct StoredPage {
    /// How many of its tokens were computed as prefill rows.
    pub(crate) prefill: u32,
    /// The page of each window; none where the window had passed it.
    pub(crate) windows: Vec<Option<Vec<u8>>>,
    /// The recurrent state after its tokens, if it was set aside.
    pub(crate) state: Option<Vec<u8>>,
}

/// A folder of pages with a limit on its bytes.
pub struct PrefixStore {
    folder: PathBuf,
    limit_bytes: u64,
    bytes: u64,
    /// The size of each page and when it was used.
    pages: HashMap<PageKey, (u64, u64)>,
    /// The least recently used first.
    order: BTreeSet<(u64, PageKey)>,
    clock: u64,
    writer: SyncSender<(PageKey, PathBuf, Vec<u8>)>,
    /// Pages that could not be written, as on a full disk.
    failed: Arc<Mutex<Vec<PageKey>>>,
}

impl PrefixStore {
    /// Opens the folder `fingerprint` in `folder`, which holds pages of one model on one kind of
    /// device, with at most `limit_bytes`.
    ///
    /// # Errors
    /// If the folder cannot be made or read.
    pub fn open(
        folder: &Path,
        fingerprint: &str,
        limit_bytes: u64,
    ) -> std::io::Result<PrefixStore> {
        let folder = folder.join(fingerprint);
        fs::create_dir_all(&folder)?;
        let mut found: Vec<(SystemTime, PageKey, u64)> = Vec::new();
        for entry in fs::read_dir(&folder)? {
            let entry = entry?;
            let (path, metadata) = (entry.path(), entry.metadata()?);
            match path.file_name().and_then(|name| name.to_str()).and_then(parse_name) {
                Some(key) => found.push((metadata.modified()?, key, metadata.len())),
                // A temporary file of a process that was killed.
                None => fs::remove_file(&path)?,
            }
        }
        found.sort_unstable_by_key(|(modified, key, _)| (*modified, *key));
        let (writer, receiver) = sync_channel::<(PageKey, PathBuf, Vec<u8>)>(QUEUE);
        let failed = Arc::new(Mutex::new(Vec::new()));
        let failures = Arc::clone(&failed);
        let thread = std::thread::Builder::new().name("bodkin-prefixes".to_owned());
        thread.spawn(move || {
            for (key, path, bytes) in receiver {
                if write(&path, &bytes).is_err() {
                    lock(&failures).push(key);
                }
            }
        })?;
        let mut store = PrefixStore {
            folder,
            limit_bytes,
            bytes: 0,
            pages: HashMap::new(),
            order: BTreeSet::new(),
            clock: 0,
            writer,
            failed,
        };
        for (_, key, bytes) in found {
            store.note(key, bytes);
        }
        store.shrink();
        Ok(store)
    }

    fn path(&self, key: &PageKey) -> PathBuf {
        let name: String = key.iter().map(|byte| format!("{byte:02x}")).collect();
        self.folder.join(name + ".page")
    }

    /// Adds a page to the index, or makes it the most recently used one.
    fn note(&mut self, key: PageKey, bytes: u64) {
        self.forget(&key);
        self.clock += 1;
        self.pages.insert(key, (bytes, self.clock));
        self.order.insert((self.clock, key));
        self.bytes += bytes;
    }

    fn forget(&mut self, key: &PageKey) {
        if let Some((bytes, used)) = self.pages.remove(key) {
            self.order.remove(&(used, *key));
            self.bytes -= bytes;
        }
    }

    /// Removes the least recently used pages until the rest is within the limit.
    fn shrink(&mut self) {
        while self.bytes > self.limit_bytes
            && let Some(&(_, key)) = self.order.first()
        {
            self.forget(&key);
            // Another process may have removed it.
            let _ = fs::remove_file(self.path(&key));
        }
    }

    /// Whether the page is stored, or waits to be written.
    pub(crate) fn contains(&mut self, key: &PageKey) -> bool {
        let failed = std::mem::take(&mut *lock(&self.failed));
        failed.iter().for_each(|key| self.forget(key));
        self.pages.contains_key(key)
    }

    /// Reads a page. One that is damaged is removed.
    pub(crate) fn load(&mut self, key: &PageKey) -> Option<StoredPage> {
        let (bytes, _) = *self.pages.get(key)?;
        let path = self.path(key);
        // A page that waits to be written is not there yet.
        let content = fs::read(&path).ok()?;
        match decode(&content) {
            Some(page) => {
                self.note(*key, bytes);
                // Its time of modification is that of its last use.
                let now = SystemTime::now();
                let _ = fs::File::open(&path).and_then(|file| file.set_modified(now));
                Some(page)
            }
            None => {
                self.forget(key);
                let _ = fs::remove_file(path);
                None
            }
        }
    }

    /// Stores a page, unless the thread that writes them is too far behind.
    pub(crate) fn save(&mut self, key: PageKey, page: &StoredPage) {
        let content = encode(page);
        let bytes = content.len() as u64;
        match self.writer.try_send((key, self.path(&key), content)) {
            Ok(()) => {
                self.note(key, bytes);
                self.shrink();
            }
            Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) => {}
        }
    }
}

/// The key in a file's name.
fn parse_name(name: &str) -> Option<PageKey> {
    let digits = name.strip_suffix(".page").filter(|digits| digits.len() == 64)?;
    let mut key = PageKey::default();
    for (byte, pair) in key.iter_mut().zip(digits.as_bytes().chunks_exact(2)) {
        *byte = u8::from_str_radix(str::from_utf8(pair).ok()?, 16).ok()?;
    }
    Some(key)
}

fn lock(failed: &Mutex<Vec<PageKey>>) -> MutexGuard<'_, Vec<PageKey>> {
    failed.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Writes a file as a whole, or nothing.
fn write(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let temporary = path.with_extension("part");
    let written = fs::File::create(&temporary)
        .and_then(|mut file| file.write_all(bytes))
        .and_then(|()| fs::rename(&temporary, path));
    if written.is_err() {
        // There is nothing else to do about a disk that is full.
        let _ = fs::remove_file(&temporary);
    }
    written
}

/// Magic, prefill tokens, the length of each part plus 1 or 0, the parts, the hash of it all.
fn encode(page: &StoredPage) -> Vec<u8> {
    let parts = || page.windows.iter().chain([&page.state]);
    let mut bytes = MAGIC.to_vec();
    bytes.extend(page.prefill.to_le_bytes());
    bytes.extend((page.windows.len() as u32).to_le_bytes());
    for part in parts() {
        let len = part.as_ref().map_or(0, |part| part.len() as u64 + 1);
        bytes.extend(len.to_le_bytes());
    }
    parts().flatten().for_each(|part| bytes.extend(part));
    let hash = Sha256::digest(&bytes);
    bytes.extend(hash);
    bytes
}

/// None if the bytes are not those of a whole page.
fn decode(bytes: &[u8]) -> Option<StoredPage> {
    let (body, hash) = bytes.split_at_checked(bytes.len().checked_sub(HASH_BYTES)?)?;
    if Sha256::digest(body).as_slice() != hash {
        return None;
    }
    let mut rest = body.strip_prefix(MAGIC)?;
    let mut take = |count: usize| -> Option<&[u8]> {
        let (taken, left) = rest.split_at_checked(count)?;
        rest = left;
        Some(taken)
    };
    let prefill = u32::from_le_bytes(take(4)?.try_into().ok()?);
    let windows = u32::from_le_bytes(take(4)?.try_into().ok()?) as usize;
    let mut lens = Vec::new();
    for _ in 0..windows.checked_add(1)? {
        lens.push(u64::from_le_bytes(take(8)?.try_into().ok()?));
    }
    let mut parts = Vec::new();
    for len in lens {
        parts.push(match len.checked_sub(1) {
            Some(len) => Some(take(usize::try_from(len).ok()?)?.to_vec()),
            None => None,
        });
    }
    let state = parts.pop()?;
    Some(StoredPage { prefill, windows: parts, state })
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    fn page(byte: u8, len: usize) -> StoredPage {
        let windows = vec![Some(vec![byte; len]), None, Some(Vec::new())];
        StoredPage { prefill: 32, windows, state: byte.is_multiple_of(2).then(|| vec![byte; 3]) }
    }

    fn key(number: u32) -> PageKey {
        page_key(&PageKey::default(), &[number])
    }

    /// Waits for the thread that writes.
    fn load(store: &mut PrefixStore, key: &PageKey) -> Option<StoredPage> {
        let start = Instant::now();
        loop {
            let found = store.load(key);
            if found.is_some() || start.elapsed() > Duration::from_secs(5) {
                return found;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn files(folder: &Path) -> usize {
        fs::read_dir(folder).unwrap().count()
    }

    #[test]
    fn pages_come_back_after_a_restart_and_torn_ones_do_not() {
        let folder = tempfile::tempdir().unwrap();
        let mut store = PrefixStore::open(folder.path(), "model", 1 << 20).unwrap();
        for number in 0..3 {
            store.save(key(number), &page(number as u8, 100));
            assert_eq!(load(&mut store, &key(number)), Some(page(number as u8, 100)));
        }
        assert_eq!(store.load(&key(9)), None);
        drop(store);
        let model = folder.path().join("model");
        // One is torn, one has a wrong bit, one is a temporary file.
        let mut store = PrefixStore::open(folder.path(), "model", 1 << 20).unwrap();
        let (torn, wrong) = (store.path(&key(0)), store.path(&key(1)));
        let whole = fs::read(&torn).unwrap();
        fs::write(&torn, &whole[..whole.len() / 2]).unwrap();
        let mut bytes = fs::read(&wrong).unwrap();
        bytes[50] ^= 1;
        fs::write(&wrong, bytes).unwrap();
        assert_eq!((store.load(&key(0)), store.load(&key(1))), (None, None));
        assert_eq!(store.load(&key(2)), Some(page(2, 100)));
        fs::write(model.join("x.part"), b"half").unwrap();
        assert_eq!(files(&model), 2);
        let mut store = PrefixStore::open(folder.path(), "model", 1 << 20).unwrap();
        assert!(store.contains(&key(2)) && files(&model) == 1);
        // Another model finds nothing.
        assert!(!PrefixStore::open(folder.path(), "other", 1 << 20).unwrap().contains(&key(2)));
    }

    #[test]
    fn the_least_recently_used_goes_first() {
        let folder = tempfile::tempdir().unwrap();
        let mut store = PrefixStore::open(folder.path(), "model", 3500).unwrap();
        for number in 0..3 {
            store.save(key(number), &page(1, 1000));
            load(&mut store, &key(number)).unwrap();
        }
        store.load(&key(0)).unwrap();
        store.save(key(3), &page(1, 1000));
        load(&mut store, &key(3)).unwrap();
        let there: Vec<bool> = (0..4).map(|number| store.contains(&key(number))).collect();
        assert_eq!(there, [true, false, true, true]);
        assert!(store.bytes <= 3500);
    }

    #[test]
    fn hostile_files_are_no_pages() {
        let mut bytes = MAGIC.to_vec();
        bytes.extend([0xFF; 40]);
        let hash = Sha256::digest(&bytes);
        bytes.extend(hash);
        assert_eq!(decode(&bytes), None);
        assert_eq!(decode(b""), None);
        assert_eq!(decode(&encode(&page(4, 10))), Some(page(4, 10)));
    }

    #[test]
    fn a_page_that_cannot_be_written_may_be_stored_again() {
        let folder = tempfile::tempdir().unwrap();
        let mut store = PrefixStore::open(folder.path(), "model", 1 << 20).unwrap();
        // Its place is taken by a folder, as if the disk refused it.
        fs::create_dir(store.path(&key(1))).unwrap();
        store.save(key(1), &page(1, 10));
        let start = Instant::now();
        while store.contains(&key(1)) {
            assert!(start.elapsed() < Duration::from_secs(10));
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(store.bytes, 0);
        fs::remove_dir(store.path(&key(1))).unwrap();
        store.save(key(1), &page(1, 10));
        assert!(load(&mut store, &key(1)).is_some());
    }
}
