//! The fields that say what an answer must be, of all interfaces. Each becomes a constraint of the
//! engine, which checks its schema, regular expression or grammar.

use std::sync::Arc;

use bodkin_engine::{Constraint, Grammar};
use serde_json::Value;

use crate::error::{ApiError, Result};
use crate::fields::Fields;

/// A request's constraint, as the engine takes it.
pub(crate) type Found = Option<Arc<Constraint>>;

/// The most texts of which an answer must be one.
const CHOICES: usize = 4096;

/// Those of OpenAI's chat and completions, with what llama-server and vLLM add to them.
pub(crate) fn openai(fields: &mut Fields) -> Result<Found> {
    let format = object(fields, "response_format")?;
    let format = format.map(|format| typed(format, "json_schema")).transpose()?.flatten();
    let structured = object(fields, "structured_outputs")?;
    let mut found = vec![
        ("response_format", format),
        ("json_schema", schema(fields, "json_schema")?),
        ("grammar", gbnf(fields, "grammar")?),
    ];
    if let Some(mut outputs) = structured {
        outputs.refuse("structural_tag")?;
        for (name, constraint) in [
            ("structured_outputs.json", json(&mut outputs, "json")?),
            ("structured_outputs.json_object", any_object(&mut outputs)?),
            ("structured_outputs.regex", regex(&mut outputs, "regex")?),
            ("structured_outputs.choice", choice(&mut outputs, "choice")?),
            ("structured_outputs.grammar", gbnf(&mut outputs, "grammar")?),
        ] {
            found.push((name, constraint));
        }
    }
    found.push(("guided_grammar", gbnf(fields, "guided_grammar")?));
    found.push(("guided_json", json(fields, "guided_json")?));
    found.push(("guided_regex", regex(fields, "guided_regex")?));
    found.push(("guided_choice", choice(fields, "guided_choice")?));
    one_of(found)
}

/// llama-server's.
pub(crate) fn llama(fields: &mut Fields) -> Result<Found> {
    one_of(vec![
        ("json_schema", schema(fields, "json_schema")?),
        ("grammar", gbnf(fields, "grammar")?),
    ])
}

/// That of OpenAI's responses, and the field as it stands, which the response repeats.
pub(crate) fn responses(fields: &mut Fields) -> Result<(Found, Option<Value>)> {
    let mut text = fields.object("text")?;
    let given = text.take("format");
    if let Some(given) = &given {
        text.put("format", given.clone());
    }
    let format = object(&mut text, "format")?;
    Ok((format.map(|format| typed(format, "")).transpose()?.flatten(), given))
}

/// Ollama's: `json`, or a schema.
pub(crate) fn ollama(fields: &mut Fields) -> Result<Found> {
    match fields.take("format") {
        Some(Value::String(text)) if text.is_empty() => Ok(None),
        Some(Value::String(text)) if text == "json" => {
            Ok(constraint(fields, "format", Grammar::json_object()))
        }
        Some(Value::Object(map)) => {
            Ok(constraint(fields, "format", Grammar::JsonSchema(map.into())))
        }
        Some(other) => Err(fields.mismatch("format", "json or a JSON schema", &other)),
        None => Ok(None),
    }
}

/// Anthropic's: the same object in one of two places. Other fields of `output_config` stay.
pub(crate) fn anthropic(fields: &mut Fields) -> Result<Found> {
    let mut config = fields.object("output_config")?;
    let mut found = Vec::new();
    for (name, format) in [
        ("output_config.format", object(&mut config, "format")?),
        ("output_format", object(fields, "output_format")?),
    ] {
        found.push((name, format.map(|format| typed(format, "")).transpose()?.flatten()));
    }
    fields.put("output_config", config.rest().into());
    one_of(found)
}

/// An object within the body, if it is there.
fn object(fields: &mut Fields, name: &str) -> Result<Option<Fields>> {
    let Some(value) = fields.take(name) else { return Ok(None) };
    fields.put(name, value);
    fields.object(name).map(Some)
}

/// A format with a type: text, any JSON object, or a schema, which stands in the object `nested` if
/// that has a name.
fn typed(mut format: Fields, nested: &str) -> Result<Found> {
    match format.string("type")?.as_deref() {
        Some("text") => Ok(None),
        // llama-server takes a schema here, too.
        Some("json_object") => match schema(&mut format, "schema")? {
            None => Ok(constraint(&format, "type", Grammar::json_object())),
            found => Ok(found),
        },
        Some("json_schema") => {
            let mut at = if nested.is_empty() { format } else { format.object(nested)? };
            let found = schema(&mut at, "schema")?;
            found.map(Some).ok_or_else(|| missing(&at, "schema", "a JSON schema"))
        }
        _ => Err(missing(&format, "type", "text, json_object or json_schema")),
    }
}

