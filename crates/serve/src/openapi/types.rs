//! The schemas of values: their types and ranges.

use serde_json::{Value, json};

/// The most tokens that a request can ask for.
pub(super) const TOKENS: i64 = u32::MAX as i64;

/// A text, or at most `most` of them.
pub(super) fn stop(most: i64) -> Value {
    let kinds = ["string", "array", "null"];
    json!({ "type": kinds, "items": { "type": "string" }, "maxItems": most })
}

/// The most tokens of an answer; below zero for no limit.
pub(super) fn limit() -> Value {
    let mut limit = integer(-2, TOKENS);
    limit["not"] = json!({ "const": 0 });
    limit
}

pub(super) fn keep_alive() -> Value {
    json!({ "type": ["string", "number", "null"] })
}

pub(super) fn schema(name: &str) -> Value {
    json!({ "$ref": format!("#/components/schemas/{name}") })
}

pub(super) fn input() -> Value {
    schema("Input")
}

pub(super) fn integer(least: i64, most: i64) -> Value {
    json!({ "type": ["integer", "null"], "minimum": least, "maximum": most })
}

pub(super) fn number(least: f64, most: f64) -> Value {
    json!({ "type": ["number", "null"], "minimum": least, "maximum": most })
}

pub(super) fn boolean() -> Value {
    json!({ "type": ["boolean", "null"] })
}

pub(super) fn text() -> Value {
    json!({ "type": ["string", "null"] })
}

pub(super) fn object() -> Value {
    json!({ "type": ["object", "null"] })
}

/// A JSON schema.
pub(super) fn json_schema() -> Value {
    json!({ "type": ["object", "boolean", "null"] })
}

/// What an answer must be; the schema is in the field `schema`, or within the object of this name.
pub(super) fn format(name: &str) -> Value {
    let schema = match name {
        "schema" => json_schema(),
        _ => json!({ "type": "object", "properties": { "schema": json_schema() } }),
    };
    json!({
        "type": ["object", "null"],
        "required": ["type"],
        "properties": { "type": { "enum": ["text", "json_object", "json_schema"] }, name: schema },
    })
}

/// The fields of OpenAI, llama-server and vLLM that say what an answer must be, of which a request
/// has one.
pub(super) fn constraints() -> Value {
    let choice = json!({ "type": ["array", "null"], "items": { "type": "string" } });
    let json = json!({ "type": ["object", "string", "boolean", "null"] });
    json!({
        "response_format": format("json_schema"),
        "json_schema": json_schema(),
        "grammar": text(),
        "structured_outputs": {
            "type": ["object", "null"],
            "properties": {
                "json": json,
                "json_object": boolean(),
                "regex": text(),
                "choice": choice,
                "grammar": text(),
            },
        },
        "guided_json": json,
        "guided_regex": text(),
        "guided_choice": choice,
        "guided_grammar": text(),
    })
}

/// What a model may call; their forms differ between the interfaces.
pub(super) fn tool_list() -> Value {
    json!({ "type": ["array", "null"], "maxItems": 1000, "items": { "type": "object" } })
}

/// OpenAI's fields about tools.
pub(super) fn tools() -> Value {
    json!({
        "tools": tool_list(),
        "tool_choice": { "type": ["string", "object", "null"] },
        "parallel_tool_calls": boolean(),
    })
}

pub(super) fn stream_options() -> Value {
    json!({ "type": ["object", "null"], "properties": { "include_usage": boolean() } })
}

/// A text, several texts, or token ids.
pub(super) fn prompt() -> Value {
    json!({
        "type": ["string", "array"],
        "minItems": 1,
        "maxItems": 256,
        "items": { "type": ["string", "integer"], "minimum": 0 },
    })
}

/// A text, several texts, or token ids.
pub(super) fn texts() -> Value {
    json!({
        "type": ["string", "array"],
        "minItems": 1,
        "minLength": 1,
        "items": { "type": ["string", "integer"], "minLength": 1, "minimum": 0 },
    })
}

pub(super) fn messages() -> Value {
    json!({ "type": "array", "minItems": 1, "items": schema("Message") })
}

pub(super) fn message() -> Value {
    let part = json!({
        "type": "object",
        "required": ["type", "text"],
        "properties": { "type": { "const": "text" }, "text": { "type": "string" } },
    });
    json!({
        "type": "object",
        "required": ["role", "content"],
        "properties": {
            "role": { "enum": ["system", "user", "assistant"] },
            "content": { "type": ["string", "array"], "items": part },
        },
    })
}
