//! Tiny models of each family, whose files must be those of llama.cpp's converter, byte for byte:
//! `tests/convert` describes them.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use bodkin_compress::mixture::FileType;
use bodkin_convert::{Model, Options};
use bodkin_gguf::{Array, File, Format, Value};
use sha2::{Digest, Sha256};
use tempfile::TempDir;
use zip::write::SimpleFileOptions;
use zip::{ZipArchive, ZipWriter};

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/convert")
}

/// The names of the models with the SHA-256 of llama.cpp's files.
fn sums() -> Vec<(String, String)> {
    let text = fs::read_to_string(folder().join("sha256sums")).unwrap();
    let line = |line: &str| {
        let (sum, name) = line.split_once("  ").unwrap();
        (name.strip_suffix(".gguf").unwrap().to_owned(), sum.to_owned())
    };
    text.lines().map(line).collect()
}

fn converted(path: &Path, options: &Options, threads: usize) -> Vec<u8> {
    let model = Model::open(path, options).unwrap();
    let done = std::cell::Cell::new(0);
    let mut out = Vec::new();
    model.write(threads, &|bytes| done.set(done.get() + bytes), &mut out).unwrap();
    assert_eq!(done.get(), model.bytes(), "progress of {}", path.display());
    out
}

fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Unpacks a model, whose folder has its name.
fn unpacked(name: &str) -> (TempDir, PathBuf) {
    let root = tempfile::tempdir().unwrap();
    let file = fs::File::open(folder().join(format!("{name}.zip"))).unwrap();
    let mut archive = ZipArchive::new(file).unwrap();
    for index in 0..archive.len() {
        let mut member = archive.by_index(index).unwrap();
        let path = root.path().join(member.name().unwrap().as_ref());
        let mut bytes = Vec::new();
        member.read_to_end(&mut bytes).unwrap();
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    }
    let folder = root.path().join(name);
    (root, folder)
}

#[test]
fn zip_files_give_the_files_of_llama_cpp() {
    let sums = sums();
    assert_eq!(sums.len(), 13);
    for (name, sum) in sums {
        let zip = folder().join(format!("{name}.zip"));
        assert_eq!(sha256(&converted(&zip, &Options::default(), 2)), sum, "{name}");
    }
}

#[test]
fn folders_give_the_files_of_llama_cpp() {
    for (name, sum) in sums() {
        let (_root, folder) = unpacked(&name);
        assert_eq!(sha256(&converted(&folder, &Options::default(), 1)), sum, "{name}");
    }
}

const CARD: &str = r#"---
# Comments and unknown keys are no matter.
library_name: transformers
license:
- apache-2.0
- mit
license_name: "two of them"
license_link: https://example.org/LICENSE # the text
base_model: [openai/whisper-small-v2, 'https://huggingface.co/me/hen-1.5']
model-index:
- name: hens
  results: []
datasets:
  - ms_marco
  - flax-sentence-embeddings/stackexchange_xml
  - wiki-2020
  - https://example.org/set
tags:
- feature-extraction
- "with, comma"
pipeline_tag: sentence-similarity
language:
- en
- no
---
# Hens
"#;

/// What llama.cpp's converter makes of that card, in its order.
const KEYS: [(&str, &str); 23] = [
    ("license", "apache-2.0,mit"),
    ("license.name", "two of them"),
    ("license.link", "https://example.org/LICENSE"),
    ("base_model.count", "2"),
    ("base_model.0.name", "Whisper Small v2"),
    ("base_model.0.version", "v2"),
    ("base_model.0.organization", "Openai"),
    ("base_model.0.repo_url", "https://huggingface.co/openai/whisper-small-v2"),
    ("base_model.1.name", "Hen 1.5"),
    ("base_model.1.version", "1.5"),
    ("base_model.1.organization", "Me"),
    ("base_model.1.repo_url", "https://huggingface.co/me/hen-1.5"),
    ("dataset.count", "4"),
    ("dataset.0.name", "Ms_Marco"),
    ("dataset.1.name", "Stackexchange_Xml"),
    ("dataset.1.organization", "Flax Sentence Embeddings"),
    ("dataset.1.repo_url", "https://huggingface.co/flax-sentence-embeddings/stackexchange_xml"),
    ("dataset.2.name", "Wiki 2020"),
    ("dataset.2.version", "2020"),
    ("dataset.3.repo_url", "https://example.org/set"),
    ("tags", "feature-extraction|with, comma|sentence-similarity"),
    ("languages", "en|no"),
    // The first key that is not of the model as a whole.
    ("", "bert.block_count"),
];

