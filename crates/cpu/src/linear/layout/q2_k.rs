//! Q2_K: two-bit codes; per 16 columns a 4-bit scale and minimum, which f16 factors per 256 columns
//! scale.
//!
//! ```text
//! span of 256 columns: d 16 f16 | dmin 16 f16 | 16 x 16 bytes of scales (u8) | 16 x 16 of
//!                      minimums (u8) | 8 blocks of codes 128
//! 200 bytes a block, 19 % above the file (scales and minimums are whole bytes); 2 loads,
//! about 26 vector operations
//! ```
//!
//! value = (d * scale) * code - dmin * min; both products are exact in f32.

use super::bits::{pack_twos, put_f16, twos};
use super::traits::{Codes, IntegerLayout, ScaleType};
use crate::linear::lanes::Lanes;

const SCALES: usize = 64;
const MINS: usize = SCALES + 256;
const BLOCKS: usize = MINS + 256;
const BLOCK: usize = 128;

/// Q2_K.
pub(crate) struct Q2K;

impl IntegerLayout for Q2K {
    const COLS: usize = 256;
    const SOURCE_BYTES: usize = 84;
    const BYTES: usize = BLOCKS + 8 * BLOCK;
    const GROUPS: usize = 2;
    const CODES: Codes = Codes::Unsigned { bits: 2 };
    const HAS_MINS: bool = true;
    const SCALE_TYPE: ScaleType = ScaleType::Unsigned;
    const SCALES: usize = SCALES;
    const MINS: usize = MINS;

    #[inline(always)]
    fn pack(source: &[u8], row: usize, span: &mut [u8]) {
        let (scales, rest) = source.split_at(16);
        let (codes, factors) = rest.split_at(64);
        put_f16(span, 0, row, factors);
        put_f16(span, 32, row, &factors[2..]);
        for (group, &scale) in scales.iter().enumerate() {
            span[SCALES + 16 * group + row] = scale & 15;
            span[MINS + 16 * group + row] = scale >> 4;
        }
        for block in 0..8 {
            let shift = 2 * (block as u32 % 4);
            pack_twos(&codes[32 * (block / 4)..][..32], shift, BLOCKS + BLOCK * block, row, span);
        }
    }

    #[inline(always)]
    unsafe fn codes<L: Lanes>(span: *const u8, block: usize) -> [L::Bytes; 8] {
        // SAFETY: the caller vouches for the span.
        unsafe { twos::<L>(span.add(BLOCKS + BLOCK * block)) }
    }
}
