//! Which handler answers which path. Each interface writes errors in its own form.

use axum::Router;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderName, StatusCode, header};
use axum::middleware::{Next, from_fn, from_fn_with_state, map_response};
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, post};
use serde_json::Value;

use crate::app::{SharedApp, authorize, observe};
use crate::error::{ApiError, write_error};
use crate::fields::Json;
use crate::{anthropic, embeddings, llama, ollama, openai, origins, rerank};

/// All routes.
pub(crate) fn router(app: SharedApp) -> Router {
    let origins = &app.options.cors_origins;
    let router = Router::new()
        .merge(interface(&app, openai_routes(), open_routes(), ApiError::openai))
        .merge(interface(&app, ollama_routes(), ollama_open_routes(), ApiError::ollama))
        .merge(interface(&app, anthropic_routes(), Router::new(), ApiError::anthropic))
        .fallback(not_found)
        .method_not_allowed_fallback(method_not_allowed)
        .layer(from_fn_with_state(app.clone(), origins::refuse_others))
        .layer(from_fn(write_other_errors))
        .layer(from_fn_with_state(app.clone(), observe));
    let router = if origins.is_empty() { router } else { router.layer(origins::cors(origins)) };
    router.with_state(app)
}

/// The routes of one interface: those for which a key is needed, and those for everybody.
fn interface(
    app: &SharedApp,
    routes: Router<SharedApp>,
    open: Router<SharedApp>,
    format: fn(&ApiError) -> Value,
) -> Router<SharedApp> {
    routes.route_layer(from_fn_with_state(app.clone(), authorize)).merge(open).route_layer(
        map_response(move |response: Response| async move { write_error(response, format) }),
    )
}

/// OpenAI's and llama-server's paths.
fn openai_routes() -> Router<SharedApp> {
    Router::new()
        .route("/v1/chat/completions", post(openai::chat::create))
        .route("/chat/completions", post(openai::chat::create))
        .route("/v1/completions", post(openai::completions::create))
        .route("/v1/chat/completions/input_tokens", post(openai::chat::input_tokens))
        .route("/chat/completions/input_tokens", post(openai::chat::input_tokens))
        .route("/v1/responses", post(openai::responses::create))
        .route("/responses", post(openai::responses::create))
        .route("/v1/responses/input_tokens", post(openai::responses::input_tokens))
        .route("/responses/input_tokens", post(openai::responses::input_tokens))
        .route("/v1/embeddings", post(embeddings::openai))
        .route("/embeddings", post(embeddings::llama))
        .route("/embedding", post(embeddings::llama))
        .route("/v1/rerank", post(rerank::create))
        .route("/rerank", post(rerank::create))
        .route("/v1/reranking", post(rerank::create))
        .route("/reranking", post(rerank::create))
        .route("/completion", post(llama::completion))
        .route("/completions", post(llama::completion))
        .route("/tokenize", post(llama::tokenize))
        .route("/detokenize", post(llama::detokenize))
        .route("/apply-template", post(llama::apply_template))
        .route("/props", get(llama::server::props))
        .route("/slots", get(llama::server::slots))
        .route("/metrics", get(metrics))
}

/// Paths that need no key.
fn open_routes() -> Router<SharedApp> {
    Router::new()
        .route("/health", get(health))
        .route("/v1/health", get(health))
        .route("/v1/models", get(openai::models::list))
        .route("/models", get(openai::models::list))
        .route("/v1/models/{*id}", get(openai::models::show))
        .route("/openapi.json", get(openapi))
}

fn ollama_routes() -> Router<SharedApp> {
    Router::new()
        .route("/api/show", post(ollama::models::show))
        .route("/api/ps", get(ollama::models::ps))
        .route("/api/generate", post(ollama::generate))
        .route("/api/chat", post(ollama::chat))
        .route("/api/pull", post(ollama::models::pull))
        .route("/api/delete", delete(ollama::models::delete))
        .route("/api/embed", post(embeddings::ollama))
        .route("/api/embeddings", post(embeddings::ollama_one))
}

fn ollama_open_routes() -> Router<SharedApp> {
    Router::new()
        .route("/", get(async || "bodkin is running"))
        .route("/api/version", get(ollama::models::version))
        .route("/api/tags", get(ollama::models::tags))
}

fn anthropic_routes() -> Router<SharedApp> {
    Router::new()
        .route("/v1/messages", post(anthropic::create))
        .route("/v1/messages/count_tokens", post(anthropic::count_tokens))
}

/// Writes the errors of paths and methods that no interface has, as the interface of the path does.
async fn write_other_errors(request: Request, next: Next) -> Response {
    let path = request.uri().path();
    let format = match path {
        _ if path.starts_with("/api/") => ApiError::ollama,
        _ if path.starts_with("/v1/messages") => ApiError::anthropic,
        _ => ApiError::openai,
    };
    write_error(next.run(request).await, format)
}

async fn not_found() -> ApiError {
    ApiError::not_found("there is no such path")
}

async fn method_not_allowed() -> ApiError {
    let status = StatusCode::METHOD_NOT_ALLOWED;
    ApiError { status, ..ApiError::bad_request("the path does not have this method") }
}

/// 200 if the models that are in use answer; 503 with the cause otherwise.
async fn health(State(app): State<SharedApp>) -> Response {
    let (is_healthy, mut body) = app.pool.health();
    if is_healthy {
        return Json(body).into_response();
    }
    let causes = body["models"].as_array().into_iter().flatten();
    let cause = causes.filter_map(|model| model["error"].as_str()).next();
    let error = ApiError::unavailable(cause.unwrap_or("Loading model"));
    body["error"] = error.openai()["error"].take();
    (error.status, Json(body)).into_response()
}

async fn metrics(State(app): State<SharedApp>, headers: HeaderMap) -> Response {
    app.pool.sample_experts().await;
    app.metrics.sampled_experts(&app.pool);
    let accepted = headers.get(header::ACCEPT).and_then(|accept| accept.to_str().ok());
    let is_open = accepted.is_some_and(|accept| accept.contains("application/openmetrics-text"));
    let (kind, text) = match is_open {
        true => {
            let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
            (kind, app.metrics.open_metrics())
        }
        false => ("text/plain; version=0.0.4; charset=utf-8", app.metrics.text()),
    };
    let headers = [
        (header::CONTENT_TYPE, kind.to_owned()),
        // As llama-server has it.
        (HeaderName::from_static("process-start-time-unix"), app.metrics.started.to_string()),
    ];
    (headers, text).into_response()
}

async fn openapi() -> Response {
    Json(crate::openapi::document()).into_response()
}
