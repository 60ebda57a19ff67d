//! A byte-level BPE vocabulary of any size: the 256 bytes, then all words of small letters by
//! length, each made of a shorter one and a letter, and the two special tokens last.

use bodkin_gguf::{Array, Metadata, Value};

/// Kinds of token, as the metadata number them.
const NORMAL: i32 = 1;
const CONTROL: i32 = 3;

const SPECIAL: [&str; 2] = ["<|begin_of_text|>", "<|end_of_text|>"];

/// Adds a tokenizer with `size` tokens, at least 258.
pub(super) fn insert(size: u32, metadata: &mut Metadata) {
    let special = SPECIAL.len() as u32;
    let words = size as usize - 256 - SPECIAL.len();
    let mut tokens: Vec<String> = (0..=255).map(|byte| spelled(byte).to_string()).collect();
    let mut merges = Vec::with_capacity(words);
    let letters: Vec<String> = ('a'..='z').map(String::from).collect();
    let mut shorter = letters.clone();
    while merges.len() < words {
        let pairs = shorter.iter().flat_map(|word| letters.iter().map(move |l| (word, l)));
        let pairs: Vec<_> = pairs.take(words - merges.len()).collect();
        merges.extend(pairs.iter().map(|(word, letter)| format!("{word} {letter}")));
        shorter = pairs.iter().map(|(word, letter)| format!("{word}{letter}")).collect();
        tokens.extend(shorter.iter().cloned());
    }
    tokens.extend(SPECIAL.map(str::to_owned));
    let mut kinds = vec![NORMAL; size as usize];
    kinds[(size - special) as usize..].fill(CONTROL);

    let mut set = |key: &str, value| metadata.insert(format!("tokenizer.ggml.{key}"), value);
    set("model", Value::String((*b"gpt2").into()));
    set("pre", Value::String((*b"llama-bpe").into()));
    set("tokens", strings(tokens));
    set("token_type", Value::Array(Array::I32(kinds)));
    set("merges", strings(merges));
    set("bos_token_id", Value::U32(size - 2));
    set("eos_token_id", Value::U32(size - 1));
    set("add_bos_token", Value::Bool(true));
}

fn strings(texts: Vec<String>) -> Value {
    let bytes = texts.into_iter().map(|text| text.into_bytes().into_boxed_slice());
    Value::Array(Array::String(bytes.collect()))
}

/// The letter that stands for a byte in byte-level BPE: printable ones for themselves, the others
/// for letters from 256 on.
fn spelled(byte: u8) -> char {
    let is_printable = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    if is_printable(byte) {
        return char::from(byte);
    }
    let before = (0..byte).filter(|&byte| !is_printable(byte)).count() as u32;
    char::from_u32(256 + before).expect("letters from 256 on exist")
}
