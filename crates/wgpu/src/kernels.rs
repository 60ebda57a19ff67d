//! The text of each kernel, put together from the files of `shaders/`.

#[cfg(test)]
mod tests;

use crate::expert_cache::{COUNTERS, EXPERT_WORDS, MAX_FILLS, NO_SLOT};
use crate::layout::{LARGEST_SCALE, Layout, word_vectors};
use crate::lower::{EXPERT_ROWS, FILL_WORDS, result_rows, weight_tile};
use crate::program::{
    Activations, Epilogue, ExpertGemv, GemvShape, Inputs, Kernel, KvDtype, MAX_EXPERTS, Matmul,
};
use crate::unroll::{chosen, unrolled};

/// The shaders of a weight in a layout.
fn weights(layout: Layout) -> String {
    let own = match layout {
        Layout::F32 => include_str!("../shaders/weights_f32.wgsl"),
        Layout::F16 => include_str!("../shaders/weights_f16.wgsl"),
        Layout::Bf16 => include_str!("../shaders/weights_bf16.wgsl"),
        Layout::Signed => include_str!("../shaders/weights_signed.wgsl"),
        Layout::Unsigned => include_str!("../shaders/weights_unsigned.wgsl"),
        Layout::Nibbles => include_str!("../shaders/weights_nibbles.wgsl"),
        Layout::Indices => include_str!("../shaders/weights_indices.wgsl"),
    };
    [PARAMS, include_str!("../shaders/weights.wgsl"), own].concat()
}

/// A weight and the columns that its chunks are multiplied with, in the kernels of few rows.
fn chunk_operands(layout: Layout, inputs: Inputs, activations: Activations) -> String {
    let weights = weights(layout);
    let floats = include_str!("../shaders/input_floats.wgsl");
    let product = include_str!("../shaders/dot_bytes.wgsl");
    match (inputs, activations) {
        (Inputs::Bytes, _) => [&weights, COLUMNS, rows(inputs), product].concat(),
        (_, Activations::Bytes) if layout.has_scales() => {
            [&weights, rows(inputs), COLUMNS, INTS, product].concat()
        }
        _ => [&weights, rows(inputs), floats].concat(),
    }
}

/// How input rows are read.
fn rows(inputs: Inputs) -> &'static str {
    match inputs {
        Inputs::Aligned => include_str!("../shaders/input_aligned.wgsl"),
        Inputs::Padded => include_str!("../shaders/input_padded.wgsl"),
        Inputs::Halves => include_str!("../shaders/input_halves.wgsl"),
        Inputs::Bytes => include_str!("../shaders/input_bytes.wgsl"),
    }
}

/// The shaders of what a matmul does with its sums.
fn epilogue(epilogue: Epilogue, is_cached: bool) -> String {
    let own = match epilogue {
        Epilogue::One => include_str!("../shaders/epilogue_one.wgsl"),
        Epilogue::Three => include_str!("../shaders/epilogue_three.wgsl"),
        Epilogue::Gate => include_str!("../shaders/epilogue_gate.wgsl"),
        Epilogue::Experts => include_str!("../shaders/epilogue_experts.wgsl"),
        Epilogue::ExpertGate => include_str!("../shaders/epilogue_experts_gate.wgsl"),
    };
    let functions = match epilogue {
        Epilogue::Gate | Epilogue::ExpertGate => FUNCTIONS,
        Epilogue::One | Epilogue::Three | Epilogue::Experts => "",
    };
    let shared = chosen(include_str!("../shaders/epilogue.wgsl"), is_cached);
    [functions, &shared, own].concat()
}

