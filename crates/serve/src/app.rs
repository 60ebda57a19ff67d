//! What all handlers share, and the middleware around them: keys, request ids, logs and metrics.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Instant;

use axum::extract::{FromRef, MatchedPath, Request, State};
use axum::http::{HeaderName, HeaderValue};
use axum::middleware::Next;
use axum::response::Response;

use crate::auth::{ApiKeys, Caller};
use crate::bodies::Bodies;
use crate::error::Result;
use crate::generate::{Generation, Running, TokenCounter};
use crate::metrics::Metrics;
use crate::models::{Lease, ModelPool};
use crate::options::ServerOptions;

/// The state of a server.
pub(crate) struct App {
    pub(crate) pool: Arc<ModelPool>,
    pub(crate) keys: ApiKeys,
    pub(crate) metrics: Metrics,
    pub(crate) options: ServerOptions,
    bodies: Bodies,
    requests: AtomicU64,
}

pub(crate) type SharedApp = Arc<App>;

static REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

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
        App { pool, keys, metrics, options, bodies, requests: AtomicU64::new(0) }
    }

    /// The model that a request names, loaded.
    pub(crate) async fn model(&self, name: Option<&str>) -> Result<Lease> {
        self.pool.get(name).await
    }

    /// Starts to generate.
    pub(crate) async fn generate(
        self: &Arc<App>,
        lease: Lease,
        caller: Caller,
        generation: Generation,
    ) -> Result<Running> {
        let metrics = self.metrics.begin(lease.id());
        generation.start(lease, metrics, self.token_counter(caller)).await
    }

    /// Counts the tokens of a request against the limits of its key.
    pub(crate) fn token_counter(self: &Arc<App>, caller: Caller) -> TokenCounter {
        let app = Arc::clone(self);
        Box::new(move |tokens| app.keys.count_tokens(caller, tokens))
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

/// Gives a request an id, logs it, and counts its response.
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
    let started = Instant::now();
    let mut response = next.run(request).await;
    let status = response.status().as_u16();
    app.metrics.response(&path, status);
    let ms = started.elapsed().as_secs_f64() * 1e3;
    let shown = id.to_str().unwrap_or_default();
    tracing::info!(id = shown, %method, path, status, ms, "request");
    response.headers_mut().insert(&REQUEST_ID, id);
    response
}
