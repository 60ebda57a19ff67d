//! Panels with zeros left out, kind by kind. A panel has a head of one size for each 32 columns,
//! with their masks and scales, and behind all heads the codes that are left, in the order in which
//! a product comes to them. Unpacked, they are exactly the bytes of the dense kind, and products on
//! them do the dense kind's arithmetic.
//!
//! ```text
//! Q8_0  head: 8 masks by row | 16 scales        codes: bytes
//! Q4_0  head: 8 masks by row | 16 scales        codes: nibbles, see below
//! F16   head: 8 masks by column                 codes: f16
//! ```
//!
//! The addresses of heads depend on nothing, those of codes on sums of bits, so that neither waits
//! for memory. For each 64 elements a product adds to the dense one a mask, a population count and
//! one expansion, and has no need to centre codes: they are stored as unsigned ones, and what is
//! left out becomes the code of zero. Integers in 2:4 lie otherwise, see `two_four`.

use std::marker::PhantomData;

use super::pattern::{Pattern, word};
use crate::linear::activations::Block;
use crate::linear::kind::{self, IntegerKind};
use crate::linear::level::{Lanes, PANEL_ROWS};

/// Columns of a head.
pub(crate) const COLS: usize = 32;
/// Bytes of a vector; masks, too, stand for so many elements.
pub(super) const VECTOR: usize = 64;
/// Masks of a head, each of four columns.
pub(crate) const MASKS: usize = COLS * PANEL_ROWS / 64;
pub(super) const SCALES_BYTES: usize = 2 * PANEL_ROWS;

/// How 32 columns of a panel lie when zeros are left out.
///
/// # Safety
/// The functions want a `head` and the `codes` that `pack` wrote, with 64 bytes to read behind the
/// last of either, and the instructions of `L` with those that expand.
pub(crate) trait SparseKind {
    /// Bytes of a head.
    const HEAD: usize;
    /// Bytes of 32 columns of the dense kind.
    const DENSE: usize;

    /// Packs 32 columns of the dense kind. `head` is zero before; codes go behind the others.
    fn pack(dense: &[u8], head: &mut [u8], codes: &mut Vec<u8>);

    /// Writes 32 columns as the dense kind, [`SparseKind::DENSE`] bytes, and returns how many bytes
    /// of codes that took.
    unsafe fn expand<L: Lanes>(head: *const u8, codes: *const u8, dense: *mut u8) -> usize;
}

/// A kind whose products are formed in integers.
pub(crate) trait SparseInteger: SparseKind {
    /// The kind whose arithmetic it is.
    type Dense: IntegerKind;

    /// The dots of both halves of the columns with a token's, and how many bytes of codes they
    /// took.
    unsafe fn dots<L: Lanes>(head: *const u8, codes: *const u8, x: &Block)
    -> ([L::Ints; 2], usize);

    /// The scale of the columns.
    #[inline(always)]
    unsafe fn scale<L: Lanes>(head: *const u8) -> L::Floats {
        // SAFETY: the scales are the last bytes of the head.
        unsafe { L::from_f16(head.add(Self::HEAD - SCALES_BYTES)) }
    }
}

/// A kind whose products are formed in f32.
pub(crate) trait SparseFloat: SparseKind {
    /// Bytes of a head for four columns.
    const STEP: usize;

    /// The weights of four columns, and how many bytes of codes they took.
    unsafe fn load<L: Lanes>(head: *const u8, codes: *const u8) -> ([L::Floats; 4], usize);
}

/// Copies the scales of a head behind the dense codes.
#[inline(always)]
pub(super) unsafe fn copy_scales(head: *const u8, bytes: usize, dense: *mut u8) {
    // SAFETY: both end with the scales.
    unsafe { dense.copy_from_nonoverlapping(head.add(bytes - SCALES_BYTES), SCALES_BYTES) }
}

/// The mask of elements of which `is_left` says so.
pub(super) fn mask_of(is_left: impl Fn(usize) -> bool) -> u64 {
    // Nothing here depends on a branch, since nobody can foresee which elements are left.
    (0..64).fold(0, |mask, i| mask | u64::from(is_left(i)) << i)
}

/// The bits of a mask that are set, in order.
pub(super) fn ones(mut mask: u64) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let first = (mask != 0).then(|| mask.trailing_zeros() as usize);
        mask &= mask.wrapping_sub(1);
        first
    })
}

/// The codes of a dense Q4_0 span, step by step.
pub(super) fn nibbles(dense: &[u8]) -> [[u8; VECTOR]; MASKS] {
    let scales = &dense[dense.len() - SCALES_BYTES..];
    // Rows that only fill up the panel have no scale, and no codes that mean zero.
    let has_scale = |row: usize| scales[2 * row] | scales[2 * row + 1] & 0x7f != 0;
    let code = |step: usize, i: usize| match has_scale(i / 4) {
        true => dense[step % 4 * VECTOR + i] >> (4 * (step / 4)) & 15,
        false => EIGHT,
    };
    std::array::from_fn(|step| std::array::from_fn(|i| code(step, i)))
}

