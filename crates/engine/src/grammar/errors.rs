//! What llguidance says is wrong, in one line and in words that fit.

/// The longest error of llguidance that is repeated, in bytes.
const MESSAGE_BYTES: usize = 400;

/// The line for an error.
pub(super) fn message(error: &str) -> String {
    if error.contains("oneOf constraints are not supported") {
        return "oneOf is supported only where its options exclude each other by a type or a \
                constant; expected anyOf"
            .to_owned();
    }
    let error = error.split("\n<").next().unwrap_or_default();
    // A grammar of tools is repeated line by line.
    let error = error.split("\n   1 |").next().unwrap_or_default();
    let error = error.rsplit("failed to compile JSON schema: ").next().unwrap_or_default();
    if error.starts_with("panic:") {
        return "a part of it is not valid".to_owned();
    }
    let error = error
        .replace("NoExtensionBias", "nothing can satisfy it")
        .replace("Unimplemented keys:", "keywords that are not supported:")
        .replace(" without 'referencing' feature", "");
    let mut error = error.replace(char::is_control, " ");
    if error.len() > MESSAGE_BYTES {
        error.truncate(error.floor_char_boundary(MESSAGE_BYTES));
        error.push('…');
    }
    error
}

/// An error without its place in a text in llguidance's notation, and those lines.
pub(super) fn without_place(error: &str) -> &str {
    let line = error.lines().next().unwrap_or_default();
    let place = line.split_once("): ").filter(|(place, _)| place.starts_with("at "));
    place.map_or(line, |(_, rest)| rest)
}