/// The shaders of a GEMM: how it reads its operands, which rows its tiles have, what it does with
/// its sums, and its own, in which the line `//@ weight rows` stands for where tiles begin.
fn tiled(m: Matmul, is_cached: bool, own: &str) -> String {
    let tiles_experts = include_str!("../shaders/tiles_experts.wgsl");
    let (tiles, weight_rows) = match m.epilogue {
        Epilogue::Experts | Epilogue::ExpertGate if is_cached => {
            (tiles_experts, include_str!("../shaders/weight_rows_cached.wgsl"))
        }
        Epilogue::Experts | Epilogue::ExpertGate => {
            (tiles_experts, include_str!("../shaders/weight_rows_experts.wgsl"))
        }
        Epilogue::One | Epilogue::Three | Epilogue::Gate => (
            include_str!("../shaders/tiles_list.wgsl"),
            include_str!("../shaders/weight_rows_list.wgsl"),
        ),
    };
    // Without calls, as naga must see that all threads branch alike.
    let own = own.replace("    //@ weight rows\n", weight_rows);
    let cached = if is_cached { cached_experts(7) } else { String::new() };
    let epilogue = epilogue(m.epilogue, is_cached);
    [&weights(m.layout), rows(m.inputs), tiles, &cached, &epilogue, &own].concat()
}

/// What matmuls of cached experts have, whose cache has this binding.
fn cached_experts(binding: usize) -> String {
    let shader = include_str!("../shaders/cached_experts.wgsl");
    let shader = shader.replace("{binding}", &binding.to_string());
    format!("const NO_SLOT: u32 = {NO_SLOT}u;\n{shader}")
}

/// What shaders with cooperative matrices enable.
const COOPERATIVE: &str = "enable f16;\nenable wgpu_cooperative_matrix;\n";
const COLUMNS: &str = include_str!("../shaders/columns.wgsl");
const INTS: &str = include_str!("../shaders/input_ints.wgsl");
const STORE_COLUMNS: &str = include_str!("../shaders/store_columns.wgsl");
const PARAMS: &str = include_str!("../shaders/weight_params.wgsl");
const FUNCTIONS: &str = include_str!("../shaders/functions.wgsl");
const ARGMAX_REDUCE: &str = include_str!("../shaders/argmax_reduce.wgsl");
const ATTENTION_ROWS: &str = include_str!("../shaders/attention_rows.wgsl");
const SUMS: &str = include_str!("../shaders/sums.wgsl");
const HALF_EXPONENT: &str = include_str!("../shaders/half_exponent.wgsl");
const ROTATION: &str = include_str!("../shaders/rotation.wgsl");
const ROW_SUM: &str = include_str!("../shaders/row_sum.wgsl");

/// The text of a kernel, with what all of them have.
fn text(parts: &[&str], constants: &[(&str, usize)]) -> String {
    let parts = [include_str!("../shaders/batch.wgsl"), &parts.concat()].concat();
    unrolled(&parts, constants)
}

/// Parts of sums of all threads of a GEMV that are in shared memory at once.
const MOST_PARTS: usize = 2048;
/// The most threads of a workgroup of a GEMV.
const MOST_THREADS: usize = 256;

impl GemvShape {
    /// Rounds in which its sums are added. Their parts take at most 9 KB of shared memory.
    fn rounds(&self) -> usize {
        (self.threads * self.teams * self.rows * self.tokens).div_ceil(MOST_PARTS)
    }

    /// Whether there is a kernel for it: a thread finishes two rows at most.
    pub(crate) fn is_possible(&self) -> bool {
        let GemvShape { tokens, threads, teams, rows } = *self;
        let sums = teams * rows * tokens;
        threads * teams <= MOST_THREADS
            && rows.is_power_of_two()
            && rows >= self.rounds().max(2)
            && sums / 2 <= threads * teams
    }
}

fn gemv(m: Matmul, shape: GemvShape, activations: Activations) -> String {
    let (GemvShape { tokens, threads, teams, rows }, rounds) = (shape, shape.rounds());
    let constants = [
        ("QUADS", m.layout.chunk_quads()),
        ("WORD_VECTORS", word_vectors(m.layout.chunk_quads())),
        ("THREADS", threads),
        ("TEAMS", teams),
        ("ALL_THREADS", threads * teams),
        ("ROWS", rows),
        ("TOKENS", tokens),
        ("ROUNDS", rounds),
        ("ROUND_ROWS", rows / rounds),
        ("SUMS", teams * rows * tokens / rounds),
        // The first row of a list is in the header.
        ("ALONE", usize::from(tokens == 1)),
        ("SEVERAL", usize::from(tokens != 1)),
    ];
    let operands = chunk_operands(m.layout, m.inputs, activations);
    let own = include_str!("../shaders/gemv.wgsl");
    text(&[&operands, &epilogue(m.epilogue, false), SUMS, own], &constants)
}

