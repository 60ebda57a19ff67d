//! Bit packing that layouts share: the placement of a row's bytes in a packed span, and the
//! extraction of 1-, 2- and 4-bit fields.
//!
//! Packed fields, per block: vector `p` of the 4-bit part holds step `p` in its low and step `p +
//! 4` in its high nibbles; vector `h` of the 2-bit part holds step `4h + f` in bits `2f` and `2f +
//! 1`; the 1-bit part holds step `s` in bit `s`.

use crate::linear::lanes::Lanes;

/// Bytes of a vector.
pub(super) const VECTOR: usize = 64;

/// The unaligned little-endian u32 at byte `at`.
#[inline(always)]
pub(super) fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

/// Writes the four bytes of lane `row` of the vector at byte `at`.
#[inline(always)]
pub(super) fn put_word(span: &mut [u8], at: usize, row: usize, value: u32) {
    span[at + 4 * row..][..4].copy_from_slice(&value.to_le_bytes());
}

/// Writes the f16 of lane `row` of the 16 at byte `at`, from the two bytes of `source`.
#[inline(always)]
pub(super) fn put_f16(span: &mut [u8], at: usize, row: usize, source: &[u8]) {
    span[at + 2 * row..][..2].copy_from_slice(&source[..2]);
}

/// Bits `j, j + 4, ..., j + 28` of `bits` as one byte for each `j` of four: from one bit per column
/// to one byte per column of a step.
#[inline(always)]
pub(super) fn bits_by_step(bits: u32) -> u32 {
    let byte = |j: u32| {
        let every = (bits >> j) & 0x1111_1111;
        let every = (every | every >> 3) & 0x0303_0303;
        let every = (every | every >> 6) & 0x000f_000f;
        (every | every >> 12) & 0xff
    };
    byte(0) | byte(1) << 8 | byte(2) << 16 | byte(3) << 24
}

/// Packs a block of 32 columns whose codes are nibbles at one shift (0 or 4) of 32 bytes.
#[inline(always)]
pub(super) fn pack_nibbles(source: &[u8], shift: u32, at: usize, row: usize, span: &mut [u8]) {
    for p in 0..4 {
        let low = word(source, 4 * p) >> shift & 0x0f0f_0f0f;
        let high = word(source, 4 * p + 16) >> shift & 0x0f0f_0f0f;
        put_word(span, at + p * VECTOR, row, low | high << 4);
    }
}

/// Packs a block of 32 columns whose low 16 columns are the low nibbles of 16 bytes.
#[inline(always)]
pub(super) fn pack_pairs(source: &[u8], at: usize, row: usize, span: &mut [u8]) {
    for p in 0..4 {
        put_word(span, at + p * VECTOR, row, word(source, 4 * p));
    }
}

/// Packs a block of 32 columns whose codes are 2-bit fields at one shift of 32 bytes.
#[inline(always)]
pub(super) fn pack_twos(source: &[u8], shift: u32, at: usize, row: usize, span: &mut [u8]) {
    for h in 0..2 {
        let field = |f: usize| (word(source, 16 * h + 4 * f) >> shift & 0x0303_0303) << (2 * f);
        put_word(span, at + h * VECTOR, row, field(0) | field(1) | field(2) | field(3));
    }
}

/// Packs a block of 32 columns whose codes are bit `shift` of 32 bytes.
#[inline(always)]
pub(super) fn pack_ones(source: &[u8], shift: u32, at: usize, row: usize, span: &mut [u8]) {
    let bits = (0..8).map(|s| (word(source, 4 * s) >> shift & 0x0101_0101) << s);
    put_word(span, at, row, bits.fold(0, |all, bit| all | bit));
}

// The steps are spelled out because closures are compiled without the target features.

/// The eight steps of 4 bits at `at`.
///
/// # Safety
/// 256 bytes to read, and the instructions of `L`.
#[inline(always)]
pub(super) unsafe fn nibbles<L: Lanes>(at: *const u8) -> [L::Bytes; 8] {
    // SAFETY: the caller vouches.
    unsafe {
        let a = L::bytes(at);
        let b = L::bytes(at.add(VECTOR));
        let c = L::bytes(at.add(2 * VECTOR));
        let d = L::bytes(at.add(3 * VECTOR));
        [
            L::field::<0, 0, 0x0f>(a),
            L::field::<0, 0, 0x0f>(b),
            L::field::<0, 0, 0x0f>(c),
            L::field::<0, 0, 0x0f>(d),
            L::field::<4, 0, 0x0f>(a),
            L::field::<4, 0, 0x0f>(b),
            L::field::<4, 0, 0x0f>(c),
            L::field::<4, 0, 0x0f>(d),
        ]
    }
}

