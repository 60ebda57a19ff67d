//! The content of Anthropic's messages, which is a text or blocks, as OpenAI's messages: a call of
//! a tool is a part of an assistant's message, and its result is a message of its own.

use serde_json::{Value, json};

use crate::error::{ApiError, Result};
use crate::openai::calls::{name_reasoning, text_field};
use crate::openai::chat::text_of_parts;

/// The text of a string or of blocks of text. Reasoning of earlier answers is left out, as
/// templates leave it out where no call came behind it.
pub(super) fn text(at: &str, content: &Value) -> Result<String> {
    match content {
        Value::String(text) => Ok(text.clone()),
        Value::Array(blocks) => {
            let blocks: Vec<Value> =
                blocks.iter().filter(|block| !is_thinking(block)).cloned().collect();
            text_of_parts(at, &blocks)
        }
        _ => Err(ApiError::field(at, format!("{at}: expected a string or an array of blocks"))),
    }
}

fn is_thinking(block: &Value) -> bool {
    matches!(block["type"].as_str(), Some("thinking" | "redacted_thinking"))
}

/// Adds the messages that a message with this content becomes.
pub(super) fn add(role: &str, at: &str, content: &Value, messages: &mut Vec<Value>) -> Result<()> {
    let is_of_tools = |block: &Value| matches!(kind(block), "tool_use" | "tool_result");
    let blocks = match content {
        Value::Array(blocks) if blocks.iter().any(is_of_tools) => blocks,
        content => {
            messages.push(json!({ "role": role, "content": text(at, content)? }));
            return Ok(());
        }
    };
    let mut texts = Vec::new();
    let mut calls = Vec::new();
    let mut reasoning = String::new();
    for (i, block) in blocks.iter().enumerate() {
        let at = format!("{at}[{i}]");
        match (role, kind(block)) {
            ("assistant", "tool_use") => calls.push(call(&at, block)?),
            ("user", "tool_result") => {
                // Text before a result is a message before it.
                add_texts(role, &mut texts, messages);
                messages.push(result(&at, block)?);
            }
            (_, kind @ ("tool_use" | "tool_result")) => {
                let message = format!("{at}: expected no {kind} in a message of the {role}");
                return Err(ApiError::field(&at, message));
            }
            _ if is_thinking(block) => {
                reasoning.push_str(block["thinking"].as_str().unwrap_or_default());
            }
            _ => texts.push(text_of_parts(&at, std::slice::from_ref(block))?),
        }
    }
    if calls.is_empty() {
        add_texts(role, &mut texts, messages);
    } else {
        let content = texts.join("\n");
        let mut message = json!({ "role": role, "content": content, "tool_calls": calls });
        if !reasoning.is_empty() {
            message["reasoning_content"] = reasoning.into();
            name_reasoning(&mut message);
        }
        messages.push(message);
    }
    Ok(())
}

fn kind(block: &Value) -> &str {
    block["type"].as_str().unwrap_or_default()
}

fn add_texts(role: &str, texts: &mut Vec<String>, messages: &mut Vec<Value>) {
    if !texts.is_empty() {
        messages.push(json!({ "role": role, "content": texts.join("\n") }));
        texts.clear();
    }
}

fn call(at: &str, block: &Value) -> Result<Value> {
    let text = |name: &str| text_field(at, block, name);
    let (id, name) = (text("id")?, text("name")?);
    let input = match block.get("input") {
        None | Some(Value::Null) => json!({}),
        Some(input @ Value::Object(_)) => input.clone(),
        Some(_) => {
            let at = format!("{at}.input");
            return Err(ApiError::field(&at, format!("{at}: expected an object")));
        }
    };
    let function = json!({ "name": name, "arguments": input });
    Ok(json!({ "id": id, "type": "function", "function": function }))
}

/// The result of a call. Templates have no word for a failure, so its text says it.
fn result(at: &str, block: &Value) -> Result<Value> {
    let id = text_field(at, block, "tool_use_id")?;
    let content = match block.get("content") {
        None | Some(Value::Null) => String::new(),
        Some(content) => text(&format!("{at}.content"), content)?,
    };
    let content = match block["is_error"] {
        Value::Bool(true) => format!("Error: {content}"),
        _ => content,
    };
    Ok(json!({ "role": "tool", "tool_call_id": id, "content": content }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn converted(role: &str, content: &Value) -> std::result::Result<Vec<Value>, String> {
        let mut messages = Vec::new();
        let found = add(role, "messages[0].content", content, &mut messages);
        found.map(|()| messages).map_err(|error| error.message)
    }

    #[test]
    fn calls_and_results_are_messages_of_openai() {
        let content = json!([
            { "type": "thinking", "thinking": "Hm.", "signature": "" },
            { "type": "text", "text": "Let me see." },
            { "type": "tool_use", "id": "a", "name": "f", "input": { "x": 1 } },
            { "type": "tool_use", "id": "b", "name": "g", "input": {} },
        ]);
        let call = |id: &str, name: &str, arguments: Value| {
            let function = json!({ "name": name, "arguments": arguments });
            json!({ "id": id, "type": "function", "function": function })
        };
        let calls = [call("a", "f", json!({ "x": 1 })), call("b", "g", json!({}))];
        let wanted = json!({
            "role": "assistant",
            "content": "Let me see.",
            "reasoning_content": "Hm.",
            "tool_calls": calls,
        });
        assert_eq!(converted("assistant", &content), Ok(vec![wanted]));
        let cache = json!({ "type": "ephemeral" });
        let content = json!([
            { "type": "tool_result", "tool_use_id": "a", "content": "12" },
            {
                "type": "tool_result",
                "tool_use_id": "b",
                "is_error": true,
                "content": [{ "type": "text", "text": "no such file", "cache_control": cache }],
            },
            { "type": "tool_result", "tool_use_id": "c" },
            { "type": "text", "text": "Go on." },
            { "type": "text", "text": "Please." },
        ]);
        let result = |id: &str, text: &str| {
            let role = "tool";
            json!({ "role": role, "tool_call_id": id, "content": text })
        };
        let wanted = vec![
            result("a", "12"),
            result("b", "Error: no such file"),
            result("c", ""),
            json!({ "role": "user", "content": "Go on.\nPlease." }),
        ];
        assert_eq!(converted("user", &content), Ok(wanted));
    }

    #[test]
    fn wrong_blocks_are_named() {
        let call = json!({ "type": "tool_use", "id": "a", "name": "f", "input": [] });
        let image = json!({ "type": "image", "source": {} });
        for (role, block, wanted) in [
            ("user", call.clone(), ": expected no tool_use in a message of the user"),
            ("assistant", call, ".input: expected an object"),
            ("assistant", json!({ "type": "tool_use", "id": "a" }), ".name: expected a string"),
            ("user", json!({ "type": "tool_result" }), ".tool_use_id: expected a string"),
            (
                "user",
                json!({ "type": "tool_result", "tool_use_id": "a", "content": [image] }),
                ".content[0]: images need a vision projector",
            ),
        ] {
            let error = converted(role, &json!([block])).unwrap_err();
            let wanted = format!("messages[0].content[0]{wanted}");
            assert!(error.starts_with(&wanted), "{error}");
        }
    }
}
