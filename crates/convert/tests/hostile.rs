//! Damaged and hostile files: each is one line of error that names the file.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::io::{Cursor, Write};
use std::path::{Path, PathBuf};

use bodkin_convert::{Model, Options};
use serde_json::{Value, json};
use tempfile::TempDir;
use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, ZipArchive, ZipWriter};

/// A folder with the files of a tiny model.
struct Place {
    root: TempDir,
}

impl Place {
    fn new() -> Place {
        Place::of("qwen2")
    }

    fn of(model: &str) -> Place {
        let root = tempfile::tempdir().unwrap();
        let place = Place { root };
        let zip = format!("{}/../../tests/convert/{model}.zip", env!("CARGO_MANIFEST_DIR"));
        let mut archive = ZipArchive::new(fs::File::open(zip).unwrap()).unwrap();
        for index in 0..archive.len() {
            let mut member = archive.by_index(index).unwrap();
            let name = member.name().unwrap().split_once('/').unwrap().1.to_owned();
            fs::create_dir_all(place.path(&name).parent().unwrap()).unwrap();
            let mut file = fs::File::create(place.path(&name)).unwrap();
            std::io::copy(&mut member, &mut file).unwrap();
        }
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.root.path().join(name)
    }

    fn change(&self, name: &str, change: impl FnOnce(&mut Value)) {
        let mut value = serde_json::from_slice(&fs::read(self.path(name)).unwrap()).unwrap();
        change(&mut value);
        fs::write(self.path(name), value.to_string()).unwrap();
    }

    /// Changes the header of the weights.
    fn change_header(&self, change: impl FnOnce(&mut Value)) {
        let path = self.path("model.safetensors");
        let bytes = fs::read(&path).unwrap();
        let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let mut header = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
        change(&mut header);
        let header = header.to_string().into_bytes();
        let length = (header.len() as u64).to_le_bytes();
        fs::write(path, [&length[..], &header, &bytes[8 + bytes_of_header(&bytes)..]].concat())
            .unwrap();
    }

    #[track_caller]
    fn fails(&self, expected: &str) {
        fails(self.root.path(), expected);
    }
}

fn bytes_of_header(bytes: &[u8]) -> usize {
    u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize
}

/// Converts, and expects one line of error with this text.
#[track_caller]
fn fails(path: &Path, expected: &str) {
    let model = Model::open(path, &Options::default());
    let error = match model {
        Ok(model) => model.write(1, &|_| (), &mut std::io::sink()).err(),
        Err(error) => Some(error),
    };
    let error = error.expect("an error").to_string();
    assert!(error.contains(expected), "{error}");
    assert!(!error.contains('\n'), "{error}");
}

fn zip(members: &[(&str, &[u8])], method: CompressionMethod) -> Vec<u8> {
    let mut zip = ZipWriter::new(Cursor::new(Vec::new()));
    for (name, data) in members {
        let options = SimpleFileOptions::default().compression_method(method);
        zip.start_file(*name, options).unwrap();
        zip.write_all(data).unwrap();
    }
    zip.finish().unwrap().into_inner()
}

const EMBEDDINGS: &str = "model.embed_tokens.weight";

#[test]
fn headers_that_lie() {
    let place = Place::new();
    place.change_header(|header| header[EMBEDDINGS]["data_offsets"][1] = json!(1_u64 << 40));
    place.fails("model.safetensors: expected a safetensors header");
    let place = Place::new();
    place.change_header(|header| {
        header[EMBEDDINGS]["data_offsets"] = header["model.norm.weight"]["data_offsets"].clone();
    });
    place.fails("model.safetensors: expected a safetensors header");
    let place = Place::new();
    place.change_header(|header| header[EMBEDDINGS]["shape"] = json!([u64::MAX, u64::MAX]));
    place.fails("model.safetensors: expected a safetensors header");
    let place = Place::new();
    fs::write(place.path("model.safetensors"), u64::MAX.to_le_bytes()).unwrap();
    place.fails("expected a header of at most 0 bytes, found 18446744073709551615");
    let place = Place::new();
    fs::write(place.path("model.safetensors"), b"1234").unwrap();
    place.fails("model.safetensors: it ends too early");
    let place = Place::new();
    let bytes = fs::read(place.path("model.safetensors")).unwrap();
    fs::write(place.path("model.safetensors"), &bytes[..bytes.len() - 1]).unwrap();
    place.fails("model.safetensors: expected tensors of");
}

