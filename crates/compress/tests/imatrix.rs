//! Activation statistics of tiny models, their file, and files that are none.

#![allow(clippy::unwrap_used)]

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;

use bodkin_backend::{
    Backend, Batch, Limits, Matmul, Model, Observer, OutputRequest, PageTable, Span, Step,
};
use bodkin_compress::imatrix::Imatrix;
use bodkin_conformance::Reference;
use bodkin_gguf::{File, Format, Metadata, Value, Writer};

const TOKENS: usize = 40;

fn load(name: &str) -> Box<dyn Model> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/parity/models");
    let file = Arc::new(File::open(folder.join(name).with_extension("gguf")).unwrap());
    let plan = Arc::new(bodkin_model::plan(file.metadata(), file.tensors()).unwrap());
    let pages = vec![2; plan.windows().len()];
    let limits = Limits { tokens: TOKENS, outputs: 1, pages, state_slots: 1 };
    Reference.load(plan, &file, &limits, &|_, _| ()).unwrap()
}

fn observe(model: &mut dyn Model, observer: &mut dyn Observer) {
    let tables = vec![PageTable { skipped: 0, pages: vec![0, 1] }; model.plan().windows().len()];
    let batch = Batch {
        tokens: (0..TOKENS as u32).map(|i| 5 + i * i % 200).collect(),
        spans: vec![Span { len: TOKENS, position: 0, tables, state_slot: 0, is_prefill: true }],
        outputs: vec![TOKENS as u32 - 1],
        ..Batch::default()
    };
    let rows = [OutputRequest::Logits];
    let step = Step { batch: &batch, requests: &rows, steps: 1, observer: Some(observer) };
    model.step(step, &mut |_| ControlFlow::Break(())).unwrap();
}

/// The rows of one weight as they come.
struct Rows(&'static str, Vec<Vec<f32>>);

impl Observer for Rows {
    fn matmul(&mut self, matmul: &Matmul<'_>) {
        if matmul.weight.name == self.0 {
            self.1.extend(matmul.rows.iter().map(|row| row.values.to_vec()));
        }
    }
}

#[test]
fn every_product_has_its_sums() {
    let mut model = load("qwen3");
    let mut rows = Rows("blk.1.ffn_down.weight", Vec::new());
    observe(model.as_mut(), &mut rows);
    let mut imatrix = Imatrix::default();
    observe(model.as_mut(), &mut imatrix);
    observe(model.as_mut(), &mut imatrix);
    let down = &imatrix.entries[rows.0];
    assert_eq!((rows.1.len(), &down.counts), (TOKENS, &vec![2 * TOKENS as u64]));
    for (i, &mean) in down.mean_squares(0).unwrap().iter().enumerate() {
        let sum: f32 = rows.1.iter().map(|row| row[i] * row[i]).sum();
        let wanted = sum / TOKENS as f32;
        assert!((mean - wanted).abs() <= 1e-5 * wanted, "column {i}: {mean}, not {wanted}");
    }
    assert!(imatrix.entries.keys().any(|name| name == "blk.0.attn_q.weight"));
    assert_eq!(imatrix.entries["output.weight"].counts, [2], "the head sees outputs alone");
}

#[test]
fn experts_have_sums_of_their_own_and_the_file_keeps_them() {
    let mut model = load("qwen3moe-q4_k_m");
    let mut imatrix = Imatrix { chunks: 1, chunk_tokens: TOKENS as u32, ..Imatrix::default() };
    imatrix.datasets.push("some text".to_owned());
    observe(model.as_mut(), &mut imatrix);
    let experts = model.stats().experts;
    for part in ["ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"] {
        let entry = &imatrix.entries[&format!("blk.0.{part}.weight")];
        assert_eq!(entry.counts, experts[0].counts);
        let (unused, used): (Vec<usize>, Vec<usize>) =
            (0..entry.counts.len()).partition(|&expert| entry.counts[expert] == 0);
        assert!(used.iter().all(|&expert| entry.mean_squares(expert).is_some()));
        assert!(unused.iter().all(|&expert| entry.mean_squares(expert).is_none()));
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("imatrix.gguf");
    imatrix.save(&path).unwrap();
    let found = Imatrix::open(&path).unwrap();
    assert_eq!((&found.datasets, found.chunks), (&imatrix.datasets, 1));
    assert_eq!(found.entries.len(), imatrix.entries.len());
    for (name, entry) in &imatrix.entries {
        let found = &found.entries[name];
        assert_eq!(found.counts, entry.counts);
        let rounded: Vec<f32> = entry.square_sums.iter().map(|&sum| sum as f32).collect();
        let read: Vec<f32> = found.square_sums.iter().map(|&sum| sum as f32).collect();
        assert_eq!(read, rounded);
    }
    // The layout that other programs read.
    let file = File::open(&path).unwrap();
    let sums = file.tensor("blk.0.ffn_down_exps.weight.in_sum2").unwrap();
    let experts = experts[0].counts.len() as u64;
    assert_eq!((sums.format, sums.shape[1]), (Format::F32, experts));
    assert_eq!(file.tensor("blk.0.ffn_down_exps.weight.counts").unwrap().shape, [1, experts]);
    assert_eq!(file.metadata().str("general.type").unwrap(), Some("imatrix"));
}

#[test]
fn files_that_are_none_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("bad.gguf");
    let kind = |kind: &str| {
        let mut metadata = Metadata::new();
        metadata.insert("general.type", Value::String(kind.as_bytes().into()));
        metadata
    };
    let two = [1.0f32, 2.0].map(f32::to_le_bytes).concat();
    let three = [1.0f32, 2.0, 3.0].map(f32::to_le_bytes).concat();
    let bad = [1.0f32, f32::NAN].map(f32::to_le_bytes).concat();
    let negative = (-1.0f32).to_le_bytes().to_vec();
    let one = 1.0f32.to_le_bytes().to_vec();
    type Tensors<'a> = &'a [(&'a str, &'a [u8])];
    let cases: [(&str, Tensors<'_>, &str); 6] = [
        ("model", &[], "expected imatrix, found model"),
        ("imatrix", &[("x.in_sum", &two)], "expected sums of squares"),
        ("imatrix", &[("x.in_sum2", &two)], "expected counts beside the sums"),
        ("imatrix", &[("x.in_sum2", &three), ("x.counts", &two)], "found 3 sums for 2 counts"),
        ("imatrix", &[("x.in_sum2", &bad), ("x.counts", &one)], "found NaN"),
        ("imatrix", &[("x.in_sum2", &two), ("x.counts", &negative)], "a number of rows, found -1"),
    ];
    for (general_type, tensors, message) in cases {
        let metadata = kind(general_type);
        let mut writer = Writer::new(&path, &metadata).unwrap();
        for (name, data) in tensors {
            writer.tensor(name, Format::F32, &[data.len() as u64 / 4], data).unwrap();
        }
        writer.save().unwrap();
        let error = Imatrix::open(&path).unwrap_err().to_string();
        assert!(error.contains(message) && error.contains("bad.gguf"), "{error}");
    }
    let mut imatrix = Imatrix::default();
    observe(load("qwen3").as_mut(), &mut imatrix);
    imatrix.entries.get_mut("output.weight").unwrap().square_sums[0] = f64::INFINITY;
    let error = imatrix.save(&path).unwrap_err().to_string();
    assert!(error.contains("`output.weight`: expected finite numbers, found inf"), "{error}");
}
