//! The formats of 4-bit codes into a non-uniform codebook: IQ4_NL and IQ4_XS.

use bytemuck::{Pod, Zeroable};

use super::block::{Block, scale, stored_scale};
use super::scale_search as fit;
use super::scale_search::{Run, Steps};

/// The values of the sixteen codes.
pub const CODEBOOK: [i8; 16] =
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// The midpoints between neighbouring values.
const MIDPOINTS: [f32; 15] = {
    let mut midpoints = [0.0; 15];
    let mut i = 0;
    while i < 15 {
        midpoints[i] = (CODEBOOK[i] as f32 + CODEBOOK[i + 1] as f32) / 2.0;
        i += 1;
    }
    midpoints
};

/// The difference of each value to the next.
const STEPS: [f32; 15] = {
    let mut steps = [0.0; 15];
    let mut i = 0;
    while i < 15 {
        steps[i] = CODEBOOK[i + 1] as f32 - CODEBOOK[i] as f32;
        i += 1;
    }
    steps
};

/// Blocks of 32 with one scale: `d * CODEBOOK[q]`.
#[repr(C)]
#[derive(Copy, Clone, Debug, Pod, Zeroable)]
pub struct IQ4_NL {
    /// Scale, f16.
    pub d: [u8; 2],
    /// Codes: elements 0 to 15 in the low nibbles, 16 to 31 in the high ones.
    pub qs: [u8; 16],
}

/// Blocks of 256 with scales of 6 bits per 32: `d * (sc - 32) * CODEBOOK[q]`.
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

/// Dequantises 32 elements.
fn put(out: &mut [f32], qs: &[u8; 16], d: f32) {
    for (i, value) in out.iter_mut().enumerate() {
        let code = (qs[i % 16] >> (i / 16 * 4)) & 15;
        *value = d * f32::from(CODEBOOK[usize::from(code)]);
    }
}

/// Stores the nearest codes of 32 elements, given the inverse of their scale.
fn put_codes(qs: &mut [u8; 16], values: &[f32], inverse: f32) {
    for (i, &value) in values.iter().enumerate() {
        qs[i % 16] |= fit::nearest_index(&MIDPOINTS, value * inverse) << (i / 16 * 4);
    }
}

/// The codebook value nearest to a scaled value: the lowest, plus the step at every midpoint below
/// the value. Unlike a table lookup this vectorises.
fn nearest_value(value: f32) -> f32 {
    let mut nearest = f32::from(CODEBOOK[0]);
    for i in 0..MIDPOINTS.len() {
        nearest += if value > MIDPOINTS[i] { STEPS[i] } else { 0.0 };
    }
    nearest
}

/// The scale of least loss for 32 elements.
fn best_scale(run: Run) -> f32 {
    fit::best_scale(run, f32::from(CODEBOOK[0]), 1.0, nearest_value)
}

impl Block for IQ4_NL {
    const ELEMENTS: usize = 32;

    fn dequantize(&self, out: &mut [f32]) {
        put(out, &self.qs, scale(self.d));
    }

    fn quantize(values: &[f32], weights: &[f32]) -> Option<Self> {
        let d = stored_scale(best_scale(Run { values, weights }));
        let mut block = IQ4_NL { d, qs: [0; 16] };
        put_codes(&mut block.qs, values, fit::inverse(scale(d)));
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

    fn quantize(values: &[f32], weights: &[f32]) -> Option<Self> {
        let loss = |run: Run, scale: f32| {
            let inverse = fit::inverse(scale);
            run.loss(|value| scale * nearest_value(value * inverse))
        };
        let steps = Steps { lowest: -32, radius: 3 };
        let scales = fit::scales::<8>(Run { values, weights }, steps, best_scale, loss);
        let mut block = IQ4_XS { d: scales.d, ..Self::zeroed() };
        let mut scales_h = 0u16;
        for (group, step) in scales.steps.into_iter().enumerate() {
            let code = (step + 32) as u8;
            block.scales_l[group / 2] |= (code & 15) << (group % 2 * 4);
            scales_h |= u16::from(code >> 4) << (2 * group);
        }
        block.scales_h = scales_h.to_le_bytes();
        let groups = block.qs.iter_mut().zip(values.chunks_exact(32));
        for ((qs, values), inverse) in groups.zip(scales.inverses()) {
            put_codes(qs, values, inverse);
        }
        Some(block)
    }
}
