//! The formats of one or two bits with one scale: Q1_0, Q2_0, and the ternary TQ1_0 and TQ2_0.

use bytemuck::{Pod, Zeroable};

use super::block::scale;
use super::runs::{RUN, Runs};

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

/// The numbers of codes from -1 on.
const CENTRED: [i8; 16] = [-1, 0, 1, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];

/// Run `i` of codes, each of which `code` gives for an element.
fn run_of(i: usize, code: impl Fn(usize) -> u8) -> [u8; RUN] {
    std::array::from_fn(|j| code(RUN * i + j))
}

impl Runs for Q1_0 {
    const ELEMENTS: usize = 128;
    const CODEBOOK: [i8; 16] = [-1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];

    fn block_scale(&self) -> f32 {
        scale(self.d)
    }

    fn run(&self, i: usize) -> (u8, [u8; RUN]) {
        (1, std::array::from_fn(|j| (self.qs[i] >> j) & 1))
    }
}

impl Runs for Q2_0 {
    const ELEMENTS: usize = 64;
    const CODEBOOK: [i8; 16] = CENTRED;

    fn block_scale(&self) -> f32 {
        scale(self.d)
    }

    fn run(&self, i: usize) -> (u8, [u8; RUN]) {
        (1, run_of(i, |i| (self.qs[i / 4] >> (i % 4 * 2)) & 3))
    }
}

impl Runs for TQ1_0 {
    const ELEMENTS: usize = 256;
    const CODEBOOK: [i8; 16] = CENTRED;

    fn block_scale(&self) -> f32 {
        scale(self.d)
    }

    fn run(&self, i: usize) -> (u8, [u8; RUN]) {
        let codes = run_of(i, |i| match i {
            0..160 => ternary_digit(self.qs[i % 32], i / 32),
            160..240 => ternary_digit(self.qs[32 + i % 16], (i - 160) / 16),
            _ => ternary_digit(self.qh[i % 4], (i - 240) / 4),
        });
        (1, codes)
    }
}

impl Runs for TQ2_0 {
    const ELEMENTS: usize = 256;
    const CODEBOOK: [i8; 16] = CENTRED;

    fn block_scale(&self) -> f32 {
        scale(self.d)
    }

    fn run(&self, i: usize) -> (u8, [u8; RUN]) {
        (1, run_of(i, |i| (self.qs[i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2)) & 3))
    }
}
