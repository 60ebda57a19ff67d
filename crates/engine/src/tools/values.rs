//! Values without quotes, which are read as a tool's schema says.

use serde_json::{Map, Value};

/// The most references that are followed one after the other.
const REFERENCES: usize = 8;

/// How a value without quotes is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ValueKind {
    /// A string: the text as it is.
    Text,
    /// JSON that is no string.
    Json,
    /// Either, or the schema does not say.
    Either,
}

/// The schemas of the arguments by name, if the schema of the whole says them.
pub(crate) fn properties(parameters: &Value) -> Option<&Map<String, Value>> {
    resolve(parameters, parameters).get("properties")?.as_object()
}

/// How the value of a schema within `root` is read.
pub(crate) fn value_kind(schema: &Value, root: &Value) -> ValueKind {
    let schema = resolve(schema, root);
    let of = |kinds: Vec<ValueKind>| {
        let first = kinds.first().copied().unwrap_or(ValueKind::Either);
        if kinds.iter().all(|kind| *kind == first) { first } else { ValueKind::Either }
    };
    let of_type = |name: &Value| match name.as_str() {
        Some("string") => ValueKind::Text,
        Some(_) => ValueKind::Json,
        None => ValueKind::Either,
    };
    let of_value = |value: &Value| match value {
        Value::String(_) => ValueKind::Text,
        _ => ValueKind::Json,
    };
    match (schema.get("type"), schema.get("const"), schema.get("enum")) {
        (Some(Value::Array(names)), ..) => of(names.iter().map(of_type).collect()),
        (Some(name), ..) => of_type(name),
        (None, Some(value), _) => of_value(value),
        (None, None, Some(Value::Array(values))) => of(values.iter().map(of_value).collect()),
        _ => ["anyOf", "oneOf"].iter().find_map(|keyword| schema.get(keyword)?.as_array()).map_or(
            ValueKind::Either,
            |options| {
                // One level is enough: deeper options may be either.
                let option = |option: &Value| match resolve(option, root).get("type") {
                    Some(name) => of_type(name),
                    None => ValueKind::Either,
                };
                of(options.iter().map(option).collect())
            },
        ),
    }
}

/// A value from its text.
pub(super) fn typed(text: &str, schema: Option<&Value>, root: &Value) -> Value {
    let kind = schema.map_or(ValueKind::Either, |schema| value_kind(schema, root));
    let as_text = || Value::String(text.to_owned());
    match kind {
        ValueKind::Text => as_text(),
        // What is not JSON is left to the tool to refuse. Models write booleans as Python does.
        ValueKind::Json | ValueKind::Either => match text.trim() {
            "True" => Value::Bool(true),
            "False" => Value::Bool(false),
            "None" => Value::Null,
            text => serde_json::from_str(text).unwrap_or_else(|_| as_text()),
        },
    }
}

/// What a schema refers to, or itself.
pub(crate) fn resolve<'a>(mut schema: &'a Value, root: &'a Value) -> &'a Value {
    for _ in 0..REFERENCES {
        let reference = schema.get("$ref").and_then(Value::as_str);
        let pointer = reference.and_then(|reference| reference.strip_prefix('#'));
        match pointer.and_then(|pointer| root.pointer(pointer)) {
            Some(target) => schema = target,
            None => break,
        }
    }
    schema
}
