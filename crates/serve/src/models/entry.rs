//! One model of a server: whether it is loaded, who uses it, and whether it works.

use std::ops::AddAssign;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use axum::http::StatusCode;
use bodkin::{Encoder, Model, Request, source};
use bodkin_backend::ExpertStats;
use bodkin_engine::Stats;

use super::backoff::Backoff;
use super::loaded::{Kind, Known, Loaded};
use crate::error::{ApiError, Result};
use crate::fields::Fields;
use crate::options::{ModelSpec, ServerOptions};
use crate::sampling;

/// Requests end with an error when a step takes this many times as long as may be.
const HANGS_AFTER: u32 = 10;
/// How often a request that waits looks at the running step.
const HANG_CHECK: Duration = Duration::from_millis(500);

/// One model of the pool, loaded or not.
pub(crate) struct Entry {
    pub(crate) spec: ModelSpec,
    /// When the server started, in seconds since 1970: what clients read as the creation time.
    pub(crate) created: i64,
    slot: Mutex<Slot>,
    /// Of its latest load, or of its header; none before its file was read.
    known: Mutex<Option<Known>>,
    backoff: Mutex<Backoff>,
    /// A step that takes longer is reported.
    step_timeout: Duration,
    /// Requests that use the model.
    users: AtomicUsize,
    /// Milliseconds since `started` of the last use.
    last_used: AtomicU64,
    started: Instant,
    /// How long it stays loaded without requests, in milliseconds; `u64::MAX` for ever.
    keep_alive: AtomicU64,
    /// Whether it is unloaded as soon as no request uses it.
    unloads: AtomicBool,
    /// How often it was loaded.
    loads: AtomicU64,
}

/// The state of a model, and what was measured of those that it had in memory before.
#[derive(Default)]
struct Slot {
    state: State,
    past: Measured,
}

/// Whether a model can answer.
#[derive(Clone, Default)]
pub(super) enum State {
    #[default]
    Unloaded,
    Loading,
    Loaded(Arc<Loaded>),
    /// The last load failed.
    Failed(String),
}

/// What is measured of a model, loaded now or before: totals, and its state now.
#[derive(Clone, Default)]
pub(crate) struct Measured {
    pub(crate) stats: Stats,
    /// What its experts did, layer by layer.
    pub(crate) experts: Vec<ExpertStats>,
    /// Bytes that its steps had to read.
    pub(crate) read_bytes: u64,
    /// Its memory; none while it is not loaded.
    pub(crate) bytes: Option<u64>,
}

/// A loaded model in use: it is not unloaded before this drops.
pub(crate) struct Lease {
    entry: Arc<Entry>,
    loaded: Arc<Loaded>,
    /// How long the request waited until the model was loaded.
    pub(crate) waited: Duration,
    /// Whether the model is unloaded after this use.
    unloads: bool,
}

impl std::ops::Deref for Lease {
    type Target = Loaded;

    fn deref(&self) -> &Loaded {
        &self.loaded
    }
}

impl Lease {
    /// The name that clients use.
    pub(crate) fn id(&self) -> &str {
        &self.entry.spec.id
    }

    /// Ends when a step has been running for so long that it will not end any more. Says so.
    pub(crate) async fn hung(&self) -> ApiError {
        let bound = self.entry.step_timeout * HANGS_AFTER;
        loop {
            tokio::time::sleep(HANG_CHECK).await;
            if let Some(cause) = self.loaded.hang(bound) {
                return ApiError::unavailable(format!("{cause}; requests are not kept waiting"));
            }
        }
    }

    /// The model, if it generates text.
    pub(crate) fn text(&self) -> Result<&Model> {
        match &self.kind {
            Kind::Text(model) => Ok(model),
            Kind::Encoder(_) => {
                let message = format!("{} makes embeddings and no text", self.id());
                Err(ApiError::bad_request(message))
            }
        }
    }

