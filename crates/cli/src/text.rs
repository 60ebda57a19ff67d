//! Texts from files and from standard input.

use std::io::Read;
use std::path::Path;

use anyhow::{Context, Result, ensure};

/// The largest text, in bytes: no tokenizer takes a longer one.
const MAX_BYTES: u64 = 512 << 20;

/// The text of a file, or of standard input if the path is `-`. `what` names it in errors: the
/// prompt, a text.
pub(crate) fn read(path: &Path, what: &str) -> Result<String> {
    if path == Path::new("-") {
        return read_from(std::io::stdin().lock(), what, "standard input");
    }
    let name = path.display().to_string();
    let cannot = || format!("cannot read {what} from {name}");
    let file = std::fs::File::open(path).with_context(cannot)?;
    let bytes = file.metadata().with_context(cannot)?.len();
    ensure!(bytes <= MAX_BYTES, "{name}: expected at most {MAX_BYTES} bytes, found {bytes}");
    read_from(file, what, &name)
}

/// As [`read`], without the newline at the end, which editors and `echo` add.
pub(crate) fn read_trimmed(path: &Path, what: &str) -> Result<String> {
    let mut text = read(path, what)?;
    if text.ends_with('\n') {
        text.pop();
    }
    Ok(text)
}

fn read_from(reader: impl Read, what: &str, name: &str) -> Result<String> {
    let mut text = String::new();
    let read = reader.take(MAX_BYTES + 1).read_to_string(&mut text);
    let bytes = read.with_context(|| format!("cannot read {what} from {name}"))?;
    ensure!(bytes as u64 <= MAX_BYTES, "{name}: expected at most {MAX_BYTES} bytes, found more");
    Ok(text)
}

/// A number of things: `1 turn`, `2 turns`.
pub(crate) fn count(number: usize, thing: &str) -> String {
    format!("{number} {thing}{}", if number == 1 { "" } else { "s" })
}
