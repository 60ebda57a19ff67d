//! Tiles of 2:4 weights (`TwoFour` in `kernels/packed.cuh`): two values of each four columns, and
//! their positions in the four. Lane `4 g + c` holds the fours `c`, `4 + c`, `8 + c` and `12 + c`
//! of a chunk's rows `g` and `g + 8`, and the positions of all fours of its 16 columns.

use bodkin_gguf::format::Groups;
use half::f16;

use super::dense::{code_unit, max_abs, power_of_two};
use super::layout::MmaLayout;
use crate::constants::{CHUNK_COLS, CODE_UNIT, INPUT_DIVISOR};

/// Fours of a chunk.
const FOURS: usize = CHUNK_COLS / 4;
/// The positions of rows beyond the matrix: the first two of each four.
const PADDING_POSITIONS: u8 = 0x44;
/// Bytes of the positions of all lanes of a chunk.
const POSITION_BYTES: usize = 128;
/// Bytes of the codes of a chunk, behind which its positions begin, and then its scales.
const F16_CODES: usize = 1024;
const S8_CODES: usize = 512;
const S4_CODES: usize = 256;

/// Two of four columns in order, among them all that are not zero.
fn two_of(is_nonzero: impl Fn(usize) -> bool) -> [usize; 2] {
    let mut nonzero = (0..4).filter(|&i| is_nonzero(i));
    match (nonzero.next(), nonzero.next()) {
        (None | Some(0), None) => [0, 1],
        (Some(one), None) => [0, one],
        (first, second) => [first.unwrap_or(0), second.unwrap_or(1)],
    }
}

/// Writes the positions of the two values of four `four` of row `r` to a chunk's positions.
fn put_positions(positions: &mut [u8], r: usize, four: usize, [first, second]: [usize; 2]) {
    let (lane, shift) = (4 * (r % 8) + four / 4, four % 2 * 4);
    let byte = &mut positions[4 * lane + 2 * (r / 8) + four % 4 / 2];
    *byte = *byte & !(15 << shift) | ((first | second << 2) as u8) << shift;
}

/// Sets the positions of a chunk, behind `codes` bytes, to padding before its first row is packed.
fn clear_positions(chunk: &mut [u8], codes: usize, r: usize) {
    if r == 0 {
        chunk[codes..codes + POSITION_BYTES].fill(PADDING_POSITIONS);
    }
}

/// Packs row `r` of a tile in half precision, and returns its scale.
pub(super) fn f16(values: &[f32], r: usize, tile: &mut [u8]) -> f32 {
    let unit = power_of_two(max_abs(values.iter().copied()));
    let chunks = tile.chunks_exact_mut(MmaLayout::S24F16.chunk_bytes());
    for (chunk, values) in chunks.zip(values.chunks(CHUNK_COLS)) {
        clear_positions(chunk, F16_CODES, r);
        for (four, values) in values.chunks(4).enumerate() {
            let value = |i: usize| values.get(i).copied().unwrap_or(0.0);
            let two = two_of(|i| value(i) != 0.0);
            put_positions(&mut chunk[F16_CODES..], r, four, two);
            for (n, i) in two.into_iter().enumerate() {
                let lane = 4 * (r % 8) + four % 4;
                let at = 512 * (r / 8) + 16 * lane + 4 * (four / 4) + 2 * n;
                let half = f16::from_f32(value(i) / unit);
                chunk[at..at + 2].copy_from_slice(&half.to_le_bytes());
            }
        }
    }
    unit * INPUT_DIVISOR
}

/// Packs row `r` of a tile as bytes, and returns its scale.
pub(super) fn s8(row: &Groups, r: usize, tile: &mut [u8]) -> f32 {
    let layout = (MmaLayout::S24S8.chunk_bytes(), S8_CODES);
    codes(layout, 128, row, r, tile, |chunk, lane, high, place, codes| {
        for (n, code) in codes.into_iter().enumerate() {
            chunk[16 * lane + 8 * high + 2 * place + n] = code;
        }
    })
}

