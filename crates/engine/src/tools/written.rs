//! Calls as a model writes them, for templates that leave them out of a conversation.

use serde_json::Value;

use super::ToolCall;
use super::bodies::{Arguments, Body};
use super::cursor::pieces;
use super::formats::ToolFormat;

impl ToolFormat {
    /// The text of calls; none for the forms with tags, whose templates write the calls.
    pub fn write(&self, calls: &[ToolCall]) -> Option<String> {
        if matches!(self.body, Body::Named(Arguments::Tagged(_) | Arguments::Gemma)) {
            return None;
        }
        let [open, close] = self.block;
        let mut out = String::new();
        for (number, call) in calls.iter().enumerate() {
            match (number, self.between_calls) {
                (0, _) => out.push_str(open),
                (_, Some(between)) => out.push_str(between),
                (_, None) => {
                    [close, self.between_blocks.unwrap_or("\n"), open]
                        .iter()
                        .for_each(|text| out.push_str(text));
                }
            }
            let [before, between, behind] = self.call.map(|text| filled(text, number));
            let arguments = match self.body {
                Body::Named(Arguments::Python) => keyword_arguments(call),
                _ => call.arguments_text(),
            };
            out.extend([before.as_str(), &call.name, &between, &arguments, &behind]);
        }
        if !calls.is_empty() {
            out.push_str(close);
        }
        Some(out)
    }
}

fn keyword_arguments(call: &ToolCall) -> String {
    let value = |value: &Value| match value {
        Value::Bool(true) => "True".to_owned(),
        Value::Bool(false) => "False".to_owned(),
        Value::Null => "None".to_owned(),
        value => value.to_string(),
    };
    let arguments = call.arguments.iter().map(|(key, it)| format!("{key}={}", value(it)));
    arguments.collect::<Vec<_>>().join(", ")
}

/// A text whose placeholders are filled for one of several calls.
fn filled(text: &str, number: usize) -> String {
    let piece = |(i, piece): (usize, &str)| match piece {
        "{n}" if i % 2 == 1 => number.to_string(),
        "{id}" if i % 2 == 1 => format!("{number:09}"),
        "{call_id}" if i % 2 == 1 => format!("[CALL_ID]{number:09}"),
        "{json}" if i % 2 == 1 => " <|constrain|>json".to_owned(),
        _ if i % 2 == 1 => String::new(),
        text => text.to_owned(),
    };
    pieces(text).enumerate().map(piece).collect()
}
