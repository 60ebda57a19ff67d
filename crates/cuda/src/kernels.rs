//! The kernels, compiled from `kernels/*.cu` by `cargo xtask kernels`: machine code for Hopper, PTX
//! for all other devices, which the driver compiles when a model is loaded for the first time. The
//! files are gzip-compressed, and decompressed when they are loaded.

use std::io::Read;
use std::sync::Arc;
use std::thread;

use bodkin_backend::{Result, tuning};
use flate2::read::GzDecoder;

use crate::constants::{GUARANTEED_SHARED_BYTES, MAX_MMA_DIM, PREFILL_POSITIONS, WIDTHS};
use crate::driver::{Device, Kernel, Module};
use crate::kv_layout::KvLayout;
use crate::packed::{MmaLayout, PackedLayout};
use crate::persistent::{STATIC_BYTES, VARIANTS};
use crate::shared_memory::{
    ATTENTION_BYTES, GEMM_BYTES, prefill_bytes, prefill_wgmma_bytes, wgmma_bytes,
};

fn decompress(file: &[u8]) -> Vec<u8> {
    let mut image = Vec::new();
    GzDecoder::new(file).read_to_end(&mut image).expect("the compiled-in kernels are intact");
    image
}

/// The checksum and the length of what a file decompresses to, which end it.
fn trailer(file: &[u8]) -> [u8; 8] {
    *file.last_chunk().expect("the compiled-in kernels are intact")
}

/// Declares the modules of the kernels' files, and loads their PTX or machine code.
macro_rules! modules {
    ($($name:ident)*) => {
        struct Modules { $($name: Module,)* checksum: u64 }

        impl Modules {
            fn load(device: &Arc<Device>, is_hopper: bool) -> Result<Modules> {
                // The driver loads the first files while threads decompress the others.
                let mut trailers = Vec::new();
                $(let file: &[u8] = if is_hopper {
                    include_bytes!(concat!("../kernels/built/", stringify!($name), ".cubin.gz"))
                } else {
                    include_bytes!(concat!("../kernels/built/", stringify!($name), ".ptx.gz"))
                };
                trailers.push(trailer(file));
                let $name = thread::spawn(move || decompress(file));)*
                Ok(Modules {
                    $($name: {
                        let image = $name.join().expect("the compiled-in kernels are intact");
                        Module::load(device, &image, is_hopper)?
                    },)*
                    checksum: tuning::checksum(trailers.concat()),
                })
            }
        }
    };
}

modules! {
    rows recurrent hyper select sample attention attention_f32 attention_q8
    decode_attention_mma decode_attention_mma_q8
    prefill_attention prefill_attention_q8
    prefill_attention_wgmma prefill_attention_wgmma_q8
    gemv_mma gemm_mma permute_experts gemm_wgmma all_gather expert_cache
    persistent persistent_s24 persistent_experts persistent_experts_softcap_q8 persistent_cached
}

/// The widest heads that each prefill attention kernel takes.
pub(crate) const PREFILL_DIMS: [usize; 3] = [64, 128, 256];
const _: () = assert!(prefill_bytes(PREFILL_DIMS[2]) <= GUARANTEED_SHARED_BYTES);

/// The kernels of one packed layout.
#[derive(Clone, Copy)]
pub(crate) struct LayoutKernels {
    embed: Kernel,
    /// For up to 8 and up to 16 rows; plain and gated.
    pub(crate) gemv_mma: [[Kernel; 2]; 2],
    /// For many rows; plain and gated.
    pub(crate) gemm_mma: [Kernel; 2],
    /// Its form for Hopper, of each of [`WIDTHS`]; not for 2:4 weights.
    pub(crate) gemm_wgmma: Option<[[Kernel; 2]; WIDTHS.len()]>,
}

