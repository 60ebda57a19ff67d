//! Whole tokenizers: the tiny models' against their references, and made-up vocabularies for what
//! those do not reach.

use std::path::{Path, PathBuf};

use bodkin_gguf::{Array, File, Metadata, Value};
use serde_json::Value as Json;

use super::Tokenizer;

fn models() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/parity/models")
}

fn ids(value: &Json) -> Vec<u32> {
    let items = value.as_array().unwrap().iter();
    items.map(|id| u32::try_from(id.as_u64().unwrap()).unwrap()).collect()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn tiny_models_tokenize_as_their_references() {
    let mut models_seen = 0;
    for entry in std::fs::read_dir(models()).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|extension| extension != "gguf") {
            continue;
        }
        let file = File::open(&path).unwrap();
        let tokenizer = Tokenizer::from_metadata(file.metadata()).unwrap();
        let reference = std::fs::read(path.with_extension("json")).unwrap();
        let reference: Json = serde_json::from_slice(&reference).unwrap();
        for case in reference["tokenize"].as_array().unwrap() {
            let text = case["text"].as_str().unwrap();
            let context = format!("{}: {text:?}", path.display());
            let plain = tokenizer.encode(text, false, false);
            assert_eq!(plain, ids(&case["ids"]), "{context}");
            let parsed = tokenizer.encode(text, false, true);
            assert_eq!(parsed, ids(&case["ids_parse_special"]), "{context}");
            let added = tokenizer.encode(text, true, true);
            assert_eq!(added, ids(&case["ids_add_special"]), "{context}");
            let decoded = hex(&tokenizer.decode(&plain, true));
            assert_eq!(decoded, case["detokenized_hex"].as_str().unwrap(), "{context}");
        }
        models_seen += 1;
    }
    assert!(models_seen > 10, "only {models_seen} models");
}

fn strings<T: AsRef<[u8]>>(items: &[T]) -> Value {
    let items = items.iter().map(|item| Box::from(item.as_ref())).collect();
    Value::Array(Array::String(items))
}

/// A vocabulary of the kind `model` with these tokens: text, kind, score.
fn metadata(model: &str, tokens: &[(&str, i32, f32)]) -> Metadata {
    let mut metadata = Metadata::new();
    metadata.insert("tokenizer.ggml.model", Value::String(model.as_bytes().into()));
    let texts: Vec<&str> = tokens.iter().map(|token| token.0).collect();
    metadata.insert("tokenizer.ggml.tokens", strings(&texts));
    let kinds = tokens.iter().map(|token| token.1).collect();
    metadata.insert("tokenizer.ggml.token_type", Value::Array(Array::I32(kinds)));
    let scores = tokens.iter().map(|token| token.2).collect();
    metadata.insert("tokenizer.ggml.scores", Value::Array(Array::F32(scores)));
    metadata
}

pub(super) fn byte_level(tokens: &[(&str, i32)], merges: &[&str]) -> Metadata {
    let tokens: Vec<_> = tokens.iter().map(|&(text, kind)| (text, kind, 0.0)).collect();
    let mut metadata = metadata("gpt2", &tokens);
    metadata.insert("tokenizer.ggml.pre", Value::String(b"gpt-2".as_slice().into()));
    metadata.insert("tokenizer.ggml.merges", strings(merges));
    metadata
}

#[test]
fn longer_special_tokens_go_first_wherever_they_stand() {
    let tokens = [("a", 1), ("b", 1), ("c", 1), ("ab", 4), ("bca", 4), ("<|im_end|>", 1)];
    let tokenizer = Tokenizer::from_metadata(&byte_level(&tokens, &[])).unwrap();
    // `ab` stands first, but `bca` is longer.
    assert_eq!(tokenizer.encode("abca", false, false), [0, 4]);
    assert_eq!(tokenizer.encode("abab", false, false), [3, 3]);
    // Known by its text, it is a control token whatever its kind, and ends a generation.
    assert!(tokenizer.is_end_of_generation(5) && tokenizer.is_control(5));
    assert_eq!(tokenizer.encode("<|im_end|>c", false, true), [5, 2]);
    assert_eq!(tokenizer.encode("<|im_end|>c", false, false), [2]);
    assert_eq!(tokenizer.piece(5, false), b"");
    assert_eq!(tokenizer.piece(5, true), b"<|im_end|>");
    assert_eq!((tokenizer.eot(), tokenizer.id_of("bca")), (Some(5), Some(4)));
}