/// The keys behind the model's size, with their values as text.
fn keys_of_card(path: &Path) -> Vec<(String, String)> {
    let model = Model::open(path, &Options::default()).unwrap();
    let keys = model.metadata().iter().skip_while(|(key, _)| *key != "general.size_label");
    let mut found = Vec::new();
    for (key, value) in keys.skip(1) {
        let Some(name) = key.strip_prefix("general.") else {
            found.push((String::new(), key.to_owned()));
            break;
        };
        let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
        let value = match value {
            Value::String(bytes) => text(bytes),
            Value::U32(number) => number.to_string(),
            Value::Array(Array::String(items)) => {
                items.iter().map(|item| text(item)).collect::<Vec<_>>().join("|")
            }
            other => panic!("{key}: {other:?}"),
        };
        found.push((name.to_owned(), value));
    }
    found
}

#[test]
fn model_cards_give_the_keys_of_llama_cpp() {
    let wanted = KEYS.map(|(key, value)| (key.to_owned(), value.to_owned()));
    let (root, folder) = unpacked("bert");
    let plain = keys_of_card(&folder);
    assert_eq!(plain, wanted[22..]);
    fs::write(folder.join("README.md"), CARD).unwrap();
    assert_eq!(keys_of_card(&folder), wanted);
    for (name, inside) in [("bert.zip", "bert"), ("hens-1.0-py3-none-any.whl", "hens/model")] {
        let path = root.path().join(name);
        let mut zip = ZipWriter::new(fs::File::create(&path).unwrap());
        let entries = walk(&folder);
        for file in &entries {
            let name = file.strip_prefix(&folder).unwrap().to_str().unwrap();
            zip.start_file(format!("{inside}/{name}"), SimpleFileOptions::default()).unwrap();
            zip.write_all(&fs::read(file).unwrap()).unwrap();
        }
        zip.finish().unwrap();
        assert_eq!(keys_of_card(&path), wanted, "{name}");
    }
    // A card that is no card, or not whole, says nothing.
    let long = format!("---\nlicense: mit\n{}---\n", "# a\n".repeat(100_000));
    for card in [&b""[..], b"license: mit", b"---\nlicense: mit", b"---\nlicense: \xff\n---\n"]
        .into_iter()
        .chain([long.as_bytes(), b"---\n[{: -\n---\n"])
    {
        fs::write(folder.join("README.md"), card).unwrap();
        assert_eq!(keys_of_card(&folder), wanted[22..]);
    }
    fs::remove_file(folder.join("README.md")).unwrap();
    fs::create_dir(folder.join("README.md")).unwrap();
    assert_eq!(keys_of_card(&folder), wanted[22..]);
}

/// All files of a folder.
fn walk(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let files = |path: PathBuf| if path.is_dir() { walk(&path) } else { vec![path] };
    entries.flat_map(files).collect()
}

#[test]
fn tensors_are_quantised_on_the_way() {
    for (kind, expected) in [("F32", Format::F32), ("Q8_0", Format::Q8_0), ("Q4_0", Format::Q4_0)] {
        let options = Options { kind: Some(FileType::from_name(kind).unwrap()), pre: None };
        let bytes = converted(&folder().join("llama3.zip"), &options, 2);
        let file = File::from_bytes("llama3", bytes).unwrap();
        let format = |name: &str| file.tensor(name).unwrap().format;
        assert_eq!(format("blk.0.ffn_down.weight"), expected);
        assert_eq!(format("blk.0.attn_norm.weight"), Format::F32);
        // Rows of 16 are no whole blocks of 32.
        let narrow = if kind == "F32" { Format::F32 } else { Format::F16 };
        assert_eq!(format("blk.0.attn_q.weight"), narrow);
    }
}

