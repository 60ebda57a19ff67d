//! Prometheus metrics: counters and histograms of requests, and the state of each engine, read when
//! the metrics are. Names that dashboards of llama-server and vLLM know are written, too.

use std::sync::Arc;
use std::time::Instant;

use bodkin_engine::Stats;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric};
use prometheus_client::metrics::counter::{ConstCounter, Counter};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use crate::models::{Entry, Kind, ModelPool};

/// Seconds from a request to its first token.
const FIRST_TOKEN_BUCKETS: [f64; 14] =
    [0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5.0, 10.0, 30.0, 120.0];

/// Seconds between two tokens of an answer.
const TOKEN_BUCKETS: [f64; 13] =
    [0.0005, 0.001, 0.002, 0.004, 0.008, 0.015, 0.03, 0.06, 0.12, 0.25, 0.5, 1.0, 5.0];

/// Seconds of a whole request.
const REQUEST_BUCKETS: [f64; 12] =
    [0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0];

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RequestLabels {
    path: String,
    status: u16,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ModelLabels {
    model: String,
}

type ModelHistogram = Family<ModelLabels, Histogram, fn() -> Histogram>;

/// What is measured of all requests.
pub(crate) struct Metrics {
    registry: Registry,
    requests: Family<RequestLabels, Counter>,
    first_token: ModelHistogram,
    inter_token: ModelHistogram,
    request: ModelHistogram,
}

/// What is measured of one request.
pub(crate) struct RequestMetrics {
    first_token: Histogram,
    inter_token: Histogram,
    request: Histogram,
    started: Instant,
    /// The latest token of each answer.
    latest: Vec<Option<Instant>>,
}

impl Metrics {
    pub(crate) fn new(pool: &Arc<ModelPool>) -> Metrics {
        let mut registry = Registry::default();
        let requests = Family::default();
        let help = "HTTP requests by route and status";
        registry.register("bodkin_http_requests", help, requests.clone());
        let mut histogram = |name: &str, help: &str, new: fn() -> Histogram| {
            let family = Family::new_with_constructor(new);
            registry.register(name, help, family.clone());
            family
        };
        let metrics = (
            histogram(
                "bodkin_time_to_first_token_seconds",
                "From the arrival of a request to its first token",
                || Histogram::new(FIRST_TOKEN_BUCKETS),
            ),
            histogram("bodkin_inter_token_seconds", "Between two tokens of an answer", || {
                Histogram::new(TOKEN_BUCKETS)
            }),
            histogram(
                "bodkin_request_seconds",
                "From the arrival of a request to its last token",
                || Histogram::new(REQUEST_BUCKETS),
            ),
        );
        registry.register_collector(Box::new(EngineCollector(Arc::clone(pool))));
        let (first_token, inter_token, request) = metrics;
        Metrics { registry, requests, first_token, inter_token, request }
    }

    /// Notes a response.
    pub(crate) fn response(&self, path: &str, status: u16) {
        let labels = RequestLabels { path: path.to_owned(), status };
        self.requests.get_or_create(&labels).inc();
    }

    /// Begins to measure a request for a model.
    pub(crate) fn begin(&self, model: &str) -> RequestMetrics {
        let labels = ModelLabels { model: model.to_owned() };
        RequestMetrics {
            first_token: self.first_token.get_or_create(&labels).clone(),
            inter_token: self.inter_token.get_or_create(&labels).clone(),
            request: self.request.get_or_create(&labels).clone(),
            started: Instant::now(),
            latest: Vec::new(),
        }
    }

    /// All metrics as Prometheus reads them.
    pub(crate) fn text(&self) -> String {
        let mut text = String::new();
        // Writing to a string does not fail.
        let _ = prometheus_client::encoding::text::encode(&mut text, &self.registry);
        text
    }
}

impl RequestMetrics {
    /// Notes a token of an answer.
    pub(crate) fn token(&mut self, index: usize) {
        if self.latest.len() <= index {
            self.latest.resize(index + 1, None);
        }
        let now = Instant::now();
        match self.latest[index].replace(now) {
            Some(before) => self.inter_token.observe((now - before).as_secs_f64()),
            None => self.first_token.observe((now - self.started).as_secs_f64()),
        }
    }

    /// Notes the end of an answer.
    pub(crate) fn done(&mut self) {
        self.request.observe(self.started.elapsed().as_secs_f64());
    }
}

/// Reads the engines' statistics.
struct EngineCollector(Arc<ModelPool>);

impl std::fmt::Debug for EngineCollector {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("EngineCollector")
    }
}

/// A number of an engine: its name, what it is, and whether it only grows.
type EngineMetric = (&'static str, &'static str, bool, fn(&Stats) -> f64);