/// Of a tile's columns in shared memory, each of 256 threads brings a few vectors of four: of large
/// tiles a whole chunk of eight, which takes two groups of columns in a step.
fn gemm_cooperative(m: Matmul, tile: usize, is_cached: bool) -> String {
    let (w_tile, chunk_quads) = (weight_tile(m, tile), m.layout.chunk_quads());
    let step_groups = if chunk_quads == 8 { 2 } else { 1 };
    let w_quads = step_groups * w_tile / 32;
    let quads = chunk_quads.min(w_quads);
    let constants = [
        ("QUADS", chunk_quads),
        ("STEP_GROUPS", step_groups),
        // Blocks of 16 columns of a step; of 16 rows of a subgroup: of the list, and of the weight.
        ("STEP_BLOCKS", 2 * step_groups),
        ("X_BLOCKS", tile / 64),
        ("W_BLOCKS", w_tile / 32),
        ("X_QUADS", step_groups * tile / 32),
        ("W_QUADS", w_quads),
        ("CHUNK_QUADS", quads),
        ("CHUNKS", w_quads / quads),
        ("RESULT_ROWS", result_rows(m.epilogue == Epilogue::ExpertGate)),
        ("LARGEST_SCALE", if m.layout.has_scales() { LARGEST_SCALE } else { 1 }),
    ];
    let own = include_str!("../shaders/gemm_cooperative.wgsl");
    [COOPERATIVE, &text(&[&tiled(m, is_cached, own)], &constants)].concat()
}

fn gemm(m: Matmul, tile: usize, is_cached: bool) -> String {
    if m.inputs == Inputs::Halves {
        return gemm_cooperative(m, tile, is_cached);
    }
    let constants = [
        ("QUADS", m.layout.chunk_quads()),
        ("HALVES", tile / 64),
        ("RESULT_ROWS", result_rows(m.epilogue == Epilogue::ExpertGate)),
    ];
    text(&[&tiled(m, is_cached, include_str!("../shaders/gemm.wgsl"))], &constants)
}

/// Rows of a list in half precision.
fn halves(inputs: Inputs) -> String {
    let parts = [PARAMS, rows(inputs), HALF_EXPONENT, include_str!("../shaders/halves.wgsl")];
    ["enable f16;\n", &text(&parts, &[])].concat()
}

/// Rows of a list as bytes.
fn bytes(inputs: Inputs, quads: usize) -> String {
    let constants = [("QUADS", quads), ("WORD_VECTORS", word_vectors(quads))];
    let own = include_str!("../shaders/bytes.wgsl");
    text(&[PARAMS, rows(inputs), COLUMNS, INTS, STORE_COLUMNS, own], &constants)
}

/// A norm; its result is also stored as bytes, if the vectors of four columns in a chunk are given.
fn norm(quads: Option<usize>) -> String {
    let own = include_str!("../shaders/norm.wgsl");
    let Some(quads) = quads else { return text(&[ROW_SUM, own], &[("AS_BYTES", 0)]) };
    let constants = [("AS_BYTES", 1), ("QUADS", quads), ("WORD_VECTORS", word_vectors(quads))];
    let stored = include_str!("../shaders/norm_bytes.wgsl");
    text(&[ROW_SUM, COLUMNS, STORE_COLUMNS, stored, own], &constants)
}

fn experts(ExpertGemv { layout, inputs, is_gated }: ExpertGemv, is_cached: bool) -> String {
    let constants = [
        ("RESULT_ROWS", result_rows(is_gated)),
        ("PLAIN", usize::from(!is_gated)),
        ("GATED", usize::from(is_gated)),
        ("QUADS", layout.chunk_quads()),
        ("THREADS", 64),
        ("ALL_THREADS", 64),
        ("ROWS", EXPERT_ROWS),
        ("SUMS", EXPERT_ROWS),
        ("ROUNDS", 1),
    ];
    let operands = chunk_operands(layout, inputs, Activations::Floats);
    let functions = if is_gated { FUNCTIONS } else { "" };
    let cached = if is_cached { cached_experts(6) } else { String::new() };
    let own = chosen(include_str!("../shaders/experts.wgsl"), is_cached);
    text(&[&operands, SUMS, functions, &cached, &own], &constants)
}

