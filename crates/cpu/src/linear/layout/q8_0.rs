//! Q8_0: int8 codes with an f16 scale per 32 columns.
//!
//! ```text
//! span of 32 columns: codes 512 | scales 16 f16
//! 544 bytes, as in the file; 8 loads, 8 vector operations where products want unsigned codes
//! ```

use super::bits::{VECTOR, put_f16, put_word, word};
use super::traits::{Codes, IntegerLayout};
use crate::linear::lanes::Lanes;

const SCALES: usize = 8 * VECTOR;

/// value = scale * code
pub(crate) struct Q8_0;

impl IntegerLayout for Q8_0 {
    const COLS: usize = 32;
    const SOURCE_BYTES: usize = 34;
    const BYTES: usize = SCALES + 32;
    const CODES: Codes = Codes::Centred { bits: 8, offset: 0 };
    const SCALES: usize = SCALES;

    #[inline(always)]
    fn pack(source: &[u8], row: usize, span: &mut [u8]) {
        for step in 0..8 {
            put_word(span, step * VECTOR, row, word(source, 2 + 4 * step));
        }
        put_f16(span, SCALES, row, source);
    }

    #[inline(always)]
    unsafe fn codes<L: Lanes>(span: *const u8, _: usize) -> [L::Bytes; 8] {
        // SAFETY: the caller vouches for the span.
        unsafe {
            let mut steps = [L::bytes(span); 8];
            for (index, step) in steps.iter_mut().enumerate() {
                *step = L::bytes(span.add(index * VECTOR));
            }
            steps
        }
    }
}
