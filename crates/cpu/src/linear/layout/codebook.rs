//! The formats whose values are a scale for 256 columns, times an integer for 16, times one of up
//! to 16 small numbers: IQ1, IQ2, IQ3 and the ternary ones. Codes are nibbles that index a table of
//! the numbers, which is part of the span.
//!
//! ```text
//! span of 256 columns: scales 16 f32 | table 16 | integers 16 x 16 | 8 blocks of nibbles 256
//! 298 bytes a block, 1.4 to 3 times the file; 4 loads, about 32 vector operations
//! ```
//!
//! value = (scale * integer) * `table[code]`

use bodkin_gguf::format::CodedBlock;

use super::bits::{nibbles, pack_pairs};
use super::iq4_nl::lookup;
use super::traits::{Codes, IntegerLayout, ScaleType};
use crate::linear::lanes::Lanes;

const TABLE: usize = 64;
const SCALES: usize = TABLE + 16;
const NIBBLES: usize = SCALES + 256;

/// Bytes of a span of one row before it is packed: scale, table, integers, nibbles.
const SOURCE_BYTES: usize = 4 + 16 + 16 + 128;

/// All such formats.
pub(crate) struct Codebook;

/// Writes a block as [`Codebook`] packs it.
pub(crate) fn put_source(block: &CodedBlock, table: &[i8; 16], source: &mut [u8]) {
    let (scale, source) = source.split_at_mut(4);
    let (numbers, source) = source.split_at_mut(16);
    let (scales, nibbles) = source.split_at_mut(16);
    scale.copy_from_slice(&block.scale.to_le_bytes());
    numbers.iter_mut().zip(table).for_each(|(to, &number)| *to = number as u8);
    scales.copy_from_slice(&block.scales);
    for (bytes, codes) in nibbles.chunks_exact_mut(16).zip(block.codes.chunks_exact(32)) {
        let (low, high) = codes.split_at(16);
        let pairs = low.iter().zip(high);
        bytes.iter_mut().zip(pairs).for_each(|(to, (low, high))| *to = low | high << 4);
    }
}

impl IntegerLayout for Codebook {
    const COLS: usize = 256;
    const SOURCE_BYTES: usize = SOURCE_BYTES;
    const BYTES: usize = NIBBLES + 8 * 256;
    const GROUPS: usize = 2;
    const CODES: Codes = Codes::Centred { bits: 8, offset: 0 };
    const SCALE_TYPE: ScaleType = ScaleType::Signed;
    const SCALES: usize = SCALES;

    #[inline(always)]
    fn pack(source: &[u8], row: usize, span: &mut [u8]) {
        span[4 * row..][..4].copy_from_slice(&source[..4]);
        span[TABLE..SCALES].copy_from_slice(&source[4..20]);
        for (group, &scale) in source[20..36].iter().enumerate() {
            span[SCALES + 16 * group + row] = scale;
        }
        for (block, nibbles) in source[36..].chunks_exact(16).enumerate() {
            pack_pairs(nibbles, NIBBLES + 256 * block, row, span);
        }
    }

    #[inline(always)]
    unsafe fn factors<L: Lanes>(span: *const u8) -> [L::Floats; 2] {
        // SAFETY: the caller vouches for the span.
        unsafe { [L::from_f32(span); 2] }
    }

    #[inline(always)]
    unsafe fn codes<L: Lanes>(span: *const u8, block: usize) -> [L::Bytes; 8] {
        // SAFETY: the caller vouches for the span, which has the table.
        unsafe {
            let table = &*span.add(TABLE).cast::<[i8; 16]>();
            lookup::<L>(table, nibbles::<L>(span.add(NIBBLES + 256 * block)))
        }
    }
}
