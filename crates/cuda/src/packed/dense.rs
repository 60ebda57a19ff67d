//! How rows become rows of packed tiles, in all layouts but the 2:4 ones. Values of a row are
//! divided by a power of two, so that they fit half precision whatever the file holds; the row's
//! scale multiplies it back. Only the exponent of a row's scale is stored, so it must be a power of
//! two. `kernels/packed.cuh` reads what is packed here.
//!
//! A chunk is 16 rows by 64 columns, codes before scales. Lane `4 (r % 8) + c` has columns `16 c`
//! to `16 c + 15` of rows `r` and `r + 8`. Scales are `[group of columns][r % 8][r / 8]`.
//!
//! ```text
//! layout   bytes  codes                                      scales of a group
//! F16       2048  halves [r / 8][column / 8 of 2][lane][8]   none
//! S8        1088  code + 128, bytes [r / 8][lane][16]        half, of 32 columns
//! S6x16      896  code + 32, as U4; two bits [lane][r / 8]   half, of 16 columns
//! U5         768  as U4; fifth bits [lane]                   half and minimum, of 32 columns
//! U4         640  nibbles [lane][r / 8][16], in pairs        half and minimum, of 32 columns
//! S4x16      640  code + 8, as U4                            half, of 16 columns
//! U2x16      512  pairs of two bits [lane][r / 8][16]        half and minimum, of 16 columns
//! Iq4        576  nibbles [lane][r / 8][16]                  half, of 32 columns
//! Codebook   672  the same; numbers + 64 behind the scales   half, of 16 columns
//! Fp4        544  sign and magnitude as halves have them     upper byte of a half, of 32 columns
//! ```

use bodkin_gguf::format::Group;
use bytemuck::{cast_slice, cast_slice_mut};
use half::f16;
use half::slice::HalfFloatSliceExt;

use super::layout::{MmaLayout, PackedLayout};
use crate::constants::{CHUNK_COLS, CODE_UNIT, INPUT_DIVISOR};

/// What a code of a 4-bit float stands for, as a half, is its doubled value times this.
const FLOAT_CODE_UNIT: f32 = 1.0 / (1 << 15) as f32;
/// The largest scale of a row's codes is stored as this, or up to twice as much.
const LARGEST_SCALE: f32 = (1 << 14) as f32;
/// What is added to numbers of a codebook, so that none is negative, nor above 127.
const CODEBOOK_OFFSET: i8 = 64;
/// Minima up to this many times the scales do not shrink the range of these.
const USUAL_MIN: f32 = 16.0;

/// The power of two that `largest` is to be divided by to come near 1.
pub(super) fn power_of_two(largest: f32) -> f32 {
    let exponent = (largest.to_bits() >> 23) as i32 & 255;
    if largest == 0.0 { 1.0 } else { 2f32.powi((exponent - 127).clamp(-120, 120)) }
}

/// The divisor of a row of codes, for its largest scale and what code 1 stands for. A file's scale
/// may be as large as floats are, and sixteen times the divisor must be finite, too. From 2^115 on,
/// scales are infinite.
pub(super) fn code_unit(largest: f32, one: f32) -> f32 {
    power_of_two(largest.min(2f32.powi(113))) / (LARGEST_SCALE * one)
}

/// The largest magnitude.
pub(super) fn max_abs(values: impl Iterator<Item = f32>) -> f32 {
    values.fold(0.0, |max: f32, x| max.max(x.abs()))
}

/// Copies row `r` of a tile as it is, and returns its scale.
pub(super) fn pack_f32(values: &[f32], r: usize, tile: &mut [u8]) -> f32 {
    let chunks = tile.chunks_exact_mut(PackedLayout::F32.chunk_bytes());
    for (chunk, values) in chunks.zip(values.chunks(CHUNK_COLS)) {
        let row = &mut chunk[4 * CHUNK_COLS * r..][..4 * values.len()];
        row.copy_from_slice(bytemuck::cast_slice(values));
    }
    1.0
}

