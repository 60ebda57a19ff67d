//! Models in two parts, for two devices: the same bits as in one, for every type of layer.

#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::sync::Arc;

use bodkin_backend::{Backend, Batch, LayerSplit, Limits, PAGE_TOKENS, PageTable, Span};
use bodkin_cpu::Cpu;
use bodkin_gguf::File;
use bodkin_model::Plan;

const PROMPT: usize = 40;
const STEPS: usize = 3;

fn cpu() -> Box<Cpu> {
    Box::new(Cpu::new(Some(2)).unwrap())
}

fn limits(plan: &Plan) -> Limits {
    let pages = vec![2; plan.windows().len()];
    Limits { tokens: PROMPT, outputs: 2, pages, state_slots: 1 }
}

/// The logits of the last two tokens of a prompt, and of some more tokens.
fn logits(backend: &dyn Backend, plan: &Arc<Plan>, file: &Arc<File>) -> Result<Vec<u32>, String> {
    let model = backend.load(Arc::clone(plan), file, &limits(plan), &|_, _| ());
    let mut model = model.map_err(|error| error.to_string())?;
    let (mut bits, mut position) = (Vec::new(), 0);
    for len in [PROMPT].into_iter().chain([1; STEPS]) {
        let pages: Vec<u32> = (0..(position + len).div_ceil(PAGE_TOKENS) as u32).collect();
        let tables = vec![PageTable { skipped: 0, pages }; plan.windows().len()];
        let tokens = (position..position + len).map(|i| (5 + i * i % 89) as u32);
        let batch = Batch {
            tokens: tokens.collect(),
            spans: vec![Span { len, position, tables, state_slot: 0, is_prefill: true }],
            outputs: (len.saturating_sub(2) as u32..len as u32).collect(),
            ..Batch::default()
        };
        let mut rows = vec![0.0f32; batch.outputs.len() * plan.output_width()];
        model.forward(&batch, &mut rows).map_err(|error| error.to_string())?;
        bits.extend(rows.iter().map(|x| x.to_bits()));
        position += len;
    }
    Ok(bits)
}

#[test]
fn two_parts_have_the_bits_of_the_whole() {
    let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/parity/models");
    let mut cut = 0;
    for entry in std::fs::read_dir(models).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|extension| extension != "gguf") {
            continue;
        }
        let name = path.display();
        let file = Arc::new(bodkin_model::open(&path).unwrap());
        let plan = Arc::new(bodkin_model::plan(file.metadata(), file.tensors()).unwrap());
        if plan.needs_whole_sequences() || plan.layers() < 2 {
            continue;
        }
        let whole = logits(&*cpu(), &plan, &file).unwrap();
        for layers in 0..=plan.layers() {
            let split = LayerSplit::new(cpu(), cpu(), layers);
            let found = match logits(&split, &plan, &file) {
                // Per-layer inputs, shared KV slots and several streams keep their layers together.
                Err(error) if ["gemma4", "deepseek4"].contains(&plan.architecture.as_str()) => {
                    let found = plan.layers() - layers;
                    let found = format!("found that layer {found} and those before it share");
                    assert!(error.contains(&found), "{error}");
                    continue;
                }
                found => found.unwrap(),
            };
            assert!(found == whole, "{name}: other bits with {layers} layers apart");
            // Weights that both parts have count twice.
            let memory = split.memory(&plan, &limits(&plan));
            let all = cpu().memory(&plan, &limits(&plan));
            assert_eq!(memory.state_bytes, all.state_bytes, "{name}");
            assert!(memory.weight_bytes >= all.weight_bytes, "{name}");
        }
        cut += 1;
    }
    assert!(cut > 10, "only {cut} models");
}
