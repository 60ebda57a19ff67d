//! Models whose experts do not all have a slot on the device: the bits of those that have, and what
//! the caches count. Without a GPU, on Mesa's lavapipe.

#![allow(clippy::unwrap_used)]

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;

use bodkin_backend::{
    Backend, Batch, ExpertBudget, ExpertCacheStats, Limits, Model, OutputRequest, PAGE_TOKENS,
    PageTable, SamplingParams, Span, Step,
};
use bodkin_gguf::File;
use bodkin_wgpu::Wgpu;

/// Models with experts: in layers of their own, with biases, and beside recurrent state.
const MODELS: [&str; 3] = ["qwen3moe-q4_k_m", "gpt-oss-mxfp4", "nemotron-h-moe-latent"];
/// Tokens of two prompts, in chunks of some; those generated after them in the same steps, of which
/// the device finds the last.
const PROMPT: usize = 40;
const CHUNK: usize = 24;
const DECODED: usize = 8;
const GREEDY: usize = 8;
const PAGES: usize = (PROMPT + DECODED + GREEDY).div_ceil(PAGE_TOKENS);

/// What a run gives: the bits of all logits and the last tokens of two sequences, and the sum of
/// what the caches did.
type Run = (Vec<u32>, Vec<Option<u32>>, Option<ExpertCacheStats>);

/// A step of two sequences.
fn batch(windows: usize, position: usize, len: usize) -> Batch {
    let span = |sequence: usize| Span {
        len,
        position,
        tables: vec![
            PageTable {
                skipped: 0,
                pages: (0..PAGES).map(|page| (sequence * PAGES + page) as u32).collect(),
            };
            windows
        ],
        state_slot: sequence as u32,
        // The second sequence is still a prompt where the first one has begun to generate.
        is_prefill: position < PROMPT || (sequence == 1 && position == PROMPT),
    };
    let token = |i: usize| (5 + (i * i) % 89) as u32;
    let tokens = (0..2).flat_map(|s| (position..position + len).map(move |i| token(i + 7 * s)));
    Batch {
        tokens: tokens.collect(),
        spans: (0..2).map(span).collect(),
        outputs: (0..2 * len as u32).collect(),
        ..Batch::default()
    }
}

fn run(file: &Arc<File>, gpu: &Wgpu) -> Run {
    let plan = Arc::new(bodkin_model::plan(file.metadata(), file.tensors()).unwrap());
    let windows = plan.windows().len();
    let limits = Limits {
        tokens: 2 * CHUNK,
        outputs: 2 * CHUNK,
        pages: vec![2 * PAGES; windows],
        state_slots: 2,
    };
    let mut model = gpu.load(Arc::clone(&plan), file, &limits, &|_, _| ()).unwrap();
    let mut bits = Vec::new();
    let mut step = |model: &mut dyn Model, position: usize, len: usize| {
        let mut logits = vec![0.0f32; 2 * len * plan.output_width()];
        model.forward(&batch(windows, position, len), &mut logits).unwrap();
        bits.extend(logits.iter().map(|x| x.to_bits()));
    };
    for start in (0..PROMPT).step_by(CHUNK) {
        step(model.as_mut(), start, CHUNK.min(PROMPT - start));
    }
    (PROMPT..PROMPT + DECODED).for_each(|position| step(model.as_mut(), position, 1));
    let greedy = SamplingParams::greedy();
    let requests = [OutputRequest::Token(&greedy), OutputRequest::Token(&greedy)];
    let batch = batch(windows, PROMPT + DECODED, 1);
    let mut tokens = Vec::new();
    let steps = Step { batch: &batch, requests: &requests, steps: GREEDY, observer: None };
    let mut sink = |output: bodkin_backend::StepOutput<'_>| {
        tokens.extend_from_slice(output.tokens);
        ControlFlow::Continue(())
    };
    model.step(steps, &mut sink).unwrap();
    let caches = model.stats().experts.into_iter().map(|layer| layer.cache);
    let caches = caches.collect::<Option<Vec<_>>>();
    (bits, tokens, caches.and_then(|all| all.into_iter().reduce(ExpertCacheStats::and)))
}

#[test]
fn cached_experts_change_no_bit() {
    let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/parity/models");
    let gpu = Wgpu::open(0).unwrap();
    assert!(gpu.caches_experts());
    for name in MODELS {
        let file = Arc::new(bodkin_model::open(models.join(format!("{name}.gguf"))).unwrap());
        let with = |share| run(&file, &gpu.clone().with_expert_budget(ExpertBudget::Share(share)));
        let wanted = with(1.0);
        assert_eq!(wanted.2, None, "{name}: all experts are on the device");
        let mut uses = None;
        for share in [0.0, 0.5] {
            let found = with(share);
            assert!(found.0 == wanted.0, "{name}: other logits with {share} of the experts");
            assert!(found.1 == wanted.1, "{name}: other tokens with {share} of the experts");
            let ExpertCacheStats { slots, hits, misses, fills, .. } = found.2.unwrap();
            assert!(hits > 0 && misses >= fills && fills >= slots as u64, "{name}: {:?}", found.2);
            // With one slot, experts lose it, and others are read from the host's memory.
            let is_full = fills > slots as u64 && misses > fills;
            assert!(is_full || share > 0.0, "{name}: {:?}", found.2);
            assert_eq!(*uses.get_or_insert(hits + misses), hits + misses, "{name}");
        }
    }
}
