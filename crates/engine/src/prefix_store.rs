//! Pages of the KV cache on disk, so that a restarted server does not compute its prompts again. A
//! page is named by the hash of its tokens and all before them; the folder belongs to one model on
//! one kind of device, and all folders beside it share one budget. Files are written by a thread of
//! their own, under a temporary name first, and end with their hash, so that one that is torn is
//! ignored. This file must not know sequences.

mod ledger;

use std::fs;
use std::io::{Read, Write};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::SystemTime;

use sha2::{Digest, Sha256};

pub(crate) use ledger::PageKey;
use ledger::{Ledger, Place, lock, parse_name};

/// The first bytes of a file.
const MAGIC: &[u8; 8] = b"bodkinP1";

/// The bytes of the hash at the end of a file.
const HASH_BYTES: usize = 32;

/// Bytes of pages that wait to be written, above which no further ones are taken.
const QUEUE_BYTES: u64 = 256 << 20;

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

/// The pages of one model, in a folder of pages of all models with a limit on its bytes.
pub struct PrefixStore {
    /// The name of the model's folder.
    fingerprint: Arc<str>,
    ledger: Arc<Mutex<Ledger>>,
    writer: Sender<(PageKey, StoredPage)>,
    /// Bytes of pages that wait to be written.
    queued: Arc<AtomicU64>,
}

impl PrefixStore {
    /// Opens the folder `fingerprint` in `folder`, which holds pages of one model on one kind of
    /// device. The pages of all models in `folder` have at most `limit_bytes` together.
    ///
    /// # Errors
    /// If the folder cannot be made or read.
    pub fn open(
        folder: &Path,
        fingerprint: &str,
        limit_bytes: u64,
    ) -> std::io::Result<PrefixStore> {
        let own = folder.join(fingerprint);
        fs::create_dir_all(&own)?;
        let ledger = Ledger::of(folder, limit_bytes)?;
        let fingerprint: Arc<str> = fingerprint.into();
        for entry in fs::read_dir(&own)?.flatten() {
            let key = entry.file_name().to_str().and_then(parse_name);
            let (Some(key), Ok(metadata)) = (key, entry.metadata()) else {
                // A temporary file of a process that was killed.
                let _ = fs::remove_file(entry.path());
                continue;
            };
            // One that another process has written meanwhile.
            let (place, mut ledger) = ((Arc::clone(&fingerprint), key), lock(&ledger));
            if ledger.bytes_of(&place).is_none() {
                ledger.note(place, metadata.len());
            }
        }
        lock(&ledger).shrink();
        let (writer, receiver) = channel();
        let queued = Arc::new(AtomicU64::new(0));
        let thread = std::thread::Builder::new().name("bodkin-prefixes".to_owned());
        let (of, shared) = (Arc::clone(&fingerprint), Arc::clone(&ledger));
        let waiting = Arc::clone(&queued);
        thread.spawn(move || write_all(&receiver, &of, &shared, &waiting))?;
        Ok(PrefixStore { fingerprint, ledger, writer, queued })
    }

