//! The input of `/v1/responses` as messages.

use serde_json::{Map, Value, json};

use crate::error::{ApiError, Result};
use crate::openai::calls;
use crate::openai::chat::text_of_parts;

/// The conversation of a request: a text, or items of which messages, calls and their results are
/// understood.
pub(super) fn messages(instructions: Option<&str>, input: Option<Value>) -> Result<Vec<Value>> {
    let message = |role: &str, text: &str| json!({ "role": role, "content": text });
    let mut messages: Vec<Value> =
        instructions.map(|text| message("system", text)).into_iter().collect();
    let items = match input {
        Some(Value::String(text)) => {
            messages.push(message("user", &text));
            return Ok(messages);
        }
        Some(Value::Array(items)) if !items.is_empty() => items,
        _ => return Err(ApiError::field("input", "input: expected a string or an array of items")),
    };
    let mut reasoning = String::new();
    for (i, item) in items.iter().enumerate() {
        let at = format!("input[{i}]");
        let kind = item.get("type").and_then(Value::as_str).unwrap_or("message");
        match kind {
            // Templates leave it out where no call comes behind it.
            "reasoning" => {
                reasoning = reasoning_text(item);
                continue;
            }
            "function_call" => {
                let reasoning = std::mem::take(&mut reasoning);
                add_call(&at, item, reasoning, &mut messages)?;
                continue;
            }
            "function_call_output" => {
                messages.push(call_output(&at, item)?);
                continue;
            }
            _ => {}
        }
        let role = item.get("role").and_then(Value::as_str);
        let Some(role) = role.filter(|_| kind == "message") else {
            let expected = "a message with a role, function_call or function_call_output";
            return Err(ApiError::field(&at, format!("{at}: expected {expected}")));
        };
        let role = if role == "developer" { "system" } else { role };
        messages.push(message(role, &text(&at, item, "content")?));
    }
    calls::pair(&mut messages, "input")?;
    Ok(messages)
}

/// The text of reasoning, or of its summary.
fn reasoning_text(item: &Value) -> String {
    let parts = ["content", "summary"].map(|name| item[name].as_array());
    let parts = parts.into_iter().flatten().find(|parts| !parts.is_empty());
    parts.into_iter().flatten().filter_map(|part| part["text"].as_str()).collect()
}

/// Adds a call to the assistant's message before it, or to one of its own, with the reasoning
/// before it.
fn add_call(at: &str, item: &Value, reasoning: String, messages: &mut Vec<Value>) -> Result<()> {
    let id = calls::text_field(at, item, "call_id")?;
    let fields = ["name", "arguments"].map(|name| (name.to_owned(), item[name].clone()));
    let mut function = Map::from_iter(fields);
    calls::check_function(&mut function, at)?;
    let call = json!({ "id": id, "type": "function", "function": function });
    match messages.last_mut().filter(|last| last["role"] == "assistant") {
        Some(last) => match &mut last["tool_calls"] {
            Value::Array(calls) => calls.push(call),
            none => *none = json!([call]),
        },
        None => {
            messages.push(json!({ "role": "assistant", "content": null, "tool_calls": [call] }));
        }
    }
    if let Some(last) = messages.last_mut().filter(|_| !reasoning.is_empty()) {
        last["reasoning_content"] = reasoning.into();
    }
    Ok(())
}

/// The message with the result of a call.
fn call_output(at: &str, item: &Value) -> Result<Value> {
    let id = calls::text_field(at, item, "call_id")?;
    let output = text(at, item, "output")?;
    Ok(json!({ "role": "tool", "tool_call_id": id, "content": output }))
}

/// The text of a field of an item: a string, or parts.
fn text(at: &str, item: &Value, name: &str) -> Result<String> {
    let at = format!("{at}.{name}");
    match &item[name] {
        Value::String(text) => Ok(text.clone()),
        Value::Array(parts) => text_of_parts(&at, parts),
        _ => Err(ApiError::field(&at, format!("{at}: expected a string or an array of parts"))),
    }
}
