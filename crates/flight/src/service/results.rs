//! Results that wait to be fetched, in bounded memory: the oldest make room.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use arrow_array::{Array, RecordBatch, UInt32Array};
use arrow_schema::SchemaRef;
use arrow_select::take::take_record_batch;
use bodkin_serve::Admitted;

/// Bytes that a result takes beside its batches and its name, about.
const RESULT_BYTES: usize = 1024;

/// Batches of one schema, for the caller who sent the texts.
#[derive(Clone)]
pub(super) struct StoredResult {
    owner: Admitted,
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
    pub(super) fn new(results: Arc<Results>, schema: SchemaRef, owner: Admitted) -> Incoming {
        let result = StoredResult { owner, schema, batches: Vec::new(), rows: 0, bytes: 0 };
        Incoming { results, result }
    }

    /// Adds a batch, and returns the rows so far.
    ///
    /// # Errors
    /// The limit, if it is exceeded.
    pub(super) fn push(&mut self, batch: RecordBatch) -> Result<usize, usize> {
        let batch = with_own_bytes(batch);
        let (bytes, result) = (bytes_of(&batch), &mut self.result);
        result.bytes += bytes;
        if self.results.incoming.fetch_add(bytes, Ordering::Relaxed) + bytes > self.results.limit {
            return Err(self.results.limit);
        }
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

    /// Stores a result, and removes the oldest ones beyond the limit. It replaces its owner's of
    /// the same name.
    fn insert(&self, name: &str, mut result: StoredResult) {
        result.bytes += name.len() + RESULT_BYTES;
        let mut stored = self.stored.lock().unwrap_or_else(PoisonError::into_inner);
        stored.retain(|(other, found)| other != name || found.owner != result.owner);
        stored.push_back((name.to_owned(), result));
        while stored.len() > 1 && stored.iter().map(|(_, r)| r.bytes).sum::<usize>() > self.limit {
            stored.pop_front();
        }
    }

    /// A copy of a result of its owner, which stays stored.
    pub(super) fn get(&self, owner: Admitted, name: &str) -> Option<StoredResult> {
        let stored = self.stored.lock().unwrap_or_else(PoisonError::into_inner);
        let is_asked =
            |(other, result): &&(String, StoredResult)| other == name && result.owner == owner;
        stored.iter().find(is_asked).map(|(_, result)| result.clone())
    }

    /// A result of its owner, which is no longer stored.
    pub(super) fn remove(&self, owner: Admitted, name: &str) -> Option<StoredResult> {
        let mut stored = self.stored.lock().unwrap_or_else(PoisonError::into_inner);
        let is_asked =
            |(other, result): &(String, StoredResult)| other == name && result.owner == owner;
        let place = stored.iter().position(is_asked)?;
        stored.remove(place).map(|(_, result)| result)
    }
}

/// A copy of a batch without the other bytes of the message that it came in.
fn with_own_bytes(batch: RecordBatch) -> RecordBatch {
    let rows = UInt32Array::from_iter_values(0..batch.num_rows() as u32);
    take_record_batch(&batch, &rows).unwrap_or(batch)
}

/// The bytes of a batch's rows.
fn bytes_of(batch: &RecordBatch) -> usize {
    let bytes = |column: &Arc<dyn Array>| {
        let whole = |_| column.get_array_memory_size();
        column.to_data().get_slice_memory_size().unwrap_or_else(whole)
    };
    batch.columns().iter().map(bytes).sum()
}
