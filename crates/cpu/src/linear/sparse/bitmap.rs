//! Bitmap layouts: one mask bit per weight, and the codes of the non-zeros. Also F16 in 2:4, whose
//! values expand by mask in the same way.
//!
//! ```text
//! Q8_0  head: 8 masks by row | 16 scales        codes: bytes
//! Q4_0  head: 8 masks by row | 16 scales        codes: nibbles, see `Q4_0`
//! F16   head: 8 masks by column                 codes: f16
//! ```
//!
//! The addresses of heads are known in advance and those of codes follow from population counts, so
//! neither waits for memory. Compared with the dense layout, a kernel adds per 64 elements one
//! mask, one population count and one expansion. It saves the centring of codes: they are stored
//! unsigned, and missing ones expand to the code of zero.

use std::marker::PhantomData;

use super::layout::{
    COLS, EIGHT, EIGHTS, MASKS, SCALES_BYTES, SIGN, SparseFloat, SparseInteger, SparseLayout,
    VECTOR, copy_scales, mask_of, nibbles, ones, unsigned,
};
use super::pattern::{Pattern, word};
use crate::linear::activations::Block;
use crate::linear::lanes::{Lanes, PANEL_ROWS};
use crate::linear::layout::{self, IntegerLayout};

/// int8 codes, stored as `code + 128`, so that zero is 128.
pub(crate) struct Q8_0;

impl Q8_0 {
    /// The eight vectors of codes, as int8, and the number of code bytes that they read.
    #[inline(always)]
    unsafe fn steps<L: Lanes>(head: *const u8, codes: *const u8) -> ([L::Bytes; MASKS], usize) {
        // SAFETY: the caller vouches.
        unsafe {
            let mut at = codes;
            let mut steps = [L::bytes(head); MASKS];
            for (step, codes) in steps.iter_mut().enumerate() {
                let mask = word(head.add(8 * step));
                *codes = L::flip::<SIGN>(L::expand::<SIGN>(mask, at));
                at = at.add(mask.count_ones() as usize);
            }
            (steps, at.offset_from_unsigned(codes))
        }
    }
}

impl SparseLayout for Q8_0 {
    const HEAD: usize = MASKS * 8 + SCALES_BYTES;
    const DENSE: usize = layout::Q8_0::BYTES;

    fn pack(dense: &[u8], head: &mut [u8], codes: &mut Vec<u8>) {
        for (codes_of_step, to) in unsigned(dense).iter().zip(head.chunks_exact_mut(8)) {
            let mask = mask_of(|i| codes_of_step[i] != SIGN);
            codes.extend(ones(mask).map(|i| codes_of_step[i]));
            to.copy_from_slice(&mask.to_le_bytes());
        }
        head[MASKS * 8..].copy_from_slice(&dense[Self::DENSE - SCALES_BYTES..]);
    }

    #[inline(always)]
    unsafe fn expand<L: Lanes>(head: *const u8, codes: *const u8, dense: *mut u8) -> usize {
        // SAFETY: the caller vouches.
        unsafe {
            let (steps, used) = Self::steps::<L>(head, codes);
            for (step, &vector) in steps.iter().enumerate() {
                L::store_bytes(vector, dense.add(step * VECTOR));
            }
            copy_scales(head, Self::HEAD, dense.add(Self::DENSE - SCALES_BYTES));
            used
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
            let (mut steps, used) = Self::steps::<L>(head, codes);
            for codes in &mut steps {
                *codes = L::centre(*codes, 8, 0);
            }
            let x_codes = x.codes.as_ptr();
            let first = L::centred_dot(x.starts[0], &steps[..4], 8, 0, x_codes);
            let second = L::centred_dot(x.starts[1], &steps[4..], 8, 0, x_codes.add(16));
            ([first, second], used)
        }
    }
}

/// Nibbles around 8. The non-zero codes of vectors 0 to 3 are the low nibbles of the bytes, those
/// of vectors 4 to 7 the high nibbles; the longer of the two lists decides the number of bytes.
pub(crate) struct Q4_0;

impl Q4_0 {
    /// The eight vectors of codes, the first four in low nibbles and the others in high nibbles,
    /// and the number of code bytes that they read.
    #[inline(always)]
    unsafe fn steps<L: Lanes>(head: *const u8, codes: *const u8) -> ([L::Bytes; MASKS], usize) {
        // SAFETY: the caller vouches.
        unsafe {
            let mut at = [codes; 2];
            let mut steps = [L::bytes(head); MASKS];
            for (step, codes) in steps.iter_mut().enumerate() {
                let mask = word(head.add(8 * step));
                *codes = L::expand::<EIGHTS>(mask, at[step / 4]);
                at[step / 4] = at[step / 4].add(mask.count_ones() as usize);
            }
            (steps, at[0].max(at[1]).offset_from_unsigned(codes))
        }
    }
}

impl SparseLayout for Q4_0 {
    const HEAD: usize = MASKS * 8 + SCALES_BYTES;
    const DENSE: usize = layout::Q4_0::BYTES;

