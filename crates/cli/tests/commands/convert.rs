//! `convert`: safetensors to a model that runs.

use std::fs;

use bodkin_gguf::File;

use crate::place::Place;

fn source(name: &str) -> String {
    format!("{}/../../tests/convert/{name}.zip", env!("CARGO_MANIFEST_DIR"))
}

#[test]
fn a_converted_model_runs() {
    let place = Place::new();
    for (name, kind) in [("llama3", "Q8_0"), ("qwen3moe", "BF16"), ("mamba2", "F32")] {
        let path = place.path(&format!("{name}.gguf")).display().to_string();
        let printed = place.text_of(&["convert", &source(name), &path, "--type", kind], b"");
        assert!(printed.contains("bits per weight"), "{printed}");
        assert!(File::open(&path).is_ok());
        let logits = place.path("logits.npy").display().to_string();
        place.text_of(&["logits", &path, "--tokens", "1,2,3", "--output", &logits], b"");
        assert!(fs::metadata(&logits).unwrap().len() > 280 * 4);
    }
}

#[test]
fn an_encoder_embeds() {
    let place = Place::new();
    for name in ["bert", "nomic"] {
        let path = place.path(&format!("{name}.gguf")).display().to_string();
        place.text_of(&["convert", &source(name), &path], b"");
        let line = place.text_of(&["embed", &path, "the model"], b"");
        assert!(line.starts_with("{\"embedding\":["), "{line}");
    }
}
