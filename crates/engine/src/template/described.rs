//! Tools for chat templates that show none: the first message describes them, and calls and
//! results are text.

use std::borrow::Cow;

use serde_json::{Map, Value as Json, json};

use super::calls;
use crate::tools::{ToolCall, ToolFormat};

/// Messages in which tools, an array as OpenAI's interface has it, and what was called are text.
/// The description is a part of the system message if the template writes those, or else of what
/// the user says first.
pub(super) fn as_text(
    messages: Vec<Json>,
    tools: Option<&Json>,
    format: &ToolFormat,
    writes_system: bool,
) -> Vec<Json> {
    let mut messages = join_results(calls::as_content(messages, Some(format)));
    let Some(tools) = tools else { return messages };
    let description = description(tools, format);
    let role = if writes_system { "system" } else { "user" };
    let mut same_role = messages.iter_mut().filter(|message| message["role"] == role);
    // A system message is the first one.
    match same_role.next() {
        Some(message) => {
            message["content"] = format!("{description}\n\n{}", text(message)).into();
        }
        None => messages.insert(0, json!({ "role": role, "content": description })),
    }
    messages
}

/// Whether messages have calls or their results.
pub(super) fn have_calls(messages: &[Json]) -> bool {
    let has_call = |message: &Json| message["role"] == "tool" || message["tool_calls"].is_array();
    messages.iter().any(has_call)
}

/// What tells the model which functions there are, and how it calls them.
fn description(tools: &Json, format: &ToolFormat) -> String {
    let functions = tools.as_array().into_iter().flatten().filter_map(|tool| tool.get("function"));
    let lines: Vec<String> = functions.map(Json::to_string).collect();
    let arguments = Map::from_iter([("PARAMETER".to_owned(), "VALUE".into())]);
    let call = ToolCall { name: "NAME".to_owned(), arguments };
    format!(
        "You can call functions. Each line describes one; its parameters are a JSON schema:\n{}\n\n\
         To call a function, write its name and arguments in this form, and stop:\n{}\n\
         You then get its result between <tool_response> and </tool_response>. Answer without a \
         call if you need none.",
        lines.join("\n"),
        format.write(&[call]).unwrap_or_default(),
    )
}

/// Results of calls as what a user says, in one message with what the user says before and behind
/// them: for some templates users and the model alternate.
fn join_results(messages: Vec<Json>) -> Vec<Json> {
    let mut joined: Vec<Json> = Vec::with_capacity(messages.len());
    let mut is_result = false;
    for mut message in messages {
        let was_result = std::mem::replace(&mut is_result, message["role"] == "tool");
        if is_result {
            let result = format!("<tool_response>\n{}\n</tool_response>", text(&message));
            message = json!({ "role": "user", "content": result });
        }
        match joined.last_mut() {
            Some(last)
                if (is_result || was_result)
                    && last["role"] == "user"
                    && message["role"] == "user" =>
            {
                last["content"] = format!("{}\n{}", text(last), text(&message)).into();
            }
            _ => joined.push(message),
        }
    }
    joined
}

/// The content of a message, or its parts that are text.
fn text(message: &Json) -> Cow<'_, str> {
    match &message["content"] {
        Json::String(text) => text.into(),
        Json::Array(parts) => parts.iter().filter_map(|part| part["text"].as_str()).collect(),
        _ => "".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(role: &str, content: &str) -> Json {
        json!({ "role": role, "content": content })
    }

    #[test]
    fn a_conversation_with_calls_is_text() {
        let function = json!({ "name": "f", "arguments": "{\"a\": 1}" });
        let messages = vec![
            message("user", "hi"),
            json!({
                "role": "assistant", "content": "Well.",
                "tool_calls": [{ "function": function }],
            }),
            message("tool", "one"),
            message("tool", "two"),
            message("user", "and?"),
            message("assistant", "done"),
        ];
        let tools = json!([{ "type": "function", "function": { "name": "f" } }]);
        let hermes = ToolFormat::described("");
        let found = as_text(messages.clone(), Some(&tools), hermes, true);
        assert_eq!((found.len(), &found[0]["role"]), (5, &json!("system")));
        assert!(text(&found[0]).contains("\n{\"name\":\"f\"}\n"), "{found:?}");
        let form = "<tool_call>\n{\"name\": \"NAME\", \"arguments\": {\"PARAMETER\":\"VALUE\"}}\n";
        assert!(text(&found[0]).contains(form), "{found:?}");
        let call = "Well.\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\":1}}\n</tool_call>";
        assert_eq!(found[2], message("assistant", call));
        let results = "<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n\
                       </tool_response>\nand?";
        assert_eq!(found[3..], [message("user", results), message("assistant", "done")]);
        // Without tools there is no description.
        assert_eq!(as_text(messages.clone(), None, hermes, true), found[1..]);
        let found = as_text(messages, Some(&tools), hermes, false);
        assert_eq!((found.len(), &found[0]["role"]), (4, &json!("user")));
        assert!(text(&found[0]).starts_with("You can") && text(&found[0]).ends_with("\n\nhi"));
    }

    #[test]
    fn the_description_is_where_the_template_writes_it() {
        let found = |messages: Vec<Json>, writes_system| {
            as_text(messages, Some(&json!([])), ToolFormat::described(""), writes_system)
        };
        let both = vec![message("system", "be kind"), message("user", "hi")];
        let is_last_of = |message: &Json, end: &str| {
            text(message).starts_with("You can") && text(message).ends_with(end)
        };
        assert!(is_last_of(&found(both.clone(), true)[0], "\n\nbe kind"));
        let without = found(both, false);
        assert!(text(&without[0]) == "be kind" && is_last_of(&without[1], "\n\nhi"));
        assert_eq!(found(Vec::new(), false)[0]["role"], "user");
        // A result behind what the user says does not make two turns of one.
        let parts = json!({ "role": "user", "content": [{ "type": "text", "text": "so" }] });
        let joined = join_results(vec![parts, message("tool", "one")]);
        assert_eq!(joined, [message("user", "so\n<tool_response>\none\n</tool_response>")]);
    }
}
