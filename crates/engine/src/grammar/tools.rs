//! The grammar of an answer that calls tools: the texts of the model's form, with the names of the
//! tools and their arguments by their schemas.

use std::fmt::Write as _;

use rustc_hash::FxHashSet;
use serde_json::{Value, json};

use super::definitions::within;
use super::regex::escape;
use super::schema;
use crate::tools::{
    Arguments, Body, Tags, Tool, ToolFormat, ValueKind, pieces, properties, resolve, value_kind,
};

/// The most tools of a grammar.
const TOOLS: usize = 1000;

/// The most nested objects of Gemma's form that are as their schemas say; deeper ones are free.
const DEPTH: usize = 16;

/// The most bytes of a grammar's text. Arguments that refer to definitions each have their own.
const MAX_LARK_BYTES: usize = 8 << 20;

/// Keywords of objects that these forms, which write each argument by itself, cannot keep to.
const WHOLE_OBJECT: [&str; 14] = [
    "allOf",
    "anyOf",
    "const",
    "dependencies",
    "dependentRequired",
    "dependentSchemas",
    "enum",
    "if",
    "maxProperties",
    "minProperties",
    "not",
    "oneOf",
    "patternProperties",
    "propertyNames",
];

/// The schema of an argument that is required and has none.
static ANY: Value = Value::Bool(true);

/// An answer of one or several calls of these tools.
#[derive(Clone, Debug, PartialEq)]
pub struct ToolGrammar {
    /// How the model writes calls.
    pub format: &'static ToolFormat,
    /// What may be called.
    pub tools: Vec<Tool>,
    /// Whether there may be several calls.
    pub is_parallel: bool,
    /// The schema of an answer that calls nothing; without it, something must be called.
    pub otherwise: Option<Value>,
}

/// The text of a control token that stands in calls, and its id.
pub(super) type ControlToken = (String, u32);

type Written<T> = Result<T, String>;

impl ToolGrammar {
    /// The grammar in llguidance's notation. `controls` are the control tokens of the vocabulary
    /// that may stand in calls.
    pub(super) fn lark(&self, controls: &[ControlToken]) -> Written<String> {
        if self.tools.is_empty() || self.tools.len() > TOOLS {
            let found = self.tools.len();
            return Err(format!("expected 1 to {TOOLS} tools to choose from, found {found}"));
        }
        let mut size = 0.0;
        for Tool { name, parameters } in &self.tools {
            let found = schema::check(parameters);
            size += found.map_err(|error| format!("the parameters of {name}: {error}"))?;
        }
        if size > schema::MAX_SIZE {
            return Err(format!(
                "the schemas of all tools together have more than {} values",
                schema::MAX_SIZE
            ));
        }
        Lark { format: self.format, controls, rules: String::new(), count: 0 }.answer(self)
    }
}

/// Writes rules.
struct Lark<'a> {
    format: &'a ToolFormat,
    controls: &'a [ControlToken],
    rules: String,
    /// Rules so far, which their names have.
    count: usize,
}

