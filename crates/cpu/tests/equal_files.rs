//! Files that say the same in other tensors give the same bits: one tensor for queries, keys and
//! values instead of three, and weights beside which there are scales.

#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::sync::Arc;

use bodkin_backend::{Backend, Batch, Limits, PageTable, Span};
use bodkin_cpu::Cpu;
use bodkin_gguf::{File, Format, Tensor};

const TOKENS: usize = 24;

fn open(name: &str) -> File {
    let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/parity/models");
    bodkin_model::open(models.join(name).with_extension("gguf")).unwrap()
}

/// The bits of the logits of all tokens of a short text.
fn logits(file: File) -> Vec<u32> {
    let plan = Arc::new(bodkin_model::plan(file.metadata(), file.tensors()).unwrap());
    let windows = plan.windows().len();
    let limits =
        Limits { tokens: TOKENS, outputs: TOKENS, pages: vec![1; windows], state_slots: 1 };
    let cpu = Cpu::new(Some(2)).unwrap();
    let mut model = cpu.load(Arc::clone(&plan), &Arc::new(file), &limits, &|_, _| ()).unwrap();
    let tables = vec![PageTable { skipped: 0, pages: vec![0] }; windows];
    let batch = Batch {
        tokens: (0..TOKENS).map(|i| (5 + i * i % 89) as u32).collect(),
        spans: vec![Span { len: TOKENS, position: 0, tables, state_slot: 0, is_prefill: true }],
        outputs: (0..TOKENS as u32).collect(),
        ..Batch::default()
    };
    let mut rows = vec![0.0f32; TOKENS * plan.output_width()];
    model.forward(&batch, &mut rows).unwrap();
    rows.iter().map(|x| x.to_bits()).collect()
}

/// Replaces `attn_q`, `attn_k` and `attn_v` of all blocks that have them by `attn_qkv`. Returns how
/// often.
fn fuse(file: &mut File) -> usize {
    let tensor = |name: String| file.tensor(&name).cloned();
    let parts = |block: usize| -> Option<Vec<Tensor>> {
        ["q", "k", "v"]
            .map(|x| tensor(format!("blk.{block}.attn_{x}.weight")))
            .into_iter()
            .collect()
    };
    let fused: Vec<_> = (0..64).filter_map(|block| Some((block, parts(block)?))).collect();
    let count = fused.len();
    for (block, parts) in fused {
        let rows = parts.iter().map(|part| part.shape[1]).sum();
        let (format, shape) = (parts[0].format, [parts[0].shape[0], rows]);
        file.retain_tensors(|tensor| parts.iter().all(|part| part.name != tensor.name));
        let bytes =
            move |file: &File| parts.iter().flat_map(|part| file.data(part).to_vec()).collect();
        file.add_tensor(&format!("blk.{block}.attn_qkv.weight"), format, &shape, bytes).unwrap();
    }
    count
}

#[test]
fn queries_keys_and_values_may_be_one_tensor() {
    // Gated attention beside linear attention, normed attention with shared slots, plain attention.
    for (name, blocks) in [("qwen35", 1), ("gemma4-e2b", 3), ("llama", 3)] {
        let mut fused = open(name);
        assert_eq!(fuse(&mut fused), blocks, "{name}");
        assert_eq!(logits(fused), logits(open(name)), "{name}");
    }
}

#[test]
fn weights_may_have_scales() {
    let mut scaled = open("llama");
    let is_scaled = |name: &str| {
        ["attn_q.", "attn_output.", "ffn_gate.", "ffn_down."].iter().any(|part| name.contains(part))
    };
    let weights: Vec<Tensor> =
        scaled.tensors().iter().filter(|tensor| is_scaled(&tensor.name)).cloned().collect();
    assert_eq!(weights.len(), 12);
    scaled.retain_tensors(|tensor| !is_scaled(&tensor.name));
    for weight in weights {
        let (name, shape) = (weight.name.clone(), weight.shape.clone());
        // A power of two changes no bit of a product.
        let halves = move |file: &File| {
            let mut values = vec![0.0; weight.elements() as usize];
            weight.format.dequantize(file.data(&weight), &mut values);
            values.iter().flat_map(|x| (0.5 * x).to_le_bytes()).collect()
        };
        scaled.add_tensor(&name, Format::F32, &shape, halves).unwrap();
        let scale = name.replace(".weight", ".scale");
        let two = |_: &File| 2f32.to_le_bytes().to_vec();
        scaled.add_tensor(&scale, Format::F32, &[1], two).unwrap();
    }
    assert_eq!(logits(scaled), logits(open("llama")));
}
