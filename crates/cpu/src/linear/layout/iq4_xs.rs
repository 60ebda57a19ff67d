//! IQ4_XS: the codes of IQ4_NL with a 6-bit scale per 32 columns, which an f16 factor per 256
//! columns scales.
//!
//! ```text
//! span of 256 columns: d 16 f16 | scales 8 x 16 i8 | 8 blocks of nibbles 256
//! 276 bytes a block, 1.5 % above the file; 4 loads, about 31 vector operations
//! ```
//!
//! value = (d * scale) * `table[code]`; d * scale is exact in f32.

use super::bits::{nibbles, pack_pairs, put_f16};
use super::iq4_nl::values;
use super::traits::{Codes, IntegerLayout, ScaleType};
use crate::linear::lanes::Lanes;

const SCALES: usize = 32;
const NIBBLES: usize = SCALES + 128;

/// IQ4_XS.
pub(crate) struct Iq4Xs;

impl IntegerLayout for Iq4Xs {
    const COLS: usize = 256;
    const SOURCE_BYTES: usize = 136;
    const BYTES: usize = NIBBLES + 8 * 256;
    const CODES: Codes = Codes::Centred { bits: 8, offset: 0 };
    const SCALE_TYPE: ScaleType = ScaleType::Signed;
    const SCALES: usize = SCALES;

    #[inline(always)]
    fn pack(source: &[u8], row: usize, span: &mut [u8]) {
        put_f16(span, 0, row, source);
        let highs = u16::from_le_bytes([source[2], source[3]]);
        for block in 0..8 {
            let low = source[4 + block / 2] >> (4 * (block % 2)) & 15;
            let high = (highs >> (2 * block) & 3) as u8;
            span[SCALES + 16 * block + row] = (low | high << 4).wrapping_sub(32);
            pack_pairs(&source[8 + 16 * block..][..16], NIBBLES + 256 * block, row, span);
        }
    }

    #[inline(always)]
    unsafe fn codes<L: Lanes>(span: *const u8, block: usize) -> [L::Bytes; 8] {
        // SAFETY: the caller vouches for the span.
        unsafe { values::<L>(nibbles::<L>(span.add(NIBBLES + 256 * block))) }
    }
}
