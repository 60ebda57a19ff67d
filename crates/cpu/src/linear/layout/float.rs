//! F32, F16 and BF16: a panel is `[cols][16 rows]`, little-endian.
//!
//! Per column and 16 rows: 64, 32 or 32 bytes, one converting load, one fused multiply-add per
//! token. `kernel/bf16` replaces this for BF16 where the processor has a BF16 dot product. Formats
//! without a native layout are converted to F16 or F32, see `weight`.

use half::{bf16, f16};

use super::traits::FloatLayout;
use crate::linear::lanes::Lanes;

/// 32-bit floats.
pub(crate) struct F32;

impl FloatLayout for F32 {
    const BYTES: usize = 4;

    #[inline(always)]
    unsafe fn load<L: Lanes>(at: *const u8) -> L::Floats {
        // SAFETY: the caller vouches.
        unsafe { L::from_f32(at) }
    }

    fn store(value: f32, to: &mut [u8]) {
        to.copy_from_slice(&value.to_le_bytes());
    }
}

/// IEEE half precision.
pub(crate) struct F16;

impl FloatLayout for F16 {
    const BYTES: usize = 2;

    #[inline(always)]
    unsafe fn load<L: Lanes>(at: *const u8) -> L::Floats {
        // SAFETY: the caller vouches.
        unsafe { L::from_f16(at) }
    }

    fn store(value: f32, to: &mut [u8]) {
        to.copy_from_slice(&f16::from_f32(value).to_le_bytes());
    }
}

/// bfloat16.
pub(crate) struct Bf16;

impl FloatLayout for Bf16 {
    const BYTES: usize = 2;
    #[cfg(target_arch = "x86_64")]
    const BF16_PARTS: usize = 1;

    #[inline(always)]
    unsafe fn load<L: Lanes>(at: *const u8) -> L::Floats {
        // SAFETY: the caller vouches.
        unsafe { L::from_bf16(at) }
    }

    fn store(value: f32, to: &mut [u8]) {
        to.copy_from_slice(&bf16::from_f32(value).to_le_bytes());
    }
}
