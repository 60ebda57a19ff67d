//! Conversion of a model's files to a GGUF. An input is `config.json`, `tokenizer.json` and
//! `tokenizer_config.json`, each with a zero byte behind it, and the safetensors. JSON has no zero
//! bytes, so that a change of one file leaves the others as they are.

use std::fs;
use std::path::Path;

use bodkin_convert::{Model, Options};
use bodkin_gguf::File;
use serde_json::{Map, Value, json};
use tempfile::TempDir;

const JSON_FILES: [&str; 3] = ["config.json", "tokenizer.json", "tokenizer_config.json"];

/// Words of the files.
pub const WORDS: &[&str] = &[
    "\"architectures\":",
    "Qwen2ForCausalLM",
    "LlamaForCausalLM",
    "Qwen3MoeForCausalLM",
    "Gemma3ForCausalLM",
    "XLMRobertaModel",
    "NomicBertModel",
    "Mamba2ForCausalLM",
    "\"num_attention_heads\":",
    "\"num_key_value_heads\":",
    "\"num_local_experts\":",
    "\"head_dim\":",
    "\"hidden_size\":",
    "\"vocab_size\":",
    "\"n_groups\":",
    "\"pad_token_id\":",
    "\"rope_type\":\"llama3\"",
    "\"factor\":",
    "\"text_config\":",
    ".experts.0.down_proj.weight",
    ".experts.gate_up_proj",
    "18446744073709551615",
    "4294967295",
    "1e999",
    "-1",
    "null",
    "F32",
    "F16",
    "BF16",
    "\"shape\":[",
    "\"data_offsets\":[",
    "\"SpecialToken\":",
    "\"TemplateProcessing\"",
    "\"Sequence\"",
    "\0",
];

/// Converts a model and reads the result.
pub fn parse(bytes: &[u8]) -> bool {
    thread_local! {
        static FOLDER: TempDir = tempfile::tempdir().expect("a folder");
    }
    FOLDER.with(|folder| {
        write_files(folder.path(), bytes);
        let Ok(model) = Model::open(folder.path(), &Options::default()) else { return false };
        let mut out = Vec::new();
        if model.write(1, &|_| (), &mut out).is_err() {
            return false;
        }
        File::from_bytes("fuzz.gguf", out).expect("a converted file is valid");
        true
    })
}

fn write_files(folder: &Path, bytes: &[u8]) {
    let mut parts = bytes.splitn(JSON_FILES.len() + 1, |byte| *byte == 0);
    for name in JSON_FILES.into_iter().chain(["model.safetensors"]) {
        let part = parts.next().unwrap_or_default();
        fs::write(folder.join(name), part).expect("a writable folder");
    }
}

/// A tiny model of each kind of layout and of tokenizer.
pub fn seeds() -> Vec<Vec<u8>> {
    vec![qwen2(), llama(), mixture(), bert(), roberta(), mamba2()]
}

/// Joins the files. Tensors are in BF16 and zero.
fn files(config: Value, tokenizer: Value, tensors: &[(&str, &[usize])]) -> Vec<u8> {
    let mut header = Map::new();
    let mut end = 0;
    for (name, shape) in tensors {
        let start = end;
        end += 2 * shape.iter().product::<usize>();
        let info = json!({"dtype": "BF16", "shape": shape, "data_offsets": [start, end]});
        header.insert((*name).to_owned(), info);
    }
    let header = Value::Object(header).to_string();
    let settings = json!({"bos_token": "<s>", "add_bos_token": true, "chat_template": "{{x}}"});
    let mut bytes = format!("{config}\0{tokenizer}\0{settings}\0").into_bytes();
    bytes.extend((header.len() as u64).to_le_bytes());
    bytes.extend(header.bytes());
    bytes.resize(bytes.len() + end, 0);
    bytes
}