    /// The model, if it embeds texts.
    pub(crate) fn encoder(&self) -> Result<&Encoder> {
        match &self.kind {
            Kind::Encoder(encoder) => Ok(encoder),
            Kind::Text(_) => {
                let message = format!(
                    "{} makes text and no embeddings; a server that is started with --embedding \
                     makes them",
                    self.id()
                );
                Err(ApiError::bad_request(message))
            }
        }
    }

    /// A request of this model, with the options of the body.
    pub(crate) fn request(&self, fields: &mut Fields) -> Result<Request> {
        sampling::request(fields, &self.defaults.request, self.text()?.engine().tokenizer())
    }

    /// Sets how long the model stays loaded without requests; none for ever. Zero unloads it after
    /// this request and leaves the model's own time as it is.
    pub(crate) fn set_keep_alive(&mut self, keep_alive: Option<Duration>) {
        self.unloads = keep_alive == Some(Duration::ZERO);
        if !self.unloads {
            self.entry.keep_alive.store(millis(keep_alive), Relaxed);
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        // While the state is locked, no other request begins.
        let _slot = self.entry.slot();
        self.entry.touch();
        let is_last = self.entry.users.fetch_sub(1, Relaxed) == 1;
        if is_last && self.unloads {
            self.entry.unloads.store(true, Relaxed);
        }
    }
}

impl Entry {
    /// A model that is not loaded.
    pub(super) fn new(spec: &ModelSpec, created: i64, options: &ServerOptions) -> Entry {
        Entry {
            spec: spec.clone(),
            created,
            slot: Mutex::default(),
            known: Mutex::default(),
            backoff: Mutex::default(),
            step_timeout: options.step_timeout,
            users: AtomicUsize::new(0),
            last_used: AtomicU64::new(0),
            started: Instant::now(),
            keep_alive: AtomicU64::new(millis(options.keep_alive)),
            unloads: AtomicBool::new(false),
            loads: AtomicU64::new(0),
        }
    }

    fn slot(&self) -> MutexGuard<'_, Slot> {
        self.slot.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn backoff(&self) -> MutexGuard<'_, Backoff> {
        self.backoff.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn touch(&self) {
        self.last_used.store(self.started.elapsed().as_millis() as u64, Relaxed);
    }

    pub(super) fn idle_ms(&self) -> u64 {
        (self.started.elapsed().as_millis() as u64).saturating_sub(self.last_used.load(Relaxed))
    }

    /// Whether a client means this model. `latest` is the tag that Ollama's clients add.
    pub(crate) fn has_name(&self, name: &str) -> bool {
        let plain = |id: &str| id.strip_suffix(":latest").unwrap_or(id).to_owned();
        plain(&self.spec.id) == plain(name)
    }

    /// What is known of the model, loaded or not.
    ///
    /// # Errors
    /// If its file is not on this machine yet, or could not be read.
    pub(crate) fn known(&self) -> Result<Known> {
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner).clone();
        known.ok_or_else(|| {
            let id = &self.spec.id;
            ApiError::unavailable(format!("{id} has not been loaded, and its file not read"))
        })
    }

    pub(super) fn set_known(&self, known: Known) {
        *self.known.lock().unwrap_or_else(PoisonError::into_inner) = Some(known);
    }

    /// The model, if it is loaded and works, without using it.
    pub(crate) fn loaded(&self) -> Option<Arc<Loaded>> {
        match &self.slot().state {
            State::Loaded(loaded) => Some(Arc::clone(loaded)),
            _ => None,
        }
    }

    /// When an idle model is unloaded, from now on; none for never.
    pub(crate) fn expires_in(&self) -> Option<Duration> {
        let keep_alive = self.keep_alive.load(Relaxed);
        if self.unloads.load(Relaxed) {
            return Some(Duration::ZERO);
        }
        let left = || Duration::from_millis(keep_alive.saturating_sub(self.idle_ms()));
        (keep_alive < u64::MAX).then(left)
    }

    /// Has the model unloaded when the requests that use it have ended, unless another one comes.
    pub(super) fn unload_when_idle(&self) {
        self.unloads.store(true, Relaxed);
    }

