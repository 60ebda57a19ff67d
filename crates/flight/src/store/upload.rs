//! Sending rows so that each is stored once: batches in order, each acknowledged before the next,
//! sent again after a failure without the rows that have landed; then the proof that all are there.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use arrow_array::RecordBatch;
use serde_json::json;
use tokio::sync::mpsc;
use tokio::time::{sleep, timeout};

use super::connection::{Store, Texts, hash, ids, runtime, system, texts_of, with_id};
use super::seen::Seen;
use super::sender::{Backoff, Sender, UploadOptions, settle, unless_stopped};
use crate::batch::{BatchBuilder, Id, Row, dimension_of, id_of, vector_at};
use crate::columns::Columns;
use crate::error::{Error, Result};

/// A batch is sent when its vectors and texts have this many bytes.
const BATCH_BYTES: usize = 16 << 20;

/// Ids from here on are cut to 32 bits by the store's search.
const IDS: i64 = 1 << 32;

/// How long the last question may take, how many rows have landed.
const STOP_TIME: Duration = Duration::from_secs(5);

/// Rows on their way to a store.
pub struct Upload {
    options: Arc<UploadOptions>,
    builder: BatchBuilder,
    batches: Option<mpsc::Sender<RecordBatch>>,
    sender: Option<JoinHandle<Result<()>>>,
    acknowledged: Arc<AtomicU64>,
    /// The ids of all rows so far.
    seen: Seen,
    has_text_ids: bool,
    is_told_full: bool,
    /// Rows that the dataset had before, and the last of them that has a text.
    present: Texts,
    present_last: Option<(String, Vec<f32>)>,
    /// All rows of the dataset, before.
    rows_before: u64,
    skipped: u64,
    pushed: u64,
    /// Rows to read back: the first, the second, the fourth and so on, and the last.
    sample: Vec<(Id, String, Vec<f32>)>,
    last: Option<(Id, String, Vec<f32>)>,
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

/// What an upload has done that ended early.
#[derive(Clone, Copy, Debug)]
pub struct Stopped {
    /// Rows that the store has acknowledged.
    pub acknowledged: u64,
    /// Rows that have landed; None if the store does not tell.
    pub landed: Option<u64>,
}

impl Upload {
    /// Connects to the store and looks at the dataset.
    ///
    /// # Errors
    /// If the store cannot be reached, or the dataset holds other vectors, or has rows and nobody
    /// asked to resume.
    pub fn begin(options: UploadOptions, dimension: usize) -> Result<Upload> {
        let dataset = options.dataset.as_str();
        // The runtime ends with these questions: nobody would drive what it had left open, and a
        // store that is shut down waits for its connections.
        let (rows_before, (present, present_last)) = runtime()?.block_on(async {
            let store = Store::connect(&options.address).await?;
            if store.readiness(dataset).await?.is_none() {
                return Ok((0, (Texts::new(), None)));
            }
            let wrong = |reason| Error::Store { address: options.address.data.clone(), reason };
            let Some(schema) = store.schema(dataset).await? else {
                return Ok((store.rows(dataset).await?, (Texts::new(), None)));
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
        let (batches, receiver) = mpsc::channel(1);
        let sender = Sender::new(&options, &acknowledged);
        let thread = std::thread::Builder::new().name("flight".to_owned());
        let sender = thread.spawn(move || sender.run(receiver)).map_err(system)?;
        Ok(Upload {
            options,
            builder: BatchBuilder::new(dimension, true),
            batches: Some(batches),
            sender: Some(sender),
            acknowledged,
            seen: Seen::default(),
            has_text_ids: false,
            is_told_full: false,
            present,
            present_last,
            rows_before,
            skipped: 0,
            pushed: 0,
            sample: Vec::new(),
            last: None,
        })
    }

    /// Rows that the store has acknowledged.
    pub fn acknowledged(&self) -> u64 {
        self.acknowledged.load(Relaxed)
    }

    /// The text and the vector of the last row that the dataset had before, so that the caller can
    /// check which model made it. None if it had no row with a text.
    pub fn last_present(&self) -> Option<(&str, &[f32])> {
        self.present_last.as_ref().map(|(text, vector)| (text.as_str(), vector.as_slice()))
    }

    /// Whether the dataset has a row already, which then is not sent. To be asked once of each row.
    ///
    /// # Errors
    /// If it has another text under the same id, if the store takes no such id, or if a row before
    /// had it.
    pub fn has(&mut self, number: u64, text: &str, columns: Columns<'_>) -> Result<bool> {
        let id = checked_id(number, columns)?;
        let wrong = |reason| Err(Error::Row { row: number + 1, reason });
        if let Some(before) = self.seen.insert(&id, number) {
            return wrong(format!("`id`: row {} has {id} already", before + 1));
        }
        self.tell(&id);
        match self.present.get(&id) {
            None => Ok(false),
            Some(found) if *found == hash(text) => {
                self.skipped += 1;
                Ok(true)
            }
            Some(_) => {
                let dataset = &self.options.dataset;
                wrong(format!("dataset `{dataset}` has another text under this id"))
            }
        }
    }

    /// Tells what the user may not expect of such ids, once.
    fn tell(&mut self, id: &Id) {
        if matches!(id, Id::Text(_)) && !self.has_text_ids {
            self.has_text_ids = true;
            let dataset = &self.options.dataset;
            (self.options.note)(&format!(
                "ids of `{dataset}` are texts: it cannot be searched, which takes integers"
            ));
        }
        if self.seen.is_full() && !self.is_told_full {
            self.is_told_full = true;
            (self.options.note)("too many ids to remember: a later one may come twice unnoticed");
        }
    }

    /// Adds a row; waits while the store is behind.
    ///
    /// # Errors
    /// If the row does not fit the others, or the store has failed.
    pub fn push(&mut self, row: Row<'_>) -> Result<()> {
        let id = checked_id(row.number, row.columns)?;
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
        let sent =
            self.batches.as_ref().is_some_and(|batches| batches.blocking_send(batch).is_ok());
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
    pub fn finish(&mut self) -> Result<Landed> {
        self.send_all()?;
        let sent = self.acknowledged();
        let mut sample = std::mem::take(&mut self.sample);
        sample.extend(self.last.take().filter(|last| sample.iter().all(|row| row.0 != last.0)));
        let landed = async {
            let mut backoff = Backoff::default();
            loop {
                match self.landed(sent, &sample).await {
                    Ok(landed) => return Ok(landed),
                    Err(error) => backoff.wait(error, &self.options).await?,
                }
            }
        };
        runtime()?.block_on(unless_stopped(&self.options.stop, landed))
    }

    /// Waits until all rows that were sent have landed, and reads some of them back.
    async fn landed(&self, sent: u64, sample: &[(Id, String, Vec<f32>)]) -> Result<Landed> {
        let store = Store::connect(&self.options.address).await?;
        let rows = self.rows_before + sent;
        let indexed = self.wait(&store, rows).await?;
        for row in sample {
            self.compare(&store, row).await?;
        }
        Ok(Landed { sent, skipped: self.skipped, compared: sample.len(), indexed, rows })
    }

    /// Ends early.
    pub fn stop(&mut self) -> Stopped {
        self.options.stop.store(true, Relaxed);
        // The error that ended the upload is known, or the caller wants no more.
        let _ = self.join();
        let landed = async {
            let store = Store::connect(&self.options.address).await?;
            // Now it only has to finish what it has accepted.
            settle(&store, &self.options.dataset, &AtomicBool::new(false)).await?;
            store.rows(&self.options.dataset).await
        };
        let within = async { timeout(STOP_TIME, landed).await.ok()?.ok() };
        let landed = runtime().ok().and_then(|runtime| runtime.block_on(within));
        Stopped {
            acknowledged: self.acknowledged(),
            landed: landed.map(|rows| rows.saturating_sub(self.rows_before)),
        }
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
            if self.options.stop.load(Relaxed) {
                return Err(Error::Interrupted);
            }
            if best.1.elapsed() > store.meta.timeout {
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
                let address = store.data.address.clone();
                Err(Error::Changed { address, id: id.to_string(), rows, equal })
            }
        }
    }
}

/// The id of a row, which the store must take.
fn checked_id(number: u64, columns: Columns<'_>) -> Result<Id> {
    let id = id_of(number, columns)?;
    if matches!(id, Id::Number(id) if !(0..IDS).contains(&id)) {
        let reason = format!("`id`: expected 0 to {} or a text, found {id:?}", IDS - 1);
        return Err(Error::Row { row: number + 1, reason });
    }
    Ok(id)
}

fn last_row(batch: &RecordBatch) -> Option<(Id, String, Vec<f32>)> {
    let row = batch.num_rows().checked_sub(1)?;
    let text = texts_of(batch)?.value(row).to_owned();
    let (id, _) = ids(&batch.slice(row, 1))?.pop()?;
    Some((id, text, vector_at(batch, row)?))
}