fn store(dtype: KvDtype) -> String {
    let own = match dtype {
        KvDtype::F32 => include_str!("../shaders/store_f32.wgsl"),
        KvDtype::F16 => include_str!("../shaders/store_f16.wgsl"),
        KvDtype::Q8 => include_str!("../shaders/store_q8.wgsl"),
    };
    let unit = dtype.unit().to_string();
    let store = include_str!("../shaders/kv_store.wgsl").replace("{unit}", &unit);
    text(&[ROW_SUM, ROTATION, &store, own], &[])
}

fn attention(tokens: KvDtype, blocks: KvDtype) -> String {
    let cache = |dtype: KvDtype, name: &str| {
        let source = match dtype {
            KvDtype::F32 => include_str!("../shaders/kv_f32.wgsl"),
            KvDtype::F16 => include_str!("../shaders/kv_f16.wgsl"),
            KvDtype::Q8 => include_str!("../shaders/kv_q8.wgsl"),
        };
        source.replace("{kv}", name)
    };
    let caches = [cache(tokens, "kv"), cache(blocks, "blocks")].concat();
    let own = include_str!("../shaders/attention.wgsl");
    text(&[FUNCTIONS, ATTENTION_ROWS, &caches, own], &[])
}

/// Attention of many rows; heads have multiples of 32 columns.
fn attention_cooperative(key_blocks: usize, value_blocks: usize) -> String {
    // Vectors of four halves in shared memory: keys or values of 32 entries, or half of the columns
    // of 64 queries, each row with two more.
    let entries = 32 * (4 * key_blocks.max(value_blocks) + 2);
    let queries = 64 * (2 * key_blocks + 2);
    let constants = [
        ("KEY_BLOCKS", key_blocks),
        ("VALUE_BLOCKS", value_blocks),
        ("HALF_BLOCKS", key_blocks / 2),
        ("TILE_QUADS", entries.max(queries)),
    ];
    let own = include_str!("../shaders/attention_cooperative.wgsl");
    [COOPERATIVE, &text(&[FUNCTIONS, ATTENTION_ROWS, HALF_EXPONENT, own], &constants)].concat()
}

