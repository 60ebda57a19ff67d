//! `perplexity` and `imatrix` on tiny models: files of log-probabilities, JSON, and what is
//! refused.

use std::fs;

use serde_json::Value;

use crate::place::{Place, failure, model};

/// A text of a few hundred tokens.
const TEXT: &str = "The hens in the garden, he said, were older than the house. ";

fn text(place: &Place) -> String {
    fs::write(place.path("text.txt"), TEXT.repeat(20)).unwrap();
    "text.txt".to_owned()
}

#[test]
fn a_model_does_not_diverge_from_itself() {
    let place = Place::new();
    let (model, file) = (model("llama"), text(&place));
    let base = ["--kl-divergence-base", "base.kld"];
    let args = ["perplexity", &model, "-c", "64", "--chunks", "4"];
    let whole = place.json(&[&args[..], &["-f", &file, "--json"], &base].concat());
    assert_eq!((&whole["chunks"], &whole["tokens_scored"]), (&4.into(), &124.into()));
    let bytes = fs::read(place.path("base.kld")).unwrap();
    assert_eq!(&bytes[..8], b"_logits_");
    let number = |i: usize| u32::from_le_bytes(bytes[8 + 4 * i..][..4].try_into().unwrap());
    assert_eq!([number(0), number(1), number(2)], [64, 384, 4]);
    assert_eq!(bytes.len(), 20 + 4 * 4 * 64 + 4 * 31 * (8 + 2 * 384));

    // However the model is run, and whatever rounding the file does.
    let kl = ["perplexity", &model, "--kl-divergence", "-t", "1", "--batch-size", "7"];
    let found = place.json(&[&kl[..], &base, &["--json"]].concat());
    let value = |name: &str| found[name]["value"].as_f64().unwrap();
    assert!(value("divergence").abs() < 1e-5, "{found}");
    assert!(value("same_top") > 0.97 && value("log_ratio").abs() < 1e-4, "{found}");
    let ppl = whole["perplexity"].as_f64().unwrap();
    assert!((value("perplexity") / ppl - 1.0).abs() < 1e-6, "{ppl}: {found}");
    let lines = place.text(&[&kl[..], &base].concat());
    for line in ["chunk             PPL", "Mean PPL(Q)                   : ", "Same top p: "] {
        assert!(lines.contains(line), "{lines}");
    }

    // Another model does.
    let other = crate::place::model("llama-q4_0");
    let found =
        place.json(&[&["perplexity", &other, "--kl-divergence", "--json"][..], &base].concat());
    let divergence = found["divergence"]["value"].as_f64().unwrap();
    assert!(divergence > 1.0, "random weights of another seed: {found}");
}

#[test]
fn what_cannot_be_measured_is_named() {
    let place = Place::new();
    let (model, file) = (model("llama"), text(&place));
    let run = |args: &[&str]| failure(&place.run(&[&["perplexity", &model], args].concat()));
    let error = run(&["-f", "absent.txt"]);
    assert!(error.contains("absent.txt"), "{error}");
    let error = run(&["-f", &file, "-c", "4096"]);
    assert!(error.contains("text.txt") && error.contains("windows of 4096 need 8192"), "{error}");
    assert!(run(&["-f", &file, "-c", "3"]).contains("found 3"));
    assert!(run(&["-f", &file, "-c", "64", "--chunks", "0"]).contains("--chunks"));
    let error = run(&["--kl-divergence", "--kl-divergence-base", &file]);
    assert!(error.contains("magic: expected _logits_"), "{error}");
    let encoder = crate::place::model("bert");
    let error = failure(&place.run(&["perplexity", &encoder, "-f", &file]));
    assert!(error.contains("found the encoder"), "{error}");

    // A file that is cut, of another vocabulary, with a token that is none.
    let base = ["--kl-divergence-base", "base.kld"];
    place.text(&[&["perplexity", &model, "-f", &file, "-c", "64"][..], &base].concat());
    let whole = fs::read(place.path("base.kld")).unwrap();
    let damaged = |bytes: &[u8]| {
        fs::write(place.path("bad.kld"), bytes).unwrap();
        run(&["--kl-divergence", "--kl-divergence-base", "bad.kld"])
    };
    assert!(damaged(&whole[..whole.len() - 1]).contains("size: expected"));
    assert!(damaged(&whole[..19]).contains("header: expected 20 bytes"));
    let mut bytes = whole.clone();
    bytes[8..20].fill(0xff);
    assert!(damaged(&bytes).contains("size: expected"));
    let mut bytes = whole.clone();
    bytes[20..24].fill(0xff);
    assert!(damaged(&bytes).contains("token ids below 384"));
    let other = crate::place::model("gemma3");
    let kl = ["perplexity", &other, "--kl-divergence"];
    let error = failure(&place.run(&[&kl[..], &base].concat()));
    assert!(error.contains("vocabulary: expected the model's"), "{error}");
}

#[test]
fn statistics_of_one_model_do_not_go_on_with_another() {
    let place = Place::new();
    let (model, file) = (model("qwen3moe-q4_k_m"), text(&place));
    let args = ["imatrix", &model, "-f", &file, "-c", "64", "-o", "one.gguf"];
    let said = place.text(&args);
    assert!(said.starts_with("one.gguf: "), "{said}");
    let tensors: Value = place.json(&["inspect", "one.gguf", "--json"]);
    assert!(tensors.to_string().contains("ffn_gate_exps.weight.in_sum2"), "{tensors}");
    let other = crate::place::model("llama");
    let args = ["imatrix", &other, "-f", &file, "-c", "64", "--in-file", "one.gguf"];
    let error = failure(&place.run(&args));
    assert!(error.contains("one.gguf") && error.contains("`blk."), "{error}");
    assert_eq!(place.files(), ["home", "one.gguf", "text.txt"]);
}
