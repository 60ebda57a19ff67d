//! Fuzz targets: functions that parse hostile bytes and must not panic. Each returns whether the
//! bytes were accepted. Both cargo-fuzz (`fuzz_targets`) and the mutation runner (`main.rs`, for
//! stable compilers) call them.

#![forbid(unsafe_code)]

pub mod convert;
pub mod seeds;

use std::cell::RefCell;
use std::hint::black_box;
use std::io::{Seek, Write};

use bodkin::source::Manifest;
use bodkin_compress::imatrix::Imatrix;
use bodkin_compress::surgery::Surgery;
use bodkin_engine::{Template, Tokenizer};
use bodkin_eval::Base;
use bodkin_gguf::{File, Writer};
use serde_json::{Map, json};
use tempfile::NamedTempFile;

/// A fuzz target by its name.
pub struct Target {
    /// The name of its file in `fuzz_targets`.
    pub name: &'static str,
    /// Parses bytes, and returns whether they were accepted.
    pub parse: fn(&[u8]) -> bool,
    /// Small valid inputs.
    pub seeds: fn() -> Vec<Vec<u8>>,
    /// Words of the format, for insertion.
    pub dictionary: &'static [&'static str],
}

/// All targets.
pub const TARGETS: [Target; 8] = [
    Target {
        name: "convert",
        parse: convert::parse,
        seeds: convert::seeds,
        dictionary: convert::WORDS,
    },
    Target { name: "gguf", parse: gguf, seeds: seeds::gguf, dictionary: &[] },
    Target { name: "imatrix", parse: imatrix, seeds: seeds::imatrix, dictionary: &[] },
    Target { name: "kld", parse: kld, seeds: seeds::kld, dictionary: &[] },
    Target {
        name: "manifest",
        parse: manifest,
        seeds: seeds::manifest,
        dictionary: seeds::MANIFEST,
    },
    Target { name: "surgery", parse: surgery, seeds: seeds::surgery, dictionary: seeds::SURGERY },
    Target { name: "template", parse: template, seeds: seeds::template, dictionary: seeds::JINJA },
    Target {
        name: "tokenizer",
        parse: tokenizer,
        seeds: seeds::tokenizer,
        dictionary: seeds::TOKENIZER,
    },
];

/// The longest row that is dequantised, in elements, to keep runs short.
const MAX_ELEMENTS: usize = 1 << 12;

/// A GGUF file: reads metadata and data, and writes the file again.
pub fn gguf(bytes: &[u8]) -> bool {
    let Ok(file) = File::from_bytes("fuzz.gguf", bytes.to_vec()) else { return false };
    let _ = black_box(file.metadata().architecture());
    for (key, _) in file.metadata().iter() {
        let _ = black_box(file.metadata().u32s(key));
        let _ = black_box(file.metadata().f32s(key));
        let _ = black_box(file.metadata().bools(key));
        let _ = black_box(file.metadata().str(key));
        let _ = black_box(file.metadata().strings(key));
    }
    let mut writer = Writer::new("fuzz.gguf", file.metadata()).expect("valid metadata");
    for tensor in file.tensors() {
        let format = tensor.format;
        let data = file.data(tensor);
        assert_eq!(data.len() as u64, tensor.bytes);
        let mut values = vec![0.0; tensor.cols().min(MAX_ELEMENTS)];
        if values.len() == tensor.cols() {
            format.dequantize_row(format.row(data, tensor.rows(), 0), &mut values);
        }
        black_box(&values);
        writer.tensor(&tensor.name, format, &tensor.shape, data).expect("a valid tensor");
    }
    let mut written = Vec::new();
    writer.write_to(&mut written).expect("enough memory");
    File::from_bytes("again.gguf", written).expect("a written file is valid");
    true
}

/// An importance matrix, in a GGUF file.
pub fn imatrix(bytes: &[u8]) -> bool {
    let Ok(file) = File::from_bytes("fuzz.gguf", bytes.to_vec()) else { return false };
    Imatrix::from_file(&file).map(black_box).is_ok()
}

/// A file of base logits for KL divergence: reads all windows.
pub fn kld(bytes: &[u8]) -> bool {
    thread_local! {
        static FILE: RefCell<NamedTempFile> = RefCell::new(NamedTempFile::new().expect("a file"));
    }
    FILE.with_borrow_mut(|file| {
        file.as_file().set_len(0).and_then(|()| file.rewind()).expect("a writable file");
        file.write_all(bytes).expect("a writable file");
        let Ok(mut base) = Base::open(file.path(), None) else { return false };
        let mut rows = Vec::new();
        for _ in 0..base.windows().count() {
            if base.read_window(&mut rows).is_err() {
                return false;
            }
            for index in 0..base.windows().scored().len() {
                black_box(base.row(&rows, index).log_probabilities().sum::<f32>());
            }
        }
        true
    })
}

/// A manifest of an Ollama store or registry, whose digests become file names.
pub fn manifest(bytes: &[u8]) -> bool {
    let Ok(Manifest { model, layers }) = Manifest::parse(bytes, "fuzz") else { return false };
    for layer in layers.iter().chain([&model]) {
        let is_hexadecimal = layer.digest.bytes().all(|byte| byte.is_ascii_hexdigit());
        assert!(layer.digest.len() == 64 && is_hexadecimal, "{layer:?}");
    }
    true
}

/// A surgery file of `prune`.
pub fn surgery(bytes: &[u8]) -> bool {
    let Ok(text) = std::str::from_utf8(bytes) else { return false };
    Surgery::parse("fuzz.toml", text).map(black_box).is_ok()
}

/// A chat template: compiles it, and renders a conversation with a tool.
pub fn template(bytes: &[u8]) -> bool {
    let Ok(source) = std::str::from_utf8(bytes) else { return false };
    let Ok(template) = Template::new(source, "<s>", "</s>") else { return false };
    let messages = json!([
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather in \u{c5}rhus?"},
        {"role": "assistant", "content": null, "tool_calls": [{"id": "1", "type": "function",
            "function": {"name": "weather", "arguments": {"city": "\u{c5}rhus", "days": 2}}}]},
        {"role": "tool", "tool_call_id": "1", "content": "12.5"},
    ]);
    let tools = json!([{"type": "function", "function": {"name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}]);
    template.render(&messages, Some(&tools), true, &Map::new()).map(black_box).is_ok()
}

/// The tokenizer of a GGUF file: encodes a text and decodes it again.
pub fn tokenizer(bytes: &[u8]) -> bool {
    let Ok(file) = File::from_bytes("fuzz.gguf", bytes.to_vec()) else { return false };
    let Ok(tokenizer) = Tokenizer::from_metadata(file.metadata()) else { return false };
    let text = "<s>Hello w\u{f6}rld  42\n\t\u{65e5}\u{672c}\u{1f600}</s>";
    for (add_special, parse_special) in [(true, true), (false, false)] {
        let ids = tokenizer.encode(text, add_special, parse_special);
        assert!(ids.iter().all(|&id| (id as usize) < tokenizer.vocab_size()), "{ids:?}");
        black_box(tokenizer.decode(&ids, true));
    }
    for id in [tokenizer.bos(), tokenizer.eos(), tokenizer.unknown(), Some(u32::MAX)] {
        black_box(id.map(|id| tokenizer.piece(id, true)));
    }
    true
}
