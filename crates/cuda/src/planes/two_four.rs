//! Planes of 2:4 weights (`TwoFour` in `kernels/planes.cuh`): of each four columns two numbers, and
//! which of the four they are. Lane `4 g + c` has the fours `c`, `4 + c`, `8 + c` and `12 + c` of
//! a chunk's rows `g` and `g + 8`, and the places of all fours of its 16 columns.

use half::f16;

use super::{CHUNK_COLS, CODE_UNIT, INPUT_DIVISOR, Kind, code_unit, largest, power_of_two};
use crate::codes::Group;

/// Fours of a chunk.
const FOURS: usize = CHUNK_COLS / 4;
/// The places of a lane whose rows are not there: the first two of each four.
const NO_PLACES: u8 = 0x44;

/// Where the places of all lanes lie in a chunk, behind all codes, and the scales behind them.
fn layout(kind: Kind) -> [usize; 2] {
    let codes = match kind {
        Kind::S24F16 => 1024,
        Kind::S24S8 => 512,
        _ => 256,
    };
    [codes, codes + 128]
}

/// Two of four columns in order, among them all that are taken.
fn two_of(is_taken: impl Fn(usize) -> bool) -> [usize; 2] {
    let mut taken = (0..4).filter(|&i| is_taken(i));
    match (taken.next(), taken.next()) {
        (None | Some(0), None) => [0, 1],
        (Some(one), None) => [0, one],
        (first, second) => [first.unwrap_or(0), second.unwrap_or(1)],
    }
}

/// Notes the places of the two numbers of four `four` of row `r`.
fn put_places(chunk: &mut [u8], at: usize, r: usize, four: usize, [first, second]: [usize; 2]) {
    let (lane, shift) = (4 * (r % 8) + four / 4, four % 2 * 4);
    let byte = &mut chunk[at + 4 * lane + 2 * (r / 8) + four % 4 / 2];
    *byte = *byte & !(15 << shift) | ((first | second << 2) as u8) << shift;
}

/// Before the first row of a tile is packed, no row is there.
fn clear_places(chunk: &mut [u8], kind: Kind, r: usize) {
    let [places, scales] = layout(kind);
    if r == 0 {
        chunk[places..scales].fill(NO_PLACES);
    }
}

/// Packs row `r` of a tile, and gives its scale.
pub(super) fn pack_halves(values: &[f32], r: usize, planes: &mut [u8]) -> f32 {
    let unit = power_of_two(largest(values.iter().copied()));
    let chunks = planes.chunks_exact_mut(Kind::S24F16.chunk_bytes());
    for (chunk, values) in chunks.zip(values.chunks(CHUNK_COLS)) {
        clear_places(chunk, Kind::S24F16, r);
        for (four, values) in values.chunks(4).enumerate() {
            let value = |i: usize| values.get(i).copied().unwrap_or(0.0);
            let two = two_of(|i| value(i) != 0.0);
            put_places(chunk, layout(Kind::S24F16)[0], r, four, two);
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

/// Packs row `r` of a tile, and gives its scale.
pub(super) fn pack_groups(kind: Kind, row: &[Group], r: usize, planes: &mut [u8]) -> f32 {
    let unit = code_unit(largest(row.iter().map(|group| group.scales[0])));
    let [places, scales] = layout(kind);
    // What a code of zero is kept as.
    let zero = if kind == Kind::S24S8 { 128 } else { 8 };
    for (chunk, groups) in planes.chunks_exact_mut(kind.chunk_bytes()).zip(row.chunks(2)) {
        clear_places(chunk, kind, r);
        for (j, group) in groups.iter().enumerate() {
            for (four, codes) in group.codes.chunks_exact(4).enumerate() {
                let two = two_of(|i| codes[i] != zero);
                let four = FOURS / 2 * j + four;
                put_places(chunk, places, r, four, two);
                put_codes(kind, chunk, r, four, two.map(|i| codes[i]));
            }
            let at = scales + 4 * (8 * j + r % 8) + 2 * (r / 8);
            let scale = f16::from_f32(group.scales[0] / unit / CODE_UNIT);
            chunk[at..at + 2].copy_from_slice(&scale.to_le_bytes());
        }
    }
    unit * INPUT_DIVISOR
}

/// Puts the codes of four `four` of row `r`.
fn put_codes(kind: Kind, chunk: &mut [u8], r: usize, four: usize, codes: [u8; 2]) {
    let (lane, place) = (4 * (r % 8) + four % 4, four / 4);
    for (n, code) in codes.into_iter().enumerate() {
        if kind == Kind::S24S8 {
            chunk[16 * lane + 8 * (r / 8) + 2 * place + n] = code;
        } else {
            // The two of a four lie 16 bits apart.
            let bit = 4 * place + 16 * n;
            chunk[8 * lane + 4 * (r / 8) + bit / 8] |= code << (bit % 8);
        }
    }
}

/// A number as the kernels read it, without its row's scale.
#[cfg(test)]
pub(super) fn read(kind: Kind, chunk: &[u8], r: usize, column: usize) -> f32 {
    let [places, scales] = layout(kind);
    let (g, high, four) = (r % 8, r / 8, column / 4);
    let half = |at: usize| f16::from_le_bytes([chunk[at], chunk[at + 1]]).to_f32();
    let word = |at: usize| u32::from_le_bytes(chunk[at..at + 4].try_into().unwrap());
    let both = word(places + 4 * (4 * g + four / 4)) >> (16 * high + 4 * (four % 4));
    let Some(n) = (0..2).find(|n| (both >> (2 * n) & 3) as usize == column % 4) else {
        return 0.0;
    };
    let (lane, place) = (4 * g + four % 4, four / 4);
    let scale = || half(scales + 4 * (8 * (column / 32) + g) + 2 * high) * CODE_UNIT;
    match kind {
        Kind::S24F16 => half(512 * high + 16 * lane + 4 * place + 2 * n),
        Kind::S24S8 => scale() * (f32::from(chunk[16 * lane + 8 * high + 2 * place + n]) - 128.0),
        _ => {
            let code = word(8 * lane + 4 * high) >> (4 * place + 16 * n) & 15;
            scale() * (code as f32 - 8.0)
        }
    }
}