    /// What is measured of it; none before it was loaded.
    pub(crate) fn measured(&self) -> Option<Measured> {
        let slot = self.slot();
        let mut measured = slot.past.clone();
        if let State::Loaded(loaded) = &slot.state {
            measured.stats = loaded.stats();
            measured.stats.add_totals(&slot.past.stats);
            measured.add_experts(loaded.experts.layers());
            measured.read_bytes += loaded.read_bytes();
            measured.bytes = Some(loaded.bytes);
        }
        (self.loads() > 0).then_some(measured)
    }

    /// How often it was loaded.
    pub(crate) fn loads(&self) -> u64 {
        self.loads.load(Relaxed)
    }

    /// A lease of the loaded model, if it has not failed.
    pub(super) fn lease(self: &Arc<Entry>) -> Option<Lease> {
        self.lease_of(&self.slot())
    }

    /// The same, while the state is locked.
    fn lease_of(self: &Arc<Entry>, slot: &Slot) -> Option<Lease> {
        match &slot.state {
            State::Loaded(loaded) if loaded.failure().is_none() => {
                // While the state is locked, nobody unloads it.
                self.users.fetch_add(1, Relaxed);
                self.unloads.store(false, Relaxed);
                let (entry, loaded) = (Arc::clone(self), Arc::clone(loaded));
                Some(Lease { entry, loaded, waited: Duration::ZERO, unloads: false })
            }
            _ => None,
        }
    }

    /// Takes the model out of memory if nobody uses it. Returns what is to be dropped.
    pub(super) fn take_idle(&self) -> Option<Arc<Loaded>> {
        let mut slot = self.slot();
        if self.is_used() || !matches!(slot.state, State::Loaded(_)) {
            return None;
        }
        match slot.replace(State::Unloaded) {
            State::Loaded(loaded) => Some(loaded),
            _ => None,
        }
    }

    /// Begins to load the model. Returns what it replaces.
    pub(super) fn begin_load(&self) -> State {
        let old = self.slot().replace(State::Loading);
        let mut backoff = self.backoff();
        if matches!(old, State::Unloaded) {
            // It did not fail.
            *backoff = Backoff::default();
        }
        backoff.begin(Instant::now());
        drop(backoff);
        old
    }

    /// Says that the load waits for memory of other models, or goes on.
    pub(super) fn set_waiting(&self, waits: bool) {
        self.slot().replace(if waits { State::Unloaded } else { State::Loading });
    }

    /// Notes the result of a load. A model that has no room while `others_serve` is not loaded, and
    /// no failure of the server.
    pub(super) fn end_load(
        self: &Arc<Entry>,
        result: Result<Loaded>,
        others_serve: bool,
    ) -> Result<Lease> {
        self.backoff().end(Instant::now());
        match result {
            Ok(loaded) => {
                self.loads.fetch_add(1, Relaxed);
                let (details, defaults) = (loaded.details.clone(), loaded.defaults.clone());
                self.set_known(Known { details, defaults });
                let mut slot = self.slot();
                slot.replace(State::Loaded(Arc::new(loaded)));
                self.lease_of(&slot)
                    .ok_or_else(|| ApiError::internal("the model failed as it was loaded"))
            }
            Err(error) => {
                // Of the errors of a load, a lack of memory alone has this status.
                let has_no_room = error.status == StatusCode::SERVICE_UNAVAILABLE;
                self.slot().replace(match has_no_room && others_serve {
                    true => State::Unloaded,
                    false => State::Failed(error.message.clone()),
                });
                Err(error)
            }
        }
    }

    /// An error that tells clients the model's name in the place of its file's path.
    pub(super) fn without_paths(&self, error: ApiError, path: Option<&str>) -> ApiError {
        let full = error.message;
        // A file that is not found has the path that the server was given.
        let given = &self.spec.source;
        let path = path.or_else(|| source::is_file(given).then_some(given));
        let message = path.map_or(full.clone(), |path| full.replace(path, &self.spec.id));
        ApiError { message, full_message: Some(full.into()), ..error }
    }

