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
use bytemuck::{Pod, Zeroable, cast_slice, cast_slice_mut};
use half::f16;
use half::slice::{HalfBitsSliceExt, HalfFloatSliceExt};

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
    values.fold(0.0, larger)
}

/// The magnitude of `x` if it is larger: a vector instruction, which `f32::max` is not.
fn larger(max: f32, x: f32) -> f32 {
    if x.abs() > max { x.abs() } else { max }
}

/// As [`max_abs`], of a long row: of every eighth value first, as compilers keep the order.
fn max_abs_of_row(values: &[f32]) -> f32 {
    let (eights, rest) = values.as_chunks::<8>();
    let most = eights.iter().fold([0.0; 8], |most: [f32; 8], values| {
        std::array::from_fn(|i| larger(most[i], values[i]))
    });
    max_abs(most.into_iter().chain(rest.iter().copied()))
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
    let unit = power_of_two(max_abs_of_row(values));
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
    pack_codes(MmaLayout::S6x16, row, r, tile, put_scales_of_16)
}

/// Packs row `r` of a tile as five bits with a scale and a minimum for 32 columns, and returns its
/// scale.
pub(super) fn pack_u5(row: &[Group], r: usize, tile: &mut [u8]) -> f32 {
    pack_codes(MmaLayout::U5, row, r, tile, put_scale_and_min)
}

/// Packs row `r` of a tile as four bits with a scale and a minimum for 32 columns, and returns its
/// scale.
pub(super) fn pack_u4(row: &[Group], r: usize, tile: &mut [u8]) -> f32 {
    pack_codes(MmaLayout::U4, row, r, tile, put_scale_and_min)
}