impl LayoutKernels {
    fn load(layout: MmaLayout, modules: &Modules, is_hopper: bool) -> Result<LayoutKernels> {
        let name = layout.name();
        let Modules { rows, gemv_mma, gemm_mma, gemm_wgmma, .. } = modules;
        let both = |module: &Module, name: &str, bytes: usize| -> Result<[Kernel; 2]> {
            Ok([module.kernel(name, bytes)?, module.kernel(&format!("{name}_gated"), bytes)?])
        };
        let gemvs = |rows: usize| {
            both(gemv_mma, &format!("gemv_mma_{name}_{rows}"), GUARANTEED_SHARED_BYTES)
        };
        let gemms = |width: usize| {
            both(gemm_wgmma, &format!("gemm_wgmma_{name}_{width}"), wgmma_bytes(layout, width))
        };
        Ok(LayoutKernels {
            embed: rows.kernel(&format!("embed_{name}"), 0)?,
            gemv_mma: [gemvs(8)?, gemvs(16)?],
            gemm_mma: both(gemm_mma, &format!("gemm_mma_{name}"), GEMM_BYTES)?,
            gemm_wgmma: match is_hopper && layout.has_wgmma() {
                true => {
                    let [a, b, c, d] = WIDTHS.map(|width| gemms(width.rows));
                    Some([a?, b?, c?, d?])
                }
                false => None,
            },
        })
    }
}

/// The attention kernels of one KV layout.
#[derive(Clone, Copy)]
pub(crate) struct AttentionKernels {
    /// Without tensor cores, for blocks of one and of four query heads of a key head: for any rows,
    /// and for steps of one row a sequence, whose rotation and KV write it does, too.
    pub(crate) decode: [[Kernel; 2]; 2],
    pub(crate) store: Kernel,
    /// Sparse attention: to entries that an indexer selected, or to a window and to compressed
    /// blocks of tokens; for blocks of one and of four query heads.
    pub(crate) attend_entries: [Kernel; 2],
    pub(crate) store_entries: Kernel,
}

impl AttentionKernels {
    fn of(module: &Module) -> Result<AttentionKernels> {
        let kernels = |name: &str| with_fused_kv_write(module, name);
        let decode = [kernels("attention_1")?, kernels("attention_4")?];
        let entries = |heads: usize| -> Result<Kernel> {
            module.kernel(&format!("attend_entries_{heads}"), ATTENTION_BYTES)
        };
        let attend_entries = [entries(1)?, entries(4)?];
        let store = module.kernel("store_kv", 0)?;
        let store_entries = module.kernel("store_entries", 0)?;
        Ok(AttentionKernels { decode, store, attend_entries, store_entries })
    }
}

/// A kernel of decode attention, and the one for steps of one row a sequence, which also rotates
/// queries and keys and writes the KV cache.
fn with_fused_kv_write(module: &Module, name: &str) -> Result<[Kernel; 2]> {
    let kernel = |name: &str| module.kernel(name, ATTENTION_BYTES);
    Ok([kernel(name)?, kernel(&format!("{name}_fused"))?])
}

/// Of each kernel of decode attention on tensor cores: the largest head dimension, and the blocks
/// that a multiprocessor runs at once, as its launch bounds say.
pub(crate) const DECODE_DIMS: [(usize, usize); 3] = [(128, 2), (256, 1), (MAX_MMA_DIM, 1)];

/// Decode attention of heads of up to each of [`DECODE_DIMS`]: for any rows, and for steps of one
/// row a sequence.
type DecodeAttention = Vec<[Kernel; 2]>;

fn decode_attention(module: &Module) -> Result<DecodeAttention> {
    let kernels = |(dim, _)| with_fused_kv_write(module, &format!("decode_attention_mma_{dim}"));
    DECODE_DIMS.into_iter().map(kernels).collect()
}

/// Selective scans with up to 128 and 256 state elements a row, and with decays by channel (Mamba
/// 1) and up to 256.
pub(crate) struct Scans {
    pub(crate) up_to_128: Kernel,
    pub(crate) up_to_256: Kernel,
    pub(crate) by_channel: Kernel,
    /// Of one token of each sequence.
    pub(crate) decode_up_to_128: Kernel,
    pub(crate) decode_up_to_256: Kernel,
}

