//! Q5_0 and Q5_1: five-bit codes with an f16 scale, and for Q5_1 an f16 minimum, per 32 columns.
//!
//! ```text
//! span of 32 columns: nibbles 256 | fifth bits 64 | scales 16 f16 | Q5_1: minimums 16 f16
//! 352 or 384 bytes, as in the file; 5 loads, about 30 vector operations
//! ```

use super::bits::{bits_by_step, join, nibbles, ones_at_4, pack_pairs, put_f16, put_word, word};
use super::traits::{Codes, IntegerLayout};
use crate::linear::lanes::Lanes;

const ONES: usize = 256;
const SCALES: usize = ONES + 64;
const MINS: usize = SCALES + 32;

/// value = scale * (code - 16)
pub(crate) struct Q5_0;

impl IntegerLayout for Q5_0 {
    const COLS: usize = 32;
    const SOURCE_BYTES: usize = 22;
    const BYTES: usize = SCALES + 32;
    const CODES: Codes = Codes::Centred { bits: 5, offset: 16 };
    const SCALES: usize = SCALES;

    #[inline(always)]
    fn pack(source: &[u8], row: usize, span: &mut [u8]) {
        pack_pairs(&source[6..], 0, row, span);
        put_word(span, ONES, row, bits_by_step(word(source, 2)));
        put_f16(span, SCALES, row, source);
    }

    #[inline(always)]
    unsafe fn codes<L: Lanes>(span: *const u8, _: usize) -> [L::Bytes; 8] {
        // SAFETY: the caller vouches for the span.
        unsafe { join::<L>(nibbles::<L>(span), ones_at_4::<L>(span.add(ONES))) }
    }
}

/// value = scale * code + min, where the file's minimum is added; it is stored negated here.
pub(crate) struct Q5_1;

impl IntegerLayout for Q5_1 {
    const COLS: usize = 32;
    const SOURCE_BYTES: usize = 24;
    const BYTES: usize = MINS + 32;
    const CODES: Codes = Codes::Unsigned { bits: 5 };
    const HAS_MINS: bool = true;
    const SCALES: usize = SCALES;
    const MINS: usize = MINS;

    #[inline(always)]
    fn pack(source: &[u8], row: usize, span: &mut [u8]) {
        pack_pairs(&source[8..], 0, row, span);
        put_word(span, ONES, row, bits_by_step(word(source, 4)));
        put_f16(span, SCALES, row, source);
        put_f16(span, MINS, row, &[source[2], source[3] ^ 0x80]);
    }

    #[inline(always)]
    unsafe fn codes<L: Lanes>(span: *const u8, block: usize) -> [L::Bytes; 8] {
        // SAFETY: the caller vouches for the span.
        unsafe { Q5_0::codes::<L>(span, block) }
    }
}
