//! The requests of an encoder: one is computed at a time, and the limit of those that wait is that
//! of a model that generates.

use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use bodkin::Encoder;
use bodkin_engine::{Error as EngineError, Stats};
use tokio::sync::{Mutex as AsyncMutex, OwnedMutexGuard, OwnedSemaphorePermit, Semaphore};

use crate::error::Result;

/// An encoder and its queue.
pub(crate) struct EncoderQueue {
    encoder: Arc<AsyncMutex<Encoder>>,
    /// A place for each request that is computed or waits.
    places: Arc<Semaphore>,
    /// The most requests that wait.
    queue: usize,
    progress: Arc<EncoderProgress>,
}

/// What the requests note while they are computed.
#[derive(Default)]
pub(crate) struct EncoderProgress(Mutex<Progress>);

#[derive(Default)]
struct Progress {
    /// Totals since the encoder was loaded.
    totals: Stats,
    step_began: Option<Instant>,
    /// The error of the backend after which the encoder is loaded again.
    failure: Option<String>,
}

impl EncoderProgress {
    fn lock(&self) -> MutexGuard<'_, Progress> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A request has this many tokens.
    pub(crate) fn admit(&self, tokens: usize) {
        let totals = &mut self.lock().totals;
        totals.requests += 1;
        totals.prompt_tokens += tokens as u64;
    }

    /// A step begins, which ends the one before it.
    pub(crate) fn begin_step(&self) {
        self.end_step();
        self.lock().step_began = Some(Instant::now());
    }

    /// The backend has failed.
    pub(crate) fn fail(&self, cause: String) {
        self.lock().failure.get_or_insert(cause);
    }

    /// The tokens of a text are computed.
    pub(crate) fn add_rows(&self, tokens: usize) {
        self.lock().totals.rows += tokens as u64;
    }

    fn end_step(&self) {
        let mut progress = self.lock();
        if let Some(began) = progress.step_began.take() {
            progress.totals.steps += 1;
            progress.totals.step_seconds += began.elapsed().as_secs_f64();
        }
    }
}

/// The turn of a request.
pub(crate) struct Turn {
    encoder: OwnedMutexGuard<Encoder>,
    progress: Arc<EncoderProgress>,
    _place: OwnedSemaphorePermit,
}

impl EncoderQueue {
    pub(super) fn new(encoder: Encoder, queue: usize) -> EncoderQueue {
        let queue = queue.min(Semaphore::MAX_PERMITS - 1);
        EncoderQueue {
            encoder: Arc::new(AsyncMutex::new(encoder)),
            places: Arc::new(Semaphore::new(queue + 1)),
            queue,
            progress: Arc::default(),
        }
    }

    /// Waits for the turn of a request; dropping the future leaves the queue.
    pub(crate) async fn turn(&self) -> Result<Turn> {
        let full = |_| EngineError::QueueFull { limit: self.queue };
        let place = Arc::clone(&self.places).try_acquire_owned().map_err(full)?;
        let encoder = Arc::clone(&self.encoder).lock_owned().await;
        Ok(Turn { encoder, progress: Arc::clone(&self.progress), _place: place })
    }

    /// Why the encoder has to be loaded again.
    pub(super) fn failure(&self) -> Option<String> {
        self.progress.lock().failure.clone()
    }

    /// The requests now, and the totals.
    pub(super) fn stats(&self) -> Stats {
        let open = self.queue + 1 - self.places.available_permits();
        let running = open.min(1);
        let progress = self.progress.lock();
        let step_age = progress.step_began.map(|began| began.elapsed());
        Stats { running, waiting: open - running, step_age, ..progress.totals.clone() }
    }
}

impl Turn {
    /// What the request notes.
    pub(crate) fn progress(&self) -> Arc<EncoderProgress> {
        Arc::clone(&self.progress)
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.progress.end_step();
    }
}

impl Deref for Turn {
    type Target = Encoder;

    fn deref(&self) -> &Encoder {
        &self.encoder
    }
}

impl DerefMut for Turn {
    fn deref_mut(&mut self) -> &mut Encoder {
        &mut self.encoder
    }
}