    fn ledger(&self) -> MutexGuard<'_, Ledger> {
        lock(&self.ledger)
    }

    fn place(&self, key: &PageKey) -> Place {
        (Arc::clone(&self.fingerprint), *key)
    }

    /// Whether the page is stored, or waits to be written.
    pub(crate) fn contains(&self, key: &PageKey) -> bool {
        self.ledger().bytes_of(&self.place(key)).is_some()
    }

    /// Reads a page. One that is damaged, gone or cannot be read may be stored again.
    pub(crate) fn load(&self, key: &PageKey) -> Option<StoredPage> {
        let place = self.place(key);
        let (bytes, path) = {
            let ledger = self.ledger();
            (ledger.bytes_of(&place)?, ledger.path(&place))
        };
        let mut content = Vec::new();
        let read = fs::File::open(&path).and_then(|mut file| {
            file.read_to_end(&mut content)?;
            Ok(file)
        });
        if read.is_err() && !self.is_written() {
            // It may wait to be written.
            return None;
        }
        if let (Ok(file), Some(page)) = (read, decode(&content)) {
            let mut ledger = self.ledger();
            if ledger.bytes_of(&place).is_some() {
                ledger.note(place, bytes);
            }
            drop(ledger);
            // Its time of modification is that of its last use.
            let _ = file.set_modified(SystemTime::now());
            return Some(page);
        }
        // While the ledger is locked, nobody writes it anew.
        let mut ledger = self.ledger();
        ledger.forget(&place);
        let _ = fs::remove_file(path);
        None
    }

    /// Whether no page waits to be written.
    fn is_written(&self) -> bool {
        self.queued.load(Relaxed) == 0
    }

    /// Whether the thread that writes pages keeps up.
    pub(crate) fn has_room(&self) -> bool {
        self.queued.load(Relaxed) < QUEUE_BYTES
    }

    /// Stores a page.
    pub(crate) fn save(&self, key: PageKey, page: StoredPage) {
        let (place, bytes) = (self.place(&key), encoded_bytes(&page));
        self.queued.fetch_add(bytes, Relaxed);
        // The thread that writes looks for it there.
        self.ledger().note(place.clone(), bytes);
        match self.writer.send((key, page)) {
            Ok(()) => self.ledger().shrink(),
            Err(_) => self.ledger().forget(&place),
        }
    }
}