impl Kernel {
    /// The text of the shader; `activations` is what GEMVs multiply codes with.
    pub(crate) fn source(self, activations: Activations) -> String {
        let plain = |parts: &[&str]| text(parts, &[]);
        match self {
            Kernel::Embed(layout) => {
                let constants = [("QUADS", layout.chunk_quads())];
                text(&[&weights(layout), include_str!("../shaders/embed.wgsl")], &constants)
            }
            Kernel::Gemv(m, shape) => gemv(m, shape, activations),
            Kernel::Gemm(m, tile) => gemm(m, tile, false),
            Kernel::CachedGemm(m, tile) => gemm(m, tile, true),
            Kernel::Halves(inputs) => halves(inputs),
            Kernel::ExpertPermutation => {
                plain(&[include_str!("../shaders/expert_permutation.wgsl")])
            }
            Kernel::Experts(gemv) => experts(gemv, false),
            Kernel::CachedExperts(gemv) => experts(gemv, true),
            Kernel::ExpertCache => {
                let constants = [
                    ("MAX_FILLS", MAX_FILLS),
                    ("NO_SLOT", NO_SLOT as usize),
                    ("MAX_EXPERTS", MAX_EXPERTS),
                    ("EXPERT_WORDS", EXPERT_WORDS),
                    ("COUNTERS", COUNTERS),
                ];
                text(&[include_str!("../shaders/expert_cache.wgsl")], &constants)
            }
            Kernel::ExpertFill => {
                let constants = [("FILL_WORDS", FILL_WORDS)];
                text(&[include_str!("../shaders/expert_fill.wgsl")], &constants)
            }
            Kernel::ExpertSum => plain(&[include_str!("../shaders/expert_sum.wgsl")]),
            Kernel::Bytes(inputs, quads) => bytes(inputs, quads),
            Kernel::Norm => norm(None),
            Kernel::NormBytes(quads) => norm(Some(quads)),
            Kernel::Rope => plain(&[ROTATION, include_str!("../shaders/rope.wgsl")]),
            Kernel::Elementwise => plain(&[FUNCTIONS, include_str!("../shaders/elementwise.wgsl")]),
            Kernel::HyperWeights => plain(&[FUNCTIONS, include_str!("../shaders/hyper.wgsl")]),
            Kernel::Route => plain(&[FUNCTIONS, include_str!("../shaders/route.wgsl")]),
            Kernel::Pool => plain(&[include_str!("../shaders/pool.wgsl")]),
            Kernel::Store(dtype) => store(dtype),
            Kernel::Attention(tokens, blocks) => attention(tokens, blocks),
            Kernel::AttentionF16 => {
                let own = include_str!("../shaders/attention_f16.wgsl");
                plain(&[FUNCTIONS, ATTENTION_ROWS, own])
            }
            Kernel::AttentionCooperative { key_blocks, value_blocks } => {
                attention_cooperative(key_blocks, value_blocks)
            }
            Kernel::CombineSplits => {
                plain(&[ATTENTION_ROWS, include_str!("../shaders/combine_splits.wgsl")])
            }
            Kernel::Conv => plain(&[include_str!("../shaders/conv.wgsl")]),
            Kernel::Scan => plain(&[FUNCTIONS, include_str!("../shaders/scan.wgsl")]),
            Kernel::DeltaRule => plain(&[FUNCTIONS, include_str!("../shaders/delta_rule.wgsl")]),
            Kernel::Compress => plain(&[include_str!("../shaders/compress.wgsl")]),
            Kernel::Select => plain(&[include_str!("../shaders/select.wgsl")]),
            Kernel::ArgmaxPart => {
                plain(&[ARGMAX_REDUCE, include_str!("../shaders/argmax_part.wgsl")])
            }
            Kernel::Argmax => plain(&[ARGMAX_REDUCE, include_str!("../shaders/argmax.wgsl")]),
        }
    }

    /// Of each binding from 1 on, whether the shader writes it.
    pub(crate) fn writes(self) -> &'static [bool] {
        match self {
            Kernel::Embed(_)
            | Kernel::Pool
            | Kernel::ExpertPermutation
            | Kernel::ExpertCache
            | Kernel::ArgmaxPart
            | Kernel::Argmax => &[false, true],
            Kernel::Gemv(m, _) | Kernel::Gemm(m, _) => match m.epilogue {
                Epilogue::One | Epilogue::Gate => &[false, false, false, false, true],
                Epilogue::Three => &[false, false, false, false, true, true, true],
                Epilogue::Experts | Epilogue::ExpertGate => {
                    &[false, false, false, false, true, false]
                }
            },
            Kernel::CachedGemm(..) => &[false, false, false, false, true, false, false],
            Kernel::Halves(_) | Kernel::Bytes(..) => &[true, false],
            Kernel::Store(_) => &[false, false, false, false, false, true, true],
            Kernel::Experts(_) => &[false, false, false, true, false],
            Kernel::CachedExperts(_) => &[false, false, false, true, false, false],
            Kernel::ExpertFill => &[false, true, false],
            Kernel::Norm | Kernel::HyperWeights | Kernel::ExpertSum => &[false, false, false, true],
            Kernel::NormBytes(_) => &[false, false, false, true, true],
            Kernel::Rope | Kernel::Elementwise => &[false, false, true],
            Kernel::Route => &[false, false, false, true, true],
            Kernel::Attention(..) => &[false, false, false, false, false, true],
            Kernel::AttentionF16 | Kernel::AttentionCooperative { .. } => {
                &[false, false, false, true]
            }
            Kernel::CombineSplits => &[false, false, true],
            Kernel::Conv => &[false, false, false, true, true],
            Kernel::Scan | Kernel::DeltaRule => &[false, false, false, false, false, true, true],
            Kernel::Compress => &[false, false, true, true],
            Kernel::Select => &[false, false, false, true, true],
        }
    }
}