#[test]
fn tensors_that_do_not_fit() {
    let place = Place::new();
    place.change_header(|header| header[EMBEDDINGS]["dtype"] = json!("I16"));
    place.fails("model.embed_tokens.weight: expected F32, F16 or BF16, found I16");
    let place = Place::new();
    place.change_header(|header| {
        let entry = header.as_object_mut().unwrap().remove(EMBEDDINGS).unwrap();
        header["model.strange.weight"] = entry;
    });
    place.fails("tensor: expected a tensor of qwen2, found model.strange.weight");
    let place = Place::new();
    place.change_header(|header| {
        let entry = header.as_object_mut().unwrap().remove(EMBEDDINGS).unwrap();
        header["model.layers.0.mlp.experts.7.up_proj.weight"] = entry;
    });
    place.fails("expected 3 matrices of each of 0 experts, found 1 matrices");
}

#[test]
fn numbers_of_experts_up_to_the_largest() {
    let place = Place::new();
    place.change("config.json", |config| {
        config["architectures"] = json!(["Qwen3MoeForCausalLM"]);
        config["num_local_experts"] = json!(1);
    });
    place.change_header(|header| {
        let entries = header.as_object_mut().unwrap();
        let names = entries.keys().filter(|name| name.starts_with("model.layers.0.mlp."));
        for name in names.cloned().collect::<Vec<_>>() {
            let entry = entries.remove(&name).unwrap();
            let expert = format!("mlp.experts.{}.", u64::MAX);
            entries.insert(name.replace("mlp.", &expert), entry);
        }
    });
    place.fails("expected experts 0 to 0, found 1 up to number 18446744073709551615");
}

#[test]
fn heads_wider_than_memory() {
    let place = Place::new();
    place.change("config.json", |config| {
        config["head_dim"] = json!(u32::MAX);
        config["rope_parameters"]["rope_type"] = json!("llama3");
    });
    place.fails("head_dim: expected at most 65536, found 4294967295");
}

#[test]
fn configurations_of_other_models() {
    let place = Place::new();
    place.change("config.json", |config| config["architectures"] = json!(["Evil\nModel"]));
    place.fails(r"architectures: expected one of LlamaForCausalLM");
    let place = Place::new();
    place.change("config.json", |config| config["num_attention_heads"] = json!(0));
    place.fails("num_attention_heads: expected a positive integer, found 0");
    let place = Place::new();
    place.change("config.json", |config| config["vocab_size"] = json!(1 << 24));
    place.fails(
        "vocab_size: expected at most 289, the rows of the token embeddings, found 16777216",
    );
    let place = Place::new();
    place.change("config.json", |config| config["vocab_size"] = json!(7));
    place.fails("expected ids below the 7 rows of the embeddings");
    let place = Place::new();
    fs::remove_file(place.path("config.json")).unwrap();
    place.fails("config.json: expected the model's configuration, found no file");
    let place = Place::new();
    fs::write(place.path("tokenizer.json"), "[".repeat(1 << 19)).unwrap();
    place.fails("tokenizer.json: expected JSON");
}

#[test]
fn encoders_that_would_be_computed_wrongly() {
    for (key, value, expected) in [
        ("hidden_act", json!("relu"), "hidden_act: expected \"gelu\" or "),
        ("position_embedding_type", json!("relative_key"), "expected \"absolute\", found"),
        ("is_decoder", json!(true), "is_decoder: expected false, found true"),
        ("num_hidden_layers", json!(9), "the weights do not fit config.json: "),
        ("num_attention_heads", json!(5), "the weights do not fit config.json: "),
    ] {
        let place = Place::of("bert");
        place.change("config.json", |config| config[key] = value);
        place.fails(expected);
    }
    let place = Place::of("bert");
    place.change("modules.json", |modules| {
        let dense = json!({ "path": "2_Dense", "type": "sentence_transformers.models.Dense" });
        modules.as_array_mut().unwrap().push(dense);
    });
    place.fails("modules.json: expected modules of Transformer, Pooling, Normalize, found");
    let place = Place::of("bert");
    place.change("1_Pooling/config.json", |pooling| {
        pooling["pooling_mode_cls_token"] = json!(true);
    });
    place.fails("config.json: expected mean, cls or lasttoken alone, found cls_token and mean");
    let place = Place::new();
    place.change("config.json", |config| config["hidden_act"] = json!("relu"));
    place.fails("hidden_act: expected \"silu\" or \"swish\", found \"relu\"");
    let place = Place::new();
    fs::rename(place.path("model.safetensors"), place.path("model-00001-of-00003.safetensors"))
        .unwrap();
    place.fails("expected 3 files with weights, as their names say, found 1");
}