#[test]
fn phi_3_takes_the_white_space_after_special_tokens() {
    let tokens = [("<unk>", 2, 0.0), ("<s>", 3, 0.0), ("</s>", 3, 0.0), ("<|end|>", 3, 0.0)];
    let mut tokens = tokens.to_vec();
    tokens.extend([("▁", 1, -1.0), ("a", 1, -2.0)]);
    let mut metadata = metadata("llama", &tokens);
    metadata.insert("tokenizer.ggml.add_space_prefix", Value::Bool(false));
    let text = "a<|end|> \n a<s> a";
    let tokenizer = Tokenizer::from_metadata(&metadata).unwrap();
    assert_eq!(tokenizer.encode(text, false, true), [5, 3, 4, 0, 4, 5, 1, 4, 5]);
    metadata.insert("general.name", Value::String(b"Phi-3 mini".as_slice().into()));
    let tokenizer = Tokenizer::from_metadata(&metadata).unwrap();
    assert_eq!(tokenizer.encode(text, false, true), [5, 3, 5, 1, 4, 5]);
}

#[test]
fn sentence_piece_merges_by_score_and_falls_back_to_bytes() {
    let tokens = [
        ("<unk>", 2, 0.0),
        ("<s>", 3, 0.0),
        ("</s>", 3, 0.0),
        ("<0xC3>", 6, 0.0),
        ("<0xA9>", 6, 0.0),
        ("▁", 1, -9.0),
        ("a", 1, -9.0),
        ("b", 1, -9.0),
        ("ab", 1, -2.0),
        ("ba", 1, -1.0),
    ];
    let tokenizer = Tokenizer::from_metadata(&metadata("llama", &tokens)).unwrap();
    assert_eq!(tokenizer.encode("aba", true, false), [1, 5, 6, 9]);
    assert_eq!(tokenizer.encode("é", false, false), [5, 3, 4]);
    assert_eq!(tokenizer.decode(&[5, 6, 5, 3, 4], false), "a é".as_bytes());
    assert_eq!(tokenizer.decode_with(&[1, 5, 6], true, true), b" a");
    assert_eq!(tokenizer.decode_with(&[1, 5, 6], false, true), b"<s> a");
}

#[test]
fn a_merge_result_that_is_no_token_falls_apart() {
    let tokens = [("a", 1), ("b", 1), ("abc", 1), ("c", 1)];
    let metadata = byte_level(&tokens, &["a b", "ab c"]);
    let tokenizer = Tokenizer::from_metadata(&metadata).unwrap();
    assert_eq!(tokenizer.encode("abc", false, false), [2]);
    assert_eq!(tokenizer.encode("ab", false, false), [0, 1]);
}

