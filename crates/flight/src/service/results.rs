//! Results that wait to be fetched, in bounded memory: the oldest make room.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};

use arrow_array::RecordBatch;
use arrow_schema::{Schema, SchemaRef};

/// Batches of one schema.
#[derive(Clone)]
pub(super) struct Result {
    pub(super) schema: SchemaRef,
    pub(super) batches: Vec<RecordBatch>,
    pub(super) rows: usize,
    pub(super) bytes: usize,
}

impl Result {
    pub(super) fn new() -> Result {
        Result { schema: Schema::empty().into(), batches: Vec::new(), rows: 0, bytes: 0 }
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
    kept: Mutex<VecDeque<(String, Result)>>,
    limit: usize,
}

impl Results {
    pub(super) fn new(limit: usize) -> Results {
        Results { kept: Mutex::default(), limit }
    }

    /// The most bytes of all results.
    pub(super) fn limit(&self) -> usize {
        self.limit
    }

    /// Keeps a result in the place of one with its name.
    pub(super) fn keep(&self, name: &str, result: Result) {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.retain(|(other, _)| other != name);
        kept.push_back((name.to_owned(), result));
        while kept.len() > 1 && kept.iter().map(|(_, r)| r.bytes).sum::<usize>() > self.limit {
            kept.pop_front();
        }
    }

    /// A result, which stays.
    pub(super) fn look(&self, name: &str) -> Option<Result> {
        let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.iter().find(|(other, _)| other == name).map(|(_, result)| result.clone())
    }

    /// A result, which is then gone.
    pub(super) fn take(&self, name: &str) -> Option<Result> {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let place = kept.iter().position(|(other, _)| other == name)?;
        kept.remove(place).map(|(_, result)| result)
    }
}
