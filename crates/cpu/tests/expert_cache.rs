//! Models whose experts do not all have memory: the bits of those that have, and what the caches
//! count.

#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::sync::Arc;

use bodkin_backend::{
    Backend, Batch, ExpertBudget, ExpertCacheStats, Limits, Model, PAGE_TOKENS, PageTable, Span,
};
use bodkin_cpu::Cpu;
use bodkin_gguf::File;

/// Tokens of two prompts, in chunks of some, and those generated after them in the same steps.
const PROMPT: usize = 40;
const CHUNK: usize = 24;
const DECODED: usize = 24;
const PAGES: usize = (PROMPT + DECODED).div_ceil(PAGE_TOKENS);

/// The bits of all logits of two sequences, and the sum of what the caches did.
fn run(file: &Arc<File>, cpu: Cpu) -> (Vec<u32>, Option<ExpertCacheStats>) {
    let plan = Arc::new(bodkin_model::plan(file.metadata(), file.tensors()).unwrap());
    let windows = plan.windows().len();
    let limits = Limits {
        tokens: 2 * CHUNK,
        outputs: 2 * CHUNK,
        pages: vec![2 * PAGES; windows],
        state_slots: 2,
    };
    let mut model = cpu.load(Arc::clone(&plan), file, &limits, &|_, _| ()).unwrap();
    let mut bits = Vec::new();
    let mut step = |model: &mut dyn Model, position: usize, len: usize| {
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
            is_prefill: position < PROMPT,
        };
        let token = |i: usize| (5 + (i * i) % 89) as u32;
        let tokens = (0..2).flat_map(|s| (position..position + len).map(move |i| token(i + 7 * s)));
        let batch = Batch {
            tokens: tokens.collect(),
            spans: (0..2).map(span).collect(),
            outputs: (0..2 * len as u32).collect(),
            ..Batch::default()
        };
        let mut logits = vec![0.0f32; 2 * len * plan.output_width()];
        model.forward(&batch, &mut logits).unwrap();
        bits.extend(logits.iter().map(|x| x.to_bits()));
    };
    for start in (0..PROMPT).step_by(CHUNK) {
        step(model.as_mut(), start, CHUNK.min(PROMPT - start));
    }
    (PROMPT..PROMPT + DECODED).for_each(|position| step(model.as_mut(), position, 1));
    let caches = model.stats().experts.into_iter().map(|layer| layer.cache);
    let sum = |a: ExpertCacheStats, b: ExpertCacheStats| ExpertCacheStats {
        slots: a.slots.max(b.slots),
        hits: a.hits + b.hits,
        misses: a.misses + b.misses,
        fills: a.fills + b.fills,
        reads: a.reads + b.reads,
        predicted: a.predicted + b.predicted,
    };
    (bits, caches.collect::<Option<Vec<_>>>().and_then(|all| all.into_iter().reduce(sum)))
}

#[test]
fn cached_experts_change_no_bit() {
    let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/parity/models");
    let (mut tried, mut has_predicted) = (0, false);
    for entry in std::fs::read_dir(models).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|extension| extension != "gguf") {
            continue;
        }
        let file = Arc::new(bodkin_model::open(&path).unwrap());
        let plan = bodkin_model::plan(file.metadata(), file.tensors()).unwrap();
        if plan.routed_layers().is_empty() || plan.is_encoder() {
            continue;
        }
        tried += 1;
        let cpu = Cpu::new(Some(2)).unwrap();
        let (wanted, none) = run(&file, cpu);
        assert_eq!(none, None, "{}", path.display());
        let cached = |share, threads| {
            let cpu = Cpu::new(Some(threads)).unwrap();
            run(&file, Cpu { expert_budget: ExpertBudget::Share(share), ..cpu })
        };
        let mut uses = None;
        for (share, threads) in [(0.0, 2), (0.5, 1), (0.5, 3)] {
            let (found, cache) = cached(share, threads);
            assert!(found == wanted, "{}: {share} of the experts", path.display());
            let ExpertCacheStats { slots, hits, misses, fills, reads, predicted } = cache.unwrap();
            assert_eq!(reads, misses, "{cache:?}");
            assert!(predicted <= misses, "{cache:?}");
            has_predicted |= predicted > 0;
            let name = path.display();
            assert!(hits > 0 && misses >= fills && fills >= slots as u64, "{name}: {cache:?}");
            assert_eq!(*uses.get_or_insert(hits + misses), hits + misses, "{name}");
        }
        assert_eq!(cached(1.0, 2), (wanted, None), "{}", path.display());
    }
    assert!(tried >= 4 && has_predicted, "{tried} models with experts");
}

#[test]
fn experts_that_the_file_has_in_another_form_are_refused() {
    let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/parity/models");
    let mut file = bodkin_model::open(models.join("qwen3moe-q4_k_m.gguf")).unwrap();
    let name = "blk.0.ffn_up_exps.weight";
    let stored = file.tensor(name).unwrap().clone();
    file.retain_tensors(|tensor| tensor.name != name);
    let (format, shape) = (stored.format, stored.shape.clone());
    file.add_tensor(name, format, &shape, move |file: &File| file.data(&stored).to_vec()).unwrap();
    let plan = Arc::new(bodkin_model::plan(file.metadata(), file.tensors()).unwrap());
    let limits = Limits { tokens: 1, outputs: 1, pages: vec![1], state_slots: 0 };
    let file = Arc::new(file);
    let load = |share| {
        let expert_budget = ExpertBudget::Share(share);
        let cpu = Cpu { expert_budget, ..Cpu::new(Some(1)).unwrap() };
        cpu.load(Arc::clone(&plan), &file, &limits, &|_, _| ())
    };
    assert!(load(1.0).is_ok());
    let error = load(0.5).err().unwrap().to_string();
    assert!(error.contains(name) && error.contains("bodkin quantize"), "{error}");
}
