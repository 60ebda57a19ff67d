//! Texts from files and from standard input.

use std::io::{IsTerminal, Read, stderr};
use std::path::Path;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::terminal::say;

/// The largest text, in bytes: no context holds a longer one, and some files have no end.
const MAX_BYTES: u64 = 256 << 20;

/// Standard input that ends in this time is not spoken of.
const WAIT: Duration = Duration::from_secs(1);

/// Why images are refused.
pub(crate) const NO_IMAGES: &str = "images need a vision projector (mmproj), which bodkin does \
                                    not run: the model takes text alone";

/// The text of a file, or of standard input if the path is `-`. `what` names it in errors: the
/// prompt, a text.
pub(crate) fn read(path: &Path, what: &str) -> Result<String> {
    read_within(MAX_BYTES, path, what)
}

/// As [`read`], for a text of at most `most` bytes.
fn read_within(most: u64, path: &Path, what: &str) -> Result<String> {
    if path == Path::new("-") {
        let _waits = say_if_waiting();
        return read_from(std::io::stdin().lock(), most, what, "standard input");
    }
    let name = path.display().to_string();
    let cannot = || format!("cannot read {what} from {name}");
    let file = std::fs::File::open(path).with_context(cannot)?;
    let bytes = file.metadata().with_context(cannot)?.len();
    ensure!(bytes <= most, "{name}: expected at most {most} bytes, found {bytes}");
    read_from(file, most, what, &name)
}

/// Says on a terminal what is waited for, unless the result is dropped in time: a pipe may be open
/// and hold nothing.
fn say_if_waiting() -> Option<Sender<()>> {
    if !stderr().is_terminal() {
        return None;
    }
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        if receiver.recv_timeout(WAIT) == Err(RecvTimeoutError::Timeout) {
            say("reading standard input until its end");
        }
    });
    Some(sender)
}

/// As [`read`], without the newline at the end, which editors and `echo` add.
pub(crate) fn read_trimmed(path: &Path, what: &str) -> Result<String> {
    read_trimmed_within(MAX_BYTES, path, what)
}

/// As [`read_trimmed`], for a text of at most `most` bytes.
pub(crate) fn read_trimmed_within(most: u64, path: &Path, what: &str) -> Result<String> {
    let mut text = read_within(most, path, what)?;
    if text.ends_with('\n') {
        text.pop();
    }
    Ok(text)
}

fn read_from(reader: impl Read, most: u64, what: &str, name: &str) -> Result<String> {
    let mut bytes = Vec::new();
    let read = reader.take(most + 1).read_to_end(&mut bytes);
    let cannot = || format!("cannot read {what} from {name}");
    let len = read.with_context(cannot)?;
    ensure!(len as u64 <= most, "{name}: expected at most {most} bytes, found more");
    ensure!(!is_image(&bytes), "{name} is an image: {NO_IMAGES}");
    String::from_utf8(bytes).context("the text is not valid UTF-8").with_context(cannot)
}

/// Whether a file begins as PNG, JPEG, GIF or WebP images do.
fn is_image(bytes: &[u8]) -> bool {
    let starts: [&[u8]; 3] = [b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF8"];
    let is_webp = bytes.starts_with(b"RIFF") && bytes.get(8..12) == Some(b"WEBP");
    is_webp || starts.iter().any(|start| bytes.starts_with(start))
}

/// A number of things: `1 turn`, `2 turns`.
pub(crate) fn count(number: usize, thing: &str) -> String {
    format!("{number} {thing}{}", if number == 1 { "" } else { "s" })
}
