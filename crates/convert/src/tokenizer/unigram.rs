//! Unigram vocabularies in `tokenizer.json`: pieces with their log probabilities.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bodkin_gguf::{Array, Metadata, Value};
use serde_json::Value as Json;

use super::files::{Files, Kind, SETTINGS, Token, padding};
use super::special;
use crate::error::{Error, Result};

/// Writes the vocabulary and the special tokens.
pub(super) fn write(files: &Files<'_>, metadata: &mut Metadata) -> Result<()> {
    let tokens = read(files)?;
    let setting = |name: &str| files.settings.as_ref().and_then(|it| it.get(name)?.as_bool());
    files.write_tokens(metadata, "t5", "default", &tokens, true);
    let prefix = setting("add_prefix_space").unwrap_or(true);
    metadata.insert("tokenizer.ggml.add_space_prefix", Value::Bool(prefix));
    let types = files.config.u32(&["type_vocab_size"])?.unwrap_or(1);
    metadata.insert("tokenizer.ggml.token_type_count", Value::U32(types));
    let cleans = setting("clean_up_tokenization_spaces").unwrap_or(true);
    metadata.insert("tokenizer.ggml.remove_extra_whitespaces", Value::Bool(cleans));
    if let Some(map) = character_map(files)? {
        let map = Value::Array(Array::U8(map));
        metadata.insert("tokenizer.ggml.precompiled_charsmap", map);
    }
    special::write(files, metadata, Some(tokens.len()))
}

fn read(files: &Files<'_>) -> Result<Vec<Token>> {
    let model = files.tokenizer()?.get("model");
    let pieces = model.and_then(|model| model.get("vocab")?.as_array());
    let expected = "pairs of a piece and its score";
    let missing = || files.invalid("model.vocab", expected, "none");
    let pieces = pieces.ok_or_else(missing)?;
    let unknown = model.and_then(|model| model.get("unk_id")?.as_u64()).unwrap_or(3);
    let extra = files.added_tokens()?;
    let mut tokens = padding(files.vocabulary, -10_000.0);
    for (id, piece) in pieces.iter().enumerate() {
        let (Some(text), Some(score)) =
            (piece.get(0).and_then(Json::as_str), piece.get(1).and_then(Json::as_f64))
        else {
            return Err(files.invalid("model.vocab", expected, &piece.to_string()));
        };
        let Some(token) = tokens.get_mut(id) else {
            let expected = format!("{} pieces as in config.json", files.vocabulary);
            return Err(files.invalid("model.vocab", &expected, &pieces.len().to_string()));
        };
        let added = extra.iter().find(|(other, ..)| *other == id as u64);
        let kind = match added {
            _ if id as u64 == unknown => Kind::Unknown,
            Some((.., true)) => Kind::Control,
            Some(_) => Kind::UserDefined,
            None => Kind::Normal,
        };
        *token = Token { text: text.to_owned(), score: score as f32, kind };
    }
    Ok(tokens)
}

/// SentencePiece's compiled normalisation of characters.
fn character_map(files: &Files<'_>) -> Result<Option<Vec<u8>>> {
    let normalizer = files.tokenizer()?.get("normalizer");
    let nested = normalizer.and_then(|it| it.get("normalizers")?.as_array());
    let mut all = normalizer.into_iter().chain(nested.into_iter().flatten());
    let Some(map) = all.find_map(|it| it.get("precompiled_charsmap")?.as_str()) else {
        return Ok(None);
    };
    let map = STANDARD.decode(map);
    map.map(Some).map_err(|error| {
        let item = format!("{}: precompiled_charsmap", files.source.shown(SETTINGS));
        Error::invalid(item, "base64", error.to_string())
    })
}
