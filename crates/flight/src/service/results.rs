//! Results that wait to be fetched, in bounded memory: the oldest make room.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use arrow_array::RecordBatch;
use arrow_schema::{Schema, SchemaRef};

/// Batches of one schema.
#[derive(Clone)]
pub(super) struct StoredResult {
    pub(super) schema: SchemaRef,
    pub(super) batches: Vec<RecordBatch>,
    pub(super) rows: usize,
    pub(super) bytes: usize,
}

/// A result whose batches still arrive: all of these together are within the limit, too.
pub(super) struct Incoming {
    results: Arc<Results>,
    result: StoredResult,
}

impl Incoming {
    pub(super) fn new(results: Arc<Results>) -> Incoming {
        let schema = Schema::empty().into();
        Incoming {
            results,
            result: StoredResult { schema, batches: Vec::new(), rows: 0, bytes: 0 },
        }
    }

    /// Adds a batch, and returns the rows so far.
    ///
    /// # Errors
    /// The limit, if it is exceeded.
    pub(super) fn push(&mut self, batch: RecordBatch) -> Result<usize, usize> {
        let (bytes, result) = (batch.get_array_memory_size(), &mut self.result);
        result.bytes += bytes;
        if self.results.incoming.fetch_add(bytes, Ordering::Relaxed) + bytes > self.results.limit {
            return Err(self.results.limit);
        }
        result.schema = batch.schema();
        result.rows += batch.num_rows();
        result.batches.push(batch);
        Ok(result.rows)
    }

    /// Stores the complete result, and returns its rows.
    pub(super) fn store(&self, name: &str) -> usize {
        self.results.insert(name, self.result.clone());
        self.result.rows
    }
}

impl Drop for Incoming {
    fn drop(&mut self) {
        self.results.incoming.fetch_sub(self.result.bytes, Ordering::Relaxed);
    }
}

/// Results by name, the oldest first.
pub(super) struct Results {
    stored: Mutex<VecDeque<(String, StoredResult)>>,
    /// Bytes of results whose batches still arrive.
    incoming: AtomicUsize,
    /// The most bytes of stored results, and of incoming ones.
    limit: usize,
}

impl Results {
    pub(super) fn new(limit: usize) -> Results {
        Results { stored: Mutex::default(), incoming: AtomicUsize::new(0), limit }
    }

    /// Stores a result, and removes the oldest ones beyond the limit. It replaces one of its name.
    fn insert(&self, name: &str, result: StoredResult) {
        let mut stored = self.stored.lock().unwrap_or_else(PoisonError::into_inner);
        stored.retain(|(other, _)| other != name);
        stored.push_back((name.to_owned(), result));
        while stored.len() > 1 && stored.iter().map(|(_, r)| r.bytes).sum::<usize>() > self.limit {
            stored.pop_front();
        }
    }

    /// A copy of a result, which stays stored.
    pub(super) fn get(&self, name: &str) -> Option<StoredResult> {
        let stored = self.stored.lock().unwrap_or_else(PoisonError::into_inner);
        stored.iter().find(|(other, _)| other == name).map(|(_, result)| result.clone())
    }

    /// A result, which is no longer stored.
    pub(super) fn remove(&self, name: &str) -> Option<StoredResult> {
        let mut stored = self.stored.lock().unwrap_or_else(PoisonError::into_inner);
        let place = stored.iter().position(|(other, _)| other == name)?;
        stored.remove(place).map(|(_, result)| result)
    }
}
