//! What all handlers share, and the middleware around them: keys, request ids, logs and metrics.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Instant;

use axum::extract::{FromRef, MatchedPath, Request, State};
use axum::http::{HeaderName, HeaderValue};
use axum::middleware::Next;
use axum::response::Response;
use tokio::sync::watch;
use tracing::field::Empty;
use tracing::{Instrument, info_span};

use crate::auth::{ApiKeys, Caller, TokenCounter};
use crate::bodies::Bodies;
use crate::error::Result;
use crate::generate::{Generation, Running};
use crate::metrics::Metrics;
use crate::models::{Lease, ModelPool};
use crate::options::ServerOptions;
use crate::request_id;

/// The state of a server.
pub(crate) struct App {
    pub(crate) pool: Arc<ModelPool>,
    pub(crate) keys: Arc<ApiKeys>,
    pub(crate) metrics: Metrics,
    pub(crate) options: ServerOptions,
    pub(crate) bodies: Bodies,
    requests: AtomicU64,
    /// Whether running requests are cancelled.
    cancelled: watch::Sender<bool>,
}

pub(crate) type SharedApp = Arc<App>;

static REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// The name that Anthropic's clients read it by.
static ANTHROPIC_REQUEST_ID: HeaderName = HeaderName::from_static("request-id");

impl FromRef<SharedApp> for Bodies {
    fn from_ref(app: &SharedApp) -> Bodies {
        app.bodies.clone()
    }
}

impl App {
    pub(crate) fn new(options: ServerOptions, pool: ModelPool, keys: ApiKeys) -> App {
        let pool = Arc::new(pool);
        let metrics = Metrics::new(&pool);
        let bodies = Bodies::new(&options);
        App {
            pool,
            keys: Arc::new(keys),
            metrics,
            options,
            bodies,
            requests: AtomicU64::new(0),
            cancelled: watch::Sender::new(false),
        }
    }

    /// The model that a request names, loaded.
    pub(crate) async fn model(&self, name: Option<&str>) -> Result<Lease> {
        let started = Instant::now();
        let mut lease = self.pool.get(name).await?;
        lease.waited = started.elapsed();
        Ok(lease)
    }

    /// Starts to generate.
    pub(crate) async fn generate(
        self: &Arc<App>,
        lease: Lease,
        caller: Caller,
        generation: Generation,
    ) -> Result<Running> {
        let metrics = self.metrics.begin(lease.id());
        generation
            .start(lease, metrics, self.token_counter(caller), self.cancelled.subscribe())
            .await
    }

    /// Ends all requests that generate, with an error.
    pub(crate) fn cancel(&self) {
        self.cancelled.send_replace(true);
    }

    /// Counts the tokens of a request against the limits of its key.
    pub(crate) fn token_counter(&self, caller: Caller) -> TokenCounter {
        TokenCounter::new(&self.keys, caller)
    }
}

/// Refuses requests without a valid key.
pub(crate) async fn authorize(
    State(app): State<SharedApp>,
    mut request: Request,
    next: Next,
) -> Result<Response> {
    let caller = app.keys.admit(request.headers())?;
    request.extensions_mut().insert(caller);
    Ok(next.run(request).await)
}

/// Gives a request an id and a span, logs it, and counts its response. The span has the names of
/// OpenTelemetry's conventions; a text that is generated keeps it open.
pub(crate) async fn observe(
    State(app): State<SharedApp>,
    mut request: Request,
    next: Next,
) -> Response {
    let number = app.requests.fetch_add(1, Relaxed);
    let given = request.headers().get(&REQUEST_ID).filter(|id| id.len() <= 128).cloned();
    let id = given.unwrap_or_else(|| {
        let id = format!("{:016x}-{number}", fastrand::u64(..));
        HeaderValue::from_str(&id).expect("hexadecimal digits are a header's value")
    });
    request.headers_mut().insert(&REQUEST_ID, id.clone());
    let method = request.method().clone();
    let path = request.extensions().get::<MatchedPath>().map(|path| path.as_str().to_owned());
    // Paths that no route has are not labels: anybody can make up any number of them.
    let path = path.unwrap_or_else(|| "unknown".to_owned());
    let shown = id.to_str().unwrap_or_default();
    let span = info_span!(
        "request",
        otel.name = format!("{method} {path}"),
        otel.kind = "server",
        otel.status_code = Empty,
        http.request.id = shown,
        http.request.method = %method,
        http.route = path,
        http.response.status_code = Empty,
        gen_ai.request.model = Empty,
        gen_ai.usage.input_tokens = Empty,
        gen_ai.usage.output_tokens = Empty,
        gen_ai.response.time_to_first_token = Empty,
    );
    if let Some(link) = app.options.link_trace {
        link(&span, request.headers());
    }
    let started = Instant::now();
    let is_anthropic = request.uri().path().starts_with("/v1/messages");
    let answer = request_id::within(shown.to_owned(), next.run(request));
    let mut response = answer.instrument(span.clone()).await;
    let status = response.status().as_u16();
    span.record("http.response.status_code", i64::from(status));
    if response.status().is_server_error() {
        span.record("otel.status_code", "ERROR");
    }
    app.metrics.response(&path, status);
    // Until the head of the response: an answer that is streamed comes after it.
    let ms = started.elapsed().as_micros() as f64 / 1e3;
    tracing::info!(id = shown, %method, path, status, ms, "request");
    if is_anthropic {
        response.headers_mut().insert(&ANTHROPIC_REQUEST_ID, id.clone());
    }
    response.headers_mut().insert(&REQUEST_ID, id);
    response
}
