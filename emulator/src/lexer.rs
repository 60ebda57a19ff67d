//! Splits PTX into tokens.

use crate::Fault;

/// A word, a number or a punctuation character, and its line.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Token<'a> {
    pub(crate) text: &'a str,
    pub(crate) line: u32,
}

/// The tokens of a text whose first line has the number `first_line`.
pub(crate) fn tokens(text: &str, first_line: u32) -> Vec<Token<'_>> {
    let bytes = text.as_bytes();
    let mut tokens = Vec::new();
    let (mut at, mut line) = (0, first_line);
    while at < bytes.len() {
        let start = at;
        match bytes[at] {
            b'\n' => {
                line += 1;
                at += 1;
                continue;
            }
            byte if byte.is_ascii_whitespace() => {
                at += 1;
                continue;
            }
            b'/' if bytes.get(at + 1) == Some(&b'/') => {
                at += bytes[at..].iter().position(|&b| b == b'\n').unwrap_or(bytes.len() - at);
                continue;
            }
            b'"' => {
                let len = bytes[at + 1..].iter().position(|&b| b == b'"');
                at += len.map_or(bytes.len() - at, |len| len + 2);
            }
            byte if is_word_byte(byte) => {
                while at < bytes.len()
                    && (is_word_byte(bytes[at]) || bytes[at..].starts_with(b"::"))
                {
                    at += if bytes[at] == b':' { 2 } else { 1 };
                }
            }
            _ => at += 1,
        }
        tokens.push(Token { text: &text[start..at], line });
    }
    tokens
}

fn is_word_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"_$%.".contains(&byte)
}

/// Whether a token is a number.
pub(crate) fn is_number(text: &str) -> bool {
    text.starts_with(|c: char| c.is_ascii_digit())
}

/// The bits of an integer or float literal.
pub(crate) fn number(text: &str) -> Result<u64, Fault> {
    let parsed = match text.get(..2) {
        Some("0f" | "0F" | "0d" | "0D" | "0x" | "0X") => u64::from_str_radix(&text[2..], 16),
        _ => text.trim_end_matches('U').parse(),
    };
    parsed.map_err(|_| Fault(format!("expected a number, found {text}")))
}
