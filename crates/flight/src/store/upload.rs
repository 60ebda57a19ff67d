//! Sending rows so that each is stored once: batches in order, each acknowledged before the next,
//! sent again after a failure without the rows that have landed; then the proof that all are there.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use arrow_array::RecordBatch;
use serde_json::json;
use tokio::runtime::Runtime;
use tokio::time::sleep;

use super::connection::{Address, Store, Texts, hash, ids, with_id};
use crate::batch::{BatchBuilder, Id, Row, dimension_of, id_of, vector_at};
use crate::columns::Columns;
use crate::error::{Error, Result};

/// A batch is sent when its vectors and texts have this many bytes.
const BATCH_BYTES: usize = 16 << 20;

/// Ids from here on are cut to 32 bits by the store's search.
const IDS: i64 = 1 << 32;

/// Pauses between attempts, and after the store asked to slow down.
const FIRST_PAUSE: Duration = Duration::from_millis(250);
const LONGEST_PAUSE: Duration = Duration::from_secs(8);

/// A store that does not answer, or lands no row, for this long has failed.
const PATIENCE: Duration = Duration::from_secs(60);

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

/// Rows on their way to a store.
pub struct Upload {
    options: Arc<UploadOptions>,
    builder: BatchBuilder,
    batches: Option<SyncSender<RecordBatch>>,
    sender: Option<JoinHandle<Result<()>>>,
    acknowledged: Arc<AtomicU64>,
    /// Rows that the dataset had before.
    present: Texts,
    /// All rows of the dataset, before.
    rows_before: u64,
    skipped: u64,
    pushed: u64,
    /// Rows to read back: the first, the second, the fourth and so on, and the last.
    sample: Vec<(Id, String, Vec<f32>)>,
    last: Option<(Id, String, Vec<f32>)>,
    runtime: Runtime,
}

/// What an upload did.
#[derive(Clone, Copy, Debug)]
pub struct Landed {
    /// Rows that were sent and have landed.
    pub sent: u64,
    /// Rows that the dataset had already.
    pub skipped: u64,
    /// Rows that were read back and had the same bits.
    pub compared: usize,
    /// Rows of the dataset that a search can find so far.
    pub indexed: u64,
    /// Rows of the dataset.
    pub rows: u64,
}

impl Upload {
    /// Connects to the store and looks at the dataset.
    ///
    /// # Errors
    /// If the store cannot be reached, or the dataset holds other vectors, or has rows and nobody
    /// asked to resume.
    pub fn begin(options: UploadOptions, dimension: usize) -> Result<Upload> {
        let runtime = runtime()?;
        let dataset = options.dataset.as_str();
        let (rows_before, present) = runtime.block_on(async {
            let store = Store::connect(&options.address).await?;
            if store.readiness(dataset).await?.is_none() {
                return Ok((0, Texts::new()));
            }
            let wrong = |reason| Error::Store { address: options.address.data.clone(), reason };
            let Some(schema) = store.schema(dataset).await? else {
                return Ok((store.rows(dataset).await?, Texts::new()));
            };
            match dimension_of(&schema) {
                Some(found) if found == dimension => {}
                found => {
                    let found = found.map_or("no `vector`".to_owned(), |n| n.to_string());
                    let reason = format!(
                        "dimension mismatch: the model gives vectors of {dimension}, dataset \
                         `{dataset}` holds {found}"
                    );
                    return Err(wrong(reason));
                }
            }
            if !options.resume {
                let reason =
                    format!("dataset `{dataset}` has rows: --resume adds those whose ids it lacks");
                return Err(wrong(reason));
            }
            settle(&store, dataset, &options.stop).await?;
            Ok((store.rows(dataset).await?, store.texts(dataset, json!([])).await?))
        })?;
        let options = Arc::new(options);
        let acknowledged = Arc::new(AtomicU64::new(0));
        // One batch is sent while the next is filled.
        let (batches, receiver) = sync_channel(1);
        let sender = Sender {
            options: Arc::clone(&options),
            acknowledged: Arc::clone(&acknowledged),
            pause: Duration::ZERO,
        };
        let thread = std::thread::Builder::new().name("flight".to_owned());
        let sender = thread.spawn(move || sender.run(&receiver)).map_err(system)?;
        Ok(Upload {
            options,
            builder: BatchBuilder::new(dimension, true),
            batches: Some(batches),
            sender: Some(sender),
            acknowledged,
            present,
            rows_before,
            skipped: 0,
            pushed: 0,
            sample: Vec::new(),
            last: None,
            runtime,
        })
    }

