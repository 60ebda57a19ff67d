//! MXFP4: nibbles that are 4-bit floats (E2M1), with a power of two as scale per 32 columns.
//!
//! ```text
//! span of 32 columns: nibbles 256 | exponents 16 bytes
//! 272 bytes, as in the file; 4 loads, about 28 vector operations
//! ```
//!
//! The table holds twice the E2M1 values, which are integers, and the exponents are one lower in
//! return. Exponent bytes 0 and 1 (scales below 2^-125) give zero.

use super::bits::{nibbles, pack_pairs};
use super::iq4_nl::lookup;
use super::traits::{Codes, IntegerLayout};
use crate::linear::lanes::Lanes;

const EXPONENTS: usize = 256;

/// Twice the values of E2M1.
const VALUES: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// value = 2^(exponent - 128) * `table[code]`
pub(crate) struct Mxfp4;

impl IntegerLayout for Mxfp4 {
    const COLS: usize = 32;
    const SOURCE_BYTES: usize = 17;
    const BYTES: usize = EXPONENTS + 16;
    const CODES: Codes = Codes::Centred { bits: 8, offset: 0 };
    const SCALES: usize = EXPONENTS;

    #[inline(always)]
    fn pack(source: &[u8], row: usize, span: &mut [u8]) {
        pack_pairs(&source[1..], 0, row, span);
        span[EXPONENTS + row] = source[0].saturating_sub(1);
    }

    #[inline(always)]
    unsafe fn codes<L: Lanes>(span: *const u8, _: usize) -> [L::Bytes; 8] {
        // SAFETY: the caller vouches for the span.
        unsafe { lookup::<L>(&VALUES, nibbles::<L>(span)) }
    }

    #[inline(always)]
    unsafe fn scale<L: Lanes>(
        span: *const u8,
        _: &[L::Floats; 2],
        _: usize,
        _: usize,
    ) -> L::Floats {
        // SAFETY: the caller vouches for the span.
        unsafe { L::from_exponents(span.add(EXPONENTS)) }
    }
}
