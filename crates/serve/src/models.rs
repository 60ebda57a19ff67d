//! The models of a server: loaded at their first request, unloaded when they are idle or when
//! another one needs their memory, and loaded again after a failure.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use bodkin::{
    DeviceKind, Encoder, Error as RuntimeError, Model, ModelFile, Options, Reporter, Request,
};
use bodkin_gguf::File;
use serde_json::{Map, Value, json};
use tokio::task::spawn_blocking;

use crate::error::{ApiError, Result};
use crate::experts::ExpertSample;
use crate::fields::Fields;
use crate::options::{ModelSpec, ServerOptions};
use crate::sampling::{self, apply_defaults};

/// How long metrics wait for the answer of an engine about its experts.
const EXPERTS_TIMEOUT: Duration = Duration::from_millis(100);

/// All models of a server.
pub(crate) struct ModelPool {
    entries: Vec<Arc<Entry>>,
    load: Options,
    defaults: Map<String, Value>,
    memory_bytes: Option<u64>,
    step_timeout: Duration,
    reporter: Reporter,
    /// Held while memory is made free and a model is loaded.
    loading: Arc<tokio::sync::Mutex<()>>,
}

/// One model of the pool, loaded or not.
pub(crate) struct Entry {
    pub(crate) spec: ModelSpec,
    /// When the server started, in seconds since 1970: what clients read as the creation time.
    pub(crate) created: u64,
    state: Mutex<State>,
    /// Requests that use the model.
    users: AtomicUsize,
    /// Milliseconds since `started` of the last use.
    last_used: AtomicU64,
    started: Instant,
    /// How long it stays loaded without requests, in milliseconds; `u64::MAX` for ever.
    keep_alive: AtomicU64,
    /// How often it was loaded.
    loads: AtomicU64,
}

/// Whether a model can answer.
#[derive(Clone)]
enum State {
    Unloaded,
    Loading,
    Loaded(Arc<Loaded>),
    /// The last load failed.
    Failed(String),
}

/// A model in memory.
pub(crate) struct Loaded {
    pub(crate) kind: Kind,
    /// The bytes that it holds.
    pub(crate) bytes: u64,
    /// What people want to know of it.
    pub(crate) details: Details,
    pub(crate) load_time: Duration,
    /// The file whose mapped weights it computes with; none on a GPU, which has copies.
    mapped: Option<Arc<File>>,
    /// What requests start from.
    pub(crate) defaults: Request,
    /// Variables of chat templates that requests do not set.
    pub(crate) variables: Map<String, Value>,
    pub(crate) experts: ExpertSample,
}

/// What a model computes.
pub(crate) enum Kind {
    Text(Box<Model>),
    /// One request at a time.
    Encoder(Mutex<Encoder>),
}

/// Facts of a model's file.
#[derive(Clone, Debug, Default)]
pub(crate) struct Details {
    pub(crate) architecture: String,
    pub(crate) parameters: u64,
    pub(crate) context: usize,
    pub(crate) path: String,
    /// The format of most weights, such as `Q4_K`.
    pub(crate) format: &'static str,
    pub(crate) is_on_gpu: bool,
}

/// A loaded model in use: it is not unloaded before this drops.
pub(crate) struct Lease {
    entry: Arc<Entry>,
    loaded: Arc<Loaded>,
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

    /// The model, if it generates text.
    pub(crate) fn text(&self) -> Result<&Model> {
        match &self.kind {
            Kind::Text(model) => Ok(model),
            Kind::Encoder(_) => {
                let message =
                    format!("{} is an encoder: it makes embeddings and no text", self.id());
                Err(ApiError::bad_request(message))
            }
        }
    }

    /// A request of this model, with the options of the body.
    pub(crate) fn request(&self, fields: &mut Fields) -> Result<Request> {
        sampling::request(fields, &self.defaults, self.text()?.engine().tokenizer())
    }

    /// Sets how long the model stays loaded without requests; none for ever.
    pub(crate) fn set_keep_alive(&self, keep_alive: Option<Duration>) {
        self.entry.keep_alive.store(millis(keep_alive), Relaxed);
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.entry.touch();
        self.entry.users.fetch_sub(1, Relaxed);
    }
}

