//! The body of a request: a JSON object whose fields are read one by one. A body is parsed whatever
//! content type it claims; unknown fields are ignored, null is as good as absent, and every number
//! has a range. Errors name the field.

use std::ops::RangeInclusive;

use axum::extract::{FromRef, FromRequest, Request};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use serde_json::{Map, Value};
use tokio::sync::OwnedSemaphorePermit;

use crate::bodies::Bodies;
use crate::error::{ApiError, Result};

/// A response with this many numbers takes a millisecond to form.
const LARGE: usize = 2000;

/// A body with this many bytes takes as long to parse as a number takes to form.
const BYTES_PER_NUMBER: usize = 64;

/// More values in one body, such as token ids, are refused: parsed, each takes 32 bytes and more.
const MAX_VALUES: usize = 2 << 20;

/// The fields of a request.
#[derive(Debug)]
pub(crate) struct Fields {
    /// Where the object stands in the body, such as `options.`.
    path: String,
    map: Map<String, Value>,
    /// The share of the body in the bytes of all bodies.
    _held: Option<OwnedSemaphorePermit>,
}

impl<S: Send + Sync> FromRequest<S> for Fields
where
    Bodies: FromRef<S>,
{
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &S) -> Result<Fields> {
        let (bytes, held) = Bodies::from_ref(state).read(request.into_body()).await?;
        let fields = form(bytes.len() / BYTES_PER_NUMBER, || Fields::parse(&bytes))?;
        Ok(Fields { _held: held, ..fields })
    }
}

impl Fields {
    fn new(path: String, map: Map<String, Value>) -> Fields {
        Fields { path, map, _held: None }
    }

    /// Parses a body.
    pub(crate) fn parse(bytes: &[u8]) -> Result<Fields> {
        if values(bytes) > MAX_VALUES {
            let message = format!("the body has more than {MAX_VALUES} JSON values");
            let status = StatusCode::PAYLOAD_TOO_LARGE;
            return Err(ApiError { status, ..ApiError::bad_request(message) });
        }
        match serde_json::from_slice(bytes) {
            Ok(Value::Object(map)) => Ok(Fields::new(String::new(), map)),
            Ok(other) => Err(ApiError::bad_request(format!(
                "the body is {}, expected an object",
                kind(&other)
            ))),
            Err(error) => {
                Err(ApiError::bad_request(format!("the body is not valid JSON: {error}")))
            }
        }
    }

    /// The fields of an object that stands within the body at `name`.
    pub(crate) fn within(name: &str, map: Map<String, Value>) -> Fields {
        Fields::new(format!("{name}."), map)
    }

    /// The fields of an object within the body.
    pub(crate) fn object(&mut self, name: &str) -> Result<Fields> {
        let path = format!("{}{name}.", self.path);
        match self.take(name) {
            None => Ok(Fields::new(path, Map::new())),
            Some(Value::Object(map)) => Ok(Fields::new(path, map)),
            Some(other) => Err(self.mismatch(name, "an object", &other)),
        }
    }

    /// A field as it stands, unless it is null.
    pub(crate) fn take(&mut self, name: &str) -> Option<Value> {
        self.map.remove(name).filter(|value| !value.is_null())
    }

