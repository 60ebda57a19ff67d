//! `tokenizer.model`: a SentencePiece vocabulary with the scores of its pieces.

use bodkin_gguf::Metadata;
use prost::Message;
use serde_json::{Map, Value as Json};

use super::files::{Files, Kind, SETTINGS, Token, added, padding};
use super::special;
use crate::error::{Error, Result};

const MODEL: &str = "tokenizer.model";
const ADDED: &str = "added_tokens.json";
/// The score of what the model does not know.
const ADDED_SCORE: f32 = -1000.0;

/// SentencePiece's `ModelProto`, as far as it is read.
#[derive(Message)]
struct ModelProto {
    #[prost(message, repeated, tag = "1")]
    pieces: Vec<Piece>,
}

#[derive(Message)]
struct Piece {
    #[prost(string, tag = "1")]
    piece: String,
    #[prost(float, tag = "2")]
    score: f32,
    /// As [`Kind`], and 1 if it is missing.
    #[prost(int32, optional, tag = "3")]
    kind: Option<i32>,
}

/// Writes the vocabulary and the special tokens.
pub(super) fn write(files: &Files<'_>, metadata: &mut Metadata) -> Result<()> {
    let tokens = read(files)?;
    files.write_tokens(metadata, "llama", "default", &tokens, true);
    special::write(files, metadata, Some(tokens.len()))
}

fn read(files: &Files<'_>) -> Result<Vec<Token>> {
    let shown = files.source.shown(MODEL);
    let bytes = files.source.read(MODEL)?;
    let bytes = bytes.ok_or_else(|| Error::invalid(&shown, "a SentencePiece model", "no file"))?;
    let model = ModelProto::decode(bytes.as_slice());
    let model = model
        .map_err(|error| Error::invalid(&shown, "a SentencePiece model", error.to_string()))?;
    let mut tokens = padding(files.vocabulary, -10_000.0);
    for (token, piece) in tokens.iter_mut().zip(model.pieces) {
        let kind = match piece.kind {
            Some(2) => Kind::Unknown,
            Some(3) => Kind::Control,
            Some(5) => Kind::Unused,
            Some(6) => Kind::Byte,
            _ => Kind::Normal,
        };
        *token = Token { text: piece.piece, score: piece.score, kind };
    }
    if let Some(Json::Object(extra)) = files.source.json(ADDED)? {
        for (text, id) in extra {
            let invalid = || Error::invalid(files.source.shown(ADDED), "ids", id.to_string());
            let id = id.as_u64().ok_or_else(invalid)?;
            if let Some(token) = tokens.get_mut(id as usize) {
                *token = Token { text, score: ADDED_SCORE, kind: Kind::UserDefined };
            }
        }
    }
    let settings = files.settings.as_ref();
    let decoder = settings.and_then(|settings| settings.get("added_tokens_decoder")?.as_object());
    replace(files, &mut tokens, decoder)?;
    Ok(tokens)
}

/// Puts added tokens in the place of others.
fn replace(
    files: &Files<'_>,
    tokens: &mut [Token],
    decoder: Option<&Map<String, Json>>,
) -> Result<()> {
    for (id, extra) in decoder.into_iter().flatten() {
        let text = extra.get("content").and_then(Json::as_str);
        let (Ok(id), Some(text)) = (id.parse::<usize>(), text) else {
            let item = format!("{}: added_tokens_decoder", files.source.shown(SETTINGS));
            return Err(Error::invalid(item, "an id with its content", id));
        };
        let is_special = extra.get("special").and_then(Json::as_bool) == Some(true);
        if let Some(token) = tokens.get_mut(id) {
            let (text, kind) = added(text, is_special);
            *token = Token { text, score: ADDED_SCORE, kind };
        }
    }
    Ok(())
}
