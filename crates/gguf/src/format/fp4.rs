//! The formats of 4-bit floats (E2M1) with 8-bit float scales: MXFP4 with E8M0 (powers of two),
//! NVFP4 with unsigned E4M3.

use bytemuck::{Pod, Zeroable};

use super::block::Block;
use super::scale_search as fit;
use super::scale_search::Run;

/// The values of the sixteen E2M1 codes, doubled to be integers; the scales below are halved.
pub const CODEBOOK: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// The midpoints between the non-negative values of the codebook.
const MIDPOINTS: [f32; 7] = [0.5, 1.5, 2.5, 3.5, 5.0, 7.0, 10.0];

/// Blocks of 32 with one scale that is a power of two.
#[repr(C)]
#[derive(Copy, Clone, Debug, Pod, Zeroable)]
pub struct MXFP4 {
    /// Scale: an exponent with bias 127.
    pub e: u8,
    /// Codes: elements 0 to 15 in the low nibbles, 16 to 31 in the high ones.
    pub qs: [u8; 16],
}

/// Blocks of 64 in four groups of 16.
#[repr(C)]
#[derive(Copy, Clone, Debug, Pod, Zeroable)]
pub struct NVFP4 {
    /// Scales of the groups: four bits of exponent with bias 7, three of mantissa.
    pub d: [u8; 4],
    /// Codes, per group: elements 0 to 7 in the low nibbles, 8 to 15 in the high ones.
    pub qs: [[u8; 8]; 4],
}

/// Half of the power of two of an E8M0 byte.
pub fn half_e8m0(e: u8) -> f32 {
    // The two smallest results are subnormal: 2^-128 and 2^-127.
    f32::from_bits(if e < 2 { 0x0020_0000 << e } else { u32::from(e - 1) << 23 })
}

/// Half of the value of an unsigned E4M3 byte; its NaN is read as zero.
pub fn half_ue4m3(byte: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(byte >> 3 & 15), f32::from(byte & 7));
    match (byte, exponent) {
        (0x7f, _) => 0.0,
        (_, 0) => mantissa * 2f32.powi(-10),
        _ => (1.0 + mantissa / 8.0) * 2f32.powi(exponent - 8),
    }
}

/// Converts blocks whose bytes hold neighbouring elements, 0 and 1, 2 and 3, and so on, to MXFP4.
pub(crate) fn unpair_mxfp4(blocks: &[u8]) -> Vec<u8> {
    let mut out = blocks.to_vec();
    for (out, block) in out.chunks_exact_mut(17).zip(blocks.chunks_exact(17)) {
        for i in 0..8 {
            let (low, high) = (block[1 + i], block[9 + i]);
            out[1 + 2 * i] = low & 15 | high << 4;
            out[2 + 2 * i] = low >> 4 | high & 0xf0;
        }
    }
    out
}

impl Block for MXFP4 {
    const ELEMENTS: usize = 32;

    fn dequantize(&self, out: &mut [f32]) {
        let d = half_e8m0(self.e);
        for (i, value) in out.iter_mut().enumerate() {
            let code = (self.qs[i % 16] >> (i / 16 * 4)) & 15;
            *value = f32::from(CODEBOOK[usize::from(code)]) * d;
        }
    }

    fn quantize(values: &[f32], weights: &[f32]) -> Option<Self> {
        let largest = fit::largest(values).abs();
        // The exponent that scales the largest value to between 4 and 8, where 6 is the largest
        // code, or the next one if clipping would lose more than the coarser grid.
        let exponent = ((largest.to_bits() >> 23) as i32 - 2).clamp(0, 253) as u8;
        let candidates = [exponent, exponent + 1].map(|e| {
            let block = with_exponent(values, e);
            (fit::block_loss(&block, Run { values, weights }), block)
        });
        let [(smaller, first), (larger, second)] = candidates;
        Some(if larger < smaller { second } else { first })
    }
}

fn with_exponent(values: &[f32], e: u8) -> MXFP4 {
    let mut block = MXFP4 { e, qs: [0; 16] };
    let inverse = fit::inverse(half_e8m0(e));
    for (i, &value) in values.iter().enumerate() {
        let magnitude = fit::nearest_index(&MIDPOINTS, (value * inverse).abs());
        // Values that round to zero have no sign.
        let sign = u8::from(value < 0.0 && magnitude > 0) << 3;
        block.qs[i % 16] |= (magnitude | sign) << (i / 16 * 4);
    }
    block
}

impl Block for NVFP4 {
    const ELEMENTS: usize = 64;

    fn dequantize(&self, out: &mut [f32]) {
        for (group, out) in out.chunks_exact_mut(16).enumerate() {
            let d = half_ue4m3(self.d[group]);
            for (i, value) in out.iter_mut().enumerate() {
                let code = (self.qs[group][i % 8] >> (i / 8 * 4)) & 15;
                *value = f32::from(CODEBOOK[usize::from(code)]) * d;
            }
        }
    }
}
