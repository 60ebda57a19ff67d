//! Read-only memory maps of files, and the message when a mapped file is truncated. The only module
//! of this crate with `unsafe` code.

#![allow(unsafe_code)]

use std::fs;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use memmap2::Mmap;

use crate::error::{Error, Result};

/// Bytes of one piece of advice: of more the system reads only a part ahead, which the disk's
/// settings decide.
#[cfg(unix)]
const ADVICE_BYTES: usize = 128 << 10;

/// A map of a file.
#[derive(Debug)]
pub(super) struct Map {
    bytes: Mmap,
    file: fs::File,
    /// When the file was written, if the system says.
    modified: Option<SystemTime>,
    path: PathBuf,
    #[cfg(unix)]
    registration: &'static truncation::Registration,
}

impl Map {
    /// Maps a regular file.
    pub(super) fn open(path: &Path) -> Result<Map> {
        let metadata = fs::metadata(path).map_err(|source| Error::io(path, "open", source))?;
        if metadata.is_dir() {
            return Err(Error::Directory { file: path.to_path_buf() });
        }
        if !metadata.is_file() {
            let found = kind_of_file(metadata.file_type());
            return Err(Error::invalid(path, "file type", "a regular file", found));
        }
        let file = fs::File::open(path).map_err(|source| Error::io(path, "open", source))?;
        // SAFETY: the map is only read. Another process that writes to the file changes weights,
        // and one that truncates it causes SIGBUS: see `truncation`. Neither can be prevented, and
        // both are the price of not copying gigabytes.
        let bytes = unsafe { Mmap::map(&file) };
        let bytes = bytes.map_err(|source| Error::io(path, "map", source))?;
        let metadata = file.metadata().map_err(|source| Error::io(path, "read", source))?;
        Ok(Map {
            modified: metadata.modified().ok(),
            #[cfg(unix)]
            registration: truncation::register(&bytes, path),
            bytes,
            file,
            path: path.to_path_buf(),
        })
    }

    /// Fails if the file is now shorter than its map, which it is read through, or was written to.
    pub(super) fn check_unchanged(&self) -> Result<()> {
        let metadata = self.file.metadata();
        let metadata = metadata.map_err(|source| Error::io(&self.path, "read", source))?;
        let (expected, actual) = (self.bytes.len() as u64, metadata.len());
        if actual < expected {
            let item = "the file as it was opened".to_owned();
            return Err(Error::Truncated { file: self.path.clone(), item, expected, actual });
        }
        if metadata.modified().ok() != self.modified {
            return Err(Error::Changed { file: self.path.clone() });
        }
        Ok(())
    }

    /// Tells the system that the pages of the range will be read soon.
    #[cfg_attr(not(unix), allow(unused_variables))]
    pub(super) fn will_need(&self, offset: usize, len: usize) {
        #[cfg(unix)]
        for start in (0..len).step_by(ADVICE_BYTES) {
            let len = ADVICE_BYTES.min(len - start);
            // Advice that is not taken costs time, nothing else.
            let _ = self.bytes.advise_range(memmap2::Advice::WillNeed, offset + start, len);
        }
    }

    /// Releases the pages that are wholly in the range: the system reads them again when needed.
    #[cfg_attr(not(unix), allow(unused_variables))]
    pub(super) fn release(&self, offset: usize, len: usize) {
        // Where pages are larger, the system refuses, and the pages stay.
        const PAGE: usize = 4096;
        let (start, end) = (offset.next_multiple_of(PAGE), (offset + len) / PAGE * PAGE);
        #[cfg(unix)]
        if start < end {
            let advice = memmap2::UncheckedAdvice::DontNeed;
            // SAFETY: the map is shared with the file and never written, so released pages are read
            // again with the same bytes.
            let _ = unsafe { self.bytes.unchecked_advise_range(advice, start, end - start) };
        }
    }
}

/// What something in a file system is, for messages.
pub fn kind_of_file(kind: fs::FileType) -> &'static str {
    #[cfg(unix)]
    {
        use std::os::unix::fs::FileTypeExt;
        let kinds = [
            (kind.is_fifo(), "a named pipe (FIFO)"),
            (kind.is_char_device(), "a character device"),
            (kind.is_block_device(), "a block device"),
            (kind.is_socket(), "a socket"),
        ];
        if let Some((_, name)) = kinds.into_iter().find(|(is_it, _)| *is_it) {
            return name;
        }
    }
    if kind.is_dir() { "a folder" } else { "a regular file" }
}

