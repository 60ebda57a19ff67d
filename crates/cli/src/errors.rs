//! How errors are printed: in one line, with options by the names of their flags.

use std::io::ErrorKind;

use bodkin::Error;

/// The longest quoted text of an error, and the longest error, in bytes. A hostile file may hold
/// any text where a short name is expected.
const QUOTED_MAX: usize = 200;
const LINE_MAX: usize = 8192;

/// An error in one line. Errors name the failed action, except for those of printing to stdout.
pub(crate) fn line(error: &anyhow::Error) -> String {
    // The error of a failed fetch has one line for each source.
    let text = match is_of_output(error) {
        true => format!("cannot write to standard output: {error}"),
        false => causes(error),
    };
    let quoted = |(i, part): (usize, &str)| match i % 2 {
        0 => part.to_owned(),
        _ => cut(part, QUOTED_MAX),
    };
    let parts: Vec<String> = text.split('`').enumerate().map(quoted).collect();
    cut(&parts.join("`"), LINE_MAX)
}

/// Ends the process with an error of the command line.
pub(crate) fn exit_with_usage(error: &clap::Error) -> ! {
    let text = error.render().to_string();
    let is_printable = printable_text(&text) == text;
    if error.kind() != clap::error::ErrorKind::ValueValidation && is_printable {
        error.exit();
    }
    eprint!("{}", usage_text(error));
    std::process::exit(error.exit_code())
}

/// The text of an error of the command line, without the standard library's words for numbers.
pub(crate) fn usage_text(error: &clap::Error) -> String {
    let words = [
        ("invalid float literal", "expected a number"),
        ("invalid digit found in string", "expected a whole number of 0 or more"),
        ("cannot parse float from empty string", "expected a number, found nothing"),
        ("cannot parse integer from empty string", "expected a whole number, found nothing"),
        ("number too large to fit in target type", "the number is too large"),
        ("number too small to fit in target type", "the number is too small"),
        ("number would be zero for non-zero type", "expected 1 or more"),
    ];
    let text = printable_text(&error.render().to_string());
    words.iter().fold(text, |text, (theirs, ours)| text.replace(theirs, ours))
}

/// The start of a text that is longer than `max` bytes.
fn cut(text: &str, max: usize) -> String {
    match text.len() > max {
        true => format!("{}...", &text[..text.floor_char_boundary(max)]),
        false => text.to_owned(),
    }
}

/// Whether this is an error of printing to standard output.
pub(crate) fn is_of_output(error: &anyhow::Error) -> bool {
    error.chain().len() == 1 && error.is::<std::io::Error>()
}

/// Names from a file as they may be printed: on one line, without the characters that command a
/// terminal, that show text in another order than it has, or that are invisible.
pub(crate) fn printable_name(text: &str) -> String {
    text.replace(is_unsafe, "\u{fffd}")
}

/// Text of a model as it may be printed: without the control characters that move the cursor,
/// change colours or set the title, and those that show all after them backwards. Other marks of
/// direction belong to some languages.
pub(crate) fn printable_text(text: &str) -> String {
    let is_override = |c: char| matches!(c, '\u{202d}' | '\u{202e}');
    let is_forbidden = |c: char| c.is_control() && !"\n\t".contains(c) || is_override(c);
    text.replace(is_forbidden, "\u{fffd}")
}

/// JSON as it may be printed: the same value, with the characters that [`printable_name`] replaces
/// escaped.
pub(crate) fn printable_json(json: &str) -> String {
    let mut shown = String::with_capacity(json.len());
    for c in json.chars() {
        match is_unsafe(c) && c != '\n' {
            true => {
                let mut units = [0; 2];
                let escaped = c.encode_utf16(&mut units).iter();
                shown.extend(escaped.map(|unit| format!("\\u{unit:04x}")));
            }
            false => shown.push(c),
        }
    }
    shown
}

