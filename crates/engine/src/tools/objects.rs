//! Calls that are JSON objects, or arrays of them: `{"name": …, "arguments": {…}}`. Families name
//! the two keys differently, and models mix them up, so each is accepted everywhere.

use serde_json::{Map, Value};

use super::cursor::{Cursor, Found, Stop};
use super::formats::ToolFormat;
use super::{Tool, ToolCall};

/// The keys of a tool's name, and of its arguments.
const NAMES: [&str; 3] = ["name", "tool_name", "function"];
const ARGUMENTS: [&str; 2] = ["arguments", "parameters"];

/// The calls of a block, and whether its end follows.
pub(super) fn calls(
    format: &ToolFormat,
    tools: &[Tool],
    cursor: &mut Cursor,
) -> Found<(Vec<ToolCall>, bool)> {
    let mut calls = Vec::new();
    loop {
        let at = cursor.at;
        cursor.skip(|c| c.is_whitespace() || ",;".contains(c));
        if !format.end.is_empty() && cursor.take(format.end) {
            return Ok((calls, true));
        }
        if cursor.rest().is_empty() {
            return if calls.is_empty() { Err(Stop::End) } else { Ok((calls, false)) };
        }
        if !cursor.rest().starts_with(['{', '[']) {
            cursor.at = at;
            return match (calls.is_empty(), format.end) {
                // Behind the calls of a block without an end may be other text.
                (false, "") => Ok((calls, true)),
                (_, end) if end.starts_with(cursor.rest().trim_start()) => Err(Stop::End),
                _ => Err(Stop::Wrong),
            };
        }
        match cursor.json()? {
            Value::Array(values) => {
                for value in values {
                    calls.push(call(value, tools).ok_or(Stop::Wrong)?);
                }
            }
            value => calls.push(call(value, tools).ok_or(Stop::Wrong)?),
        }
    }
}

/// A call of one of the tools.
fn call(value: Value, tools: &[Tool]) -> Option<ToolCall> {
    let Value::Object(mut fields) = value else { return None };
    let is_known = |name: &str| tools.iter().any(|tool| tool.name == name);
    // As OpenAI writes it: {"type": "function", "function": {…}}.
    if let Some(Value::Object(function)) = fields.get_mut("function") {
        fields = std::mem::take(function);
    }
    let name = NAMES.iter().find_map(|key| fields.get(*key)?.as_str().map(str::to_owned));
    if let Some(name) = name.filter(|name| is_known(name)) {
        let arguments = ARGUMENTS.iter().find_map(|key| fields.remove(*key));
        return Some(ToolCall { name, arguments: arguments_of(arguments)? });
    }
    // As Apertus writes it: {"name": {…}}.
    let mut fields = fields.into_iter();
    let (name, arguments) = fields.next().filter(|_| fields.len() == 0)?;
    match arguments {
        Value::Object(arguments) if is_known(&name) => Some(ToolCall { name, arguments }),
        _ => None,
    }
}

/// An object, the text of one, or none.
fn arguments_of(value: Option<Value>) -> Option<Map<String, Value>> {
    match value {
        None | Some(Value::Null) => Some(Map::new()),
        Some(Value::Object(arguments)) => Some(arguments),
        Some(Value::String(text)) => serde_json::from_str(&text).ok(),
        Some(_) => None,
    }
}
