//! The text of each kernel, put together from the files of `shaders/`.

use crate::layout::{LARGEST_SCALE, Layout, word_vectors};
use crate::lower::{EXPERT_ROWS, gemv_shape, weight_tile};
use crate::program::{Activations, Epilogue, Inputs, Kernel, KvDtype, Matmul};

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
fn epilogue(epilogue: Epilogue) -> String {
    let own = match epilogue {
        Epilogue::One => include_str!("../shaders/epilogue_one.wgsl"),
        Epilogue::Three => include_str!("../shaders/epilogue_three.wgsl"),
        Epilogue::Gate => include_str!("../shaders/epilogue_gate.wgsl"),
        Epilogue::Experts => include_str!("../shaders/epilogue_experts.wgsl"),
    };
    let functions = match epilogue {
        Epilogue::Gate => FUNCTIONS,
        Epilogue::One | Epilogue::Three | Epilogue::Experts => "",
    };
    [functions, include_str!("../shaders/epilogue.wgsl"), own].concat()
}

/// The shaders of whole rows of operands, of which rows a tile has, of what a matmul does with its
/// sums, and its own.
fn tiled(m: Matmul, own: &str) -> String {
    let (of, weight_rows) = match m.epilogue {
        Epilogue::Experts => (
            include_str!("../shaders/tiles_experts.wgsl"),
            include_str!("../shaders/weight_rows_experts.wgsl"),
        ),
        Epilogue::One | Epilogue::Three | Epilogue::Gate => (
            include_str!("../shaders/tiles_list.wgsl"),
            include_str!("../shaders/weight_rows_list.wgsl"),
        ),
    };
    // Without calls, as naga must see that all threads branch alike.
    let own = own.replace("    //@ weight rows\n", weight_rows);
    [&weights(m.layout), rows(m.inputs), of, &epilogue(m.epilogue), &own].concat()
}

/// Repeats the lines between `//@ for NAME COUNT` and `//@ end`, with each number for `{NAME}`: a
/// driver may not unroll the loops that it gets, and arrays that are indexed in a loop are slow. A
/// count is a number, that of a loop around it, or one of `constants`, which the shader sees as well.
fn unrolled(source: &str, constants: &[(&str, usize)]) -> String {
    let declared = constants.iter().map(|(name, value)| format!("const {name}: u32 = {value}u;\n"));
    let mut text: String = declared.collect();
    unroll(source, constants, &mut text);
    text
}

