//! The errors of templates.

use crate::error::Error;

/// The longest message of an error, in characters.
const MESSAGE_MAX: usize = 400;

/// An error with this message.
pub(super) fn template(message: impl Into<String>) -> Error {
    Error::Template(message.into())
}

/// All that minijinja knows about an error, in one line.
pub(super) fn error(error: minijinja::Error) -> Error {
    let mut message = error.to_string();
    let mut source = std::error::Error::source(&error);
    while let Some(cause) = source {
        message.push_str(": ");
        message.push_str(&cause.to_string());
        source = cause.source();
    }
    let mut shown: String = message.chars().take(MESSAGE_MAX).collect();
    if shown.len() < message.len() {
        shown.push_str("...");
    }
    template(shown.replace(['\n', '\r'], " "))
}
