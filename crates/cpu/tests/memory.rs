//! The memory estimate of a plan against the bytes that the loaded model holds: those on the heap,
//! which the allocator counts for the whole process, and those in huge pages. Hence one test only.

#![allow(clippy::unwrap_used)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use bodkin_backend::{Backend, ExpertBudget, KvType, Limits, Memory};
use bodkin_cpu::{Cpu, mapped_bytes};
use bodkin_gguf::{File, Format, Metadata, Value, Writer};
use bodkin_model::Plan;

struct Counting;

/// Bytes that are allocated now.
static HEAP_BYTES: AtomicU64 = AtomicU64::new(0);

// SAFETY: every call is passed on to the system's allocator as it is.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        HEAP_BYTES.fetch_add(layout.size() as u64, SeqCst);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        HEAP_BYTES.fetch_add(layout.size() as u64, SeqCst);
        // SAFETY: the caller's promise.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        HEAP_BYTES.fetch_sub(layout.size() as u64, SeqCst);
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The largest difference of estimate and allocation.
const TOLERANCE: f64 = 0.03;

/// Models of every kind of block, format and state.
const MODELS: [&str; 13] = [
    "llama",
    "llama-f16",
    "llama-q4_0",
    "llama-q4_k_m",
    "qwen2-q8_0",
    "gemma3",
    "gpt-oss-mxfp4",
    "mixtral",
    "mamba2",
    "falcon-h1",
    "qwen35",
    "gemma4-e2b",
    "bert",
];

#[test]
fn estimates_are_close_to_allocations() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/parity/models");
    let mut report = String::new();
    let mut worst: f64 = 0.0;
    let mut compare = |path: &Path, cpu: &Cpu| {
        let (estimate, held) = estimate_and_held(path, cpu);
        let share = (held as f64 - estimate as f64).abs() / estimate as f64;
        worst = worst.max(share);
        let (name, kv) = (path.file_stem().unwrap().display(), cpu.kv_type.name());
        let line = format!("{name} {kv} {} threads: {estimate} {held} {share:.4}\n", cpu.threads);
        report.push_str(&line);
    };
    let cpus = [
        (1, KvType::Auto, true, 1.0),
        (2, KvType::Q8_0, true, 0.5),
        (2, KvType::F16, false, 1.0),
        (2, KvType::F16, false, 0.0),
    ];
    let cpus = cpus.map(|(threads, kv_type, repack, experts)| Cpu {
        kv_type,
        repack,
        expert_budget: ExpertBudget::Share(experts),
        ..Cpu::new(Some(threads)).unwrap()
    });
    for model in MODELS {
        cpus.iter().for_each(|cpu| compare(&folder.join(model).with_extension("gguf"), cpu));
    }
    let scratch = tempfile::tempdir().unwrap();
    for format in [Format::F16, Format::Q8_0, Format::Q4_K] {
        let path = large_model(scratch.path(), format);
        cpus.iter().for_each(|cpu| compare(&path, cpu));
    }
    print!("{report}");
    assert!(worst <= TOLERANCE, "estimate, allocated bytes, difference:\n{report}");
}

/// The bytes that the backend estimates, and those that are allocated once the model is loaded.
fn estimate_and_held(path: &Path, cpu: &Cpu) -> (u64, u64) {
    let file = Arc::new(File::open(path).unwrap());
    let plan: Arc<Plan> = Arc::new(bodkin_model::plan(file.metadata(), file.tensors()).unwrap());
    let limits = Limits {
        tokens: 64,
        outputs: 4,
        pages: vec![64; plan.windows().len()],
        state_slots: if plan.states.is_empty() { 0 } else { 3 },
    };
    let Memory { weight_bytes, state_bytes, scratch_bytes, .. } = cpu.memory(&plan, &limits);
    let before = HEAP_BYTES.load(SeqCst) + mapped_bytes();
    let model = cpu.load(Arc::clone(&plan), &file, &limits, &|_, _| ()).unwrap();
    // The caller of a step provides the memory for logits, which the estimate includes.
    let logits = 4 * (limits.outputs * plan.output_width()) as u64;
    let held = HEAP_BYTES.load(SeqCst) + mapped_bytes() - before + logits;
    drop(model);
    (weight_bytes + state_bytes + scratch_bytes, held)
}

/// A model of some ten million weights, all zero.
fn large_model(folder: &Path, format: Format) -> PathBuf {
    const WIDTH: u64 = 1024;
    const HIDDEN: u64 = 2816;
    const VOCABULARY: u64 = 4096;
    const LAYERS: u32 = 2;
    let mut metadata = Metadata::default();
    metadata.insert("general.architecture", Value::String(Box::from(&b"llama"[..])));
    for (key, value) in [
        ("block_count", LAYERS),
        ("context_length", 4096),
        ("embedding_length", WIDTH as u32),
        ("feed_forward_length", HIDDEN as u32),
        ("attention.head_count", 16),
        ("attention.head_count_kv", 4),
        ("vocab_size", VOCABULARY as u32),
    ] {
        metadata.insert(format!("llama.{key}"), Value::U32(value));
    }
    metadata.insert("llama.attention.layer_norm_rms_epsilon", Value::F32(1e-5));
    let path = folder.join(format!("{}.gguf", format.name()));
    let mut writer = Writer::new(&path, &metadata).unwrap();
    let mut tensor = |name: &str, shape: &[u64]| {
        let format = if shape.len() == 1 { Format::F32 } else { format };
        let blocks = shape.iter().product::<u64>() / format.block_elements() as u64;
        let zeros = move |out: &mut dyn Write| {
            let bytes = blocks * format.block_bytes().unwrap() as u64;
            std::io::copy(&mut std::io::repeat(0).take(bytes), out).map(drop)
        };
        writer.tensor_with(name, format, shape, zeros).unwrap();
    };
    tensor("token_embd.weight", &[WIDTH, VOCABULARY]);
    tensor("output.weight", &[WIDTH, VOCABULARY]);
    tensor("output_norm.weight", &[WIDTH]);
    for layer in 0..LAYERS {
        for (name, shape) in [
            ("attn_norm", &[WIDTH][..]),
            ("attn_q", &[WIDTH, WIDTH]),
            ("attn_k", &[WIDTH, WIDTH / 4]),
            ("attn_v", &[WIDTH, WIDTH / 4]),
            ("attn_output", &[WIDTH, WIDTH]),
            ("ffn_norm", &[WIDTH]),
            ("ffn_gate", &[WIDTH, HIDDEN]),
            ("ffn_up", &[WIDTH, HIDDEN]),
            ("ffn_down", &[HIDDEN, WIDTH]),
        ] {
            tensor(&format!("blk.{layer}.{name}.weight"), shape);
        }
    }
    writer.save().unwrap();
    path
}