fn missing(fields: &Fields, name: &str, expected: &str) -> ApiError {
    let field = fields.field(name);
    ApiError::field(&field, format!("{field}: expected {expected}"))
}

fn constraint(fields: &Fields, name: &str, grammar: Grammar) -> Found {
    Some(Arc::new(Constraint { field: fields.field(name), grammar }))
}

/// A schema.
fn schema(fields: &mut Fields, name: &str) -> Result<Found> {
    match fields.take(name) {
        None => Ok(None),
        Some(value @ (Value::Object(_) | Value::Bool(_))) => {
            Ok(constraint(fields, name, Grammar::JsonSchema(value)))
        }
        Some(other) => Err(fields.mismatch(name, "a JSON schema, which is an object", &other)),
    }
}

/// A schema, or its text.
fn json(fields: &mut Fields, name: &str) -> Result<Found> {
    match fields.take(name) {
        Some(Value::String(text)) => {
            let wrong = |error| {
                let field = fields.field(name);
                ApiError::field(&field, format!("{field}: not valid JSON: {error}"))
            };
            let value = serde_json::from_str(&text).map_err(wrong)?;
            fields.put(name, value);
        }
        Some(value) => fields.put(name, value),
        None => {}
    }
    schema(fields, name)
}

/// Whether the answer is to be any JSON object.
fn any_object(fields: &mut Fields) -> Result<Found> {
    let name = "json_object";
    let is_asked = fields.boolean(name)?.unwrap_or(false);
    Ok(is_asked.then(|| constraint(fields, name, Grammar::json_object())).flatten())
}

/// A regular expression.
fn regex(fields: &mut Fields, name: &str) -> Result<Found> {
    let regex = fields.string(name)?;
    Ok(regex.and_then(|regex| constraint(fields, name, Grammar::Regex(regex))))
}

/// A grammar in llama.cpp's notation; an empty one is none.
fn gbnf(fields: &mut Fields, name: &str) -> Result<Found> {
    let text = fields.string(name)?.filter(|text| !text.is_empty());
    Ok(text.and_then(|text| constraint(fields, name, Grammar::Gbnf(text))))
}

/// One of several texts.
fn choice(fields: &mut Fields, name: &str) -> Result<Found> {
    let Some(texts) = fields.take(name) else { return Ok(None) };
    fields.put(name, texts);
    let texts = fields.strings(name)?;
    let field = fields.field(name);
    match texts.len() {
        0 => {
            Err(ApiError::field(&field, format!("{field}: expected at least one text, found none")))
        }
        1..=CHOICES => Ok(constraint(fields, name, Grammar::choice(&texts))),
        n => {
            let message = format!("{field}: expected at most {CHOICES} texts, found {n}");
            Err(ApiError::field(&field, message))
        }
    }
}

