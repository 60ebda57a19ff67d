//! Q3_K: three-bit codes with a 6-bit scale per 16 columns, which an f16 factor per 256 columns
//! scales.
//!
//! ```text
//! span of 256 columns: d 16 f16 | scales 16 x 16 i8 | 8 blocks of (low bits 128, third bits 64)
//! 228 bytes a block, 3.6 % above the file (scales are whole bytes); 3 loads, about 42 vector
//! operations
//! ```
//!
//! value = (d * scale) * (code - 4); d * scale is exact in f32.

use super::bits::{join, ones_at_2, pack_ones, pack_twos, put_f16, twos};
use super::traits::{Codes, IntegerLayout, ScaleType};
use crate::linear::lanes::Lanes;

const SCALES: usize = 32;
const BLOCKS: usize = SCALES + 256;
const BLOCK: usize = 128 + 64;

/// Q3_K.
pub(crate) struct Q3K;

impl IntegerLayout for Q3K {
    const COLS: usize = 256;
    const SOURCE_BYTES: usize = 110;
    const BYTES: usize = BLOCKS + 8 * BLOCK;
    const GROUPS: usize = 2;
    const CODES: Codes = Codes::Centred { bits: 3, offset: 4 };
    const SCALE_TYPE: ScaleType = ScaleType::Signed;
    const SCALES: usize = SCALES;

    #[inline(always)]
    fn pack(source: &[u8], row: usize, span: &mut [u8]) {
        let (thirds, rest) = source.split_at(32);
        let (lows, rest) = rest.split_at(64);
        let (scales, factor) = rest.split_at(12);
        put_f16(span, 0, row, factor);
        for group in 0..16 {
            let low = scales[group % 8] >> (4 * (group / 8)) & 15;
            let high = scales[8 + group % 4] >> (2 * (group / 4)) & 3;
            span[SCALES + 16 * group + row] = (low | high << 4).wrapping_sub(32);
        }
        for block in 0..8 {
            let at = BLOCKS + BLOCK * block;
            let shift = 2 * (block as u32 % 4);
            pack_twos(&lows[32 * (block / 4)..][..32], shift, at, row, span);
            pack_ones(thirds, block as u32, at + 128, row, span);
        }
    }

    #[inline(always)]
    unsafe fn codes<L: Lanes>(span: *const u8, block: usize) -> [L::Bytes; 8] {
        // SAFETY: the caller vouches for the span.
        unsafe {
            let at = span.add(BLOCKS + BLOCK * block);
            join::<L>(twos::<L>(at), ones_at_2::<L>(at.add(128)))
        }
    }
}
