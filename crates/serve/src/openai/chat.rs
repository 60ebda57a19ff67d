//! `/v1/chat/completions`.

use std::sync::Arc;

use axum::Extension;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use bodkin_engine::ToolCall;
use serde_json::{Map, Value, json};

use super::calls;
use super::chunks::{self, Chunks};
use super::{
    TOP_LOGPROBS, chat_finish_reason, chat_logprobs, choices, new_id, refuse_missing,
    stream_options,
};
use crate::app::SharedApp;
use crate::auth::Caller;
use crate::constraint;
use crate::error::{ApiError, Result};
use crate::fields::{Fields, Json, form};
use crate::generate::{Answer, ChoiceEvent, EventKind, Generation, Running};
use crate::prompt::{Chat, ChatEnd, Prompt, count_tokens};
use crate::stream::{self, StreamFormat, sse_data};
use crate::timings::Reports;
use crate::tools;

/// Answers a conversation.
pub(crate) async fn create(
    State(app): State<SharedApp>,
    Extension(caller): Extension<Caller>,
    mut fields: Fields,
) -> Result<Response> {
    let model = fields.string("model")?;
    refuse_missing(&mut fields)?;
    fields.refuse_unless("modalities", &[json!([]), json!(["text"])])?;
    let constraint = constraint::openai(&mut fields)?;
    let tools = tools::openai(&mut fields)?;
    let lease = app.model(model.as_deref()).await?;
    let chat = Chat { tools: tools.map(Arc::new), ..chat(&mut fields)? };
    calls::check_end(&chat.messages, "messages")?;
    let mut request = lease.request(&mut fields)?;
    request.constraint = constraint;
    let names = ["max_completion_tokens", "max_tokens", "n_predict"];
    request.max_tokens = lease.defaults.max_tokens(&mut fields, &names, 1, None)?;
    let has_logprobs = fields.boolean("logprobs")?.unwrap_or(false);
    let top = fields.integer("top_logprobs", 0..=TOP_LOGPROBS)?;
    if top.is_some_and(|top| top > 0) && !has_logprobs {
        let message = "top_logprobs: expected logprobs to be true";
        return Err(ApiError::field("top_logprobs", message));
    }
    request.logprobs = has_logprobs.then_some(top.unwrap_or(0) as usize);
    let format = fields.string("reasoning_format")?;
    let choices = choices(&mut fields)?;
    let (streams, include_usage) = stream_options(&mut fields)?;
    let prompts = vec![Prompt::Chat(chat)];
    let separates_reasoning = format.is_none_or(|format| format != "none");
    let reports = Reports::of(&mut fields)?;
    let generation = Generation { prompts, request, choices, separates_reasoning, reports };
    let running = app.generate(lease, caller, generation).await?;
    if streams {
        let calls = vec![0; running.choices()];
        return Ok(stream::response(
            running,
            ChatStream { chunks: Chunks::new(include_usage), calls },
        ));
    }
    let (running, answers) = running.collect().await?;
    Ok(form(running.count_logprobs(&answers), || {
        Json(whole(&running, &answers, has_logprobs)).into_response()
    }))
}

/// The tokens of a conversation.
pub(crate) async fn input_tokens(
    State(app): State<SharedApp>,
    mut fields: Fields,
) -> Result<Response> {
    let lease = app.model(fields.string("model")?.as_deref()).await?;
    let tools = tools::openai(&mut fields)?.map(Arc::new);
    let tokens = count_tokens(lease, Chat { tools, ..chat(&mut fields)? }).await?;
    Ok(Json(json!({ "input_tokens": tokens })).into_response())
}

/// The response of an answer that is not streamed.
fn whole(running: &Running, answers: &[Answer], has_logprobs: bool) -> Value {
    let choices = answers.iter().enumerate().map(|(index, answer)| {
        let mut message = json!({ "role": "assistant", "content": answer.text.content });
        let calls = &answer.text.calls;
        if !calls.is_empty() {
            if answer.text.content.is_empty() {
                message["content"] = Value::Null;
            }
            message["tool_calls"] = calls.iter().map(tool_call).collect();
        }
        if !answer.text.reasoning.is_empty() {
            message["reasoning_content"] = answer.text.reasoning.as_str().into();
        }
        let logprobs = answer.tokens.iter().filter_map(|token| {
            Some(chat_logprobs(&running.lease, token.id, token.logprobs.as_deref()?))
        });
        let logprobs = has_logprobs.then(|| json!({ "content": logprobs.collect::<Value>() }));
        json!({
            "index": index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": chat_finish_reason(&answer.finish, !calls.is_empty()),
        })
    });
    chunks::whole(("chatcmpl-", "chat.completion"), running, answers, choices.collect())
}

