//! SentencePiece's normalisation rules (`precompiled_charsmap`): which pieces of text are replaced
//! by what. They come compiled, as a double-array trie in the layout of darts-clone, and are read
//! from an untrusted file. It must not know tokens.

use bodkin_gguf::{Array, Metadata, Value};

use super::vocabulary::vocabulary as error;
use crate::error::Result;

const KEY: &str = "tokenizer.ggml.precompiled_charsmap";

/// The most bytes that may take the place of something. Unicode's longest needs 33; with no limit
/// a small file could make a long text out of every byte.
const MAX_REPLACEMENT_BYTES: usize = 64;

/// The rules.
pub(super) struct Charsmap {
    /// Each a node or, where a leaf points to it, the place of a replacement in `texts`.
    units: Vec<u32>,
    /// Replacements, each ended by a zero byte.
    texts: Vec<u8>,
}

impl Charsmap {
    pub(super) fn memory_bytes(&self) -> usize {
        4 * self.units.capacity() + self.texts.capacity()
    }

    /// Reads the rules; None if there are none.
    pub(super) fn from_metadata(metadata: &Metadata) -> Result<Option<Charsmap>> {
        let bytes: Vec<u8> = match metadata.get(KEY) {
            None => return Ok(None),
            Some(Value::Array(Array::U8(bytes))) => bytes.clone(),
            Some(Value::Array(Array::I8(bytes))) => bytes.iter().map(|&byte| byte as u8).collect(),
            Some(_) => return Err(error(KEY, "an array of u8 or i8", "another type")),
        };
        let found = || format!("{} bytes in all", bytes.len());
        let Some((&length, rest)) = bytes.split_first_chunk::<4>() else {
            return Err(error(KEY, "the length of a trie in 4 bytes", found()));
        };
        let length = u32::from_le_bytes(length) as usize;
        let Some((trie, texts)) = rest.split_at_checked(length).filter(|(_, t)| !t.is_empty())
        else {
            return Err(error(KEY, format!("a trie of {length} bytes, then texts"), found()));
        };
        if texts.last() != Some(&0) {
            return Err(error(KEY, "texts that end with a zero byte", "a text without end"));
        }
        let longest = texts.split(|&byte| byte == 0).map(<[u8]>::len).max().unwrap_or(0);
        if longest > MAX_REPLACEMENT_BYTES {
            let expected = format!("replacements of at most {MAX_REPLACEMENT_BYTES} bytes");
            return Err(error(KEY, expected, format!("one of {longest}")));
        }
        let (units, _) = trie.as_chunks::<4>();
        let units = units.iter().map(|&unit| u32::from_le_bytes(unit)).collect();
        Ok(Some(Charsmap { units, texts: texts.to_vec() }))
    }

    /// The longest start of `text` that has a rule: how many bytes it has, and what they become.
    /// A trie that points outside itself ends there.
    pub(super) fn replacement(&self, text: &[u8]) -> Option<(usize, &[u8])> {
        let mut at = offset(*self.units.first()?);
        let mut found = None;
        for (index, &byte) in text.iter().enumerate() {
            at ^= u32::from(byte);
            let Some(&unit) = self.units.get(at as usize) else { break };
            // Zero ends the keys, so no text goes on with it.
            if byte == 0 || label(unit) != u32::from(byte) {
                break;
            }
            at ^= offset(unit);
            if is_leaf(unit) {
                let value = self.units.get(at as usize);
                found = value.map(|&value| (index + 1, place(value))).or(found);
            }
        }
        let (length, place) = found?;
        let text = self.texts.get(place..)?;
        let end = text.iter().position(|&byte| byte == 0)?;
        Some((length, &text[..end]))
    }
}

/// Where the children of a node are, to be combined with their bytes and the node's own place.
fn offset(unit: u32) -> u32 {
    (unit >> 10) << ((unit & 1 << 9) >> 6)
}

/// The byte that leads to a node; no byte for what is no node.
fn label(unit: u32) -> u32 {
    unit & (1 << 31 | 0xFF)
}

fn is_leaf(unit: u32) -> bool {
    unit >> 8 & 1 == 1
}

fn place(unit: u32) -> usize {
    (unit & !(1 << 31)) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(bytes: &[u8]) -> Result<Option<Charsmap>> {
        let mut metadata = Metadata::new();
        metadata.insert(KEY, Value::Array(Array::U8(bytes.to_vec())));
        Charsmap::from_metadata(&metadata)
    }

    fn bytes(units: &[u32], texts: &[u8]) -> Vec<u8> {
        let length = units.len() as u32 * 4;
        let units = units.iter().flat_map(|unit| unit.to_le_bytes());
        length.to_le_bytes().into_iter().chain(units).chain(texts.iter().copied()).collect()
    }

    /// The one rule `a` to `xy`: the root's children start at 0, the leaf's value is at 1.
    fn one_rule() -> Vec<u32> {
        let mut units = vec![0; 256];
        units[usize::from(b'a')] = u32::from(b'a') | 1 << 8 | (u32::from(b'a') ^ 1) << 10;
        units[1] = 1 << 31 | 2;
        units
    }

    #[test]
    fn the_longest_rule_is_found() {
        let map = read(&bytes(&one_rule(), b"?\0xy\0")).unwrap().unwrap();
        assert_eq!(map.replacement(b"ab"), Some((1, &b"xy"[..])));
        assert_eq!(map.replacement(b"b"), None);
        assert_eq!(map.replacement(b"\0"), None);
        assert_eq!(map.replacement(b""), None);
    }

    #[test]
    fn what_contradicts_itself_is_refused() {
        let message = |bytes: &[u8]| read(bytes).err().unwrap().to_string();
        for cut in [0, 3] {
            assert!(message(&vec![0; cut]).contains(KEY));
        }
        assert!(message(&[0; 4]).contains("then texts"));
        let whole = bytes(&one_rule(), b"xy\0");
        assert!(message(&whole[..whole.len() - 3]).contains("1024 bytes, then texts"));
        assert!(message(&whole[..whole.len() - 1]).contains("zero byte"));
        assert!(message(&[255; 40]).contains("4294967295 bytes"));
        assert!(message(&bytes(&[0], &[&[1; 65][..], &[0]].concat())).contains("one of 65"));
    }

    #[test]
    fn tries_that_point_anywhere_end() {
        // Every unit is its own child, for any byte; every unit points outside; no units at all.
        for unit in [0, u32::MAX, 0x7FFF_FFFF, 1 << 9 | 1 << 30, 1 << 8 | 0x61, 0x61 << 10 | 0x161]
        {
            for count in [0, 1, 2, 97, 98, 256, 1000] {
                let map = read(&bytes(&vec![unit; count], b"x\0")).unwrap().unwrap();
                for text in [&b"aaaaaaaaaaaa"[..], b"", b"\xFF\xFE", "é".as_bytes()] {
                    if let Some((length, _)) = map.replacement(text) {
                        assert!((1..=text.len()).contains(&length));
                    }
                }
            }
        }
        let mut units = one_rule();
        units[1] = 1 << 31 | 999;
        let map = read(&bytes(&units, b"xy\0")).unwrap().unwrap();
        assert_eq!(map.replacement(b"a"), None);
    }
}