const ENGINE_METRICS: &[EngineMetric] = &[
    ("bodkin_requests_running", "Requests that have pages", false, |s| s.running as f64),
    ("bodkin_requests_waiting", "Requests that wait", false, |s| s.waiting as f64),
    ("bodkin_requests", "Requests that were admitted", true, |s| s.requests as f64),
    ("bodkin_prompt_tokens", "Tokens of prompts", true, |s| s.prompt_tokens as f64),
    ("bodkin_cached_tokens", "Prompt tokens found in the KV cache", true, |s| {
        s.cached_tokens as f64
    }),
    ("bodkin_generated_tokens", "Tokens that were generated", true, |s| s.generated_tokens as f64),
    ("bodkin_preemptions", "Requests that gave up their pages", true, |s| s.preemptions as f64),
    ("bodkin_steps", "Steps of the model", true, |s| s.steps as f64),
    ("bodkin_rows", "Tokens that were computed", true, |s| s.rows as f64),
    ("bodkin_step_seconds", "Time in steps", true, |s| s.step_seconds),
    ("bodkin_kv_pages", "Pages of the KV cache", false, |s| pages(&s.total_pages)),
    ("bodkin_kv_pages_free", "Pages that hold nothing", false, |s| pages(&s.free_pages)),
    ("bodkin_kv_pages_cached", "Unused pages that hold a prefix", false, |s| {
        pages(&s.cached_pages)
    }),
    ("bodkin_kv_cache_usage_ratio", "Share of the pages in use", false, usage),
    ("vllm:num_requests_running", "As bodkin_requests_running", false, |s| s.running as f64),
    ("vllm:num_requests_waiting", "As bodkin_requests_waiting", false, |s| s.waiting as f64),
    ("vllm:kv_cache_usage_perc", "As bodkin_kv_cache_usage_ratio", false, usage),
    ("llamacpp:prompt_tokens", "Prompt tokens that were computed", true, |s| {
        s.prompt_tokens.saturating_sub(s.cached_tokens) as f64
    }),
    ("llamacpp:prompt_tokens_cached", "As bodkin_cached_tokens", true, |s| s.cached_tokens as f64),
    ("llamacpp:tokens_predicted", "As bodkin_generated_tokens", true, |s| {
        s.generated_tokens as f64
    }),
    ("llamacpp:n_decode", "As bodkin_steps", true, |s| s.steps as f64),
    ("llamacpp:requests_processing", "As bodkin_requests_running", false, |s| s.running as f64),
    ("llamacpp:requests_deferred", "As bodkin_requests_waiting", false, |s| s.waiting as f64),
    ("llamacpp:n_busy_slots_per_decode", "Rows of a step", false, |s| {
        s.rows as f64 / (s.steps as f64).max(1.0)
    }),
];

fn pages(windows: &[usize]) -> f64 {
    windows.iter().sum::<usize>() as f64
}

/// The share of the pages that running requests hold.
fn usage(stats: &Stats) -> f64 {
    let unused = pages(&stats.free_pages) + pages(&stats.cached_pages);
    1.0 - unused / pages(&stats.total_pages).max(1.0)
}

impl Collector for EngineCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let loaded = self.0.entries().iter().filter_map(|entry| Some((entry, entry.loaded()?)));
        let loaded: Vec<_> = loaded.collect();
        let stats = loaded.iter().filter_map(|(entry, loaded)| match &loaded.kind {
            Kind::Text(model) => Some((labels(entry), model.engine().stats())),
            Kind::Encoder(_) => None,
        });
        let stats: Vec<(ModelLabels, Stats)> = stats.collect();
        for (name, help, is_counter, read) in ENGINE_METRICS {
            let kind = if *is_counter {
                ConstCounter::new(0.0).metric_type()
            } else {
                ConstGauge::new(0.0).metric_type()
            };
            let mut descriptor = encoder.encode_descriptor(name, help, None, kind)?;
            for (labels, stats) in &stats {
                let family = descriptor.encode_family(labels)?;
                let value = read(stats);
                match is_counter {
                    true => ConstCounter::new(value).encode(family)?,
                    false => ConstGauge::new(value).encode(family)?,
                }
            }
        }
        let kind = ConstGauge::new(0u64).metric_type();
        let help = "Memory of a loaded model";
        let mut descriptor = encoder.encode_descriptor("bodkin_model_bytes", help, None, kind)?;
        for (entry, loaded) in &loaded {
            ConstGauge::new(loaded.bytes).encode(descriptor.encode_family(&labels(entry))?)?;
        }
        Ok(())
    }
}

fn labels(entry: &Entry) -> ModelLabels {
    ModelLabels { model: entry.spec.id.clone() }
}
