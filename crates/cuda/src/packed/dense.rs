//! Rows of numbers, in single or half precision: how they become rows of packed tiles. Values of a
//! row are divided by a power of two, so that they fit half precision whatever the file holds; the
//! row's scale multiplies it back. Only the exponent of a row's scale is stored, so it must be a
//! power of two. `kernels/packed.cuh` reads what is packed here.

use bytemuck::cast_slice;
use half::f16;
use half::slice::HalfFloatSliceExt;

use super::layout::{MmaLayout, PackedLayout};
use crate::constants::{CHUNK_COLS, INPUT_DIVISOR};

/// The largest scale of a row's codes is stored as this, or up to twice as much.
const LARGEST_SCALE: f32 = (1 << 14) as f32;

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

/// As [`max_abs`], of a row: of every eighth value first, as compilers keep the order.
pub(super) fn max_abs_of_row(values: &[f32]) -> f32 {
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
