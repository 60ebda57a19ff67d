//! Progress of downloads and loads, as events for a callback. It prints nothing.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// An event that a caller may show to a user.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress<'a> {
    /// A phase of work begins, such as a download. Phases do not overlap.
    Begin {
        /// The work and its object, such as `loading`.
        what: &'a str,
        /// The bytes of the whole phase, if they are known.
        total_bytes: Option<u64>,
    },
    /// Bytes of the current phase that are done.
    Bytes(u64),
    /// The current phase has ended, successfully or not.
    End,
    /// A decision that a user may want to know, such as a fallback to the CPU.
    Note(&'a str),
    /// A finished step of a load, for those who want to follow it.
    Detail(&'a str),
}

type Callback = dyn Fn(Progress<'_>) + Send + Sync;

/// Where [`Progress`] events go. The default discards them.
#[derive(Clone, Default)]
pub struct Reporter(Option<Arc<Callback>>);

impl fmt::Debug for Reporter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "Reporter(callback)" } else { "Reporter(none)" })
    }
}

impl Reporter {
    /// Sends every event to `callback`, which any thread may call.
    pub fn new(callback: impl Fn(Progress<'_>) + Send + Sync + 'static) -> Reporter {
        Reporter(Some(Arc::new(callback)))
    }

    /// Begins a phase, which ends when the returned value is dropped.
    pub fn begin(&self, what: &str, total_bytes: Option<u64>) -> Phase<'_> {
        self.send(Progress::Begin { what, total_bytes });
        Phase { reporter: self, bytes: AtomicU64::new(0) }
    }

    /// Reports a finished step of a load.
    pub fn detail(&self, text: &str) {
        self.send(Progress::Detail(text));
    }

    /// Reports a decision that a user may want to know.
    pub fn note(&self, text: &str) {
        self.send(Progress::Note(text));
    }

    fn send(&self, progress: Progress<'_>) {
        if let Some(callback) = &self.0 {
            callback(progress);
        }
    }
}

/// One phase of work over bytes.
#[derive(Debug)]
pub struct Phase<'a> {
    reporter: &'a Reporter,
    bytes: AtomicU64,
}

impl Phase<'_> {
    /// Sets the number of bytes that are done.
    pub fn set(&self, bytes: u64) {
        self.bytes.store(bytes, Relaxed);
        self.reporter.send(Progress::Bytes(bytes));
    }

    /// Adds to the number of bytes that are done.
    pub fn add(&self, bytes: u64) {
        let before = self.bytes.fetch_add(bytes, Relaxed);
        self.reporter.send(Progress::Bytes(before + bytes));
    }
}

impl Drop for Phase<'_> {
    fn drop(&mut self) {
        self.reporter.send(Progress::End);
    }
}