/// A call of a tool, with an id for its result.
fn tool_call(call: &ToolCall) -> Value {
    json!({
        "id": new_id("call_"),
        "type": "function",
        "function": { "name": call.name, "arguments": call.arguments_text() },
    })
}

/// The messages of a request, which must have some.
pub(crate) fn messages(fields: &mut Fields) -> Result<Vec<Value>> {
    let error = |found| {
        let message = format!("messages: expected an array of at least one, found {found}");
        Err(ApiError::field("messages", message))
    };
    match fields.array("messages")? {
        None => error("none"),
        Some(messages) if messages.is_empty() => error("an empty one"),
        Some(messages) => Ok(messages),
    }
}

/// The conversation of a request.
pub(crate) fn chat(fields: &mut Fields) -> Result<Chat> {
    let messages = messages(fields)?.into_iter().enumerate();
    let messages = messages.map(|(i, value)| message(i, value));
    let mut messages = messages.collect::<Result<Vec<Value>>>()?;
    calls::pair(&mut messages, "messages")?;
    let end = end(fields, &messages)?;
    let variables = fields.object("chat_template_kwargs")?.rest();
    let mut variables: Map<String, Value> = variables.into_iter().collect();
    add_effort(fields.string("reasoning_effort")?, &mut variables);
    Ok(Chat { messages, variables, end, tools: None })
}

/// Adds how hard the model is to think to the template's variables, unless they say so already. No
/// effort is no reasoning.
pub(crate) fn add_effort(effort: Option<String>, variables: &mut Map<String, Value>) {
    let Some(effort) = effort else { return };
    if effort == "none" {
        variables.entry("enable_thinking").or_insert(false.into());
    }
    variables.entry("reasoning_effort").or_insert(effort.into());
}

/// What comes after the messages. As llama-server does it, a last message of the assistant is the
/// start of the answer unless the request says otherwise.
fn end(fields: &mut Fields, messages: &[Value]) -> Result<ChatEnd> {
    let answers = messages.iter().rev().take_while(|message| message["role"] == "assistant");
    let answers = answers.count();
    let field = "continue_final_message";
    let continues = fields.boolean(field)?;
    let has_mark = fields.boolean("add_generation_prompt")?;
    match (continues, has_mark) {
        (Some(true), Some(true)) => {
            Err(ApiError::field(field, format!("{field}: add_generation_prompt is true as well")))
        }
        (Some(true), _) if answers == 0 => {
            Err(ApiError::field(field, format!("{field}: the last message is not the assistant's")))
        }
        // Calls are not gone on with.
        (None, None) if messages.last().is_some_and(calls::has_calls) => Ok(ChatEnd::Message),
        (Some(true), _) | (None, None) if answers > 0 => match answers {
            1 => Ok(ChatEnd::Continued),
            _ => Err(ApiError::field("messages", "messages: the last two are the assistant's")),
        },
        (_, Some(false)) => Ok(ChatEnd::Message),
        _ => Ok(ChatEnd::Answer),
    }
}

/// Checks a message, and joins its parts, which must be text.
fn message(index: usize, mut message: Value) -> Result<Value> {
    let at = format!("messages[{index}]");
    let Some(fields) = message.as_object_mut() else {
        return Err(ApiError::field(&at, format!("{at}: expected an object")));
    };
    match fields.get("role") {
        // Templates know the older name.
        Some(Value::String(role)) if role == "developer" => {
            fields.insert("role".to_owned(), "system".into());
        }
        Some(Value::String(_)) => {}
        _ => {
            let at = format!("{at}.role");
            return Err(ApiError::field(&at, format!("{at}: expected a string")));
        }
    }
    calls::check(fields, &at)?;
    let at = format!("{at}.content");
    let text = match fields.get("content") {
        None | Some(Value::Null) if fields.contains_key("tool_calls") => return Ok(message),
        // An answer that refused its question has its text here.
        None | Some(Value::Null) if fields.get("refusal").is_some_and(Value::is_string) => {
            fields["refusal"].as_str().unwrap_or_default().to_owned()
        }
        Some(Value::String(_)) => return Ok(message),
        Some(Value::Array(parts)) => text_of_parts(&at, parts)?,
        _ => {
            let expected = "expected a string or an array of parts";
            return Err(ApiError::field(&at, format!("{at}: {expected}")));
        }
    };
    fields.insert("content".to_owned(), text.into());
    Ok(message)
}

