//! The formats of one or two bits with one scale: Q1_0, Q2_0, and the ternary TQ1_0 and TQ2_0.

use bytemuck::{Pod, Zeroable};

use super::block::{Block, scale};

/// Blocks of 128 signs: `d` where the bit is set, `-d` where it is not.
#[repr(C)]
#[derive(Copy, Clone, Debug, Pod, Zeroable)]
pub struct Q1_0 {
    /// Scale, f16.
    pub d: [u8; 2],
    /// Bits, eight a byte, the first lowest.
    pub qs: [u8; 16],
}

/// Blocks of 64: `d * (q - 1)`.
#[repr(C)]
#[derive(Copy, Clone, Debug, Pod, Zeroable)]
pub struct Q2_0 {
    /// Scale, f16.
    pub d: [u8; 2],
    /// Codes, four a byte, the first lowest.
    pub qs: [u8; 16],
}

/// Blocks of 256 ternary digits, five a byte: `d * (q - 1)`.
#[repr(C)]
#[derive(Copy, Clone, Debug, Pod, Zeroable)]
pub struct TQ1_0 {
    /// Digits of elements 0 to 159 in 32 bytes, and of 160 to 239 in 16 bytes.
    pub qs: [u8; 48],
    /// Digits of the last 16 elements, four a byte.
    pub qh: [u8; 4],
    /// Scale, f16.
    pub d: [u8; 2],
}

/// Blocks of 256: `d * (q - 1)`.
#[repr(C)]
#[derive(Copy, Clone, Debug, Pod, Zeroable)]
pub struct TQ2_0 {
    /// Codes, four a byte, 32 elements apart.
    pub qs: [u8; 64],
    /// Scale, f16.
    pub d: [u8; 2],
}

/// Ternary digit `n` of a byte. A byte is a base-3 fraction of 256: each multiplication by three
/// moves the next digit before the point.
fn ternary_digit(byte: u8, n: usize) -> u8 {
    let rest = byte.wrapping_mul([1, 3, 9, 27, 81][n]);
    ((u16::from(rest) * 3) >> 8) as u8
}

/// A code minus one, as a float.
fn centred(code: u8) -> f32 {
    f32::from(code) - 1.0
}

impl Block for Q1_0 {
    const ELEMENTS: usize = 128;

    fn dequantize(&self, out: &mut [f32]) {
        let d = scale(self.d);
        for (i, value) in out.iter_mut().enumerate() {
            *value = if (self.qs[i / 8] >> (i % 8)) & 1 == 1 { d } else { -d };
        }
    }
}

impl Block for Q2_0 {
    const ELEMENTS: usize = 64;

    fn dequantize(&self, out: &mut [f32]) {
        let d = scale(self.d);
        for (i, value) in out.iter_mut().enumerate() {
            *value = centred((self.qs[i / 4] >> (i % 4 * 2)) & 3) * d;
        }
    }
}

impl Block for TQ1_0 {
    const ELEMENTS: usize = 256;

    fn dequantize(&self, out: &mut [f32]) {
        let d = scale(self.d);
        let (first, rest) = out.split_at_mut(160);
        let (second, last) = rest.split_at_mut(80);
        let parts = [(first, &self.qs[..32]), (second, &self.qs[32..]), (last, &self.qh[..])];
        for (out, bytes) in parts {
            for (i, value) in out.iter_mut().enumerate() {
                *value = centred(ternary_digit(bytes[i % bytes.len()], i / bytes.len())) * d;
            }
        }
    }
}

impl Block for TQ2_0 {
    const ELEMENTS: usize = 256;

    fn dequantize(&self, out: &mut [f32]) {
        let d = scale(self.d);
        for (i, value) in out.iter_mut().enumerate() {
            *value = centred((self.qs[i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2)) & 3) * d;
        }
    }
}
