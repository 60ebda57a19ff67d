//! The K formats: super-blocks of 256 in groups of 16 or 32. The scales of the groups are
//! quantised, with one scale for the whole block.

use bytemuck::{Pod, Zeroable};

use super::block::{Block, scale};
use super::scale_search as fit;
use super::scale_search::{Run, Steps};

const ELEMENTS: usize = 256;

/// 2 bits in 16 groups of 16: `d * sc * q - dmin * m`.
#[repr(C)]
#[derive(Copy, Clone, Debug, Pod, Zeroable)]
pub struct Q2_K {
    /// Per group: the scale `sc` in the low nibble, the minimum `m` in the high one.
    pub scales: [u8; 16],
    /// Codes, four a byte; see [`Q2_K::codes`].
    pub qs: [u8; 64],
    /// Scale of the scales, f16.
    pub d: [u8; 2],
    /// Scale of the minima, f16.
    pub dmin: [u8; 2],
}

/// 3 bits in 16 groups of 16: `d * (sc - 32) * (q - 4)`.
#[repr(C)]
#[derive(Copy, Clone, Debug, Pod, Zeroable)]
pub struct Q3_K {
    /// Third bits; see [`Q3_K::codes`].
    pub hmask: [u8; 32],
    /// Lower two bits, four a byte.
    pub qs: [u8; 64],
    /// Sixteen scales of 6 bits; see [`Q3_K::group_scale`].
    pub scales: [u8; 12],
    /// Scale of the scales, f16.
    pub d: [u8; 2],
}

/// 4 bits in 8 groups of 32: `d * sc * q - dmin * m`.
#[repr(C)]
#[derive(Copy, Clone, Debug, Pod, Zeroable)]
pub struct Q4_K {
    /// Scale of the scales, f16.
    pub d: [u8; 2],
    /// Scale of the minima, f16.
    pub dmin: [u8; 2],
    /// Eight scales and eight minima of 6 bits; see [`scales_and_mins`].
    pub scales: [u8; 12],
    /// Codes, two a byte; see [`Q4_K::codes`].
    pub qs: [u8; 128],
}

/// 5 bits in 8 groups of 32: `d * sc * q - dmin * m`.
#[repr(C)]
#[derive(Copy, Clone, Debug, Pod, Zeroable)]
pub struct Q5_K {
    /// Scale of the scales, f16.
    pub d: [u8; 2],
    /// Scale of the minima, f16.
    pub dmin: [u8; 2],
    /// Eight scales and eight minima of 6 bits; see [`scales_and_mins`].
    pub scales: [u8; 12],
    /// Fifth bits; see [`Q5_K::codes`].
    pub qh: [u8; 32],
    /// Lower four bits, two a byte.
    pub qs: [u8; 128],
}

/// 6 bits in 16 groups of 16: `d * sc * (q - 32)`.
#[repr(C)]
#[derive(Copy, Clone, Debug, Pod, Zeroable)]
pub struct Q6_K {
    /// Lower four bits, two a byte; see [`Q6_K::codes`].
    pub ql: [u8; 128],
    /// Upper two bits, four a byte.
    pub qh: [u8; 64],
    /// Scales of the groups.
    pub scales: [i8; 16],
    /// Scale of the scales, f16.
    pub d: [u8; 2],
}

/// 8 bits, `d * q`, with the sums that kernels of the other K formats need: for activations.
#[repr(C)]
#[derive(Copy, Clone, Debug, Pod, Zeroable)]
pub struct Q8_K {
    /// Scale, f32.
    pub d: [u8; 4],
    /// Codes.
    pub qs: [i8; 256],
    /// Sums of the codes of each 16 elements, i16.
    pub bsums: [[u8; 2]; 16],
}

/// The scales and the minima of the eight groups of [`Q4_K`] and [`Q5_K`]. Groups 0 to 3 use the
/// lower six bits of a byte each. The lower four bits of the other groups share bytes 8 to 11, and
/// their upper two bits are those of bytes 0 to 7.
pub fn scales_and_mins(scales: &[u8; 12]) -> [[u8; 8]; 2] {
    let (words, _) = scales.as_chunks();
    let [a, b, c] = [0, 1, 2].map(|i: usize| u32::from_le_bytes(words[i]));
    let (low, four, two) = (0x3f3f_3f3f, 0x0f0f_0f0f, 0x0303_0303);
    let both = |lower: u32, fours: u32| {
        let upper = (fours & four) | (lower >> 6 & two) << 4;
        (u64::from(lower & low) | u64::from(upper) << 32).to_le_bytes()
    };
    [both(a, c), both(b, c >> 4)]
}

/// Stores scale and minimum of a group, for [`scales_and_mins`].
fn put_scale_and_min(scales: &mut [u8; 12], group: usize, scale: u8, min: u8) {
    if group < 4 {
        scales[group] |= scale;
        scales[group + 4] |= min;
    } else {
        scales[group + 4] = (scale & 15) | ((min & 15) << 4);
        scales[group - 4] |= (scale >> 4) << 6;
        scales[group] |= (min >> 4) << 6;
    }
}