impl Deref for Map {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes
    }
}

#[cfg(unix)]
impl Drop for Map {
    fn drop(&mut self) {
        self.registration.remove();
    }
}

/// Installs a handler of SIGBUS for the whole process: if a mapped file is truncated by another
/// process and then read, one line with its name goes to standard error and the process exits with
/// status 1, after `before_exit`, which must be async-signal-safe. Without it the signal kills the
/// process without a message. For binaries; does nothing where there are no signals.
#[cfg_attr(not(unix), allow(unused_variables))]
pub fn exit_on_truncation(before_exit: fn()) {
    #[cfg(unix)]
    truncation::install(before_exit);
}

#[cfg(unix)]
mod truncation {
    use std::ffi::{c_int, c_void};
    use std::path::Path;
    use std::ptr;
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};

    /// A map in the list that the signal handler reads. It is never freed, because a handler may
    /// read it at any time; a process opens few files.
    #[derive(Debug)]
    pub(super) struct Registration {
        start: usize,
        /// Zero after the map is gone.
        end: AtomicUsize,
        /// What the handler prints: it must not allocate.
        message: String,
        next: *const Registration,
    }

    // SAFETY: the fields but `end` do not change after the registration is in the list.
    unsafe impl Sync for Registration {}

    static FIRST: AtomicPtr<Registration> = AtomicPtr::new(ptr::null_mut());
    /// Whether a thread has begun to print its message and exit.
    static IS_EXITING: AtomicBool = AtomicBool::new(false);
    /// What comes before the message, set before the handler is installed.
    static BEFORE_EXIT: OnceLock<fn()> = OnceLock::new();

    pub(super) fn register(bytes: &[u8], path: &Path) -> &'static Registration {
        let path = path.display().to_string().replace(char::is_control, "\u{fffd}");
        let range = bytes.as_ptr_range();
        let registration = Box::leak(Box::new(Registration {
            start: range.start as usize,
            end: AtomicUsize::new(range.end as usize),
            message: format!("error: {path}: truncated by another process while in use\n"),
            next: FIRST.load(Ordering::Acquire),
        }));
        while let Err(first) = FIRST.compare_exchange(
            registration.next.cast_mut(),
            registration,
            Ordering::Release,
            Ordering::Acquire,
        ) {
            registration.next = first;
        }
        registration
    }

    impl Registration {
        pub(super) fn remove(&self) {
            self.end.store(0, Ordering::Release);
        }
    }

    pub(super) fn install(before_exit: fn()) {
        // A second call leaves the first in its place.
        let _ = BEFORE_EXIT.set(before_exit);
        // SAFETY: the handler has the signature that SA_SIGINFO requires and calls only functions
        // that are async-signal-safe; all zeros are a valid `sigaction`.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = on_sigbus as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
            libc::sigaction(libc::SIGBUS, &action, ptr::null_mut());
        }
    }

    extern "C" fn on_sigbus(signal: c_int, info: *mut libc::siginfo_t, _context: *mut c_void) {
        // SAFETY: the system passes a valid `info`, registrations are never freed, and `write`,
        // `_exit`, `pause` and `signal` are async-signal-safe.
        unsafe {
            let address = (*info).si_addr() as usize;
            let mut next = FIRST.load(Ordering::Acquire).cast_const();
            while let Some(registration) = next.as_ref() {
                let end = registration.end.load(Ordering::Acquire);
                if (registration.start..end).contains(&address) {
                    // Another thread that reads the file is about to end the process.
                    while IS_EXITING.swap(true, Ordering::AcqRel) {
                        libc::pause();
                    }
                    if let Some(before_exit) = BEFORE_EXIT.get() {
                        before_exit();
                    }
                    let message = registration.message.as_bytes();
                    libc::write(libc::STDERR_FILENO, message.as_ptr().cast(), message.len());
                    libc::_exit(1);
                }
                next = registration.next;
            }
            // Not a map of a file: the instruction faults again, with the default action.
            libc::signal(signal, libc::SIG_DFL);
        }
    }
}