impl Entry {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn touch(&self) {
        self.last_used.store(self.started.elapsed().as_millis() as u64, Relaxed);
    }

    fn idle_ms(&self) -> u64 {
        (self.started.elapsed().as_millis() as u64).saturating_sub(self.last_used.load(Relaxed))
    }

    /// The model, if it is loaded and works, without using it.
    pub(crate) fn loaded(&self) -> Option<Arc<Loaded>> {
        match &*self.state() {
            State::Loaded(loaded) => Some(Arc::clone(loaded)),
            _ => None,
        }
    }

    /// When an idle model is unloaded, from now on; none for never.
    pub(crate) fn expires_in(&self) -> Option<Duration> {
        let keep_alive = self.keep_alive.load(Relaxed);
        let left = || Duration::from_millis(keep_alive.saturating_sub(self.idle_ms()));
        (keep_alive < u64::MAX).then(left)
    }

    /// How often it was loaded.
    pub(crate) fn loads(&self) -> u64 {
        self.loads.load(Relaxed)
    }

    /// A lease of the loaded model, if it has not failed.
    fn lease(self: &Arc<Entry>) -> Option<Lease> {
        let state = self.state();
        match &*state {
            State::Loaded(loaded) if loaded.failure().is_none() => {
                // While the state is locked, nobody unloads it.
                self.users.fetch_add(1, Relaxed);
                Some(Lease { entry: Arc::clone(self), loaded: Arc::clone(loaded) })
            }
            _ => None,
        }
    }

    /// Takes the model out of memory if nobody uses it. Returns what is to be dropped.
    fn take_idle(&self) -> Option<Arc<Loaded>> {
        let mut state = self.state();
        if self.users.load(Relaxed) > 0 || !matches!(*state, State::Loaded(_)) {
            return None;
        }
        match std::mem::replace(&mut *state, State::Unloaded) {
            State::Loaded(loaded) => Some(loaded),
            _ => None,
        }
    }

    /// The state in a word, and the cause of a failure.
    pub(crate) fn status(&self, step_timeout: Duration) -> (&'static str, Option<String>) {
        match &*self.state() {
            State::Unloaded => ("unloaded", None),
            State::Loading => ("loading", None),
            State::Failed(cause) => ("failed", Some(cause.clone())),
            State::Loaded(loaded) => match loaded.failure().or_else(|| loaded.hang(step_timeout)) {
                Some(cause) => ("failed", Some(cause)),
                None => ("loaded", None),
            },
        }
    }
}

impl Loaded {
    /// Why the engine answers no more requests.
    fn failure(&self) -> Option<String> {
        if let Some(Err(error)) = self.mapped.as_ref().map(|file| file.check_not_truncated()) {
            return Some(error.to_string());
        }
        match &self.kind {
            Kind::Text(model) => model.engine().failed().map(str::to_owned),
            Kind::Encoder(_) => None,
        }
    }

    /// Whether a step takes too long.
    fn hang(&self, step_timeout: Duration) -> Option<String> {
        let Kind::Text(model) = &self.kind else { return None };
        let age = model.engine().stats().step_age.filter(|age| *age > step_timeout)?;
        Some(format!("a step has been running for {} s", age.as_secs()))
    }
}

impl ModelPool {
    pub(crate) fn new(options: &ServerOptions, reporter: Reporter) -> ModelPool {
        let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
        let entry = |spec: &ModelSpec| {
            Arc::new(Entry {
                spec: spec.clone(),
                created,
                state: Mutex::new(State::Unloaded),
                users: AtomicUsize::new(0),
                last_used: AtomicU64::new(0),
                started: Instant::now(),
                keep_alive: AtomicU64::new(millis(options.keep_alive)),
                loads: AtomicU64::new(0),
            })
        };
        ModelPool {
            entries: options.models.iter().map(entry).collect(),
            load: options.load.clone(),
            defaults: options.defaults.clone(),
            memory_bytes: options.memory_bytes,
            step_timeout: options.step_timeout,
            reporter,
            loading: Arc::default(),
        }
    }

    pub(crate) fn entries(&self) -> &[Arc<Entry>] {
        &self.entries
    }

