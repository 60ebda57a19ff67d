//! The caches of keys and values: their types, their sizes, their buffers.

use bodkin_backend::{KvType, Limits, PAGE_TOKENS, Result};
use bodkin_gguf::Format;
use bodkin_model::{KvSlot, Plan};

use crate::gpu::Gpu;
use crate::program::KvDtype;

/// The cache of a KV slot.
pub(crate) struct KvCache {
    pub(crate) buffer: wgpu::Buffer,
    pub(crate) window_index: usize,
    /// Bytes of the keys of a page, and of its values.
    pub(crate) page_bytes: [u64; 2],
    /// Where values begin.
    pub(crate) values_at: u64,
}

/// The types of the KV slots. The default is half precision, but single precision for models whose
/// weights are all single, and for keys of an indexer, which decide and have no values.
pub(crate) fn dtypes(plan: &Plan, kv_type: KvType) -> Vec<KvDtype> {
    let is_single = plan.weights.iter().all(|w| matches!(w.format, Format::F32 | Format::I32));
    let of = |slot: &KvSlot| match kv_type {
        _ if slot.value_dim == 0 => KvDtype::F32,
        KvType::Auto if is_single => KvDtype::F32,
        KvType::Auto | KvType::F16 => KvDtype::F16,
        KvType::Q8_0 => KvDtype::Q8,
    };
    plan.slots.iter().map(of).collect()
}

/// Bytes of the keys, and of the values, of a page of a slot.
pub(crate) fn page_bytes(slot: &KvSlot, dtype: KvDtype) -> [u64; 2] {
    let heads = slot.entries_per_page(PAGE_TOKENS) * slot.kv_heads;
    [slot.key_dim, slot.value_dim].map(|dim| 4 * (heads * dtype.head_words(dim)) as u64)
}

/// The caches of all slots.
pub(crate) fn caches(
    gpu: &Gpu,
    plan: &Plan,
    limits: &Limits,
    dtypes: &[KvDtype],
) -> Result<Vec<KvCache>> {
    let slots = plan.slots.iter().zip(dtypes).zip(plan.window_indices());
    let cache = |((slot, &dtype), window_index): ((&KvSlot, &KvDtype), usize)| {
        let page_bytes = page_bytes(slot, dtype);
        let pages = limits.pages[window_index] as u64;
        let buffer = gpu.buffer("keys and values", pages * page_bytes.iter().sum::<u64>())?;
        let values_at = pages * page_bytes[0];
        Ok(KvCache { buffer, window_index, page_bytes, values_at })
    };
    slots.map(cache).collect()
}
