//! Text from tokens as they come. A token may end inside a character; what is not complete waits
//! for the next one. It must not know where tokens come from.

use std::sync::Arc;

use crate::tokenizer::Tokenizer;

/// Turns a stream of tokens into text, never half a character.
#[derive(Debug)]
pub struct TextStream {
    tokenizer: Arc<Tokenizer>,
    special: bool,
    /// The start of a character.
    pending: Vec<u8>,
}

impl TextStream {
    /// A stream at its start; control tokens are shown if `special` says so, markers of reasoning
    /// and tool calls always.
    pub fn new(tokenizer: Arc<Tokenizer>, special: bool) -> TextStream {
        TextStream { tokenizer, special, pending: Vec::new() }
    }

    /// Adds a token and returns the characters that are complete now. Bytes that cannot become a
    /// character are U+FFFD.
    pub fn push(&mut self, id: u32) -> String {
        let special = self.special || self.tokenizer.is_marker(id);
        self.tokenizer.push_piece(id, special, &mut self.pending);
        take_complete(&mut self.pending)
    }

    /// Ends the stream: U+FFFD if it ends inside a character, else nothing.
    pub fn finish(&mut self) -> String {
        String::from_utf8_lossy(&std::mem::take(&mut self.pending)).into_owned()
    }
}

/// Takes all bytes but the start of a character at the end.
fn take_complete(bytes: &mut Vec<u8>) -> String {
    let last = bytes.utf8_chunks().last().map_or(&[][..], |chunk| chunk.invalid());
    let is_start = str::from_utf8(last).is_err_and(|error| error.error_len().is_none());
    let keep = if is_start { last.len() } else { 0 };
    let rest = bytes.split_off(bytes.len() - keep);
    let complete = std::mem::replace(bytes, rest);
    match String::from_utf8(complete) {
        Ok(text) => text,
        Err(error) => String::from_utf8_lossy(error.as_bytes()).into_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn characters_come_whole() {
        let mut pending = Vec::new();
        let mut push = |bytes: &[u8]| {
            pending.extend_from_slice(bytes);
            take_complete(&mut pending)
        };
        assert_eq!(push(b"a\xF0\x9F"), "a");
        assert_eq!(push(b"\x98"), "");
        assert_eq!(push(b"\x8A!\xC3"), "😊!");
        assert_eq!(push(b"\xA9"), "é");
        assert_eq!(push(b""), "");
    }

    #[test]
    fn broken_bytes_do_not_wait() {
        let mut pending = b"\xFFa\xC3(\x80\xE2\x82".to_vec();
        assert_eq!(take_complete(&mut pending), "\u{FFFD}a\u{FFFD}(\u{FFFD}");
        assert_eq!(pending, b"\xE2\x82");
        pending.extend_from_slice(b"x");
        assert_eq!(take_complete(&mut pending), "\u{FFFD}x");
    }
}
