//! Calls that are JSON objects, or arrays of them: `{"name": …, "arguments": {…}}`. Families name
//! the two keys differently, and models mix them up, so each is accepted everywhere.

use serde_json::{Map, Value};

use super::cursor::{Cursor, Found, Stop};
use super::formats::ToolFormat;
use super::{Tool, ToolCall};

/// The keys of a tool's name, and of its arguments.
const NAMES: [&str; 3] = ["name", "tool_name", "function"];
const ARGUMENTS: [&str; 2] = ["arguments", "parameters"];

/// Further keys of a call.
const OTHERS: [&str; 3] = ["type", "id", "tool_call_id"];

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
        let rest = cursor.rest();
        match cursor.json() {
            Err(Stop::End) if !may_be_call(rest, format, tools) => return Err(Stop::Wrong),
            result => match result? {
                Value::Array(values) => {
                    for value in values {
                        calls.push(call(value, tools).ok_or(Stop::Wrong)?);
                    }
                }
                value => calls.push(call(value, tools).ok_or(Stop::Wrong)?),
            },
        }
    }
}

/// Whether the start of an object, or of an array of objects, may become a call, by the keys and
/// the name that the first object has.
fn may_be_call(text: &str, format: &ToolFormat, tools: &[Tool]) -> bool {
    let is_tool = |name: &str| tools.iter().any(|tool| tool.name == name);
    let mut cursor = Cursor { text, at: 0 };
    cursor.skip(|c| c.is_whitespace() || c == '[');
    if !cursor.take("{") {
        return cursor.rest().is_empty();
    }
    let mut is_first = true;
    loop {
        cursor.skip(|c| c.is_whitespace() || c == ',');
        if cursor.rest().starts_with('}') {
            return true;
        }
        let key = match cursor.json() {
            Ok(Value::String(key)) => key,
            result => return result == Err(Stop::End),
        };
        cursor.skip_space();
        if !cursor.take(":") {
            return cursor.rest().is_empty();
        }
        // Behind a marker, models may begin with keys of their own. An answer without one may be
        // an object that is no call.
        let is_bare = is_first && !format.bare.is_empty();
        let keys = [&NAMES[..], &ARGUMENTS, &OTHERS].concat();
        if is_bare && !keys.contains(&key.as_str()) && !is_tool(&key) {
            return false;
        }
        is_first = false;
        let is_name = NAMES.contains(&key.as_str()) && !is_tool(&key);
        match cursor.json() {
            Ok(Value::String(name)) if is_name && !is_tool(&name) => return false,
            Ok(Value::String(_) | Value::Object(_)) => {}
            Ok(_) if is_name => return false,
            Ok(_) => {}
            Err(stop) => return stop == Stop::End,
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
        // Arguments under another key, or beside the name, would be lost.
        let is_usual = |key: &str| NAMES.contains(&key) || OTHERS.contains(&key);
        if arguments.is_none() && !fields.keys().all(|key| is_usual(key)) {
            return None;
        }
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
