//! How the KV cache is stored (`kernels/kv_layout.cuh`). This file must not know the device.
//!
//! A head of a page holds 32 tokens. Bytes are offset by 128 and have f16 scales, one for 32
//! elements. The scales lie behind the bytes of all 32 tokens, an even number for each token, so
//! that a token's scales can be copied alone. Everything that is copied begins at a multiple of its
//! size.

use bodkin_backend::KvType;
use bodkin_gguf::Format;
use bodkin_model::{KvSlot, Op, Plan};

use crate::constants::MAX_MMA_DIM;

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

    /// Whether decode attention reads these heads with tensor cores.
    pub(crate) fn has_mma(self, slot: &KvSlot) -> bool {
        let dim = self.stride(slot.key_dim).max(self.stride(slot.value_dim));
        self == KvLayout::F16 && dim <= MAX_MMA_DIM
    }
}
