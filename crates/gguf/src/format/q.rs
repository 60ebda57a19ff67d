//! The legacy formats: blocks of 32 with one scale, and in the `_1` formats a minimum.
//!
//! The low nibbles of 4- and 5-bit codes in `qs` are elements 0 to 15 of a block, the high nibbles
//! elements 16 to 31; bit i of `qh` is the fifth bit of element i.

use bytemuck::{Pod, Zeroable};

use super::block::{Block, scale, stored_scale};
use super::scale_search as fit;
use super::scale_search::{Lowest, Run};

const ELEMENTS: usize = 32;

/// 4 bits, `d * (q - 8)`.
#[repr(C)]
#[derive(Copy, Clone, Debug, Pod, Zeroable)]
pub struct Q4_0 {
    /// Scale, f16.
    pub d: [u8; 2],
    /// Codes, two a byte.
    pub qs: [u8; 16],
}

/// 4 bits, `d * q + m`.
#[repr(C)]
#[derive(Copy, Clone, Debug, Pod, Zeroable)]
pub struct Q4_1 {
    /// Scale, f16.
    pub d: [u8; 2],
    /// Minimum, f16.
    pub m: [u8; 2],
    /// Codes, two a byte.
    pub qs: [u8; 16],
}

/// 5 bits, `d * (q - 16)`.
#[repr(C)]
#[derive(Copy, Clone, Debug, Pod, Zeroable)]
pub struct Q5_0 {
    /// Scale, f16.
    pub d: [u8; 2],
    /// Fifth bits, one per element.
    pub qh: [u8; 4],
    /// Lower four bits, two a byte.
    pub qs: [u8; 16],
}

/// 5 bits, `d * q + m`.
#[repr(C)]
#[derive(Copy, Clone, Debug, Pod, Zeroable)]
pub struct Q5_1 {
    /// Scale, f16.
    pub d: [u8; 2],
    /// Minimum, f16.
    pub m: [u8; 2],
    /// Fifth bits, one per element.
    pub qh: [u8; 4],
    /// Lower four bits, two a byte.
    pub qs: [u8; 16],
}

/// 8 bits, `d * q`.
#[repr(C)]
#[derive(Copy, Clone, Debug, Pod, Zeroable)]
pub struct Q8_0 {
    /// Scale, f16.
    pub d: [u8; 2],
    /// Codes.
    pub qs: [i8; 32],
}

/// 8 bits, `d * q`, with the sum that kernels of the `_1` formats need: for activations.
#[repr(C)]
#[derive(Copy, Clone, Debug, Pod, Zeroable)]
pub struct Q8_1 {
    /// Scale, f16.
    pub d: [u8; 2],
    /// `d` times the sum of the codes, f16.
    pub s: [u8; 2],
    /// Codes.
    pub qs: [i8; 32],
}

/// The nibble of element `i`.
fn nibble(qs: &[u8; 16], i: usize) -> u8 {
    (qs[i % 16] >> (4 * (i / 16))) & 15
}

/// The fifth bit of element `i`, as bit 4.
fn fifth_bit(qh: &[u8; 4], i: usize) -> u8 {
    ((qh[i / 8] >> (i % 8)) & 1) << 4
}

/// Stores the low four bits of the code of element `i`, for [`nibble`].
fn put_nibble(qs: &mut [u8; 16], i: usize, code: u8) {
    qs[i % 16] |= (code & 15) << (4 * (i / 16));
}

/// Stores the fifth bit of the code of element `i`, for [`fifth_bit`].
fn put_fifth_bit(qh: &mut [u8; 4], i: usize, code: u8) {
    qh[i / 8] |= (code >> 4) << (i % 8);
}

/// Scale and minimum of least loss for codes from 0 to `top`, as stored.
fn affine(run: Run, top: i8) -> ([u8; 2], [u8; 2]) {
    let low = run.values.iter().copied().fold(f32::INFINITY, f32::min);
    let high = run.values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    // The alternative to the fitted line spans the whole range: the fit has no slope that f16 can
    // store if all values are equal or the scale is too small.
    let full_range = ((high - low) / f32::from(top), -low);
    let stored = |(d, m): (f32, f32)| (stored_scale(d), stored_scale(-m));
    let [first, second] = [fit::affine(run, top, Lowest::Free), full_range].map(|line| {
        let (d, m) = stored(line);
        (fit::affine_loss(run, scale(d), -scale(m), top), (d, m))
    });
    if first.0 < second.0 { first.1 } else { second.1 }
}

/// The scale of least loss for codes from `-half` to `half - 1`, as stored.
fn symmetric(run: Run, half: i8) -> [u8; 2] {
    stored_scale(fit::symmetric_scale(run, half))
}

impl Block for Q4_0 {
    const ELEMENTS: usize = ELEMENTS;

