//! The name of the pre-tokenizer. llama.cpp's converter looks up a hash of the ids of a check text;
//! here the parts of `tokenizer.json` decide, so that a model with a vocabulary of its own is known
//! too.

use serde_json::Value as Json;

use super::files::Files;
use crate::error::Result;

/// What splits text before BPE.
#[derive(PartialEq, Eq)]
enum Step<'a> {
    /// Each digit alone.
    Digits,
    /// GPT-2's expression, unless another one came before.
    Bytes,
    Expression(&'a str),
}

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

/// The expressions of published tokenizers, with llama.cpp's names.
const EXPRESSIONS: [(&str, &str); 4] = [
    ("llama-bpe", words!(r"\p{N}{1,3}")),
    ("qwen2", words!(r"\p{N}")),
    ("tekken", cased_words!("", r"\p{N}")),
    ("gpt-4o", cased_words!(concat!(contractions!(), "?"), r"\p{N}{1,3}")),
];

/// The name for `tokenizer.ggml.pre`.
pub(super) fn name(files: &Files<'_>) -> Result<String> {
    if let Some(name) = files.pre {
        return Ok(name.to_owned());
    }
    let tokenizer = files.tokenizer()?;
    let mut steps = Vec::new();
    let pre_tokenizer = tokenizer.get("pre_tokenizer").unwrap_or(&Json::Null);
    let known = collect(pre_tokenizer, &mut steps);
    let composes = tokenizer.get("normalizer").and_then(|it| it.get("type")?.as_str());
    let name = match steps.as_slice() {
        _ if !known => None,
        // Those that compose characters before are OLMo's, of GPT-NeoX.
        [Step::Bytes] if composes == Some("NFC") => Some("olmo"),
        [Step::Bytes] => Some("gpt-2"),
        [Step::Digits, Step::Bytes] => Some("smollm"),
        [Step::Expression(found)] => {
            EXPRESSIONS.iter().find(|(_, known)| known == found).map(|(name, _)| *name)
        }
        _ => None,
    };
    let found = pre_tokenizer.to_string();
    let expected = "one that llama.cpp has a name for (--pre NAME names one)";
    name.map(str::to_owned).ok_or_else(|| files.invalid("pre_tokenizer", expected, &found))
}

/// Adds the steps of a pre-tokenizer; false if one is of another kind.
fn collect<'a>(pre_tokenizer: &'a Json, steps: &mut Vec<Step<'a>>) -> bool {
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
                steps.push(Step::Bytes);
            }
            true
        }
        Some("Digits") if flag("individual_digits") == Some(true) => {
            steps.push(Step::Digits);
            true
        }
        Some("Split") if flag("invert") != Some(true) => {
            let behavior = pre_tokenizer.get("behavior").and_then(Json::as_str);
            let pattern = pre_tokenizer.get("pattern").and_then(|it| it.get("Regex")?.as_str());
            pattern.is_some_and(|pattern| {
                steps.push(Step::Expression(pattern));
                behavior == Some("Isolated")
            })
        }
        _ => false,
    }
}
