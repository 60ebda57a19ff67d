//! `/v1/models`.

use axum::extract::{Path, State};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use crate::app::SharedApp;
use crate::error::Result;
use crate::fields::Json;
use crate::models::Entry;

/// All models of the server.
pub(crate) async fn list(State(app): State<SharedApp>) -> Response {
    let models: Value = app.pool.entries().iter().map(|entry| model(entry)).collect();
    Json(json!({ "object": "list", "data": models })).into_response()
}

/// One of them.
pub(crate) async fn show(State(app): State<SharedApp>, Path(id): Path<String>) -> Result<Response> {
    let entry = app.pool.entry(Some(&id))?;
    Ok(Json(model(entry)).into_response())
}

fn model(entry: &Entry) -> Value {
    let meta = entry.known().ok().map(|known| {
        json!({
            "architecture": known.details.architecture,
            "n_params": known.details.parameters,
            "n_ctx": known.details.context,
            "size": known.details.weight_bytes,
        })
    });
    json!({
        "id": entry.spec.id,
        "object": "model",
        "created": entry.created,
        "owned_by": "bodkin",
        "meta": meta,
    })
}