impl Lark<'_> {
    fn answer(mut self, grammar: &ToolGrammar) -> Written<String> {
        let ToolFormat { block: [open, close], between_calls, between_blocks, .. } = *self.format;
        let mut calls = Vec::new();
        // A literal would rule out an answer that begins with the same brace.
        let is_like_answer = grammar.otherwise.is_some() && open.is_empty();
        for tool in &grammar.tools {
            calls.push(match self.format.body {
                Body::Objects if is_like_answer => self.object(tool)?,
                _ => self.call(tool)?,
            });
        }
        let call = self.rule(&calls.join(" | "));
        let is_repeated = |between: Option<&'static str>| between.filter(|_| grammar.is_parallel);
        let calls = match is_repeated(between_calls) {
            Some(between) => format!("{call} ({} {call})*", self.text(between)),
            None => call,
        };
        let (open, close) = (self.text(open), self.text(close));
        let block = self.rule(&format!("{open} {calls} {close}"));
        // The prompt may have the start of the first.
        let first = match self.format.is_open {
            true => self.rule(&format!("{calls} {close}")),
            false => block.clone(),
        };
        let more = match is_repeated(between_blocks) {
            Some(between) => format!("({} {block})*", self.text(between)),
            None => String::new(),
        };
        let otherwise = match &grammar.otherwise {
            // With what the model writes before an answer that is no call.
            Some(schema) => format!(" | {} {}", self.exact(self.format.answer), self.json(schema)?),
            None => String::new(),
        };
        // Models put white space before a call.
        Ok(format!(
            "start: SPACE? {first} {more}{otherwise}\nSPACE: /[ \\n]{{1,4}}/\n{}",
            self.rules
        ))
    }

    fn call(&mut self, tool: &Tool) -> Written<String> {
        let [before, between, behind] = self.format.call.map(|text| self.text(text));
        let arguments = self.arguments(tool);
        let arguments =
            arguments.map_err(|error| format!("the parameters of {}: {error}", tool.name))?;
        let name = quoted(&tool.name);
        Ok(self.rule(&format!("{before} {name} {between} {arguments} {behind}")))
    }

    /// A call as JSON, of a form that has nothing but an object.
    fn object(&mut self, tool: &Tool) -> Written<String> {
        let key = self.format.call[1].split('"').nth(2).unwrap_or_default();
        let mut parameters = within(&tool.parameters, &tool.parameters)?;
        let keywords = parameters.as_object_mut();
        let definitions = keywords.and_then(|it| it.remove("$defs")).unwrap_or_else(|| json!({}));
        let object = self.json(&json!({
            "type": "object",
            "properties": { "name": { "const": tool.name }, key: parameters },
            "required": ["name", key],
            "additionalProperties": false,
            "$defs": definitions,
        }));
        object.map_err(|error| format!("the parameters of {}: {error}", tool.name))
    }

    fn arguments(&mut self, tool: &Tool) -> Written<String> {
        let format = self.format;
        match &format.body {
            Body::Objects | Body::Named(Arguments::Json) => self.json(&tool.parameters),
            Body::Named(Arguments::Tagged(tags)) => {
                let mut all = String::new();
                for (key, schema, is_required) in root_arguments(&tool.parameters)? {
                    let argument = self.tagged(tags, key, schema, &tool.parameters)?;
                    let argument = self.rule(&argument);
                    let mark = if is_required { "" } else { "?" };
                    let _ = write!(all, " {argument}{mark}");
                }
                Ok(if all.is_empty() { quoted("") } else { all })
            }
            Body::Named(Arguments::Gemma) => {
                root_arguments(&tool.parameters)?;
                self.gemma(resolve(&tool.parameters, &tool.parameters), &tool.parameters, 0)
            }
            Body::Named(Arguments::Python) => {
                let mut all = Vec::new();
                for (key, schema, is_required) in root_arguments(&tool.parameters)? {
                    let value = self.json(&within(schema, &tool.parameters)?)?;
                    all.push((format!("{} {value}", quoted(&format!("{key}="))), is_required));
                }
                Ok(self.list(&all, ", "))
            }
        }
    }

    /// An argument in tags.
    fn tagged(&mut self, tags: &Tags, key: &str, schema: &Value, root: &Value) -> Written<String> {
        let [string, other] = tags.value;
        let close = tags.close.replace("{key}", key);
        let open = format!("{} {} {}", self.text(tags.open), quoted(key), self.text(tags.key_end));
        if value_kind(schema, root) == ValueKind::Json {
            let kind = match schema.get("type").and_then(Value::as_str) {
                Some("integer") | None => "number",
                Some(kind) => kind,
            };
            let other = self.text(&other.replace("{type}", kind));
            let value = self.json(&within(schema, root)?)?;
            return Ok(format!("{open} {other} {value} {}", self.text(&close)));
        }
        let string = self.text(string);
        let value = match strings(schema) {
            Some(all) => format!("({}) {}", all.join(" | "), self.text(&close)),
            None => self.free_text(&close),
        };
        Ok(format!("{open} {string} {value}"))
    }

    /// Any text up to a closing one, and that.
    fn free_text(&mut self, close: &str) -> String {
        let mut parts = self.split(close).into_iter();
        let (first, _) = parts.next().unwrap_or_default();
        let name = self.name();
        // Without a token in it, the text ends at the first closing one. With one, it may have the
        // same characters.
        let Some((text, token)) = parts.next() else {
            let _ = writeln!(self.rules, "{name}[suffix={}]: /(?s:.*)/", quoted(first.trim_end()));
            let behind = &first[first.trim_end().len()..];
            return format!("{name} {}", self.text(behind));
        };
        let rest: Vec<_> = [(text, token)].into_iter().chain(parts).collect();
        let upper = name.to_uppercase();
        let mark = if first.is_empty() { "?" } else { "" };
        let least = if first.is_empty() { "+" } else { "*" };
        let _ = writeln!(self.rules, "{upper}: /(?s:.{least}){}/", escape(first));
        let mut out = format!("{upper}{mark}");
        for (text, token) in rest {
            let _ = write!(out, " <[{}]> {}", token.unwrap_or_default(), spaced(text));
        }
        out
    }

    /// A value as Gemma writes it.
    fn gemma(&mut self, schema: &Value, root: &Value, depth: usize) -> Written<String> {
        const QUOTE: &str = "<|\"|>";
        let quote = self.text(QUOTE);
        let kind = schema.get("type").and_then(Value::as_str);
        let rule = match kind {
            Some("object") if depth < DEPTH && properties(schema).is_some() => {
                let mut all = Vec::new();
                for (key, schema, is_required) in arguments(schema) {
                    let value = self.gemma(schema, root, depth + 1)?;
                    all.push((format!("{} {value}", quoted(&format!("{key}:"))), is_required));
                }
                format!("\"{{\" {} \"}}\"", self.list(&all, ","))
            }
            Some("array") if depth < DEPTH && schema["items"].is_object() => {
                let value = self.gemma(&schema["items"], root, depth + 1)?;
                format!("\"[\" ({value} (\",\" {value})*)? \"]\"")
            }
            _ if value_kind(schema, root) == ValueKind::Text => match strings(schema) {
                Some(all) => format!("{quote} ({}) {quote}", all.join(" | ")),
                None => format!("{quote} {}", self.free_text(QUOTE)),
            },
            Some("number" | "integer" | "boolean" | "null") => self.json(&within(schema, root)?)?,
            _ => {
                let (value, pair) = (self.name(), self.name());
                let text = self.free_text(QUOTE);
                let plain = self.json(&json!({ "type": ["number", "boolean", "null"] }))?;
                let _ = writeln!(
                    self.rules,
                    "{value}: {quote} {text} | {plain} | \"[\" ({value} (\",\" {value})*)? \"]\" \
                     | {object}\n{pair}: /[A-Za-z_][A-Za-z0-9_]*/ \":\" {value}",
                    object = format_args!("\"{{\" ({pair} (\",\" {pair})*)? \"}}\""),
                );
                // The arguments themselves are an object.
                match depth {
                    0 => format!("\"{{\" ({pair} (\",\" {pair})*)? \"}}\""),
                    _ => value,
                }
            }
        };
        Ok(self.rule(&rule))
    }

    /// Some of these in their order, all that are required among them.
    fn list(&mut self, items: &[(String, bool)], separator: &str) -> String {
        let separator = quoted(separator);
        // What may follow where one has come before, and where none has, from the end on.
        let (mut more, mut first) = (quoted(""), quoted(""));
        for (item, is_required) in items.iter().rev() {
            let item = self.rule(item);
            let skipped = |rest: &str| match is_required {
                true => String::new(),
                false => format!(" | {rest}"),
            };
            let (next_first, next_more) = (
                format!("{item} {more}{}", skipped(&first)),
                format!("{separator} {item} {more}{}", skipped(&more)),
            );
            (first, more) = (self.rule(&next_first), self.rule(&next_more));
        }
        first
    }

    /// JSON by a schema.
    fn json(&mut self, schema: &Value) -> Written<String> {
        let schema = schema::prepared(schema)?;
        let rule = self.rule(&format!("%json {schema}"));
        if self.rules.len() > MAX_LARK_BYTES {
            return Err(format!(
                "the schemas of all tools together have more than {MAX_LARK_BYTES} bytes, with the \
                 definitions for each argument"
            ));
        }
        Ok(rule)
    }

    fn name(&mut self) -> String {
        self.count += 1;
        format!("r{}", self.count)
    }

    fn rule(&mut self, body: &str) -> String {
        let name = self.name();
        let _ = writeln!(self.rules, "{name}: {body}");
        name
    }

    /// A text of the form: control tokens are tokens, placeholders are filled, and line breaks at
    /// its ends may be left out.
    fn text(&self, text: &str) -> String {
        let mut out = String::new();
        for (i, piece) in pieces(text).enumerate() {
            let filled = match piece {
                "{n}" if i % 2 == 1 => "/[0-9]{1,3}/",
                "{id}" if i % 2 == 1 => "/[a-zA-Z0-9]{9}/",
                "{json}" if i % 2 == 1 => "\" <|constrain|>json\"",
                "{call_id}" if i % 2 == 1 => {
                    let _ = write!(out, " {} /[a-zA-Z0-9]{{9}}/", self.text("[CALL_ID]"));
                    continue;
                }
                _ if i % 2 == 1 => continue,
                text => {
                    for (text, token) in self.split(text) {
                        if let Some(token) = token {
                            let _ = write!(out, " <[{token}]>");
                        }
                        let _ = write!(out, " {}", spaced(text));
                    }
                    continue;
                }
            };
            let _ = write!(out, " {filled}");
        }
        out
    }

    /// A text of which nothing may be left out, without placeholders.
    fn exact(&self, text: &str) -> String {
        let token = |token: Option<u32>| token.map_or(String::new(), |id| format!("<[{id}]> "));
        let parts = self.split(text).into_iter();
        let parts: Vec<_> =
            parts.map(|(text, id)| format!("{}{}", token(id), quoted(text))).collect();
        parts.join(" ")
    }

    /// Pieces of a text, each with the token before it; the first has none.
    fn split<'t>(&self, text: &'t str) -> Vec<(&'t str, Option<u32>)> {
        let mut parts = Vec::new();
        let (mut rest, mut before) = (text, None);
        loop {
            let found = self.controls.iter().filter_map(|(marker, id)| {
                let at = rest.find(marker.as_str())?;
                Some((at, std::cmp::Reverse(marker.len()), *id))
            });
            let Some((at, length, id)) = found.min() else { break };
            parts.push((&rest[..at], before));
            (rest, before) = (&rest[at + length.0..], Some(id));
        }
        parts.push((rest, before));
        parts
    }
}

