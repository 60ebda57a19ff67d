//! Values that are almost JSON: those of Gemma 4 and of Python.

use std::str::Chars;

use serde_json::{Map, Number, Value};

use super::cursor::{Cursor, Found, Stop};

/// The most nested values.
const DEPTH: usize = 64;

/// Gemma's quotes of strings.
const QUOTE: &str = "<|\"|>";

/// Whose values they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Style {
    Gemma,
    Python,
}

/// A value.
pub(super) fn value(style: Style, cursor: &mut Cursor) -> Found<Value> {
    nested(style, cursor, 0)
}

/// Python's `key=value, …`, up to the closing parenthesis.
pub(super) fn keyword_arguments(cursor: &mut Cursor) -> Found<Map<String, Value>> {
    let mut arguments = Map::new();
    loop {
        cursor.skip(|c| c.is_whitespace() || c == ',');
        if cursor.rest().starts_with(')') {
            return Ok(arguments);
        }
        let key = until(cursor, &['=', ')', ','])?.trim().to_owned();
        cursor.expect("=")?;
        arguments.insert(key, value(Style::Python, cursor)?);
    }
}

fn nested(style: Style, cursor: &mut Cursor, depth: usize) -> Found<Value> {
    if depth > DEPTH {
        return Err(Stop::Wrong);
    }
    cursor.skip_space();
    if style == Style::Gemma && cursor.take(QUOTE) {
        let end = cursor.rest().find(QUOTE).ok_or(Stop::End)?;
        let text = &cursor.rest()[..end];
        cursor.at += end + QUOTE.len();
        return Ok(Value::String(text.to_owned()));
    }
    match cursor.rest().chars().next().ok_or(Stop::End)? {
        '{' => {
            cursor.at += 1;
            let mut map = Map::new();
            while !at_close(cursor, "}")? {
                let key = key(style, cursor, depth)?;
                cursor.skip_space();
                cursor.expect(":")?;
                map.insert(key, nested(style, cursor, depth + 1)?);
            }
            Ok(Value::Object(map))
        }
        '[' => {
            cursor.at += 1;
            let mut values = Vec::new();
            while !at_close(cursor, "]")? {
                values.push(nested(style, cursor, depth + 1)?);
            }
            Ok(Value::Array(values))
        }
        quote @ ('"' | '\'') => string(cursor, quote),
        _ => bare(style, cursor),
    }
}

/// Skips the comma before another element, or the end.
fn at_close(cursor: &mut Cursor, close: &str) -> Found<bool> {
    cursor.skip(|c| c.is_whitespace() || c == ',');
    if cursor.rest().is_empty() {
        return Err(Stop::End);
    }
    Ok(cursor.take(close))
}

/// The key of an object, which has quotes in Python and none in Gemma's form.
fn key(style: Style, cursor: &mut Cursor, depth: usize) -> Found<String> {
    if style == Style::Gemma && !cursor.rest().starts_with(QUOTE) {
        return Ok(until(cursor, &[':', '}'])?.trim().to_owned());
    }
    match nested(style, cursor, depth + 1)? {
        Value::String(key) => Ok(key),
        _ => Err(Stop::Wrong),
    }
}

/// The text up to one of these characters.
fn until<'a>(cursor: &mut Cursor<'a>, ends: &[char]) -> Found<&'a str> {
    let rest = cursor.rest();
    let end = rest.find(ends).ok_or(Stop::End)?;
    cursor.at += end;
    Ok(&rest[..end])
}

/// A string with escapes.
fn string(cursor: &mut Cursor, quote: char) -> Found<Value> {
    let mut text = String::new();
    let rest = cursor.rest();
    let mut chars = rest.chars();
    chars.next();
    while let Some(c) = chars.next() {
        match c {
            c if c == quote => {
                cursor.at = cursor.text.len() - chars.as_str().len();
                return Ok(Value::String(text));
            }
            '\\' => {
                let escape = chars.next().ok_or(Stop::End)?;
                let digits = match escape {
                    'x' => 2,
                    'u' => 4,
                    'U' => 8,
                    _ => 0,
                };
                if digits == 0 {
                    text.push(unescaped(escape));
                    continue;
                }
                let code = code(&mut chars, digits)?;
                text.push(match code {
                    0xd800..=0xdbff => paired(code, &mut chars)?,
                    code => char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER),
                });
            }
            c => text.push(c),
        }
    }
    Err(Stop::End)
}

/// The number that comes next, of hexadecimal digits.
fn code(chars: &mut Chars, digits: usize) -> Found<u32> {
    let text = chars.as_str();
    let code = text.get(..digits).ok_or(Stop::End)?;
    *chars = text[digits..].chars();
    u32::from_str_radix(code, 16).map_err(|_| Stop::Wrong)
}

/// The character of a first surrogate and the second one that comes next, as in JSON.
fn paired(first: u32, chars: &mut Chars) -> Found<char> {
    let mut behind = chars.clone();
    if behind.next() != Some('\\') || behind.next() != Some('u') {
        return Ok(char::REPLACEMENT_CHARACTER);
    }
    let second = code(&mut behind, 4)?;
    if !(0xdc00..=0xdfff).contains(&second) {
        return Ok(char::REPLACEMENT_CHARACTER);
    }
    *chars = behind;
    let code = 0x10000 + ((first - 0xd800) << 10) + (second - 0xdc00);
    Ok(char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER))
}

fn unescaped(escape: char) -> char {
    match escape {
        'n' => '\n',
        't' => '\t',
        'r' => '\r',
        'b' => '\u{8}',
        'f' => '\u{c}',
        other => other,
    }
}

/// A number or a word.
fn bare(style: Style, cursor: &mut Cursor) -> Found<Value> {
    let word = until(cursor, &[',', '}', ']', ')'])?.trim();
    let number = || serde_json::from_str::<Number>(word).ok().map(Value::Number);
    match word {
        "true" | "True" => Ok(Value::Bool(true)),
        "false" | "False" => Ok(Value::Bool(false)),
        "null" | "None" => Ok(Value::Null),
        word => number().map_or_else(
            || match style {
                // Gemma now and then leaves the quotes out.
                Style::Gemma if !word.is_empty() => Ok(Value::String(word.to_owned())),
                _ => Err(Stop::Wrong),
            },
            Ok,
        ),
    }
}
