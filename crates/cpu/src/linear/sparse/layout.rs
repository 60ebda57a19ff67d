//! What all sparse layouts share: the traits that describe one block of 32 columns, and the helpers
//! that turn dense blocks into masks and codes.

use crate::linear::activations::Block;
use crate::linear::lanes::{Lanes, PANEL_ROWS};
use crate::linear::layout::IntegerLayout;

/// Columns of a block.
pub(crate) const COLS: usize = 32;
/// Bytes of a vector, and elements of a mask.
pub(super) const VECTOR: usize = 64;
/// Masks of a block, each of four columns.
pub(crate) const MASKS: usize = COLS * PANEL_ROWS / 64;
/// Bytes of the scales of a block.
pub(super) const SCALES_BYTES: usize = 2 * PANEL_ROWS;
/// The code of zero in Q8_0, where codes are stored as `code + 128`.
pub(super) const SIGN: u8 = 0x80;
/// The code of zero in Q4_0, and two of them.
pub(super) const EIGHT: u8 = 8;
pub(super) const EIGHTS: u8 = 0x88;

/// The layout of a block of a panel, 32 columns, that stores non-zeros only: a head of fixed size
/// (masks and scales), and codes.
///
/// # Safety
/// The functions require a `head` and `codes` that `pack` wrote, with 64 readable bytes after the
/// last of either, the instructions of `L` and those that `Isa::for_expansion` checks.
pub(crate) trait SparseLayout {
    /// Bytes of a head.
    const HEAD: usize;
    /// Bytes of the block in the dense layout.
    const DENSE: usize;

    /// Packs a dense block: fills `head`, which is zero, and appends to `codes`.
    fn pack(dense: &[u8], head: &mut [u8], codes: &mut Vec<u8>);

    /// Expands the block to the dense layout, [`SparseLayout::DENSE`] bytes, and returns the number
    /// of code bytes that it read.
    unsafe fn expand<L: Lanes>(head: *const u8, codes: *const u8, dense: *mut u8) -> usize;
}

/// A layout with integer dot products.
pub(crate) trait SparseInteger: SparseLayout {
    /// The dense layout with the same arithmetic.
    type Dense: IntegerLayout;

    /// The dot products of both halves of the block with a token's block, and the number of code
    /// bytes that they read.
    unsafe fn dots<L: Lanes>(head: *const u8, codes: *const u8, x: &Block)
    -> ([L::Ints; 2], usize);

    /// The scales of the block.
    #[inline(always)]
    unsafe fn scale<L: Lanes>(head: *const u8) -> L::Floats {
        // SAFETY: the scales are the last bytes of the head.
        unsafe { L::from_f16(head.add(Self::HEAD - SCALES_BYTES)) }
    }
}

/// A layout with f32 arithmetic.
pub(crate) trait SparseFloat: SparseLayout {
    /// Bytes of the head per four columns.
    const STEP: usize;

    /// The weights of four columns, and the number of code bytes that they read.
    unsafe fn load<L: Lanes>(head: *const u8, codes: *const u8) -> ([L::Floats; 4], usize);
}

/// Copies the scales of a head to the end of a dense block.
#[inline(always)]
pub(super) unsafe fn copy_scales(head: *const u8, bytes: usize, dense: *mut u8) {
    // SAFETY: the scales are the end of both.
    unsafe { dense.copy_from_nonoverlapping(head.add(bytes - SCALES_BYTES), SCALES_BYTES) }
}

/// The mask of the elements for which `is_nonzero` holds; without branches, which would mispredict.
pub(super) fn mask_of(is_nonzero: impl Fn(usize) -> bool) -> u64 {
    (0..64).fold(0, |mask, i| mask | u64::from(is_nonzero(i)) << i)
}

/// The set bits of a mask, in order.
pub(super) fn ones(mut mask: u64) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let first = (mask != 0).then(|| mask.trailing_zeros() as usize);
        mask &= mask.wrapping_sub(1);
        first
    })
}

/// The codes of a dense Q4_0 block, vector by vector.
pub(super) fn nibbles(dense: &[u8]) -> [[u8; VECTOR]; MASKS] {
    let scales = &dense[dense.len() - SCALES_BYTES..];
    // Padding rows have scale 0 and code 0; here their code must be that of zero.
    let has_scale = |row: usize| scales[2 * row] | scales[2 * row + 1] & 0x7f != 0;
    let code = |step: usize, i: usize| match has_scale(i / 4) {
        true => dense[step % 4 * VECTOR + i] >> (4 * (step / 4)) & 15,
        false => EIGHT,
    };
    std::array::from_fn(|step| std::array::from_fn(|i| code(step, i)))
}

/// The codes of a dense Q8_0 block as unsigned bytes, vector by vector.
pub(super) fn unsigned(dense: &[u8]) -> [[u8; VECTOR]; MASKS] {
    std::array::from_fn(|step| std::array::from_fn(|i| dense[step * VECTOR + i] ^ SIGN))
}

/// The most blocks of a group: their heads are contiguous, and so are their codes after them.
pub(super) const GROUP_BLOCKS: usize = 8;

/// The number of blocks of each group of a panel.
#[inline(always)]
pub(crate) fn group_blocks(cols: usize) -> impl Iterator<Item = usize> {
    let blocks = cols / COLS;
    (0..blocks).step_by(GROUP_BLOCKS).map(move |first| GROUP_BLOCKS.min(blocks - first))
}
