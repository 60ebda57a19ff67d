//! How keys and values are kept (`kernels/kept.cuh`). This file must not know the device.

use bodkin_gguf::Format;
use bodkin_model::{Op, Plan};

/// The type of the numbers that keys and values are kept as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kept {
    /// Half precision.
    F16,
    /// As they are computed.
    F32,
}

impl Kept {
    /// What is precise enough for a plan: half precision, unless all its matrices are in f32.
    pub(crate) fn of(plan: &Plan) -> Kept {
        let is_coarse = |op: &Op| match op {
            Op::Linear { weight, .. } | Op::ExpertLinear { weight, .. } => {
                plan.weight(*weight).format != Format::F32
            }
            _ => false,
        };
        if plan.ops.iter().any(is_coarse) { Kept::F16 } else { Kept::F32 }
    }

    /// Bytes of a number.
    pub(crate) fn bytes(self) -> usize {
        match self {
            Kept::F16 => 2,
            Kept::F32 => 4,
        }
    }
}
