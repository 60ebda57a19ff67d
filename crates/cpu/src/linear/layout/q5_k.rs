//! Q5_K: five-bit codes; scales and minimums as in Q4_K.
//!
//! ```text
//! span of 256 columns: d 16 f16 | dmin 16 f16 | scales 8 x 16 u8 | minimums 8 x 16 u8
//!                      | 8 blocks of (nibbles 256, fifth bits 64)
//! 360 bytes a block, 2.3 % above the file; 5 loads, about 36 vector operations
//! ```

use super::bits::{join, nibbles, ones_at_4, pack_nibbles, pack_ones};
use super::q4_k::{Q4K, pack_scales};
use super::traits::{Codes, IntegerLayout, ScaleType};
use crate::linear::lanes::Lanes;

const BLOCKS: usize = 64 + 128 + 128;
const BLOCK: usize = 256 + 64;

/// Q5_K.
pub(crate) struct Q5K;

impl IntegerLayout for Q5K {
    const COLS: usize = 256;
    const SOURCE_BYTES: usize = 176;
    const BYTES: usize = BLOCKS + 8 * BLOCK;
    const CODES: Codes = Codes::Unsigned { bits: 5 };
    const HAS_MINS: bool = true;
    const SCALE_TYPE: ScaleType = ScaleType::Unsigned;
    const SCALES: usize = Q4K::SCALES;
    const MINS: usize = Q4K::MINS;

    #[inline(always)]
    fn pack(source: &[u8], row: usize, span: &mut [u8]) {
        pack_scales(source, row, span);
        for block in 0..8 {
            let at = BLOCKS + BLOCK * block;
            let pair = &source[48 + 32 * (block / 2)..][..32];
            pack_nibbles(pair, 4 * (block as u32 % 2), at, row, span);
            pack_ones(&source[16..48], block as u32, at + 256, row, span);
        }
    }

    #[inline(always)]
    unsafe fn codes<L: Lanes>(span: *const u8, block: usize) -> [L::Bytes; 8] {
        // SAFETY: the caller vouches for the span.
        unsafe {
            let at = span.add(BLOCKS + BLOCK * block);
            join::<L>(nibbles::<L>(at), ones_at_4::<L>(at.add(256)))
        }
    }
}