/// The arguments of a tool, in a form that writes each by itself.
fn root_arguments(parameters: &Value) -> Written<Vec<(&str, &Value, bool)>> {
    let whole = resolve(parameters, parameters);
    let has = |key: &str| parameters.get(key).is_some();
    let mut wrong = WHOLE_OBJECT.into_iter().find(|key| has(key) || whole.get(*key).is_some());
    let others = whole.get("additionalProperties").and_then(Value::as_object);
    if others.is_some_and(|schema| !schema.is_empty()) {
        wrong = Some("additionalProperties");
    }
    // Keywords beside a reference are not looked at.
    if has("$ref") && (has("properties") || has("required")) {
        wrong = Some("$ref");
    }
    match wrong {
        None => Ok(arguments(whole)),
        Some(key) => Err(format!("expected properties instead of {key} in this model's form")),
    }
}

/// The arguments of an object: their names, schemas, and whether they are required.
fn arguments(schema: &Value) -> Vec<(&str, &Value, bool)> {
    let all = schema.get("required").and_then(Value::as_array).into_iter().flatten();
    let all: Vec<&str> = all.filter_map(Value::as_str).collect();
    let mut required: FxHashSet<&str> = all.iter().copied().collect();
    let mut arguments = Vec::new();
    for (key, schema) in properties(schema).into_iter().flatten() {
        arguments.push((key.as_str(), schema, required.remove(key.as_str())));
    }
    // Those that nothing is said about.
    let others = all.into_iter().filter(|key| required.remove(key));
    arguments.extend(others.map(|key| (key, &ANY, true)));
    arguments
}

/// The only strings that a schema accepts, quoted.
fn strings(schema: &Value) -> Option<Vec<String>> {
    let one = schema.get("const").map(std::slice::from_ref);
    let all = one.or_else(|| schema.get("enum")?.as_array().map(Vec::as_slice))?;
    all.iter().map(|value| value.as_str().map(quoted)).collect()
}

/// A text whose line breaks at the ends may be left out.
fn spaced(text: &str) -> String {
    let inner = text.trim_matches('\n');
    let start = text.len() - text.trim_start_matches('\n').len();
    let (before, behind) = match inner.is_empty() {
        true => (text, ""),
        false => (&text[..start], &text[start + inner.len()..]),
    };
    let optional = |text: &str| match text.is_empty() {
        true => String::new(),
        false => format!("({})?", quoted(text)),
    };
    format!("{} {} {}", optional(before), quoted(inner), optional(behind))
}

/// A text as a literal.
fn quoted(text: &str) -> String {
    Value::from(text).to_string().replace('\u{7f}', "\\u007f")
}
