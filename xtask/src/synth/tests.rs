//! Small files in formats of all kinds load, plan, run and have a tokenizer.

use std::sync::Arc;

use bodkin_backend::{Backend, Batch, Limits, PageTable, Span};
use bodkin_conformance::Reference;
use bodkin_engine::Tokenizer;
use bodkin_gguf::File;
use bodkin_model::Plan;

use super::shape::{Kind, Latent, Mixer, SharingExperts, Tensor};
use super::*;

fn tiny(format: &str, seed: u64) -> File {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("tiny.gguf");
    let format = format.to_owned();
    run(&Args { shape: Size::Tiny, format, out: out.clone(), seed, sparsity: 0.5, routing: None })
        .unwrap();
    File::open(out).unwrap()
}

#[test]
fn tiny_models_run() {
    for name in [
        "F32",
        "F16",
        "BF16",
        "Q8_0",
        "q4_0",
        "Q4_K",
        "Q6_K",
        "IQ2_XS",
        "TQ2_0",
        "MXFP4",
        "S24_Q8_0",
        "CSR_F16",
        "bitmap_q4_0",
    ] {
        let file = Arc::new(tiny(name, 1));
        let format = Format::from_name(name).unwrap();
        for tensor in file.tensors().iter().filter(|t| t.name.starts_with("blk.")) {
            let is_norm = tensor.name.contains("norm");
            assert_eq!(
                tensor.format,
                if is_norm { Format::F32 } else { format },
                "{}",
                tensor.name
            );
        }
        check(&file, name);
    }
}

#[test]
fn experts_hybrids_and_shared_layers_run() {
    let experts =
        Shape { width: 256, hidden: 256, layers: 2, vocabulary: 512, ..Size::Moe.shape() };
    let mixer = Mixer { inner: 512, heads: 8, groups: 1, state: 32 };
    let kind = Kind::Hybrid { every: 3, mixer, experts: None };
    let hybrid = Shape { kind, layers: 3, vocabulary: 512, ..Size::Hybrid.shape() };
    let hybrid = Shape { width: 256, hidden: 512, heads: 4, kv_heads: 2, head_dim: 64, ..hybrid };
    let kind = Kind::Delta { every: 3, key_heads: 2, value_heads: 4, state: 64 };
    let delta = Shape { kind, ..hybrid };
    let kind = Kind::Gemma { every: 2, global_dim: 128, window: 4, shared: 2, input: 256 };
    let gemma = Shape { kind, layers: 4, ..hybrid };
    // Rows of 96 are no whole blocks of Q4_K.
    let kind = Kind::SharedExpert { count: 8, used: 2, hidden: 96 };
    let shared = Shape { kind, ..hybrid };
    let latent = Latent { q_rank: 96, rank: 64, nope: 32, rotary: 16, value: 48 };
    let kind = Kind::Latent { latent, count: 8, used: 2, hidden: 96 };
    let latent = Shape { kind, kv_heads: 1, ..hybrid };
    let kind = Kind::Sinks { count: 8, used: 2, window: 4 };
    let sinks = Shape { kind, ..hybrid };
    let few = SharingExperts { count: 8, used: 2, hidden: 96, shared: 256 };
    let kind = Kind::Hybrid { every: 3, mixer, experts: Some(few) };
    let granite = Shape { kind, ..hybrid };
    let mixer = Mixer { groups: 2, ..mixer };
    let kind = Kind::Blocks { layers: "ME*", mixer, experts: few };
    let nemotron = Shape { kind, ..hybrid };
    for (shape, ops) in [
        (granite, ["scan", "expert_sum"]),
        (nemotron, ["scan", "expert_sum"]),
        (sinks, ["route", "attention"]),
        (gemma, ["attention", "softcap"]),
        (shared, ["route", "expert_sum"]),
        (latent, ["attention", "expert_sum"]),
        (experts, ["route", "expert_sum"]),
        (hybrid, ["scan", "attention"]),
        (delta, ["delta_rule", "attention"]),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path().join("small.gguf");
        write((&shape, None), Format::Q4_K, 0.0, 1, "small", &out).unwrap();
        let plan = check(&Arc::new(File::open(out).unwrap()), ops[0]);
        assert!(ops.iter().all(|name| plan.ops.iter().any(|op| op.name() == *name)), "{ops:?}");
    }
}

