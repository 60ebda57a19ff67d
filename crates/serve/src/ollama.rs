//! Ollama's interface: lines of JSON with durations in nanoseconds. Models are those that the
//! server was started with: none is fetched or deleted for a client.

use std::time::Duration;

use axum::Extension;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use bodkin::{Finish, Timings, Usage};
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};

use crate::app::SharedApp;
use crate::auth::Caller;
use crate::error::{ApiError, Result};
use crate::fields::{Fields, Json};
use crate::generate::{Chat, ChoiceEvent, EventKind, Generation, Prompt, Running};
use crate::models::{Details, Entry, Lease};
use crate::openai::chat::chat as conversation;
use crate::openai::finish_reason;
use crate::reasoning::Delta;
use crate::stream::{self, StreamFormat, json as write_json};
use crate::timings::Reports;

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

/// What a list says of a model.
fn summary(entry: &Entry) -> Value {
    let loaded = entry.loaded();
    let modified = jiff::Timestamp::from_second(entry.created).unwrap_or_default();
    json!({
        "name": entry.spec.id,
        "model": entry.spec.id,
        "modified_at": modified.to_string(),
        "size": loaded.as_ref().map_or(0, |loaded| loaded.details.weight_bytes),
        "digest": digest(entry),
        "details": details(loaded.as_ref().map(|loaded| &loaded.details)),
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

/// One model in full.
pub(crate) async fn show(State(app): State<SharedApp>, mut fields: Fields) -> Result<Response> {
    let lease = model(&app, &mut fields).await?;
    let text = lease.text();
    let template = text.ok().and_then(|model| model.template().ok());
    let architecture = &lease.details.architecture;
    let info = Map::from_iter([
        ("general.architecture".to_owned(), json!(architecture)),
        ("general.parameter_count".to_owned(), json!(lease.details.parameters)),
        (format!("{architecture}.context_length"), json!(lease.details.trained_context)),
    ]);
    Ok(Json(json!({
        "license": lease.details.licence.as_deref().unwrap_or_default(),
        "modelfile": "",
        "parameters": "",
        "template": template.map_or("", |template| template.source()),
        "details": details(Some(&lease.details)),
        "model_info": info,
        "capabilities": [if lease.text().is_ok() { "completion" } else { "embedding" }],
    }))
    .into_response())
}

/// The model that a request names, with its `keep_alive`.
pub(crate) async fn model(app: &SharedApp, fields: &mut Fields) -> Result<Lease> {
    Named::of(fields)?.load(app).await
}

/// What a request says of its model.
#[expect(clippy::option_option, reason = "absent, for ever, and a time are three cases")]
struct Named {
    name: Option<String>,
    /// How long it is to stay loaded: absent, for ever, or a time.
    keep_alive: Option<Option<Duration>>,
}

impl Named {
    fn of(fields: &mut Fields) -> Result<Named> {
        let name = fields.string("model")?;
        let name = if name.is_some() { name } else { fields.string("name")? };
        Ok(Named { name, keep_alive: keep_alive(fields)? })
    }

    async fn load(&self, app: &SharedApp) -> Result<Lease> {
        let mut lease = app.model(self.name.as_deref()).await?;
        if let Some(keep_alive) = self.keep_alive {
            lease.set_keep_alive(keep_alive);
        }
        Ok(lease)
    }

    /// Answers a request without a prompt, which only loads the model, or unloads it if it is to
    /// stay for no time.
    async fn answer_without_prompt(&self, app: &SharedApp, shape: Shape) -> Result<Response> {
        let (id, reason) = if self.keep_alive == Some(Some(Duration::ZERO)) {
            let entry = app.pool.entry(self.name.as_deref())?;
            app.pool.unload(entry).await;
            (entry.spec.id.clone(), "unload")
        } else {
            (self.load(app).await?.id().to_owned(), "load")
        };
        let mut body = shape.line(&id, &Delta::default());
        body["done"] = true.into();
        body["done_reason"] = reason.into();
        Ok(Json(body).into_response())
    }
}

/// How long a model is to stay loaded: a number of seconds or a text such as `5m`; below zero for
/// ever.
#[expect(clippy::option_option, reason = "absent, for ever, and a time are three cases")]
fn keep_alive(fields: &mut Fields) -> Result<Option<Option<Duration>>> {
    let Some(value) = fields.take("keep_alive") else { return Ok(None) };
    let seconds = match &value {
        Value::Number(number) => number.as_f64(),
        Value::String(text) => seconds(text),
        _ => None,
    };
    let wrong = || fields.mismatch("keep_alive", "seconds or a time such as 5m", &value);
    match seconds.filter(|seconds| seconds.abs() < 1e9).ok_or_else(wrong)? {
        seconds if seconds < 0.0 => Ok(Some(None)),
        seconds => Ok(Some(Some(Duration::from_secs_f64(seconds)))),
    }
}

/// The seconds of a text such as `1h30m` or `-1`.
fn seconds(text: &str) -> Option<f64> {
    let (sign, mut rest) = match text.strip_prefix('-') {
        Some(rest) => (-1.0, rest),
        None => (1.0, text),
    };
    if let Ok(seconds) = rest.parse::<f64>() {
        return Some(sign * seconds);
    }
    let mut sum = 0.0;
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit() && c != '.')?;
        let number: f64 = rest[..digits].parse().ok()?;
        rest = &rest[digits..];
        let letters = rest.find(|c: char| !c.is_alphabetic()).unwrap_or(rest.len());
        sum += number
            * match &rest[..letters] {
                "ms" => 0.001,
                "s" => 1.0,
                "m" => 60.0,
                "h" => 3600.0,
                _ => return None,
            };
        rest = &rest[letters..];
    }
    Some(sign * sum)
}

/// Fetches a model that the server offers, if it has not been fetched: by loading it.
pub(crate) async fn pull(State(app): State<SharedApp>, mut fields: Fields) -> Result<Response> {
    let streams = fields.boolean("stream")?.unwrap_or(true);
    let name = fields.string("model")?.or(fields.string("name")?);
    if app.pool.entries().len() == 1
        && name.as_deref().is_some_and(|name| name != app.pool.entries()[0].spec.id)
    {
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

/// Continues a prompt, or answers it through the chat template.
pub(crate) async fn generate(
    State(app): State<SharedApp>,
    Extension(caller): Extension<Caller>,
    mut fields: Fields,
) -> Result<Response> {
    let named = Named::of(&mut fields)?;
    fields.refuse_images("images")?;
    ["suffix", "template", "context"].into_iter().try_for_each(|f| fields.refuse(f))?;
    let prompt = fields.string("prompt")?.unwrap_or_default();
    let system = fields.string("system")?;
    if prompt.is_empty() && system.is_none() {
        return named.answer_without_prompt(&app, Shape::Generate).await;
    }
    let is_raw = fields.boolean("raw")?.unwrap_or(false);
    let prompt = match is_raw {
        true => Prompt::Text(prompt),
        false => {
            let message = |role: &str, text: String| json!({ "role": role, "content": text });
            let system = system.map(|text| message("system", text));
            let messages = system.into_iter().chain([message("user", prompt)]).collect();
            Prompt::Chat(Chat { messages, variables: thinking(&mut fields)?, ..Chat::default() })
        }
    };
    let lease = named.load(&app).await?;
    answer(&app, caller, lease, fields, prompt, Shape::Generate).await
}

/// Answers a conversation.
pub(crate) async fn chat(
    State(app): State<SharedApp>,
    Extension(caller): Extension<Caller>,
    mut fields: Fields,
) -> Result<Response> {
    let named = Named::of(&mut fields)?;
    fields.refuse("tools")?;
    let variables = thinking(&mut fields)?;
    let messages = fields.take("messages").unwrap_or_else(|| json!([]));
    if messages.as_array().is_some_and(Vec::is_empty) {
        return named.answer_without_prompt(&app, Shape::Chat).await;
    }
    let has_images = |message: &Value| message["images"].as_array().is_some_and(|i| !i.is_empty());
    if let Some(i) = messages.as_array().and_then(|all| all.iter().position(has_images)) {
        return Err(ApiError::image(&format!("messages[{i}].images")));
    }
    fields.put("messages", messages);
    let mut chat = conversation(&mut fields)?;
    chat.variables = variables;
    let lease = named.load(&app).await?;
    answer(&app, caller, lease, fields, Prompt::Chat(chat), Shape::Chat).await
}

/// The template's variable about reasoning.
fn thinking(fields: &mut Fields) -> Result<Map<String, Value>> {
    let thinks = match fields.take("think") {
        None => return Ok(Map::new()),
        Some(Value::Bool(thinks)) => thinks,
        // How hard to think.
        Some(Value::String(_)) => true,
        Some(other) => return Err(fields.mismatch("think", "true, false or a level", &other)),
    };
    Ok(Map::from_iter([("enable_thinking".to_owned(), thinks.into())]))
}

/// Runs a request.
async fn answer(
    app: &SharedApp,
    caller: Caller,
    lease: Lease,
    mut fields: Fields,
    prompt: Prompt,
    shape: Shape,
) -> Result<Response> {
    fields.refuse("format")?;
    let streams = fields.boolean("stream")?.unwrap_or(true);
    let mut options = fields.object("options")?;
    let mut request = lease.request(&mut options)?;
    let limit = lease.defaults.max_tokens(&mut options, &["num_predict"], 0, None)?;
    request.max_tokens = limit.filter(|&n| n > 0);
    let load = lease.waited;
    let (prompts, separates_reasoning, reports) = (vec![prompt], true, Reports::default());
    let generation = Generation { prompts, request, choices: 1, separates_reasoning, reports };
    let running = app.generate(lease, caller, generation).await?;
    let format = LineStream { shape, load };
    if streams {
        return Ok(stream::response(running, format));
    }
    let (running, mut answers) = running.collect().await?;
    let answer = answers.pop().ok_or_else(|| ApiError::internal("there is no answer"))?;
    let body =
        format.last(&running, &answer.text, (&answer.finish, &answer.usage, &answer.timings));
    Ok(Json(body).into_response())
}

const NDJSON: &str = "application/x-ndjson";

/// The two forms of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shape {
    Generate,
    Chat,
}

impl Shape {
    /// A line with a piece of the answer.
    fn line(self, model: &str, delta: &Delta) -> Value {
        let mut line = json!({
            "model": model,
            "created_at": jiff::Timestamp::now().to_string(),
            "done": false,
        });
        match self {
            Shape::Generate => {
                line["response"] = delta.content.as_str().into();
                if !delta.reasoning.is_empty() {
                    line["thinking"] = delta.reasoning.as_str().into();
                }
            }
            Shape::Chat => {
                line["message"] = json!({ "role": "assistant", "content": delta.content });
                if !delta.reasoning.is_empty() {
                    line["message"]["thinking"] = delta.reasoning.as_str().into();
                }
            }
        }
        line
    }
}

/// The lines of a streamed answer.
struct LineStream {
    shape: Shape,
    load: Duration,
}

impl LineStream {
    /// The whole answer, or the last line of a streamed one.
    fn last(
        &self,
        running: &Running,
        delta: &Delta,
        (finish, usage, timings): (&Finish, &Usage, &Timings),
    ) -> Value {
        let nanos = |ms: f64| (ms * 1e6) as u64;
        let load = self.load.as_nanos() as u64;
        let mut line = self.shape.line(running.lease.id(), delta);
        let statistics = [
            ("total_duration", load + nanos(timings.prompt_ms + timings.generate_ms)),
            ("load_duration", load),
            ("prompt_eval_count", usage.prompt_tokens as u64),
            ("prompt_eval_duration", nanos(timings.prompt_ms - timings.queue_ms)),
            ("eval_count", usage.generated_tokens as u64),
            ("eval_duration", nanos(timings.generate_ms)),
        ];
        line["done"] = true.into();
        line["done_reason"] = finish_reason(finish).into();
        for (name, value) in statistics {
            line[name] = value.into();
        }
        line
    }
}

impl StreamFormat for LineStream {
    const CONTENT_TYPE: &'static str = NDJSON;
    const PING: &'static [u8] = b"";

    fn begin(&mut self, _: &Running, _: &mut Vec<u8>) {}

    fn event(&mut self, running: &Running, event: ChoiceEvent, out: &mut Vec<u8>) {
        let ChoiceEvent { delta, kind, .. } = event;
        let line = match kind {
            EventKind::Prefill => return,
            EventKind::Token { .. } if delta == Delta::default() => return,
            EventKind::Token { .. } => self.shape.line(running.lease.id(), &delta),
            EventKind::Done { finish, usage, timings } => {
                self.last(running, &delta, (&finish, &usage, &timings))
            }
            EventKind::Failed(error) => error.ollama(),
        };
        write_json(&line, out);
        out.push(b'\n');
    }

    fn end(&mut self, _: &Running, _: &mut Vec<u8>) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_seconds_or_texts() {
        for (text, wanted) in [
            ("5m", Some(300.0)),
            ("1h30m", Some(5400.0)),
            ("-1", Some(-1.0)),
            ("-1m", Some(-60.0)),
            ("500ms", Some(0.5)),
            ("24", Some(24.0)),
            ("5 minutes", None),
            ("m", None),
            ("5", Some(5.0)),
        ] {
            assert_eq!(seconds(text), wanted, "{text}");
        }
    }
}
