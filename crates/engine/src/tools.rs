//! Tool calls: which form a model's calls have, as its chat template writes them, and the calls in
//! the text of an answer. It must not know HTTP, tokens or sampling.

mod block;
mod bodies;
mod cursor;
mod formats;
mod literals;
mod objects;
mod parser;
#[cfg(test)]
pub(crate) mod tests;
mod values;
mod written;

use serde_json::{Map, Value};

pub(crate) use self::bodies::{Arguments, Body, Tags};
pub(crate) use self::cursor::pieces;
use self::formats::FORMATS;
pub use self::formats::ToolFormat;
pub use self::parser::{ToolDelta, ToolParser};
pub(crate) use self::values::{ValueKind, properties, resolve, value_kind};

/// The longest name of a tool, in bytes.
const NAME_BYTES: usize = 256;

/// A tool that a model may call.
#[derive(Clone, Debug, PartialEq)]
pub struct Tool {
    /// Its name, of letters, digits and `_ - . : /`.
    pub name: String,
    /// The JSON schema of its arguments, which are an object.
    pub parameters: Value,
}

/// A call of a tool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToolCall {
    /// The tool's name, which is one of the request's.
    pub name: String,
    /// The arguments by name, which need not satisfy the schema.
    pub arguments: Map<String, Value>,
}

impl Tool {
    /// Whether a text can be the name of a tool: in the forms of calls, other characters would
    /// end it.
    pub fn is_name(text: &str) -> bool {
        (1..=NAME_BYTES).contains(&text.len()) && text.chars().all(Tool::is_name_char)
    }

    fn is_name_char(c: char) -> bool {
        c.is_alphanumeric() || "_-.:/".contains(c)
    }
}

impl ToolCall {
    /// The arguments as the text of a JSON object.
    pub fn arguments_text(&self) -> String {
        Value::from(self.arguments.clone()).to_string()
    }
}

impl ToolFormat {
    /// The form of the calls that a template's `source` writes, if it is a known one.
    pub fn of(source: &str) -> Option<&'static ToolFormat> {
        FORMATS.iter().find(|format| format.template_marks.iter().all(|mark| source.contains(mark)))
    }

    /// The form of calls to tools that a message describes, where the template shows none: its own
    /// if it writes calls in one that can be described, or else Hermes'.
    pub(crate) fn described(source: &str) -> &'static ToolFormat {
        let own = ToolFormat::of(source).filter(|format| format.write(&[]).is_some());
        own.unwrap_or(&formats::HERMES)
    }

    /// The form of a model's calls by its template; none if that shows tools, but the form is not
    /// known.
    pub fn of_model(source: &str) -> Option<&'static ToolFormat> {
        match ToolFormat::shows_tools(source) {
            true => ToolFormat::of(source),
            false => Some(ToolFormat::described(source)),
        }
    }

    /// Whether a template shows tools to the model.
    pub fn shows_tools(source: &str) -> bool {
        source.contains("tools") || source.contains("functions")
    }
}
