//! Messages with tool calls, in the form that a template reads. OpenAI's interface has arguments
//! as JSON text and null as the content beside them; templates differ in both, and some want ids of
//! a form. A trial shows what one wants.

use serde_json::{Map, Value as Json, json};

use crate::tools::{ToolCall, ToolFormat};

/// What a template reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CallStyle {
    /// Whether arguments are the text of an object instead of an object.
    pub(super) arguments_are_text: bool,
    /// Whether a message without content has an empty text instead of null.
    pub(super) content_is_text: bool,
    pub(super) ids: Ids,
}

/// The ids of calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ids {
    /// Those of the messages.
    Given,
    /// Nine letters or digits, as Mistral's templates want them.
    Nine,
    /// `functions.NAME:NUMBER`, as Kimi K2 writes them.
    Numbered,
}

impl CallStyle {
    /// Those that a template may have, the most usual first.
    pub(super) fn candidates(source: &str) -> impl Iterator<Item = CallStyle> {
        let ids = match source {
            source if source.contains("length != 9") => Ids::Nine,
            source if source.contains("<|tool_calls_section_begin|>") => Ids::Numbered,
            _ => Ids::Given,
        };
        let all = [(false, false), (false, true), (true, false), (true, true)].into_iter();
        all.map(move |(arguments_are_text, content_is_text)| CallStyle {
            arguments_are_text,
            content_is_text,
            ids,
        })
    }

    /// Messages with a call.
    pub(super) fn trial(self) -> Json {
        let function = json!({ "name": "trial_call", "arguments": { "trial_key": "trial_value" } });
        let call = json!({ "id": "trial0001", "type": "function", "function": function });
        let messages = [
            json!({ "role": "user", "content": "a" }),
            json!({ "role": "assistant", "content": null, "tool_calls": [call] }),
            json!({ "role": "tool", "tool_call_id": "trial0001", "content": "b" }),
        ];
        self.rewrite(messages.to_vec()).into()
    }

    /// The tools beside them.
    pub(super) fn trial_tools() -> Json {
        let property = json!({ "type": "string", "description": "a" });
        let parameters = json!({ "type": "object", "properties": { "trial_key": property } });
        json!([{
            "type": "function",
            "function": { "name": "a", "description": "a", "parameters": parameters },
        }])
    }

    /// Whether a rendered text has the call of the trial, with its arguments written once and not
    /// as the text of a text, and without the name of a null.
    pub(super) fn is_written(rendered: &str) -> bool {
        let has = |text: &str| rendered.contains(text);
        has("trial_call") && has("trial_value") && !has("\\\"trial_key") && !has("None")
    }

    /// Messages in this form.
    pub(super) fn rewrite(self, mut messages: Vec<Json>) -> Vec<Json> {
        // Names and new ids by the ids that messages have.
        let mut known: Map<String, Json> = Map::new();
        let mut count = 0;
        for message in &mut messages {
            let Some(fields) = message.as_object_mut() else { continue };
            if let Some(Json::Array(calls)) = fields.get_mut("tool_calls") {
                for call in calls {
                    let number = count;
                    count += 1;
                    self.rewrite_call(call, number, &mut known);
                }
                let content = fields.entry("content").or_insert(Json::Null);
                if content.is_null() || content == "" {
                    *content = if self.content_is_text { "".into() } else { Json::Null };
                }
            } else if fields.get("role").is_some_and(|role| role == "tool") {
                let id = fields.get("tool_call_id").and_then(Json::as_str);
                let Some([name, id]) = id.and_then(|id| known.get(id)?.as_array()?.get(..2)) else {
                    continue;
                };
                fields.entry("name").or_insert(name.clone());
                fields.insert("tool_call_id".to_owned(), id.clone());
            }
        }
        messages
    }