#[test]
fn a_pre_tokenizer_is_known_or_named() {
    let (_root, folder) = unpacked("llama3");
    let path = folder.join("tokenizer.json");
    let text = fs::read_to_string(&path).unwrap();
    assert!(text.contains(r"\\p{N}{1,3}"));
    fs::write(&path, text.replace(r"\\p{N}{1,3}", r"\\p{N}{1,4}")).unwrap();
    let error = Model::open(&folder, &Options::default()).err().unwrap().to_string();
    assert!(error.contains("pre_tokenizer: expected one that llama.cpp has a name for"), "{error}");
    let options = Options { kind: None, pre: Some("llama-bpe".to_owned()) };
    let model = Model::open(&folder, &options).unwrap();
    assert_eq!(model.metadata().str("tokenizer.ggml.pre").unwrap(), Some("llama-bpe"));
}

/// The name that a tokenizer gets whose pre-tokenizer has these parts, or the error.
fn pre_of(parts: &[serde_json::Value], model: &[(&str, bool)]) -> String {
    use serde_json::{Value, json};
    let (_root, folder) = unpacked("llama3");
    let path = folder.join("tokenizer.json");
    let mut tokenizer: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    tokenizer["pre_tokenizer"] = json!({ "type": "Sequence", "pretokenizers": parts });
    for (key, value) in model {
        tokenizer["model"][key] = json!(value);
    }
    fs::write(&path, tokenizer.to_string()).unwrap();
    match Model::open(&folder, &Options::default()) {
        Ok(model) => model.metadata().str("tokenizer.ggml.pre").unwrap().unwrap().to_owned(),
        Err(error) => error.to_string(),
    }
}

/// The forms in which published tokenizers spell their pre-tokenizers.
#[test]
fn published_pre_tokenizers_have_names() {
    use serde_json::{Value, json};
    let split = |regex: &str, behavior: &str, invert: bool| {
        let pattern = json!({ "Regex": regex });
        json!({ "type": "Split", "pattern": pattern, "behavior": behavior, "invert": invert })
    };
    let isolated = |regex: &str| split(regex, "Isolated", false);
    let bytes =
        |regex: bool| json!({ "type": "ByteLevel", "add_prefix_space": false, "use_regex": regex });
    let digits = || json!({ "type": "Digits", "individual_digits": true });
    let llama3 = concat!(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}",
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    );
    // Here a line break is the character itself.
    let deepseek = concat!(
        r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^"##,
        "\r\n",
        r"\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[",
        "\r\n]*|\\s*[\r\n",
        r"]+|\s+(?!\S)|\s+"
    );
    let name = |parts: &[Value]| pre_of(parts, &[]);
    assert_eq!(name(&[bytes(true)]), "gpt-2");
    assert_eq!(name(&[digits(), bytes(true)]), "smollm");
    assert_eq!(name(&[isolated(llama3), bytes(false)]), "llama-bpe");
    assert_eq!(name(&[split(llama3, "Removed", true), bytes(false)]), "llama-bpe");
    let merges = [("ignore_merges", false)];
    assert_eq!(pre_of(&[isolated(llama3), bytes(false)], &merges), "smaug-bpe");
    let asian = isolated("[一-龥\u{3040}-ゟ゠-ヿ]+");
    let parts = [isolated(r"\p{N}{1,3}"), asian, isolated(deepseek), bytes(false)];
    assert_eq!(name(&parts), "deepseek-v3");
    let asian = isolated("[一-龥ࠀ-一가-\u{d7ff}]+");
    let words = [isolated(r"\s?\p{L}+"), isolated(r"\s?\p{P}+"), asian];
    let parts = [&[isolated("[\r\n]")], &words[..], &[digits(), bytes(false)]].concat();
    assert_eq!(name(&parts), "deepseek-coder");
    for unknown in [
        vec![split(llama3, "Removed", false), bytes(false)],
        vec![split(llama3, "Isolated", true), bytes(false)],
        vec![isolated(llama3), digits(), bytes(false)],
        vec![isolated(" ")],
    ] {
        let error = name(&unknown);
        assert!(error.contains("expected one that llama.cpp has a name for"), "{error}");
    }
}

