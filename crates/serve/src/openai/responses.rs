//! `/v1/responses`. Answers are not stored, so a request repeats the whole conversation.

mod input;

use std::sync::Arc;

use axum::Extension;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use bodkin::{FinishReason, Usage};
use bodkin_engine::ToolCall;
use serde_json::{Map, Value, json};

use self::input::messages;
use super::calls;
use super::chat::add_effort;
use super::{new_id, now};
use crate::app::SharedApp;
use crate::auth::Caller;
use crate::constraint;
use crate::error::{ApiError, Result};
use crate::fields::{Fields, Json, float};
use crate::generate::{ChoiceEvent, EventKind, Generation, Running};
use crate::prompt::{Chat, Prompt, count_tokens};
use crate::reasoning::Delta;
use crate::stream::{self, StreamFormat, sse_event};
use crate::timings::{LlamaTimings, Reports, add_report};
use crate::tools;

/// Answers an input.
pub(crate) async fn create(
    State(app): State<SharedApp>,
    Extension(caller): Extension<Caller>,
    mut fields: Fields,
) -> Result<Response> {
    let model = fields.string("model")?;
    refuse_missing(&mut fields)?;
    let variables = variables(&mut fields)?;
    let metadata = fields.object("metadata")?.rest();
    let (constraint, format) = constraint::responses(&mut fields)?;
    let repeated = tools_as_given(&mut fields);
    let tools = tools::responses(&mut fields)?.map(Arc::new);
    let lease = app.model(model.as_deref()).await?;
    let instructions = fields.string("instructions")?;
    let input = fields.take("input");
    let messages = messages(instructions.as_deref(), input)?;
    calls::check_end(&messages, "input")?;
    let mut request = lease.request(&mut fields)?;
    request.constraint = constraint;
    request.max_tokens = lease.defaults.max_tokens(&mut fields, &["max_output_tokens"], 1, None)?;
    let streams = fields.boolean("stream")?.unwrap_or(false);
    let mut head = json!({
        "id": new_id("resp_"),
        "object": "response",
        "created_at": now(),
        "error": null,
        "incomplete_details": null,
        "instructions": instructions,
        "max_output_tokens": request.max_tokens,
        "metadata": metadata,
        "model": lease.id(),
        "previous_response_id": null,
        "store": false,
        "temperature": float(request.sampling.temperature),
        "text": { "format": format.unwrap_or_else(|| json!({ "type": "text" })) },
        "top_p": float(request.sampling.top_p),
        "truncation": "disabled",
    });
    repeated.into_iter().for_each(|(name, value)| head[name] = value);
    let prompts = vec![Prompt::Chat(Chat { messages, variables, tools, ..Chat::default() })];
    let (separates_reasoning, reports) = (true, Reports::of(&mut fields)?);
    let generation = Generation { prompts, request, choices: 1, separates_reasoning, reports };
    let running = app.generate(lease, caller, generation).await?;
    if streams {
        return Ok(stream::response(running, ResponseStream::new(head)));
    }
    let (running, mut answers) = running.collect().await?;
    let answer = answers.pop().ok_or_else(|| ApiError::internal("there is no answer"))?;
    let mut output = Vec::new();
    let Delta { reasoning, content, calls } = &answer.text;
    if !reasoning.is_empty() {
        // What comes behind the reasoning shows that the reasoning is whole.
        let status = match content.is_empty() && calls.is_empty() {
            true => status(&answer.finish),
            false => "completed",
        };
        output.push(Item::new("reasoning").done(reasoning, status));
    }
    if calls.is_empty() || !content.is_empty() {
        output.push(Item::new("message").done(content, status(&answer.finish)));
    }
    output.extend(calls.iter().map(function_call));
    let usage = usage(&answer.usage, running.reasoning_tokens(0));
    Ok(Json(finished(&head, output, &answer.finish, usage)).into_response())
}

/// Refuses fields that ask for what the server does not have.
fn refuse_missing(fields: &mut Fields) -> Result<()> {
    let missing = ["previous_response_id", "conversation", "background", "prompt"];
    let others = ["include", "max_tool_calls"];
    missing.into_iter().chain(others).try_for_each(|name| fields.refuse(name))?;
    fields.refuse_unless("top_logprobs", &[0.into()])?;
    fields.refuse_unless("truncation", &["disabled".into()])
}