/// The one of these that was asked for.
fn one_of(found: Vec<(&'static str, Found)>) -> Result<Found> {
    let mut found = found.into_iter().filter_map(|(name, found)| found.map(|found| (name, found)));
    let first = found.next();
    match (first, found.next()) {
        (Some((first, _)), Some((second, _))) => {
            let message = format!("{second}: expected none, as {first} says what the answer is");
            Err(ApiError::field(second, message))
        }
        (first, _) => Ok(first.map(|(_, found)| found)),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(
        read: impl Fn(&mut Fields) -> Result<Found>,
        body: &Value,
    ) -> std::result::Result<Option<Constraint>, String> {
        let mut fields = Fields::parse(body.to_string().as_bytes()).unwrap();
        let found = read(&mut fields).map_err(|error| error.message)?;
        Ok(found.map(|found| Constraint::clone(&found)))
    }

    type Read = fn(&mut Fields) -> Result<Found>;

    /// Each body asks for this grammar, by this field.
    fn check(cases: &[(Read, Value, &str, Grammar)]) {
        for (interface, body, field, grammar) in cases {
            let wanted = Constraint { field: (*field).to_owned(), grammar: grammar.clone() };
            assert_eq!(read(interface, body), Ok(Some(wanted)), "{body}");
        }
    }

    #[test]
    fn openais_interface_has_fields_of_others() {
        let given = json!({ "type": "string" });
        let schema = Grammar::JsonSchema(given.clone());
        let nested = json!({ "type": "json_schema", "json_schema": { "schema": given } });
        let format = |format: Value| json!({ "response_format": format });
        let outputs = |outputs: Value| json!({ "structured_outputs": outputs });
        let regex = Grammar::Regex("a+".to_owned());
        let choice = Grammar::choice(&["a".to_owned(), "b.".to_owned()]);
        let object = Grammar::json_object();
        let text = "root ::= \"a\"";
        let grammar = Grammar::Gbnf(text.to_owned());
        let any = json!({ "type": "json_object" });
        let any_of = json!({ "type": "json_object", "schema": given });
        let texts = json!(["a", "b."]);
        check(&[
            (openai, format(nested), "response_format.json_schema.schema", schema.clone()),
            (openai, format(any), "response_format.type", object.clone()),
            (openai, format(any_of), "response_format.schema", schema.clone()),
            (openai, json!({ "json_schema": given }), "json_schema", schema.clone()),
            (openai, outputs(json!({ "json": given })), "structured_outputs.json", schema.clone()),
            (
                openai,
                outputs(json!({ "json_object": true })),
                "structured_outputs.json_object",
                object,
            ),
            (openai, outputs(json!({ "regex": "a+" })), "structured_outputs.regex", regex.clone()),
            (
                openai,
                outputs(json!({ "choice": texts })),
                "structured_outputs.choice",
                choice.clone(),
            ),
            (openai, json!({ "grammar": text }), "grammar", grammar.clone()),
            (llama, json!({ "grammar": text }), "grammar", grammar.clone()),
            (openai, json!({ "guided_grammar": text }), "guided_grammar", grammar.clone()),
            (openai, outputs(json!({ "grammar": text })), "structured_outputs.grammar", grammar),
            (openai, json!({ "guided_json": given.to_string() }), "guided_json", schema),
            (openai, json!({ "guided_regex": "a+" }), "guided_regex", regex),
            (openai, json!({ "guided_choice": texts }), "guided_choice", choice),
        ]);
    }

    #[test]
    fn other_interfaces_have_their_own_fields() {
        let given = json!({ "type": "string" });
        let schema = Grammar::JsonSchema(given.clone());
        let flat = json!({ "type": "json_schema", "schema": given });
        let config = json!({ "output_config": { "format": flat, "effort": "low" } });
        let responses: Read = |fields| Ok(responses(fields)?.0);
        check(&[
            (
                responses,
                json!({ "text": { "format": flat } }),
                "text.format.schema",
                schema.clone(),
            ),
            (ollama, json!({ "format": "json" }), "format", Grammar::json_object()),
            (ollama, json!({ "format": { "type": "string" } }), "format", schema.clone()),
            (anthropic, json!({ "output_format": flat }), "output_format.schema", schema.clone()),
            (anthropic, config, "output_config.format.schema", schema),
        ]);
    }

    #[test]
    fn their_absence_is_no_constraint() {
        let text = json!({ "type": "text" });
        let body = json!({
            "response_format": text,
            "json_schema": null,
            "grammar": "",
            "structured_outputs": { "json": null },
            "guided_choice": null,
            "text": { "format": text, "verbosity": "low" },
            "format": "",
            "output_format": null,
        });
        let responses = |fields: &mut Fields| Ok(responses(fields)?.0);
        for interface in [openai, ollama, anthropic, responses] {
            assert_eq!(read(interface, &body), Ok(None));
            assert_eq!(read(interface, &json!({})), Ok(None));
        }
    }

    #[test]
    fn wrong_shapes_are_named() {
        let format = |format: Value| json!({ "response_format": format });
        for (body, wanted) in [
            (format(json!("json")), "response_format: expected an object, found a string"),
            (format(json!({})), "response_format.type: expected text, json_object or json_schema"),
            (
                format(json!({ "type": "xml" })),
                "response_format.type: expected text, json_object or json_schema",
            ),
            (format(json!({ "type": 1 })), "response_format.type: expected a string, found 1"),
            (
                format(json!({ "type": "json_schema", "json_schema": { "name": "a" } })),
                "response_format.json_schema.schema: expected a JSON schema",
            ),
            (
                json!({ "json_schema": [] }),
                "json_schema: expected a JSON schema, which is an object, found an array",
            ),
            (json!({ "grammar": 5 }), "grammar: expected a string, found 5"),
            (
                json!({ "grammar": "a", "json_schema": {} }),
                "grammar: expected none, as json_schema says what the answer is",
            ),
            (json!({ "guided_regex": 5 }), "guided_regex: expected a string, found 5"),
            (
                json!({ "guided_json": "{", "n": 1 }),
                "guided_json: not valid JSON: EOF while \
                parsing an object at line 1 column 1",
            ),
            (
                json!({ "guided_regex": "a", "json_schema": {} }),
                "guided_regex: expected none, as json_schema says what the answer is",
            ),
        ] {
            assert_eq!(read(openai, &body), Err(wanted.to_owned()), "{body}");
        }
        let wrong = read(ollama, &json!({ "format": "xml" }));
        assert_eq!(wrong, Err("format: expected json or a JSON schema, found a string".into()));
        assert!(read(anthropic, &json!({ "output_config": { "format": 1 } })).is_err());
    }
}
