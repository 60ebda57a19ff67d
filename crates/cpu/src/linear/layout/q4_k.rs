//! Q4_K: nibbles; per 32 columns a 6-bit scale and minimum, which f16 factors per 256 columns
//! scale.
//!
//! ```text
//! span of 256 columns: d 16 f16 | dmin 16 f16 | scales 8 x 16 u8 | minimums 8 x 16 u8
//!                      | 8 blocks of nibbles 256
//! 296 bytes a block, 2.8 % above the file; 4 loads, 18 vector operations
//! ```
//!
//! value = (d * scale) * code - dmin * min; both products are exact in f32.

use super::bits::{nibbles, pack_nibbles, put_f16, word};
use super::traits::{Codes, IntegerLayout, ScaleType};
use crate::linear::lanes::Lanes;

const FACTORS: usize = 64;
const SCALES: usize = FACTORS;
const MINS: usize = SCALES + 128;
const NIBBLES: usize = MINS + 128;

/// Q4_K.
pub(crate) struct Q4K;

/// Packs d, dmin and the 16 six-bit scales and minimums that Q4_K and Q5_K share.
#[inline(always)]
pub(super) fn pack_scales(source: &[u8], row: usize, span: &mut [u8]) {
    put_f16(span, 0, row, source);
    put_f16(span, 32, row, &source[2..]);
    let (a, b, c) = (word(source, 4), word(source, 8), word(source, 12));
    let high = |two_bits: u32| (two_bits >> 6 & 0x0303_0303) << 4;
    let words = [
        (SCALES, a & 0x3f3f_3f3f, (c & 0x0f0f_0f0f) | high(a)),
        (MINS, b & 0x3f3f_3f3f, (c >> 4 & 0x0f0f_0f0f) | high(b)),
    ];
    for (at, first, second) in words {
        for block in 0..4 {
            span[at + 16 * block + row] = first.to_le_bytes()[block];
            span[at + 16 * (block + 4) + row] = second.to_le_bytes()[block];
        }
    }
}

impl IntegerLayout for Q4K {
    const COLS: usize = 256;
    const SOURCE_BYTES: usize = 144;
    const BYTES: usize = NIBBLES + 8 * 256;
    const CODES: Codes = Codes::Unsigned { bits: 4 };
    const HAS_MINS: bool = true;
    const SCALE_TYPE: ScaleType = ScaleType::Unsigned;
    const SCALES: usize = SCALES;
    const MINS: usize = MINS;

    #[inline(always)]
    fn pack(source: &[u8], row: usize, span: &mut [u8]) {
        pack_scales(source, row, span);
        for block in 0..8 {
            let pair = &source[16 + 32 * (block / 2)..][..32];
            let shift = 4 * (block as u32 % 2);
            pack_nibbles(pair, shift, NIBBLES + 256 * block, row, span);
        }
    }

    #[inline(always)]
    unsafe fn codes<L: Lanes>(span: *const u8, block: usize) -> [L::Bytes; 8] {
        // SAFETY: the caller vouches for the span.
        unsafe { nibbles::<L>(span.add(NIBBLES + 256 * block)) }
    }
}