/// The expected ids follow llama.cpp's rules for `gemma4`, worked out by hand.
#[test]
fn characters_are_merged_and_fall_back_to_bytes() {
    let tokens = [
        ("<bos>", 3, 0.0),
        ("▁", 1, 0.0),
        ("a", 1, 0.0),
        ("é", 1, 0.0),
        ("▁a", 1, 0.0),
        ("aé", 1, 0.0),
        ("\n", 1, 0.0),
        ("\n\n\n", 1, 0.0),
        ("<0xC3>", 6, 0.0),
        ("<0xBC>", 6, 0.0),
        ("▁aöa", 1, 0.0),
    ];
    let mut metadata = metadata("gemma4", &tokens);
    metadata.insert("tokenizer.ggml.merges", strings(&["a é", "▁ a", "▁a ö", "▁aö a", "b c"]));
    metadata.insert("tokenizer.ggml.bos_token_id", Value::U32(0));
    metadata.insert("tokenizer.ggml.add_bos_token", Value::Bool(false));
    let tokenizer = Tokenizer::from_metadata(&metadata).unwrap();
    let encode = |text: &str| tokenizer.encode(text, false, false);
    assert_eq!(encode(" aé"), [1, 5], "the first merge of the list goes first");
    assert_eq!(encode("a a"), [2, 4]);
    assert_eq!(encode("ü"), [8, 9]);
    assert_eq!(encode(" aöa"), [10], "over a character that is no token");
    assert_eq!(encode(" aö"), [8], "of a merge that is no token, the bytes that are tokens");
    assert_eq!(encode("\n\n\na\n\n"), [7, 2, 6, 6], "breaks that are a token together");
    assert_eq!(tokenizer.encode("a", true, false), [0, 2], "BOS whatever the metadata says");
    assert_eq!(tokenizer.decode(&[4, 8, 9, 3], false), " aüé".as_bytes());
    metadata.insert("tokenizer.ggml.model", Value::String(b"gpt2".as_slice().into()));
    metadata.insert("tokenizer.ggml.pre", Value::String(b"sarvam-moe".as_slice().into()));
    let tokenizer = Tokenizer::from_metadata(&metadata).unwrap();
    assert_eq!(tokenizer.encode("\n\n\n a", true, false), [6, 6, 6, 4]);
}

#[test]
fn long_runs_take_no_longer_than_text() {
    let tokens = [("a", 1), ("aa", 1), ("aaaa", 1), ("Ċ", 1), ("ĊĊ", 1), ("Ġ", 1), ("ĠĠ", 1)];
    let merges = ["a a", "aa aa", "Ċ Ċ", "Ġ Ġ"];
    let mut metadata = byte_level(&tokens, &merges);
    for pre in ["gpt-2", "llama-bpe", "gpt-4o", "deepseek-v3", "default", "bloom"] {
        metadata.insert("tokenizer.ggml.pre", Value::String(pre.as_bytes().into()));
        let tokenizer = Tokenizer::from_metadata(&metadata).unwrap();
        for (character, best) in [('a', 4), ('\n', 2), (' ', 2)] {
            let text: String = std::iter::repeat_n(character, 1 << 17).collect();
            let ids = tokenizer.encode(&text, false, false);
            assert_eq!(ids.len(), text.len() / best, "{pre} {character:?}");
        }
        let text = format!("{}a", " ".repeat(1 << 17));
        assert_eq!(
            tokenizer.decode(&tokenizer.encode(&text, false, false), false).len(),
            text.len()
        );
    }
}

#[test]
fn a_text_that_is_too_long_is_an_error() {
    let tokenizer = Tokenizer::from_metadata(&byte_level(&[("a", 1)], &[])).unwrap();
    let error = tokenizer.try_encode(&"a".repeat(super::MAX_TEXT_BYTES + 1), false, false);
    let wanted = format!("at most {}", super::MAX_TEXT_BYTES);
    assert!(error.as_ref().is_err_and(|e| e.to_string().contains(&wanted)), "{error:?}");
}

#[test]
fn of_special_tokens_with_one_text_the_first_is_found() {
    let tokens = [("a", 1), ("<x>", 3), ("<x>", 4), ("<x>", 4), ("<y>", 4), ("<y>", 3)];
    let tokenizer = Tokenizer::from_metadata(&byte_level(&tokens, &[])).unwrap();
    assert_eq!(tokenizer.encode("a<x><y>", false, true), [0, 1, 4]);
    assert_eq!(tokenizer.encode("a<x><y>", false, false), [0, 2, 4]);
}

