//! The name of the pre-tokenizer. llama.cpp's converter looks up a hash of the ids of a check text;
//! here the parts of `tokenizer.json` decide, so that a model with a vocabulary of its own is known
//! too.

use serde_json::Value as Json;

use super::files::Files;
use crate::error::Result;

/// GPT-2's expression, and that for single digits.
const BYTES: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const DIGITS: &str = r"\p{N}";

macro_rules! contractions {
    () => {
        "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    };
}

/// Words of letters, after which numbers stand as the argument says.
macro_rules! words {
    ($numbers:literal) => {
        concat!(
            contractions!(),
            r"|[^\r\n\p{L}\p{N}]?\p{L}+|",
            $numbers,
            r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        )
    };
}

/// Words that end where lower case is followed by upper case.
macro_rules! cased_words {
    ($suffix:expr, $numbers:literal) => {
        concat!(
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
            $suffix,
            r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
            $suffix,
            "|",
            $numbers,
            r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        )
    };
}

const QWEN35: &str = concat!(
    contractions!(),
    r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
);

const DEEPSEEK_WORDS: &str = concat!(
    r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|"##,
    r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);

/// llama.cpp's names of published pre-tokenizers, with the expressions of each.
const KNOWN: &[(&str, &[&str])] = &[
    ("gpt-2", &[BYTES]),
    ("smollm", &[DIGITS, BYTES]),
    ("llama-bpe", &[words!(r"\p{N}{1,3}")]),
    ("qwen2", &[words!(r"\p{N}")]),
    ("qwen35", &[QWEN35]),
    ("tekken", &[cased_words!("", r"\p{N}")]),
    ("gpt-4o", &[cased_words!(concat!(contractions!(), "?"), r"\p{N}{1,3}")]),
    ("deepseek-coder", &[r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\u{d7ff}]+", DIGITS]),
    ("deepseek-v3", &[r"\p{N}{1,3}", "[一-龥\u{3040}-ゟ゠-ヿ]+", DEEPSEEK_WORDS]),
    // Gemma 3's, which splits at spaces where none are left.
    ("granite-embed-multi-311m", &[" "]),
];

/// The name for `tokenizer.ggml.pre`.
pub(super) fn name(files: &Files<'_>) -> Result<String> {
    if let Some(name) = files.pre {
        return Ok(name.to_owned());
    }
    let tokenizer = files.tokenizer()?;
    let mut steps = Vec::new();
    let pre_tokenizer = tokenizer.get("pre_tokenizer").unwrap_or(&Json::Null);
    let is_known = collect(pre_tokenizer, &mut steps);
    let found = KNOWN.iter().find(|(_, known)| is_known && steps == *known);
    let composes = tokenizer.get("normalizer").and_then(|it| it.get("type")?.as_str());
    let model = tokenizer.get("model");
    let is_set = |key: &str| model.and_then(|model| model.get(key)?.as_bool()) == Some(true);
    let name = match found.map(|(name, _)| *name) {
        // Those that compose characters before are OLMo's, of GPT-NeoX.
        Some("gpt-2") if composes == Some("NFC") => Some("olmo"),
        // Llama 3's takes a word that is a token without merging its parts.
        Some("llama-bpe") if !is_set("ignore_merges") => Some("smaug-bpe"),
        Some("granite-embed-multi-311m") if !is_set("byte_fallback") => None,
        name => name,
    };
    let found = pre_tokenizer.to_string();
    let expected = "one that llama.cpp has a name for (--pre NAME names one)";
    name.map(str::to_owned).ok_or_else(|| files.invalid("pre_tokenizer", expected, &found))
}

/// Adds the expressions of a pre-tokenizer, with escapes for line breaks; false if it does
/// anything else.
fn collect(pre_tokenizer: &Json, steps: &mut Vec<String>) -> bool {
    let flag = |key: &str| pre_tokenizer.get(key).and_then(Json::as_bool);
    match pre_tokenizer.get("type").and_then(Json::as_str) {
        Some("Sequence") => {
            let all = pre_tokenizer.get("pretokenizers").and_then(Json::as_array);
            // A sequence within a sequence is not known, so the depth is bounded.
            let is_plain = |it: &Json| it.get("type").and_then(Json::as_str) != Some("Sequence");
            all.is_some_and(|all| all.iter().all(|it| is_plain(it) && collect(it, steps)))
        }
        Some("ByteLevel") if flag("add_prefix_space") != Some(true) => {
            if flag("use_regex") != Some(false) {
                steps.push(BYTES.to_owned());
            }
            true
        }
        Some("Digits") if flag("individual_digits") == Some(true) => {
            steps.push(DIGITS.to_owned());
            true
        }
        Some("Split") => {
            let pattern = pre_tokenizer.get("pattern");
            let text = |key: &str| pattern.and_then(|it| it.get(key)?.as_str());
            let Some(pattern) = text("Regex").or(text("String")) else { return false };
            steps.push(pattern.replace('\r', r"\r").replace('\n', r"\n"));
            let behavior = pre_tokenizer.get("behavior").and_then(Json::as_str);
            match (behavior, flag("invert") == Some(true)) {
                (Some("Isolated"), false) => true,
                // What is not matched is removed, and these expressions match everything.
                (Some("Removed"), true) => true,
                (Some("MergedWithPrevious"), false) => pattern == " ",
                _ => false,
            }
        }
        _ => false,
    }
}
