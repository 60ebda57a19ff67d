//! The dense formats that sparse ones pack: how a block of 32 elements holds codes, and how codes
//! lie when some are left out. It knows no pattern of zeros.

use super::BLOCK;

/// A dense format. A block is a scale, which may be absent, and the codes of 32 elements.
pub(super) trait Base {
    /// Bytes of a block.
    const BYTES: usize = Self::SCALE + BLOCK * Self::BITS / 8;
    /// Bytes of the scale.
    const SCALE: usize;
    /// Width of a code: 16, 8 or 4.
    const BITS: usize;
    /// What is written for an element that is left out.
    const ZERO: u16 = 0;

    /// Whether an element with this code can be left out.
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

/// Half-precision floats, 32 of them to a block here.
pub(super) struct F16;

impl Base for F16 {
    const SCALE: usize = 0;
    const BITS: usize = 16;

    fn is_zero(code: u16) -> bool {
        code & 0x7fff == 0
    }
}

/// int8 with a scale.
pub(super) struct Q8_0;

impl Base for Q8_0 {
    const SCALE: usize = 2;
    const BITS: usize = 8;
}

/// Nibbles around 8 with a scale.
pub(super) struct Q4_0;

impl Base for Q4_0 {
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

/// Code `n` of those that lie one after the other in `codes`, low nibbles before high ones; zero
/// behind their end.
pub(super) fn packed<B: Base + ?Sized>(codes: &[u8], n: usize) -> u16 {
    let at = n * B::BITS / 8;
    let Some(&low) = codes.get(at) else { return B::ZERO };
    match B::BITS {
        16 => codes.get(at + 1).map_or(B::ZERO, |&high| u16::from_le_bytes([low, high])),
        8 => u16::from(low),
        _ => u16::from(low >> (4 * (n % 2)) & 15),
    }
}

/// Writes code `n`, where nothing but zeros is before.
pub(super) fn put_packed<B: Base + ?Sized>(codes: &mut [u8], n: usize, code: u16) {
    let at = n * B::BITS / 8;
    match B::BITS {
        16 => codes[at..at + 2].copy_from_slice(&code.to_le_bytes()),
        8 => codes[at] = code as u8,
        _ => codes[at] |= (code as u8) << (4 * (n % 2)),
    }
}

/// Bytes of `count` codes that lie one after the other.
pub(super) fn packed_bytes<B: Base>(count: usize) -> usize {
    (count * B::BITS).div_ceil(8)
}

/// Makes every element of a block zero.
pub(super) fn clear<B: Base>(codes: &mut [u8]) {
    // Two nibbles of the same code; other codes of zero are zero in all their bytes.
    let both = (B::ZERO | B::ZERO << 4) as u8;
    codes.fill(if B::BITS == 4 { both } else { 0 });
}
