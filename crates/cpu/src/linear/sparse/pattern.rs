//! The storage of masks of 64 elements: all 64 bits, or 48 bits for 2:4 sparsity.
//!
//! The elements are four columns of the 16 rows of a panel, in one of two bit orders. `by_row` puts
//! the four columns of a row side by side, the byte order of integer layouts; `by_column` puts the
//! 16 rows of a column side by side, the order of float layouts.

use crate::linear::lanes::Lanes;

/// How masks by column are stored. Masks by row are stored in full, or by [`TwoFour`].
pub(crate) trait Pattern {
    /// Bytes of a stored mask. Reading one reads eight bytes.
    const BYTES: usize;

    /// Reads a mask.
    ///
    /// # Safety
    /// Eight bytes to read at `at`.
    unsafe fn by_column(at: *const u8) -> u64;

    /// The number of elements that a complete mask stores.
    fn count(mask: u64) -> usize;

    /// Completes a mask: adds bits where it has fewer than the pattern requires.
    fn complete_by_column(mask: u64) -> u64;

    /// Stores a complete mask.
    fn put_by_column(mask: u64, to: &mut [u8]);
}

/// The little-endian u64 at `at`.
#[inline(always)]
pub(super) unsafe fn word(at: *const u8) -> u64 {
    // SAFETY: the caller vouches for eight bytes.
    u64::from_le(unsafe { at.cast::<u64>().read_unaligned() })
}

/// Unstructured sparsity: one bit per element.
pub(crate) struct Bitmap;

impl Pattern for Bitmap {
    const BYTES: usize = 8;

    #[inline(always)]
    unsafe fn by_column(at: *const u8) -> u64 {
        // SAFETY: the caller vouches.
        unsafe { word(at) }
    }

    #[inline(always)]
    fn count(mask: u64) -> usize {
        mask.count_ones() as usize
    }

    fn complete_by_column(mask: u64) -> u64 {
        mask
    }

    fn put_by_column(mask: u64, to: &mut [u8]) {
        to.copy_from_slice(&mask.to_le_bytes());
    }
}

/// 2:4 sparsity: two of the four columns of each row are stored. The mask stores the bits of three
/// columns; the fourth is set if exactly one of these is.
pub(crate) struct TwoFour;

/// Bit 0 of every group of four.
const FIRST_BITS: u64 = 0x1111_1111_1111_1111;

impl TwoFour {
    /// A mask by row.
    ///
    /// # Safety
    /// Eight bytes to read at `at`, and the instructions of `L`.
    #[inline(always)]
    pub(super) unsafe fn by_row<L: Lanes>(at: *const u8) -> u64 {
        // SAFETY: the caller vouches.
        let three = unsafe { L::spread(word(at)) };
        let is_odd = (three ^ three >> 1 ^ three >> 2) & FIRST_BITS;
        three | is_odd << 3
    }

    /// [`Pattern::complete_by_column`] for a mask by row.
    pub(super) fn complete_by_row(mask: u64) -> u64 {
        (0..16).fold(0, |all, row| all | complete(mask >> (4 * row) & 15) << (4 * row))
    }

    /// Stores a complete mask by row: three bits for each row.
    pub(super) fn put_by_row(mask: u64, to: &mut [u8]) {
        let bits = (0..16).fold(0, |bits, row| bits | (mask >> (4 * row) & 7) << (3 * row));
        to.copy_from_slice(&u64::to_le_bytes(bits)[..Self::BYTES]);
    }
}

impl Pattern for TwoFour {
    const BYTES: usize = 6;

    #[inline(always)]
    unsafe fn by_column(at: *const u8) -> u64 {
        // SAFETY: the caller vouches.
        let three = unsafe { word(at) } & 0xffff_ffff_ffff;
        let is_odd = three ^ three >> 16 ^ three >> 32;
        three | is_odd << 48
    }

    // A constant: the address of the next codes is known before the mask is loaded.
    #[inline(always)]
    fn count(_: u64) -> usize {
        32
    }

    fn complete_by_column(mask: u64) -> u64 {
        let mut all = 0;
        for row in 0..16 {
            let bit = |column: u64| (mask >> (16 * column + row) & 1) << column;
            let four = complete((0..4).map(bit).sum());
            (0..4).for_each(|column| all |= (four >> column & 1) << (16 * column + row));
        }
        all
    }

    fn put_by_column(mask: u64, to: &mut [u8]) {
        to.copy_from_slice(&mask.to_le_bytes()[..Self::BYTES]);
    }
}

/// Sets bits of `four` until two are set.
fn complete(mut four: u64) -> u64 {
    assert!(
        four.count_ones() <= 2,
        "a row of a 2:4 format has at most two non-zeros in four columns"
    );
    while four.count_ones() < 2 {
        four |= four + 1;
    }
    four & 15
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::linear::simd::Portable;

    #[test]
    fn masks_of_two_in_four_come_back() {
        let patterns = [3u64, 5, 6, 9, 10, 12];
        for shift in 0..6 {
            let rows = (0..16).map(|row| patterns[(row + shift) % 6] << (4 * row));
            let mask: u64 = rows.sum();
            let mut bytes = [0xff; 8];
            TwoFour::put_by_row(mask, &mut bytes[..6]);
            // SAFETY: eight bytes.
            assert_eq!(unsafe { TwoFour::by_row::<Portable>(bytes.as_ptr()) }, mask);
            let by_column = TwoFour::complete_by_column(0x1111 << shift);
            TwoFour::put_by_column(by_column, &mut bytes[..6]);
            // SAFETY: as above.
            assert_eq!(unsafe { TwoFour::by_column(bytes.as_ptr()) }, by_column);
            assert_eq!(by_column.count_ones(), 32);
        }
        for few in [0, 1, 2, 4, 8, 5, 12] {
            assert!(complete(few).count_ones() == 2 && complete(few) & few == few, "{few}");
        }
    }
}
