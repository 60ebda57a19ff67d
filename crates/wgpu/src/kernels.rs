//! The text of each kernel, put together from the files of `shaders/`.

use crate::layout::Layout;
use crate::program::{Kernel, KvDtype};

impl Kernel {
    /// The text of the shader.
    pub(crate) fn source(self) -> String {
        let text = |parts: &[&str]| -> String {
            [include_str!("../shaders/batch.wgsl"), &parts.concat()].concat()
        };
        let weights = |layout: Layout| {
            let own = match layout {
                Layout::F32 => include_str!("../shaders/weights_f32.wgsl"),
                Layout::F16 => include_str!("../shaders/weights_f16.wgsl"),
                Layout::Bf16 => include_str!("../shaders/weights_bf16.wgsl"),
                Layout::Signed => include_str!("../shaders/weights_signed.wgsl"),
                Layout::Unsigned => include_str!("../shaders/weights_unsigned.wgsl"),
                Layout::Nibbles => include_str!("../shaders/weights_nibbles.wgsl"),
                Layout::Indices => include_str!("../shaders/weights_indices.wgsl"),
            };
            [include_str!("../shaders/weights.wgsl"), own].concat()
        };
        let input = include_str!("../shaders/input.wgsl");
        let functions = include_str!("../shaders/functions.wgsl");
        match self {
            Kernel::Embed(layout) => {
                text(&[&weights(layout), include_str!("../shaders/embed.wgsl")])
            }
            Kernel::Gemv(layout, rows) => {
                let rows = format!("const N: u32 = {rows}u;\n");
                text(&[&weights(layout), input, &rows, include_str!("../shaders/gemv.wgsl")])
            }
            Kernel::Gemm(layout) => {
                text(&[&weights(layout), input, include_str!("../shaders/gemm.wgsl")])
            }
            Kernel::Experts(layout) => {
                text(&[&weights(layout), input, include_str!("../shaders/experts.wgsl")])
            }
            Kernel::Norm => text(&[include_str!("../shaders/norm.wgsl")]),
            Kernel::Rope => text(&[include_str!("../shaders/rope.wgsl")]),
            Kernel::Elementwise => text(&[functions, include_str!("../shaders/elementwise.wgsl")]),
            Kernel::HyperWeights => text(&[functions, include_str!("../shaders/hyper.wgsl")]),
            Kernel::Route => text(&[functions, include_str!("../shaders/route.wgsl")]),
            Kernel::Pool => text(&[include_str!("../shaders/pool.wgsl")]),
            Kernel::Store(dtype) => {
                let own = match dtype {
                    KvDtype::F32 => include_str!("../shaders/store_f32.wgsl"),
                    KvDtype::F16 => include_str!("../shaders/store_f16.wgsl"),
                    KvDtype::Q8 => include_str!("../shaders/store_q8.wgsl"),
                };
                let unit = dtype.unit().to_string();
                let store = include_str!("../shaders/kv_store.wgsl").replace("{unit}", &unit);
                text(&[&store, own])
            }
            Kernel::Attention(tokens, blocks) => {
                let cache = |dtype: KvDtype, name: &str| {
                    let source = match dtype {
                        KvDtype::F32 => include_str!("../shaders/kv_f32.wgsl"),
                        KvDtype::F16 => include_str!("../shaders/kv_f16.wgsl"),
                        KvDtype::Q8 => include_str!("../shaders/kv_q8.wgsl"),
                    };
                    source.replace("{kv}", name)
                };
                let caches = [cache(tokens, "kv"), cache(blocks, "blocks")].concat();
                text(&[functions, &caches, include_str!("../shaders/attention.wgsl")])
            }
            Kernel::Conv => text(&[include_str!("../shaders/conv.wgsl")]),
            Kernel::Scan => text(&[functions, include_str!("../shaders/scan.wgsl")]),
            Kernel::DeltaRule => text(&[functions, include_str!("../shaders/delta_rule.wgsl")]),
            Kernel::Compress => text(&[include_str!("../shaders/compress.wgsl")]),
            Kernel::Select => text(&[include_str!("../shaders/select.wgsl")]),
        }
    }

    /// Of each binding from 1 on, whether the shader writes it.
    pub(crate) fn writes(self) -> &'static [bool] {
        match self {
            Kernel::Embed(_) | Kernel::Pool | Kernel::Store(_) => &[false, true],
            Kernel::Gemv(..) | Kernel::Gemm(_) => &[false, false, false, true],
            Kernel::Experts(_) => &[false, false, false, true, false],
            Kernel::Norm | Kernel::HyperWeights => &[false, false, false, true],
            Kernel::Rope | Kernel::Elementwise => &[false, false, true],
            Kernel::Route => &[false, false, false, true, true],
            Kernel::Attention(..) => &[false, false, false, false, false, true],
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
            let gemv = [1, 4].map(|rows| Kernel::Gemv(layout, rows));
            let others = [Kernel::Embed(layout), Kernel::Gemm(layout), Kernel::Experts(layout)];
            [&gemv[..], &others].concat()
        };
        let of_dtype = |dtype| {
            [vec![Kernel::Store(dtype)], dtypes.map(|b| Kernel::Attention(dtype, b)).to_vec()]
        };
        let others = [
            Kernel::Norm,
            Kernel::Rope,
            Kernel::Elementwise,
            Kernel::HyperWeights,
            Kernel::Route,
            Kernel::Pool,
            Kernel::Conv,
            Kernel::Scan,
            Kernel::DeltaRule,
            Kernel::Compress,
            Kernel::Select,
        ];
        let kernels = layouts.into_iter().flat_map(of_layout);
        kernels.chain(dtypes.into_iter().flat_map(of_dtype).flatten()).chain(others).collect()
    }

    fn validated(kernel: Kernel) -> (naga::Module, ModuleInfo) {
        let source = kernel.source();
        let module = naga::front::wgsl::parse_str(&source)
            .unwrap_or_else(|e| panic!("{kernel:?}: {}", e.emit_to_string(&source)));
        let mut validator =
            Validator::new(ValidationFlags::all(), Capabilities::SHADER_FLOAT16_IN_FLOAT32);
        let info = validator
            .validate(&module)
            .unwrap_or_else(|e| panic!("{kernel:?}: {}", e.emit_to_string(&source)));
        (module, info)
    }

    /// No adapter at hand has Metal or DX12: their texts are written, at least.
    #[test]
    fn every_kernel_becomes_spirv_msl_and_hlsl() {
        for kernel in all() {
            let (module, info) = validated(kernel);
            spv::write_vec(&module, &info, &spv::Options::default(), None)
                .unwrap_or_else(|e| panic!("{kernel:?}: SPIR-V: {e}"));
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

    #[test]
    fn the_bindings_of_a_kernel_are_those_of_its_shader() {
        for kernel in all() {
            let (module, _) = validated(kernel);
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