/// Packs row `r` of a tile as two bits with a scale and a minimum for 16 columns, and returns its
/// scale.
pub(super) fn pack_u2x16(row: &[Group], r: usize, tile: &mut [u8]) -> f32 {
    pack_codes(MmaLayout::U2x16, row, r, tile, |to, stored, (r, j)| {
        for n in 0..2 {
            let pair = 2 * (16 * j + 8 * n + r % 8) + r / 8;
            to[2 * pair] = stored.scales[n];
            to[2 * pair + 1] = stored.mins[n];
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
    pack_codes(layout, row, r, tile, put_scales_of_16)
}

/// Packs row `r` of a tile as 4-bit floats with a power of two for 32 columns, and returns its
/// scale.
pub(super) fn pack_fp4(row: &[Group], r: usize, tile: &mut [u8]) -> f32 {
    pack_codes(MmaLayout::Fp4, row, r, tile, |to, stored, (r, j)| {
        // Of a power of two, the lower byte is zero.
        let [_, upper] = stored.scales[0].to_le_bytes();
        cast_slice_mut(to)[2 * (8 * j + r % 8) + r / 8] = upper;
    })
}

/// Packs row `r` of a tile as codes with a scale for 32 columns, and returns its scale.
fn pack_codes_with_scales(layout: MmaLayout, row: &[Group], r: usize, tile: &mut [u8]) -> f32 {
    pack_codes(layout, row, r, tile, |to, stored, (r, j)| {
        to[2 * (8 * j + r % 8) + r / 8] = stored.scales[0];
    })
}

/// Scales and minima of a group, divided by the row's unit, in half precision.
#[derive(Clone, Copy, Default, Pod, Zeroable)]
#[repr(C)]
struct Stored {
    scales: [u16; 2],
    mins: [u16; 2],
}

/// Those of a row's groups. `one` is what code 1 stands for.
fn stored(row: &[Group], unit: f32, one: f32) -> Vec<Stored> {
    let numbers = |group: &Group| {
        let Group { scales: [a, b], mins: [c, d], .. } = *group;
        [a / unit / one, b / unit / one, c / unit, d / unit]
    };
    let numbers: Vec<[f32; 4]> = row.iter().map(numbers).collect();
    let mut stored = vec![Stored::default(); row.len()];
    let halves: &mut [u16] = cast_slice_mut(&mut stored);
    halves.reinterpret_cast_mut::<f16>().convert_from_f32_slice(numbers.as_flattened());
    stored
}

/// Writes the scales of group `j` of a chunk for row `r`.
fn put_scales_of_16(to: &mut [u16], stored: Stored, (r, j): (usize, usize)) {
    for (n, scale) in stored.scales.into_iter().enumerate() {
        to[2 * (16 * j + 8 * n + r % 8) + r / 8] = scale;
    }
}

/// Writes scale and minimum of group `j` of a chunk for row `r`.
fn put_scale_and_min(to: &mut [u16], stored: Stored, (r, j): (usize, usize)) {
    let pair = 2 * (8 * j + r % 8) + r / 8;
    to[2 * pair] = stored.scales[0];
    to[2 * pair + 1] = stored.mins[0];
}

/// Packs row `r` of a tile, and returns its scale. `put_scales` writes what is stored of group `j`
/// of a chunk.
fn pack_codes(
    layout: MmaLayout,
    row: &[Group],
    r: usize,
    tile: &mut [u8],
    put_scales: impl Fn(&mut [u16], Stored, (usize, usize)),
) -> f32 {
    let largest = row.iter().fold([0.0; 4], |largest: [f32; 4], group| {
        let Group { scales: [a, b], mins: [c, d], .. } = *group;
        let numbers = [a, b, c / USUAL_MIN, d / USUAL_MIN];
        std::array::from_fn(|i| larger(largest[i], numbers[i]))
    });
    let one = if layout == MmaLayout::Fp4 { FLOAT_CODE_UNIT } else { CODE_UNIT };
    let unit = code_unit(max_abs(largest.into_iter()), one);
    let stored = stored(row, unit, one);
    let groups = row.chunks(2).zip(stored.chunks(2));
    let chunks = tile.chunks_exact_mut(layout.chunk_bytes()).zip(groups);
    let put_scales = |to: &mut [u8], stored: &[Stored]| {
        let stored = stored.iter().enumerate();
        stored.for_each(|(j, stored)| put_scales(cast_slice_mut(to), *stored, (r, j)));
    };
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
    chunks: impl Iterator<Item = (&'a mut [u8], (&'a [Group], &'a [Stored]))>,
    code_bytes: usize,
    r: usize,
    put_codes: impl Fn(&mut [u8], usize, usize, &[u8; 16]),
    put_scales: impl Fn(&mut [u8], &[Stored]),
) {
    for (chunk, (groups, stored)) in chunks {
        let (codes, scales) = chunk.split_at_mut(code_bytes);
        for (j, group) in groups.iter().enumerate() {
            let (parts, _) = group.codes.as_chunks();
            for (part, half) in parts.iter().enumerate() {
                put_codes(codes, 4 * (r % 8) + 2 * j + part, r / 8, half);
            }
        }
        put_scales(scales, stored);
    }
}

fn put_bytes(chunk: &mut [u8], lane: usize, high: usize, codes: &[u8; 16]) {
    chunk[512 * high + 16 * lane..][..16].copy_from_slice(codes);
}

/// Neighbours lie 16 bits apart, in the two halves of a register.
fn put_nibble_pairs(chunk: &mut [u8], lane: usize, high: usize, codes: &[u8; 16]) {
    put_words(chunk, lane, high, eights(codes).map(nibble_pairs));
}

/// Neighbours lie 16 bits apart, in one word.
fn put_twos(chunk: &mut [u8], lane: usize, high: usize, codes: &[u8; 16]) {
    let [first, second] = eights(codes).map(|codes| {
        let pairs = nibble_pairs(codes);
        let fours = (pairs | pairs >> 2) & 0x0f0f_0f0f;
        (fours | fours >> 4) & 0x00ff_00ff
    });
    chunk[8 * lane + 4 * high..][..4].copy_from_slice(&(first | second << 8).to_le_bytes());
}

/// Nibbles in pairs, and a word with the fifth bits of the lane's codes. Those of the four steps of
/// `mma` and both rows are shifted above the nibbles together.
fn put_fives(chunk: &mut [u8], lane: usize, high: usize, codes: &[u8; 16]) {
    put_above(chunk, (lane, high), eights(codes), 512 + 4 * lane, high);
}

/// The same with a word of two bits for each row. The reader's codes are numbers from -32 to 31,
/// plus 128.
fn put_sixes(chunk: &mut [u8], lane: usize, high: usize, codes: &[u8; 16]) {
    debug_assert!(codes.iter().all(|code| (96..160).contains(code)));
    let codes = eights(codes).map(|codes| codes.wrapping_sub(0x6060_6060_6060_6060));
    put_above(chunk, (lane, high), codes, 512 + 8 * lane + 4 * high, 0);
}

/// Writes the nibbles of codes in pairs, and what they have above to the word at `word`, from bit
/// `place` on: of each eight codes a byte for even and one for odd ones, in which those of the two
/// pairs of a step of `mma` are four bits apart.
fn put_above(
    chunk: &mut [u8],
    (lane, high): (usize, usize),
    codes: [u64; 2],
    word: usize,
    place: usize,
) {
    const NIBBLES: u64 = 0x0f0f_0f0f_0f0f_0f0f;
    put_words(chunk, lane, high, codes.map(|codes| nibble_pairs(codes & NIBBLES)));
    let [first, second] = codes.map(|codes| {
        let pairs = nibble_pairs(codes >> 4 & NIBBLES);
        (pairs | pairs >> 6) & 0x00ff_00ff
    });
    let word = &mut chunk[word..word + 4];
    let bits = u32::from_le_bytes(word.try_into().expect("four bytes"));
    word.copy_from_slice(&(bits | (first | second << 8) << place).to_le_bytes());
}

fn put_nibbles(chunk: &mut [u8], lane: usize, high: usize, codes: &[u8; 16]) {
    let nibbles = |codes: u64| {
        let bytes = (codes | codes >> 4) & 0x00ff_00ff_00ff_00ff;
        let halves = (bytes | bytes >> 8) & 0x0000_ffff_0000_ffff;
        (halves | halves >> 16) as u32
    };
    put_words(chunk, lane, high, eights(codes).map(nibbles));
}

/// Neighbours lie 16 bits apart; a half has four signs above four magnitudes.
fn put_floats(chunk: &mut [u8], lane: usize, high: usize, codes: &[u8; 16]) {
    const SIGNS: [u32; 4] = [15, 12, 14, 13];
    const MAGNITUDES: [u32; 4] = [9, 6, 3, 0];
    let floats = |codes: u64| {
        (0..8).fold(0, |word, i| {
            let code = (codes >> (8 * i)) as u32;
            let half = (code >> 3 & 1) << SIGNS[i / 2] | (code & 7) << MAGNITUDES[i / 2];
            word | half << (16 * (i % 2))
        })
    };
    put_words(chunk, lane, high, eights(codes).map(floats));
}

/// Codes in two parts, the first of each in the lowest byte.
fn eights(codes: &[u8; 16]) -> [u64; 2] {
    let codes = u128::from_le_bytes(*codes);
    [codes as u64, (codes >> 64) as u64]
}

/// Eight nibbles in a word: those with even numbers in its lower half, the others in the upper one.
fn nibble_pairs(codes: u64) -> u32 {
    let bytes = (codes | codes >> 12) & 0x0000_ffff_0000_ffff;
    let (first, second) = (bytes as u32, (bytes >> 32) as u32);
    let (even, odd) = (0x00ff, 0xff00);
    first & even | (second & even) << 8 | (first & odd) << 8 | (second & odd) << 16
}

/// Writes 16 codes of a lane as two words.
fn put_words(chunk: &mut [u8], lane: usize, high: usize, [first, second]: [u32; 2]) {
    let words = u64::from(first) | u64::from(second) << 32;
    chunk[16 * lane + 8 * high..][..8].copy_from_slice(&words.to_le_bytes());
}