    fn dequantize(&self, out: &mut [f32]) {
        let d = scale(self.d);
        for (i, value) in out.iter_mut().enumerate() {
            *value = f32::from(nibble(&self.qs, i) as i8 - 8) * d;
        }
    }

    fn quantize(values: &[f32], weights: &[f32]) -> Option<Self> {
        let mut block = Q4_0 { d: symmetric(Run { values, weights }, 8), ..Self::zeroed() };
        let inverse = fit::inverse(scale(block.d));
        for (i, &value) in values.iter().enumerate() {
            put_nibble(&mut block.qs, i, (fit::round(value * inverse, -8, 7) + 8) as u8);
        }
        Some(block)
    }
}

impl Block for Q4_1 {
    const ELEMENTS: usize = ELEMENTS;

    fn dequantize(&self, out: &mut [f32]) {
        let (d, m) = (scale(self.d), scale(self.m));
        for (i, value) in out.iter_mut().enumerate() {
            *value = f32::from(nibble(&self.qs, i)) * d + m;
        }
    }

    fn quantize(values: &[f32], weights: &[f32]) -> Option<Self> {
        let (d, m) = affine(Run { values, weights }, 15);
        let mut block = Q4_1 { d, m, ..Self::zeroed() };
        let (inverse, m) = (fit::inverse(scale(d)), scale(m));
        for (i, &value) in values.iter().enumerate() {
            put_nibble(&mut block.qs, i, fit::round((value - m) * inverse, 0, 15) as u8);
        }
        Some(block)
    }
}

impl Block for Q5_0 {
    const ELEMENTS: usize = ELEMENTS;

    fn dequantize(&self, out: &mut [f32]) {
        let d = scale(self.d);
        for (i, value) in out.iter_mut().enumerate() {
            let code = nibble(&self.qs, i) | fifth_bit(&self.qh, i);
            *value = f32::from(code as i8 - 16) * d;
        }
    }

    fn quantize(values: &[f32], weights: &[f32]) -> Option<Self> {
        let mut block = Q5_0 { d: symmetric(Run { values, weights }, 16), ..Self::zeroed() };
        let inverse = fit::inverse(scale(block.d));
        for (i, &value) in values.iter().enumerate() {
            let code = (fit::round(value * inverse, -16, 15) + 16) as u8;
            put_nibble(&mut block.qs, i, code);
            put_fifth_bit(&mut block.qh, i, code);
        }
        Some(block)
    }
}

impl Block for Q5_1 {
    const ELEMENTS: usize = ELEMENTS;

    fn dequantize(&self, out: &mut [f32]) {
        let (d, m) = (scale(self.d), scale(self.m));
        for (i, value) in out.iter_mut().enumerate() {
            let code = nibble(&self.qs, i) | fifth_bit(&self.qh, i);
            *value = f32::from(code) * d + m;
        }
    }

    fn quantize(values: &[f32], weights: &[f32]) -> Option<Self> {
        let (d, m) = affine(Run { values, weights }, 31);
        let mut block = Q5_1 { d, m, ..Self::zeroed() };
        let (inverse, m) = (fit::inverse(scale(d)), scale(m));
        for (i, &value) in values.iter().enumerate() {
            let code = fit::round((value - m) * inverse, 0, 31) as u8;
            put_nibble(&mut block.qs, i, code);
            put_fifth_bit(&mut block.qh, i, code);
        }
        Some(block)
    }
}

impl Block for Q8_0 {
    const ELEMENTS: usize = ELEMENTS;

    fn dequantize(&self, out: &mut [f32]) {
        let d = scale(self.d);
        for (value, &code) in out.iter_mut().zip(&self.qs) {
            *value = f32::from(code) * d;
        }
    }

    fn quantize(values: &[f32], _: &[f32]) -> Option<Self> {
        let d = stored_scale(fit::largest(values).abs() / 127.0);
        let mut block = Q8_0 { d, ..Self::zeroed() };
        let inverse = fit::inverse(scale(d));
        for (code, &value) in block.qs.iter_mut().zip(values) {
            *code = fit::round(value * inverse, -127, 127);
        }
        Some(block)
    }
}

impl Block for Q8_1 {
    const ELEMENTS: usize = ELEMENTS;

    fn dequantize(&self, out: &mut [f32]) {
        Q8_0 { d: self.d, qs: self.qs }.dequantize(out);
    }

    fn quantize(values: &[f32], weights: &[f32]) -> Option<Self> {
        let Q8_0 { d, qs } = Q8_0::quantize(values, weights)?;
        let sum: i32 = qs.iter().map(|&code| i32::from(code)).sum();
        Some(Q8_1 { d, s: stored_scale(sum as f32 * scale(d)), qs })
    }
}
