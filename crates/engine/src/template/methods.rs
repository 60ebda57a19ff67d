//! Methods of Python's types. minijinja's `pycompat` has most; the rest is here.

use minijinja::value::ValueKind;
use minijinja::{Error, State, Value};

/// Called for methods that minijinja itself does not know.
pub(super) fn call(
    state: &mut State,
    value: &Value,
    method: &str,
    arguments: &[Value],
) -> Result<Value, Error> {
    if value.kind() == ValueKind::String
        && let Some(text) = value.as_str()
        && let [argument] = arguments
        && let Some(affix) = argument.as_str()
    {
        match method {
            "removeprefix" => return Ok(Value::from(text.strip_prefix(affix).unwrap_or(text))),
            "removesuffix" => return Ok(Value::from(text.strip_suffix(affix).unwrap_or(text))),
            _ => {}
        }
    }
    minijinja_contrib::pycompat::unknown_method_callback(state, value, method, arguments)
}