/// The fields about tools, which the response repeats.
fn tools_as_given(fields: &mut Fields) -> [(&'static str, Value); 3] {
    let defaults = [
        ("tools", json!([])),
        ("tool_choice", json!("auto")),
        ("parallel_tool_calls", json!(true)),
    ];
    defaults.map(|(name, default)| match fields.take(name) {
        None => (name, default),
        Some(value) => {
            fields.put(name, value.clone());
            (name, value)
        }
    })
}

/// The template's variables.
fn variables(fields: &mut Fields) -> Result<Map<String, Value>> {
    let mut variables = Map::new();
    add_effort(fields.object("reasoning")?.string("effort")?, &mut variables);
    Ok(variables)
}

/// The tokens of an input.
pub(crate) async fn input_tokens(
    State(app): State<SharedApp>,
    mut fields: Fields,
) -> Result<Response> {
    let lease = app.model(fields.string("model")?.as_deref()).await?;
    let instructions = fields.string("instructions")?;
    let messages = messages(instructions.as_deref(), fields.take("input"))?;
    let variables = variables(&mut fields)?;
    let tools = tools::responses(&mut fields)?.map(Arc::new);
    let chat = Chat { messages, variables, tools, ..Chat::default() };
    let tokens = count_tokens(lease, chat).await?;
    Ok(Json(json!({ "object": "response.input_tokens", "input_tokens": tokens })).into_response())
}

/// The item of a call.
fn function_call(call: &ToolCall) -> Value {
    json!({
        "id": new_id("fc_"),
        "type": "function_call",
        "status": "completed",
        "call_id": new_id("call_"),
        "name": call.name,
        "arguments": call.arguments_text(),
    })
}

/// An item of the output: the answer, or its reasoning.
struct Item {
    kind: &'static str,
    id: String,
}

impl Item {
    fn new(kind: &'static str) -> Item {
        Item { kind, id: new_id(if kind == "message" { "msg_" } else { "rs_" }) }
    }

    /// The names of its text in parts and in events.
    fn text_type(&self) -> &'static str {
        if self.kind == "message" { "output_text" } else { "reasoning_text" }
    }

    /// A part of its content.
    fn part(&self, text: &str) -> Value {
        match self.kind {
            "message" => json!({ "type": "output_text", "text": text, "annotations": [] }),
            _ => json!({ "type": "reasoning_text", "text": text }),
        }
    }

    fn object(&self, status: &str, content: Value) -> Value {
        let mut object =
            json!({ "id": self.id, "type": self.kind, "status": status, "content": content });
        match self.kind {
            "message" => object["role"] = "assistant".into(),
            _ => object["summary"] = json!([]),
        }
        object
    }

    /// The item with all its text.
    fn done(&self, text: &str, status: &str) -> Value {
        self.object(status, json!([self.part(text)]))
    }
}

/// Whether an answer is whole.
fn status(finish: &FinishReason) -> &'static str {
    match finish {
        FinishReason::Length | FinishReason::Context => "incomplete",
        FinishReason::End | FinishReason::Stop(_) | FinishReason::Cancelled => "completed",
    }
}

/// The whole response at its end.
fn finished(head: &Value, output: Vec<Value>, finish: &FinishReason, usage: Value) -> Value {
    let mut body = head.clone();
    body["status"] = status(finish).into();
    if body["status"] == "incomplete" {
        body["incomplete_details"] = json!({ "reason": "max_output_tokens" });
    }
    body["output"] = output.into();
    body["usage"] = usage;
    body
}

fn usage(usage: &Usage, reasoning_tokens: usize) -> Value {
    json!({
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": { "cached_tokens": usage.cached_tokens },
        "output_tokens": usage.generated_tokens,
        "output_tokens_details": { "reasoning_tokens": reasoning_tokens },
        "total_tokens": usage.prompt_tokens + usage.generated_tokens,
    })
}

/// The events of a streamed response.
struct ResponseStream {
    head: Value,
    /// The number of the next event.
    sequence: u64,
    /// The item that receives text, and its text so far.
    open: Option<(Item, String)>,
    output: Vec<Value>,
}

impl ResponseStream {
    fn new(head: Value) -> ResponseStream {
        ResponseStream { head, sequence: 0, open: None, output: Vec::new() }
    }

    /// The response before its end.
    fn in_progress(&self) -> Value {
        let mut response = self.head.clone();
        response["status"] = "in_progress".into();
        response["output"] = json!([]);
        response
    }

    fn send(&mut self, name: &str, mut event: Value, out: &mut Vec<u8>) {
        event["type"] = name.into();
        event["sequence_number"] = self.sequence.into();
        self.sequence += 1;
        sse_event(name, &event, out);
    }

