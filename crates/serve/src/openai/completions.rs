//! `/v1/completions`.

use axum::Extension;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use bodkin::Usage;
use serde_json::{Value, json};

use super::{
    FINGERPRINT, LlamaTimings, choices, finish_reason, max_tokens, new_id, now, piece,
    refuse_missing, stream_options, usage,
};
use crate::app::SharedApp;
use crate::auth::Caller;
use crate::error::{ApiError, Result};
use crate::fields::{Fields, Json};
use crate::generate::{AnswerToken, ChoiceEvent, EventKind, Generation, Prompt, Running};
use crate::sampling;
use crate::stream::{self, StreamFormat, sse_data};

/// The most tokens of an answer if the request does not say.
const DEFAULT_MAX_TOKENS: usize = 16;

/// The most log-probabilities of one position.
const LOGPROBS: i64 = 20;

/// Continues a prompt.
pub(crate) async fn create(
    State(app): State<SharedApp>,
    Extension(caller): Extension<Caller>,
    mut fields: Fields,
) -> Result<Response> {
    let model = fields.string("model")?;
    refuse_missing(&mut fields)?;
    fields.refuse("suffix")?;
    let lease = app.model(model.as_deref()).await?;
    let prompt = fields.take("prompt").ok_or_else(|| {
        ApiError::field("prompt", "prompt: expected a string or an array of token ids, found none")
    })?;
    let prompt = prompt_of(prompt)?;
    let echo = match &prompt {
        Prompt::Text(text) if fields.boolean("echo")?.unwrap_or(false) => text.clone(),
        _ => String::new(),
    };
    let mut request = sampling::request(&mut fields, &lease)?;
    let tokens = max_tokens(&mut fields, &["max_tokens", "n_predict"])?;
    request.max_tokens = Some(tokens.unwrap_or(DEFAULT_MAX_TOKENS));
    request.logprobs = fields.integer("logprobs", 0..=LOGPROBS)?.map(|n| n as usize);
    let has_logprobs = request.logprobs.is_some();
    let choices = choices(&mut fields)?;
    let (streams, include_usage) = stream_options(&mut fields)?;
    let generation = Generation { prompt, request, choices, separates_reasoning: false };
    let running = app.generate(lease, caller, generation).await?;
    if streams {
        let format = CompletionStream::new(include_usage, echo);
        return Ok(stream::response(running, format));
    }
    let (running, answers) = running.collect().await?;
    let choices = answers.iter().enumerate().map(|(index, answer)| {
        let logprobs = has_logprobs.then(|| logprobs(&running, &answer.tokens));
        json!({
            "index": index,
            "text": format!("{echo}{}", answer.text.content),
            "logprobs": logprobs,
            "finish_reason": finish_reason(&answer.finish),
        })
    });
    let timings = answers.first().map(|a| LlamaTimings::new(&a.usage, &a.timings));
    let body = json!({
        "id": new_id("cmpl-"),
        "object": "text_completion",
        "created": now(),
        "model": running.lease.id(),
        "system_fingerprint": FINGERPRINT,
        "choices": choices.collect::<Value>(),
        "usage": usage(answers.iter().map(|answer| &answer.usage)),
        "timings": timings,
    });
    Ok(Json(body).into_response())
}

/// A prompt of a text, of token ids, or of a sequence of both.
pub(crate) fn prompt_of(value: Value) -> Result<Prompt> {
    let wrong = || {
        let expected = "a string, or an array of token ids and strings";
        ApiError::field("prompt", format!("prompt: expected {expected}"))
    };
    match value {
        Value::String(text) => Ok(Prompt::Text(text)),
        Value::Array(values) if values.len() == 1 => {
            // One prompt in a list of prompts.
            let first = values.into_iter().next().ok_or_else(wrong)?;
            match first {
                Value::Number(_) => prompt_of_parts(vec![first]),
                other => prompt_of(other),
            }
        }
        Value::Array(values) => prompt_of_parts(values),
        _ => Err(wrong()),
    }
}