/// Packs row `r` of a tile in half precision, and returns its scale.
pub(super) fn pack_f16(values: &[f32], r: usize, tile: &mut [u8]) -> f32 {
    let unit = power_of_two(max_abs(values.iter().copied()));
    let (g, high) = (r % 8, r / 8);
    let chunks = tile.chunks_exact_mut(MmaLayout::F16.chunk_bytes());
    let (mut divided, mut halves) = ([0.0; CHUNK_COLS], [f16::ZERO; CHUNK_COLS]);
    for (chunk, values) in chunks.zip(values.chunks(CHUNK_COLS)) {
        divided.iter_mut().zip(values).for_each(|(to, x)| *to = x / unit);
        halves.convert_from_f32_slice(&divided);
        for (eighth, halves) in halves[..values.len()].chunks(8).enumerate() {
            let (lane, i) = (4 * g + eighth / 2, eighth % 2);
            let to = &mut chunk[512 * (2 * high + i) + 16 * lane..][..2 * halves.len()];
            to.copy_from_slice(cast_slice(halves.reinterpret_cast()));
        }
    }
    unit * INPUT_DIVISOR
}

/// Packs row `r` of a tile as bytes with a scale for 32 columns, and returns its scale.
pub(super) fn pack_s8(row: &[Group], r: usize, tile: &mut [u8]) -> f32 {
    pack_codes_with_scales(MmaLayout::S8, row, r, tile)
}

/// Packs row `r` of a tile as six bits with a scale for 16 columns, and returns its scale.
pub(super) fn pack_s6x16(row: &[Group], r: usize, tile: &mut [u8]) -> f32 {
    pack_codes(MmaLayout::S6x16, row, r, tile, |scales, group, j, unit| {
        put_scales_of_16(scales, group, (r, j), unit);
    })
}

/// Packs row `r` of a tile as five bits with a scale and a minimum for 32 columns, and returns its
/// scale.
pub(super) fn pack_u5(row: &[Group], r: usize, tile: &mut [u8]) -> f32 {
    pack_codes(MmaLayout::U5, row, r, tile, |scales, group, j, unit| {
        put_scale_and_min(scales, group, (r, j), unit);
    })
}

/// Packs row `r` of a tile as four bits with a scale and a minimum for 32 columns, and returns its
/// scale.
pub(super) fn pack_u4(row: &[Group], r: usize, tile: &mut [u8]) -> f32 {
    pack_codes(MmaLayout::U4, row, r, tile, |scales, group, j, unit| {
        put_scale_and_min(scales, group, (r, j), unit);
    })
}

/// Packs row `r` of a tile as two bits with a scale and a minimum for 16 columns, and returns its
/// scale.
pub(super) fn pack_u2x16(row: &[Group], r: usize, tile: &mut [u8]) -> f32 {
    pack_codes(MmaLayout::U2x16, row, r, tile, |scales, group, j, unit| {
        for (n, (&scale, &min)) in group.scales.iter().zip(&group.mins).enumerate() {
            let pair = 2 * (16 * j + 8 * n + r % 8) + r / 8;
            scales[2 * pair] = stored_scale(scale, unit);
            scales[2 * pair + 1] = f16::from_f32(min / unit).to_bits();
        }
    })
}

/// Packs row `r` of a tile as codes of IQ4's codebook with a scale for 32 columns, and returns its
/// scale.
pub(super) fn pack_iq4(row: &[Group], r: usize, tile: &mut [u8]) -> f32 {
    pack_codes_with_scales(MmaLayout::Iq4, row, r, tile)
}

/// Packs row `r` of a tile with a scale for 16 columns, and returns its scale: as the numbers of
/// the codebook, if they are signed nibbles, or else as its indices. Then each chunk has the
/// codebook, so that kernels read it with the codes.
pub(super) fn pack_indices(
    layout: MmaLayout,
    row: &mut [Group],
    book: &[i8; 16],
    r: usize,
    tile: &mut [u8],
) -> f32 {
    if layout == MmaLayout::S4x16 {
        let codes = row.iter_mut().flat_map(|group| &mut group.codes);
        codes.for_each(|code| *code = (book[usize::from(*code)] + 8) as u8);
    } else if r == 0 {
        for chunk in tile.chunks_exact_mut(layout.chunk_bytes()) {
            // Behind codes and scales; the rest of the chunk makes it a multiple of 32 bytes.
            let numbers = chunk[640..656].iter_mut().zip(book);
            numbers.for_each(|(to, &number)| *to = (number + CODEBOOK_OFFSET) as u8);
        }
    }
    pack_codes(layout, row, r, tile, |scales, group, j, unit| {
        put_scales_of_16(scales, group, (r, j), unit);
    })
}