    /// Asks the engines about their experts. An engine in a long step answers for the next time.
    pub(crate) async fn sample_experts(&self) {
        for loaded in self.entries.iter().filter_map(|entry| entry.loaded()) {
            if !loaded.experts.begin() {
                continue;
            }
            let answer = spawn_blocking(move || {
                loaded.experts.end(match &loaded.kind {
                    Kind::Text(model) => model.engine().expert_stats(),
                    Kind::Encoder(_) => None,
                });
            });
            let _ = tokio::time::timeout(EXPERTS_TIMEOUT, answer).await;
        }
    }

    /// The entry that a client names. Without a name it is the first one, and a server of one
    /// model answers to every name, as clients have names built in.
    pub(crate) fn entry(&self, name: Option<&str>) -> Result<&Arc<Entry>> {
        let name = name.unwrap_or_default();
        if name.is_empty() || self.entries.len() == 1 {
            return self.entries.first().ok_or_else(|| ApiError::not_found("no model is served"));
        }
        let plain = |id: &str| id.strip_suffix(":latest").unwrap_or(id).to_owned();
        let found = self.entries.iter().find(|entry| plain(&entry.spec.id) == plain(name));
        found.ok_or_else(|| {
            let known: Vec<&str> = self.entries.iter().map(|e| e.spec.id.as_str()).collect();
            let name: String = name.chars().take(100).collect();
            let known = known.join(", ");
            ApiError::not_found(format!("model `{name}` is not served; the models are {known}"))
        })
    }

    /// The model that a client names, loaded.
    pub(crate) async fn get(self: &Arc<ModelPool>, name: Option<&str>) -> Result<Lease> {
        let entry = self.entry(name)?;
        entry.touch();
        if let Some(lease) = entry.lease() {
            return Ok(lease);
        }
        let loading = Arc::clone(&self.loading).lock_owned().await;
        // Another request may have loaded it meanwhile.
        if let Some(lease) = entry.lease() {
            return Ok(lease);
        }
        // A client that goes away drops this future, and the load goes on to its end.
        let (pool, entry) = (Arc::clone(self), Arc::clone(entry));
        let task = tokio::spawn(async move {
            let _loading = loading;
            pool.replace(&entry).await
        });
        task.await.map_err(|_| ApiError::internal("loading the model panicked"))?
    }

    /// Loads a model in the place of what its entry has.
    async fn replace(&self, entry: &Arc<Entry>) -> Result<Lease> {
        // A model that has failed frees its memory first.
        let old = std::mem::replace(&mut *entry.state(), State::Loading);
        free(old).await;
        let loaded = self.load(entry).await;
        let mut state = entry.state();
        match loaded {
            Ok(loaded) => {
                entry.loads.fetch_add(1, Relaxed);
                *state = State::Loaded(Arc::new(loaded));
                drop(state);
                entry.lease().ok_or_else(|| ApiError::internal("the model failed as it was loaded"))
            }
            Err(error) => {
                *state = State::Failed(error.message.clone());
                Err(error)
            }
        }
    }

    /// Loads a model, after idle ones were unloaded until it fits.
    async fn load(&self, entry: &Arc<Entry>) -> Result<Loaded> {
        loop {
            let (source, mut options) = (entry.spec.source.clone(), self.load.clone());
            let used: u64 = self.entries.iter().filter_map(|e| Some(e.loaded()?.bytes)).sum();
            options.memory_bytes = self.memory_bytes.map(|bytes| bytes.saturating_sub(used));
            let reporter = self.reporter.clone();
            let task = spawn_blocking(move || load(&source, &options, &reporter));
            let result =
                task.await.map_err(|_| ApiError::internal("loading the model panicked"))?;
            if matches!(result, Err(RuntimeError::OutOfMemory { .. })) && self.unload_idle().await {
                continue;
            }
            let mut loaded = result?;
            loaded.variables = apply_defaults(&self.defaults, &mut loaded.defaults)?;
            return Ok(loaded);
        }
    }

    /// Unloads the model that was idle longest. Returns false if there is none.
    async fn unload_idle(&self) -> bool {
        let mut entries: Vec<&Arc<Entry>> = self.entries.iter().collect();
        entries.sort_by_key(|entry| std::cmp::Reverse(entry.idle_ms()));
        let Some(idle) = entries.into_iter().find_map(|entry| entry.take_idle()) else {
            return false;
        };
        free(State::Loaded(idle)).await;
        true
    }

