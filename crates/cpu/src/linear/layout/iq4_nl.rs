//! IQ4_NL: nibbles that index a table of 16 int8 values, with an f16 scale per 32 columns.
//!
//! ```text
//! span of 32 columns: nibbles 256 | scales 16 f16
//! 288 bytes, as in the file; 4 loads, about 28 vector operations
//! ```

use super::bits::{nibbles, pack_pairs, put_f16};
use super::traits::{Codes, IntegerLayout};
use crate::linear::lanes::Lanes;

const SCALES: usize = 256;

/// The values, closer together near zero.
const VALUES: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// Looks up eight steps of nibbles.
///
/// # Safety
/// The instructions of `L`.
#[inline(always)]
pub(super) unsafe fn lookup<L: Lanes>(table: &[i8; 16], mut steps: [L::Bytes; 8]) -> [L::Bytes; 8] {
    for step in &mut steps {
        // SAFETY: the caller vouches.
        *step = unsafe { L::lookup(table, *step) };
    }
    steps
}

/// Looks up eight steps of nibbles in the table of IQ4_NL and IQ4_XS.
///
/// # Safety
/// The instructions of `L`.
#[inline(always)]
pub(super) unsafe fn values<L: Lanes>(steps: [L::Bytes; 8]) -> [L::Bytes; 8] {
    // SAFETY: the caller vouches.
    unsafe { lookup::<L>(&VALUES, steps) }
}

/// value = scale * `table[code]`
pub(crate) struct Iq4Nl;

impl IntegerLayout for Iq4Nl {
    const COLS: usize = 32;
    const SOURCE_BYTES: usize = 18;
    const BYTES: usize = SCALES + 32;
    const CODES: Codes = Codes::Centred { bits: 8, offset: 0 };
    const SCALES: usize = SCALES;

    #[inline(always)]
    fn pack(source: &[u8], row: usize, span: &mut [u8]) {
        pack_pairs(&source[2..], 0, row, span);
        put_f16(span, SCALES, row, source);
    }

    #[inline(always)]
    unsafe fn codes<L: Lanes>(span: *const u8, _: usize) -> [L::Bytes; 8] {
        // SAFETY: the caller vouches for the span.
        unsafe { values::<L>(nibbles::<L>(span)) }
    }
}
