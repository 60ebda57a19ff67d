//! The vector-quantised formats IQ1, IQ2 and IQ3: 8 or 4 elements share one index into a codebook
//! of grid points, and blocks of 256 have an f16 scale and a small scale for each group.
//!
//! Eight elements have eight sign bits, or seven, and then the eighth makes their parity even.

use bytemuck::{Pod, Zeroable};

use crate::format::block::scale;
use crate::format::runs::{RUN, Runs};

pub mod tables;

const ELEMENTS: usize = 256;
/// The numbers of IQ2: the index is that of a magnitude, plus 8 for its negative.
const CODEBOOK_IQ2: [i8; 16] = [8, 25, 43, 0, 0, 0, 0, 0, -8, -25, -43, 0, 0, 0, 0, 0];
/// The numbers of IQ3_XXS, in the same order.
const CODEBOOK_IQ3_XXS: [i8; 16] =
    [4, 12, 20, 28, 36, 44, 52, 62, -4, -12, -20, -28, -36, -44, -52, -62];
/// The numbers of IQ3_S, in the same order.
const CODEBOOK_IQ3_S: [i8; 16] = [1, 3, 5, 7, 9, 11, 13, 15, -1, -3, -5, -7, -9, -11, -13, -15];
/// The numbers of IQ1, in eighths: -1, 0 and 1, shifted up by an eighth, or from index 8 on down.
const CODEBOOK_IQ1: [i8; 16] = [-7, 1, 9, 0, 0, 0, 0, 0, -9, -1, 7, 0, 0, 0, 0, 0];

/// 2.06 bits: per 32 elements four indices of 8 bits, four signs of 7 bits and a scale of 4 bits.
#[repr(C)]
#[derive(Copy, Clone, Debug, Pod, Zeroable)]
pub struct IQ2_XXS {
    /// Scale, f16.
    pub d: [u8; 2],
    /// Per 32 elements: four indices, then a u32 of four times seven signs and the scale on top.
    pub qs: [[u8; 8]; 8],
}

/// 2.31 bits: per 8 elements an index of 9 bits and signs of 7 bits; a scale of 4 bits per 16.
#[repr(C)]
#[derive(Copy, Clone, Debug, Pod, Zeroable)]
pub struct IQ2_XS {
    /// Scale, f16.
    pub d: [u8; 2],
    /// Per 8 elements, u16: index in the lower 9 bits, signs above.
    pub qs: [[u8; 2]; 32],
    /// Scales, two a byte.
    pub scales: [u8; 8],
}

/// 2.56 bits: per 8 elements an index of 10 bits and signs of 8 bits; a scale of 4 bits per 16.
#[repr(C)]
#[derive(Copy, Clone, Debug, Pod, Zeroable)]
pub struct IQ2_S {
    /// Scale, f16.
    pub d: [u8; 2],
    /// Lower 8 bits of the indices.
    pub qs: [u8; 32],
    /// Signs.
    pub signs: [u8; 32],
    /// Upper 2 bits of the indices, four a byte.
    pub qh: [u8; 8],
    /// Scales, two a byte.
    pub scales: [u8; 8],
}

/// 3.06 bits: per 4 elements an index of 8 bits; per 32 four signs of 7 bits and a scale of 4.
#[repr(C)]
#[derive(Copy, Clone, Debug, Pod, Zeroable)]
pub struct IQ3_XXS {
    /// Scale, f16.
    pub d: [u8; 2],
    /// Indices.
    pub qs: [u8; 64],
    /// Per 32 elements a u32 of four times seven signs and the scale on top.
    pub scales_and_signs: [[u8; 4]; 8],
}

/// 3.44 bits: per 4 elements an index of 9 bits, a sign each, a scale of 4 bits per 32.
#[repr(C)]
#[derive(Copy, Clone, Debug, Pod, Zeroable)]
pub struct IQ3_S {
    /// Scale, f16.
    pub d: [u8; 2],
    /// Lower 8 bits of the indices.
    pub qs: [u8; 64],
    /// Ninth bits of the indices, eight a byte.
    pub qh: [u8; 8],
    /// Signs.
    pub signs: [u8; 32],
    /// Scales, two a byte.
    pub scales: [u8; 4],
}

