//! Bitmap rows: a 32-bit mask for each block, the scales of all blocks, and the packed codes of the
//! elements whose bit is set.
//!
//! ```text
//! row of n blocks: n u32 masks, bit i for element i | n scales | codes
//! ```
//!
//! At density `d` an element takes `1 + 16 d` bits over F16, `1.5 + 8 d` over Q8_0 and `1.5 + 4 d`
//! over Q4_0.

use super::base::{BLOCK, Base, clear, packed, packed_bytes, put_packed};
use super::index::RowBytes;

const MASK: usize = size_of::<u32>();

/// The lengths of rows of `cols` columns.
pub(in crate::format) fn row_bytes<B: Base>(cols: usize) -> Option<RowBytes> {
    let blocks = cols.is_multiple_of(BLOCK).then_some(cols / BLOCK)?;
    let min = blocks.checked_mul(MASK + B::SCALE)?;
    let max = blocks.checked_mul(MASK + B::BYTES)?;
    Some(RowBytes { min, max, step: 1 })
}

/// The number of set bits: the stored elements of a row.
pub(in crate::format) fn ones(row: &[u8], cols: usize) -> usize {
    row[..cols / BLOCK * MASK].iter().map(|byte| byte.count_ones() as usize).sum()
}

/// Writes the row in the base format.
pub(in crate::format) fn densify<B: Base>(row: &[u8], dense: &mut [u8]) {
    let blocks = dense.len() / B::BYTES;
    let (masks, rest) = row.split_at(blocks * MASK);
    let (scales, codes) = rest.split_at(blocks * B::SCALE);
    let mut next = 0;
    for (i, block) in dense.chunks_exact_mut(B::BYTES).enumerate() {
        let (scale, out) = block.split_at_mut(B::SCALE);
        scale.copy_from_slice(&scales[i * B::SCALE..][..B::SCALE]);
        clear::<B>(out);
        let mut mask = mask(masks, i);
        while mask != 0 {
            B::put(out, mask.trailing_zeros() as usize, packed::<B>(codes, next));
            mask &= mask - 1;
            next += 1;
        }
    }
}

/// Converts a row of the base format.
pub(in crate::format) fn sparsify<B: Base>(dense: &[u8]) -> Vec<u8> {
    assert!(dense.len().is_multiple_of(B::BYTES), "{} bytes of a row", dense.len());
    let blocks = dense.len() / B::BYTES;
    let mut row = Vec::with_capacity(blocks * (MASK + B::BYTES));
    let codes = |i: usize| &dense[i * B::BYTES + B::SCALE..][..B::BYTES - B::SCALE];
    for i in 0..blocks {
        let nonzero = (0..BLOCK).filter(|&e| !B::is_zero(B::code(codes(i), e)));
        let mask = nonzero.fold(0u32, |mask, e| mask | 1 << e);
        row.extend(mask.to_le_bytes());
    }
    let count = ones(&row, blocks * BLOCK);
    dense.chunks_exact(B::BYTES).for_each(|block| row.extend(&block[..B::SCALE]));
    let start = row.len();
    row.resize(start + packed_bytes::<B>(count), 0);
    let (head, out) = row.split_at_mut(start);
    let mut next = 0;
    for i in 0..blocks {
        let mask = mask(head, i);
        for e in (0..BLOCK).filter(|e| mask >> e & 1 == 1) {
            put_packed::<B>(out, next, B::code(codes(i), e));
            next += 1;
        }
    }
    row
}

fn mask(masks: &[u8], block: usize) -> u32 {
    let at = block * MASK;
    u32::from_le_bytes([masks[at], masks[at + 1], masks[at + 2], masks[at + 3]])
}
