//! Integer layouts in 2:4 sparsity: two codes are stored of each four columns of a row. The kernel
//! does not expand the codes; it selects the matching activations. That halves the dot products of
//! the dense layout, and all addresses are known in advance.
//!
//! The eight vectors of a dense block make four pairs. Lane `r` of pair `p` holds, unsigned, two
//! codes of row `r` from vector `2p` and two from vector `2p + 1`.
//!
//! ```text
//! Q8_0  head: 8 masks of 6 bytes | 16 scales    codes: four pairs
//! Q4_0  head: 8 masks of 6 bytes | 16 scales    codes: pairs 0 and 1 in the low nibbles of two
//!                                               vectors, pairs 2 and 3 in the high ones
//! ```

use super::layout::{
    EIGHTS, MASKS, SCALES_BYTES, SIGN, SparseInteger, SparseLayout, VECTOR, copy_scales, mask_of,
    nibbles, ones, unsigned,
};
use super::pattern::{Pattern, TwoFour};
use crate::linear::activations::Block;
use crate::linear::lanes::{Lanes, PANEL_ROWS};
use crate::linear::layout::{self, IntegerLayout};

const MASK: usize = TwoFour::BYTES;
const HEAD: usize = MASKS * MASK + SCALES_BYTES;

/// Packs the codes of a block, where `zero` is the code of zero, into pairs; writes the masks.
fn pairs(steps: &[[u8; VECTOR]; MASKS], zero: u8, head: &mut [u8]) -> [[u8; VECTOR]; 4] {
    let mut pairs = [[0; VECTOR]; 4];
    for (step, codes) in steps.iter().enumerate() {
        let mask = TwoFour::complete_by_row(mask_of(|i| codes[i] != zero));
        TwoFour::put_by_row(mask, &mut head[step * MASK..][..MASK]);
        for (place, i) in ones(mask).enumerate() {
            pairs[step / 2][place / 2 * 4 + step % 2 * 2 + place % 2] = codes[i];
        }
    }
    pairs
}

/// Splits a pair into the codes of its two vectors, each contiguous.
#[inline(always)]
unsafe fn split_pair(pair: *const u8) -> [[u8; VECTOR]; 2] {
    let mut steps = [[0; VECTOR]; 2];
    // SAFETY: the caller vouches for the pair.
    let pair = unsafe { pair.cast::<[u8; VECTOR]>().read() };
    for row in 0..PANEL_ROWS {
        for (step, codes) in steps.iter_mut().enumerate() {
            let at = 4 * row + 2 * step;
            [codes[2 * row], codes[2 * row + 1]] = [pair[at], pair[at + 1]];
        }
    }
    steps
}

/// The mask of a vector.
#[inline(always)]
unsafe fn mask<L: Lanes>(head: *const u8, step: usize) -> u64 {
    // SAFETY: the caller vouches for the head.
    unsafe { TwoFour::by_row::<L>(head.add(step * MASK)) }
}

/// The activations for the two pairs of each half.
#[inline(always)]
unsafe fn select<L: Lanes>(head: *const u8, x: &Block) -> [[L::Bytes; 2]; 2] {
    // SAFETY: the caller vouches for the head.
    unsafe {
        let x = x.codes.as_ptr();
        [L::select_two_four(head, x), L::select_two_four(head.add(4 * MASK), x.add(16))]
    }
}

/// int8 codes, stored as `code + 128`.
pub(crate) struct Q8_0;

impl SparseLayout for Q8_0 {
    const HEAD: usize = HEAD;
    const DENSE: usize = layout::Q8_0::BYTES;

    fn pack(dense: &[u8], head: &mut [u8], codes: &mut Vec<u8>) {
        codes.extend(pairs(&unsigned(dense), SIGN, head).as_flattened());
        head[HEAD - SCALES_BYTES..].copy_from_slice(&dense[Self::DENSE - SCALES_BYTES..]);
    }

