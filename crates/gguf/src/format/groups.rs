//! The blocks of quantised formats in one common form: codes with scales and minima for each 32
//! columns, for backends that repack weights. Formats whose codes are no small integers, or indices
//! of a small codebook, are not here.

use half::f16;

use super::group::{Group, GroupReader, Groups};
use super::runs::{CodedBlockReader, Readers};
use super::{Format, fp4, iq, iq4, k, low_bit, q};

/// The meaning of [`super::Groups::codes`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Codes {
    /// Numbers from -128, plus 128.
    Signed,
    /// Numbers from 0, with a minimum.
    Unsigned,
    /// Numbers from 0 to 15, with a minimum.
    Nibbles,
    /// Numbers from 0 to 3, with a minimum for each 16 columns.
    TwoBits,
    /// Indices of a codebook.
    Indices(&'static [i8; 16]),
}

/// The numbers of Q3_K's codes.
const CODEBOOK_Q3_K: [i8; 16] = [-4, -3, -2, -1, 0, 1, 2, 3, 0, 0, 0, 0, 0, 0, 0, 0];

/// How the groups of a dense format are read; none where it has no common form.
pub fn groups(format: Format) -> Option<(Codes, GroupReader)> {
    Some(match format {
        Format::Q8_0 => (Codes::Signed, q8_0),
        Format::Q6_K => (Codes::Signed, q6_k),
        Format::Q5_0 => (Codes::Unsigned, q5_0),
        Format::Q5_1 => (Codes::Unsigned, q5_1),
        Format::Q5_K => (Codes::Unsigned, q5_k),
        Format::Q4_0 => (Codes::Nibbles, q4_0),
        Format::Q4_1 => (Codes::Nibbles, q4_1),
        Format::Q4_K => (Codes::Nibbles, q4_k),
        Format::Q2_K => (Codes::TwoBits, q2_k),
        Format::Q3_K => (Codes::Indices(&CODEBOOK_Q3_K), q3_k),
        Format::NVFP4 => (Codes::Indices(&fp4::CODEBOOK), nvfp4),
        Format::IQ4_NL => (Codes::Indices(&iq4::CODEBOOK), iq4_nl),
        Format::IQ4_XS => (Codes::Indices(&iq4::CODEBOOK), iq4_xs),
        Format::MXFP4 => (Codes::Indices(&fp4::CODEBOOK), mxfp4),
        _ => {
            let readers = readers(format)?;
            (Codes::Indices(readers.codebook), readers.groups)
        }
    })
}

/// How the blocks of a format are read whose values are a scale for 256 columns times small
/// integers, and its codebook; none for other formats.
pub fn coded_blocks(format: Format) -> Option<(&'static [i8; 16], CodedBlockReader)> {
    let readers = readers(format)?;
    Some((readers.codebook, readers.block?))
}

/// The readers of all formats of runs.
fn readers(format: Format) -> Option<Readers> {
    Some(match format {
        Format::IQ1_S => Readers::of::<iq::IQ1_S>(),
        Format::IQ1_M => Readers::of::<iq::IQ1_M>(),
        Format::IQ2_XXS => Readers::of::<iq::IQ2_XXS>(),
        Format::IQ2_XS => Readers::of::<iq::IQ2_XS>(),
        Format::IQ2_S => Readers::of::<iq::IQ2_S>(),
        Format::IQ3_XXS => Readers::of::<iq::IQ3_XXS>(),
        Format::IQ3_S => Readers::of::<iq::IQ3_S>(),
        Format::Q1_0 => Readers::of::<low_bit::Q1_0>(),
        Format::Q2_0 => Readers::of::<low_bit::Q2_0>(),
        Format::TQ1_0 => Readers::of::<low_bit::TQ1_0>(),
        Format::TQ2_0 => Readers::of::<low_bit::TQ2_0>(),
        _ => return None,
    })
}

fn q4_0(row: &[u8], groups: &mut Groups) {
    groups.read(row, |b: &q::Q4_0| {
        let d = half(b.d);
        move |_| Group::of(d, -8.0 * d, nibbles(&b.qs))
    });
}

fn q4_1(row: &[u8], groups: &mut Groups) {
    groups.read(row, |b: &q::Q4_1| move |_| Group::of(half(b.d), half(b.m), nibbles(&b.qs)));
}

fn q5_0(row: &[u8], groups: &mut Groups) {
    groups.read(row, |b: &q::Q5_0| {
        let (d, codes) = (half(b.d), fifth_bits(nibbles(&b.qs), b.qh));
        move |_| Group::of(d, -16.0 * d, codes)
    });
}

fn q5_1(row: &[u8], groups: &mut Groups) {
    groups.read(row, |b: &q::Q5_1| {
        let codes = fifth_bits(nibbles(&b.qs), b.qh);
        move |_| Group::of(half(b.d), half(b.m), codes)
    });
}

