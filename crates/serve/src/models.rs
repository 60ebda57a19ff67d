//! The models of a server: loaded at their first request, unloaded when they are idle or when
//! another one needs their memory, and loaded again after a failure.

mod backoff;
mod entry;
mod loaded;

use std::sync::Arc;
use std::time::{Duration, Instant};

use bodkin::memory::total_bytes;
use bodkin::{Error as RuntimeError, ExpertBudget, Reporter};
use serde_json::{Value, json};
use tokio::task::spawn_blocking;

use crate::error::{ApiError, Result};
use crate::options::{ModelSpec, ServerOptions};
use crate::sampling;

pub(crate) use entry::{Entry, Lease, Measured};
pub(crate) use loaded::{Details, Kind};

use entry::State;
use loaded::{LoadError, LoadOptions, Loaded, load};

/// How long metrics wait for the answer of an engine about its experts.
const EXPERTS_TIMEOUT: Duration = Duration::from_millis(100);

/// How often a load that waits for memory looks whether a model is idle.
const RELEASE_CHECK: Duration = Duration::from_millis(20);

/// All models of a server.
pub(crate) struct ModelPool {
    entries: Vec<Arc<Entry>>,
    load: LoadOptions,
    memory_bytes: Option<u64>,
    /// How long a load waits for requests of other models to end, whose memory it needs.
    release_timeout: Duration,
    /// Held while memory is made free and a model is loaded.
    loading: Arc<tokio::sync::Mutex<()>>,
}