    #[inline(always)]
    unsafe fn expand<L: Lanes>(head: *const u8, codes: *const u8, dense: *mut u8) -> usize {
        // SAFETY: the caller vouches.
        unsafe {
            for pair in 0..4 {
                for (i, left) in split_pair(codes.add(pair * VECTOR)).iter().enumerate() {
                    let step = 2 * pair + i;
                    let codes = L::expand::<SIGN>(mask::<L>(head, step), left.as_ptr());
                    L::store_bytes(L::flip::<SIGN>(codes), dense.add(step * VECTOR));
                }
            }
            copy_scales(head, HEAD, dense.add(Self::DENSE - SCALES_BYTES));
            4 * VECTOR
        }
    }
}

impl SparseInteger for Q8_0 {
    type Dense = layout::Q8_0;

    #[inline(always)]
    unsafe fn dots<L: Lanes>(
        head: *const u8,
        codes: *const u8,
        x: &Block,
    ) -> ([L::Ints; 2], usize) {
        // SAFETY: the caller vouches.
        unsafe {
            let [first, second] = select::<L>(head, x);
            let pair = |pair: usize| codes.add(pair * VECTOR);
            let first = L::signed_dot::<SIGN>([L::bytes(pair(0)), L::bytes(pair(1))], first);
            let second = L::signed_dot::<SIGN>([L::bytes(pair(2)), L::bytes(pair(3))], second);
            ([first, second], 4 * VECTOR)
        }
    }
}

/// Nibbles around 8.
pub(crate) struct Q4_0;

impl SparseLayout for Q4_0 {
    const HEAD: usize = HEAD;
    const DENSE: usize = layout::Q4_0::BYTES;

    fn pack(dense: &[u8], head: &mut [u8], codes: &mut Vec<u8>) {
        let pairs = pairs(&nibbles(dense), EIGHTS & 15, head);
        let (low, high) = pairs.split_at(2);
        let both = low.as_flattened().iter().zip(high.as_flattened());
        codes.extend(both.map(|(low, high)| low | high << 4));
        head[HEAD - SCALES_BYTES..].copy_from_slice(&dense[Self::DENSE - SCALES_BYTES..]);
    }

    #[inline(always)]
    unsafe fn expand<L: Lanes>(head: *const u8, codes: *const u8, dense: *mut u8) -> usize {
        // SAFETY: the caller vouches.
        unsafe {
            for pair in 0..2 {
                for (i, left) in split_pair(codes.add(pair * VECTOR)).iter().enumerate() {
                    let step = 2 * pair + i;
                    let low = L::expand::<EIGHTS>(mask::<L>(head, step), left.as_ptr());
                    let high = L::expand::<EIGHTS>(mask::<L>(head, step + 4), left.as_ptr());
                    let (low, high) = (L::field::<0, 0, 0x0f>(low), L::field::<0, 0, 0xf0>(high));
                    L::store_bytes(L::or(low, high), dense.add(step * VECTOR));
                }
            }
            copy_scales(head, HEAD, dense.add(Self::DENSE - SCALES_BYTES));
            2 * VECTOR
        }
    }
}

impl SparseInteger for Q4_0 {
    type Dense = layout::Q4_0;

    #[inline(always)]
    unsafe fn dots<L: Lanes>(
        head: *const u8,
        codes: *const u8,
        x: &Block,
    ) -> ([L::Ints; 2], usize) {
        // SAFETY: the caller vouches.
        unsafe {
            let [first, second] = select::<L>(head, x);
            let (a, b) = (L::bytes(codes), L::bytes(codes.add(VECTOR)));
            let low = [L::field::<0, 0, 0x0f>(a), L::field::<0, 0, 0x0f>(b)];
            // High nibbles are not shifted: they are 16 times codes around 128.
            let high = [L::field::<0, 0, 0xf0>(a), L::field::<0, 0, 0xf0>(b)];
            let second = L::sixteenth(L::signed_dot::<SIGN>(high, second));
            ([L::signed_dot::<{ EIGHTS & 15 }>(low, first), second], 2 * VECTOR)
        }
    }
}
