//! The dense base formats of the sparse ones: where a block of 32 elements holds its codes, and how
//! the codes of the stored elements are packed. It must not know patterns of zeros.

use crate::format::block::Block;
use crate::format::{plain, q};

/// Elements of a block of every base.
pub(super) const BLOCK: usize = 32;

/// A dense format. A block is an optional scale and the codes of 32 elements.
pub(in crate::format) trait Base {
    /// The scalar definition of the format.
    type Scalar: Block;
    /// Bytes of a block.
    const BYTES: usize = Self::SCALE + BLOCK * Self::BITS / 8;
    /// Bytes of the scale.
    const SCALE: usize;
    /// Width of a code: 16, 8 or 4.
    const BITS: usize;
    /// The code of an element that is not stored.
    const ZERO: u16 = 0;

    /// Whether an element with this code is zero and need not be stored.
    fn is_zero(code: u16) -> bool {
        code == Self::ZERO
    }

    /// The code of element `i`, from the bytes after the scale.
    fn code(codes: &[u8], i: usize) -> u16 {
        packed::<Self>(codes, i)
    }

    /// Writes the code of element `i`.
    fn put(codes: &mut [u8], i: usize, code: u16) {
        put_packed::<Self>(codes, i, code);
    }
}

/// Half-precision floats, in blocks of 32.
pub(in crate::format) struct F16;

impl Base for F16 {
    type Scalar = plain::F16;
    const SCALE: usize = 0;
    const BITS: usize = 16;

    fn is_zero(code: u16) -> bool {
        code & 0x7fff == 0
    }
}

/// int8 with a scale.
pub(in crate::format) struct Q8_0;

impl Base for Q8_0 {
    type Scalar = q::Q8_0;
    const SCALE: usize = 2;
    const BITS: usize = 8;
}

/// Nibbles around 8 with a scale.
pub(in crate::format) struct Q4_0;

impl Base for Q4_0 {
    type Scalar = q::Q4_0;
    const SCALE: usize = 2;
    const BITS: usize = 4;
    const ZERO: u16 = 8;

    fn code(codes: &[u8], i: usize) -> u16 {
        u16::from(codes[i % 16] >> (4 * (i / 16)) & 15)
    }

    fn put(codes: &mut [u8], i: usize, code: u16) {
        let (byte, shift) = (&mut codes[i % 16], 4 * (i / 16));
        *byte = *byte & !(15 << shift) | (code as u8) << shift;
    }
}

/// Packed code `n`, low nibbles before high ones; zero behind the end of `codes`.
pub(super) fn packed<B: Base + ?Sized>(codes: &[u8], n: usize) -> u16 {
    let at = n * B::BITS / 8;
    let Some(&low) = codes.get(at) else { return B::ZERO };
    match B::BITS {
        16 => codes.get(at + 1).map_or(B::ZERO, |&high| u16::from_le_bytes([low, high])),
        8 => u16::from(low),
        _ => u16::from(low >> (4 * (n % 2)) & 15),
    }
}

/// Writes packed code `n` into zeroed memory.
pub(super) fn put_packed<B: Base + ?Sized>(codes: &mut [u8], n: usize, code: u16) {
    let at = n * B::BITS / 8;
    match B::BITS {
        16 => codes[at..at + 2].copy_from_slice(&code.to_le_bytes()),
        8 => codes[at] = code as u8,
        _ => codes[at] |= (code as u8) << (4 * (n % 2)),
    }
}

/// Bytes of `count` packed codes.
pub(super) fn packed_bytes<B: Base>(count: usize) -> usize {
    (count * B::BITS).div_ceil(8)
}

/// Sets every element of a block to zero.
pub(super) fn clear<B: Base>(codes: &mut [u8]) {
    // Q4_0's zero is the code 8; the zeros of the wider formats are all-zero bytes.
    let both = (B::ZERO | B::ZERO << 4) as u8;
    codes.fill(if B::BITS == 4 { both } else { 0 });
}
