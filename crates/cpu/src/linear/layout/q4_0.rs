//! Q4_0 and Q4_1: nibbles with an f16 scale, and for Q4_1 an f16 minimum, per 32 columns.
//!
//! ```text
//! span of 32 columns: nibbles 256 | scales 16 f16 | Q4_1: minimums 16 f16
//! 288 or 320 bytes, as in the file; 4 loads, 12 vector operations
//! ```
//!
//! GGUF pairs column `i` with column `i + 16` in a byte, and so does a panel: packing moves words.

use super::bits::{nibbles, pack_pairs, put_f16};
use super::traits::{Codes, IntegerLayout};
use crate::linear::lanes::Lanes;

const SCALES: usize = 256;
const MINS: usize = SCALES + 32;

/// value = scale * (code - 8)
pub(crate) struct Q4_0;

impl IntegerLayout for Q4_0 {
    const COLS: usize = 32;
    const SOURCE_BYTES: usize = 18;
    const BYTES: usize = SCALES + 32;
    const CODES: Codes = Codes::Centred { bits: 4, offset: 8 };
    const SCALES: usize = SCALES;

    #[inline(always)]
    fn pack(source: &[u8], row: usize, span: &mut [u8]) {
        pack_pairs(&source[2..], 0, row, span);
        put_f16(span, SCALES, row, source);
    }

    #[inline(always)]
    unsafe fn codes<L: Lanes>(span: *const u8, _: usize) -> [L::Bytes; 8] {
        // SAFETY: the caller vouches for the span.
        unsafe { nibbles::<L>(span) }
    }
}

/// value = scale * code + min, where the file's minimum is added; it is stored negated here.
pub(crate) struct Q4_1;

impl IntegerLayout for Q4_1 {
    const COLS: usize = 32;
    const SOURCE_BYTES: usize = 20;
    const BYTES: usize = MINS + 32;
    const CODES: Codes = Codes::Unsigned { bits: 4 };
    const HAS_MINS: bool = true;
    const SCALES: usize = SCALES;
    const MINS: usize = MINS;

    #[inline(always)]
    fn pack(source: &[u8], row: usize, span: &mut [u8]) {
        pack_pairs(&source[4..], 0, row, span);
        put_f16(span, SCALES, row, source);
        put_f16(span, MINS, row, &[source[2], source[3] ^ 0x80]);
    }

    #[inline(always)]
    unsafe fn codes<L: Lanes>(span: *const u8, _: usize) -> [L::Bytes; 8] {
        // SAFETY: the caller vouches for the span.
        unsafe { nibbles::<L>(span) }
    }
}