fn prompt_of_parts(values: Vec<Value>) -> Result<Prompt> {
    let wrong =
        || ApiError::field("prompt", "prompt: expected one prompt of token ids and strings");
    let mut parts: Vec<Prompt> = Vec::new();
    let are_texts = values.iter().all(Value::is_string);
    if are_texts && !values.is_empty() {
        let message = "prompt: several prompts in one request are not supported";
        return Err(ApiError::field("prompt", message));
    }
    for value in values {
        match value {
            Value::String(text) => parts.push(Prompt::Text(text)),
            value => {
                let id = value.as_u64().and_then(|id| u32::try_from(id).ok()).ok_or_else(wrong)?;
                match parts.last_mut() {
                    Some(Prompt::Tokens(tokens)) => tokens.push(id),
                    _ => parts.push(Prompt::Tokens(vec![id])),
                }
            }
        }
    }
    Ok(match parts.len() {
        0 => Prompt::Tokens(Vec::new()),
        1 => parts.remove(0),
        _ => Prompt::Mixed(parts),
    })
}

/// Log-probabilities as this interface has them: one list for each kind of fact.
fn logprobs(running: &Running, tokens: &[AnswerToken]) -> Value {
    let (mut texts, mut logprobs, mut tops, mut offsets) = (vec![], vec![], vec![], vec![]);
    let mut offset = 0;
    for token in tokens {
        let Some(own) = token.logprobs.as_deref() else { continue };
        let (text, _) = piece(&running.lease, token.id);
        offsets.push(offset);
        offset += text.chars().count();
        texts.push(text);
        logprobs.push(own.sampled);
        let top = own.top.iter();
        let top = top.map(|&(id, logprob)| (piece(&running.lease, id).0, logprob.into()));
        tops.push(Value::Object(top.collect()));
    }
    json!({
        "tokens": texts,
        "token_logprobs": logprobs,
        "top_logprobs": tops,
        "text_offset": offsets,
    })
}

/// The chunks of a streamed answer.
struct CompletionStream {
    head: Value,
    include_usage: bool,
    /// The prompt, if it is repeated.
    echo: String,
    usages: Vec<Usage>,
}

impl CompletionStream {
    fn new(include_usage: bool, echo: String) -> CompletionStream {
        CompletionStream { head: Value::Null, include_usage, echo, usages: Vec::new() }
    }

    fn chunk(&self, choices: Value) -> Value {
        let mut chunk = self.head.clone();
        chunk["choices"] = choices;
        chunk
    }
}

impl StreamFormat for CompletionStream {
    const CONTENT_TYPE: &'static str = "text/event-stream; charset=utf-8";
    const PING: &'static [u8] = b":\n\n";

    fn begin(&mut self, running: &Running, out: &mut Vec<u8>) {
        self.head = json!({
            "id": new_id("cmpl-"),
            "object": "text_completion",
            "created": now(),
            "model": running.lease.id(),
            "system_fingerprint": FINGERPRINT,
        });
        if !self.echo.is_empty() {
            for index in 0..running.choices() {
                let choice = json!([{ "index": index, "text": self.echo, "finish_reason": null }]);
                sse_data(&self.chunk(choice), out);
            }
        }
    }

    fn event(&mut self, running: &Running, event: ChoiceEvent, out: &mut Vec<u8>) {
        let ChoiceEvent { index, delta, kind } = event;
        let text = delta.content;
        match kind {
            EventKind::Token { id, logprobs: own } => {
                if text.is_empty() && own.is_none() {
                    return;
                }
                let logprobs =
                    own.map(|own| logprobs(running, &[AnswerToken { id, logprobs: Some(own) }]));
                let choice = json!({
                    "index": index, "text": text, "logprobs": logprobs, "finish_reason": null,
                });
                sse_data(&self.chunk(json!([choice])), out);
            }
            EventKind::Done { finish, usage, timings } => {
                self.usages.push(usage);
                let finish = finish_reason(&finish);
                let choice = json!({ "index": index, "text": text, "finish_reason": finish });
                let mut chunk = self.chunk(json!([choice]));
                chunk["timings"] = json!(LlamaTimings::new(&usage, &timings));
                sse_data(&chunk, out);
            }
            EventKind::Failed(error) => sse_data(&error.openai(), out),
        }
    }

    fn end(&mut self, _: &Running, out: &mut Vec<u8>) {
        if self.include_usage {
            let mut chunk = self.chunk(json!([]));
            chunk["usage"] = usage(&self.usages);
            sse_data(&chunk, out);
        }
        out.extend_from_slice(b"data: [DONE]\n\n");
    }
}
