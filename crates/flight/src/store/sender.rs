//! The thread that sends batches: each until the store has acknowledged it, and after a failure
//! without the rows that have landed.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use arrow_array::RecordBatch;
use serde_json::json;
use tokio::sync::mpsc::Receiver;
use tokio::time::sleep;

use super::connection::{Address, Store, ids, runtime};
use crate::batch::Id;
use crate::error::{Error, Result};

/// Pauses between attempts, and before the next batch if the store asked to slow down.
const FIRST_PAUSE: Duration = Duration::from_millis(250);
const LONGEST_PAUSE: Duration = Duration::from_secs(8);

/// How long a call may take to end after the caller wants to stop.
const GRACE: Duration = Duration::from_secs(2);

/// How an upload goes.
pub struct UploadOptions {
    /// The store.
    pub address: Address,
    /// The dataset, which is made if need be.
    pub dataset: String,
    /// Add to a dataset that exists the rows whose ids it lacks.
    pub resume: bool,
    /// The most rows of a batch.
    pub batch_rows: usize,
    /// Set to end early.
    pub stop: Arc<AtomicBool>,
    /// Told what the user should know while it goes on.
    pub note: Arc<dyn Fn(&str) + Send + Sync>,
}

/// The thread that sends.
pub(crate) struct Sender {
    options: Arc<UploadOptions>,
    acknowledged: Arc<AtomicU64>,
    /// The last pause that the store asked for.
    pause: Duration,
}

impl Sender {
    pub(crate) fn new(options: &Arc<UploadOptions>, acknowledged: &Arc<AtomicU64>) -> Sender {
        let (options, acknowledged) = (Arc::clone(options), Arc::clone(acknowledged));
        Sender { options, acknowledged, pause: Duration::ZERO }
    }

    /// Sends batches until there are no more, an error, or the wish to stop.
    pub(crate) fn run(mut self, mut batches: Receiver<RecordBatch>) -> Result<()> {
        let options = Arc::clone(&self.options);
        runtime()?.block_on(async {
            let begin = unless_stopped(&options.stop, Store::connect(&options.address)).await?;
            let mut store = Some(begin);
            // Keepalive pings are answered while the next batch is computed.
            while let Some(batch) = batches.recv().await {
                unless_stopped(&options.stop, self.deliver(&mut store, &batch)).await?;
                self.acknowledged.fetch_add(batch.num_rows() as u64, Relaxed);
            }
            Ok(())
        })
    }

    /// Sends a batch until the store has it.
    async fn deliver(&mut self, store: &mut Option<Store>, batch: &RecordBatch) -> Result<()> {
        let mut backoff = Backoff::default();
        loop {
            if self.options.stop.load(Relaxed) {
                return Err(Error::Interrupted);
            }
            match self.attempt(store, batch, backoff.has_failed()).await {
                Ok(()) => return Ok(()),
                Err(error) => backoff.wait(error, &self.options).await?,
            }
            *store = None;
        }
    }

    /// Sends a batch once; `again` if an earlier attempt may have stored a part of it.
    async fn attempt(
        &mut self,
        store: &mut Option<Store>,
        batch: &RecordBatch,
        again: bool,
    ) -> Result<()> {
        if store.is_none() {
            *store = Some(Store::connect(&self.options.address).await?);
        }
        let Some(store) = store else { return Err(Error::Interrupted) };
        let dataset = self.options.dataset.as_str();
        let rows = match again {
            false => vec![batch.clone()],
            true => {
                settle(store, dataset, &self.options.stop).await?;
                missing(store, dataset, batch).await?
            }
        };
        if rows.is_empty() {
            return Ok(());
        }
        // The pause comes before the next batch: this one counts as acknowledged at once, and the
        // last one delays nothing.
        sleep(self.pause).await;
        let slow_down = store.put(dataset, batch.schema(), rows).await?;
        self.pause = match slow_down {
            true => (self.pause * 2).clamp(FIRST_PAUSE, LONGEST_PAUSE),
            false => Duration::ZERO,
        };
        Ok(())
    }
}

/// The pauses between attempts at something that has failed.
#[derive(Default)]
pub(crate) struct Backoff {
    /// When it failed first, and the next pause.
    failing: Option<(Instant, Duration)>,
}

impl Backoff {
    /// Whether an attempt has failed.
    pub(crate) fn has_failed(&self) -> bool {
        self.failing.is_some()
    }

    /// Waits before the next attempt. The error, if another attempt would be in vain, or all have
    /// failed for too long.
    pub(crate) async fn wait(&mut self, error: Error, options: &UploadOptions) -> Result<()> {
        let (since, pause) = self.failing.unwrap_or_else(|| (Instant::now(), FIRST_PAUSE));
        if !error.is_transient() || since.elapsed() > options.address.timeout {
            return Err(error);
        }
        (options.note)(&format!("{error}; trying again in {} ms", pause.as_millis()));
        sleep(pause).await;
        self.failing = Some((since, (pause * 2).min(LONGEST_PAUSE)));
        Ok(())
    }
}

/// The answer of a call, unless the caller wants to stop and it does not come soon.
pub(crate) async fn unless_stopped<T>(
    stop: &AtomicBool,
    call: impl Future<Output = Result<T>>,
) -> Result<T> {
    let stopped = async {
        while !stop.load(Relaxed) {
            sleep(Duration::from_millis(50)).await;
        }
        sleep(GRACE).await;
    };
    tokio::select! {
        answer = call => answer,
        () = stopped => Err(Error::Interrupted),
    }
}

/// Waits until nothing that the store has accepted waits any more.
pub(crate) async fn settle(store: &Store, dataset: &str, stop: &AtomicBool) -> Result<()> {
    let limit = store.meta.timeout;
    let start = Instant::now();
    while let Some(now) = store.readiness(dataset).await? {
        if now.is_ready {
            break;
        }
        if stop.load(Relaxed) {
            // Which rows are still queued is not known, and none may be sent twice.
            return Err(Error::Interrupted);
        }
        if start.elapsed() > limit {
            return Err(Error::Store {
                address: store.meta.address.clone(),
                reason: format!("dataset `{dataset}` is busy for {} s", limit.as_secs_f64()),
            });
        }
        sleep(Duration::from_millis(50)).await;
    }
    Ok(())
}

/// The rows of a batch that have not landed, as slices of it.
async fn missing(store: &Store, dataset: &str, batch: &RecordBatch) -> Result<Vec<RecordBatch>> {
    let rows = ids(batch).unwrap_or_default();
    let numbers = rows.iter().filter_map(|(id, _)| match id {
        Id::Number(id) => Some(*id),
        Id::Text(_) => None,
    });
    let range = numbers.fold(None, |range: Option<(i64, i64)>, id| {
        let (low, high) = range.unwrap_or((id, id));
        Some((low.min(id), high.max(id)))
    });
    let filters = match range {
        Some((low, high)) => json!([
            { "field": "id", "operator": ">=", "value": low.to_string() },
            { "field": "id", "operator": "<=", "value": high.to_string() },
        ]),
        None => json!([]),
    };
    let (landed, _) = store.texts(dataset, filters).await?;
    let is_missing: Vec<bool> = rows.iter().map(|(id, _)| !landed.contains_key(id)).collect();
    let mut slices = Vec::new();
    let mut start = 0;
    for run in is_missing.chunk_by(|a, b| a == b) {
        if run[0] {
            slices.push(batch.slice(start, run.len()));
        }
        start += run.len();
    }
    Ok(slices)
}
