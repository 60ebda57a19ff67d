//! A few models of the parity data on every instruction set, against the logits of llama.cpp and
//! transformers. `cargo xtask parity` runs all models in more ways; this runs on emulated
//! processors too.

#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::sync::Arc;

use bodkin_backend::{Backend, Batch, Limits, PAGE_TOKENS, PageTable, Span};
use bodkin_cpu::{Cpu, Isa};
use bodkin_gguf::{File, Format, Tensor};
use serde_json::Value;

/// The most that float and quantised weights may be off, as in `cargo xtask parity`.
const NMSE: [f64; 2] = [1e-6, 1e-3];

/// The common layouts, experts, scans and delta rules.
const MODELS: [&str; 8] = [
    "llama-q4_k_m",
    "llama-q4_0",
    "llama-f16",
    "qwen2-q8_0",
    "qwen3moe-q4_k_m",
    "gpt-oss-mxfp4",
    "qwen35",
    "falcon-h1",
];
/// The longest prompt.
const TOKENS: usize = 40;

fn integers(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|value| value.as_u64().unwrap() as u32).collect()
}

fn floats(value: &Value) -> Vec<f32> {
    value.as_array().unwrap().iter().map(|value| value.as_f64().unwrap() as f32).collect()
}

/// The logits at some positions of a prompt, with the whole prompt in one step.
fn logits(isa: Isa, file: &Arc<File>, tokens: &[u32], positions: &[u32]) -> Vec<f32> {
    let plan = Arc::new(bodkin_model::plan(file.metadata(), file.tensors()).unwrap());
    let (len, windows) = (tokens.len(), plan.windows().len());
    let pages = len.div_ceil(PAGE_TOKENS);
    let limits = Limits { tokens: len, outputs: len, pages: vec![pages; windows], state_slots: 1 };
    let cpu = Cpu { isa, ..Cpu::new(Some(1)).unwrap() };
    let mut model = cpu.load(Arc::clone(&plan), file, &limits, &|_, _| ()).unwrap();
    let tables = vec![PageTable { skipped: 0, pages: (0..pages as u32).collect() }; windows];
    let batch = Batch {
        tokens: tokens.to_vec(),
        spans: vec![Span { len, position: 0, tables, state_slot: 0, is_prefill: true }],
        outputs: positions.to_vec(),
        ..Batch::default()
    };
    let mut rows = vec![0.0; positions.len() * plan.output_width()];
    model.forward(&batch, &mut rows).unwrap();
    rows
}

#[test]
fn every_isa_has_the_logits_of_other_engines() {
    let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/parity/models");
    for name in MODELS {
        let gguf = models.join(name).with_extension("gguf");
        let kit = std::fs::read_to_string(gguf.with_extension("json")).unwrap();
        let kit: Value = serde_json::from_str(&kit).unwrap();
        let reference = kit["reference"].as_str().unwrap();
        let file = Arc::new(bodkin_model::open(&gguf).unwrap());
        let is_float = |tensor: &Tensor| tensor.format == Format::F32;
        let limit = NMSE[usize::from(!file.tensors().iter().all(is_float))];
        let len = |case: &&Value| integers(&case["tokens"]).len();
        let cases = kit["cases"].as_array().unwrap().iter().filter(|case| len(case) <= TOKENS);
        let case = cases.max_by_key(len).unwrap();
        let (tokens, positions) = (integers(&case["tokens"]), integers(&case["positions"]));
        let rows = case["logits"][reference].as_array().unwrap();
        let wanted: Vec<f32> = rows.iter().flat_map(floats).collect();
        for isa in Isa::available() {
            let found = logits(isa, &file, &tokens, &positions);
            assert_eq!(found.len(), wanted.len(), "{name}");
            let square = |x: f32| f64::from(x).powi(2);
            let error: f64 = found.iter().zip(&wanted).map(|(f, w)| square(f - w)).sum();
            let nmse = error / wanted.iter().map(|&w| square(w)).sum::<f64>();
            assert!(nmse <= limit, "{name} on {isa}: NMSE {nmse:.1e}, at most {limit:.0e}");
        }
    }
}