/// The codes of a dense Q8_0 span as unsigned ones, step by step.
pub(super) fn unsigned(dense: &[u8]) -> [[u8; VECTOR]; MASKS] {
    std::array::from_fn(|step| std::array::from_fn(|i| dense[step * VECTOR + i] ^ SIGN))
}

/// int8 codes, stored as `code + 128`, so that zero is 128.
pub(crate) struct Q8_0;

/// The code of zero, and what turns such codes into signed ones.
pub(super) const SIGN: u8 = 0x80;

impl Q8_0 {
    /// The eight steps, as int8, and how many bytes of codes they took.
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

impl SparseKind for Q8_0 {
    const HEAD: usize = MASKS * 8 + SCALES_BYTES;
    const DENSE: usize = kind::Q8_0::BYTES;

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
            let (steps, taken) = Self::steps::<L>(head, codes);
            for (step, &vector) in steps.iter().enumerate() {
                L::store_bytes(vector, dense.add(step * VECTOR));
            }
            copy_scales(head, Self::HEAD, dense.add(Self::DENSE - SCALES_BYTES));
            taken
        }
    }
}

impl SparseInteger for Q8_0 {
    type Dense = kind::Q8_0;

    #[inline(always)]
    unsafe fn dots<L: Lanes>(
        head: *const u8,
        codes: *const u8,
        x: &Block,
    ) -> ([L::Ints; 2], usize) {
        // SAFETY: the caller vouches.
        unsafe {
            let (mut steps, taken) = Self::steps::<L>(head, codes);
            for codes in &mut steps {
                *codes = L::centre(*codes, 8, 0);
            }
            let x_codes = x.codes.as_ptr();
            let first = L::centred_dot(x.starts[0], &steps[..4], 8, 0, x_codes);
            let second = L::centred_dot(x.starts[1], &steps[4..], 8, 0, x_codes.add(16));
            ([first, second], taken)
        }
    }
}

/// Nibbles around 8. The codes of steps 0 to 3 that are left are the low nibbles of bytes, those of
/// steps 4 to 7 the high ones, and the bytes are as many as the longer of the two rows needs.
pub(crate) struct Q4_0;

/// The code of zero, and two of them.
const EIGHT: u8 = 8;
pub(super) const EIGHTS: u8 = 0x88;

impl Q4_0 {
    /// The eight steps, of which the first four have their codes in the low nibbles, the others in
    /// the high ones, and how many bytes of codes they took.
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

impl SparseKind for Q4_0 {
    const HEAD: usize = MASKS * 8 + SCALES_BYTES;
    const DENSE: usize = kind::Q4_0::BYTES;

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
            let (steps, taken) = Self::steps::<L>(head, codes);
            for pair in 0..4 {
                let low = L::field::<0, 0, 0x0f>(steps[pair]);
                let high = L::field::<0, 0, 0xf0>(steps[pair + 4]);
                L::store_bytes(L::or(low, high), dense.add(pair * VECTOR));
            }
            copy_scales(head, Self::HEAD, dense.add(Self::DENSE - SCALES_BYTES));
            taken
        }
    }
}

impl SparseInteger for Q4_0 {
    type Dense = kind::Q4_0;

    #[inline(always)]
    unsafe fn dots<L: Lanes>(
        head: *const u8,
        codes: *const u8,
        x: &Block,
    ) -> ([L::Ints; 2], usize) {
        // SAFETY: the caller vouches.
        unsafe {
            let (mut steps, taken) = Self::steps::<L>(head, codes);
            for codes in &mut steps[..4] {
                *codes = L::field::<0, 0, 0x0f>(*codes);
            }
            for codes in &mut steps[4..] {
                // High nibbles stay where they are: sixteen times codes around 128.
                *codes = L::centre(L::flip::<SIGN>(L::field::<0, 0, 0xf0>(*codes)), 8, 0);
            }
            let x_codes = x.codes.as_ptr();
            let start = L::sixteenth(L::int(x.starts[0]));
            let first = L::dot(start, &steps[..4], 4, x_codes);
            let second = L::centred_dot(x.starts[1], &steps[4..], 8, 0, x_codes.add(16));
            ([first, L::sixteenth(second)], taken)
        }
    }
}

/// Half-precision floats.
pub(crate) struct F16<P>(PhantomData<P>);

/// Bytes of a column of a dense panel.
const COLUMN: usize = 2 * PANEL_ROWS;

impl<P: Pattern> SparseKind for F16<P> {
    const HEAD: usize = MASKS * P::BYTES;
    const DENSE: usize = COLS * COLUMN;

    fn pack(dense: &[u8], head: &mut [u8], codes: &mut Vec<u8>) {
        let fours = dense.chunks_exact(4 * COLUMN).zip(head.chunks_exact_mut(P::BYTES));
        for (four, to) in fours {
            let value = |i: usize| [four[2 * i], four[2 * i + 1]];
            // Zero has a sign.
            let is_left = |i: usize| u16::from_le_bytes(value(i)) & 0x7fff != 0;
            let mask = P::complete_by_column(mask_of(is_left));
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
                // A vector of bytes has two columns, and two bytes for each bit.
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
            ([a, b, c, d], 2 * P::left(mask))
        }
    }
}

/// Every bit twice.
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