#[test]
fn special_tokens_that_take_too_long_are_an_error() {
    let tokens = ["a".repeat(1000) + "b", "c".to_owned()];
    let tokens = tokens.each_ref().map(|token| (token.as_str(), 4));
    let tokenizer = Tokenizer::from_metadata(&byte_level(&tokens, &[])).unwrap();
    let error = tokenizer.try_encode(&"a".repeat(140_000), false, false).unwrap_err().to_string();
    assert!(error.contains("140000 bytes in which looking for"), "{error}");
    assert_eq!(tokenizer.encode("cc", false, false), [1, 1]);
}

#[test]
fn contradictions_are_named() {
    let error = |metadata: &Metadata| Tokenizer::from_metadata(metadata).unwrap_err().to_string();
    let mut unknown = byte_level(&[("a", 1)], &[]);
    unknown.insert("tokenizer.ggml.model", Value::String(b"wonder".as_slice().into()));
    assert!(error(&unknown).contains("`wonder`"));
    let mut pre = byte_level(&[("a", 1)], &[]);
    pre.insert("tokenizer.ggml.pre", Value::String(b"wonder".as_slice().into()));
    assert!(error(&pre).contains("`wonder`"));
    assert!(Tokenizer::from_metadata_assuming(&pre, "qwen2").is_ok());
    let mut short = byte_level(&[("a", 1), ("b", 1)], &[]);
    short.insert("tokenizer.ggml.token_type", Value::Array(Array::I32(vec![1])));
    assert!(error(&short).contains("tokenizer.ggml.token_type"));
    let mut merges = byte_level(&[("a", 1)], &[]);
    merges.remove("tokenizer.ggml.merges");
    assert!(error(&merges).contains("tokenizer.ggml.merges"));
}

#[test]
fn odd_vocabularies_do_not_panic() {
    let tokens = [("", 1), ("", 4), ("a", 9), ("a", -1), ("\u{10FFFF}", 3), ("<0xZZ>", 6)];
    let mut metadata =
        byte_level(&tokens, &["", " ", "a", "a ", " a", "  ", "é é", "\u{10FFFF} a"]);
    metadata.insert("tokenizer.ggml.bos_token_id", Value::U32(7_000_000));
    metadata.insert("tokenizer.ggml.add_bos_token", Value::Bool(true));
    let tokenizer = Tokenizer::from_metadata(&metadata).unwrap();
    let ids = tokenizer.encode("a\u{10FFFF}\0 é", true, true);
    assert!(ids.iter().all(|&id| (id as usize) < tokens.len()), "{ids:?}");
    assert_eq!(tokenizer.decode(&[99, u32::MAX, 5], true), b"");
    assert_eq!(tokenizer.bos(), None);
}

#[test]
fn word_piece_takes_the_longest_pieces_of_each_word() {
    let tokens = [
        ("[PAD]", 3, 0.0),
        ("[UNK]", 2, 0.0),
        ("[CLS]", 3, 0.0),
        ("[SEP]", 3, 0.0),
        ("▁un", 1, 0.0),
        ("▁unaff", 1, 0.0),
        ("able", 1, 0.0),
        ("▁!", 1, 0.0),
        ("▁中", 1, 0.0),
        ("▁É", 1, 0.0),
        ("▁e", 1, 0.0),
    ];
    let mut metadata = metadata("bert", &tokens);
    for (key, id) in [("unknown", 1), ("bos", 2), ("seperator", 3)] {
        metadata.insert(format!("tokenizer.ggml.{key}_token_id"), Value::U32(id));
    }
    let tokenizer = Tokenizer::from_metadata(&metadata).unwrap();
    let encode = |text| tokenizer.encode(text, false, false);
    assert_eq!(tokenizer.encode("Unaffable!", true, false), [2, 5, 6, 7, 3]);
    assert_eq!(tokenizer.encode("", true, false), [2, 3]);
    assert_eq!(tokenizer.encode("un[SEP]", false, true), [4, 3]);
    // A word of which any part is unknown is unknown.
    assert_eq!(encode("unaffably unable"), [1, 4, 6]);
    assert_eq!(encode("un中able中\u{200D}!"), [4, 8, 1, 8, 7]);
    assert_eq!(encode("É é e\u{301}\u{3000}\n"), [10, 10, 10]);
    assert_eq!(encode(" \0\u{FFFD}\u{301} "), [0; 0]);
    assert_eq!(tokenizer.decode(&[2, 5, 6, 7, 3], false), b" unaffable!");
    metadata.insert("tokenizer.ggml.normalizer.lowercase", Value::Bool(false));
    let tokenizer = Tokenizer::from_metadata(&metadata).unwrap();
    // Accents stay if letters do, unless the metadata says otherwise.
    assert_eq!(tokenizer.encode("É UN", false, false), [9, 1]);
    metadata.insert("tokenizer.ggml.normalizer.strip_accents", Value::Bool(true));
    let tokenizer = Tokenizer::from_metadata(&metadata).unwrap();
    assert_eq!(tokenizer.encode("é", false, false), [10]);
}

