//! The library from the outside, against the results of other programs in the parity data.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use bodkin::{
    Answer, EmbeddingOptions, Encoder, Error, KvType, Message, Model, Request, SamplerOptions,
    Scorer,
};
use serde_json::Value;

fn model(name: &str) -> String {
    format!("{}/../../tests/parity/models/{name}.gguf", env!("CARGO_MANIFEST_DIR"))
}

fn reference(name: &str) -> Value {
    let path = PathBuf::from(model(name)).with_extension("json");
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

fn floats(value: &Value) -> Vec<f32> {
    value.as_array().unwrap().iter().map(|x| x.as_f64().unwrap() as f32).collect()
}

fn distance(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

#[test]
fn greedy_tokens_are_those_of_the_reference() {
    let reference = reference("llama");
    let model = Model::builder(&model("llama")).device("cpu").ctx_size(128).load().unwrap();
    assert_eq!(model.context(), 128);
    let mut cases = reference["cases"].as_array().unwrap().iter();
    let case = cases.find(|case| case["id"] == reference["greedy"]["case"]).unwrap();
    let request = Request {
        prompt: ids(&case["tokens"]),
        sampling: SamplerOptions { temperature: 0.0, ..model.request().sampling },
        max_tokens: Some(16),
        ignore_end: true,
        ..Request::default()
    };
    let answer = Answer::read(model.engine().submit(request).unwrap()).unwrap();
    assert_eq!(answer.tokens, ids(&reference["greedy"]["tokens"])[..16]);
    let case = &reference["tokenize"][0];
    assert_eq!(
        model.tokenize(case["text"].as_str().unwrap()).unwrap(),
        ids(&case["ids_add_special"])
    );
    assert_eq!(model.detokenize(&ids(&case["ids"])), case["text"].as_str().unwrap());
}

#[test]
fn chats_pass_text_on_and_reuse_the_cache() {
    let model = Model::builder(&model("llama")).device("cpu").kv_type(KvType::Q8_0).load().unwrap();
    let mut messages = vec![Message::user("Hello world, said the hen in the garden to the fox")];
    let request = || Request { max_tokens: Some(8), ..model.request() };
    let mut pieces = String::new();
    let events = model.chat(&messages, request()).unwrap();
    let first = Answer::read_with::<Box<dyn std::error::Error>>(events, |text| {
        pieces.push_str(text);
        Ok(())
    });
    let first = first.unwrap();
    assert_eq!(pieces, first.text);
    messages.push(Message::new("assistant", &first.text));
    messages.push(Message::user("And then?"));
    let second = Answer::read(model.chat(&messages, request()).unwrap()).unwrap();
    assert!(second.usage.cached_tokens > 0, "{:?}", second.usage);
}

#[test]
fn embeddings_are_those_of_the_reference() {
    let reference = reference("bert");
    let encoder = Encoder::load(&model("bert")).unwrap();
    let cases = reference["cases"].as_array().unwrap();
    let texts: Vec<Vec<u32>> = cases.iter().map(|case| ids(&case["tokens"])).collect();
    let embeddings = encoder.submit(texts.clone()).unwrap();
    assert_eq!(embeddings.tokens(), texts.iter().map(Vec::len).sum::<usize>());
    let found: Vec<Vec<f32>> = embeddings.map(Result::unwrap).collect();
    assert_eq!(found.len(), texts.len());
    for (case, embedding) in cases.iter().zip(&found) {
        let expected = floats(&case["embedding"]["hf"]);
        assert!(distance(embedding, &expected) < 1e-3, "{}", case["id"]);
    }
    let case = &reference["tokenize"][0];
    let tokens = encoder.tokenize(case["text"].as_str().unwrap()).unwrap();
    assert_eq!(tokens, ids(&case["ids_add_special"]));
}

#[test]
fn logits_are_those_of_the_reference() {
    let reference = reference("llama");
    let mut scorer = Scorer::load(&model("llama")).unwrap();
    for case in reference["cases"].as_array().unwrap().iter().take(2) {
        let rows = scorer.logits(&ids(&case["tokens"])).unwrap();
        let expected = case["logits"]["llama_cpp"].as_array().unwrap();
        for (position, expected) in ids(&case["positions"]).into_iter().zip(expected) {
            assert!(distance(&rows[position as usize], &floats(expected)) < 1e-3);
        }
    }
}

#[test]
fn errors_name_the_option_and_the_model() {
    let path = model("llama");
    let error = |builder: bodkin::Builder| builder.load().err().unwrap().to_string();
    let builder = || Model::builder(&path).device("cpu");
    assert_eq!(
        error(builder().device("tpu")),
        "device: expected auto, cpu, cuda[:N,..] or wgpu[:N], found `tpu`"
    );
    assert_eq!(error(builder().ctx_size(1)), "ctx_size: expected at least 2 tokens, found 1");
    assert_eq!(error(builder().batch_size(0)), "batch_size: expected 1 to 65536, found 0");
    assert_eq!(error(builder().parallel(0)), "parallel: expected 1 to 65536, found 0");
    assert!(error(builder().ctx_size(1 << 30).parallel(64)).contains("are missing"));
    assert!(matches!(Model::load(&model("bert")).err(), Some(Error::Encoder { .. })));
    let embedding = EmbeddingOptions { dimensions: Some(65), ..EmbeddingOptions::default() };
    assert_eq!(
        builder().embedding(embedding).load_encoder().err().unwrap().to_string(),
        "dimensions: expected 1 to 64, found 65"
    );
    assert!(matches!(Model::load("no-such-model").err(), Some(Error::UnknownModel { .. })));
}

#[test]
fn a_load_reports_to_its_callback_only() {
    let notes = Arc::new(Mutex::new(Vec::new()));
    let receiver = Arc::clone(&notes);
    let options = bodkin::Options {
        device: "cpu".to_owned(),
        activation_sparsity: Some(0.5),
        ..bodkin::Options::default()
    };
    let builder = Model::builder(&model("llama")).options(options).on_progress(move |progress| {
        receiver.lock().unwrap().push(format!("{progress:?}"));
    });
    drop(builder.load().unwrap());
    let notes = notes.lock().unwrap().join("\n");
    assert!(notes.contains("3 of 3 down projections"), "{notes}");
}

#[path = "../../cli/tests/fixtures/reranker.rs"]
mod reranker;

#[test]
fn a_reranker_scores_as_llama_server_does() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("reranker.gguf");
    reranker::write(&path);
    let encoder = Encoder::load(path.to_str().unwrap()).unwrap();
    let scores = encoder.rank(reranker::QUERY, &reranker::DOCUMENTS).unwrap();
    for (found, wanted) in scores.iter().zip(reranker::SCORES) {
        assert!((f64::from(*found) - wanted).abs() < reranker::TOLERANCE, "{scores:?}");
    }
    let error = Encoder::load(&model("bert")).unwrap().rank("a", &["b"]).unwrap_err();
    assert!(error.to_string().contains("expected a reranker"), "{error}");
}
