//! How errors are printed: in one line, with options by the names of their flags.

use std::io::ErrorKind;

use bodkin::Error;

/// An error in one line. Errors name the failed action, except for those of printing to stdout.
pub(crate) fn line(error: &anyhow::Error) -> String {
    // The error of a failed fetch has one line for each source.
    printable(&match is_of_output(error) {
        true => format!("cannot write to standard output: {error}"),
        false => causes(error),
    })
}

/// Whether this is an error of printing to standard output.
pub(crate) fn is_of_output(error: &anyhow::Error) -> bool {
    error.chain().len() == 1 && error.is::<std::io::Error>()
}

/// Text from a file as it may be printed: escape sequences must not reach the terminal.
pub(crate) fn printable(text: &str) -> String {
    text.replace(|c: char| c.is_control() && c != '\n', "\u{fffd}")
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

/// A cause, with options of the runtime by the names of flags, and the flags that may help.
fn in_flags(cause: &(dyn std::error::Error + 'static)) -> String {
    let text = cause.to_string();
    match cause.downcast_ref() {
        Some(Error::Option { option, .. }) => {
            format!("--{}{}", option.replace('_', "-"), &text[option.len()..])
        }
        Some(Error::Encoder { .. }) => text + "; use `bodkin embed`",
        Some(Error::PreTokenizer { .. }) => text + "; --assume-pre NAME selects one",
        Some(Error::OutOfMemory { .. }) => {
            text + "; a smaller --ctx-size or --kv-type q8_0 needs less, and --gpu-layers N puts \
                    only the last N layers on a GPU"
        }
        _ => text,
    }
}

/// Whether the command failed only because its output is closed, as under `| head`.
pub(crate) fn reader_has_gone(error: &anyhow::Error) -> bool {
    let io = error.root_cause().downcast_ref::<std::io::Error>();
    io.is_some_and(|io| io.kind() == ErrorKind::BrokenPipe)
}