#[test]
fn unigram_takes_the_best_scores_and_joins_what_is_unknown() {
    let tokens = [
        ("<pad>", 3, 0.0),
        ("</s>", 3, 0.0),
        ("<unk>", 2, 0.0),
        ("▁", 1, -3.0),
        ("a", 1, -2.0),
        ("b", 1, -2.0),
        ("ab", 1, -5.0),
        ("▁ab", 1, -6.0),
        ("▁a", 5, -4.5),
        ("<0x41>", 6, 0.0),
        ("@@", 4, -99.0),
    ];
    let mut metadata = metadata("t5", &tokens);
    let tokenizer = Tokenizer::from_metadata(&metadata).unwrap();
    let encode = |text| tokenizer.encode(text, false, false);
    // Two tokens of -2 are better than one of -5, one of -6 better than three of -7.
    assert_eq!(tokenizer.encode("ab ab", true, false), [4, 5, 7, 1]);
    assert_eq!(encode("aéüb  "), [4, 2, 5, 3, 3]);
    assert_eq!(encode("a@@b"), [4, 10, 5]);
    // Bytes are tokens for output only.
    assert_eq!(encode("A"), [2]);
    assert_eq!(tokenizer.decode(&[9, 7, 2], false), b"A ab");
    metadata.insert("tokenizer.ggml.add_space_prefix", Value::Bool(true));
    metadata.insert("tokenizer.ggml.remove_extra_whitespaces", Value::Bool(true));
    let tokenizer = Tokenizer::from_metadata(&metadata).unwrap();
    assert_eq!(tokenizer.encode("  ab   a ", false, false), [7, 8]);
    // Unused tokens are read and never shown.
    assert_eq!(tokenizer.decode(&[7, 8], false), b"ab");
}

#[test]
fn only_bert_like_models_take_the_space_before_a_mask() {
    let tokens = [("a", 1, -1.0), ("▁", 1, -1.0), ("<mask>", 4, 0.0)];
    let mut metadata = metadata("t5", &tokens);
    let ids = |m: &Metadata| Tokenizer::from_metadata(m).unwrap().encode("a <mask>", false, false);
    assert_eq!(ids(&metadata), [0, 1, 2]);
    let architecture = Value::String(b"nomic-bert-moe".as_slice().into());
    metadata.insert("general.architecture", architecture);
    assert_eq!(ids(&metadata), [0, 2]);
}

const MODELS: [&str; 4] = ["gpt2", "llama", "bert", "t5"];

/// A text of everything that a tokenizer treats in its own way.
const ODD: &str = "a\u{10FFFF}\0 é\u{301}▁ 中!\n\u{FFFD}aa<unk>";

/// Tokenizes what it can, and holds every id to be a token.
fn use_it(tokenizer: &Tokenizer) {
    for text in [ODD, "", " ", "a"] {
        let ids = tokenizer.encode(text, true, true);
        assert!(ids.iter().all(|&id| (id as usize) < tokenizer.vocab_size()), "{ids:?}");
        tokenizer.decode_with(&ids, true, true);
    }
    tokenizer.decode(&[0, 99, u32::MAX], true);
}

