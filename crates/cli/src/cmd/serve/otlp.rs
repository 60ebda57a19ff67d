//! Traces of requests to an OpenTelemetry collector, as OTLP over HTTP. Headers for the collector
//! come from `OTEL_EXPORTER_OTLP_HEADERS`.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use async_trait::async_trait;
use opentelemetry::KeyValue;
use opentelemetry::propagation::TextMapPropagator;
use opentelemetry::trace::TracerProvider;
use opentelemetry_http::{Bytes, HeaderExtractor, HttpClient, HttpError, Request, Response};
use opentelemetry_otlp::{SpanExporter, WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::SdkTracerProvider;
use tracing::Span;
use tracing_opentelemetry::OpenTelemetrySpanExt;
use tracing_subscriber::{Layer, Registry};
use ureq::Agent;
use ureq::http::{HeaderMap, Uri};

/// How long the collector may take to answer.
const TIMEOUT: Duration = Duration::from_secs(10);
/// The longest answer of a collector, in bytes.
const ANSWER_MAX: u64 = 1 << 20;
/// Where a collector takes traces.
const TRACES: &str = "/v1/traces";

/// Sends spans in batches, from a thread of its own. Dropping it sends those that are left.
pub(super) struct Exporter(SdkTracerProvider);

impl Exporter {
    /// For a collector at `url`, with or without the path of traces.
    pub(super) fn new(url: &str) -> Result<Exporter> {
        let uri: Option<Uri> = url.parse().ok();
        let is_http = uri.is_some_and(|uri| {
            matches!(uri.scheme_str(), Some("http" | "https")) && uri.host().is_some()
        });
        ensure!(is_http, "--otlp: expected a URL such as http://localhost:4318, found `{url}`");
        let base = url.trim_end_matches('/');
        let base = base.strip_suffix(TRACES).unwrap_or(base);
        let exporter = SpanExporter::builder()
            .with_http()
            .with_http_client(Client::new(url))
            .with_endpoint(format!("{base}{TRACES}"))
            .build()
            .with_context(|| format!("cannot export traces to {url}"))?;
        let version = KeyValue::new("service.version", env!("CARGO_PKG_VERSION"));
        let resource = Resource::builder().with_service_name("bodkin").with_attribute(version);
        let provider = SdkTracerProvider::builder()
            .with_batch_exporter(exporter)
            .with_resource(resource.build())
            .build();
        Ok(Exporter(provider))
    }

    /// What turns spans of the server into spans of traces.
    pub(super) fn layer(&self) -> Box<dyn Layer<Registry> + Send + Sync> {
        let layer = tracing_opentelemetry::layer().with_tracer(self.0.tracer("bodkin"));
        layer.with_location(false).with_threads(false).with_tracked_inactivity(false).boxed()
    }
}

impl Drop for Exporter {
    fn drop(&mut self) {
        // The client has said what went wrong.
        let _ = self.0.shutdown();
    }
}

/// Makes a span part of the trace that the headers of a request name (W3C Trace Context).
pub(super) fn link(span: &Span, headers: &HeaderMap) {
    let context = TraceContextPropagator::new().extract(&HeaderExtractor(headers));
    // A span that is not recorded has no parent.
    let _ = span.set_parent(context);
}

/// Sends batches over HTTP, and says once that it cannot.
#[derive(Debug)]
struct Client {
    agent: Agent,
    url: String,
    has_failed: AtomicBool,
}

impl Client {
    fn new(url: &str) -> Client {
        let config = Agent::config_builder().timeout_global(Some(TIMEOUT));
        let agent = config.http_status_as_error(false).build().into();
        Client { agent, url: url.to_owned(), has_failed: AtomicBool::new(false) }
    }

    fn send(&self, request: Request<Bytes>) -> Result<Response<Bytes>, ureq::Error> {
        let (head, mut body) = self.agent.run(request.map(|body| body.to_vec()))?.into_parts();
        let body = body.with_config().limit(ANSWER_MAX).read_to_vec()?;
        Ok(Response::from_parts(head, body.into()))
    }
}

#[async_trait]
impl HttpClient for Client {
    async fn send_bytes(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let result = self.send(request);
        let failure = match &result {
            Ok(response) if response.status().is_success() => None,
            Ok(response) => Some(response.status().to_string()),
            Err(error) => Some(error.to_string()),
        };
        let had_failed = self.has_failed.swap(failure.is_some(), Relaxed);
        if let Some(failure) = failure.filter(|_| !had_failed) {
            eprintln!("cannot export traces to {}: {failure}", self.url);
        }
        Ok(result?)
    }
}
