//! Anthropic's interface: messages and the count of their tokens.

mod blocks;

use std::sync::Arc;

use axum::Extension;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use bodkin::{FinishReason, Usage};
use bodkin_engine::ToolCall;
use serde_json::{Map, Value, json};

use crate::app::SharedApp;
use crate::auth::Caller;
use crate::constraint;
use crate::error::{ApiError, Result};
use crate::fields::{Fields, Json};
use crate::generate::{ChoiceEvent, EventKind, Generation, Running};
use crate::openai::calls;
use crate::openai::chat::{add_effort, messages};
use crate::openai::new_id;
use crate::prompt::{Chat, ChatEnd, Prompt, count_tokens as count};
use crate::stream::{self, StreamFormat, sse_event};
use crate::timings::Reports;
use crate::tools;

/// The most tokens of an answer if the request does not say.
const DEFAULT_MAX_TOKENS: usize = 4096;

/// Answers a conversation.
pub(crate) async fn create(
    State(app): State<SharedApp>,
    Extension(caller): Extension<Caller>,
    mut fields: Fields,
) -> Result<Response> {
    let model = fields.string("model")?;
    let lease = app.model(model.as_deref()).await?;
    let constraint = constraint::anthropic(&mut fields)?;
    let chat = chat(&mut fields)?;
    calls::check_end(&chat.messages, "messages")?;
    let prompts = vec![Prompt::Chat(chat)];
    let stop = fields.strings("stop_sequences")?;
    let mut request = lease.request(&mut fields)?;
    request.constraint = constraint;
    request.stop.extend(stop);
    let otherwise = Some(DEFAULT_MAX_TOKENS);
    request.max_tokens = lease.defaults.max_tokens(&mut fields, &["max_tokens"], 1, otherwise)?;
    let streams = fields.boolean("stream")?.unwrap_or(false);
    let (separates_reasoning, reports) = (true, Reports::default());
    let generation = Generation { prompts, request, choices: 1, separates_reasoning, reports };
    let running = app.generate(lease, caller, generation).await?;
    if streams {
        return Ok(stream::response(running, MessageStream::default()));
    }
    let (running, mut answers) = running.collect().await?;
    let answer = answers.pop().ok_or_else(|| ApiError::internal("there is no answer"))?;
    let mut content = Vec::new();
    if !answer.text.reasoning.is_empty() {
        let thinking = &answer.text.reasoning;
        content.push(json!({ "type": "thinking", "thinking": thinking, "signature": "" }));
    }
    let calls = &answer.text.calls;
    if calls.is_empty() || !answer.text.content.is_empty() {
        content.push(json!({ "type": "text", "text": answer.text.content }));
    }
    content.extend(calls.iter().map(|call| tool_use(call, call.arguments.clone())));
    let (reason, sequence) = stop_reason(&answer.finish, !calls.is_empty());
    Ok(Json(json!({
        "id": new_id("msg_"),
        "type": "message",
        "role": "assistant",
        "model": running.lease.id(),
        "content": content,
        "stop_reason": reason,
        "stop_sequence": sequence,
        "usage": usage(&answer.usage),
    }))
    .into_response())
}

/// The tokens of a conversation.
pub(crate) async fn count_tokens(
    State(app): State<SharedApp>,
    mut fields: Fields,
) -> Result<Response> {
    let lease = app.model(fields.string("model")?.as_deref()).await?;
    let tokens = count(lease, chat(&mut fields)?).await?;
    Ok(Json(json!({ "input_tokens": tokens })).into_response())
}

/// The conversation of a request, in the form that templates read.
fn chat(fields: &mut Fields) -> Result<Chat> {
    ["mcp_servers", "container"].into_iter().try_for_each(|f| fields.refuse(f))?;
    let tools = tools::anthropic(fields)?.map(Arc::new);
    let mut output = fields.object("output_config")?;
    let given = messages(fields)?;
    let mut messages = Vec::with_capacity(given.len() + 1);
    if let Some(mut system) = fields.take("system") {
        if let Value::Array(blocks) = &mut system {
            blocks.retain(|block| !is_billing_header(block));
        }
        messages.push(json!({ "role": "system", "content": blocks::text("system", &system)? }));
    }
    for (i, message) in given.iter().enumerate() {
        let role = message.get("role").and_then(Value::as_str);
        let Some(role @ ("user" | "assistant")) = role else {
            let at = format!("messages[{i}].role");
            return Err(ApiError::field(&at, format!("{at}: expected user or assistant")));
        };
        let content = message.get("content").unwrap_or(&Value::Null);
        blocks::add(role, &format!("messages[{i}].content"), content, &mut messages)?;
    }
    let end = match messages.last() {
        Some(last) if calls::has_calls(last) => ChatEnd::Message,
        Some(last) if last["role"] == "assistant" => ChatEnd::Continued,
        _ => ChatEnd::Answer,
    };
    let mut variables = Map::new();
    add_effort(output.string("effort")?, &mut variables);
    match fields.object("thinking")?.string("type")?.as_deref() {
        None => {}
        Some("enabled" | "adaptive") => {
            drop(variables.insert("enable_thinking".into(), true.into()))
        }
        Some("disabled") => drop(variables.insert("enable_thinking".into(), false.into())),
        Some(_) => {
            let message = "thinking.type: expected enabled, adaptive or disabled";
            return Err(ApiError::field("thinking.type", message));
        }
    }
    Ok(Chat { messages, variables, end, tools })
}