/// Two bits of each of 32 elements. A byte holds four, which are 32 apart.
fn two_bits(bytes: &[u8; 64], part: usize) -> [u8; 32] {
    bytes.as_chunks().0[part / 4].map(|byte| (byte >> (part % 4 * 2)) & 3)
}

/// Four bits of each of 32 elements. A byte holds two, which are 32 apart.
fn nibbles(bytes: &[u8; 128], part: usize) -> [u8; 32] {
    bytes.as_chunks().0[part / 2].map(|byte| (byte >> (part % 2 * 4)) & 15)
}

impl Q2_K {
    /// The codes of 32 elements, 0 to 3. A byte holds elements that are 32 apart.
    pub fn codes(&self, part: usize) -> [u8; 32] {
        two_bits(&self.qs, part)
    }

    fn put_code(&mut self, i: usize, code: u8) {
        self.qs[i / 128 * 32 + i % 32] |= code << (i % 128 / 32 * 2);
    }
}

impl Q3_K {
    /// The codes of 32 elements, 0 to 7. Bytes of `qs` as in [`Q2_K`]; a byte of `hmask` holds the
    /// third bits of eight elements that are 32 apart.
    pub fn codes(&self, part: usize) -> [u8; 32] {
        let low = two_bits(&self.qs, part);
        std::array::from_fn(|i| low[i] | ((self.hmask[i] >> part) & 1) << 2)
    }

    /// The scale of group `group` of 16, -32 to 31. The lower four bits are nibbles of the first
    /// eight bytes, the upper two bits are in the last four bytes.
    pub fn group_scale(&self, group: usize) -> i8 {
        let low = (self.scales[group % 8] >> (group / 8 * 4)) & 15;
        let high = (self.scales[8 + group % 4] >> (group / 4 * 2)) & 3;
        (low | (high << 4)) as i8 - 32
    }

    fn put_code(&mut self, i: usize, code: u8) {
        self.qs[i / 128 * 32 + i % 32] |= (code & 3) << (i % 128 / 32 * 2);
        self.hmask[i % 32] |= (code >> 2) << (i / 32);
    }

    fn put_group_scale(&mut self, group: usize, scale: i8) {
        let code = (scale + 32) as u8;
        self.scales[group % 8] |= (code & 15) << (group / 8 * 4);
        self.scales[8 + group % 4] |= (code >> 4) << (group / 4 * 2);
    }
}

impl Q4_K {
    /// The codes of 32 elements, 0 to 15. A byte holds two elements that are 32 apart.
    pub fn codes(&self, part: usize) -> [u8; 32] {
        nibbles(&self.qs, part)
    }

    fn put_code(&mut self, i: usize, code: u8) {
        self.qs[i / 64 * 32 + i % 32] |= code << (i % 64 / 32 * 4);
    }
}

impl Q5_K {
    /// The codes of 32 elements, 0 to 31. Bytes of `qs` as in [`Q4_K`]; a byte of `qh` holds the
    /// fifth bits of eight elements that are 32 apart.
    pub fn codes(&self, part: usize) -> [u8; 32] {
        let low = nibbles(&self.qs, part);
        std::array::from_fn(|i| low[i] | ((self.qh[i] >> part) & 1) << 4)
    }

    fn put_code(&mut self, i: usize, code: u8) {
        self.qs[i / 64 * 32 + i % 32] |= (code & 15) << (i % 64 / 32 * 4);
        self.qh[i % 32] |= (code >> 4) << (i / 32);
    }
}

impl Q6_K {
    /// The codes of 32 elements, 0 to 63. A byte of `ql` holds elements that are 64 apart, a byte
    /// of `qh` those that are 32 apart.
    pub fn codes(&self, part: usize) -> [u8; 32] {
        let low: &[u8; 32] = &self.ql.as_chunks().0[part / 4 * 2 + part % 2];
        let high = two_bits(&self.qh, part);
        std::array::from_fn(|i| (low[i] >> (part % 4 / 2 * 4)) & 15 | high[i] << 4)
    }

    fn put_code(&mut self, i: usize, code: u8) {
        let (half, j) = (i / 128, i % 128);
        self.ql[half * 64 + j % 64] |= (code & 15) << (j / 64 * 4);
        self.qh[half * 32 + j % 32] |= (code >> 4) << (j / 32 * 2);
    }
}

/// Writes the values of a block: `value` gives one by the number of its sixteen elements and its
/// code.
fn put_values(
    out: &mut [f32],
    codes: impl Fn(usize) -> [u8; 32],
    value: impl Fn(usize, u8) -> f32,
) {
    for (part, out) in out.chunks_exact_mut(32).enumerate() {
        for (i, (to, code)) in out.iter_mut().zip(codes(part)).enumerate() {
            *to = value(2 * part + i / 16, code);
        }
    }
}

