//! Weights as the kernels read them (`kernels/planes.cuh` says why): tiles of 16 rows, cut into
//! chunks of 64 columns, each one record of codes in the order of a warp's lanes and of scales.
//! Numbers of a row are divided by a power of two, so that they fit half precision whatever the
//! file holds; the row's scale puts that right. This file must not know the device.

mod shape;
mod two_four;

use bodkin_gguf::Format;
use bytemuck::cast_slice_mut;
use half::f16;

use crate::codes::{Group, groups};
pub(crate) use shape::Shape;

/// Rows of a tile.
pub(crate) const TILE_ROWS: usize = 16;
/// Columns of a chunk.
pub(crate) const CHUNK_COLS: usize = 64;
/// Inputs of products are so many times smaller than they are, so scales are larger.
pub(crate) const INPUT_DIVISOR: f32 = 16.0;
/// What a code is in half precision when its bits stand there alone.
const CODE_UNIT: f32 = 1.0 / (1 << 24) as f32;
/// The largest scale of a row's codes is kept as this, or up to twice as much.
const LARGEST_SCALE: f32 = (1 << 14) as f32;
/// Minima that are not more than so many times larger than scales take nothing from these.
const USUAL_MIN: f32 = 16.0;

/// How codes and scales are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Plain rows of f32: of routers, whose choices hang on small differences, and of small files.
    F32,
    /// Half precision.
    F16,
    /// Signed bytes with a scale for 32 columns.
    S8,
    /// Signed bytes with a scale for 16 columns.
    S8x16,
    /// Bytes with a scale and a minimum for 32 columns.
    U8,
    /// Four bits with a scale and a minimum for 32 columns.
    U4,
    /// Two of four columns in half precision.
    S24F16,
    /// Two of four columns as signed bytes, with a scale for 32 columns.
    S24S8,
    /// Two of four columns as four bits with a sign, and a scale for 32 columns.
    S24S4,
}

impl Kind {
    /// How a format is kept; those without codes of their own in half precision.
    pub(crate) fn of(format: Format) -> Kind {
        match format {
            Format::S24_F16 => Kind::S24F16,
            Format::S24_Q8_0 => Kind::S24S8,
            Format::S24_Q4_0 => Kind::S24S4,
            Format::Q8_0 | Format::Q5_0 | Format::IQ4_NL | Format::IQ4_XS | Format::MXFP4 => {
                Kind::S8
            }
            Format::Q6_K | Format::Q3_K => Kind::S8x16,
            Format::Q5_1 | Format::Q5_K => Kind::U8,
            Format::Q4_0 | Format::Q4_1 | Format::Q4_K => Kind::U4,
            Format::F32 => Kind::F32,
            // Sparse formats without kernels are kept dense.
            _ => format.base().map_or(Kind::F16, Kind::of),
        }
    }

    /// The word for it in the names of kernels.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Kind::F32 => "f32",
            Kind::F16 => "f16",
            Kind::S8 => "s8",
            Kind::S8x16 => "s8x16",
            Kind::U8 => "u8",
            Kind::U4 => "u4",
            Kind::S24F16 => "s24_f16",
            Kind::S24S8 => "s24_s8",
            Kind::S24S4 => "s24_s4",
        }
    }

    /// Whether there are kernels of many rows for Hopper alone.
    pub(crate) fn has_wide(self) -> bool {
        !matches!(self, Kind::F32 | Kind::S24F16 | Kind::S24S8 | Kind::S24S4)
    }

    /// Bytes of a chunk.
    pub(crate) fn chunk_bytes(self) -> usize {
        match self {
            Kind::F32 => 4096,
            Kind::F16 => 2048,
            Kind::S8 => 1088,
            Kind::S8x16 | Kind::U8 | Kind::S24F16 => 1152,
            Kind::U4 => 640,
            Kind::S24S8 => 704,
            Kind::S24S4 => 448,
        }
    }

    /// Chunks of a tile that a warp asks for at once, as in `kernels/planes.cuh`.
    pub(crate) fn slot_chunks(self) -> usize {
        match self {
            Kind::U4 | Kind::S24S8 | Kind::S24S4 => 4,
            _ => 2,
        }
    }
}