/// Packs row `r` of a tile as 4-bit floats with a power of two for 32 columns, and returns its
/// scale.
pub(super) fn pack_fp4(row: &[Group], r: usize, tile: &mut [u8]) -> f32 {
    pack_codes(MmaLayout::Fp4, row, r, tile, |scales, group, j, unit| {
        let scale = f16::from_f32(group.scales[0] / unit / FLOAT_CODE_UNIT);
        // Of a power of two, the lower byte is zero.
        let [_, upper] = scale.to_le_bytes();
        cast_slice_mut(scales)[2 * (8 * j + r % 8) + r / 8] = upper;
    })
}

/// Packs row `r` of a tile as codes with a scale for 32 columns, and returns its scale.
fn pack_codes_with_scales(layout: MmaLayout, row: &[Group], r: usize, tile: &mut [u8]) -> f32 {
    pack_codes(layout, row, r, tile, |scales, group, j, unit| {
        scales[2 * (8 * j + r % 8) + r / 8] = stored_scale(group.scales[0], unit);
    })
}

/// A scale of codes in half precision.
fn stored_scale(scale: f32, unit: f32) -> u16 {
    f16::from_f32(scale / unit / CODE_UNIT).to_bits()
}

/// Writes the scales of group `j` of a chunk for row `r`.
fn put_scales_of_16(scales: &mut [u16], group: &Group, (r, j): (usize, usize), unit: f32) {
    for (n, &scale) in group.scales.iter().enumerate() {
        scales[2 * (16 * j + 8 * n + r % 8) + r / 8] = stored_scale(scale, unit);
    }
}

/// Writes scale and minimum of group `j` of a chunk for row `r`.
fn put_scale_and_min(scales: &mut [u16], group: &Group, (r, j): (usize, usize), unit: f32) {
    let pair = 2 * (8 * j + r % 8) + r / 8;
    scales[2 * pair] = stored_scale(group.scales[0], unit);
    scales[2 * pair + 1] = f16::from_f32(group.mins[0] / unit).to_bits();
}

/// Packs row `r` of a tile, and returns its scale. `put_scales` writes the scales of group `j` of a
/// chunk, divided by the row's unit.
fn pack_codes(
    layout: MmaLayout,
    row: &[Group],
    r: usize,
    tile: &mut [u8],
    put_scales: impl Fn(&mut [u16], &Group, usize, f32),
) -> f32 {
    let numbers = row
        .iter()
        .flat_map(|g| [g.scales[0], g.scales[1], g.mins[0] / USUAL_MIN, g.mins[1] / USUAL_MIN]);
    let one = if layout == MmaLayout::Fp4 { FLOAT_CODE_UNIT } else { CODE_UNIT };
    let unit = code_unit(max_abs(numbers), one);
    let chunks = tile.chunks_exact_mut(layout.chunk_bytes()).zip(row.chunks(2));
    let put_scales = |scales: &mut [u16], group: &Group, j| put_scales(scales, group, j, unit);
    match layout {
        MmaLayout::U4 | MmaLayout::S4x16 => put_all(chunks, 512, r, put_nibble_pairs, put_scales),
        MmaLayout::Iq4 | MmaLayout::Codebook => put_all(chunks, 512, r, put_nibbles, put_scales),
        MmaLayout::U2x16 => put_all(chunks, 256, r, put_twos, put_scales),
        MmaLayout::U5 => put_all(chunks, 640, r, put_fives, put_scales),
        MmaLayout::S6x16 => put_all(chunks, 768, r, put_sixes, put_scales),
        MmaLayout::Fp4 => put_all(chunks, 512, r, put_floats, put_scales),
        _ => put_all(chunks, 1024, r, put_bytes, put_scales),
    }
    unit * INPUT_DIVISOR
}

/// Writes the groups of a row to its chunks: of each lane 16 codes, for the lower or upper eight
/// rows of the tile, and behind all codes the scales.
fn put_all<'a>(
    chunks: impl Iterator<Item = (&'a mut [u8], &'a [Group])>,
    code_bytes: usize,
    r: usize,
    put_codes: impl Fn(&mut [u8], usize, usize, &[u8; 16]),
    put_scales: impl Fn(&mut [u16], &Group, usize),
) {
    for (chunk, groups) in chunks {
        let (codes, scales) = chunk.split_at_mut(code_bytes);
        for (j, group) in groups.iter().enumerate() {
            let (parts, _) = group.codes.as_chunks();
            for (part, half) in parts.iter().enumerate() {
                put_codes(codes, 4 * (r % 8) + 2 * j + part, r / 8, half);
            }
            put_scales(cast_slice_mut(scales), group, j);
        }
    }
}

