//! One block of calls, from behind the text that begins it: whether it is whole, and its calls.

use serde_json::{Map, Value};

use super::bodies::{Arguments, Body, Tags};
use super::cursor::{Cursor, Found, Stop};
use super::formats::ToolFormat;
use super::literals::{self, Style};
use super::{Tool, ToolCall, objects, values};

/// The most calls of an answer: a block with more is content, and so is what comes behind them.
pub(super) const MAX_CALLS: usize = 1024;

/// What a text is as a block of calls.
#[derive(Debug, PartialEq)]
pub(super) enum Outcome {
    /// The calls, and the length of the block in bytes.
    Whole(Vec<ToolCall>, usize),
    /// It may become one.
    Partial,
    /// It is none, or has a call of an unknown tool.
    Wrong,
}

/// Reads a block. With `is_last`, nothing more will come.
pub(super) fn read(format: &ToolFormat, tools: &[Tool], text: &str, is_last: bool) -> Outcome {
    let mut cursor = Cursor { text, at: 0 };
    let found = match &format.body {
        Body::Objects => objects::calls(format, tools, &mut cursor),
        Body::Named(arguments) => named_calls(format, arguments, tools, &mut cursor),
    };
    match found {
        Ok((calls, _)) if calls.is_empty() || calls.len() > MAX_CALLS => Outcome::Wrong,
        Ok((calls, is_closed)) if is_closed || is_last => Outcome::Whole(calls, cursor.at),
        Ok(_) => Outcome::Partial,
        Err(Stop::Wrong) => Outcome::Wrong,
        Err(Stop::End) if is_last => Outcome::Wrong,
        Err(Stop::End) => Outcome::Partial,
    }
}

/// Calls that begin with their names, and whether the end of the block follows.
fn named_calls(
    format: &ToolFormat,
    arguments: &Arguments,
    tools: &[Tool],
    cursor: &mut Cursor,
) -> Found<(Vec<ToolCall>, bool)> {
    let is_python = *arguments == Arguments::Python;
    let is_between = |c: char| c.is_whitespace() || is_python && "[],".contains(c);
    let [before, between, behind] = format.call;
    let mut calls = Vec::new();
    loop {
        let at = cursor.at;
        cursor.skip(is_between);
        if !format.end.is_empty() && cursor.take(format.end) {
            return Ok((calls, true));
        }
        let is_first = calls.is_empty();
        if cursor.rest().is_empty() && !is_first {
            return Ok((calls, false));
        }
        if !cursor.rest().is_empty() && format.end.starts_with(cursor.rest()) {
            return Err(Stop::End);
        }
        if !is_first && format.between_calls.is_none() {
            // What follows is no part of the block.
            cursor.at = at;
            return match format.end.is_empty() {
                true => Ok((calls, true)),
                false => Err(Stop::Wrong),
            };
        }
        if calls.len() > MAX_CALLS {
            return Err(Stop::Wrong);
        }
        match cursor.expect_written(before) {
            // Behind the calls of a block without an end may be other text.
            Err(Stop::Wrong) if !is_first && format.end.is_empty() => {
                cursor.at = at;
                return Ok((calls, true));
            }
            result => result?,
        }
        cursor.skip_space();
        let tool = tool_at(tools, cursor)?;
        // A placeholder may be any text, but not the rest of a name.
        if between.starts_with('{') && cursor.rest().starts_with(Tool::is_name_char) {
            return Err(Stop::Wrong);
        }
        cursor.expect_written(between)?;
        let arguments = read_arguments(format, arguments, tool, cursor)?;
        match cursor.expect_written(behind) {
            // The end of the answer may be the end of a call that shows where it ends.
            Err(Stop::End) if !matches!(format.body, Body::Named(Arguments::Tagged(_))) => {
                cursor.at = cursor.text.len();
            }
            result => result?,
        }
        calls.push(ToolCall { name: tool.name.clone(), arguments });
    }
}

