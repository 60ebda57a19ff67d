//! What llama-server's clients ask about a server: its properties and its slots. No model is loaded
//! for them, nor kept loaded.

use axum::extract::State;
use axum::http::Uri;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use super::settings;
use crate::app::SharedApp;
use crate::error::{ApiError, Result};
use crate::fields::Json;
use crate::openai::FINGERPRINT;

/// What the server runs.
pub(crate) async fn props(State(app): State<SharedApp>, uri: Uri) -> Result<Response> {
    let entry = app.pool.entry(parameter(&uri, "model").as_deref())?;
    let known = entry.known()?;
    let (details, sampling) = (&known.details, settings(&known.defaults.request));
    Ok(Json(json!({
        "default_generation_settings": { "n_ctx": details.context, "params": sampling },
        "total_slots": app.options.load.parallel,
        "model_alias": entry.spec.id,
        "model_path": details.path,
        "chat_template": details.template,
        "bos_token": details.bos_token,
        "eos_token": details.eos_token,
        "build_info": FINGERPRINT,
        "endpoint_slots": true,
        "endpoint_props": false,
        "endpoint_metrics": true,
        "is_sleeping": entry.loaded().is_none(),
        "modalities": { "vision": false, "audio": false },
    }))
    .into_response())
}

/// The places for requests: this server has no fixed ones, so running requests fill the first.
pub(crate) async fn slots(State(app): State<SharedApp>, uri: Uri) -> Result<Response> {
    let entry = app.pool.entry(parameter(&uri, "model").as_deref())?;
    let known = entry.known()?;
    let running = entry.loaded().map_or(0, |loaded| loaded.stats().running);
    let parallel = app.options.load.parallel;
    let must_have_one = parameter(&uri, "fail_on_no_slot").is_some_and(|value| value != "0");
    if must_have_one && running >= parallel {
        return Err(ApiError::unavailable(format!("no slot is free: all {parallel} are in use")));
    }
    let slots = (0..parallel).map(|id| {
        json!({
            "id": id,
            "n_ctx": known.details.context,
            "speculative": false,
            "is_processing": id < running,
        })
    });
    Ok(Json(slots.collect::<Value>()).into_response())
}

/// A parameter of the query.
fn parameter(uri: &Uri, name: &str) -> Option<String> {
    let mut pairs = form_urlencoded::parse(uri.query()?.as_bytes());
    pairs.find_map(|(key, value)| (key == name).then(|| value.into_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_decoded() {
        let uri: Uri = "/props?a=1&model=qwen3%3A8b+x&bad=%zz%2".parse().unwrap();
        let of = |name| parameter(&uri, name);
        assert_eq!(of("model").as_deref(), Some("qwen3:8b x"));
        assert_eq!(of("bad").as_deref(), Some("%zz%2"));
        assert_eq!(of("b"), None);
    }
}