/// Whether a character commands a terminal, ends a line, changes the direction in which others are
/// shown, or takes no place. Joiners take none either, but words and emojis need them.
fn is_unsafe(c: char) -> bool {
    let changes_direction = matches!(
        c,
        '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}'
    );
    let ends_line = matches!(c, '\u{2028}' | '\u{2029}');
    let is_invisible = matches!(
        c,
        '\u{ad}' | '\u{180e}' | '\u{200b}' | '\u{2060}'..='\u{2064}' | '\u{206a}'..='\u{206f}'
            | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}'
    );
    c.is_control() || changes_direction || ends_line || is_invisible
}

/// The chain of causes, without those that the text before already ends with.
pub(crate) fn causes(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain().map(in_flags) {
        if !text.ends_with(&cause) {
            let colon = if text.is_empty() { "" } else { ": " };
            text = text + colon + &cause;
        }
    }
    text
}

/// A cause, with options of the runtime by the names of flags, and the flags that may help. All but
/// a failed fetch is on one line.
fn in_flags(cause: &(dyn std::error::Error + 'static)) -> String {
    let text = cause.to_string();
    let kind = cause.downcast_ref();
    let text = match kind {
        Some(Error::Unavailable { .. }) => printable_text(&text),
        _ => printable_name(&text),
    };
    match kind {
        Some(Error::Option { option, .. }) => {
            format!("--{}{}", option.replace('_', "-"), &text[option.len()..])
        }
        Some(Error::Encoder { .. }) => text + "; use `bodkin embed`",
        Some(Error::PreTokenizer { .. }) => text + "; --assume-pre NAME selects one",
        Some(Error::OutOfMemory { .. }) => {
            text + "; a smaller --ctx-size or --kv-type q8_0 needs less, --gpu-layers N puts only \
                    the last N layers on a GPU, and `bodkin plan` shows what would fit"
        }
        _ => text,
    }
}

/// Whether the command failed only because its output is closed, as under `| head`.
pub(crate) fn reader_has_gone(error: &anyhow::Error) -> bool {
    let io = error.root_cause().downcast_ref::<std::io::Error>();
    io.is_some_and(|io| io.kind() == ErrorKind::BrokenPipe)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_texts_of_files_are_cut() {
        let line = |text: String| line(&anyhow::Error::msg(text));
        assert_eq!(line(format!("expected `a`, found `{}`", "b".repeat(200))).len(), 222);
        let cut =
            line(format!("expected one of {}, found `{}`", "x ".repeat(300), "ä".repeat(9999)));
        assert!(cut.ends_with(&format!("found `{}...`", "ä".repeat(100))), "{cut}");
        assert!(cut.contains(&"x ".repeat(300)), "the project's own words are whole");
        let many = line("`a` ".repeat(100_000));
        assert!(many.len() < 9000 && many.ends_with("..."), "{}", many.len());
        assert_eq!(line("a\x1b[2Jb\nc".to_owned()), "a\u{fffd}[2Jb\u{fffd}c");
        assert_eq!(line("a\u{202e}b\u{2066}c\u{200f}d".to_owned()), "a\u{fffd}b\u{fffd}c\u{fffd}d");
    }

    #[test]
    fn names_show_all_that_is_in_them() {
        assert_eq!(printable_name("a\u{2028}b\u{200b}c\u{e0041}d"), "a\u{fffd}b\u{fffd}c\u{fffd}d");
        // Words of some languages and emojis are whole.
        for name in ["می\u{200c}خواهم", "e\u{301}", "👩\u{200d}👧", "ä b"] {
            assert_eq!(printable_name(name), name);
        }
    }

    #[test]
    fn printable_json_has_the_same_value() {
        let hidden = "\u{7f}\u{9b}\u{202e}\u{200f}\u{2028}\u{200b}\u{e0041}";
        let value = serde_json::json!({"a": [format!("\u{1b}[2J\n{hidden}ä")], hidden: 1});
        for json in [format!("{value}"), format!("{value:#}")] {
            let shown = printable_json(&json);
            assert!(!shown.contains(|c| hidden.contains(c)), "{shown}");
            assert_eq!(serde_json::from_str::<serde_json::Value>(&shown).unwrap(), value);
        }
    }
}