/// Writes tiles `tiles` of all matrices' tiles that a device has. `bytes` are the whole weight;
/// `planes` and `scales` those of the tiles, zero before.
pub(crate) fn pack(
    shape: &Shape,
    format: Format,
    bytes: &[u8],
    tiles: std::ops::Range<usize>,
    planes: &mut [u8],
    scales: &mut [f32],
) {
    let (rows, base) = (shape.matrices * shape.whole, format.base());
    let dense_bytes = base.and_then(|base| base.row_bytes(shape.cols)).unwrap_or(0);
    let mut dense = vec![0; dense_bytes];
    let mut values = vec![0.0; shape.cols];
    let mut row_groups = vec![Group::default(); shape.cols.div_ceil(32)];
    let outputs = planes.chunks_exact_mut(shape.tile_bytes()).zip(scales.chunks_exact_mut(16));
    for (tile, (planes, scales)) in tiles.zip(outputs) {
        let (matrix, tile) = (tile / shape.tiles(), tile % shape.tiles());
        let count = (shape.rows - tile * TILE_ROWS).min(TILE_ROWS);
        for (r, scale) in scales[..count].iter_mut().enumerate() {
            let row = matrix * shape.whole + shape.first + tile * TILE_ROWS + r;
            let mut row = format.row(bytes, rows, row);
            if base.is_some() {
                format.densify_row(row, &mut dense);
                row = &dense;
            }
            let format = base.unwrap_or(format);
            *scale = match shape.kind {
                Kind::F32 => {
                    format.dequantize(row, &mut values);
                    pack_floats(&values, r, planes)
                }
                Kind::F16 => {
                    format.dequantize(row, &mut values);
                    pack_halves(&values, r, planes)
                }
                Kind::S24F16 => {
                    format.dequantize(row, &mut values);
                    two_four::pack_halves(&values, r, planes)
                }
                kind => {
                    let mut next = row_groups.iter_mut();
                    groups(format, row, |group| {
                        *next.next().expect("no more groups than columns") = group;
                    });
                    match kind {
                        Kind::S24S8 | Kind::S24S4 => {
                            two_four::pack_groups(kind, &row_groups, r, planes)
                        }
                        _ => pack_groups(kind, &row_groups, r, planes),
                    }
                }
            };
        }
    }
}

/// The power of two that `largest` is to be divided by to come near 1.
fn power_of_two(largest: f32) -> f32 {
    let exponent = (largest.to_bits() >> 23) as i32 & 255;
    if largest == 0.0 { 1.0 } else { 2f32.powi((exponent - 127).clamp(-120, 120)) }
}

/// What a row of codes is to be divided by, for its largest scale. That of a file may be as large
/// as floats are: sixteen times the divisor has to be one, too. From 2^115 on, scales are infinite.
fn code_unit(largest: f32) -> f32 {
    power_of_two(largest.min(2f32.powi(113))) / (LARGEST_SCALE * CODE_UNIT)
}

/// The largest magnitude.
fn largest(values: impl Iterator<Item = f32>) -> f32 {
    values.fold(0.0, |most: f32, x| most.max(x.abs()))
}

/// Packs row `r` of a tile, and gives its scale.
fn pack_floats(values: &[f32], r: usize, planes: &mut [u8]) -> f32 {
    let chunks = planes.chunks_exact_mut(Kind::F32.chunk_bytes());
    for (chunk, values) in chunks.zip(values.chunks(CHUNK_COLS)) {
        let row = &mut chunk[4 * CHUNK_COLS * r..][..4 * values.len()];
        row.copy_from_slice(bytemuck::cast_slice(values));
    }
    1.0
}

/// Packs row `r` of a tile, and gives its scale.
fn pack_halves(values: &[f32], r: usize, planes: &mut [u8]) -> f32 {
    let unit = power_of_two(largest(values.iter().copied()));
    let (g, high) = (r % 8, r / 8);
    let chunks = planes.chunks_exact_mut(Kind::F16.chunk_bytes());
    for (chunk, values) in chunks.zip(values.chunks(CHUNK_COLS)) {
        for (column, &x) in values.iter().enumerate() {
            let (lane, i) = (4 * g + column / 16, column % 16);
            let at = 512 * (2 * high + i / 8) + 16 * lane + 2 * (i % 8);
            chunk[at..at + 2].copy_from_slice(&f16::from_f32(x / unit).to_le_bytes());
        }
    }
    unit * INPUT_DIVISOR
}