impl ModelPool {
    pub(crate) fn new(options: &ServerOptions, reporter: Reporter) -> ModelPool {
        let created = jiff::Timestamp::now().as_second();
        let entry = |spec: &ModelSpec| Arc::new(Entry::new(spec, created, options));
        ModelPool {
            entries: options.models.iter().map(entry).collect(),
            load: LoadOptions {
                options: options.load.clone(),
                embeds: options.embeds,
                defaults: options.defaults.clone(),
                reporter,
            },
            memory_bytes: options.memory_bytes,
            release_timeout: options.release_timeout,
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

    /// Reads the headers of models that are on this machine, for clients that ask about a model
    /// before its first load.
    pub(crate) fn read_headers(&self) {
        for entry in &self.entries {
            if let Some(known) = loaded::known(&entry.spec.source, &self.load) {
                entry.set_known(known);
            }
        }
    }

    /// The entry that a client names. Without a name it is the first one, and a server of one
    /// model answers to every name, as clients have names built in.
    pub(crate) fn entry(&self, name: Option<&str>) -> Result<&Arc<Entry>> {
        let name = name.unwrap_or_default();
        if name.is_empty() || self.entries.len() == 1 {
            return self.entries.first().ok_or_else(|| ApiError::not_found("no model is served"));
        }
        let found = self.entries.iter().find(|entry| entry.has_name(name));
        found.ok_or_else(|| {
            let known: Vec<&str> = self.entries.iter().map(|e| e.spec.id.as_str()).collect();
            let name: String = name.chars().take(100).collect();
            let known = known.join(", ");
            ApiError::not_found(format!("model `{name}` is not served; the models are {known}"))
        })
    }

    /// Says that the default model is being loaded, before the first client can ask: `/health`
    /// would call one that waits for its load healthy.
    pub(crate) fn begin_default(&self) {
        if let Ok(entry) = self.entry(None) {
            drop(entry.begin_load());
        }
    }

    /// The model that a client names, loaded.
    pub(crate) async fn get(self: &Arc<ModelPool>, name: Option<&str>) -> Result<Lease> {
        let entry = self.entry(name)?;
        entry.touch();
        if let Some(lease) = entry.lease() {
            return Ok(lease);
        }
        // Clients that wait for the same memory wait as long, and not behind each other's waits.
        let deadline = Instant::now().checked_add(self.release_timeout);
        let loading = Arc::clone(&self.loading).lock_owned().await;
        // Another request may have loaded it meanwhile.
        if let Some(lease) = entry.lease() {
            return Ok(lease);
        }
        // A client that goes away drops this future, and the load goes on to its end.
        let (pool, entry) = (Arc::clone(self), Arc::clone(entry));
        let task = tokio::spawn(async move {
            let _loading = loading;
            pool.replace(&entry, deadline).await
        });
        task.await.map_err(|_| ApiError::internal("loading the model panicked"))?
    }

    /// Loads a model in the place of what its entry has. Idle models are unloaded until it fits,
    /// and up to the deadline, if there is one, busy ones too, when their requests have ended.
    async fn replace(&self, entry: &Arc<Entry>, deadline: Option<Instant>) -> Result<Lease> {
        // A model that has failed frees its memory first.
        free(entry.begin_load()).await;
        let loaded = self.load(entry, deadline).await;
        if let Err(error) = &loaded {
            let cause = error.full_message.as_deref().unwrap_or(&error.message);
            tracing::warn!(model = entry.spec.id, "{cause}");
        }
        // The server works while another model does, and this one may have room later.
        let others_serve = self.entries.iter().any(|entry| entry.loaded().is_some());
        entry.end_load(loaded, others_serve)
    }

    /// Loads a model that has failed again, so that a router that waits for `/health` need not send
    /// a request. Does nothing while a model is loaded, or before the requests of the failed one,
    /// which hold its memory, have ended.
    pub(crate) fn reload_failed(self: &Arc<ModelPool>) {
        let now = Instant::now();
        let due = self.entries.iter().filter(|entry| !entry.is_used());
        let due = due.filter_map(|entry| Some((entry.next_load().filter(|&at| at <= now)?, entry)));
        let Some((_, entry)) = due.min_by_key(|(at, _)| *at) else { return };
        let entry = Arc::clone(entry);
        let Ok(loading) = Arc::clone(&self.loading).try_lock_owned() else { return };
        let pool = Arc::clone(self);
        tokio::spawn(async move {
            let _loading = loading;
            // A request may have loaded it meanwhile.
            if entry.next_load().is_none() {
                return;
            }
            let model = &entry.spec.id;
            match pool.replace(&entry, None).await {
                Ok(_) => tracing::info!(model, "loaded again after a failure"),
                // The load has said why.
                Err(_) => tracing::warn!(model, "not loaded again after a failure"),
            }
        });
    }

    /// Loads a model.
    async fn load(&self, entry: &Arc<Entry>, deadline: Option<Instant>) -> Result<Loaded> {
        // A model is rather loaded whole without the idle ones than with few experts beside them.
        let has_auto_budget = self.load.options.expert_budget == ExpertBudget::Auto;
        let mut is_whole = has_auto_budget;
        loop {
            let (source, mut load_options) = (entry.spec.source.clone(), self.load.clone());
            if is_whole {
                load_options.options.expert_budget = ExpertBudget::Share(1.0);
            }
            let used = self.loaded_bytes();
            let free = self.memory_bytes.map(|bytes| bytes.saturating_sub(used));
            load_options.options.memory_bytes = free;
            let task = spawn_blocking(move || load(&source, &load_options));
            let result =
                task.await.map_err(|_| ApiError::internal("loading the model panicked"))?;
            let LoadError { error, path } = match result {
                Ok(loaded) => return self.with_defaults(loaded),
                Err(error) => *error,
            };
            if let Some(missing) = missing_bytes(&error) {
                let has_enough = self.loaded_bytes() >= missing;
                // Nobody asks for a model that is loaded again by itself: it takes no room in vain.
                let has_more_room = (deadline.is_some() || has_enough) && self.unload_idle().await;
                if has_more_room || std::mem::take(&mut is_whole) {
                    continue;
                }
                if let Some(deadline) = deadline.filter(|_| has_enough) {
                    // The server works meanwhile, and `/health` says so.
                    entry.set_waiting(true);
                    let has_more_room = self.unload_busy(deadline).await;
                    entry.set_waiting(false);
                    if has_more_room {
                        is_whole = has_auto_budget;
                        continue;
                    }
                }
            }
            return Err(entry.without_paths(error.into(), path.as_deref()));
        }
    }

    /// The model with what the requests of this server start from.
    fn with_defaults(&self, mut loaded: Loaded) -> Result<Loaded> {
        let request = loaded.defaults.request.clone();
        loaded.defaults = Arc::new(sampling::defaults(&self.load.defaults, request)?);
        Ok(loaded)
    }

    /// The bytes of all loaded models.
    fn loaded_bytes(&self) -> u64 {
        self.entries.iter().filter_map(|entry| Some(entry.loaded()?.bytes)).sum()
    }

    /// Waits for the requests of a busy model to end, and unloads it. Returns false if those of
    /// none end before the deadline.
    async fn unload_busy(&self, deadline: Instant) -> bool {
        while Instant::now() < deadline {
            if self.unload_idle().await {
                return true;
            }
            tokio::time::sleep(RELEASE_CHECK).await;
        }
        false
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
            None if entry.forget_failure() => {}
            None => entry.unload_when_idle(),
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

    /// Waits until no step runs, once requests have been cancelled. Returns false if one hangs.
    pub(crate) async fn end_steps(&self) -> bool {
        let is_stepping = |entry: &Arc<Entry>| {
            entry.loaded().is_some_and(|loaded| loaded.stats().step_age.is_some())
        };
        while self.entries.iter().any(is_stepping) {
            if self.entries.iter().any(|entry| entry.status().0 == "hung") {
                return false;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        true
    }

    /// Whether all models that were asked for answer, and a JSON object that says so.
    pub(crate) fn health(&self) -> (bool, Value) {
        let statuses = self.entries.iter().map(|entry| (entry, entry.status()));
        let now = Instant::now();
        let in_ms = |at: Instant| at.saturating_duration_since(now).as_millis() as u64;
        let (mut is_healthy, mut models) = (true, Vec::new());
        for (entry, (status, cause)) in statuses {
            is_healthy &= matches!(status, "loaded" | "unloaded");
            let age = entry.loaded().and_then(|loaded| loaded.stats().step_age);
            models.push(json!({
                "id": entry.spec.id,
                "status": status,
                "error": cause,
                "retry_in_ms": entry.next_load().map(in_ms),
                "step_age_ms": age.map(|age| age.as_millis() as u64),
                "loads": entry.loads(),
            }));
        }
        (is_healthy, json!({ "status": if is_healthy { "ok" } else { "error" }, "models": models }))
    }
}

/// The bytes without which a model could not be loaded; none if that was not the reason.
fn missing_bytes(error: &RuntimeError) -> Option<u64> {
    match error {
        RuntimeError::OutOfMemory { memory, available_bytes, .. } => {
            Some(total_bytes(memory).saturating_sub(*available_bytes))
        }
        RuntimeError::HostMemory { host_expert_bytes, available_bytes, .. } => {
            Some(host_expert_bytes.saturating_sub(*available_bytes))
        }
        _ => None,
    }
}

/// Drops a model on a thread that may wait.
async fn free(state: State) {
    // The thread cannot panic.
    let _ = spawn_blocking(move || drop(state)).await;
}

#[cfg(test)]
mod tests {
    use bodkin::Options;

    use super::*;

    /// A pool of tiny models of the kit.
    fn pool(names: &[&str], memory_bytes: Option<u64>) -> Arc<ModelPool> {
        let models = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/parity");
        let spec = |name: &&str| {
            let source = models.join(format!("models/{name}.gguf")).display().to_string();
            ModelSpec { id: (*name).to_owned(), source }
        };
        let models = names.iter().map(spec).collect();
        let load = Options { device: "cpu".to_owned(), ctx_size: Some(256), ..Options::default() };
        let options = ServerOptions { models, load, memory_bytes, ..ServerOptions::default() };
        Arc::new(ModelPool::new(&options, Reporter::default()))
    }

    fn run<T>(work: impl Future<Output = T>) -> T {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(work)
    }

    /// It would wait for ever otherwise, as nobody asks for the idle one.
    #[test]
    fn a_model_that_is_loaded_again_takes_the_room_of_an_idle_one() {
        run(async {
            let names = ["llama", "qwen3"];
            let both = pool(&names, None);
            for name in names {
                drop(both.get(Some(name)).await.ok().unwrap());
            }
            let pool = pool(&names, Some(both.loaded_bytes() - 1));
            drop(pool.get(Some("llama")).await.ok().unwrap());
            let failed = &pool.entries[1];
            failed.begin_load();
            assert!(failed.end_load(Err(ApiError::internal("it is broken")), true).is_err());
            let deadline = Instant::now() + Duration::from_secs(60);
            while failed.loaded().is_none() {
                assert!(Instant::now() < deadline, "{}", pool.health().1);
                pool.reload_failed();
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            assert_eq!(pool.entries[0].status().0, "unloaded");
            assert!(pool.health().0, "{}", pool.health().1);
        });
    }

    #[test]
    fn a_load_goes_on_when_its_client_goes_away() {
        let pool = pool(&["llama"], None);
        run(async {
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
