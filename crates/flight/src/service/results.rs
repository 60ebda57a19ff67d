//! Results that wait to be fetched, in bounded memory: the oldest make room.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};

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

impl StoredResult {
    pub(super) fn new() -> StoredResult {
        StoredResult { schema: Schema::empty().into(), batches: Vec::new(), rows: 0, bytes: 0 }
    }

    pub(super) fn push(&mut self, batch: RecordBatch) {
        self.schema = batch.schema();
        self.rows += batch.num_rows();
        self.bytes += batch.get_array_memory_size();
        self.batches.push(batch);
    }
}

/// Results by name, the oldest first.
pub(super) struct Results {
    stored: Mutex<VecDeque<(String, StoredResult)>>,
    limit: usize,
}

impl Results {
    pub(super) fn new(limit: usize) -> Results {
        Results { stored: Mutex::default(), limit }
    }

    /// The most bytes of all results.
    pub(super) fn limit(&self) -> usize {
        self.limit
    }

    /// Stores a result, and removes the oldest ones beyond the limit. It replaces one of its name.
    pub(super) fn insert(&self, name: &str, result: StoredResult) {
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