/// Packs row `r` of a tile, and gives its scale.
fn pack_groups(kind: Kind, row: &[Group], r: usize, planes: &mut [u8]) -> f32 {
    let numbers = row.iter().flat_map(|g| [g.scales[0], g.scales[1], g.min / USUAL_MIN]);
    let unit = code_unit(largest(numbers));
    let (g, high) = (r % 8, r / 8);
    let chunks = planes.chunks_exact_mut(kind.chunk_bytes());
    for (chunk, groups) in chunks.zip(row.chunks(2)) {
        for (j, group) in groups.iter().enumerate() {
            pack_codes(kind, &group.codes, (g, high, j), chunk);
            let (codes, scales) = chunk.split_at_mut(if kind == Kind::U4 { 512 } else { 1024 });
            debug_assert!(!codes.is_empty(), "codes come first");
            let scales: &mut [u16] = cast_slice_mut(scales);
            let scale = |n: usize| f16::from_f32(group.scales[n] / unit / CODE_UNIT).to_bits();
            let one = 8 * j + g;
            match kind {
                Kind::S8 => scales[2 * one + high] = scale(0),
                Kind::S8x16 => {
                    scales[2 * (16 * j + g) + high] = scale(0);
                    scales[2 * (16 * j + 8 + g) + high] = scale(1);
                }
                _ => {
                    scales[2 * (2 * one + high)] = scale(0);
                    let min = f16::from_f32(group.min / unit);
                    scales[2 * (2 * one + high) + 1] = min.to_bits();
                }
            }
        }
    }
    unit * INPUT_DIVISOR
}