/// 1.56 bits: per 8 elements an index of 11 bits; per 32 a scale of 3 bits and the shift's sign.
#[repr(C)]
#[derive(Copy, Clone, Debug, Pod, Zeroable)]
pub struct IQ1_S {
    /// Scale, f16.
    pub d: [u8; 2],
    /// Lower 8 bits of the indices.
    pub qs: [u8; 32],
    /// Per 32 elements, u16: four times the upper 3 bits of an index, the scale, the shift's sign.
    pub qh: [[u8; 2]; 8],
}

/// 1.75 bits: per 8 elements an index of 11 bits and the shift's sign; per 16 a scale of 3 bits.
#[repr(C)]
#[derive(Copy, Clone, Debug, Pod, Zeroable)]
pub struct IQ1_M {
    /// Lower 8 bits of the indices.
    pub qs: [u8; 32],
    /// Per 8 elements a nibble: upper 3 bits of the index, and the shift's sign.
    pub qh: [u8; 16],
    /// Four u16: each four scales, and on top a quarter of the block's f16 scale.
    pub scales: [[u8; 2]; 4],
}

/// Eight sign bits from seven, of even parity.
fn even_signs(seven: u32) -> u8 {
    let seven = (seven & 127) as u8;
    seven | ((seven.count_ones() as u8 & 1) << 7)
}

/// Nibble `i` of `bytes`.
fn nibble(bytes: &[u8], i: usize) -> u8 {
    (bytes[i / 2] >> (i % 2 * 4)) & 15
}

/// The integer that a scale of 3 or 4 bits stands for. Some formats define it as `scale + 0.5`:
/// their block's scale is half as large here.
fn twice_plus_one(scale: u32) -> u8 {
    (2 * scale + 1) as u8
}

/// The indices of an IQ2 grid point.
fn indices_iq2(point: u16, signs: u8) -> [u8; RUN] {
    std::array::from_fn(|j| ((point >> (2 * j)) & 3) as u8 | ((signs >> j) & 1) << 3)
}

/// The indices of two IQ3 grid points.
fn indices_iq3(points: [u16; 2], signs: u8) -> [u8; RUN] {
    std::array::from_fn(|j| ((points[j / 4] >> (3 * (j % 4))) & 7) as u8 | ((signs >> j) & 1) << 3)
}

/// The indices of an IQ1 grid point.
fn indices_iq1(point: u16, shifts_down: bool) -> [u8; RUN] {
    std::array::from_fn(|j| ((point >> (2 * j)) & 3) as u8 | u8::from(shifts_down) << 3)
}

impl Runs for IQ2_XXS {
    const ELEMENTS: usize = ELEMENTS;
    const CODEBOOK: [i8; 16] = CODEBOOK_IQ2;

    fn block_scale(&self) -> f32 {
        scale(self.d) * 0.125
    }

    fn run(&self, i: usize) -> (u8, [u8; RUN]) {
        let [i0, i1, i2, i3, word @ ..] = self.qs[i / 4];
        let word = u32::from_le_bytes(word);
        let index = [i0, i1, i2, i3][i % 4];
        let signs = even_signs(word >> (7 * (i % 4)));
        let point = tables::IQ2_XXS[usize::from(index)];
        (twice_plus_one(word >> 28), indices_iq2(point, signs))
    }
}

impl Runs for IQ2_XS {
    const ELEMENTS: usize = ELEMENTS;
    const CODEBOOK: [i8; 16] = CODEBOOK_IQ2;

    fn block_scale(&self) -> f32 {
        scale(self.d) * 0.125
    }