/// BPE on bytes.
fn bpe() -> Value {
    json!({
        "added_tokens": [{"id": 0, "content": "<s>", "special": true}],
        "pre_tokenizer": {"type": "ByteLevel"},
        "post_processor": {"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>"}}, {"Sequence": {"id": "A"}}]},
        "model": {"type": "BPE", "vocab": {"a": 1, "b": 2, "ab": 3}, "merges": ["a b"]},
    })
}

fn qwen2() -> Vec<u8> {
    let config = json!({"architectures": ["Qwen2ForCausalLM"], "vocab_size": 4,
        "hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 2,
        "rope_scaling": {"type": "yarn", "factor": 2.0}});
    files(
        config,
        bpe(),
        &[
            ("model.embed_tokens.weight", &[4, 4]),
            ("model.layers.0.self_attn.q_proj.bias", &[4]),
            ("model.norm.weight", &[4]),
        ],
    )
}

/// With BPE on characters, and rotary frequencies that are stretched.
fn llama() -> Vec<u8> {
    let config = json!({"architectures": ["LlamaForCausalLM"], "vocab_size": 4,
        "hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 2,
        "rope_scaling": {"rope_type": "llama3", "factor": 2.0}});
    let mut tokenizer = bpe();
    tokenizer["model"]["byte_fallback"] = json!(true);
    files(
        config,
        tokenizer,
        &[
            ("model.embed_tokens.weight", &[4, 4]),
            ("model.layers.0.self_attn.q_proj.weight", &[4, 4]),
        ],
    )
}

fn mixture() -> Vec<u8> {
    let config = json!({"architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 4,
        "hidden_size": 4, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_local_experts": 1});
    files(
        config,
        bpe(),
        &[
            ("model.embed_tokens.weight", &[4, 4]),
            ("model.layers.0.mlp.experts.0.down_proj.weight", &[4, 2]),
            ("model.layers.0.mlp.experts.0.gate_proj.weight", &[2, 4]),
            ("model.layers.0.mlp.experts.0.up_proj.weight", &[2, 4]),
            ("model.layers.1.mlp.experts.gate_up_proj", &[1, 4, 4]),
        ],
    )
}

fn bert() -> Vec<u8> {
    let config = json!({"architectures": ["BertModel"], "vocab_size": 4, "hidden_size": 4,
        "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 8});
    let tokenizer = json!({"normalizer": {"type": "BertNormalizer", "lowercase": true},
        "model": {"type": "WordPiece", "vocab": {"<s>": 0, "a": 1, "##b": 2}}});
    files(
        config,
        tokenizer,
        &[
            ("embeddings.word_embeddings.weight", &[4, 4]),
            ("encoder.layer.0.output.dense.weight", &[4, 8]),
        ],
    )
}

fn roberta() -> Vec<u8> {
    let config = json!({"architectures": ["XLMRobertaModel"], "vocab_size": 3,
        "hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 2,
        "max_position_embeddings": 8});
    let tokenizer = json!({"normalizer": {"precompiled_charsmap": "AAAAAA=="},
        "model": {"type": "Unigram", "unk_id": 1, "vocab": [["<s>", 0.0], ["b", -1.5]]}});
    files(
        config,
        tokenizer,
        &[
            ("embeddings.word_embeddings.weight", &[3, 4]),
            ("embeddings.position_embeddings.weight", &[8, 4]),
        ],
    )
}

fn mamba2() -> Vec<u8> {
    let config = json!({"architectures": ["Mamba2ForCausalLM"], "vocab_size": 4,
        "hidden_size": 4, "num_hidden_layers": 1, "n_groups": 2, "pad_vocab_size_multiple": 4});
    files(
        config,
        bpe(),
        &[
            ("backbone.embeddings.weight", &[4, 4]),
            ("backbone.layers.0.mixer.A_log", &[4]),
            ("backbone.layers.0.mixer.conv1d.weight", &[8, 1, 4]),
            ("backbone.layers.0.mixer.norm.weight", &[8]),
        ],
    )
}