    fn pack(dense: &[u8], head: &mut [u8], codes: &mut Vec<u8>) {
        let mut rows = [Vec::new(), Vec::new()];
        let steps = nibbles(dense);
        for (step, to) in head.chunks_exact_mut(8).take(MASKS).enumerate() {
            let mask = mask_of(|i| steps[step][i] != EIGHT);
            rows[step / 4].extend(ones(mask).map(|i| steps[step][i]));
            to.copy_from_slice(&mask.to_le_bytes());
        }
        let code = |row: &Vec<u8>, i: usize| row.get(i).copied().unwrap_or(0);
        let bytes = rows[0].len().max(rows[1].len());
        codes.extend((0..bytes).map(|i| code(&rows[0], i) | code(&rows[1], i) << 4));
        head[MASKS * 8..].copy_from_slice(&dense[Self::DENSE - SCALES_BYTES..]);
    }

    #[inline(always)]
    unsafe fn expand<L: Lanes>(head: *const u8, codes: *const u8, dense: *mut u8) -> usize {
        // SAFETY: the caller vouches.
        unsafe {
            let (steps, used) = Self::steps::<L>(head, codes);
            for pair in 0..4 {
                let low = L::field::<0, 0, 0x0f>(steps[pair]);
                let high = L::field::<0, 0, 0xf0>(steps[pair + 4]);
                L::store_bytes(L::or(low, high), dense.add(pair * VECTOR));
            }
            copy_scales(head, Self::HEAD, dense.add(Self::DENSE - SCALES_BYTES));
            used
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
            let (mut steps, used) = Self::steps::<L>(head, codes);
            for codes in &mut steps[..4] {
                *codes = L::field::<0, 0, 0x0f>(*codes);
            }
            for codes in &mut steps[4..] {
                // High nibbles are not shifted: they are 16 times codes around 128.
                *codes = L::centre(L::flip::<SIGN>(L::field::<0, 0, 0xf0>(*codes)), 8, 0);
            }
            let x_codes = x.codes.as_ptr();
            let start = L::sixteenth(L::int(x.starts[0]));
            let first = L::dot(start, &steps[..4], 4, x_codes);
            let second = L::centred_dot(x.starts[1], &steps[4..], 8, 0, x_codes.add(16));
            ([first, L::sixteenth(second)], used)
        }
    }
}

/// Half-precision floats.
pub(crate) struct F16<P>(PhantomData<P>);

/// Bytes of a column of a dense panel.
const COLUMN: usize = 2 * PANEL_ROWS;

impl<P: Pattern> SparseLayout for F16<P> {
    const HEAD: usize = MASKS * P::BYTES;
    const DENSE: usize = COLS * COLUMN;

    fn pack(dense: &[u8], head: &mut [u8], codes: &mut Vec<u8>) {
        let fours = dense.chunks_exact(4 * COLUMN).zip(head.chunks_exact_mut(P::BYTES));
        for (four, to) in fours {
            let value = |i: usize| [four[2 * i], four[2 * i + 1]];
            // Minus zero is zero.
            let is_nonzero = |i: usize| u16::from_le_bytes(value(i)) & 0x7fff != 0;
            let mask = P::complete_by_column(mask_of(is_nonzero));
            codes.extend(ones(mask).flat_map(value));
            P::put_by_column(mask, to);
        }
    }

    #[inline(always)]
    unsafe fn expand<L: Lanes>(head: *const u8, codes: *const u8, dense: *mut u8) -> usize {
        // SAFETY: the caller vouches.
        unsafe {
            let mut at = codes;
            for four in 0..COLS / 4 {
                let mask = P::by_column(head.add(four * P::BYTES));
                // A vector of bytes holds two columns, with two bytes per mask bit.
                for (i, half) in [mask as u32, (mask >> 32) as u32].into_iter().enumerate() {
                    let vector = L::expand::<0>(doubled(half), at);
                    L::store_bytes(vector, dense.add((2 * four + i) * VECTOR));
                    at = at.add(2 * half.count_ones() as usize);
                }
            }
            at.offset_from_unsigned(codes)
        }
    }
}

impl<P: Pattern> SparseFloat for F16<P> {
    const STEP: usize = P::BYTES;

    #[inline(always)]
    unsafe fn load<L: Lanes>(head: *const u8, codes: *const u8) -> ([L::Floats; 4], usize) {
        // SAFETY: the caller vouches.
        unsafe {
            let mask = P::by_column(head);
            let (first, second) = (mask as u32, (mask >> 32) as u32);
            let [a, b] = L::expand_f16(first, codes);
            let [c, d] = L::expand_f16(second, codes.add(2 * first.count_ones() as usize));
            ([a, b, c, d], 2 * P::count(mask))
        }
    }
}

/// Repeats every bit.
#[inline(always)]
fn doubled(bits: u32) -> u64 {
    let bits = u64::from(bits);
    let bits = (bits | bits << 16) & 0x0000_ffff_0000_ffff;
    let bits = (bits | bits << 8) & 0x00ff_00ff_00ff_00ff;
    let bits = (bits | bits << 4) & 0x0f0f_0f0f_0f0f_0f0f;
    let bits = (bits | bits << 2) & 0x3333_3333_3333_3333;
    let bits = (bits | bits << 1) & 0x5555_5555_5555_5555;
    bits | bits << 1
}