    /// What is wrong with a loaded model, without the path of its file.
    fn failure(&self, loaded: &Loaded) -> Option<String> {
        Some(loaded.failure()?.replace(&loaded.details.path, &self.spec.id))
    }

    /// Whether requests use it.
    pub(super) fn is_used(&self) -> bool {
        self.users.load(Relaxed) > 0
    }

    /// Takes the failure of the last load back, so that the model is not loaded again by itself.
    /// Returns whether there was one.
    pub(super) fn forget_failure(&self) -> bool {
        let mut slot = self.slot();
        let has_failed = matches!(slot.state, State::Failed(_));
        if has_failed {
            slot.replace(State::Unloaded);
        }
        has_failed
    }

    /// When a model that has failed may be loaded again; none for one that has not.
    pub(super) fn next_load(&self) -> Option<Instant> {
        let has_failed = match &self.slot().state {
            State::Unloaded | State::Loading => false,
            State::Failed(_) => true,
            State::Loaded(loaded) => loaded.failure().is_some(),
        };
        has_failed.then(|| self.backoff().next())
    }

    /// The state in a word, and what is wrong.
    pub(crate) fn status(&self) -> (&'static str, Option<String>) {
        match &self.slot().state {
            State::Unloaded => ("unloaded", None),
            State::Loading => ("loading", None),
            State::Failed(cause) => ("failed", Some(cause.clone())),
            State::Loaded(loaded) => match (self.failure(loaded), loaded.hang(self.step_timeout)) {
                (Some(cause), _) => ("failed", Some(cause)),
                (None, Some(cause)) => ("hung", Some(cause)),
                (None, None) => ("loaded", None),
            },
        }
    }
}

impl Slot {
    /// Changes the state. Totals of a model that leaves are added to the past ones under the same
    /// lock, so that no sum ever falls.
    fn replace(&mut self, state: State) -> State {
        if let State::Loaded(loaded) = &self.state {
            self.past.stats.add_totals(&loaded.stats());
            self.past.add_experts(loaded.experts.layers());
            self.past.read_bytes += loaded.read_bytes();
        }
        std::mem::replace(&mut self.state, state)
    }
}

impl Measured {
    fn add_experts(&mut self, layers: Vec<ExpertStats>) {
        for layer in layers {
            match self.experts.iter_mut().find(|known| known.layer == layer.layer) {
                Some(known) => {
                    add(&mut known.counts, &layer.counts);
                    add(&mut known.seconds, &layer.seconds);
                    known.cache = match (known.cache, layer.cache) {
                        (Some(known), Some(more)) => Some(known.and(more)),
                        (known, more) => known.or(more),
                    };
                }
                None => self.experts.push(layer),
            }
        }
    }
}

/// Adds numbers one by one. A file that replaced another may have more of them.
fn add<T: Copy + Default + AddAssign>(sums: &mut Vec<T>, numbers: &[T]) {
    sums.resize(sums.len().max(numbers.len()), T::default());
    sums.iter_mut().zip(numbers).for_each(|(sum, number)| *sum += *number);
}

fn millis(keep_alive: Option<Duration>) -> u64 {
    keep_alive.map_or(u64::MAX, |time| time.as_millis() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_failures_make_the_wait_for_a_load_longer() {
        let spec = ModelSpec { id: "a".to_owned(), source: "a".to_owned() };
        let entry = Arc::new(Entry::new(&spec, 0, &ServerOptions::default()));
        let wait_after_failure = || {
            entry.begin_load();
            assert!(entry.end_load(Err(ApiError::internal("it is broken")), true).is_err());
            (entry.next_load().unwrap() - Instant::now()).as_secs_f64().ceil()
        };
        assert_eq!([(); 3].map(|()| wait_after_failure()), [1.0, 2.0, 4.0]);
        assert!(entry.forget_failure() && !entry.forget_failure());
        assert_eq!(entry.next_load(), None);
        assert_eq!(wait_after_failure(), 1.0);
    }
}
