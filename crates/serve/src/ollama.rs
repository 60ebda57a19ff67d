//! Ollama's interface. Models are those that the server was started with: none is fetched or
//! deleted for a client.

mod lines;
pub(crate) mod models;

use std::sync::Arc;
use std::time::Duration;

use axum::Extension;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use serde_json::{Map, Value, json};

use crate::app::SharedApp;
use crate::auth::Caller;
use crate::constraint;
use crate::error::{ApiError, Result};
use crate::fields::{Fields, Json, form};
use crate::generate::Generation;
use crate::models::Lease;
use crate::openai::TOP_LOGPROBS;
use crate::openai::chat::{add_effort, chat as conversation};
use crate::prompt::{Chat, Prompt};
use crate::reasoning::Delta;
use crate::stream;
use crate::timings::Reports;
use crate::tools;
use lines::{LineStream, Shape, logprobs};

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
    if is_raw && system.is_some() {
        let message = "system: expected none where raw is true, as no template is used";
        return Err(ApiError::field("system", message));
    }
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
    let tools = tools::ollama(&mut fields)?.map(Arc::new);
    let variables = thinking(&mut fields)?;
    let messages = fields.take("messages").unwrap_or_else(|| json!([]));
    if messages.as_array().is_some_and(Vec::is_empty) {
        return named.answer_without_prompt(&app, Shape::Chat).await;
    }
    let no_images = [Value::Null, json!([])];
    let has_images = |message: &Value| !no_images.contains(&message["images"]);
    if let Some(i) = messages.as_array().and_then(|all| all.iter().position(has_images)) {
        return Err(ApiError::image(&format!("messages[{i}].images")));
    }
    fields.put("messages", messages);
    let mut chat = Chat { tools, ..conversation(&mut fields)? };
    chat.variables.extend(variables);
    let lease = named.load(&app).await?;
    answer(&app, caller, lease, fields, Prompt::Chat(chat), Shape::Chat).await
}

/// The template's variables about reasoning.
fn thinking(fields: &mut Fields) -> Result<Map<String, Value>> {
    let mut variables = Map::new();
    match fields.take("think") {
        None => {}
        Some(Value::Bool(thinks)) => {
            drop(variables.insert("enable_thinking".into(), thinks.into()))
        }
        Some(Value::String(level)) => {
            let thinks = level != "none";
            variables.insert("enable_thinking".into(), thinks.into());
            add_effort(Some(level), &mut variables);
        }
        Some(other) => return Err(fields.mismatch("think", "true, false or a level", &other)),
    }
    Ok(variables)
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
    let constraint = constraint::ollama(&mut fields)?;
    let streams = fields.boolean("stream")?.unwrap_or(true);
    let has_logprobs = fields.boolean("logprobs")?.unwrap_or(false);
    let top = fields.integer("top_logprobs", 0..=TOP_LOGPROBS)?.unwrap_or(0);
    let mut options = fields.object("options")?;
    check_runner_options(&mut options)?;
    let mut request = lease.request(&mut options)?;
    request.constraint = constraint;
    let limit = lease.defaults.max_tokens(&mut options, &["num_predict"], 0, None)?;
    request.max_tokens = limit.filter(|&n| n > 0);
    request.logprobs = has_logprobs.then_some(top as usize);
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
    Ok(form(running.count_logprobs(std::slice::from_ref(&answer)), || {
        let ended = (&answer.finish, &answer.usage, &answer.timings);
        let mut body = format.last(&running, &answer.text, ended);
        if let Some(logprobs) = logprobs(&running.lease, &answer.tokens) {
            body["logprobs"] = logprobs;
        }
        Json(body).into_response()
    }))
}

/// Checks the options about how Ollama would load a model. Those of this server are its own, so the
/// values change nothing, but wrong ones are a client's mistake.
fn check_runner_options(options: &mut Fields) -> Result<()> {
    const LARGE: i64 = i32::MAX as i64;
    for (name, least) in [
        ("num_ctx", 1),
        ("num_batch", 1),
        ("num_keep", -1),
        ("num_gpu", -1),
        ("main_gpu", 0),
        ("num_thread", 0),
        ("draft_num_predict", -1),
    ] {
        options.integer(name, least..=LARGE)?;
    }
    for name in ["use_mmap", "use_mlock", "low_vram", "numa", "penalize_newline"] {
        options.boolean(name)?;
    }
    Ok(())
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
