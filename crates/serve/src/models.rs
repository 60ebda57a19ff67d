//! The models of a server: loaded at their first request, unloaded when they are idle or when
//! another one needs their memory, and loaded again after a failure.

mod backoff;
mod entry;

use std::sync::Arc;
use std::time::{Duration, Instant};

use bodkin::{
    DeviceKind, Encoder, Error as RuntimeError, ExpertBudget, Model, ModelFile, Options, Reporter,
};
use serde_json::{Map, Value, json};
use tokio::task::spawn_blocking;

use crate::error::{ApiError, Result};
use crate::experts::ExpertSample;
use crate::options::{ModelSpec, ServerOptions};
use crate::sampling::{self, Defaults};

pub(crate) use entry::{Details, Entry, Kind, Lease, Loaded, Measured};

use entry::State;

/// How long metrics wait for the answer of an engine about its experts.
const EXPERTS_TIMEOUT: Duration = Duration::from_millis(100);

/// All models of a server.
pub(crate) struct ModelPool {
    entries: Vec<Arc<Entry>>,
    load: Options,
    /// Whether models that were made for text embed texts instead.
    embeds: bool,
    defaults: Map<String, Value>,
    memory_bytes: Option<u64>,
    reporter: Reporter,
    /// Held while memory is made free and a model is loaded.
    loading: Arc<tokio::sync::Mutex<()>>,
}

impl ModelPool {
    pub(crate) fn new(options: &ServerOptions, reporter: Reporter) -> ModelPool {
        let created = jiff::Timestamp::now().as_second();
        let entry = |spec: &ModelSpec| Arc::new(Entry::new(spec, created, options));
        ModelPool {
            entries: options.models.iter().map(entry).collect(),
            load: options.load.clone(),
            embeds: options.embeds,
            defaults: options.defaults.clone(),
            memory_bytes: options.memory_bytes,
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
        let loading = Arc::clone(&self.loading).lock_owned().await;
        // Another request may have loaded it meanwhile.
        if let Some(lease) = entry.lease() {
            return Ok(lease);
        }
        // A client that goes away drops this future, and the load goes on to its end.
        let (pool, entry) = (Arc::clone(self), Arc::clone(entry));
        let task = tokio::spawn(async move {
            let _loading = loading;
            pool.replace(&entry, true).await
        });
        task.await.map_err(|_| ApiError::internal("loading the model panicked"))?
    }

    /// Loads a model in the place of what its entry has. Only if `evicts`, idle models are unloaded
    /// until it fits.
    async fn replace(&self, entry: &Arc<Entry>, evicts: bool) -> Result<Lease> {
        // A model that has failed frees its memory first.
        free(entry.begin_load()).await;
        let loaded = self.load(entry, evicts).await;
        entry.end_load(loaded)
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
            match pool.replace(&entry, false).await {
                Ok(_) => tracing::info!(model, "loaded again after a failure"),
                Err(error) => tracing::warn!(model, "loading again: {}", error.message),
            }
        });
    }

    /// Loads a model.
    async fn load(&self, entry: &Arc<Entry>, evicts: bool) -> Result<Loaded> {
        // A model is rather loaded whole without the idle ones than with few experts beside them.
        let mut is_whole = evicts && self.load.expert_budget == ExpertBudget::Auto;
        loop {
            let (source, mut options) = (entry.spec.source.clone(), self.load.clone());
            if is_whole {
                options.expert_budget = ExpertBudget::Share(1.0);
            }
            let used: u64 = self.entries.iter().filter_map(|e| Some(e.loaded()?.bytes)).sum();
            options.memory_bytes = self.memory_bytes.map(|bytes| bytes.saturating_sub(used));
            let (embeds, reporter) = (self.embeds, self.reporter.clone());
            let task = spawn_blocking(move || load(&source, &options, embeds, &reporter));
            let result =
                task.await.map_err(|_| ApiError::internal("loading the model panicked"))?;
            let is_too_large = matches!(result, Err(RuntimeError::OutOfMemory { .. }));
            if is_too_large && evicts && self.unload_idle().await {
                continue;
            }
            if is_too_large && std::mem::take(&mut is_whole) {
                continue;
            }
            let mut loaded = result?;
            let request = std::mem::take(&mut loaded.defaults.request);
            loaded.defaults = sampling::defaults(&self.defaults, request)?;
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

/// Drops a model on a thread that may wait.
async fn free(state: State) {
    // The thread cannot panic.
    let _ = spawn_blocking(move || drop(state)).await;
}

/// Loads a model: one that was made for text also `embeds` instead, if it is to.
fn load(
    source: &str,
    options: &Options,
    embeds: bool,
    reporter: &Reporter,
) -> bodkin::Result<Loaded> {
    let file = ModelFile::find(source, reporter)?;
    let mapped = Arc::clone(&file.file);
    let mut details = Details {
        architecture: file.plan.architecture.clone(),
        parameters: file.plan.cost().parameters,
        weight_bytes: file.plan.cost().weight_bytes,
        context: file.plan.context_length,
        trained_context: file.plan.context_length,
        licence: mapped.metadata().str("general.license").ok().flatten().map(str::to_owned),
        path: file.name.clone(),
        format: file.main_format(),
        is_on_gpu: false,
    };
    let mut defaults = Defaults::default();
    let (kind, bytes) = if embeds || file.is_embedder() {
        let encoder = Encoder::open(file, options)?;
        details.context = encoder.context();
        let bytes = encoder.bytes();
        (Kind::Encoder(Box::new(encoder)), bytes)
    } else {
        let model = Model::open(file, options)?;
        details.context = model.context();
        details.is_on_gpu = model.backend().devices().iter().all(|d| d.kind != DeviceKind::Cpu);
        let bytes = model.bytes();
        defaults.request = model.request();
        (Kind::Text(Box::new(model)), bytes)
    };
    let mapped = (!details.is_on_gpu).then_some(mapped);
    Ok(Loaded { kind, bytes, details, mapped, defaults, experts: ExpertSample::default() })
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
