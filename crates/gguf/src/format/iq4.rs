//! The formats of four-bit codes into one uneven table: IQ4_NL and IQ4_XS.

use bytemuck::{Pod, Zeroable};

use super::{Block, fit, scale, stored_scale};

/// What the sixteen codes stand for.
pub const LEVELS: [i8; 16] =
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// Halfway between the levels.
const BORDERS: [f32; 15] = {
    let mut borders = [0.0; 15];
    let mut i = 0;
    while i < 15 {
        borders[i] = (LEVELS[i] as f32 + LEVELS[i + 1] as f32) / 2.0;
        i += 1;
    }
    borders
};

/// Blocks of 32 with one scale: `d * LEVELS[q]`.
#[repr(C)]
#[derive(Copy, Clone, Debug, Pod, Zeroable)]
pub struct IQ4_NL {
    /// Scale, f16.
    pub d: [u8; 2],
    /// Codes: elements 0 to 15 in the low nibbles, 16 to 31 in the high ones.
    pub qs: [u8; 16],
}

/// Blocks of 256 with scales of 6 bits per 32: `d * (sc - 32) * LEVELS[q]`.
#[repr(C)]
#[derive(Copy, Clone, Debug, Pod, Zeroable)]
pub struct IQ4_XS {
    /// Scale of the scales, f16.
    pub d: [u8; 2],
    /// Upper two bits of the scales, a u16.
    pub scales_h: [u8; 2],
    /// Lower four bits of the scales, two a byte.
    pub scales_l: [u8; 4],
    /// Codes, per 32 elements as in [`IQ4_NL`].
    pub qs: [[u8; 16]; 8],
}

/// Values of 32 elements from their codes.
fn put(out: &mut [f32], qs: &[u8; 16], d: f32) {
    for (i, value) in out.iter_mut().enumerate() {
        let code = (qs[i % 16] >> (i / 16 * 4)) & 15;
        *value = d * f32::from(LEVELS[usize::from(code)]);
    }
}

impl Block for IQ4_NL {
    const ELEMENTS: usize = 32;

    fn dequantize(&self, out: &mut [f32]) {
        put(out, &self.qs, scale(self.d));
    }

    fn quantize(values: &[f32]) -> Option<Self> {
        let mut block = Self::zeroed();
        let level = |value| f32::from(LEVELS[usize::from(fit::place(&BORDERS, value))]);
        block.d = stored_scale(fit::best_scale(values, f32::from(LEVELS[0]), 1.0, level));
        let inverse = fit::inverse(scale(block.d));
        for (i, &value) in values.iter().enumerate() {
            block.qs[i % 16] |= fit::place(&BORDERS, value * inverse) << (i / 16 * 4);
        }
        Some(block)
    }
}

impl Block for IQ4_XS {
    const ELEMENTS: usize = 256;

    fn dequantize(&self, out: &mut [f32]) {
        let d = scale(self.d);
        let scales_h = u16::from_le_bytes(self.scales_h);
        for (group, (out, qs)) in out.chunks_exact_mut(32).zip(&self.qs).enumerate() {
            let low = (self.scales_l[group / 2] >> (group % 2 * 4)) & 15;
            let high = (scales_h >> (2 * group)) & 3;
            let sc = i16::from(low) | ((high as i16) << 4);
            put(out, qs, d * f32::from(sc - 32));
        }
    }
}
