//! How the KV cache is stored (`kernels/kv_layout.cuh`). This file must not know the device.
//!
//! A head of a page holds 32 tokens. Bytes are offset by 128 and have f16 scales, one for 32
//! elements. Behind the bytes of 64 columns of 16 tokens lie their scales, two for each token.
//! Everything that is copied begins at a multiple of its size.

use bodkin_backend::{KvType, PAGE_TOKENS};
use bodkin_gguf::Format;
use bodkin_model::{Entries, KvSlot, Op, Plan};

use crate::constants::MAX_MMA_DIM;

/// Of an indexer's keys, whose selection is sensitive to rounding.
pub(crate) const INDEX_KEYS: KvLayout = KvLayout::F32;

/// The type of the KV cache's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KvLayout {
    /// Half precision.
    F16,
    /// As they are computed.
    F32,
    /// Bytes with scales.
    Q8,
}

impl KvLayout {
    /// The chosen layout; otherwise half precision, or f32 where all matrices of a plan are.
    pub(crate) fn of(kv_type: KvType, plan: &Plan) -> KvLayout {
        let is_coarse = |op: &Op| match op {
            Op::Linear { weight, .. } | Op::ExpertLinear { weight, .. } => {
                plan.weight(*weight).format != Format::F32
            }
            _ => false,
        };
        match kv_type {
            KvType::Q8_0 => KvLayout::Q8,
            KvType::Auto if !plan.ops.iter().any(is_coarse) => KvLayout::F32,
            KvType::Auto | KvType::F16 => KvLayout::F16,
        }
    }

    /// Stored elements of a head of `dim`: whole pieces, which are copied at once.
    pub(crate) fn stride(self, dim: usize) -> usize {
        dim.next_multiple_of(if self == KvLayout::Q8 { 16 } else { 8 })
    }

    /// Bytes of a head of a token, with its scales.
    pub(crate) fn bytes(self, dim: usize) -> usize {
        let stride = self.stride(dim);
        match self {
            KvLayout::F16 => 2 * stride,
            KvLayout::F32 => 4 * stride,
            KvLayout::Q8 => stride + 2 * dim.div_ceil(KvType::BLOCK).next_multiple_of(2),
        }
    }

    /// Bytes of an entry of several tokens, which is a row of its own.
    fn entry_bytes(self, dim: usize) -> usize {
        self.bytes(dim).next_multiple_of(16)
    }

    /// Bytes of a page of each slot: of its keys, then of its values. The key of a block of tokens
    /// is its value, too.
    pub(crate) fn page_bytes(self, plan: &Plan) -> Vec<[usize; 2]> {
        let of_tokens = |s: &KvSlot| {
            [s.key_dim, s.value_dim].map(|dim| PAGE_TOKENS * s.kv_heads * self.bytes(dim))
        };
        let mut pages: Vec<[usize; 2]> = plan.slots.iter().map(of_tokens).collect();
        for op in &plan.ops {
            let (id, layout) = match op {
                Op::Select { slot, .. } => (slot.0, INDEX_KEYS),
                Op::Attention { attention, .. } => match attention.entries {
                    Entries::TokensAndBlocks { slot, .. } => (slot.0, self),
                    Entries::Tokens | Entries::Selected(_) => continue,
                },
                _ => continue,
            };
            let slot = &plan.slots[id];
            let entries = slot.entries_per_page(PAGE_TOKENS);
            pages[id] = [entries * layout.entry_bytes(slot.key_dim), 0];
        }
        pages
    }

    /// Whether decode attention reads these heads with tensor cores.
    pub(crate) fn has_mma(self, slot: &KvSlot) -> bool {
        let dim = self.stride(slot.key_dim).max(self.stride(slot.value_dim));
        self != KvLayout::F32 && dim <= MAX_MMA_DIM
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_of_several_tokens_is_stored_once() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/parity/models");
        let file = bodkin_gguf::File::open(format!("{folder}/deepseek4.gguf")).unwrap();
        let plan = bodkin_model::plan(file.metadata(), file.tensors()).unwrap();
        let mut counts = [0; 3];
        for (slot, bytes) in plan.slots.iter().zip(KvLayout::F16.page_bytes(&plan)) {
            let entries = slot.entries_per_page(PAGE_TOKENS);
            let (kind, wanted) = match (slot.ratio, slot.value_dim) {
                (1, _) => (0, [slot.key_dim, slot.value_dim].map(|dim| 2 * entries * dim)),
                (_, 0) => (1, [4 * entries * slot.key_dim, 0]),
                _ => (2, [2 * entries * slot.key_dim, 0]),
            };
            assert_eq!(bytes, wanted, "{slot:?}");
            counts[kind] += 1;
        }
        assert!(counts.iter().all(|&count| count > 0), "{counts:?}");
        assert_eq!(KvLayout::Q8.entry_bytes(24), 48);
    }
}