/// The text of a message that comes in parts: each begins a line.
pub(crate) fn text_of_parts(at: &str, parts: &[Value]) -> Result<String> {
    let mut text = String::new();
    for (i, part) in parts.iter().enumerate() {
        let kind = part.get("type").and_then(Value::as_str).unwrap_or_default();
        let name = if kind == "refusal" { "refusal" } else { "text" };
        let own = part.get(name).and_then(Value::as_str);
        match (kind, own) {
            ("text" | "input_text" | "output_text" | "refusal", Some(own)) => {
                text.push_str(if i > 0 { "\n" } else { "" });
                text.push_str(own);
            }
            ("image_url" | "input_image" | "image", _) => {
                return Err(ApiError::image(&format!("{at}[{i}]")));
            }
            ("input_audio" | "file", _) => {
                let message = format!("{at}[{i}]: the model takes text and no {kind}");
                return Err(ApiError::field(format!("{at}[{i}]"), message));
            }
            _ => {
                let message = format!("{at}[{i}]: expected a part of type text");
                return Err(ApiError::field(format!("{at}[{i}]"), message));
            }
        }
    }
    Ok(text)
}

/// The chunks of a streamed answer.
struct ChatStream {
    chunks: Chunks,
    /// How many tools each answer has called.
    calls: Vec<usize>,
}

fn choice(index: usize, delta: impl Into<Value>, finish: Option<&str>) -> Value {
    json!({ "index": index, "delta": delta.into(), "finish_reason": finish })
}

impl StreamFormat for ChatStream {
    const CONTENT_TYPE: &'static str = "text/event-stream; charset=utf-8";
    const PING: &'static [u8] = b":\n\n";

    fn begin(&mut self, running: &Running, out: &mut Vec<u8>) {
        self.chunks.begin("chatcmpl-", "chat.completion.chunk", running);
        for index in 0..running.choices() {
            let delta = json!({ "role": "assistant", "content": null });
            self.chunks.write(Some(choice(index, delta, None)), Map::new(), out);
        }
    }

    fn event(&mut self, running: &Running, event: ChoiceEvent, out: &mut Vec<u8>) {
        let ChoiceEvent { index, delta, kind, report } = event;
        let mut fields = Map::new();
        if !delta.reasoning.is_empty() {
            fields.insert("reasoning_content".to_owned(), delta.reasoning.into());
        }
        if !delta.content.is_empty() {
            fields.insert("content".to_owned(), delta.content.into());
        }
        if !delta.calls.is_empty() {
            let calls = delta.calls.iter().map(|call| {
                let mut call = tool_call(call);
                call["index"] = self.calls[index].into();
                self.calls[index] += 1;
                call
            });
            fields.insert("tool_calls".to_owned(), calls.collect());
        }
        match kind {
            EventKind::Prefill => {
                self.chunks.write(Some(choice(index, json!({}), None)), report, out)
            }
            EventKind::Token { id, logprobs } => {
                if fields.is_empty() && logprobs.is_none() && report.is_empty() {
                    return;
                }
                let mut choice = choice(index, fields, None);
                if let Some(logprobs) = logprobs {
                    let content = [chat_logprobs(&running.lease, id, &logprobs)];
                    choice["logprobs"] = json!({ "content": content });
                }
                self.chunks.write(Some(choice), report, out);
            }
            EventKind::Done { finish, usage, timings } => {
                if !fields.is_empty() {
                    self.chunks.write(Some(choice(index, fields, None)), Map::new(), out);
                }
                let reason = chat_finish_reason(&finish, self.calls[index] > 0);
                let choice = choice(index, json!({}), Some(reason));
                self.chunks.done(choice, &usage, &timings, out);
            }
            EventKind::Failed(error) => sse_data(&error.openai(), out),
        }
    }

    fn end(&mut self, running: &Running, out: &mut Vec<u8>) {
        self.chunks.end(running, out);
    }
}
