//! The tokenizer files of a model, and the vocabulary that they hold.

use bodkin_gguf::{Array, Metadata, Value};
use serde_json::{Map, Value as Json};

use crate::config::Config;
use crate::error::{Error, Result};
use crate::source::Source;

/// The kind of a token, with its id in `tokenizer.ggml.token_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Normal = 1,
    Unknown = 2,
    Control = 3,
    UserDefined = 4,
    Unused = 5,
    Byte = 6,
}

/// One token of a vocabulary.
#[derive(Clone)]
pub(super) struct Token {
    pub(super) text: String,
    pub(super) score: f32,
    pub(super) kind: Kind,
}

/// The tokenizer files of a model.
pub(super) struct Files<'a> {
    pub(super) source: &'a Source,
    pub(super) config: &'a Config,
    /// `tokenizer.json`
    pub(super) tokenizer: Option<Json>,
    /// `tokenizer_config.json`
    pub(super) settings: Option<Map<String, Json>>,
    /// The user's name for the pre-tokenizer.
    pub(super) pre: Option<&'a str>,
    /// The number of tokens that the embeddings have.
    pub(super) vocabulary: u32,
}

pub(super) const TOKENIZER: &str = "tokenizer.json";
pub(super) const SETTINGS: &str = "tokenizer_config.json";

impl Files<'_> {
    /// `tokenizer.json`, or an error.
    pub(super) fn tokenizer(&self) -> Result<&Json> {
        let missing = || Error::invalid(self.source.shown(TOKENIZER), "a tokenizer", "no file");
        self.tokenizer.as_ref().ok_or_else(missing)
    }

    /// Builds an error about `tokenizer.json`.
    pub(super) fn invalid(&self, key: &str, expected: &str, found: &str) -> Error {
        let found: String = found.chars().take(400).collect();
        Error::invalid(format!("{}: {key}", self.source.shown(TOKENIZER)), expected, found)
    }

    /// The kind of model in `tokenizer.json`.
    pub(super) fn model_type(&self) -> Option<&str> {
        self.tokenizer.as_ref()?.get("model")?.get("type")?.as_str()
    }

    /// Writes the vocabulary; scores only if it has them.
    pub(super) fn write_tokens(
        &self,
        metadata: &mut Metadata,
        model: &str,
        pre: &str,
        tokens: &[Token],
        has_scores: bool,
    ) {
        let string = |text: &str| Value::String(text.as_bytes().into());
        let texts = tokens.iter().map(|token| token.text.as_bytes().into()).collect();
        let kinds = tokens.iter().map(|token| token.kind as i32).collect();
        metadata.insert("tokenizer.ggml.model", string(model));
        metadata.insert("tokenizer.ggml.pre", string(pre));
        metadata.insert("tokenizer.ggml.tokens", Value::Array(Array::String(texts)));
        if has_scores {
            let scores = tokens.iter().map(|token| token.score).collect();
            metadata.insert("tokenizer.ggml.scores", Value::Array(Array::F32(scores)));
        }
        metadata.insert("tokenizer.ggml.token_type", Value::Array(Array::I32(kinds)));
    }

    /// Id, text and whether it is special of each added token.
    pub(super) fn added_tokens(&self) -> Result<Vec<(u64, &str, bool)>> {
        let tokenizer = self.tokenizer()?;
        let list = tokenizer.get("added_tokens").and_then(Json::as_array);
        let read = |token: &'_ Json| {
            let is_special = token.get("special").and_then(Json::as_bool) == Some(true);
            token.get("id")?.as_u64().map(|id| (id, is_special))
        };
        let mut tokens = Vec::new();
        for token in list.into_iter().flatten() {
            let text = token.get("content").and_then(Json::as_str);
            let (Some((id, is_special)), Some(text)) = (read(token), text) else {
                let expected = "an id with its content";
                return Err(self.invalid("added_tokens", expected, &token.to_string()));
            };
            tokens.push((id, text, is_special));
        }
        Ok(tokens)
    }
}

/// Whether a token that is not marked as special is one by its form.
pub(super) fn looks_special(text: &str) -> bool {
    let is_between = |start: &str, end: &str| text.starts_with(start) && text.ends_with(end);
    ["<pad>", "<mask>", "<2mass>", "[@BOS@]"].contains(&text)
        || is_between("<|", "|>")
        || is_between("<｜", "｜>")
        || is_between("<unused", ">")
}

/// The kind of an added token, and its text: spaces are spelled as such.
pub(super) fn added(text: &str, is_special: bool) -> (String, Kind) {
    match is_special || looks_special(text) {
        true => (text.to_owned(), Kind::Control),
        false => (text.replace('\u{2581}', " "), Kind::UserDefined),
    }
}

/// A vocabulary of tokens that stand for nothing.
pub(super) fn padding(count: u32, score: f32) -> Vec<Token> {
    let unused = |id| Token { text: format!("[PAD{id}]"), score, kind: Kind::Unused };
    (0..count).map(unused).collect()
}
