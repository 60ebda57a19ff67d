//! How keys and values are kept (`kernels/kept.cuh`). This file must not know the device.
//!
//! The cells of a head in a page are those of 32 tokens. Bytes, which are 128 larger than the codes
//! they stand for, come with scales in half precision, one for 32 elements: after the bytes of all
//! 32 tokens, those of each token side by side and an even number of them, so that a token's scales
//! can be copied alone. Everything that is copied begins at a multiple of its size.

use bodkin_backend::KvType;
use bodkin_gguf::Format;
use bodkin_model::{Op, Plan};

/// The type of the numbers that keys and values are kept as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kept {
    /// Half precision.
    F16,
    /// As they are computed.
    F32,
    /// Bytes with scales.
    Q8,
}

impl Kept {
    /// What was chosen; otherwise what is precise enough for a plan: half precision, unless all its
    /// matrices are in f32.
    pub(crate) fn of(kv_type: KvType, plan: &Plan) -> Kept {
        let is_coarse = |op: &Op| match op {
            Op::Linear { weight, .. } | Op::ExpertLinear { weight, .. } => {
                plan.weight(*weight).format != Format::F32
            }
            _ => false,
        };
        match kv_type {
            KvType::Q8_0 => Kept::Q8,
            KvType::Auto if !plan.ops.iter().any(is_coarse) => Kept::F32,
            KvType::Auto | KvType::F16 => Kept::F16,
        }
    }

    /// Elements of a head of `dim` as it is kept: whole pieces, which are copied at once.
    pub(crate) fn stride(self, dim: usize) -> usize {
        dim.next_multiple_of(if self == Kept::Q8 { 16 } else { 8 })
    }

    /// Bytes of a head of a token, with its scales.
    pub(crate) fn bytes(self, dim: usize) -> usize {
        let stride = self.stride(dim);
        match self {
            Kept::F16 => 2 * stride,
            Kept::F32 => 4 * stride,
            Kept::Q8 => stride + 2 * dim.div_ceil(KvType::BLOCK).next_multiple_of(2),
        }
    }
}
