//! Tools for chat templates that show none: the first message describes them, and calls and
//! results are text.

use serde_json::{Value as Json, json};

use super::calls;
use crate::tools::ToolFormat;

/// Messages in which tools, an array as OpenAI's interface has it, and what was called are text.
/// The description is a system message if the template writes those, or else begins the first
/// message.
pub(super) fn as_text(mut messages: Vec<Json>, tools: &Json, writes_system: bool) -> Vec<Json> {
    let description = description(tools);
    let begins = |role: &str| messages.first().is_some_and(|message| message["role"] == role);
    if begins("system") || (!writes_system && begins("user")) {
        let content = text(&messages[0]);
        messages[0]["content"] = format!("{description}\n\n{content}").into();
    } else {
        let role = if writes_system { "system" } else { "user" };
        messages.insert(0, json!({ "role": role, "content": description }));
    }
    join_results(calls::as_content(messages, Some(ToolFormat::described())))
}

/// What tells the model which functions there are, and how it calls them.
fn description(tools: &Json) -> String {
    let functions = tools.as_array().into_iter().flatten();
    let lines: Vec<String> = functions.map(|tool| tool["function"].to_string()).collect();
    format!(
        "You can call functions. Each line describes one; its parameters are a JSON schema:\n{}\n\n\
         To call a function, write its name and arguments as JSON between these tags, and stop:\n\
         <tool_call>\n{}\n</tool_call>\nYou then get its result between <tool_response> and \
         </tool_response>. Answer without a call if you need none.",
        lines.join("\n"),
        r#"{"name": "NAME", "arguments": {"PARAMETER": VALUE}}"#,
    )
}

/// Results of calls as what a user says, in one message with what follows them: for some
/// templates users and the model alternate.
fn join_results(messages: Vec<Json>) -> Vec<Json> {
    let mut joined: Vec<Json> = Vec::with_capacity(messages.len());
    let mut is_result = false;
    for message in messages {
        let was_result = std::mem::replace(&mut is_result, message["role"] == "tool");
        let content = match is_result {
            true => format!("<tool_response>\n{}\n</tool_response>", text(&message)),
            false => text(&message).to_owned(),
        };
        match joined.last_mut() {
            Some(last) if was_result && (is_result || message["role"] == "user") => {
                last["content"] = format!("{}\n{content}", text(last)).into();
            }
            _ if is_result => joined.push(json!({ "role": "user", "content": content })),
            _ => joined.push(message),
        }
    }
    joined
}

fn text(message: &Json) -> &str {
    message["content"].as_str().unwrap_or_default()
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
            json!({ "role": "assistant", "tool_calls": [{ "function": function }] }),
            message("tool", "one"),
            message("tool", "two"),
            message("user", "and?"),
            message("assistant", "done"),
        ];
        let tools = json!([{ "type": "function", "function": { "name": "f" } }]);
        let found = as_text(messages.clone(), &tools, true);
        assert_eq!((found.len(), &found[0]["role"]), (5, &json!("system")));
        assert!(text(&found[0]).contains("\n{\"name\":\"f\"}\n"), "{found:?}");
        let call = "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\":1}}\n</tool_call>";
        assert_eq!(found[2], message("assistant", call));
        let results = "<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n\
                       </tool_response>\nand?";
        assert_eq!(found[3..], [message("user", results), message("assistant", "done")]);
        let found = as_text(messages, &tools, false);
        assert_eq!((found.len(), &found[0]["role"]), (4, &json!("user")));
        assert!(text(&found[0]).starts_with("You can") && text(&found[0]).ends_with("\n\nhi"));
    }

    #[test]
    fn the_description_joins_the_system_message() {
        let found = as_text(vec![message("system", "be kind")], &json!([]), false);
        assert!(found.len() == 1 && text(&found[0]).ends_with("\n\nbe kind"), "{found:?}");
        assert_eq!(as_text(Vec::new(), &json!([]), false)[0]["role"], "user");
    }
}
