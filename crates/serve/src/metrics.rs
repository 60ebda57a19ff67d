//! Prometheus metrics: counters and histograms of requests, and the state of each engine, read when
//! the metrics are. Names that dashboards of llama-server and vLLM know are written, too.

mod engines;

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use bodkin::{FinishReason, Timings, Usage};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use tracing::Span;

use crate::error::ApiError;
use crate::models::ModelPool;
use crate::request_id;
use engines::{EngineCollector, ModelLabels, RequestTotals};

/// Seconds from a request to its first token.
const FIRST_TOKEN_BUCKETS: [f64; 14] =
    [0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5.0, 10.0, 30.0, 120.0];

/// Seconds between two tokens of an answer.
const TOKEN_BUCKETS: [f64; 13] =
    [0.0005, 0.001, 0.002, 0.004, 0.008, 0.015, 0.03, 0.06, 0.12, 0.25, 0.5, 1.0, 5.0];

/// Seconds of a part of one layer in one step.
const LAYER_BUCKETS: [f64; 12] =
    [5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.02, 0.1];

/// Seconds of a whole request.
const REQUEST_BUCKETS: [f64; 12] =
    [0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0];

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RequestLabels {
    path: String,
    status: u16,
}

/// How an answer ended.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct EndLabels {
    model: String,
    reason: &'static str,
}

type ModelHistogram = Family<ModelLabels, Histogram, fn() -> Histogram>;

/// What is measured of all requests.
pub(crate) struct Metrics {
    registry: Registry,
    requests: Family<RequestLabels, Counter>,
    first_token: ModelHistogram,
    inter_token: ModelHistogram,
    request: ModelHistogram,
    expert_layer: ModelHistogram,
    expert_routing: ModelHistogram,
    embedded: Family<ModelLabels, Counter>,
    ended: Family<EndLabels, Counter>,
    totals: Arc<RequestTotals>,
    /// When the server started, in seconds since 1970.
    pub(crate) started: i64,
}