impl Scans {
    fn load(module: &Module) -> Result<Scans> {
        Ok(Scans {
            up_to_128: module.kernel("scan_128", 0)?,
            up_to_256: module.kernel("scan_256", 0)?,
            by_channel: module.kernel("scan_by_channel", 0)?,
            decode_up_to_128: module.kernel("scan_128_decode", 0)?,
            decode_up_to_256: module.kernel("scan_256_decode", 0)?,
        })
    }
}

/// Delta rules with heads of up to 128 and 256, each also with decays by channel.
pub(crate) struct DeltaRules {
    pub(crate) up_to_128: [Kernel; 2],
    pub(crate) up_to_256: [Kernel; 2],
}

impl DeltaRules {
    fn load(module: &Module) -> Result<DeltaRules> {
        let both = |name: &str| -> Result<[Kernel; 2]> {
            let by_channel = format!("{name}_by_channel");
            Ok([module.kernel(name, 0)?, module.kernel(&by_channel, 0)?])
        };
        Ok(DeltaRules { up_to_128: both("delta_rule_128")?, up_to_256: both("delta_rule_256")? })
    }
}

/// Prefill attention for KV caches in f16 and in bytes, of each of [`PREFILL_DIMS`].
struct PrefillAttention {
    mma: [Vec<Kernel>; 2],
    /// On Hopper.
    wgmma: Option<[Vec<Kernel>; 2]>,
}

impl PrefillAttention {
    fn new(modules: &Modules, is_hopper: bool) -> Result<PrefillAttention> {
        let Modules { prefill_attention, prefill_attention_q8, .. } = modules;
        let Modules { prefill_attention_wgmma, prefill_attention_wgmma_q8, .. } = modules;
        let mma = |module: &Module| {
            let name = "prefill_attention";
            let kernel = |&dims| module.kernel(&format!("{name}_{dims}"), prefill_bytes(dims));
            PREFILL_DIMS.iter().map(kernel).collect::<Result<Vec<Kernel>>>()
        };
        let wgmma = |module: &Module, kv: KvLayout| {
            let name = "prefill_attention_wgmma";
            let kernel =
                |&dims| module.kernel(&format!("{name}_{dims}"), prefill_wgmma_bytes(dims, kv));
            PREFILL_DIMS.iter().map(kernel).collect::<Result<Vec<Kernel>>>()
        };
        let with_wgmma = || {
            let halves = wgmma(prefill_attention_wgmma, KvLayout::F16)?;
            Ok([halves, wgmma(prefill_attention_wgmma_q8, KvLayout::Q8)?])
        };
        Ok(PrefillAttention {
            mma: [mma(prefill_attention)?, mma(prefill_attention_q8)?],
            wgmma: is_hopper.then(with_wgmma).transpose()?,
        })
    }
}