/// Packs row `r` of a tile as codes of four bits, and returns its scale.
pub(super) fn s4(row: &Groups, r: usize, tile: &mut [u8]) -> f32 {
    let layout = (MmaLayout::S24S4.chunk_bytes(), S4_CODES);
    codes(layout, 8, row, r, tile, |chunk, lane, high, place, codes| {
        for (n, code) in codes.into_iter().enumerate() {
            // The two codes of a four lie 16 bits apart.
            let bit = 4 * place + 16 * n;
            chunk[8 * lane + 4 * high + bit / 8] |= code << (bit % 8);
        }
    })
}

/// Packs row `r` of a tile of chunks, whose codes take the given bytes, and returns its scale.
/// `zero` is the code of zero; `put` writes the codes of a four to a chunk, for a lane, the upper
/// or lower eight rows, and the four's place in the lane.
fn codes(
    (chunk_bytes, code_bytes): (usize, usize),
    zero: u8,
    row: &Groups,
    r: usize,
    tile: &mut [u8],
    put: impl Fn(&mut [u8], usize, usize, usize, [u8; 2]),
) -> f32 {
    let unit = code_unit(max_abs(row.scales.as_flattened().iter().copied()), CODE_UNIT);
    let groups = row.codes.chunks(2).zip(row.scales.chunks(2));
    for (chunk, (codes, scales)) in tile.chunks_exact_mut(chunk_bytes).zip(groups) {
        clear_positions(chunk, code_bytes, r);
        for (j, (codes, [scale, _])) in codes.iter().zip(scales).enumerate() {
            for (four, codes) in codes.chunks_exact(4).enumerate() {
                let two = two_of(|i| codes[i] != zero);
                let four = FOURS / 2 * j + four;
                put_positions(&mut chunk[code_bytes..], r, four, two);
                put(chunk, 4 * (r % 8) + four % 4, r / 8, four / 4, two.map(|i| codes[i]));
            }
            let at = code_bytes + POSITION_BYTES + 4 * (8 * j + r % 8) + 2 * (r / 8);
            let scale = f16::from_f32(scale / unit / CODE_UNIT);
            chunk[at..at + 2].copy_from_slice(&scale.to_le_bytes());
        }
    }
    unit * INPUT_DIVISOR
}

/// A value as the kernels read it, without its row's scale.
#[cfg(test)]
pub(super) fn read(layout: MmaLayout, chunk: &[u8], r: usize, column: usize) -> f32 {
    let codes = match layout {
        MmaLayout::S24F16 => F16_CODES,
        MmaLayout::S24S8 => S8_CODES,
        _ => S4_CODES,
    };
    let (g, high, four) = (r % 8, r / 8, column / 4);
    let half = |at: usize| f16::from_le_bytes([chunk[at], chunk[at + 1]]).to_f32();
    let word = |at: usize| u32::from_le_bytes(chunk[at..at + 4].try_into().unwrap());
    let both = word(codes + 4 * (4 * g + four / 4)) >> (16 * high + 4 * (four % 4));
    let Some(n) = (0..2).find(|n| (both >> (2 * n) & 3) as usize == column % 4) else {
        return 0.0;
    };
    let (lane, place) = (4 * g + four % 4, four / 4);
    let scales = codes + POSITION_BYTES;
    let scale = || half(scales + 4 * (8 * (column / 32) + g) + 2 * high) * CODE_UNIT;
    match layout {
        MmaLayout::S24F16 => half(512 * high + 16 * lane + 4 * place + 2 * n),
        MmaLayout::S24S8 => {
            scale() * (f32::from(chunk[16 * lane + 8 * high + 2 * place + n]) - 128.0)
        }
        _ => {
            let code = word(8 * lane + 4 * high) >> (4 * place + 16 * n) & 15;
            scale() * (code as f32 - 8.0)
        }
    }
}
