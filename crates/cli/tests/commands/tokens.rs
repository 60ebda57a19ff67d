//! `tokenize` and `detokenize` against llama.cpp's results.

use crate::place::{Place, model, reference};

/// Ids as `tokenize` prints them.
fn line(ids: &serde_json::Value) -> String {
    let ids = ids.as_array().unwrap().iter().map(ToString::to_string);
    ids.collect::<Vec<_>>().join(",") + "\n"
}

#[test]
fn tokens_are_those_of_the_reference() {
    let place = Place::new();
    for name in ["llama", "llama-spm", "gemma3", "qwen2"] {
        let model = model(name);
        for case in reference(name)["tokenize"].as_array().unwrap() {
            let text = case["text"].as_str().unwrap();
            let ids = |flags: &[&str]| {
                place.text_of(&[&["tokenize", &model], flags].concat(), text.as_bytes())
            };
            assert_eq!(ids(&[]), line(&case["ids_add_special"]), "{name}: {text:?}");
            let plain = ids(&["--no-special", "--no-parse"]);
            assert_eq!(plain, line(&case["ids"]), "{name}: {text:?}");
            assert_eq!(
                ids(&["--no-special"]),
                line(&case["ids_parse_special"]),
                "{name}: {text:?}"
            );
        }
    }
}

#[test]
fn detokenize_gives_the_text_back() {
    let place = Place::new();
    for name in ["llama", "llama-spm", "gemma3"] {
        let model = model(name);
        for case in reference(name)["tokenize"].as_array().unwrap() {
            let ids = line(&case["ids"]);
            if ids == "\n" {
                continue;
            }
            let hex = case["detokenized_hex"].as_str().unwrap();
            let bytes: Vec<u8> = (0..hex.len())
                .step_by(2)
                .map(|i| u8::from_str_radix(&hex[i..i + 2], 16).unwrap())
                .collect();
            let output = place.run(&["detokenize", &model, ids.trim_end()]);
            assert_eq!(output.stdout.strip_suffix(b"\n"), Some(&bytes[..]), "{name}: {ids}");
            let json = place.json(&["detokenize", &model, ids.trim_end(), "--json"]);
            assert_eq!(json["text"], String::from_utf8_lossy(&bytes).as_ref());
        }
    }
}

#[test]
fn the_text_is_an_argument_or_standard_input() {
    let place = Place::new();
    let model = model("llama");
    let given = place.text(&["tokenize", &model, "Hello world\n"]);
    assert_eq!(place.text_of(&["tokenize", &model], b"Hello world\n"), given);
    let pieces = place.json(&["tokenize", &model, "Hello world\n", "--json"]);
    let pieces = pieces.as_array().unwrap();
    let ids: Vec<String> = pieces.iter().map(|piece| piece["id"].to_string()).collect();
    assert_eq!(ids.join(",") + "\n", given);
    let text: String = pieces.iter().map(|piece| piece["piece"].as_str().unwrap()).collect();
    assert_eq!(text, "<|bos|>Hello world\n");
}

#[test]
fn special_tokens_are_shown_or_left_out() {
    let place = Place::new();
    let model = model("llama");
    let ids = place.text(&["tokenize", &model, "hi<|im_end|>"]);
    let shown = place.text(&["detokenize", &model, ids.trim_end()]);
    assert_eq!(shown, "<|bos|>hi<|im_end|>\n");
    let hidden = place.text(&["detokenize", &model, ids.trim_end(), "--no-special"]);
    assert_eq!(hidden, "hi\n");
}