/// All kernels.
pub(crate) struct Kernels {
    /// Of each of [`MmaLayout::ALL`].
    layouts: Vec<LayoutKernels>,
    embed_f32: Kernel,
    /// Matmuls with f32 weights, for any number of input rows: a block takes one weight row, or
    /// with more than [`GEMV_ROWS`](crate::constants::GEMV_ROWS) input rows four.
    pub(crate) gemv_f32: [Kernel; 2],
    pub(crate) rope_angles: Kernel,
    /// RMS norms of aligned rows of up to 8 and up to 16 elements a thread, without bias or gate.
    pub(crate) rms_norm: [Kernel; 2],
    pub(crate) norm_rows: Kernel,
    /// Layer norms of more than [`SHORT_NORM`](crate::constants::SHORT_NORM) and up to
    /// [`SHORT_LAYER_NORM`](crate::constants::SHORT_LAYER_NORM) elements.
    pub(crate) layer_norm_rows: Kernel,
    pub(crate) convert_input: Kernel,
    /// The split-K reduction of `gemm_wgmma`: adds partial sums and runs the epilogue; plain and
    /// gated.
    pub(crate) add_slices: [Kernel; 2],
    /// Swizzles the input of `gemm_wgmma`.
    pub(crate) swizzle_input: Kernel,
    /// Permutes rows by their experts.
    pub(crate) permute_experts: Kernel,
    pub(crate) elementwise: Kernel,
    pub(crate) rope: Kernel,
    pub(crate) slice_concat: Kernel,
    pub(crate) pool: Kernel,
    pub(crate) route: Kernel,
    /// The weights of experts that an earlier operation chose.
    pub(crate) route_chosen: Kernel,
    /// Gives a row the L2 norm of another one.
    pub(crate) rescale: Kernel,
    /// `max(x - (mean + deviations * standard deviation), 0)`: statistical top-k sparsity.
    pub(crate) cutoff: Kernel,
    pub(crate) scale_experts: Kernel,
    pub(crate) expert_sum: Kernel,
    pub(crate) apply_penalties: Kernel,
    pub(crate) sample: Kernel,
    pub(crate) conv: Kernel,
    pub(crate) scans: Scans,
    pub(crate) delta_rules: DeltaRules,
    /// Measures memory bandwidth.
    pub(crate) read_all: Kernel,
    pub(crate) all_gather: Kernel,
    pub(crate) update_expert_cache: Kernel,
    pub(crate) request_experts: Kernel,
    /// Weighted sums of the streams of hyper-connections.
    pub(crate) mix: Kernel,
    pub(crate) hyper_weights: Kernel,
    /// Pools blocks of tokens to one row each, for sparse attention.
    pub(crate) compress: Kernel,
    pub(crate) score_entries: Kernel,
    pub(crate) select_entries: Kernel,
    attention_f16: AttentionKernels,
    attention_f32: AttentionKernels,
    attention_q8: AttentionKernels,
    /// Decode attention on tensor cores, for KV caches in f16 and in bytes.
    decode_attention: [DecodeAttention; 2],
    prefill_attention: PrefillAttention,
    /// The persistent kernel, of each of [`VARIANTS`], on devices that have it.
    pub(crate) persistent: Option<Vec<Kernel>>,
    is_hopper: bool,
    modules: Modules,
}

impl Kernels {
    /// Loads all kernels.
    pub(crate) fn load(device: &Arc<Device>) -> Result<Kernels> {
        let is_hopper = device.capability == 90;
        let modules = Modules::load(device, is_hopper)?;
        let layouts = MmaLayout::ALL.map(|layout| LayoutKernels::load(layout, &modules, is_hopper));
        let Modules { rows, recurrent, sample, gemv_mma, permute_experts, .. } = &modules;
        let Modules { hyper, select, expert_cache: cache, .. } = &modules;
        let Modules { decode_attention_mma, decode_attention_mma_q8, .. } = &modules;
        let persistent = || -> Result<Vec<Kernel>> {
            let Modules { persistent, persistent_s24, persistent_cached, .. } = &modules;
            let Modules { persistent_experts, persistent_experts_softcap_q8, .. } = &modules;
            let of_experts = [persistent_experts, persistent_experts_softcap_q8, persistent_cached];
            let files = [persistent, persistent_s24].into_iter().chain(of_experts);
            let kernels = VARIANTS.iter().zip(files).map(|(variant, file)| {
                let bytes = device.shared_bytes - STATIC_BYTES;
                Ok(file.kernel(variant.name, bytes)?.cooperative())
            });
            kernels.collect()
        };
        Ok(Kernels {
            layouts: layouts.into_iter().collect::<Result<_>>()?,
            embed_f32: rows.kernel("embed_f32", 0)?,
            gemv_f32: [gemv_mma.kernel("gemv_f32_1", 0)?, gemv_mma.kernel("gemv_f32_4", 0)?],
            rope_angles: rows.kernel("rope_angles", 0)?,
            rms_norm: [rows.kernel("rms_norm_2", 0)?, rows.kernel("rms_norm_4", 0)?],
            norm_rows: rows.kernel("norm_rows", 0)?,
            layer_norm_rows: rows.kernel("layer_norm_rows", 0)?,
            convert_input: rows.kernel("convert_input", 0)?,
            add_slices: [
                modules.gemm_wgmma.kernel("add_slices", 0)?,
                modules.gemm_wgmma.kernel("add_slices_gated", 0)?,
            ],
            swizzle_input: permute_experts.kernel("swizzle_input", 0)?,
            permute_experts: permute_experts.kernel("permute_experts", 0)?,
            elementwise: rows.kernel("elementwise", 0)?,
            rope: rows.kernel("rope", 0)?,
            slice_concat: rows.kernel("slice_concat", 0)?,
            pool: rows.kernel("pool", 0)?,
            route: rows.kernel("route", 0)?,
            route_chosen: rows.kernel("route_chosen", 0)?,
            rescale: rows.kernel("rescale", 0)?,
            cutoff: rows.kernel("cutoff", 0)?,
            scale_experts: rows.kernel("scale_experts", 0)?,
            expert_sum: rows.kernel("expert_sum", 0)?,
            apply_penalties: sample.kernel("apply_penalties", 0)?,
            sample: sample.kernel("sample", 0)?,
            conv: recurrent.kernel("conv", 0)?,
            scans: Scans::load(recurrent)?,
            delta_rules: DeltaRules::load(recurrent)?,
            read_all: recurrent.kernel("read_all", 0)?,
            all_gather: modules.all_gather.kernel("all_gather", 0)?,
            update_expert_cache: cache.kernel("update_expert_cache", GUARANTEED_SHARED_BYTES)?,
            request_experts: cache.kernel("request_experts", 0)?,
            mix: hyper.kernel("mix", 0)?,
            hyper_weights: hyper.kernel("hyper_weights", 0)?,
            compress: select.kernel("compress", 0)?,
            score_entries: select.kernel("score_entries", 0)?,
            select_entries: select.kernel("select_entries", 0)?,
            attention_f16: AttentionKernels::of(&modules.attention)?,
            attention_f32: AttentionKernels::of(&modules.attention_f32)?,
            attention_q8: AttentionKernels::of(&modules.attention_q8)?,
            decode_attention: [
                decode_attention(decode_attention_mma)?,
                decode_attention(decode_attention_mma_q8)?,
            ],
            prefill_attention: PrefillAttention::new(&modules, is_hopper)?,
            persistent: if is_hopper { Some(persistent()?) } else { None },
            is_hopper,
            modules,
        })
    }

