//! Tokenizer files to the keys that begin with `tokenizer.`.

mod bpe;
mod files;
mod pre_tokenizer;
mod sentencepiece;
mod special;
mod unigram;

use bodkin_gguf::{Metadata, Value};
use serde_json::Value as Json;

use crate::config::Config;
use crate::error::{Error, Result};
use crate::family::{Family, Vocabulary};
use crate::source::Source;
use files::{Files, SETTINGS, TOKENIZER};

/// The most tokens of a vocabulary.
const TOKENS_MAX: u64 = 1 << 24;

/// Code Llama's vocabulary, and the token that ends filled in code. No file of it says so.
const CODE_LLAMA_VOCABULARY: u32 = 32_016;
const CODE_LLAMA_EOT: u32 = 32_010;

/// Writes all keys of the tokenizer. `rows` is the number of rows of the token embeddings.
pub(crate) fn write(
    source: &Source,
    config: &Config,
    family: &Family,
    rows: u64,
    pre: Option<&str>,
    metadata: &mut Metadata,
) -> Result<()> {
    let mut vocabulary = config.need_count(&["vocab_size"])?;
    if let Vocabulary::Padded(unit) = family.vocabulary {
        let unit = config.u32(&["pad_vocab_size_multiple"])?.unwrap_or(unit).max(1);
        vocabulary = vocabulary.div_ceil(unit).saturating_mul(unit);
    }
    if u64::from(vocabulary) > rows.min(TOKENS_MAX) {
        let expected = match rows > TOKENS_MAX {
            true => format!("at most {TOKENS_MAX}"),
            false => format!("at most {rows}, the rows of the token embeddings"),
        };
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
        Vocabulary::Gemma if has_model()? => {
            sentencepiece::write(&files, metadata)?;
            metadata.insert("tokenizer.ggml.add_space_prefix", Value::Bool(false));
            Ok(())
        }
        Vocabulary::Llama => write_llama(&files, has_model()?, metadata),
        Vocabulary::Decoder | Vocabulary::Padded(_) if has_model()? => {
            sentencepiece::write(&files, metadata)
        }
        Vocabulary::Gemma | Vocabulary::Decoder | Vocabulary::Padded(_) => {
            bpe::write(&files, metadata)
        }
    }
}

/// Llama's tokenizers are SentencePiece, or BPE on characters, or on bytes.
fn write_llama(files: &Files<'_>, has_model: bool, metadata: &mut Metadata) -> Result<()> {
    let prefix = files.settings.as_ref().and_then(|it| it.get("add_prefix_space")?.as_bool());
    if let Some(prefix) = prefix {
        metadata.insert("tokenizer.ggml.add_space_prefix", Value::Bool(prefix));
    }
    if has_model {
        sentencepiece::write(files, metadata)?;
        if files.vocabulary == CODE_LLAMA_VOCABULARY {
            metadata.insert("tokenizer.ggml.eot_token_id", Value::U32(CODE_LLAMA_EOT));
        }
        return Ok(());
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
