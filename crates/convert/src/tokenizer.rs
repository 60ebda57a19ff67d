//! Tokenizer files to the keys that begin with `tokenizer.`.

mod bpe;
mod pre_tokenizer;
mod sentencepiece;
mod special;
mod unigram;

use bodkin_gguf::{Array, Metadata, Value};
use serde_json::{Map, Value as Json};

use crate::config::Config;
use crate::error::{Error, Result};
use crate::family::{Family, Vocabulary};
use crate::source::Source;
use special::Special;

/// The most tokens of a vocabulary.
const TOKENS_MAX: u64 = 1 << 24;

/// The kind of a token, with its id in `tokenizer.ggml.token_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Normal = 1,
    Unknown = 2,
    Control = 3,
    UserDefined = 4,
    Unused = 5,
    Byte = 6,
}

/// One token of a vocabulary.
#[derive(Clone)]
struct Token {
    text: String,
    score: f32,
    kind: Kind,
}

/// The tokenizer files of a model.
struct Files<'a> {
    source: &'a Source,
    config: &'a Config,
    /// `tokenizer.json`
    tokenizer: Option<Json>,
    /// `tokenizer_config.json`
    settings: Option<Map<String, Json>>,
    /// The user's name for the pre-tokenizer.
    pre: Option<&'a str>,
    /// The number of tokens that the embeddings have.
    vocabulary: u32,
}

const TOKENIZER: &str = "tokenizer.json";
const SETTINGS: &str = "tokenizer_config.json";

/// Writes all keys of the tokenizer.
pub(crate) fn write(
    source: &Source,
    config: &Config,
    family: &Family,
    pre: Option<&str>,
    metadata: &mut Metadata,
) -> Result<()> {
    let mut vocabulary = config.need_count(&["vocab_size"])?;
    if let Vocabulary::Padded(unit) = family.vocabulary {
        let unit = config.u32(&["pad_vocab_size_multiple"])?.unwrap_or(unit).max(1);
        vocabulary = vocabulary.div_ceil(unit).saturating_mul(unit);
    }
    if u64::from(vocabulary) > TOKENS_MAX {
        let expected = format!("at most {TOKENS_MAX}");
        return Err(config.invalid("vocab_size", &expected, &vocabulary.to_string()));
    }
    let settings = match source.json(SETTINGS)? {
        Some(Json::Object(settings)) => Some(settings),
        Some(_) => {
            return Err(Error::invalid(source.shown(SETTINGS), "an object", "another value"));
        }
        None => None,
    };
    let tokenizer = source.json(TOKENIZER)?;
    let files = Files { source, config, tokenizer, settings, pre, vocabulary };
    let has_model = || Ok::<bool, Error>(source.stream("tokenizer.model")?.is_some());
    match family.vocabulary {
        Vocabulary::Encoder if files.model_type() == Some("Unigram") => {
            unigram::write(&files, metadata)
        }
        Vocabulary::Encoder => bpe::write_word_pieces(&files, metadata),
        Vocabulary::Gemma => {
            sentencepiece::write(&files, metadata)?;
            metadata.insert("tokenizer.ggml.add_space_prefix", Value::Bool(false));
            Ok(())
        }
        Vocabulary::Llama => write_llama(&files, has_model()?, metadata),
        Vocabulary::Decoder | Vocabulary::Padded(_) if has_model()? => {
            sentencepiece::write(&files, metadata)
        }
        Vocabulary::Decoder | Vocabulary::Padded(_) => bpe::write(&files, metadata),
    }
}

/// Llama's tokenizers are SentencePiece, or BPE on characters, or on bytes.
fn write_llama(files: &Files<'_>, has_model: bool, metadata: &mut Metadata) -> Result<()> {
    let prefix = files.settings.as_ref().and_then(|it| it.get("add_prefix_space")?.as_bool());
    if let Some(prefix) = prefix {
        metadata.insert("tokenizer.ggml.add_space_prefix", Value::Bool(prefix));
    }
    if has_model {
        return sentencepiece::write(files, metadata);
    }
    if bpe::is_on_characters(files) {
        return bpe::write_characters(files, metadata);
    }
    bpe::write(files, metadata)?;
    // Models with this vocabulary name BOS, but were trained without it.
    if files.vocabulary == 49_152 {
        metadata.insert("tokenizer.ggml.add_bos_token", Value::Bool(false));
    }
    Ok(())
}

impl Files<'_> {
    /// `tokenizer.json`, or an error.
    fn tokenizer(&self) -> Result<&Json> {
        let missing = || Error::invalid(self.source.shown(TOKENIZER), "a tokenizer", "no file");
        self.tokenizer.as_ref().ok_or_else(missing)
    }

    /// Builds an error about `tokenizer.json`.
    fn invalid(&self, key: &str, expected: &str, found: &str) -> Error {
        let found: String = found.chars().take(400).collect();
        Error::invalid(format!("{}: {key}", self.source.shown(TOKENIZER)), expected, found)
    }

    /// The kind of model in `tokenizer.json`.
    fn model_type(&self) -> Option<&str> {
        self.tokenizer.as_ref()?.get("model")?.get("type")?.as_str()
    }

    /// Writes the vocabulary; scores only if it has them.
    fn write_tokens(
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

    /// Writes special tokens and the chat template. `count` bounds the ids where the vocabulary's
    /// end is certain.
    fn write_special(&self, metadata: &mut Metadata, count: Option<usize>) -> Result<()> {
        Special::read(self, count)?.write(metadata);
        Ok(())
    }
}

/// Whether a token that is not marked as special is one by its form.
fn looks_special(text: &str) -> bool {
    let is_between = |start: &str, end: &str| text.starts_with(start) && text.ends_with(end);
    ["<pad>", "<mask>", "<2mass>", "[@BOS@]"].contains(&text)
        || is_between("<|", "|>")
        || is_between("<｜", "｜>")
        || is_between("<unused", ">")
}

/// The kind of an added token, and its text: spaces are spelled as such.
fn added(text: &str, is_special: bool) -> (String, Kind) {
    match is_special || looks_special(text) {
        true => (text.to_owned(), Kind::Control),
        false => (text.replace('\u{2581}', " "), Kind::UserDefined),
    }
}

/// A vocabulary of tokens that stand for nothing.
fn padding(count: u32, score: f32) -> Vec<Token> {
    let unused = |id| Token { text: format!("[PAD{id}]"), score, kind: Kind::Unused };
    (0..count).map(unused).collect()
}