    /// Tells the compiled kernels of one version from those of others.
    pub(crate) fn checksum(&self) -> u64 {
        self.modules.checksum
    }

    /// Whether prefill attention runs on `wgmma`, and GEMMs do where the layout of their weights
    /// allows it.
    pub(crate) fn has_wgmma(&self) -> bool {
        self.is_hopper
    }

    /// The kernels of a packed layout.
    pub(crate) fn of(&self, layout: MmaLayout) -> &LayoutKernels {
        &self.layouts[layout as usize]
    }

    /// The attention kernels of a KV layout.
    pub(crate) fn attention(&self, kv: KvLayout) -> &AttentionKernels {
        match kv {
            KvLayout::F16 => &self.attention_f16,
            KvLayout::F32 => &self.attention_f32,
            KvLayout::Q8 => &self.attention_q8,
        }
    }

    /// The decode attention kernels on tensor cores of a KV layout that has them, which f32 does
    /// not.
    pub(crate) fn decode_attention(&self, kv: KvLayout) -> &DecodeAttention {
        &self.decode_attention[usize::from(kv == KvLayout::Q8)]
    }

    /// The prefill attention kernels of such a KV layout, and whether they use `wgmma`. `positions`
    /// bounds the length of the contexts: up to [`PREFILL_POSITIONS`], one tile of the `mma`
    /// kernel, a tile for `wgmma` would be mostly empty, and both give the same bits.
    pub(crate) fn prefill_attention(&self, kv: KvLayout, positions: usize) -> (&[Kernel], bool) {
        let PrefillAttention { mma, wgmma } = &self.prefill_attention;
        let wgmma = wgmma.as_ref().filter(|_| positions > PREFILL_POSITIONS);
        (&wgmma.unwrap_or(mma)[usize::from(kv == KvLayout::Q8)], wgmma.is_some())
    }

    /// The kernel that reads rows of a table.
    pub(crate) fn embed(&self, layout: PackedLayout) -> Kernel {
        match layout {
            PackedLayout::F32 => self.embed_f32,
            PackedLayout::Mma(layout) => self.of(layout).embed,
        }
    }
}