    /// Adds text to an item of this kind, which is opened if another one is open.
    fn add(
        &mut self,
        kind: &'static str,
        text: &str,
        report: Map<String, Value>,
        out: &mut Vec<u8>,
    ) {
        if self.open.as_ref().is_none_or(|(item, _)| item.kind != kind) {
            self.close("completed", out);
            let item = Item::new(kind);
            let index = self.output.len();
            let added =
                json!({ "output_index": index, "item": item.object("in_progress", json!([])) });
            self.send("response.output_item.added", added, out);
            let part = json!({
                "item_id": item.id,
                "output_index": index,
                "content_index": 0,
                "part": item.part(""),
            });
            self.send("response.content_part.added", part, out);
            self.open = Some((item, String::new()));
        }
        let index = self.output.len();
        if let Some((item, all)) = &mut self.open {
            all.push_str(text);
            let name = format!("response.{}.delta", item.text_type());
            let mut delta = json!({
                "item_id": item.id, "output_index": index, "content_index": 0, "delta": text,
            });
            add_report(&mut delta, report);
            self.send(&name, delta, out);
        }
    }

    /// Writes the item of a call, whose arguments come at once.
    fn call(&mut self, call: &ToolCall, out: &mut Vec<u8>) {
        self.close("completed", out);
        let index = self.output.len();
        let whole = function_call(call);
        let mut item = whole.clone();
        (item["status"], item["arguments"]) = ("in_progress".into(), "".into());
        let added = json!({ "output_index": index, "item": item });
        self.send("response.output_item.added", added, out);
        let at = || json!({ "item_id": whole["id"], "output_index": index });
        let mut delta = at();
        delta["delta"] = whole["arguments"].clone();
        self.send("response.function_call_arguments.delta", delta, out);
        let mut done = at();
        (done["arguments"], done["name"]) = (whole["arguments"].clone(), whole["name"].clone());
        self.send("response.function_call_arguments.done", done, out);
        let done = json!({ "output_index": index, "item": whole });
        self.send("response.output_item.done", done, out);
        self.output.push(whole);
    }

    /// Whether the last item is a call.
    fn is_behind_call(&self) -> bool {
        self.open.is_none() && self.output.last().is_some_and(|it| it["type"] == "function_call")
    }

    /// Ends the open item, which is whole or not.
    fn close(&mut self, status: &str, out: &mut Vec<u8>) {
        let Some((item, text)) = self.open.take() else { return };
        let index = self.output.len();
        let name = format!("response.{}.done", item.text_type());
        let at = || json!({ "item_id": item.id, "output_index": index, "content_index": 0 });
        let mut done = at();
        done["text"] = text.as_str().into();
        self.send(&name, done, out);
        let mut done = at();
        done["part"] = item.part(&text);
        self.send("response.content_part.done", done, out);
        let whole = item.done(&text, status);
        let done = json!({ "output_index": index, "item": whole });
        self.send("response.output_item.done", done, out);
        self.output.push(whole);
    }
}

impl StreamFormat for ResponseStream {
    const CONTENT_TYPE: &'static str = "text/event-stream; charset=utf-8";
    const PING: &'static [u8] = b":\n\n";

    fn begin(&mut self, _: &Running, out: &mut Vec<u8>) {
        let response = self.in_progress();
        for name in ["response.created", "response.in_progress"] {
            self.send(name, json!({ "response": response }), out);
        }
    }

    fn event(&mut self, running: &Running, event: ChoiceEvent, out: &mut Vec<u8>) {
        let ChoiceEvent { delta, kind, report, .. } = event;
        if matches!(kind, EventKind::Prefill) {
            let mut progress = json!({ "response": self.in_progress() });
            add_report(&mut progress, report);
            return self.send("response.in_progress", progress, out);
        }
        if !delta.reasoning.is_empty() {
            self.add("reasoning", &delta.reasoning, report.clone(), out);
        }
        if !delta.content.is_empty() {
            self.add("message", &delta.content, report, out);
        }
        delta.calls.iter().for_each(|call| self.call(call, out));
        match kind {
            EventKind::Prefill | EventKind::Token { .. } => {}
            EventKind::Done { finish, usage: counts, timings } => {
                let status = status(&finish);
                let has_message =
                    self.open.as_ref().is_some_and(|(item, _)| item.kind == "message");
                if !has_message && !self.is_behind_call() {
                    self.close(status, out);
                    self.add("message", "", Map::new(), out);
                }
                self.close(status, out);
                let output = std::mem::take(&mut self.output);
                let usage = usage(&counts, running.reasoning_tokens(0));
                let response = finished(&self.head, output, &finish, usage);
                let name = match response["status"] == "completed" {
                    true => "response.completed",
                    false => "response.incomplete",
                };
                let timings = LlamaTimings::new(&counts, &timings);
                self.send(name, json!({ "response": response, "timings": timings }), out);
            }
            EventKind::Failed(error) => {
                let mut response = self.head.clone();
                response["status"] = "failed".into();
                response["error"] = json!({ "code": "server_error", "message": error.message });
                self.send("response.failed", json!({ "response": response }), out);
            }
        }
    }

    fn end(&mut self, _: &Running, _: &mut Vec<u8>) {}
}
