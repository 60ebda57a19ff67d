//! The vocabularies in `tokenizer.json` whose tokens are numbered by a map: BPE and WordPiece.

use std::collections::BTreeMap;

use bodkin_gguf::{Array, Metadata, Value};
use serde_json::Value as Json;

use super::files::{Files, Kind, Token, added, padding};
use super::{pre_tokenizer, special};
use crate::error::Result;

/// Writes BPE on bytes.
pub(super) fn write(files: &Files<'_>, metadata: &mut Metadata) -> Result<()> {
    if files.tokenizer().is_ok() && files.model_type() != Some("BPE") {
        return Err(files.invalid("model.type", "BPE", files.model_type().unwrap_or("none")));
    }
    let pre = pre_tokenizer::name(files)?;
    let tokens = read(files)?;
    files.write_tokens(metadata, "gpt2", &pre, &tokens, false);
    let merges = merges(files)?.into_iter().map(|merge| merge.into_bytes().into()).collect();
    metadata.insert("tokenizer.ggml.merges", Value::Array(Array::String(merges)));
    special::write(files, metadata, None)
}

/// Writes WordPiece: words begin with a space, where the file marks what goes on with `##`.
pub(super) fn write_word_pieces(files: &Files<'_>, metadata: &mut Metadata) -> Result<()> {
    if files.tokenizer().is_ok() && files.model_type() != Some("WordPiece") {
        let found = files.model_type().unwrap_or("none");
        return Err(files.invalid("model.type", "WordPiece or Unigram", found));
    }
    let mut tokens = read(files)?;
    for token in tokens.iter_mut().filter(|token| token.kind != Kind::Control) {
        token.text = match token.text.strip_prefix("##") {
            Some(rest) => rest.to_owned(),
            None => format!("\u{2581}{}", token.text),
        };
    }
    let types = files.config.u32(&["type_vocab_size"])?.unwrap_or(1);
    metadata.insert("tokenizer.ggml.token_type_count", Value::U32(types));
    // llama.cpp splits the texts of all these vocabularies alike; this is its name for BERT's.
    files.write_tokens(metadata, "bert", files.pre.unwrap_or("jina-v2-en"), &tokens, false);
    special::write(files, metadata, Some(tokens.len()))
}

/// Whether this is a SentencePiece vocabulary that was converted to BPE on characters.
pub(super) fn is_on_characters(files: &Files<'_>) -> bool {
    let is_set = |value: Option<&Json>, key: &str| value.and_then(|it| it.get(key)?.as_bool());
    let model = files.tokenizer.as_ref().and_then(|tokenizer| tokenizer.get("model"));
    files.model_type() == Some("BPE") && is_set(model, "byte_fallback") == Some(true)
}

/// Writes BPE on characters as a SentencePiece vocabulary. The file has no scores: those here give
/// the merges in the file's order, where llama.cpp's converter gives all tokens the same score.
pub(super) fn write_characters(files: &Files<'_>, metadata: &mut Metadata) -> Result<()> {
    let mut tokens = read(files)?;
    let mut ranks = BTreeMap::new();
    for (rank, merge) in merges(files)?.into_iter().enumerate() {
        ranks.entry(merge.replace(' ', "")).or_insert(rank);
    }
    for token in &mut tokens {
        let rank = ranks.get(&token.text).copied();
        token.score = rank.map_or(0.0, |rank| -(rank as f32));
        let byte = token.text.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
        if byte.is_some_and(|byte| byte.len() == 2 && u8::from_str_radix(byte, 16).is_ok()) {
            token.kind = Kind::Byte;
        }
    }
    files.write_tokens(metadata, "llama", "default", &tokens, true);
    special::write(files, metadata, Some(tokens.len()))
}

/// The tokens, one for each row of the embeddings.
fn read(files: &Files<'_>) -> Result<Vec<Token>> {
    let tokenizer = files.tokenizer()?;
    let mut tokens = padding(files.vocabulary, -1000.0);
    let count = tokens.len();
    let beyond = |id: u64| {
        let expected = format!("ids below the {count} rows of the embeddings");
        files.invalid("vocabulary", &expected, &id.to_string())
    };
    let vocabulary = tokenizer.get("model").and_then(|model| model.get("vocab")?.as_object());
    let missing = || files.invalid("model.vocab", "an object of tokens and their ids", "none");
    for (text, id) in vocabulary.ok_or_else(missing)? {
        let invalid = || files.invalid("model.vocab", "ids", &id.to_string());
        let id = id.as_u64().ok_or_else(invalid)?;
        let token = tokens.get_mut(id as usize).ok_or_else(|| beyond(id))?;
        *token = Token { text: text.clone(), score: -1000.0, kind: Kind::Normal };
    }
    for (id, text, is_special) in files.added_tokens()? {
        let token = tokens.get_mut(id as usize).ok_or_else(|| beyond(id))?;
        let (text, kind) = added(text, is_special);
        *token = Token { text, score: -1000.0, kind };
    }
    Ok(tokens)
}

/// The merges, each as two parts with a space between. A space within a part is spelled as in the
/// vocabulary.
fn merges(files: &Files<'_>) -> Result<Vec<String>> {
    let tokenizer = files.tokenizer()?;
    let merges = tokenizer.get("model").and_then(|model| model.get("merges")?.as_array());
    let read = |merge: &Json| match merge {
        Json::String(merge) => Some(merge.clone()),
        Json::Array(parts) => {
            let [left, right] = parts.as_slice() else { return None };
            let plain = |part: &Json| Some(part.as_str()?.replace(' ', "\u{120}"));
            Some(format!("{} {}", plain(left)?, plain(right)?))
        }
        _ => None,
    };
    let read: Option<Vec<String>> = merges.and_then(|merges| merges.iter().map(read).collect());
    read.ok_or_else(|| files.invalid("model.merges", "pairs of tokens", "other values"))
}