    fn rewrite_call(self, call: &mut Json, number: usize, known: &mut Map<String, Json>) {
        let name = call["function"]["name"].as_str().unwrap_or_default().to_owned();
        if let Some(arguments) = call.pointer_mut("/function/arguments") {
            match arguments {
                Json::String(text) if !self.arguments_are_text => {
                    let value = serde_json::from_str::<Map<String, Json>>(text);
                    *arguments = value.map_or_else(|_| arguments.take(), Json::Object);
                }
                Json::Object(_) if self.arguments_are_text => {
                    *arguments = arguments.to_string().into();
                }
                _ => {}
            }
        }
        let Some(given) = call.get("id").and_then(Json::as_str).map(str::to_owned) else { return };
        let is_nine = given.len() == 9 && given.bytes().all(|byte| byte.is_ascii_alphanumeric());
        let id = match self.ids {
            Ids::Nine if !is_nine => format!("{number:09}"),
            Ids::Numbered if !given.starts_with("functions.") => {
                format!("functions.{name}:{number}")
            }
            _ => given.clone(),
        };
        call["id"] = id.clone().into();
        known.insert(given, json!([name, id]));
    }
}

/// Messages whose calls are content, in the form that the model writes.
pub(super) fn as_content(mut messages: Vec<Json>, format: Option<&ToolFormat>) -> Vec<Json> {
    for message in &mut messages {
        let Some(Json::Array(calls)) = message.get("tool_calls") else { continue };
        let calls: Vec<ToolCall> = calls.iter().filter_map(call).collect();
        let written = format.and_then(|format| format.write(&calls)).unwrap_or_default();
        let content = message.get("content").and_then(Json::as_str).unwrap_or_default();
        let between = if content.is_empty() || content.ends_with('\n') { "" } else { "\n" };
        message["content"] = format!("{content}{between}{written}").into();
        message.as_object_mut().map(|fields| fields.remove("tool_calls"));
    }
    messages
}

/// A call of a message.
fn call(call: &Json) -> Option<ToolCall> {
    let function = call.get("function")?;
    let arguments = match function.get("arguments") {
        Some(Json::Object(arguments)) => arguments.clone(),
        Some(Json::String(text)) => serde_json::from_str(text).ok()?,
        _ => Map::new(),
    };
    Some(ToolCall { name: function.get("name")?.as_str()?.to_owned(), arguments })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rewritten(ids: Ids, arguments_are_text: bool) -> Vec<Json> {
        let style = CallStyle { arguments_are_text, content_is_text: true, ids };
        style.rewrite(vec![
            json!({ "role": "assistant", "tool_calls": [
                { "id": "call_a", "function": { "name": "f", "arguments": "{\"b\": 1}" } },
                { "id": "123456789", "function": { "name": "g", "arguments": {} } },
            ] }),
            json!({ "role": "tool", "tool_call_id": "call_a", "content": "c" }),
            json!({ "role": "tool", "tool_call_id": "other", "content": "d" }),
        ])
    }

    #[test]
    fn calls_have_the_arguments_and_ids_that_a_template_wants() {
        let found = rewritten(Ids::Given, false);
        assert_eq!(found[0]["content"], "");
        assert_eq!(found[0]["tool_calls"][0]["function"]["arguments"], json!({ "b": 1 }));
        assert_eq!((&found[1]["name"], &found[1]["tool_call_id"]), (&json!("f"), &json!("call_a")));
        assert_eq!(found[2].get("name"), None);
        let found = rewritten(Ids::Nine, true);
        assert_eq!(found[0]["tool_calls"][0]["id"], "000000000");
        assert_eq!(found[0]["tool_calls"][1]["id"], "123456789");
        assert_eq!(found[0]["tool_calls"][1]["function"]["arguments"], "{}");
        assert_eq!(found[1]["tool_call_id"], "000000000");
        let found = rewritten(Ids::Numbered, false);
        assert_eq!(found[1]["tool_call_id"], "functions.f:0");
        assert_eq!(found[0]["tool_calls"][1]["id"], "functions.g:1");
    }
}