/// What is measured of one request.
pub(crate) struct RequestMetrics {
    first_token: Histogram,
    inter_token: Histogram,
    request: Histogram,
    ended: Family<EndLabels, Counter>,
    /// Of the request.
    id: String,
    model: String,
    /// The request's.
    span: Span,
    started: Instant,
    /// The latest token of each answer.
    latest: Vec<Option<Instant>>,
    totals: Arc<RequestTotals>,
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
            histogram(
                "bodkin_expert_layer_seconds",
                "The experts of one layer in one step, in sampled steps",
                || Histogram::new(LAYER_BUCKETS),
            ),
            histogram(
                "bodkin_expert_routing_seconds",
                "The choice of experts of one layer in one step, in sampled steps",
                || Histogram::new(LAYER_BUCKETS),
            ),
        );
        let embedded = Family::default();
        registry.register("bodkin_embedded_tokens", "Tokens of embedded texts", embedded.clone());
        let ended = Family::default();
        let help = "Answers that have ended, by reason";
        registry.register("bodkin_requests_ended", help, ended.clone());
        let totals = Arc::new(RequestTotals::default());
        let collector = EngineCollector { pool: Arc::clone(pool), totals: Arc::clone(&totals) };
        registry.register_collector(Box::new(collector));
        let (first_token, inter_token, request, expert_layer, expert_routing) = metrics;
        Metrics {
            registry,
            requests,
            first_token,
            inter_token,
            request,
            expert_layer,
            expert_routing,
            embedded,
            ended,
            totals,
            started: jiff::Timestamp::now().as_second(),
        }
    }

    /// Notes a response.
    pub(crate) fn response(&self, path: &str, status: u16) {
        let labels = RequestLabels { path: path.to_owned(), status };
        self.requests.get_or_create(&labels).inc();
    }

    /// Begins to measure a request for a model.
    pub(crate) fn begin(&self, model: &str) -> RequestMetrics {
        let labels = ModelLabels { model: model.to_owned() };
        let span = Span::current();
        span.record("gen_ai.request.model", model);
        RequestMetrics {
            ended: self.ended.clone(),
            id: request_id::current(),
            model: model.to_owned(),
            span,
            first_token: self.first_token.get_or_create(&labels).clone(),
            inter_token: self.inter_token.get_or_create(&labels).clone(),
            request: self.request.get_or_create(&labels).clone(),
            started: Instant::now(),
            latest: Vec::new(),
            totals: Arc::clone(&self.totals),
        }
    }

    /// Notes the tokens of texts that were embedded.
    pub(crate) fn embedded(&self, model: &str, tokens: usize) {
        let labels = ModelLabels { model: model.to_owned() };
        self.embedded.get_or_create(&labels).inc_by(tokens as u64);
    }

    /// Notes the times of steps that were sampled since the last call.
    pub(crate) fn sampled_experts(&self, pool: &ModelPool) {
        for entry in pool.entries() {
            let Some(loaded) = entry.loaded() else { continue };
            let labels = ModelLabels { model: entry.spec.id.clone() };
            for layer in loaded.experts.take_times() {
                self.expert_layer.get_or_create(&labels).observe(layer.experts);
                self.expert_routing.get_or_create(&labels).observe(layer.routing);
            }
        }
    }

    /// All metrics in the OpenMetrics format.
    pub(crate) fn open_metrics(&self) -> String {
        let mut text = String::new();
        // Writing to a string does not fail.
        let _ = prometheus_client::encoding::text::encode(&mut text, &self.registry);
        text
    }

    /// All metrics in Prometheus's older text format, in which a counter has its whole name in
    /// every line.
    pub(crate) fn text(&self) -> String {
        let open = self.open_metrics();
        let mut text = String::with_capacity(open.len());
        let mut help = "";
        for line in open.lines() {
            // The kind decides the name, and comes after the help.
            if line.starts_with("# HELP ") {
                help = line;
                continue;
            }
            let Some(rest) = line.strip_prefix("# TYPE ") else {
                let is_comment = line.starts_with('#');
                text.extend((!is_comment).then_some([line, "\n"]).into_iter().flatten());
                continue;
            };
            let (name, kind) = rest.split_once(' ').unwrap_or((rest, "untyped"));
            let end = if kind == "counter" { "_total" } else { "" };
            let help = help.get("# HELP ".len() + name.len()..).unwrap_or_default();
            text.push_str(&format!("# HELP {name}{end}{help}\n# TYPE {name}{end} {kind}\n"));
        }
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
            None => {
                let seconds = (now - self.started).as_secs_f64();
                self.first_token.observe(seconds);
                if index == 0 {
                    self.span.record("gen_ai.response.time_to_first_token", seconds);
                }
            }
        }
    }

    /// Notes the end of an answer.
    pub(crate) fn done(&mut self, finish: &FinishReason, usage: &Usage, timings: &Timings) {
        self.request.observe(self.started.elapsed().as_secs_f64());
        let us = |ms: f64| (ms * 1e3) as u64;
        self.totals.prompt_us.fetch_add(us(timings.prompt_ms - timings.queue_ms), Relaxed);
        self.totals.generate_us.fetch_add(us(timings.generate_ms), Relaxed);
        let tokens = usage.prompt_tokens + usage.generated_tokens;
        self.totals.longest.fetch_max(tokens as u64, Relaxed);
        let reason = match finish {
            FinishReason::End | FinishReason::Stop(_) => "stop",
            FinishReason::Length => "length",
            FinishReason::Context => "context",
            FinishReason::Cancelled => "cancelled",
        };
        self.count(reason);
        let (prompt_tokens, tokens) = (usage.prompt_tokens, usage.generated_tokens);
        let RequestMetrics { id, model, .. } = &*self;
        tracing::info!(id, model, prompt_tokens, tokens, reason, ms = self.ms(), "answer");
    }

    fn count(&self, reason: &'static str) {
        self.ended.get_or_create(&EndLabels { model: self.model.clone(), reason }).inc();
    }

    /// Milliseconds since the request began.
    fn ms(&self) -> f64 {
        self.started.elapsed().as_micros() as f64 / 1e3
    }

    /// Notes that all answers have ended, with the tokens of all.
    pub(crate) fn all_done(&self, usage: &Usage) {
        // OpenTelemetry has no unsigned integers; they would become texts.
        self.span.record("gen_ai.usage.input_tokens", usage.prompt_tokens as i64);
        self.span.record("gen_ai.usage.output_tokens", usage.generated_tokens as i64);
    }

    /// Notes that an answer has failed behind some tokens.
    pub(crate) fn failed(&self, tokens: usize, error: &ApiError) {
        self.span.record("otel.status_code", "ERROR");
        self.count("error");
        let RequestMetrics { id, model, .. } = self;
        let error = error.message.as_str();
        tracing::warn!(id, model, tokens, reason = "error", error, ms = self.ms(), "answer");
    }

    /// Notes that the client of an answer has gone behind some tokens.
    pub(crate) fn cancelled(&self, tokens: usize) {
        self.count("cancelled");
        let RequestMetrics { id, model, .. } = self;
        tracing::info!(id, model, tokens, reason = "cancelled", ms = self.ms(), "answer");
    }
}