/// The eight steps of 2 bits at `at`, moved to bits 4 and 5.
///
/// # Safety
/// 128 bytes to read, and the instructions of `L`.
#[inline(always)]
pub(super) unsafe fn twos_high<L: Lanes>(at: *const u8) -> [L::Bytes; 8] {
    // SAFETY: the caller vouches.
    unsafe {
        let a = L::bytes(at);
        let b = L::bytes(at.add(VECTOR));
        [
            L::field::<0, 4, 0x30>(a),
            L::field::<0, 2, 0x30>(a),
            L::field::<0, 0, 0x30>(a),
            L::field::<2, 0, 0x30>(a),
            L::field::<0, 4, 0x30>(b),
            L::field::<0, 2, 0x30>(b),
            L::field::<0, 0, 0x30>(b),
            L::field::<2, 0, 0x30>(b),
        ]
    }
}

/// The eight steps of 2 bits at `at`.
///
/// # Safety
/// 128 bytes to read, and the instructions of `L`.
#[inline(always)]
pub(super) unsafe fn twos<L: Lanes>(at: *const u8) -> [L::Bytes; 8] {
    // SAFETY: the caller vouches.
    unsafe {
        let a = L::bytes(at);
        let b = L::bytes(at.add(VECTOR));
        [
            L::field::<0, 0, 3>(a),
            L::field::<2, 0, 3>(a),
            L::field::<4, 0, 3>(a),
            L::field::<6, 0, 3>(a),
            L::field::<0, 0, 3>(b),
            L::field::<2, 0, 3>(b),
            L::field::<4, 0, 3>(b),
            L::field::<6, 0, 3>(b),
        ]
    }
}

/// The eight steps of 1 bit at `at`, moved to bit 4.
///
/// # Safety
/// 64 bytes to read, and the instructions of `L`.
#[inline(always)]
pub(super) unsafe fn ones_at_4<L: Lanes>(at: *const u8) -> [L::Bytes; 8] {
    // SAFETY: the caller vouches.
    unsafe {
        let v = L::bytes(at);
        [
            L::field::<0, 4, 0x10>(v),
            L::field::<0, 3, 0x10>(v),
            L::field::<0, 2, 0x10>(v),
            L::field::<0, 1, 0x10>(v),
            L::field::<0, 0, 0x10>(v),
            L::field::<1, 0, 0x10>(v),
            L::field::<2, 0, 0x10>(v),
            L::field::<3, 0, 0x10>(v),
        ]
    }
}

/// The eight steps of 1 bit at `at`, moved to bit 2.
///
/// # Safety
/// 64 bytes to read, and the instructions of `L`.
#[inline(always)]
pub(super) unsafe fn ones_at_2<L: Lanes>(at: *const u8) -> [L::Bytes; 8] {
    // SAFETY: the caller vouches.
    unsafe {
        let v = L::bytes(at);
        [
            L::field::<0, 2, 4>(v),
            L::field::<0, 1, 4>(v),
            L::field::<0, 0, 4>(v),
            L::field::<1, 0, 4>(v),
            L::field::<2, 0, 4>(v),
            L::field::<3, 0, 4>(v),
            L::field::<4, 0, 4>(v),
            L::field::<5, 0, 4>(v),
        ]
    }
}

/// Bitwise or of two sets of steps.
///
/// # Safety
/// The instructions of `L`.
#[inline(always)]
pub(super) unsafe fn join<L: Lanes>(mut a: [L::Bytes; 8], b: [L::Bytes; 8]) -> [L::Bytes; 8] {
    for (a, b) in a.iter_mut().zip(b) {
        // SAFETY: the caller vouches.
        *a = unsafe { L::or(*a, b) };
    }
    a
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_are_sorted_by_step() {
        for column in 0..32 {
            let (step, byte) = (column / 4, column % 4);
            assert_eq!(bits_by_step(1 << column), 1 << (8 * byte + step));
        }
    }
}
