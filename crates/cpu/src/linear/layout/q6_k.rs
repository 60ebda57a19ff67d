//! Q6_K: six-bit codes with an int8 scale per 16 columns, which an f16 factor per 256 columns
//! scales.
//!
//! ```text
//! span of 256 columns: d 16 f16 | scales 16 x 16 i8 | 8 blocks of (nibbles 256, high bits 128)
//! 420 bytes a block, as in the file; 6 loads, about 40 vector operations
//! ```
//!
//! value = (d * scale) * (code - 32); d * scale is exact in f32.

use super::bits::{join, nibbles, pack_nibbles, pack_twos, put_f16, twos_high};
use super::traits::{Codes, IntegerLayout, ScaleType};
use crate::linear::lanes::Lanes;

const SCALES: usize = 32;
const BLOCKS: usize = SCALES + 256;
const BLOCK: usize = 256 + 128;

/// Q6_K.
pub(crate) struct Q6K;

impl IntegerLayout for Q6K {
    const COLS: usize = 256;
    const SOURCE_BYTES: usize = 210;
    const BYTES: usize = BLOCKS + 8 * BLOCK;
    const GROUPS: usize = 2;
    const CODES: Codes = Codes::Centred { bits: 6, offset: 32 };
    const SCALE_TYPE: ScaleType = ScaleType::Signed;
    const SCALES: usize = SCALES;

    #[inline(always)]
    fn pack(source: &[u8], row: usize, span: &mut [u8]) {
        let (fours, rest) = source.split_at(128);
        let (twos, rest) = rest.split_at(64);
        let (scales, factor) = rest.split_at(16);
        put_f16(span, 0, row, factor);
        for (group, &scale) in scales.iter().enumerate() {
            span[SCALES + 16 * group + row] = scale;
        }
        for block in 0..8 {
            // The file holds 128 columns at a time, as four quarters that share their bytes.
            let (half, quarter) = (block / 4, block % 4);
            let at = BLOCKS + BLOCK * block;
            let source = &fours[64 * half + 32 * (quarter % 2)..][..32];
            pack_nibbles(source, 4 * (quarter as u32 / 2), at, row, span);
            let source = &twos[32 * half..][..32];
            pack_twos(source, 2 * quarter as u32, at + 256, row, span);
        }
    }

    #[inline(always)]
    unsafe fn codes<L: Lanes>(span: *const u8, block: usize) -> [L::Bytes; 8] {
        // SAFETY: the caller vouches for the span.
        unsafe {
            let at = span.add(BLOCKS + BLOCK * block);
            join::<L>(nibbles::<L>(at), twos_high::<L>(at.add(256)))
        }
    }
}