    /// Whether there is such a field.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.map.contains_key(name)
    }

    /// Puts a field back.
    pub(crate) fn put(&mut self, name: &str, value: Value) {
        self.map.insert(name.to_owned(), value);
    }

    /// All fields that are left.
    pub(crate) fn rest(self) -> Map<String, Value> {
        self.map
    }

    pub(crate) fn string(&mut self, name: &str) -> Result<Option<String>> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(self.mismatch(name, "a string", &other)),
        }
    }

    /// A string, or an array of strings.
    pub(crate) fn strings(&mut self, name: &str) -> Result<Vec<String>> {
        let expected = "a string or an array of strings";
        match self.take(name) {
            None => Ok(Vec::new()),
            Some(Value::String(text)) => Ok(vec![text]),
            Some(Value::Array(values)) => values
                .into_iter()
                .map(|value| match value {
                    Value::String(text) => Ok(text),
                    other => Err(self.mismatch(name, expected, &other)),
                })
                .collect(),
            Some(other) => Err(self.mismatch(name, expected, &other)),
        }
    }

    pub(crate) fn boolean(&mut self, name: &str) -> Result<Option<bool>> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::Bool(value)) => Ok(Some(value)),
            Some(other) => Err(self.mismatch(name, "true or false", &other)),
        }
    }

    pub(crate) fn array(&mut self, name: &str) -> Result<Option<Vec<Value>>> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::Array(values)) => Ok(Some(values)),
            Some(other) => Err(self.mismatch(name, "an array", &other)),
        }
    }

    /// A whole number; one that is written with a fraction of zero, too.
    pub(crate) fn integer(
        &mut self,
        name: &str,
        range: RangeInclusive<i64>,
    ) -> Result<Option<i64>> {
        let Some(value) = self.take(name) else { return Ok(None) };
        let whole = |x: f64| (x.fract() == 0.0 && x.abs() < 9e15).then_some(x as i64);
        let found = value.as_i64().or_else(|| value.as_f64().and_then(whole));
        match found.filter(|n| range.contains(n)) {
            Some(n) => Ok(Some(n)),
            None => {
                let (start, end) = (range.start(), range.end());
                Err(self.mismatch(name, &format!("a whole number from {start} to {end}"), &value))
            }
        }
    }

    /// As [`Fields::integer`], from `least` up.
    pub(crate) fn count(&mut self, name: &str, least: usize) -> Result<Option<usize>> {
        let range = least as i64..=i64::from(u32::MAX);
        Ok(self.integer(name, range)?.map(|n| n as usize))
    }

    pub(crate) fn number(&mut self, name: &str, range: RangeInclusive<f32>) -> Result<Option<f32>> {
        let Some(value) = self.take(name) else { return Ok(None) };
        match value.as_f64().map(|x| x as f32).filter(|x| range.contains(x)) {
            Some(x) => Ok(Some(x)),
            None => {
                let (start, end) = (range.start(), range.end());
                Err(self.mismatch(name, &format!("a number from {start} to {end}"), &value))
            }
        }
    }

    /// Refuses a field that asks for something that the server does not have.
    pub(crate) fn refuse(&mut self, name: &str) -> Result<()> {
        let is_empty = |value: &Value| match value {
            Value::Bool(value) => !value,
            Value::Array(values) => values.is_empty(),
            Value::String(text) => text.is_empty() || text == "none",
            Value::Object(map) => map.get("type").and_then(Value::as_str) == Some("text"),
            _ => false,
        };
        match self.take(name) {
            Some(value) if !is_empty(&value) => {
                let field = self.field(name);
                Err(ApiError::field(&field, format!("{field} is not supported yet")))
            }
            _ => Ok(()),
        }
    }

    /// Refuses a field with another value than the one that stands for its absence.
    pub(crate) fn refuse_unless(&mut self, name: &str, accepts: &[Value]) -> Result<()> {
        match self.take(name) {
            Some(value) if !accepts.contains(&value) => {
                let accepted: Vec<String> = accepts.iter().map(Value::to_string).collect();
                let field = self.field(name);
                let accepted = accepted.join(" and ");
                let message = format!("{field}: values other than {accepted} are not supported");
                Err(ApiError::field(&field, message))
            }
            _ => Ok(()),
        }
    }

    /// Refuses a list of images, unless it is empty.
    pub(crate) fn refuse_images(&mut self, name: &str) -> Result<()> {
        match self.take(name) {
            None => Ok(()),
            Some(Value::Array(images)) if images.is_empty() => Ok(()),
            Some(Value::Array(_)) => Err(ApiError::image(&self.field(name))),
            Some(other) => Err(self.mismatch(name, "an array of images", &other)),
        }
    }

    /// The whole name of a field.
    pub(crate) fn field(&self, name: &str) -> String {
        format!("{}{name}", self.path)
    }

    /// The error of a field with a wrong value.
    pub(crate) fn mismatch(&self, name: &str, expected: &str, found: &Value) -> ApiError {
        let field = self.field(name);
        let found = match found {
            Value::Number(number) => number.to_string(),
            Value::Bool(value) => value.to_string(),
            other => kind(other).to_owned(),
        };
        ApiError::field(&field, format!("{field}: expected {expected}, found {found}"))
    }
}