/// The codes of group `j` of a chunk, for row `g` or, if `high`, row `g + 8` of its tile.
fn pack_codes(kind: Kind, codes: &[u8; 32], (g, high, j): (usize, usize, usize), chunk: &mut [u8]) {
    for (part, codes) in codes.chunks_exact(16).enumerate() {
        let lane = 4 * g + 2 * j + part;
        if kind != Kind::U4 {
            chunk[512 * high + 16 * lane..][..16].copy_from_slice(codes);
            continue;
        }
        let words = &mut chunk[16 * lane + 8 * high..][..8];
        for (word, codes) in words.chunks_exact_mut(4).zip(codes.chunks_exact(8)) {
            // Neighbours lie 16 bits apart, where halves of a register are.
            let place = |i: usize| 4 * (i / 2 + 4 * (i % 2));
            let bits = (0..8).fold(0, |bits, i| bits | u32::from(codes[i]) << place(i));
            word.copy_from_slice(&bits.to_le_bytes());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lower::Share;

    /// A number as the kernels read it.
    fn read(shape: &Shape, planes: &[u8], scales: &[f32], row: usize, column: usize) -> f32 {
        let tile = &planes[row / 16 * shape.tile_bytes()..][..shape.tile_bytes()];
        let chunk = &tile[column / 64 * shape.kind.chunk_bytes()..];
        let (g, high, c, i) = (row % 8, row % 16 / 8, column % 64 / 16, column % 16);
        let lane = 4 * g + c;
        let half = |at: usize| f16::from_le_bytes([chunk[at], chunk[at + 1]]).to_f32();
        let pair = |start: usize| {
            let at = start + 4 * (2 * (8 * (c / 2) + g) + high);
            (half(at), half(at + 2))
        };
        let byte = || f32::from(chunk[512 * high + 16 * lane + i]);
        let value = match shape.kind {
            Kind::S24F16 | Kind::S24S8 | Kind::S24S4 => {
                two_four::read(shape.kind, chunk, row % 16, column % 64)
            }
            Kind::F32 => {
                let at = 4 * (CHUNK_COLS * (row % 16) + column % 64);
                return f32::from_le_bytes(chunk[at..at + 4].try_into().unwrap());
            }
            Kind::F16 => half(512 * (2 * high + i / 8) + 16 * lane + 2 * (i % 8)),
            Kind::S8 => {
                half(1024 + 4 * (8 * (c / 2) + g) + 2 * high) * CODE_UNIT * (byte() - 128.0)
            }
            Kind::S8x16 => half(1024 + 4 * (8 * c + g) + 2 * high) * CODE_UNIT * (byte() - 128.0),
            Kind::U8 => {
                let (scale, min) = pair(1024);
                scale * CODE_UNIT * byte() + min
            }
            Kind::U4 => {
                let at = 16 * lane + 8 * high + 4 * (i / 8);
                let word = u32::from_le_bytes(chunk[at..at + 4].try_into().unwrap());
                let code = word >> (4 * (i % 8 / 2 + 4 * (i % 2))) & 15;
                let (scale, min) = pair(512);
                scale * CODE_UNIT * code as f32 + min
            }
        };
        value * scales[row] / INPUT_DIVISOR
    }

    /// Random blocks, but for those whose scales are no numbers, or tiny beside others. Of formats
    /// whose blocks say how long they are, encoded rows with zeros.
    fn random(format: Format, rows: usize, cols: usize) -> Vec<u8> {
        let mut seed = 1u32;
        let mut bits = || {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (seed >> 16) as u8
        };
        if format.base().is_some() {
            let mut value = |i| if i % 3 == 0 { 0.0 } else { f32::from(bits()) - 127.5 };
            let values: Vec<f32> = (0..rows * cols).map(&mut value).collect();
            return format.encode(&values, cols).unwrap();
        }
        let mut data = vec![0; rows * format.row_bytes(cols).unwrap()];
        let mut values = vec![0.0; format.block_elements()];
        for block in data.chunks_exact_mut(format.block_bytes().unwrap()) {
            for _ in 0..100_000 {
                block.fill_with(&mut bits);
                format.dequantize(block, &mut values);
                let most = largest(values.iter().copied());
                if values.iter().all(|x| x.is_finite()) && (0.1..=1e3).contains(&most) {
                    break;
                }
            }
        }
        data
    }

    #[test]
    fn planes_hold_what_the_blocks_hold() {
        for &format in Format::all() {
            let (rows, cols) = (37, 2 * format.block_elements().max(48) / 3 * 3);
            let cols = cols.next_multiple_of(format.block_elements());
            let data = random(format, rows, cols);
            let mut values = vec![f32::NAN; rows * cols];
            for (row, values) in values.chunks_exact_mut(cols).enumerate() {
                format.dequantize_row(format.row(&data, rows, row), values);
            }
            let shape = Shape::new(Kind::of(format), 1, rows, cols);
            let mut planes = vec![0; shape.plane_bytes()];
            let mut scales = vec![0.0; shape.scales()];
            pack(&shape, format, &data, 0..shape.tiles(), &mut planes, &mut scales);
            let (mut error, mut size) = (0.0, 0.0);
            for (i, &wanted) in values.iter().enumerate() {
                let found = read(&shape, &planes, &scales, i / cols, i % cols);
                error += f64::from(found - wanted).powi(2);
                size += f64::from(wanted).powi(2);
            }
            if size.is_finite() && size > 0.0 {
                assert!(error <= 1e-6 * size, "{}: NMSE {:.1e}", format.name(), error / size);
            }
        }
    }

    #[test]
    fn scales_may_be_large() {
        // Of the code 1, which is half a unit, in a block of 2^113.
        let mut data = vec![0x11; Format::MXFP4.row_bytes(32).unwrap()];
        data[0] = 127 + 113;
        let mut values = vec![0.0; 32];
        Format::MXFP4.dequantize(&data, &mut values);
        let shape = Shape::new(Kind::of(Format::MXFP4), 1, 1, 32);
        let mut planes = vec![0; shape.plane_bytes()];
        let mut scales = vec![0.0; shape.scales()];
        pack(&shape, Format::MXFP4, &data, 0..1, &mut planes, &mut scales);
        assert_eq!(values[0], 2f32.powi(112));
        assert_eq!(read(&shape, &planes, &scales, 0, 0), values[0]);
    }

    #[test]
    fn experts_are_padded_one_by_one() {
        let shape = Shape::new(Kind::F32, 3, 17, 5);
        let values: Vec<f32> = (0..3 * 17 * 5).map(|i| i as f32).collect();
        let data: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        let mut planes = vec![0; shape.plane_bytes()];
        let mut scales = vec![0.0; shape.scales()];
        pack(&shape, Format::F32, &data, 0..6, &mut planes, &mut scales);
        for (i, &wanted) in values.iter().enumerate() {
            let (matrix, row, column) = (i / 85, i % 85 / 5, i % 5);
            assert_eq!(read(&shape, &planes, &scales, 32 * matrix + row, column), wanted);
        }
    }

    #[test]
    fn parts_together_are_the_whole() {
        for &format in Format::all() {
            let (matrices, rows, cols) = (2, 35, 96usize.next_multiple_of(format.block_elements()));
            let data = match format.base() {
                Some(_) => random(format, matrices * rows, cols),
                None => random(format, 14, cols).repeat(5),
            };
            let packed = |shape: Shape| {
                let mut planes = vec![0; shape.plane_bytes()];
                let mut scales = vec![0.0; shape.scales()];
                let tiles = 0..matrices * shape.tiles();
                pack(&shape, format, &data, tiles, &mut planes, &mut scales);
                let of_matrix = (planes.len() / matrices, scales.len() / matrices);
                let planes = planes.chunks(of_matrix.0).map(<[u8]>::to_vec);
                planes.zip(scales.chunks(of_matrix.1).map(<[f32]>::to_vec)).collect::<Vec<_>>()
            };
            let whole = Shape::new(Kind::of(format), matrices, rows, cols);
            let mut together = vec![(Vec::new(), Vec::new()); matrices];
            for number in 0..2 {
                let parts = packed(whole.share(Share { number, of: 2 }));
                for ((planes, scales), part) in together.iter_mut().zip(parts) {
                    planes.extend(part.0);
                    scales.extend(part.1);
                }
            }
            assert!(together == packed(whole), "{}", format.name());
        }
    }
}
