//! What Ollama's clients ask and do about models.

use std::time::Duration;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use bodkin_engine::ToolFormat;
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};

use super::Named;
use super::lines::NDJSON;
use crate::app::SharedApp;
use crate::error::{ApiError, Result};
use crate::fields::{Fields, Json};
use crate::models::{Details, Entry};

/// The version of the server.
pub(crate) async fn version() -> Response {
    Json(json!({ "version": env!("CARGO_PKG_VERSION") })).into_response()
}

/// All models of the server.
pub(crate) async fn tags(State(app): State<SharedApp>) -> Response {
    let models: Value = app.pool.entries().iter().map(|entry| summary(entry)).collect();
    Json(json!({ "models": models })).into_response()
}

/// The models that are loaded.
pub(crate) async fn ps(State(app): State<SharedApp>) -> Response {
    let models = app.pool.entries().iter().filter_map(|entry| {
        let loaded = entry.loaded()?;
        let mut model = summary(entry);
        // Never is written as a time far in the future.
        let left = entry.expires_in().unwrap_or(Duration::from_secs(100 * 365 * 86_400));
        let expires = jiff::Timestamp::now().checked_add(left).unwrap_or(jiff::Timestamp::MAX);
        model["expires_at"] = expires.to_string().into();
        model["size"] = loaded.bytes.into();
        model["size_vram"] = if loaded.details.is_on_gpu { loaded.bytes } else { 0 }.into();
        model["context_length"] = loaded.details.context.into();
        Some(model)
    });
    Json(json!({ "models": models.collect::<Value>() })).into_response()
}

/// A hash of the model's name: clients cut it to tell models apart, and no file is hashed for a
/// list.
fn digest(entry: &Entry) -> String {
    Sha256::digest(entry.spec.id.as_bytes()).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// When the server began to offer a model: it changes none.
fn modified(entry: &Entry) -> String {
    jiff::Timestamp::from_second(entry.created).unwrap_or_default().to_string()
}

/// What a list says of a model.
fn summary(entry: &Entry) -> Value {
    let known = entry.known().ok();
    json!({
        "name": entry.spec.id,
        "model": entry.spec.id,
        "modified_at": modified(entry),
        "size": known.as_ref().map_or(0, |known| known.details.weight_bytes),
        "digest": digest(entry),
        "details": details(known.as_ref().map(|known| &*known.details)),
    })
}

fn details(details: Option<&Details>) -> Value {
    let Some(details) = details else { return json!({ "format": "gguf" }) };
    let parameters = match details.parameters as f64 {
        n if n >= 1e9 => format!("{:.1}B", n / 1e9),
        n => format!("{:.0}M", n / 1e6),
    };
    json!({
        "parent_model": "",
        "format": "gguf",
        "family": details.architecture,
        "families": [details.architecture],
        "parameter_size": parameters,
        "quantization_level": details.format,
    })
}

/// One model in full, loaded or not: it is not loaded for this.
pub(crate) async fn show(State(app): State<SharedApp>, mut fields: Fields) -> Result<Response> {
    let named = Named::of(&mut fields)?;
    let entry = app.pool.entry(named.name.as_deref())?;
    let known = entry.known()?;
    let facts = &known.details;
    let architecture = &facts.architecture;
    let info = Map::from_iter([
        ("general.architecture".to_owned(), json!(architecture)),
        ("general.parameter_count".to_owned(), json!(facts.parameters)),
        (format!("{architecture}.context_length"), json!(facts.trained_context)),
    ]);
    let mut capabilities = vec![if facts.makes_text { "completion" } else { "embedding" }];
    let source = &facts.template;
    if facts.makes_text && !source.is_empty() && ToolFormat::of_model(source).is_some() {
        capabilities.push("tools");
    }
    Ok(Json(json!({
        "license": facts.licence.as_deref().unwrap_or_default(),
        "modelfile": "",
        "parameters": "",
        "template": facts.template,
        "details": details(Some(facts)),
        "model_info": info,
        "capabilities": capabilities,
        "modified_at": modified(entry),
    }))
    .into_response())
}

/// Fetches a model that the server offers, if it has not been fetched: by loading it.
pub(crate) async fn pull(State(app): State<SharedApp>, mut fields: Fields) -> Result<Response> {
    let streams = fields.boolean("stream")?.unwrap_or(true);
    let name = fields.string("model")?.or(fields.string("name")?);
    let is_served = |name: &str| app.pool.entries().iter().any(|entry| entry.has_name(name));
    if app.pool.entries().len() == 1 && name.as_deref().is_some_and(|name| !is_served(name)) {
        return Err(ApiError::forbidden(
            "this server does not fetch models that it was not started with",
        ));
    }
    app.model(name.as_deref()).await?;
    let lines = match streams {
        true => "{\"status\":\"pulling manifest\"}\n{\"status\":\"success\"}\n",
        false => "{\"status\":\"success\"}",
    };
    Ok(([("content-type", NDJSON)], lines).into_response())
}

/// Models are not deleted for a client.
pub(crate) async fn delete() -> ApiError {
    ApiError::forbidden("this server does not delete models: use `bodkin rm`")
}