/// Whether a block of instructions is a header that Claude Code puts before them. It is other with
/// each request: no prefix of the prompt could be used again.
fn is_billing_header(block: &Value) -> bool {
    let text = block["text"].as_str().unwrap_or_default();
    text.starts_with("x-anthropic-billing-header:")
}

/// A block that calls a tool.
fn tool_use(call: &ToolCall, input: Map<String, Value>) -> Value {
    json!({ "type": "tool_use", "id": new_id("toolu_"), "name": call.name, "input": input })
}

/// Why an answer ended, and the stop string that ended it.
fn stop_reason(finish: &FinishReason, has_calls: bool) -> (&'static str, Option<&str>) {
    match finish {
        FinishReason::End if has_calls => ("tool_use", None),
        FinishReason::End | FinishReason::Cancelled => ("end_turn", None),
        FinishReason::Stop(text) => ("stop_sequence", Some(text)),
        FinishReason::Length => ("max_tokens", None),
        FinishReason::Context => ("model_context_window_exceeded", None),
    }
}

fn usage(usage: &Usage) -> Value {
    json!({
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.generated_tokens,
    })
}

/// The events of a streamed answer: blocks of thinking and of text, one after the other.
#[derive(Default)]
struct MessageStream {
    /// The kind of the open block.
    open: Option<&'static str>,
    /// Its number, or that of the next one.
    index: usize,
    has_calls: bool,
    failed: bool,
}

impl MessageStream {
    /// Adds text to a block of this kind, which is opened if another one is open.
    fn add(&mut self, kind: &'static str, text: &str, out: &mut Vec<u8>) {
        if self.open != Some(kind) {
            self.close(out);
            let block = match kind {
                "thinking" => json!({ "type": kind, "thinking": "", "signature": "" }),
                _ => json!({ "type": kind, "text": "" }),
            };
            let name = "content_block_start";
            let event = json!({ "type": name, "index": self.index, "content_block": block });
            sse_event(name, &event, out);
            self.open = Some(kind);
        }
        if !text.is_empty() {
            let delta = match kind {
                "thinking" => json!({ "type": "thinking_delta", "thinking": text }),
                _ => json!({ "type": "text_delta", "text": text }),
            };
            let event =
                json!({ "type": "content_block_delta", "index": self.index, "delta": delta });
            sse_event("content_block_delta", &event, out);
        }
    }

    /// Writes a block with a call, whose arguments come at once.
    fn call(&mut self, call: &ToolCall, out: &mut Vec<u8>) {
        self.close(out);
        self.has_calls = true;
        let index = self.index;
        let block = tool_use(call, Map::new());
        let name = "content_block_start";
        let event = json!({ "type": name, "index": index, "content_block": block });
        sse_event(name, &event, out);
        let input = call.arguments_text();
        let delta = json!({ "type": "input_json_delta", "partial_json": input });
        let name = "content_block_delta";
        sse_event(name, &json!({ "type": name, "index": index, "delta": delta }), out);
        self.open = Some("tool_use");
        self.close(out);
    }

    fn close(&mut self, out: &mut Vec<u8>) {
        if let Some(kind) = self.open.take() {
            if kind == "thinking" {
                // Clients send it back with the block; there is nothing to sign.
                let delta = json!({ "type": "signature_delta", "signature": "" });
                let name = "content_block_delta";
                let event = json!({ "type": name, "index": self.index, "delta": delta });
                sse_event(name, &event, out);
            }
            let event = json!({ "type": "content_block_stop", "index": self.index });
            sse_event("content_block_stop", &event, out);
            self.index += 1;
        }
    }
}

impl StreamFormat for MessageStream {
    const CONTENT_TYPE: &'static str = "text/event-stream; charset=utf-8";
    const PING: &'static [u8] = b"event: ping\ndata: {\"type\":\"ping\"}\n\n";

    fn begin(&mut self, running: &Running, out: &mut Vec<u8>) {
        let message = json!({
            "id": new_id("msg_"),
            "type": "message",
            "role": "assistant",
            "model": running.lease.id(),
            "content": [],
            "stop_reason": null,
            "stop_sequence": null,
            "usage": { "input_tokens": running.prompt(0).len(), "output_tokens": 0 },
        });
        sse_event("message_start", &json!({ "type": "message_start", "message": message }), out);
    }

    fn event(&mut self, _: &Running, event: ChoiceEvent, out: &mut Vec<u8>) {
        let ChoiceEvent { delta, kind, .. } = event;
        if !delta.reasoning.is_empty() {
            self.add("thinking", &delta.reasoning, out);
        }
        if !delta.content.is_empty() {
            self.add("text", &delta.content, out);
        }
        delta.calls.iter().for_each(|call| self.call(call, out));
        match kind {
            EventKind::Prefill | EventKind::Token { .. } => {}
            EventKind::Done { finish, usage: counts, .. } => {
                if self.index == 0 && self.open.is_none() {
                    // Clients expect a block, if only an empty one.
                    self.add("text", "", out);
                }
                self.close(out);
                let (reason, sequence) = stop_reason(&finish, self.has_calls);
                let delta = json!({ "stop_reason": reason, "stop_sequence": sequence });
                let event =
                    json!({ "type": "message_delta", "delta": delta, "usage": usage(&counts) });
                sse_event("message_delta", &event, out);
            }
            EventKind::Failed(error) => {
                self.failed = true;
                sse_event("error", &error.anthropic(), out);
            }
        }
    }

    fn end(&mut self, _: &Running, out: &mut Vec<u8>) {
        if !self.failed {
            sse_event("message_stop", &json!({ "type": "message_stop" }), out);
        }
    }
}