    fn run(&self, i: usize) -> (u8, [u8; RUN]) {
        let word = u16::from_le_bytes(self.qs[i]);
        let scale = twice_plus_one(nibble(&self.scales, i / 2).into());
        let point = tables::IQ2_XS[usize::from(word & 511)];
        (scale, indices_iq2(point, even_signs(u32::from(word >> 9))))
    }
}

impl Runs for IQ2_S {
    const ELEMENTS: usize = ELEMENTS;
    const CODEBOOK: [i8; 16] = CODEBOOK_IQ2;

    fn block_scale(&self) -> f32 {
        scale(self.d) * 0.125
    }

    fn run(&self, i: usize) -> (u8, [u8; RUN]) {
        let high = (self.qh[i / 4] >> (i % 4 * 2)) & 3;
        let index = usize::from(self.qs[i]) | (usize::from(high) << 8);
        let scale = twice_plus_one(nibble(&self.scales, i / 2).into());
        (scale, indices_iq2(tables::IQ2_S[index], self.signs[i]))
    }
}

impl Runs for IQ3_XXS {
    const ELEMENTS: usize = ELEMENTS;
    const CODEBOOK: [i8; 16] = CODEBOOK_IQ3_XXS;

    fn block_scale(&self) -> f32 {
        scale(self.d) * 0.25
    }

    fn run(&self, i: usize) -> (u8, [u8; RUN]) {
        let word = u32::from_le_bytes(self.scales_and_signs[i / 4]);
        let signs = even_signs(word >> (7 * (i % 4)));
        let points = [2 * i, 2 * i + 1].map(|i| tables::IQ3_XXS[usize::from(self.qs[i])]);
        (twice_plus_one(word >> 28), indices_iq3(points, signs))
    }
}

impl Runs for IQ3_S {
    const ELEMENTS: usize = ELEMENTS;
    const CODEBOOK: [i8; 16] = CODEBOOK_IQ3_S;

    fn block_scale(&self) -> f32 {
        scale(self.d)
    }

    fn run(&self, i: usize) -> (u8, [u8; RUN]) {
        let points = [2 * i, 2 * i + 1].map(|i| {
            let high = (self.qh[i / 8] >> (i % 8)) & 1;
            tables::IQ3_S[usize::from(self.qs[i]) | (usize::from(high) << 8)]
        });
        let scale = twice_plus_one(nibble(&self.scales, i / 4).into());
        (scale, indices_iq3(points, self.signs[i]))
    }
}

impl Runs for IQ1_S {
    const ELEMENTS: usize = ELEMENTS;
    const CODEBOOK: [i8; 16] = CODEBOOK_IQ1;

    fn block_scale(&self) -> f32 {
        scale(self.d) * 0.125
    }

    fn run(&self, i: usize) -> (u8, [u8; RUN]) {
        let word = u16::from_le_bytes(self.qh[i / 4]);
        let high = usize::from(word >> (3 * (i % 4))) & 7;
        let point = tables::IQ1[usize::from(self.qs[i]) | (high << 8)];
        let scale = twice_plus_one(u32::from(word >> 12) & 7);
        (scale, indices_iq1(point, word & 0x8000 != 0))
    }
}

impl Runs for IQ1_M {
    const ELEMENTS: usize = ELEMENTS;
    const CODEBOOK: [i8; 16] = CODEBOOK_IQ1;

    fn block_scale(&self) -> f32 {
        let words = self.scales.map(u16::from_le_bytes);
        let quarters = words.iter().enumerate().map(|(i, word)| (word >> 12) << (4 * i));
        scale(quarters.sum::<u16>().to_le_bytes()) * 0.125
    }

    fn run(&self, i: usize) -> (u8, [u8; RUN]) {
        let word = u16::from_le_bytes(self.scales[i / 8]);
        let scale = twice_plus_one(u32::from(word >> (i / 2 % 4 * 3)) & 7);
        let high = nibble(&self.qh, i);
        let point = tables::IQ1[usize::from(self.qs[i]) | (usize::from(high & 7) << 8)];
        (scale, indices_iq1(point, high & 8 != 0))
    }
}