/// Nothing in the files of Code Llama says which token ends filled in code.
#[test]
fn code_llama_ends_filled_in_code() {
    use serde_json::{Value, json};
    let (_root, folder) = unpacked("mistral");
    let path = folder.join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    let eot = || {
        let model = Model::open(&folder, &Options::default()).unwrap();
        model.metadata().u32("tokenizer.ggml.eot_token_id").unwrap()
    };
    assert_eq!(eot(), None);
    config["vocab_size"] = json!(32_016);
    fs::write(&path, config.to_string()).unwrap();
    let path = folder.join("model.safetensors");
    let (header, _) = read_safetensors(&path);
    let (mut wide, mut end) = (header, 0);
    for (name, entry) in wide.as_object_mut().unwrap() {
        if name.starts_with("__") {
            continue;
        }
        if entry["shape"][0] == 400 {
            entry["shape"][0] = json!(32_016);
        }
        let shape = entry["shape"].as_array().unwrap();
        let elements: u64 = shape.iter().map(|size| size.as_u64().unwrap()).product();
        entry["data_offsets"] = json!([end, end + 2 * elements]);
        end += 2 * elements;
    }
    write_safetensors(&path, &wide, &vec![0; end as usize]);
    assert_eq!(eot(), Some(32_010));
}

#[test]
fn merged_experts_are_those_of_single_ones() {
    use serde_json::json;
    let (_root, folder) = unpacked("qwen3moe");
    let plain = converted(&folder, &Options::default(), 1);
    let path = folder.join("model.safetensors");
    let (header, data) = read_safetensors(&path);
    let bytes = |name: &str| {
        let offsets = &header[name]["data_offsets"];
        let offset = |index: usize| offsets[index].as_u64().unwrap() as usize;
        data[offset(0)..offset(1)].to_vec()
    };
    let (mut merged, mut out) = (serde_json::Map::new(), Vec::new());
    let mut add = |name: String, shape: serde_json::Value, bytes: Vec<u8>| {
        let end = out.len() + bytes.len();
        let offsets = json!([out.len(), end]);
        let entry = json!({ "dtype": "BF16", "shape": shape, "data_offsets": offsets });
        merged.insert(name, entry);
        out.extend(bytes);
    };
    for (name, entry) in header.as_object().unwrap() {
        if name != "__metadata__" && !name.contains(".experts.") {
            add(name.clone(), entry["shape"].clone(), bytes(name));
        }
    }
    for layer in 0..2 {
        let stem = format!("model.layers.{layer}.mlp.experts");
        let of = |expert: u32, part: &str| bytes(&format!("{stem}.{expert}.{part}_proj.weight"));
        let both = (0..3).flat_map(|expert| [of(expert, "gate"), of(expert, "up")].concat());
        add(format!("{stem}.gate_up_proj"), json!([3, 16, 16]), both.collect());
        let down = (0..3).flat_map(|expert| of(expert, "down"));
        add(format!("{stem}.down_proj"), json!([3, 16, 8]), down.collect());
    }
    write_safetensors(&path, &merged.into(), &out);
    let other = converted(&folder, &Options::default(), 1);
    let [plain, other] = [plain, other].map(|bytes| File::from_bytes("qwen3moe", bytes).unwrap());
    assert_eq!(plain.tensors().len(), other.tensors().len());
    for tensor in plain.tensors() {
        let same = other.tensor(&tensor.name).unwrap();
        assert_eq!((&tensor.shape, tensor.format), (&same.shape, same.format));
        assert!(plain.data(tensor) == other.data(same), "{}", tensor.name);
    }
}

fn read_safetensors(path: &Path) -> (serde_json::Value, Vec<u8>) {
    let bytes = fs::read(path).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    (serde_json::from_slice(&bytes[8..8 + length]).unwrap(), bytes[8 + length..].to_vec())
}

fn write_safetensors(path: &Path, header: &serde_json::Value, data: &[u8]) {
    let header = header.to_string().into_bytes();
    let length = (header.len() as u64).to_le_bytes();
    fs::write(path, [&length[..], &header, data].concat()).unwrap();
}
