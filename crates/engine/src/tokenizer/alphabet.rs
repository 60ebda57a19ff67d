//! The alphabet of byte-level BPE: each byte is written as one printable character, so that
//! vocabularies and merges can be text files. Bytes that are printable in Latin-1 stand for
//! themselves, the others are numbered from U+0100 on. Published with GPT-2 (`bytes_to_unicode`).

/// One more than the last character of the alphabet.
const END: usize = 0x144;

/// The byte of each character, `NONE` where the character is not in the alphabet.
static BYTES: [u16; END] = bytes();
const NONE: u16 = u16::MAX;

const fn is_printable(byte: usize) -> bool {
    matches!(byte, 0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF)
}

const fn bytes() -> [u16; END] {
    let mut table = [NONE; END];
    let (mut byte, mut next) = (0, 0x100);
    while byte < 0x100 {
        if is_printable(byte) {
            table[byte] = byte as u16;
        } else {
            table[next] = byte as u16;
            next += 1;
        }
        byte += 1;
    }
    table
}

/// The byte that a character stands for.
pub(super) fn byte(character: char) -> Option<u8> {
    let byte = *BYTES.get(character as usize)?;
    u8::try_from(byte).ok()
}

/// Appends the bytes that `text` stands for. Returns false, with `out` as it was, if `text` has a
/// character outside the alphabet.
pub(super) fn decode(text: &str, out: &mut Vec<u8>) -> bool {
    let start = out.len();
    for character in text.chars() {
        let Some(byte) = byte(character) else {
            out.truncate(start);
            return false;
        };
        out.push(byte);
    }
    true
}

/// Whether a byte is written as itself in one byte of UTF-8.
pub(super) fn is_itself(byte: u8) -> bool {
    byte.is_ascii_graphic()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_has_one_character() {
        let mut seen = [false; 256];
        for character in (0..0x200).filter_map(char::from_u32) {
            if let Some(byte) = byte(character) {
                assert!(!std::mem::replace(&mut seen[usize::from(byte)], true));
            }
        }
        assert!(seen.iter().all(|&seen| seen));
    }

    #[test]
    fn published_examples() {
        let mut out = Vec::new();
        assert!(decode("ĠhÃ©Ċ", &mut out));
        assert_eq!(out, " hé\n".as_bytes());
        assert!(!decode("a｜", &mut out));
        assert_eq!(out, " hé\n".as_bytes());
    }
}