fn put_bytes(chunk: &mut [u8], lane: usize, high: usize, codes: &[u8; 16]) {
    chunk[512 * high + 16 * lane..][..16].copy_from_slice(codes);
}

/// Neighbours lie 16 bits apart, in the two halves of a register.
fn put_nibble_pairs(chunk: &mut [u8], lane: usize, high: usize, codes: &[u8; 16]) {
    put_words(chunk, lane, high, codes, |i, code| code << (4 * (i / 2 + 4 * (i % 2))));
}

/// Neighbours lie 16 bits apart, in one word.
fn put_twos(chunk: &mut [u8], lane: usize, high: usize, codes: &[u8; 16]) {
    let codes = codes.iter().enumerate();
    let word = codes.fold(0, |word, (i, &code)| word | u32::from(code) << (i / 2 * 2 + i % 2 * 16));
    chunk[8 * lane + 4 * high..][..4].copy_from_slice(&word.to_le_bytes());
}

/// Nibbles in pairs, and a word with the fifth bits of the lane's codes. Those of the four steps of
/// `mma` and both rows are shifted above the nibbles together.
fn put_fives(chunk: &mut [u8], lane: usize, high: usize, codes: &[u8; 16]) {
    put_above(chunk, (lane, high), codes, 512 + 4 * lane, |step| {
        let i = 2 * step + high;
        i + i / 4 * 4
    });
}

/// The same with a word of two bits for each row. The reader's codes are numbers from -32 to 31,
/// plus 128.
fn put_sixes(chunk: &mut [u8], lane: usize, high: usize, codes: &[u8; 16]) {
    let codes: [u8; 16] = std::array::from_fn(|i| codes[i].wrapping_sub(128 - 32));
    debug_assert!(codes.iter().all(|&code| code < 64));
    let word = 512 + 8 * lane + 4 * high;
    put_above(chunk, (lane, high), &codes, word, |step| 2 * step + step / 2 * 4);
}

/// Writes the nibbles of codes in pairs, and what they have above to a word, from a place for each
/// step of `mma` on.
fn put_above(
    chunk: &mut [u8],
    (lane, high): (usize, usize),
    codes: &[u8; 16],
    word: usize,
    place: impl Fn(usize) -> usize,
) {
    let nibbles: [u8; 16] = std::array::from_fn(|i| codes[i] & 15);
    put_nibble_pairs(chunk, lane, high, &nibbles);
    let above = codes.iter().enumerate().fold(0, |bits, (i, &code)| {
        // Of a step's pairs, the second is four bits further.
        let at = place(i / 4) + i / 2 % 2 * 4 + i % 2 * 16;
        bits | u32::from(code >> 4) << at
    });
    let word = &mut chunk[word..word + 4];
    let bits = u32::from_le_bytes(word.try_into().expect("four bytes")) | above;
    word.copy_from_slice(&bits.to_le_bytes());
}

fn put_nibbles(chunk: &mut [u8], lane: usize, high: usize, codes: &[u8; 16]) {
    put_words(chunk, lane, high, codes, |i, code| code << (4 * i));
}

/// Neighbours lie 16 bits apart; a half has four signs above four magnitudes.
fn put_floats(chunk: &mut [u8], lane: usize, high: usize, codes: &[u8; 16]) {
    const SIGNS: [u32; 4] = [15, 12, 14, 13];
    const MAGNITUDES: [u32; 4] = [9, 6, 3, 0];
    put_words(chunk, lane, high, codes, |i, code| {
        ((code >> 3) << SIGNS[i / 2] | (code & 7) << MAGNITUDES[i / 2]) << (16 * (i % 2))
    });
}

/// Writes 16 codes of a lane as two words. `place` shifts code `i` of a word to its bits.
fn put_words(
    chunk: &mut [u8],
    lane: usize,
    high: usize,
    codes: &[u8; 16],
    place: impl Fn(usize, u32) -> u32,
) {
    let words = &mut chunk[16 * lane + 8 * high..][..8];
    for (word, codes) in words.chunks_exact_mut(4).zip(codes.chunks_exact(8)) {
        let codes = codes.iter().map(|&code| u32::from(code)).enumerate();
        let bits = codes.fold(0, |bits, (i, code)| bits | place(i, code));
        word.copy_from_slice(&bits.to_le_bytes());
    }
}
