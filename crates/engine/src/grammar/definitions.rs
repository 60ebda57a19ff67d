//! A schema that stands within another one, made one of its own: with all that it refers to, and
//! nothing else, as a tool may have thousands of arguments and large definitions beside them.

use rustc_hash::FxHashMap;
use serde_json::{Map, Value};

/// The keywords whose values are no schemas.
const VALUES: [&str; 4] = ["const", "default", "enum", "examples"];
/// The keywords whose values are objects of schemas by names, which may look like keywords.
const NAMED: [&str; 4] = ["$defs", "definitions", "patternProperties", "properties"];

/// The longest reference that an error repeats, in characters.
const SHOWN_CHARS: usize = 100;

/// The most values of a schema with its definitions, which may stand within each other.
const MAX_VALUES: usize = 200_000;

/// A schema of `root` by itself.
///
/// # Errors
/// If it refers to something that `root` does not have, or to too much.
pub(super) fn within(schema: &Value, root: &Value) -> Result<Value, String> {
    let mut schema = schema.clone();
    let mut references = References::default();
    references.rename(&mut schema, true);
    let mut definitions = Map::new();
    // Each definition may add further references.
    while let Some(reference) = references.all.get(definitions.len()) {
        let mut definition = find(reference, root).cloned().ok_or_else(|| {
            let shown: String = reference.chars().take(SHOWN_CHARS).collect();
            format!("there is nothing that $ref {shown:?} names")
        })?;
        references.rename(&mut definition, true);
        if references.values > MAX_VALUES {
            return Err(format!("what $ref names has more than {MAX_VALUES} values"));
        }
        definitions.insert(name(definitions.len()), definition);
    }
    if let Value::Object(keywords) = &mut schema {
        // What these had is among the new ones if anything refers to it.
        keywords.remove("definitions");
        keywords.remove("$defs");
        if !definitions.is_empty() {
            keywords.insert("$defs".to_owned(), definitions.into());
        }
    }
    Ok(schema)
}

/// The name of the definition that the first, second … reference becomes.
fn name(number: usize) -> String {
    format!("d{number}")
}

fn find<'a>(reference: &str, root: &'a Value) -> Option<&'a Value> {
    match reference.strip_prefix('#')? {
        "" | "/" => Some(root),
        pointer => root.pointer(pointer),
    }
}

/// What the schemas so far refer to.
#[derive(Default)]
struct References {
    all: Vec<String>,
    /// The place of each among them.
    places: FxHashMap<String, usize>,
    /// The values of the schemas.
    values: usize,
}

impl References {
    /// Makes each reference one to a definition.
    fn rename(&mut self, value: &mut Value, is_schema: bool) {
        self.values += 1;
        match value {
            Value::Array(values) => {
                values.iter_mut().for_each(|value| self.rename(value, is_schema));
            }
            Value::Object(keywords) => {
                for (key, value) in keywords {
                    match value {
                        Value::String(reference) if is_schema && key == "$ref" => {
                            *reference = format!("#/$defs/{}", name(self.place(reference)));
                        }
                        _ if is_schema && VALUES.contains(&key.as_str()) => {}
                        _ => {
                            let is_named = is_schema && NAMED.contains(&key.as_str());
                            self.rename(value, !is_named);
                        }
                    }
                }
            }
            _ => {}
        }
    }

    fn place(&mut self, reference: &str) -> usize {
        if let Some(place) = self.places.get(reference) {
            return *place;
        }
        self.all.push(reference.to_owned());
        self.places.insert(reference.to_owned(), self.all.len() - 1);
        self.all.len() - 1
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_schema_has_what_it_refers_to_and_nothing_else() {
        let root = json!({
            "$defs": { "a": { "items": { "$ref": "#/definitions/b" } }, "c": { "type": "null" } },
            "definitions": { "b": { "anyOf": [{ "$ref": "#/$defs/a" }, true] } },
            "properties": {
                "first": { "$ref": "#/$defs/a" },
                "second": { "$ref": "#/properties/first" },
                "$ref": { "const": { "$ref": "#/none" }, "properties": { "const": true } },
                "wrong": { "$ref": "#/none" },
                "whole": { "$ref": "#" },
            },
        });
        let of = |key: &str| within(&root["properties"][key], &root);
        let found = of("first").unwrap();
        assert_eq!(found["$ref"], "#/$defs/d0");
        assert_eq!(found["$defs"]["d0"], json!({ "items": { "$ref": "#/$defs/d1" } }));
        assert_eq!(found["$defs"]["d1"]["anyOf"], json!([{ "$ref": "#/$defs/d0" }, true]));
        assert_eq!(found["$defs"].as_object().unwrap().len(), 2);
        assert_eq!(of("second").unwrap()["$defs"].as_object().unwrap().len(), 3);
        // The whole refers to something that is not there.
        assert!(of("whole").unwrap_err().contains("#/none"));
        assert!(of("wrong").unwrap_err().contains("#/none"));
        assert_eq!(of("$ref").unwrap(), root["properties"]["$ref"]);
    }
}