    /// Rows that the store has acknowledged.
    pub fn acknowledged(&self) -> u64 {
        self.acknowledged.load(Relaxed)
    }

    /// Whether the dataset has a row already, which then is not sent.
    ///
    /// # Errors
    /// If it has another text under the same id.
    pub fn has(&mut self, number: u64, text: &str, columns: Columns<'_>) -> Result<bool> {
        if self.present.is_empty() {
            return Ok(false);
        }
        match self.present.get(&id_of(number, columns)?) {
            None => Ok(false),
            Some(found) if *found == hash(text) => {
                self.skipped += 1;
                Ok(true)
            }
            Some(_) => {
                let dataset = &self.options.dataset;
                let reason = format!("dataset `{dataset}` has another text under this id");
                Err(Error::Row { row: number + 1, reason })
            }
        }
    }

    /// Adds a row; waits while the store is behind.
    ///
    /// # Errors
    /// If the row does not fit the others, or the store has failed.
    pub fn push(&mut self, row: Row<'_>) -> Result<()> {
        let id = id_of(row.number, row.columns)?;
        if matches!(id, Id::Number(id) if !(0..IDS).contains(&id)) {
            let reason = format!("`id`: expected 0 to {} or a text, found {id:?}", IDS - 1);
            return Err(Error::Row { row: row.number + 1, reason });
        }
        self.builder.push(row)?;
        self.pushed += 1;
        if self.pushed.is_power_of_two() {
            self.sample.push((id, row.text.to_owned(), row.vector.to_vec()));
        }
        let is_full = self.builder.rows() >= self.options.batch_rows;
        if is_full || self.builder.bytes() >= BATCH_BYTES {
            self.flush()?;
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<()> {
        if self.builder.rows() == 0 {
            return Ok(());
        }
        let batch = self.builder.finish()?;
        self.last = last_row(&batch);
        let sent = self.batches.as_ref().is_some_and(|batches| batches.send(batch).is_ok());
        match sent {
            true => Ok(()),
            false => self.join(),
        }
    }

    /// Waits for the sender.
    fn join(&mut self) -> Result<()> {
        self.batches = None;
        match self.sender.take().map(JoinHandle::join) {
            Some(Ok(result)) => result,
            _ => Err(Error::Interrupted),
        }
    }

    /// Sends the rest and waits for the acknowledgement of all rows; no more can be pushed.
    ///
    /// # Errors
    /// If a row cannot be sent.
    pub fn send_all(&mut self) -> Result<()> {
        self.flush()?;
        match self.sender {
            Some(_) => self.join(),
            None => Ok(()),
        }
    }

    /// Sends the rest, waits until all rows have landed, and reads some of them back.
    ///
    /// # Errors
    /// If a row cannot be sent, does not land, or comes back changed.
    pub fn finish(mut self) -> Result<Landed> {
        self.send_all()?;
        let sent = self.acknowledged();
        let mut sample = std::mem::take(&mut self.sample);
        sample.extend(self.last.take().filter(|last| sample.iter().all(|row| row.0 != last.0)));
        self.runtime.block_on(async {
            let store = Store::connect(&self.options.address).await?;
            let rows = self.rows_before + sent;
            let indexed = self.wait(&store, rows).await?;
            for row in &sample {
                self.compare(&store, row).await?;
            }
            Ok(Landed { sent, skipped: self.skipped, compared: sample.len(), indexed, rows })
        })
    }

    /// Ends early. The rows that have landed in the dataset, as far as the store tells.
    pub fn stop(mut self) -> u64 {
        self.options.stop.store(true, Relaxed);
        // The error that ended the upload is known, or the caller wants no more.
        let _ = self.join();
        let landed = self.runtime.block_on(async {
            let store = Store::connect(&self.options.address).await?;
            // Now it only has to finish what it has accepted.
            settle(&store, &self.options.dataset, &AtomicBool::new(false)).await?;
            store.rows(&self.options.dataset).await
        });
        let landed = landed.map(|rows| rows.saturating_sub(self.rows_before));
        landed.unwrap_or_else(|_| self.acknowledged())
    }

    /// Waits until the dataset has this many rows. Those of its index then.
    async fn wait(&self, store: &Store, rows: u64) -> Result<u64> {
        let dataset = self.options.dataset.as_str();
        let mut best = (0, Instant::now());
        loop {
            let now = store.readiness(dataset).await?.unwrap_or_default();
            if rows == 0 || store.has_more_than(dataset, rows - 1).await? {
                return Ok(now.indexed);
            }
            let landed = store.rows(dataset).await?;
            if landed > best.0 {
                best = (landed, Instant::now());
            }
            let is_stuck = best.1.elapsed() > PATIENCE;
            if is_stuck || self.options.stop.load(Relaxed) {
                let (landed, sent) = (landed.saturating_sub(self.rows_before), self.acknowledged());
                let reason = format!(
                    "it has accepted {sent} rows, of which {landed} have landed; --resume sends \
                     those that are missing"
                );
                return Err(Error::Store { address: store.meta.address.clone(), reason });
            }
            sleep(Duration::from_millis(50)).await;
        }
    }

    /// Reads a row back.
    async fn compare(&self, store: &Store, row: &(Id, String, Vec<f32>)) -> Result<()> {
        let (id, text, vector) = row;
        let (mut rows, mut equal) = (0, 0);
        store
            .fetch(&self.options.dataset, with_id(id), |batch| {
                let texts = ids(&batch).unwrap_or_default();
                for (i, (_, found)) in texts.into_iter().enumerate() {
                    rows += 1;
                    let same = vector_at(&batch, i).is_some_and(|found| {
                        found.iter().map(|x| x.to_bits()).eq(vector.iter().map(|x| x.to_bits()))
                    });
                    equal += u64::from(same && found == hash(text));
                }
                Ok(())
            })
            .await?;
        match (rows, equal) {
            (1, 1) => Ok(()),
            _ => {
                let reason = format!(
                    "expected one row with {id:?} and the bits that were sent, found {rows} rows, \
                     {equal} of them equal"
                );
                Err(Error::Store { address: store.data.address.clone(), reason })
            }
        }
    }
}

/// The thread that sends.
struct Sender {
    options: Arc<UploadOptions>,
    acknowledged: Arc<AtomicU64>,
    /// The last pause that the store asked for.
    pause: Duration,
}

impl Sender {
    fn run(mut self, batches: &Receiver<RecordBatch>) -> Result<()> {
        runtime()?.block_on(async {
            let mut store = Some(Store::connect(&self.options.address).await?);
            for batch in batches {
                self.deliver(&mut store, &batch).await?;
                self.acknowledged.fetch_add(batch.num_rows() as u64, Relaxed);
            }
            Ok(())
        })
    }

    /// Sends a batch until the store has it.
    async fn deliver(&mut self, store: &mut Option<Store>, batch: &RecordBatch) -> Result<()> {
        let mut failing: Option<Instant> = None;
        let mut pause = FIRST_PAUSE;
        loop {
            if self.options.stop.load(Relaxed) {
                return Err(Error::Interrupted);
            }
            let error = match self.attempt(store, batch, failing.is_some()).await {
                Ok(()) => return Ok(()),
                Err(error) => error,
            };
            let since = *failing.get_or_insert_with(Instant::now);
            if !error.is_transient() || since.elapsed() > PATIENCE {
                return Err(error);
            }
            (self.options.note)(&format!("{error}; trying again in {} ms", pause.as_millis()));
            *store = None;
            sleep(pause).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
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
        let slow_down = store.put(dataset, batch.schema(), rows).await?;
        self.pause = match slow_down {
            true => (self.pause * 2).clamp(FIRST_PAUSE, LONGEST_PAUSE),
            false => Duration::ZERO,
        };
        sleep(self.pause).await;
        Ok(())
    }
}

/// Waits until nothing that the store has accepted waits any more.
async fn settle(store: &Store, dataset: &str, stop: &AtomicBool) -> Result<()> {
    let start = Instant::now();
    while let Some(now) = store.readiness(dataset).await? {
        if now.is_ready || stop.load(Relaxed) {
            break;
        }
        if start.elapsed() > PATIENCE {
            return Err(Error::Store {
                address: store.meta.address.clone(),
                reason: format!("dataset `{dataset}` is busy for {} s", PATIENCE.as_secs()),
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
    let landed = store.texts(dataset, filters).await?;
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

fn last_row(batch: &RecordBatch) -> Option<(Id, String, Vec<f32>)> {
    let row = batch.num_rows().checked_sub(1)?;
    let texts = batch.column_by_name("text")?.as_any();
    let text = texts.downcast_ref::<arrow_array::StringArray>()?.value(row).to_owned();
    let (id, _) = ids(&batch.slice(row, 1))?.pop()?;
    Some((id, text, vector_at(batch, row)?))
}

/// A runtime for one thread, which sleeps between calls.
pub(crate) fn runtime() -> Result<Runtime> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.map_err(system)
}

fn system(error: std::io::Error) -> Error {
    Error::Arrow(error.into())
}
