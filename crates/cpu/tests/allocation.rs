//! A step allocates nothing: everything is sized when the model is loaded. The allocator counts
//! for the whole process, so that the workers' allocations are seen too; hence one test only.

#![allow(clippy::unwrap_used)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::io::Write;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use bodkin_backend::{
    Backend, Batch, ExpertBudget, KvType, Limits, Model, OutputRequest, PAGE_TOKENS, PageTable,
    SamplingParams, Span, Step,
};
use bodkin_cpu::{Cpu, Isa, Sparse};
use bodkin_gguf::{File, Format, Writer};

struct Counting;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is passed on to the system's allocator as it is.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, SeqCst);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, SeqCst);
        // SAFETY: the caller's promise.
        unsafe { System.realloc(at, layout, new_size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Models with all types of weights, norms, windows and caps.
const MODELS: [&str; 5] = ["llama-q4_k_m", "llama-f16", "qwen2-q8_0", "gemma3", EXPERTS];
/// One that is also tried with ternary experts, whose blocks are converted before they are packed.
const EXPERTS: &str = "qwen3moe-q4_k_m";

/// Decode steps that warm up, and those whose allocations are counted.
const WARM_UP: usize = 4;
const STEPS: usize = 40;
/// Where decoding starts: far enough for attention to be spread over threads.
const POSITION: usize = 500;

#[test]
fn steps_allocate_nothing() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/parity/models");
    let open = |name: &str| File::open(folder.join(name).with_extension("gguf")).unwrap();
    let mut models: Vec<_> = MODELS.iter().map(|name| (*name, Arc::new(open(name)))).collect();
    models.push(("ternary experts", Arc::new(with_ternary_experts(&open(EXPERTS)))));
    for (name, file) in models {
        for isa in Isa::available() {
            for threads in [1, 2] {
                let cpu = Cpu {
                    isa,
                    sparse: Sparse::Always,
                    skip_inputs: threads == 2,
                    kv_type: [KvType::Auto, KvType::Q8_0][threads - 1],
                    expert_budget: ExpertBudget::Share(1.0 / threads as f64),
                    ..Cpu::new(Some(threads)).unwrap()
                };
                count(name, &file, &cpu);
            }
        }
    }
}

/// A copy of a file with other experts.
fn with_ternary_experts(file: &File) -> File {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ternary.gguf");
    let mut writer = Writer::new(&path, file.metadata()).unwrap();
    for tensor in file.tensors() {
        let is_expert = tensor.name.contains("_exps");
        let format = if is_expert { Format::TQ2_0 } else { tensor.format };
        let mut data = file.data(tensor).to_vec();
        if is_expert {
            // Codes of any kind, and a small scale.
            let block = [[0x64; 64].as_slice(), &[0, 0x1c]].concat();
            data = block.repeat(tensor.elements() as usize / 256);
        }
        let write = move |out: &mut dyn Write| out.write_all(&data);
        writer.tensor_with(&tensor.name, format, &tensor.shape, write).unwrap();
    }
    writer.save().unwrap();
    File::open(path).unwrap()
}

fn count(name: &str, file: &Arc<File>, cpu: &Cpu) {
    let plan = Arc::new(bodkin_model::plan(file.metadata(), file.tensors()).unwrap());
    let pages = (POSITION + WARM_UP + STEPS).div_ceil(PAGE_TOKENS);
    let groups = plan.windows().len();
    let limits = Limits { tokens: 16, outputs: 2, pages: vec![2 * pages; groups], state_slots: 2 };
    let mut model = cpu.load(Arc::clone(&plan), file, &limits, &|_, _| ()).unwrap();

    let params = SamplingParams {
        temperature: 0.7,
        top_k: 20,
        biases: vec![(3, 1.5)],
        uniforms: vec![1 << 30],
        ..SamplingParams::greedy()
    };
    let prompt = batch(groups, pages, 8, 0);
    run(model.as_mut(), &params, std::slice::from_ref(&prompt));
    let steps: Vec<Batch> =
        (0..STEPS + WARM_UP).map(|i| batch(groups, pages, 1, POSITION + i)).collect();
    let (warm_up, steps) = steps.split_at(WARM_UP);
    run(model.as_mut(), &params, warm_up);
    let before = ALLOCATIONS.load(SeqCst);
    run(model.as_mut(), &params, steps);
    run(model.as_mut(), &params, std::slice::from_ref(&prompt));
    let count = ALLOCATIONS.load(SeqCst) - before;
    assert_eq!(count, 0, "allocations of {} steps of {name} on {}", STEPS + 1, cpu.name());
}

/// Each step samples one row and gives the logits of the other.
fn run(model: &mut dyn Model, params: &SamplingParams, batches: &[Batch]) {
    let rows = [OutputRequest::Token(params), OutputRequest::Logits];
    for batch in batches {
        let step = Step { batch, requests: &rows, steps: 1, observer: None };
        model.step(step, &mut |_| ControlFlow::Break(())).unwrap();
    }
}

/// So many tokens of each of two sequences.
fn batch(groups: usize, pages: usize, len: usize, position: usize) -> Batch {
    let span = |first: usize| {
        let pages = (first as u32..(first + pages) as u32).collect();
        Span {
            len,
            position,
            tables: vec![PageTable { skipped: 0, pages }; groups],
            state_slot: 0,
            is_prefill: true,
        }
    };
    let spans = vec![Span { len, ..span(0) }, Span { len, ..span(pages) }];
    let outputs = vec![len as u32 - 1, 2 * len as u32 - 1];
    Batch { tokens: (0..2 * len as u32).collect(), spans, outputs, ..Batch::default() }
}