#[test]
fn encoders_have_plans() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("encoder.gguf");
    let shape = Shape { layers: 2, vocabulary: 512, ..Size::BgeLarge.shape() };
    write((&shape, None), Format::Q8_0, 0.0, 1, "encoder", &out).unwrap();
    let file = File::open(out).unwrap();
    let plan = bodkin_model::plan(file.metadata(), file.tensors()).unwrap();
    assert_eq!(plan.ops.last().map(|op| op.name()), Some("pool"));
}

/// Runs a few tokens: the logits are of an ordinary size.
fn check(file: &Arc<File>, name: &str) -> Arc<Plan> {
    let plan = Arc::new(bodkin_model::plan(file.metadata(), file.tensors()).unwrap());
    let state_slots = usize::from(!plan.states.is_empty());
    let windows = plan.windows().len();
    let limits = Limits { tokens: 5, outputs: 5, pages: vec![1; windows], state_slots };
    let mut model = Reference.load(Arc::clone(&plan), file, &limits, &|_, _| ()).unwrap();
    let tables = vec![PageTable { skipped: 0, pages: vec![0] }; windows];
    let batch = Batch {
        tokens: vec![510, 72, 101, 300, 7],
        spans: vec![Span { len: 5, position: 0, tables, state_slot: 0, is_prefill: true }],
        outputs: (0..5).collect(),
        ..Batch::default()
    };
    let mut logits = vec![0.0; 5 * plan.vocabulary];
    model.forward(&batch, &mut logits).unwrap();
    assert!(logits.iter().all(|x| x.is_finite()), "{name}");
    let mean_square = logits.iter().map(|x| x * x).sum::<f32>() / logits.len() as f32;
    assert!((0.01..100.0).contains(&mean_square), "{name}: mean square {mean_square}");
    plan
}

#[test]
fn the_tokenizer_takes_any_text() {
    let tokenizer = Tokenizer::from_metadata(tiny("Q8_0", 1).metadata()).unwrap();
    assert_eq!(tokenizer.vocab_size(), 512);
    let text = "cabbage, W\u{f6}rld \u{1f980}\n\0";
    let ids = tokenizer.encode(text, true, true);
    assert_eq!(ids[0], 510, "the text begins with the token for it");
    assert_eq!(tokenizer.decode(&ids[1..], false), text.as_bytes());
    assert!(ids.len() < text.len(), "words of several letters are tokens");
}

#[test]
fn the_seed_decides() {
    let bytes = |seed| {
        let file = tiny("Q4_0", seed);
        let tensor = file.tensor("blk.1.ffn_up.weight").unwrap();
        file.data(tensor).to_vec()
    };
    assert_eq!(bytes(1), bytes(1));
    assert_ne!(bytes(1), bytes(2));
}

#[test]
fn large_shapes_are_those_of_the_models() {
    let parameters = |shape: Shape| -> u64 {
        let elements = |t: &Tensor| t.shape.iter().map(|&n| u64::from(n)).product::<u64>();
        shape.tensors().iter().map(elements).sum()
    };
    assert_eq!(parameters(Size::OneB.shape()), 1_235_814_400);
    assert_eq!(parameters(Size::EightB.shape()), 8_030_261_248);
    assert_eq!(parameters(Size::SeventyB.shape()), 70_553_706_496);
    assert_eq!(parameters(Size::Delta.shape()), 4_205_751_296);
    assert_eq!(parameters(Size::Gemma4.shape()), 7_463_013_674);
    assert_eq!(parameters(Size::WholeA3b.shape()), 30_532_122_624);
    assert_eq!(parameters(Size::GptOss.shape()), 116_829_156_672);
    assert_eq!(parameters(Size::Nemotron.shape()), 31_577_940_288);
    assert_eq!(parameters(Size::Granite.shape()), 6_939_037_248);
    assert_eq!(parameters(Size::BgeLarge.shape()), 334_092_288);
}

#[test]
fn what_holds_no_weights_is_refused() {
    for (format, part) in [("Q9", "`Q9` is no format"), ("Q8_K", "holds no weights")] {
        let (format, out) = (format.to_owned(), "x".into());
        let args = Args { shape: Size::Tiny, format, out, seed: 0, sparsity: 0.0, routing: None };
        assert!(run(&args).unwrap_err().to_string().contains(part));
    }
}
