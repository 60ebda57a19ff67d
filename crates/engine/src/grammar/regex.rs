//! Regular expressions of given texts.

/// A text as a regular expression that matches it alone, also between brackets. A backslash before
/// `<` or `>` would not be an escape.
pub(super) fn escape(text: &str) -> String {
    text.chars().map(escape_character).collect()
}

/// The same for one character.
pub(super) fn escape_character(c: char) -> String {
    if c.is_ascii_alphanumeric() { c.to_string() } else { format!("\\x{{{:x}}}", u32::from(c)) }
}