#[test]
fn prompts_are_in_the_file() {
    let place = Place::of("bert");
    let prompts = json!({ "prompts": { "query": "query: ", "none": "" } });
    fs::write(place.path("config_sentence_transformers.json"), prompts.to_string()).unwrap();
    let model = Model::open(place.root.path(), &Options::default()).unwrap();
    let strings = |key: &str| model.metadata().strings(key).unwrap().unwrap().to_vec();
    assert_eq!(strings("bodkin.prompt.names"), [b"query"[..].into()]);
    assert_eq!(strings("bodkin.prompt.texts"), [b"query: "[..].into()]);
}

#[test]
#[cfg(unix)]
fn a_pipe_is_no_file() {
    for name in ["config.json", "model.safetensors"] {
        let place = Place::new();
        fs::remove_file(place.path(name)).unwrap();
        let made = std::process::Command::new("mkfifo").arg(place.path(name)).status().unwrap();
        assert!(made.success());
        place.fails(&format!("{name}: expected a file, found"));
    }
}

#[test]
fn files_outside_and_pickles() {
    let place = Place::new();
    let index = json!({ "weight_map": { EMBEDDINGS: "../../etc/passwd" } });
    fs::write(place.path("model.safetensors.index.json"), index.to_string()).unwrap();
    place.fails("expected the name of a file in the model's folder, found ../../etc/passwd");
    let index = json!({ "weight_map": { "a": "model.safetensors" } });
    fs::write(place.path("model.safetensors.index.json"), index.to_string()).unwrap();
    place.fails("index.json: expected tensor a, found none");
    let place = Place::new();
    let modules = json!([{ "type": "x.Pooling", "path": "/etc" }]);
    fs::write(place.path("modules.json"), modules.to_string()).unwrap();
    place.fails("expected the name of a file in the model's folder");
    let place = Place::new();
    fs::rename(place.path("model.safetensors"), place.path("pytorch_model.bin")).unwrap();
    place.fails("found pytorch_model.bin, a pickle, which may run code");
}

#[test]
fn zip_files() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("model.zip");
    let write = |bytes: &[u8]| fs::write(&path, bytes).unwrap();
    let stored = CompressionMethod::Stored;
    write(b"PK\x05\x06 or so it says");
    fails(&path, "expected a folder, a wheel or a zip file");
    write(&zip(&[("a/config.json", b"{}"), ("b/x.safetensors", b"")], stored));
    fails(&path, "expected one folder with config.json and *.safetensors inside, found none");
    write(&zip(&[("a/config.json", b"{}"), ("a/pytorch_model.bin", b"")], stored));
    fails(&path, "found weights as pickles, which may run code");
    let two: [(&str, &[u8]); 4] = [
        ("a/config.json", b"{}"),
        ("a/model.safetensors", b""),
        ("b/config.json", b"{}"),
        ("b/model.safetensors", b""),
    ];
    write(&zip(&two, stored));
    fails(&path, "found a, b");
    let bomb = vec![0; 16 << 20];
    let bomb = [("m/config.json", b"{}".as_slice()), ("m/model.safetensors", &bomb)];
    write(&zip(&bomb, CompressionMethod::Deflated));
    fails(&path, "model.safetensors: expected at most 200 times its");
    let whole =
        fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/convert/qwen2.zip"));
    let whole = whole.unwrap();
    write(&whole[..whole.len() / 2]);
    fails(&path, "expected a folder, a wheel or a zip file");
}

#[test]
fn deflated_weights_with_a_wrong_checksum() {
    let place = Place::new();
    let names = ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"];
    let files: Vec<(&str, Vec<u8>)> =
        names.into_iter().map(|name| (name, fs::read(place.path(name)).unwrap())).collect();
    let members: Vec<(&str, &[u8])> =
        files.iter().map(|(name, data)| (*name, data.as_slice())).collect();
    let mut bytes = zip(&members, CompressionMethod::Deflated);
    let weights = &files[3].1;
    let crc = flate2_crc(weights).to_le_bytes();
    for at in (0..bytes.len() - 4).rev() {
        if bytes[at..at + 4] == crc {
            bytes[at] ^= 1;
        }
    }
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("model.zip");
    fs::write(&path, bytes).unwrap();
    fails(&path, "its checksum is wrong");
}

/// The checksum of a zip file's members.
fn flate2_crc(bytes: &[u8]) -> u32 {
    let mut crc = flate2::Crc::new();
    crc.update(bytes);
    crc.sum()
}