#[test]
fn empty_vocabularies_and_ids_that_are_no_tokens_do_not_panic() {
    for model in MODELS {
        for tokens in [&[][..], &[("", 1, 0.0)], &[("<unk>", 2, 0.0), ("▁", 1, 0.0)]] {
            let mut metadata = metadata(model, tokens);
            metadata.insert("tokenizer.ggml.merges", strings(&["▁ ▁", ""]));
            use_it(&Tokenizer::from_metadata(&metadata).unwrap());
            for key in ["bos", "eos", "unknown", "seperator", "padding", "eot", "fim_pad"] {
                metadata.insert(format!("tokenizer.ggml.{key}_token_id"), Value::U32(u32::MAX));
            }
            for key in ["bos_token", "eos_token", "space_prefix"] {
                metadata.insert(format!("tokenizer.ggml.add_{key}"), Value::Bool(true));
            }
            use_it(&Tokenizer::from_metadata(&metadata).unwrap());
        }
    }
}

#[test]
fn odd_scores_do_not_panic() {
    for score in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, f32::MIN, 0.0] {
        for other in [f32::NAN, f32::NEG_INFINITY, f32::MAX, -1.0] {
            let tokens = [("a", 1, score), ("aa", 1, other), ("▁", 1, score), ("<unk>", 2, other)];
            for model in ["llama", "t5"] {
                use_it(&Tokenizer::from_metadata(&metadata(model, &tokens)).unwrap());
            }
        }
    }
}

#[test]
fn parts_of_a_wrong_length_or_type_are_named() {
    let refused = |model: &str, key: &'static str, value: Value| {
        let mut metadata = metadata(model, &[("a", 1, 0.0), ("b", 1, 0.0)]);
        metadata.insert("tokenizer.ggml.merges", strings(&["a b"]));
        metadata.insert(key, value);
        let error = Tokenizer::from_metadata(&metadata).unwrap_err().to_string();
        assert!(error.contains(key), "{model}: {error}");
    };
    for model in MODELS {
        refused(model, "tokenizer.ggml.tokens", Value::Bool(true));
        refused(model, "tokenizer.ggml.token_type", Value::Array(Array::U8(vec![1, 1])));
    }
    for model in ["llama", "t5"] {
        refused(model, "tokenizer.ggml.scores", Value::Array(Array::F32(vec![0.0])));
        refused(model, "tokenizer.ggml.scores", Value::Array(Array::F64(vec![0.0, 0.0])));
    }
    let charsmap = "tokenizer.ggml.precompiled_charsmap";
    refused("t5", charsmap, Value::Array(Array::U32(vec![0])));
    refused("t5", charsmap, Value::Array(Array::I8(vec![-1, -1, -1, -1, 0])));
    refused("bert", "tokenizer.ggml.normalizer.lowercase", Value::U32(1));
}

#[test]
fn long_runs_of_pieces_and_scores_take_no_longer_than_text() {
    let mut tokens = vec![("<unk>", 2, 0.0), ("▁", 1, -3.0), ("▁a", 1, -2.0), ("a", 1, -2.0)];
    tokens.extend([("aaaaaaaaaaaaaaaa", 1, -2.5), ("!", 1, -1.0)]);
    let long = 1 << 18;
    let counts = |model: &str| {
        let mut metadata = metadata(model, &tokens);
        metadata.insert("tokenizer.ggml.unknown_token_id", Value::U32(0));
        let tokenizer = Tokenizer::from_metadata(&metadata).unwrap();
        let count = |text: &str| tokenizer.encode(&text.repeat(long), false, false).len();
        ["a", " ", "!", "中", "ab", "a "].map(count)
    };
    // The first `a` goes with the space before it; a space has two tokens with punctuation.
    assert_eq!(counts("bert"), [1 + (long - 16) / 16 + 15, 0, 2 * long, long, 1, long]);
    // Of unknown characters there is one token, also of `b` between two `a`.
    assert_eq!(counts("t5"), [long / 16, long, long, 1, 2 * long, long + 1]);
}