/// Writes the pages that come, without those that had to go before they were written.
fn write_all(
    pages: &Receiver<(PageKey, StoredPage)>,
    fingerprint: &Arc<str>,
    ledger: &Mutex<Ledger>,
    queued: &AtomicU64,
) {
    for (key, page) in pages {
        let place = (Arc::clone(fingerprint), key);
        let is_kept = || lock(ledger).bytes_of(&place).is_some();
        if is_kept() {
            let path = lock(ledger).path(&place);
            let written = write(&path, &encode(&page));
            if written.is_err() {
                // The page may be stored again when the disk has room.
                lock(ledger).forget(&place);
            } else if !is_kept() {
                // It had to go meanwhile.
                let _ = fs::remove_file(&path);
            }
        }
        queued.fetch_sub(encoded_bytes(&page), Relaxed);
    }
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

/// The length of an encoded page.
fn encoded_bytes(page: &StoredPage) -> u64 {
    let parts = || page.windows.iter().chain([&page.state]);
    let head = MAGIC.len() + 2 * size_of::<u32>() + size_of::<u64>() * parts().count();
    (head + parts().flatten().map(Vec::len).sum::<usize>() + HASH_BYTES) as u64
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
    use std::path::PathBuf;
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
    fn load(store: &PrefixStore, key: &PageKey) -> Option<StoredPage> {
        let start = Instant::now();
        loop {
            let found = store.load(key);
            if found.is_some() || start.elapsed() > Duration::from_secs(5) {
                return found;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn path(store: &PrefixStore, key: &PageKey) -> PathBuf {
        store.ledger().path(&store.place(key))
    }

    fn files(folder: &Path) -> usize {
        fs::read_dir(folder).unwrap().count()
    }

    #[test]
    fn pages_come_back_after_a_restart_and_torn_ones_do_not() {
        let folder = tempfile::tempdir().unwrap();
        let store = PrefixStore::open(folder.path(), "model", 1 << 20).unwrap();
        for number in 0..3 {
            store.save(key(number), page(number as u8, 100));
            assert_eq!(load(&store, &key(number)), Some(page(number as u8, 100)));
        }
        assert_eq!(store.load(&key(9)), None);
        drop(store);
        let model = folder.path().join("model");
        // One is torn, one has a wrong bit, one is a temporary file.
        let store = PrefixStore::open(folder.path(), "model", 1 << 20).unwrap();
        let (torn, wrong) = (path(&store, &key(0)), path(&store, &key(1)));
        let whole = fs::read(&torn).unwrap();
        fs::write(&torn, &whole[..whole.len() / 2]).unwrap();
        let mut bytes = fs::read(&wrong).unwrap();
        bytes[50] ^= 1;
        fs::write(&wrong, bytes).unwrap();
        assert_eq!((store.load(&key(0)), store.load(&key(1))), (None, None));
        assert_eq!(store.load(&key(2)), Some(page(2, 100)));
        fs::write(model.join("x.part"), b"half").unwrap();
        assert_eq!(files(&model), 2);
        let store = PrefixStore::open(folder.path(), "model", 1 << 20).unwrap();
        assert!(store.contains(&key(2)) && files(&model) == 1);
        // Another model finds nothing.
        assert!(!PrefixStore::open(folder.path(), "other", 1 << 20).unwrap().contains(&key(2)));
    }

    #[test]
    fn a_page_that_is_gone_may_be_stored_again() {
        let folder = tempfile::tempdir().unwrap();
        let store = PrefixStore::open(folder.path(), "model", 1 << 20).unwrap();
        store.save(key(1), page(1, 100));
        assert!(load(&store, &key(1)).is_some());
        while !store.is_written() {
            std::thread::yield_now();
        }
        fs::remove_file(path(&store, &key(1))).unwrap();
        assert!(store.contains(&key(1)));
        assert_eq!(store.load(&key(1)), None);
        assert!(!store.contains(&key(1)));
    }

    #[test]
    fn the_least_recently_used_goes_first() {
        let folder = tempfile::tempdir().unwrap();
        let store = PrefixStore::open(folder.path(), "model", 3500).unwrap();
        for number in 0..3 {
            store.save(key(number), page(1, 1000));
            load(&store, &key(number)).unwrap();
        }
        store.load(&key(0)).unwrap();
        store.save(key(3), page(1, 1000));
        load(&store, &key(3)).unwrap();
        let there: Vec<bool> = (0..4).map(|number| store.contains(&key(number))).collect();
        assert_eq!(there, [true, false, true, true]);
        assert!(store.ledger().bytes() <= 3500);
    }

    #[test]
    fn models_share_one_budget_also_after_a_restart() {
        let folder = tempfile::tempdir().unwrap();
        let open = |model| PrefixStore::open(folder.path(), model, 3500).unwrap();
        let (a, b) = (open("a"), open("b"));
        for (store, number) in [(&a, 0), (&b, 1), (&a, 2), (&b, 3)] {
            store.save(key(number), page(1, 1000));
            load(store, &key(number)).unwrap();
        }
        assert!(!a.contains(&key(0)) && a.contains(&key(2)));
        assert!(b.contains(&key(1)) && b.contains(&key(3)) && !b.contains(&key(2)));
        drop((a, b));
        // The threads that write hold the ledger until they have ended.
        let root = folder.path().canonicalize().unwrap();
        let start = Instant::now();
        while Ledger::is_open(&root) {
            assert!(start.elapsed() < Duration::from_secs(10));
            std::thread::sleep(Duration::from_millis(1));
        }
        let c = PrefixStore::open(folder.path(), "c", 2500).unwrap();
        assert!(c.ledger().bytes() <= 2500 && c.ledger().bytes() > 0);
        let left = files(&folder.path().join("a")) + files(&folder.path().join("b"));
        assert_eq!(left, 2);
    }

    /// Pages that have to go before they are written are not written at all.
    #[test]
    fn no_page_is_left_behind_without_being_counted() {
        let folder = tempfile::tempdir().unwrap();
        let store = PrefixStore::open(folder.path(), "model", 3500).unwrap();
        for number in 0..60 {
            store.save(key(number), page(1, 1000));
        }
        let last = (0..60).rev().find(|&number| store.contains(&key(number))).unwrap();
        assert!(load(&store, &key(last)).is_some());
        let kept = (0..60).filter(|&number| store.contains(&key(number))).count();
        let start = Instant::now();
        while files(&folder.path().join("model")) != kept {
            assert!(start.elapsed() < Duration::from_secs(10), "expected {kept} files");
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(store.ledger().bytes() <= 3500);
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
        let store = PrefixStore::open(folder.path(), "model", 1 << 20).unwrap();
        // Its place is taken by a folder, as if the disk refused it.
        fs::create_dir(path(&store, &key(1))).unwrap();
        store.save(key(1), page(1, 10));
        let start = Instant::now();
        while store.contains(&key(1)) {
            assert!(start.elapsed() < Duration::from_secs(10));
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(store.ledger().bytes(), 0);
        fs::remove_dir(path(&store, &key(1))).unwrap();
        store.save(key(1), page(1, 10));
        assert!(load(&store, &key(1)).is_some());
    }
}