fn q8_0(row: &[u8], groups: &mut Groups) {
    groups.read(row, |b: &q::Q8_0| {
        let codes = b.qs.map(|code| code as u8 ^ 128);
        move |_| Group::of(half(b.d), 0.0, codes)
    });
}

fn iq4_nl(row: &[u8], groups: &mut Groups) {
    groups.read(row, |b: &iq4::IQ4_NL| move |_| Group::of(half(b.d), 0.0, nibbles(&b.qs)));
}

fn mxfp4(row: &[u8], groups: &mut Groups) {
    groups.read(row, |b: &fp4::MXFP4| move |_| Group::of(fp4::half_e8m0(b.e), 0.0, nibbles(&b.qs)));
}

fn nvfp4(row: &[u8], groups: &mut Groups) {
    groups.read(row, |b: &fp4::NVFP4| {
        move |group| {
            // Of each 16 elements, the low nibbles come first.
            let code = |i: usize| b.qs[2 * group + i / 16][i % 8] >> (i % 16 / 8 * 4) & 15;
            let scales = [0, 1].map(|i| fp4::half_ue4m3(b.d[2 * group + i]));
            Group { scales, mins: [0.0; 2], codes: std::array::from_fn(code) }
        }
    });
}

fn iq4_xs(row: &[u8], groups: &mut Groups) {
    groups.read(row, |b: &iq4::IQ4_XS| {
        let (d, high) = (half(b.d), u16::from_le_bytes(b.scales_h));
        move |i| {
            let low = b.scales_l[i / 2] >> (i % 2 * 4) & 15;
            let scale = i16::from(low) | ((high >> (2 * i) & 3) as i16) << 4;
            Group::of(d * f32::from(scale - 32), 0.0, nibbles(&b.qs[i]))
        }
    });
}

fn q4_k(row: &[u8], groups: &mut Groups) {
    groups.read(row, |b: &k::Q4_K| with_minima((b.d, b.dmin), &b.scales, |i| b.codes(i)));
}

fn q5_k(row: &[u8], groups: &mut Groups) {
    groups.read(row, |b: &k::Q5_K| with_minima((b.d, b.dmin), &b.scales, |i| b.codes(i)));
}

fn q2_k(row: &[u8], groups: &mut Groups) {
    groups.read(row, |b: &k::Q2_K| {
        let (d, dmin) = (half(b.d), half(b.dmin));
        move |i| {
            let sixteens = [b.scales[2 * i], b.scales[2 * i + 1]];
            Group {
                scales: sixteens.map(|byte| d * f32::from(byte & 15)),
                mins: sixteens.map(|byte| -(dmin * f32::from(byte >> 4))),
                codes: b.codes(i),
            }
        }
    });
}

fn q3_k(row: &[u8], groups: &mut Groups) {
    groups.read(row, |b: &k::Q3_K| {
        let d = half(b.d);
        with_sixteens(move |sixteen| d * f32::from(b.group_scale(sixteen)), |i| b.codes(i))
    });
}

fn q6_k(row: &[u8], groups: &mut Groups) {
    groups.read(row, |b: &k::Q6_K| {
        let d = half(b.d);
        let codes = |i| b.codes(i).map(|code| code + 96);
        with_sixteens(move |sixteen| d * f32::from(b.scales[sixteen]), codes)
    });
}

fn half(bytes: [u8; 2]) -> f32 {
    f16::from_le_bytes(bytes).to_f32()
}

/// Elements 0 to 15 are the low halves, 16 to 31 the high ones.
fn nibbles(bytes: &[u8; 16]) -> [u8; 32] {
    std::array::from_fn(|i| bytes[i % 16] >> (i / 16 * 4) & 15)
}

fn fifth_bits(codes: [u8; 32], bits: [u8; 4]) -> [u8; 32] {
    std::array::from_fn(|i| codes[i] | (bits[i / 8] >> (i % 8) & 1) << 4)
}

/// The groups of a block of 256 with a scale and a minimum for each 32.
fn with_minima(
    (d, dmin): ([u8; 2], [u8; 2]),
    scales: &[u8; 12],
    codes: impl Fn(usize) -> [u8; 32],
) -> impl Fn(usize) -> Group {
    let (d, dmin) = (half(d), half(dmin));
    let [scales, mins] = k::scales_and_mins(scales);
    let scales = scales.map(|scale| d * f32::from(scale));
    let mins = mins.map(|min| -(dmin * f32::from(min)));
    move |i| Group::of(scales[i], mins[i], codes(i))
}

/// The groups of a block of 256 with a scale for each 16.
fn with_sixteens(
    scale: impl Fn(usize) -> f32,
    codes: impl Fn(usize) -> [u8; 32],
) -> impl Fn(usize) -> Group {
    move |i| {
        let scales = [scale(2 * i), scale(2 * i + 1)];
        Group { scales, mins: [0.0; 2], codes: codes(i) }
    }
}