/// The tool whose name comes next: the longest, as one may begin with another.
fn tool_at<'a>(tools: &'a [Tool], cursor: &mut Cursor) -> Found<&'a Tool> {
    let rest = cursor.rest();
    let is_next = |tool: &&Tool| rest.starts_with(&tool.name);
    let tool = tools.iter().filter(is_next).max_by_key(|tool| tool.name.len());
    let may_come = |tool: &Tool| tool.name.len() > rest.len() && tool.name.starts_with(rest);
    if tools.iter().any(may_come) {
        return Err(Stop::End);
    }
    let tool = tool.ok_or(Stop::Wrong)?;
    cursor.at += tool.name.len();
    Ok(tool)
}

fn read_arguments(
    format: &ToolFormat,
    arguments: &Arguments,
    tool: &Tool,
    cursor: &mut Cursor,
) -> Found<Map<String, Value>> {
    match arguments {
        Arguments::Json => {
            cursor.skip_space();
            match cursor.json()? {
                Value::Object(arguments) => Ok(arguments),
                _ => Err(Stop::Wrong),
            }
        }
        Arguments::Tagged(tags) => tagged(format, tags, tool, cursor),
        Arguments::Gemma => match literals::value(Style::Gemma, cursor)? {
            Value::Object(arguments) => Ok(arguments),
            _ => Err(Stop::Wrong),
        },
        Arguments::Python => literals::keyword_arguments(cursor),
    }
}

/// Arguments in tags, up to what is written behind them.
fn tagged(
    format: &ToolFormat,
    tags: &Tags,
    tool: &Tool,
    cursor: &mut Cursor,
) -> Found<Map<String, Value>> {
    let behind = match format.call[2].trim() {
        "" => format.end,
        behind => behind,
    };
    let mut arguments = Map::new();
    loop {
        cursor.skip_space();
        if cursor.rest().starts_with(behind) {
            return Ok(arguments);
        }
        if behind.starts_with(cursor.rest()) {
            return Err(Stop::End);
        }
        cursor.expect(tags.open)?;
        let (first, more) = tags.key_end.split_once('\n').unwrap_or((tags.key_end, ""));
        let end = cursor.rest().find(first).ok_or(Stop::End)?;
        let key = &cursor.rest()[..end];
        cursor.at += end + first.len();
        cursor.expect_written(more)?;
        let [string, other] = tags.value;
        let mut is_string = None;
        if string == other {
            cursor.take(string);
        } else if cursor.take(string) {
            is_string = Some(true);
        } else if string.starts_with(cursor.rest()) {
            return Err(Stop::End);
        } else {
            is_string = Some(false);
            cursor.expect_written(other)?;
        }
        let close = tags.close.replace("{key}", key);
        let text = value_text(cursor, &close, [tags.open, behind])?;
        let schema = values::properties(&tool.parameters).and_then(|all| all.get(key));
        let value = match is_string {
            Some(true) => Value::String(text.to_owned()),
            Some(false) => serde_json::from_str(text).map_err(|_| Stop::Wrong)?,
            None => values::typed(text, schema, &tool.parameters),
        };
        arguments.insert(key.to_owned(), value);
    }
}

/// The text of a value: up to the first closing tag behind which an argument or the end of the call
/// follows, as the value may have such a tag in it.
fn value_text<'a>(cursor: &mut Cursor<'a>, close: &str, next: [&str; 2]) -> Found<&'a str> {
    // White space before the tag belongs to it where it is written so.
    let (newline, close) = match close.trim_end().strip_prefix('\n') {
        Some(close) => ("\n", close),
        None => ("", close.trim_end()),
    };
    let rest = cursor.rest();
    let mut from = 0;
    while let Some(found) = rest[from..].find(close) {
        let (end, behind) = (from + found, rest[from + found + close.len()..].trim_start());
        if next.iter().any(|next| behind.starts_with(next)) {
            cursor.at += end + close.len();
            let text = &rest[..end];
            return Ok(text.strip_suffix(newline).unwrap_or(text));
        }
        if next.iter().any(|next| next.starts_with(behind)) {
            return Err(Stop::End);
        }
        from = end + close.len();
    }
    Err(Stop::End)
}