impl Block for Q2_K {
    const ELEMENTS: usize = ELEMENTS;

    fn dequantize(&self, out: &mut [f32]) {
        let (d, dmin) = (scale(self.d), scale(self.dmin));
        put_values(
            out,
            |part| self.codes(part),
            |group, code| {
                let group = self.scales[group];
                let (sc, m) = (d * f32::from(group & 15), dmin * f32::from(group >> 4));
                sc * f32::from(code) - m
            },
        );
    }

    fn quantize(values: &[f32], weights: &[f32]) -> Option<Self> {
        let groups = fit::groups::<16>(Run { values, weights }, 3, 15);
        let mut block = Q2_K { d: groups.d, dmin: groups.dmin, ..Self::zeroed() };
        block.scales = groups.steps.map(|(sc, m)| sc | (m << 4));
        for (i, code) in groups.codes(values, 3).enumerate() {
            block.put_code(i, code);
        }
        Some(block)
    }
}

impl Block for Q3_K {
    const ELEMENTS: usize = ELEMENTS;

    fn dequantize(&self, out: &mut [f32]) {
        let d = scale(self.d);
        put_values(
            out,
            |part| self.codes(part),
            |group, code| d * f32::from(self.group_scale(group)) * f32::from(code as i8 - 4),
        );
    }

    fn quantize(values: &[f32], weights: &[f32]) -> Option<Self> {
        let steps = Steps { lowest: -32, radius: 16 };
        let scales = fit::symmetric_scales(Run { values, weights }, 4, steps);
        let mut block = Q3_K { d: scales.d, ..Self::zeroed() };
        for (group, &sc) in scales.steps.iter().enumerate() {
            block.put_group_scale(group, sc);
        }
        for (i, code) in scales.codes(values, 4).enumerate() {
            block.put_code(i, code);
        }
        Some(block)
    }
}

/// Implements [`Block`] for 8 groups of 32 with [`scales_and_mins`] and codes from 0 to `top`.
macro_rules! affine_groups {
    ($($name:ident $top:literal;)*) => {$(
        impl Block for $name {
            const ELEMENTS: usize = ELEMENTS;

            fn dequantize(&self, out: &mut [f32]) {
                let (d, dmin) = (scale(self.d), scale(self.dmin));
                let [scales, mins] = scales_and_mins(&self.scales);
                put_values(out, |part| self.codes(part), |sixteen, code| {
                    let (sc, m) = (scales[sixteen / 2], mins[sixteen / 2]);
                    d * f32::from(sc) * f32::from(code) - dmin * f32::from(m)
                });
            }

            fn quantize(values: &[f32], weights: &[f32]) -> Option<Self> {
                let groups = fit::groups::<8>(Run { values, weights }, $top, 63);
                let mut block = $name { d: groups.d, dmin: groups.dmin, ..Self::zeroed() };
                for (group, (sc, m)) in groups.steps.into_iter().enumerate() {
                    put_scale_and_min(&mut block.scales, group, sc, m);
                }
                for (i, code) in groups.codes(values, $top).enumerate() {
                    block.put_code(i, code);
                }
                Some(block)
            }
        }
    )*};
}

affine_groups! {
    Q4_K 15;
    Q5_K 31;
}

impl Block for Q6_K {
    const ELEMENTS: usize = ELEMENTS;

    fn dequantize(&self, out: &mut [f32]) {
        let d = scale(self.d);
        put_values(
            out,
            |part| self.codes(part),
            |group, code| d * f32::from(self.scales[group]) * f32::from(code as i8 - 32),
        );
    }

    fn quantize(values: &[f32], weights: &[f32]) -> Option<Self> {
        let steps = Steps { lowest: -128, radius: 2 };
        let scales = fit::symmetric_scales(Run { values, weights }, 32, steps);
        let mut block = Q6_K { d: scales.d, scales: scales.steps, ..Self::zeroed() };
        for (i, code) in scales.codes(values, 32).enumerate() {
            block.put_code(i, code);
        }
        Some(block)
    }
}

impl Block for Q8_K {
    const ELEMENTS: usize = ELEMENTS;

    fn dequantize(&self, out: &mut [f32]) {
        let d = f32::from_le_bytes(self.d);
        for (value, &code) in out.iter_mut().zip(&self.qs) {
            *value = d * f32::from(code);
        }
    }

    fn quantize(values: &[f32], _: &[f32]) -> Option<Self> {
        let d = fit::largest(values).abs() / 127.0;
        let mut block = Q8_K { d: d.to_le_bytes(), ..Self::zeroed() };
        let inverse = fit::inverse(d);
        for (code, &value) in block.qs.iter_mut().zip(values) {
            *code = fit::round(value * inverse, -127, 127);
        }
        for (sum, codes) in block.bsums.iter_mut().zip(block.qs.chunks_exact(16)) {
            *sum = codes.iter().map(|&code| i16::from(code)).sum::<i16>().to_le_bytes();
        }
        Some(block)
    }
}
