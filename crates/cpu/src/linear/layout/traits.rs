//! What a packed layout defines: how one row of a GGUF block is packed into a panel, and how a
//! kernel reads codes, scales and minimums back.

use crate::linear::lanes::Lanes;

/// The codes of an integer layout.
#[derive(Copy, Clone)]
pub(crate) enum Codes {
    /// From 0 to `2^bits - 1`, `bits <= 6`.
    Unsigned {
        /// Width of a code.
        bits: u32,
    },
    /// The value is `code - offset`. Codes are unsigned as above and `offset` is a power of two; or
    /// they are i8 with offset 0.
    Centred {
        /// Width of a code.
        bits: u32,
        /// The code of zero.
        offset: i32,
    },
}

/// The storage of the scales of an integer layout.
#[derive(Copy, Clone)]
pub(crate) enum ScaleType {
    /// f16 per span.
    F16,
    /// i8 per group, times an f16 factor per span.
    Signed,
    /// u8 per group, times an f16 factor per span; minimums in the same way with a second factor.
    Unsigned,
}

/// Offset of the second factor in a span; the first is at 0.
const SECOND_FACTOR: usize = 32;

/// A layout with integer dot products. A *span* is the columns of one GGUF block: 32 or 256.
///
/// # Safety
/// The functions on a `span` require [`IntegerLayout::BYTES`] readable bytes that `pack` wrote, a
/// `block` below `COLS / 32`, a group below `GROUPS`, and the instructions of `L`.
pub(crate) trait IntegerLayout {
    /// Columns of a span.
    const COLS: usize;
    /// Bytes of one row of a span in GGUF.
    const SOURCE_BYTES: usize;
    /// Bytes of a packed span of 16 rows.
    const BYTES: usize;
    /// Scales (and minimums) per row and block of 32 columns: 1, or 2 for 16 columns each.
    const GROUPS: usize = 1;
    /// The range of the codes.
    const CODES: Codes;
    /// Whether a minimum is subtracted: value = scale * code - min.
    const HAS_MINS: bool = false;
    /// The storage of scales and minimums.
    const SCALE_TYPE: ScaleType = ScaleType::F16;
    /// Offset of the scales in a span.
    const SCALES: usize;
    /// Offset of the minimums in a span, if there are any.
    const MINS: usize = 0;

    /// Packs one row's span into lane `row` of the packed span, which is zero before.
    fn pack(source: &[u8], row: usize, span: &mut [u8]);

    /// Reads the factors of a span.
    #[inline(always)]
    unsafe fn factors<L: Lanes>(span: *const u8) -> [L::Floats; 2] {
        // SAFETY: the caller vouches for the span.
        unsafe {
            match Self::SCALE_TYPE {
                ScaleType::F16 => [L::float(1.0); 2],
                ScaleType::Signed => [L::from_f16(span); 2],
                ScaleType::Unsigned => [L::from_f16(span), L::from_f16(span.add(SECOND_FACTOR))],
            }
        }
    }
    /// The codes of a block: eight steps of four columns.
    unsafe fn codes<L: Lanes>(span: *const u8, block: usize) -> [L::Bytes; 8];
    /// The scales of a group.
    #[inline(always)]
    unsafe fn scale<L: Lanes>(
        span: *const u8,
        factors: &[L::Floats; 2],
        block: usize,
        group: usize,
    ) -> L::Floats {
        // SAFETY: the caller vouches for the span.
        unsafe {
            let scales = span.add(Self::SCALES);
            let at = scales.add(16 * (Self::GROUPS * block + group));
            match Self::SCALE_TYPE {
                ScaleType::F16 => L::from_f16(scales),
                ScaleType::Signed => L::mul(factors[0], L::from_i8(at)),
                ScaleType::Unsigned => L::mul(factors[0], L::from_u8(at)),
            }
        }
    }
    /// The minimums of a group; zero without minimums.
    #[inline(always)]
    unsafe fn min<L: Lanes>(
        span: *const u8,
        factors: &[L::Floats; 2],
        block: usize,
        group: usize,
    ) -> L::Floats {
        // SAFETY: the caller vouches for the span.
        unsafe {
            let mins = span.add(Self::MINS);
            match Self::SCALE_TYPE {
                _ if !Self::HAS_MINS => L::float(0.0),
                ScaleType::F16 => L::from_f16(mins),
                _ => {
                    let at = mins.add(16 * (Self::GROUPS * block + group));
                    L::mul(factors[1], L::from_u8(at))
                }
            }
        }
    }
}

/// A layout with f32 arithmetic; a panel is `[cols][16 rows]` of the stored type.
pub(crate) trait FloatLayout {
    /// Bytes of one weight.
    const BYTES: usize;
    /// bfloat16 numbers whose sum is taken for a weight: one if it is such a number.
    #[cfg(target_arch = "x86_64")]
    const BF16_PARTS: usize = 2;

    /// Loads the weights of one column.
    ///
    /// # Safety
    /// `at` has 16 weights to read, and the instructions of `L` exist.
    unsafe fn load<L: Lanes>(at: *const u8) -> L::Floats;

    /// Stores a value of another format, rounded to nearest.
    fn store(value: f32, to: &mut [u8]);
}

/// A computation that is generic over the layout: see `PackedLayout::visit`.
pub(crate) trait VisitLayout {
    /// The result.
    type Output;
    /// For an integer layout.
    fn integer<K: IntegerLayout>(self) -> Self::Output;
    /// For a float layout.
    fn float<K: FloatLayout>(self) -> Self::Output;
}