/// Unrolls the outermost loops, then those in them.
fn unroll(source: &str, constants: &[(&str, usize)], text: &mut String) {
    let mut lines = source.split_inclusive('\n');
    while let Some(line) = lines.next() {
        let words: Vec<&str> = line.split_whitespace().collect();
        let &["//@", "for", name, count] = &words[..] else {
            text.push_str(line);
            continue;
        };
        let constant = constants.iter().find(|(name, _)| *name == count);
        let count = constant.map(|(_, value)| *value).or_else(|| count.parse().ok());
        let mut depth = 1;
        let in_loop = |line: &&str| {
            depth += i32::from(line.trim_start().starts_with("//@ for"));
            depth -= i32::from(line.trim() == "//@ end");
            depth > 0
        };
        let body: String = lines.by_ref().take_while(in_loop).collect();
        for i in 0..count.expect("a number or a constant") {
            unroll(&body.replace(&format!("{{{name}}}"), &i.to_string()), constants, text);
        }
    }
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

fn gemv(m: Matmul, tokens: usize, activations: Activations) -> String {
    let (threads, rows) = gemv_shape(m.layout, tokens);
    // The parts of the sums of a round take at most 9 KB of shared memory.
    let rounds = (threads * rows * tokens).div_ceil(MOST_PARTS);
    let constants = [
        ("QUADS", m.layout.chunk_quads()),
        ("WORD_VECTORS", word_vectors(m.layout.chunk_quads())),
        ("THREADS", threads),
        ("ROWS", rows),
        ("TOKENS", tokens),
        ("ROUNDS", rounds),
        ("ROUND_ROWS", rows / rounds),
        ("SUMS", rows * tokens / rounds),
        // The first row of a list is in the header.
        ("ALONE", usize::from(tokens == 1)),
        ("SEVERAL", usize::from(tokens != 1)),
    ];
    let operands = chunk_operands(m.layout, m.inputs, activations);
    let own = include_str!("../shaders/gemv.wgsl");
    text(&[&operands, &epilogue(m.epilogue), SUMS, own], &constants)
}

/// Of a tile's columns in shared memory, each of 256 threads brings a few vectors of four.
fn gemm_cooperative(m: Matmul, tile: usize) -> String {
    let (w_tile, chunk_quads) = (weight_tile(m, tile), m.layout.chunk_quads());
    let w_quads = w_tile / 32;
    let quads = chunk_quads.min(w_quads);
    let constants = [
        ("QUADS", chunk_quads),
        // Blocks of 16 rows of a subgroup: of the list, and of the weight.
        ("X_BLOCKS", tile / 64),
        ("W_BLOCKS", w_tile / 32),
        ("X_QUADS", tile / 32),
        ("W_QUADS", w_quads),
        ("CHUNK_QUADS", quads),
        ("CHUNKS", w_quads / quads),
        ("LARGEST_SCALE", if m.layout.has_scales() { LARGEST_SCALE } else { 1 }),
    ];
    let own = include_str!("../shaders/gemm_cooperative.wgsl");
    [COOPERATIVE, &text(&[&tiled(m, own)], &constants)].concat()
}

fn gemm(m: Matmul, tile: usize) -> String {
    if m.inputs == Inputs::Halves {
        return gemm_cooperative(m, tile);
    }
    let constants = [("QUADS", m.layout.chunk_quads()), ("HALVES", tile / 64)];
    text(&[&tiled(m, include_str!("../shaders/gemm.wgsl"))], &constants)
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

fn experts(layout: Layout, inputs: Inputs) -> String {
    let constants = [
        ("QUADS", layout.chunk_quads()),
        ("THREADS", 64),
        ("ROWS", EXPERT_ROWS),
        ("SUMS", EXPERT_ROWS),
        ("ROUNDS", 1),
    ];
    let operands = chunk_operands(layout, inputs, Activations::Floats);
    text(&[&operands, SUMS, include_str!("../shaders/experts.wgsl")], &constants)
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
            Kernel::Gemv(m, tokens) => gemv(m, tokens, activations),
            Kernel::Gemm(m, tile) => gemm(m, tile),
            Kernel::Halves(inputs) => halves(inputs),
            Kernel::GroupExperts => plain(&[include_str!("../shaders/group_experts.wgsl")]),
            Kernel::Experts(layout, inputs) => experts(layout, inputs),
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
            | Kernel::GroupExperts
            | Kernel::ArgmaxPart
            | Kernel::Argmax => &[false, true],
            Kernel::Gemv(m, _) | Kernel::Gemm(m, _) => match m.epilogue {
                Epilogue::One | Epilogue::Gate => &[false, false, false, false, true],
                Epilogue::Three => &[false, false, false, false, true, true, true],
                Epilogue::Experts => &[false, false, false, false, true, false],
            },
            Kernel::Halves(_) | Kernel::Bytes(..) => &[true, false],
            Kernel::Store(_) => &[false, false, false, false, false, true, true],
            Kernel::Experts(..) => &[false, false, false, true, false],
            Kernel::Norm | Kernel::HyperWeights => &[false, false, false, true],
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

#[cfg(test)]
mod tests {
    use naga::back::{hlsl, msl, spv};
    use naga::valid::{Capabilities, ModuleInfo, ValidationFlags, Validator};

    use super::*;
    use crate::gpu::COOPERATIVE_SHARED_BYTES;
    use crate::lower::GEMV_TOKENS;

    const EPILOGUES: [Epilogue; 3] = [Epilogue::One, Epilogue::Three, Epilogue::Gate];

    fn is_cooperative(kernel: Kernel) -> bool {
        matches!(
            kernel,
            Kernel::Gemm(Matmul { inputs: Inputs::Halves, .. }, _)
                | Kernel::AttentionCooperative { .. }
        )
    }

    /// Every kernel in every variant.
    fn all() -> Vec<Kernel> {
        let layouts = [
            Layout::F32,
            Layout::F16,
            Layout::Bf16,
            Layout::Signed,
            Layout::Unsigned,
            Layout::Nibbles,
            Layout::Indices,
        ];
        let dtypes = [KvDtype::F32, KvDtype::F16, KvDtype::Q8];
        let of_layout = |layout| {
            let matmuls = |inputs| {
                let matmul = |epilogue| Matmul { layout, inputs, epilogue };
                let of = |m| {
                    [
                        Kernel::Gemv(m, 1),
                        Kernel::Gemv(m, GEMV_TOKENS[0]),
                        Kernel::Gemv(m, GEMV_TOKENS[1]),
                        Kernel::Gemm(m, 64),
                        Kernel::Gemm(m, 128),
                    ]
                };
                let matmuls = EPILOGUES.map(matmul);
                let of_experts = Matmul { layout, inputs, epilogue: Epilogue::Experts };
                let experts = [Kernel::Experts(layout, inputs), Kernel::Gemm(of_experts, 64)];
                matmuls.into_iter().flat_map(of).chain(experts).collect::<Vec<_>>()
            };
            let all = [Inputs::Aligned, Inputs::Padded].map(matmuls);
            let bytes = if layout.has_scales() { matmuls(Inputs::Bytes) } else { Vec::new() };
            let few_rows = bytes.into_iter().filter(|kernel| matches!(kernel, Kernel::Gemv(..)));
            let few_rows = few_rows.collect();
            [all.concat(), few_rows, vec![Kernel::Embed(layout)]].concat()
        };
        let cooperative = layouts.into_iter().filter(|layout| layout.fits_halves());
        let cooperative = cooperative.flat_map(|layout| {
            let matmul = |epilogue| Matmul { layout, inputs: Inputs::Halves, epilogue };
            let of_experts = Kernel::Gemm(matmul(Epilogue::Experts), 64);
            let of_list = EPILOGUES.map(matmul).into_iter();
            of_list.flat_map(|m| [64, 128].map(|t| Kernel::Gemm(m, t))).chain([of_experts])
        });
        let of_dtype = |dtype| {
            [vec![Kernel::Store(dtype)], dtypes.map(|b| Kernel::Attention(dtype, b)).to_vec()]
        };
        let others = [
            Kernel::Halves(Inputs::Aligned),
            Kernel::Halves(Inputs::Padded),
            Kernel::Norm,
            Kernel::NormBytes(4),
            Kernel::NormBytes(8),
            Kernel::Bytes(Inputs::Aligned, 4),
            Kernel::Bytes(Inputs::Aligned, 8),
            Kernel::Bytes(Inputs::Padded, 4),
            Kernel::Bytes(Inputs::Padded, 8),
            Kernel::Rope,
            Kernel::Elementwise,
            Kernel::HyperWeights,
            Kernel::GroupExperts,
            Kernel::Route,
            Kernel::Pool,
            Kernel::AttentionF16,
            Kernel::AttentionCooperative { key_blocks: 2, value_blocks: 2 },
            Kernel::AttentionCooperative { key_blocks: 12, value_blocks: 8 },
            Kernel::AttentionCooperative { key_blocks: 16, value_blocks: 16 },
            Kernel::CombineSplits,
            Kernel::Conv,
            Kernel::Scan,
            Kernel::DeltaRule,
            Kernel::Compress,
            Kernel::Select,
            Kernel::ArgmaxPart,
            Kernel::Argmax,
        ];
        let kernels = layouts.into_iter().flat_map(of_layout).chain(cooperative);
        kernels.chain(dtypes.into_iter().flat_map(of_dtype).flatten()).chain(others).collect()
    }

    /// Each of them with both ways of multiplying.
    fn modules() -> impl Iterator<Item = (Kernel, naga::Module, ModuleInfo)> {
        let validated = |kernel: Kernel| {
            [Activations::Bytes, Activations::Floats].map(|activations| {
                let (module, info) = validated(kernel, activations);
                (kernel, module, info)
            })
        };
        all().into_iter().flat_map(validated)
    }

    fn validated(kernel: Kernel, activations: Activations) -> (naga::Module, ModuleInfo) {
        let source = kernel.source(activations);
        let module = naga::front::wgsl::parse_str(&source)
            .unwrap_or_else(|e| panic!("{kernel:?}: {}", e.emit_to_string(&source)));
        let mut capabilities = Capabilities::SHADER_FLOAT16_IN_FLOAT32;
        if is_cooperative(kernel) {
            capabilities |= Capabilities::COOPERATIVE_MATRIX | Capabilities::SUBGROUP;
        }
        if is_cooperative(kernel) || matches!(kernel, Kernel::Halves(_)) {
            capabilities |= Capabilities::SHADER_FLOAT16;
        }
        let mut validator = Validator::new(ValidationFlags::all(), capabilities);
        let info = validator
            .validate(&module)
            .unwrap_or_else(|e| panic!("{kernel:?}: {}", e.emit_to_string(&source)));
        (module, info)
    }

    /// No adapter at hand has Metal or DX12: their texts are written, at least.
    #[test]
    fn every_kernel_becomes_spirv_msl_and_hlsl() {
        for (kernel, module, info) in modules() {
            spv::write_vec(&module, &info, &spv::Options::default(), None)
                .unwrap_or_else(|e| panic!("{kernel:?}: SPIR-V: {e}"));
            // Metal's matrices are 8 x 8, and HLSL has none.
            if is_cooperative(kernel) {
                continue;
            }
            let pipeline = msl::PipelineOptions::default();
            let lang_version = (2, 4);
            let options =
                msl::Options { lang_version, fake_missing_bindings: true, ..Default::default() };
            msl::write_string(&module, &info, &options, &pipeline)
                .unwrap_or_else(|e| panic!("{kernel:?}: MSL: {e}"));
            let options = hlsl::Options { fake_missing_bindings: true, ..Default::default() };
            let pipeline = hlsl::PipelineOptions::default();
            hlsl::Writer::new(&mut String::new(), &options, &pipeline)
                .write(&module, &info, None)
                .unwrap_or_else(|e| panic!("{kernel:?}: HLSL: {e}"));
        }
    }

    /// The least that WebGPU guarantees, which opening an adapter asks for.
    #[test]
    fn kernels_need_no_more_shared_memory_buffers_and_threads_than_adapters_have() {
        let limits = wgpu::Limits::default();
        for (kernel, module, _) in modules() {
            let mut layouter = naga::proc::Layouter::default();
            layouter.update(module.to_ctx()).unwrap();
            let in_space = |space: fn(&naga::AddressSpace) -> bool| {
                module.global_variables.iter().filter(move |(_, v)| space(&v.space))
            };
            let shared = in_space(|space| matches!(space, naga::AddressSpace::WorkGroup));
            let bytes: u32 = shared.map(|(_, v)| layouter[v.ty].size).sum();
            let most = match is_cooperative(kernel) {
                true => COOPERATIVE_SHARED_BYTES,
                false => limits.max_compute_workgroup_storage_size,
            };
            assert!(bytes <= most, "{kernel:?}: {bytes}");
            let buffers = in_space(|space| matches!(space, naga::AddressSpace::Storage { .. }));
            let buffers = buffers.count() as u32;
            let most = limits.max_storage_buffers_per_shader_stage;
            assert!(buffers <= most, "{kernel:?}: {buffers} buffers");
            let threads: u32 = module.entry_points[0].workgroup_size.iter().product();
            assert!(threads <= limits.max_compute_invocations_per_workgroup, "{kernel:?}");
        }
    }

    #[test]
    fn the_bindings_of_a_kernel_are_those_of_its_shader() {
        for (kernel, module, _) in modules() {
            for (i, &writes) in kernel.writes().iter().enumerate() {
                let found = module.global_variables.iter().find_map(|(_, variable)| {
                    let binding = variable.binding.as_ref()?;
                    let is_it = binding.group == 0 && binding.binding as usize == i + 1;
                    is_it.then_some(variable.space)
                });
                let Some(naga::AddressSpace::Storage { access }) = found else {
                    panic!("{kernel:?}: no storage at binding {}", i + 1);
                };
                let is_written = access.contains(naga::StorageAccess::STORE);
                assert_eq!(is_written, writes, "{kernel:?}: binding {}", i + 1);
            }
        }
    }
}
