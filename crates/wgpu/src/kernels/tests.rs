//! The texts of all kernels, compiled by naga.

use std::collections::BTreeMap;

use naga::back::{hlsl, msl, spv};
use naga::valid::{Capabilities, ModuleInfo, ValidationFlags, Validator};
use sha2::{Digest, Sha256};

use super::*;
use crate::adapters::COOPERATIVE_SHARED_BYTES;
use crate::lower::{GEMV_TOKENS, gemv_shape};
use crate::tuning::candidates;

const EPILOGUES: [Epilogue; 3] = [Epilogue::One, Epilogue::Three, Epilogue::Gate];
const EXPERT_EPILOGUES: [Epilogue; 2] = [Epilogue::Experts, Epilogue::ExpertGate];

fn is_cooperative(kernel: Kernel) -> bool {
    matches!(
        kernel,
        Kernel::Gemm(Matmul { inputs: Inputs::Halves, .. }, _)
            | Kernel::CachedGemm(Matmul { inputs: Inputs::Halves, .. }, _)
            | Kernel::AttentionCooperative { .. }
    )
}

/// Those that no layout or type of keys and values decides.
const OTHERS: [Kernel; 30] = [
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
    Kernel::ExpertPermutation,
    Kernel::ExpertCache,
    Kernel::ExpertFill,
    Kernel::ExpertSum,
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

/// A grouped GEMM, of experts that are all on the device and of cached ones.
fn tiles_of_experts(matmul: Matmul) -> [Kernel; 2] {
    [Kernel::Gemm(matmul, 64), Kernel::CachedGemm(matmul, 64)]
}

/// Every kernel in every variant.
fn all() -> Vec<Kernel> {
    let layouts = Layout::ALL;
    let dtypes = [KvDtype::F32, KvDtype::F16, KvDtype::Q8];
    let of_layout = |layout| {
        let matmuls = |inputs| {
            let matmul = |epilogue| Matmul { layout, inputs, epilogue };
            let of = |m| {
                [
                    Kernel::Gemv(m, gemv_shape(m.layout, 1)),
                    Kernel::Gemv(m, gemv_shape(m.layout, GEMV_TOKENS[0])),
                    Kernel::Gemv(m, gemv_shape(m.layout, GEMV_TOKENS[1])),
                    Kernel::Gemm(m, 64),
                    Kernel::Gemm(m, 128),
                ]
            };
            let matmuls = EPILOGUES.map(matmul);
            let experts = [false, true].into_iter().flat_map(|is_gated| {
                let gemv = ExpertGemv { layout, inputs, is_gated };
                [Kernel::Experts(gemv), Kernel::CachedExperts(gemv)]
            });
            let tiles = EXPERT_EPILOGUES.map(matmul).into_iter().flat_map(tiles_of_experts);
            matmuls.into_iter().flat_map(of).chain(experts).chain(tiles).collect::<Vec<_>>()
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
        let of_experts = EXPERT_EPILOGUES.map(matmul).into_iter().flat_map(tiles_of_experts);
        let of_list = EPILOGUES.map(matmul).into_iter();
        of_list.flat_map(|m| [64, 128].map(|t| Kernel::Gemm(m, t))).chain(of_experts)
    });
    let of_dtype =
        |dtype| [vec![Kernel::Store(dtype)], dtypes.map(|b| Kernel::Attention(dtype, b)).to_vec()];
    let kernels = layouts.into_iter().flat_map(of_layout).chain(cooperative);
    kernels.chain(dtypes.into_iter().flat_map(of_dtype).flatten()).chain(OTHERS).collect()
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
    let mut capabilities = Capabilities::SHADER_FLOAT16_IN_FLOAT32;
    if is_cooperative(kernel) {
        capabilities |= Capabilities::COOPERATIVE_MATRIX | Capabilities::SUBGROUP;
    }
    if is_cooperative(kernel) || matches!(kernel, Kernel::Halves(_)) {
        capabilities |= Capabilities::SHADER_FLOAT16;
    }
    parsed(&format!("{kernel:?}"), &kernel.source(activations), capabilities)
}

fn parsed(what: &str, source: &str, capabilities: Capabilities) -> (naga::Module, ModuleInfo) {
    let module = naga::front::wgsl::parse_str(source)
        .unwrap_or_else(|e| panic!("{what}: {}", e.emit_to_string(source)));
    let mut validator = Validator::new(ValidationFlags::all(), capabilities);
    let info = validator
        .validate(&module)
        .unwrap_or_else(|e| panic!("{what}: {}", e.emit_to_string(source)));
    (module, info)
}

/// Every shape of the GEMV that may be measured.
#[test]
fn every_shape_compiles() {
    for kernel in all() {
        let Kernel::Gemv(m, shape) = kernel else { continue };
        for shape in candidates(m.layout, shape.tokens) {
            validated(Kernel::Gemv(m, shape), Activations::Bytes);
        }
    }
}

fn spirv(what: &str, module: &naga::Module, info: &ModuleInfo) -> Vec<u8> {
    let options = spv::Options { force_loop_bounding: false, ..Default::default() };
    let words = spv::write_vec(module, info, &options, None);
    let words = words.unwrap_or_else(|e| panic!("{what}: SPIR-V: {e}"));
    words.into_iter().flat_map(u32::to_le_bytes).collect()
}

fn msl(what: &str, module: &naga::Module, info: &ModuleInfo) -> Vec<u8> {
    let pipeline = msl::PipelineOptions::default();
    let lang_version = (2, 4);
    let options = msl::Options {
        lang_version,
        fake_missing_bindings: true,
        force_loop_bounding: false,
        ..Default::default()
    };
    let text = msl::write_string(module, info, &options, &pipeline);
    text.unwrap_or_else(|e| panic!("{what}: MSL: {e}")).0.into_bytes()
}

fn hlsl(what: &str, module: &naga::Module, info: &ModuleInfo) -> Vec<u8> {
    let options = hlsl::Options {
        fake_missing_bindings: true,
        force_loop_bounding: false,
        ..Default::default()
    };
    let pipeline = hlsl::PipelineOptions::default();
    let mut text = String::new();
    let written = hlsl::Writer::new(&mut text, &options, &pipeline).write(module, info, None);
    written.unwrap_or_else(|e| panic!("{what}: HLSL: {e}"));
    text.into_bytes()
}

/// The texts of the kernels in three languages, as hashes: of each kind of kernel those of all its
/// variants. No adapter at hand takes MSL or HLSL, so a change of them is seen here alone.
#[test]
fn every_kernel_becomes_the_spirv_msl_and_hlsl_that_are_known() {
    let source = include_str!("../../shaders/bandwidth.wgsl");
    let (module, info) = parsed("bandwidth", source, Capabilities::empty());
    let bandwidth = ("Bandwidth".to_owned(), true, module, info);
    let kernels = modules().map(|(kernel, module, info)| {
        // Metal's matrices are 8 x 8, and HLSL has none.
        (format!("{kernel:?}"), !is_cooperative(kernel), module, info)
    });
    let mut hashes: BTreeMap<String, [Option<Sha256>; 3]> = BTreeMap::new();
    for (what, is_for_all, module, info) in kernels.chain([bandwidth]) {
        let kind = what.split([' ', '(', '{']).next().unwrap_or(&what).to_owned();
        let [in_spirv, in_msl, in_hlsl] = hashes.entry(kind).or_default();
        in_spirv.get_or_insert_default().update(spirv(&what, &module, &info));
        if is_for_all {
            in_msl.get_or_insert_default().update(msl(&what, &module, &info));
            in_hlsl.get_or_insert_default().update(hlsl(&what, &module, &info));
        }
    }
    let hex = |hash: Option<Sha256>| -> String {
        let Some(hash) = hash else { return "-".to_owned() };
        hash.finalize().iter().take(8).map(|byte| format!("{byte:02x}")).collect()
    };
    let mut found = "kernel, SPIR-V, MSL, HLSL\n".to_owned();
    for (kind, hashes) in hashes {
        found += &format!("{kind}, {}\n", hashes.map(hex).join(", "));
    }
    let known = include_str!("../../tests/translations.csv");
    assert!(found == known, "translations.csv has other hashes; if that is meant, it is:\n{found}");
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
