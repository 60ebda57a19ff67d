//! The vector-quantised formats IQ1, IQ2 and IQ3: 8 or 4 elements share one index into a codebook
//! of grid points, and blocks of 256 have an f16 scale and a small scale for each group.
//!
//! Eight elements have eight sign bits, or seven, and then the eighth makes their parity even.

use bytemuck::{Pod, Zeroable};

use crate::format::block::{Block, scale};

pub mod tables;

const ELEMENTS: usize = 256;
/// Magnitudes of the IQ2 grids; the fourth is never used.
const MAGNITUDES_IQ2: [f32; 4] = [8.0, 25.0, 43.0, 0.0];
/// Magnitudes of the IQ3_XXS grid.
const MAGNITUDES_IQ3_XXS: [f32; 8] = [4.0, 12.0, 20.0, 28.0, 36.0, 44.0, 52.0, 62.0];
/// Magnitudes of the IQ3_S grid.
const MAGNITUDES_IQ3_S: [f32; 8] = [1.0, 3.0, 5.0, 7.0, 9.0, 11.0, 13.0, 15.0];
/// The shift of all elements of an IQ1 grid point, up or down.
const DELTA: f32 = 0.125;

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

/// Eight values of an IQ2 grid point.
fn put_iq2(out: &mut [f32], point: u16, signs: u8, scale: f32) {
    for (j, value) in out.iter_mut().enumerate() {
        let magnitude = scale * MAGNITUDES_IQ2[usize::from(point >> (2 * j)) & 3];
        *value = if (signs >> j) & 1 == 1 { -magnitude } else { magnitude };
    }
}

/// Eight values of two IQ3 grid points.
fn put_iq3(out: &mut [f32], points: [u16; 2], magnitudes: &[f32; 8], signs: u8, scale: f32) {
    for (j, value) in out.iter_mut().enumerate() {
        let magnitude = scale * magnitudes[usize::from(points[j / 4] >> (3 * (j % 4))) & 7];
        *value = if (signs >> j) & 1 == 1 { -magnitude } else { magnitude };
    }
}

/// Eight values of an IQ1 grid point, whose values are -1, 0 and 1.
fn put_iq1(out: &mut [f32], point: u16, shift_down: bool, scale: f32) {
    let delta = if shift_down { -DELTA } else { DELTA };
    for (j, value) in out.iter_mut().enumerate() {
        *value = scale * (f32::from((point >> (2 * j)) & 3) - 1.0 + delta);
    }
}

impl Block for IQ2_XXS {
    const ELEMENTS: usize = ELEMENTS;

    fn dequantize(&self, out: &mut [f32]) {
        let d = scale(self.d);
        for (run, out) in out.chunks_exact_mut(8).enumerate() {
            let [i0, i1, i2, i3, word @ ..] = self.qs[run / 4];
            let word = u32::from_le_bytes(word);
            let index = [i0, i1, i2, i3][run % 4];
            let db = d * (0.5 + (word >> 28) as f32) * 0.25;
            let signs = even_signs(word >> (7 * (run % 4)));
            put_iq2(out, tables::IQ2_XXS[usize::from(index)], signs, db);
        }
    }
}

impl Block for IQ2_XS {
    const ELEMENTS: usize = ELEMENTS;

    fn dequantize(&self, out: &mut [f32]) {
        let d = scale(self.d);
        for (run, out) in out.chunks_exact_mut(8).enumerate() {
            let word = u16::from_le_bytes(self.qs[run]);
            let db = d * (0.5 + f32::from(nibble(&self.scales, run / 2))) * 0.25;
            let point = tables::IQ2_XS[usize::from(word & 511)];
            put_iq2(out, point, even_signs(u32::from(word >> 9)), db);
        }
    }
}

impl Block for IQ2_S {
    const ELEMENTS: usize = ELEMENTS;

    fn dequantize(&self, out: &mut [f32]) {
        let d = scale(self.d);
        for (run, out) in out.chunks_exact_mut(8).enumerate() {
            let high = (self.qh[run / 4] >> (run % 4 * 2)) & 3;
            let index = usize::from(self.qs[run]) | (usize::from(high) << 8);
            let db = d * (0.5 + f32::from(nibble(&self.scales, run / 2))) * 0.25;
            put_iq2(out, tables::IQ2_S[index], self.signs[run], db);
        }
    }
}

impl Block for IQ3_XXS {
    const ELEMENTS: usize = ELEMENTS;

    fn dequantize(&self, out: &mut [f32]) {
        let d = scale(self.d);
        for (run, out) in out.chunks_exact_mut(8).enumerate() {
            let word = u32::from_le_bytes(self.scales_and_signs[run / 4]);
            let db = d * (0.5 + (word >> 28) as f32) * 0.5;
            let signs = even_signs(word >> (7 * (run % 4)));
            let points = [2 * run, 2 * run + 1].map(|i| tables::IQ3_XXS[usize::from(self.qs[i])]);
            put_iq3(out, points, &MAGNITUDES_IQ3_XXS, signs, db);
        }
    }
}

impl Block for IQ3_S {
    const ELEMENTS: usize = ELEMENTS;

    fn dequantize(&self, out: &mut [f32]) {
        let d = scale(self.d);
        for (run, out) in out.chunks_exact_mut(8).enumerate() {
            let db = d * f32::from(1 + 2 * nibble(&self.scales, run / 4));
            let points = [2 * run, 2 * run + 1].map(|i| {
                let high = (self.qh[i / 8] >> (i % 8)) & 1;
                tables::IQ3_S[usize::from(self.qs[i]) | (usize::from(high) << 8)]
            });
            put_iq3(out, points, &MAGNITUDES_IQ3_S, self.signs[run], db);
        }
    }
}

impl Block for IQ1_S {
    const ELEMENTS: usize = ELEMENTS;

    fn dequantize(&self, out: &mut [f32]) {
        let d = scale(self.d);
        for (run, out) in out.chunks_exact_mut(8).enumerate() {
            let word = u16::from_le_bytes(self.qh[run / 4]);
            let dl = d * f32::from(2 * ((word >> 12) & 7) + 1);
            let high = usize::from(word >> (3 * (run % 4))) & 7;
            let point = tables::IQ1[usize::from(self.qs[run]) | (high << 8)];
            put_iq1(out, point, word & 0x8000 != 0, dl);
        }
    }
}

impl Block for IQ1_M {
    const ELEMENTS: usize = ELEMENTS;

    fn dequantize(&self, out: &mut [f32]) {
        let words = self.scales.map(u16::from_le_bytes);
        let quarters = words.iter().enumerate().map(|(i, word)| (word >> 12) << (4 * i));
        let d = scale(quarters.sum::<u16>().to_le_bytes());
        for (run, out) in out.chunks_exact_mut(8).enumerate() {
            let sc = (words[run / 8] >> (run / 2 % 4 * 3)) & 7;
            let high = nibble(&self.qh, run);
            let point = tables::IQ1[usize::from(self.qs[run]) | (usize::from(high & 7) << 8)];
            put_iq1(out, point, high & 8 != 0, d * f32::from(2 * sc + 1));
        }
    }
}