    /// Unloads a model, at once or when the requests that use it have ended.
    pub(crate) async fn unload(&self, entry: &Entry) {
        match entry.take_idle() {
            Some(idle) => free(State::Loaded(idle)).await,
            None if entry.loaded().is_some() => entry.keep_alive.store(0, Relaxed),
            None => {}
        }
    }

    /// Unloads the models whose time is over.
    pub(crate) async fn unload_expired(&self) {
        for entry in &self.entries {
            if entry.expires_in().is_some_and(|left| left.is_zero())
                && let Some(idle) = entry.take_idle()
            {
                tracing::info!(model = entry.spec.id, "unloading an idle model");
                free(State::Loaded(idle)).await;
            }
        }
    }

    /// Whether all models that were asked for answer, and a JSON object that says so.
    pub(crate) fn health(&self) -> (bool, Value) {
        let statuses = self.entries.iter().map(|entry| (entry, entry.status(self.step_timeout)));
        let (mut is_healthy, mut models) = (true, Vec::new());
        for (entry, (status, cause)) in statuses {
            is_healthy &= matches!(status, "loaded" | "unloaded");
            let age = entry.loaded().and_then(|loaded| match &loaded.kind {
                Kind::Text(model) => model.engine().stats().step_age,
                Kind::Encoder(_) => None,
            });
            models.push(json!({
                "id": entry.spec.id,
                "status": status,
                "error": cause,
                "step_age_ms": age.map(|age| age.as_millis() as u64),
                "loads": entry.loads(),
            }));
        }
        (is_healthy, json!({ "status": if is_healthy { "ok" } else { "error" }, "models": models }))
    }
}

/// Drops a model on a thread that may wait.
async fn free(state: State) {
    // The thread cannot panic.
    let _ = spawn_blocking(move || drop(state)).await;
}

fn millis(keep_alive: Option<Duration>) -> u64 {
    keep_alive.map_or(u64::MAX, |time| time.as_millis() as u64)
}

fn load(source: &str, options: &Options, reporter: &Reporter) -> bodkin::Result<Loaded> {
    let started = Instant::now();
    let file = ModelFile::find(source, reporter)?;
    let mapped = Arc::clone(&file.file);
    let mut details = Details {
        architecture: file.plan.architecture.clone(),
        parameters: file.plan.cost().parameters,
        context: file.plan.context_length,
        path: file.name.clone(),
        format: file.main_format(),
        is_on_gpu: false,
    };
    let mut defaults = Request::default();
    let (kind, bytes) = if file.plan.is_encoder() {
        let encoder = Encoder::open(file, options)?;
        let bytes = encoder.bytes();
        (Kind::Encoder(Mutex::new(encoder)), bytes)
    } else {
        let model = Model::open(file, options)?;
        details.context = model.context();
        details.is_on_gpu = model.backend().devices().iter().all(|d| d.kind != DeviceKind::Cpu);
        let bytes = model.bytes();
        defaults = model.request();
        (Kind::Text(Box::new(model)), bytes)
    };
    let mapped = (!details.is_on_gpu).then_some(mapped);
    let (load_time, experts) = (started.elapsed(), ExpertSample::default());
    let variables = Map::new();
    Ok(Loaded { kind, bytes, details, load_time, mapped, defaults, variables, experts })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_load_goes_on_when_its_client_goes_away() {
        let models = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/parity");
        let source = models.join("models/llama.gguf").display().to_string();
        let spec = ModelSpec { id: "llama".to_owned(), source };
        let load = Options { device: "cpu".to_owned(), ctx_size: Some(256), ..Options::default() };
        let options = ServerOptions { models: vec![spec], load, ..ServerOptions::default() };
        let pool = Arc::new(ModelPool::new(&options, Reporter::default()));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let gone = tokio::time::timeout(Duration::ZERO, pool.get(None)).await;
            assert!(gone.is_err(), "the load takes longer");
            let deadline = Instant::now() + Duration::from_secs(60);
            while !pool.health().0 || pool.entries[0].loaded().is_none() {
                assert!(Instant::now() < deadline, "{}", pool.health().1);
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            assert!(pool.get(None).await.is_ok());
            assert_eq!(pool.entries[0].loads(), 1);
        });
    }
}