/// About how many values JSON holds: each stands after a comma or the start of an array or object.
fn values(json: &[u8]) -> usize {
    let (mut values, mut in_string, mut is_escaped) = (0, false, false);
    for &byte in json {
        match byte {
            _ if is_escaped => is_escaped = false,
            b'"' => in_string = !in_string,
            b'\\' => is_escaped = in_string,
            b',' | b'[' | b'{' if !in_string => values += 1,
            _ => (),
        }
    }
    values
}

/// What kind of value it is, for errors.
fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

/// A response of JSON.
pub(crate) struct Json<T>(pub(crate) T);

impl<T: Serialize> IntoResponse for Json<T> {
    fn into_response(self) -> Response {
        match serde_json::to_vec(&self.0) {
            Ok(body) => {
                ([(header::CONTENT_TYPE, "application/json; charset=utf-8")], body).into_response()
            }
            Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
        }
    }
}

/// Forms a response that has this count of numbers. A large one holds up none of the requests that
/// share its thread.
pub(crate) fn form<T>(numbers: usize, form: impl FnOnce() -> T) -> T {
    match numbers < LARGE {
        true => form(),
        false => tokio::task::block_in_place(form),
    }
}

/// A number with the fewest digits that give the same `f32`; null if it is not finite. A plain
/// conversion would write 0.8 as 0.800000011920929.
pub(crate) fn float(x: f32) -> Value {
    x.to_string().parse::<f64>().map_or(Value::Null, Value::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields(body: &str) -> Fields {
        Fields::parse(body.as_bytes()).unwrap()
    }

    #[test]
    fn errors_name_the_field_and_what_was_expected() {
        let mut body = fields(r#"{"a": {"n": 1.5, "x": -1, "s": [1]}, "b": null, "c": 3.0}"#);
        let mut a = body.object("a").unwrap();
        let message = |error: ApiError| error.message;
        let error = a.integer("n", 0..=9).map_err(message);
        assert_eq!(error, Err("a.n: expected a whole number from 0 to 9, found 1.5".into()));
        assert!(a.number("x", 0.0..=2.0).unwrap_err().param.as_deref() == Some("a.x"));
        let error = a.strings("s").map_err(message);
        assert_eq!(error, Err("a.s: expected a string or an array of strings, found 1".into()));
        assert_eq!(body.boolean("b").unwrap(), None);
        assert_eq!(body.count("c", 1).unwrap(), Some(3));
        assert!(fields(r#"{"n": 1e300}"#).number("n", 0.0..=1.0).is_err());
        assert!(fields(r#"{"n": 1e300}"#).integer("n", 0..=i64::MAX).is_err());
    }

    #[test]
    fn floats_have_few_digits() {
        for (x, text) in [(0.8, "0.8"), (-1e-7, "-1e-7"), (3.4e38, "3.4e+38"), (1.0, "1.0")] {
            assert_eq!(float(x).to_string(), text);
        }
        assert!(float(f32::NAN).is_null() && float(f32::NEG_INFINITY).is_null());
    }

    #[test]
    fn bodies_that_are_no_objects_are_refused() {
        let deep = format!("{}{}", "[".repeat(100_000), "]".repeat(100_000));
        let bad = ["", "{", "[1]", "{} {}", r#"{"n": 1e999}"#, "\u{feff}{}", "NaN", &deep];
        for body in bad {
            assert_eq!(Fields::parse(body.as_bytes()).unwrap_err().status.as_u16(), 400, "{body}");
        }
        assert!(Fields::parse(b"{\"a\": \"\xff\"}").is_err());
    }

    #[test]
    fn features_that_are_missing_are_refused_and_their_absence_is_not() {
        let mut body = fields(
            r#"{"tools": [], "tool_choice": "none", "response_format": {"type": "text"},
                "format": "json", "schema": {"type": "object"}}"#,
        );
        for name in ["tools", "tool_choice", "response_format", "other"] {
            body.refuse(name).unwrap();
        }
        assert!(body.refuse("format").is_err() && body.refuse("schema").is_err());
    }
}
