//! Packs tiles of a weight from the blocks of a file.

use std::ops::Range;

use bodkin_gguf::Format;

use super::Shape;
use super::codes::CodedRow;
use super::formats::{Packer, packing};
use crate::constants::TILE_ROWS;

/// Packs tiles `tiles` of a device's shard of all matrices. `bytes` are the whole weight; `packed`
/// and `exponents`, of the scales of rows, are those of the tiles, zero before.
pub(crate) fn pack(
    shape: &Shape,
    format: Format,
    bytes: &[u8],
    tiles: Range<usize>,
    packed: &mut [u8],
    exponents: &mut [u8],
) {
    let (rows, base) = (shape.matrices * shape.full_rows, format.base());
    let dense_bytes = base.and_then(|base| base.row_bytes(shape.cols)).unwrap_or(0);
    let mut dense = vec![0; dense_bytes];
    let mut values = vec![0.0; shape.cols];
    let mut coded = CodedRow::new(shape.cols);
    let (_, packer) = packing(format);
    let outputs = packed.chunks_exact_mut(shape.tile_bytes());
    let outputs = outputs.zip(exponents.chunks_exact_mut(TILE_ROWS));
    for (tile, (packed, exponents)) in tiles.zip(outputs) {
        let (matrix, tile) = (tile / shape.tiles(), tile % shape.tiles());
        let count = (shape.rows - tile * TILE_ROWS).min(TILE_ROWS);
        for (r, exponent) in exponents[..count].iter_mut().enumerate() {
            let row = matrix * shape.full_rows + shape.first_row + tile * TILE_ROWS + r;
            let mut row = format.row(bytes, rows, row);
            if base.is_some() {
                format.densify_row(row, &mut dense);
                row = &dense;
            }
            let scale = match packer {
                Packer::Values(pack_row) => {
                    base.unwrap_or(format).dequantize(row, &mut values);
                    pack_row(&values, r, packed)
                }
                Packer::Codes(layout, reader) => {
                    reader(row, &mut coded.groups);
                    coded.pack(layout, r, packed)
                }
                Packer::Indices(layout, reader, book) => {
                    reader(row, &mut coded.groups);
                    coded.pack_indices(layout, book, r, packed)
                }
            };
            // Scales are powers of two.
            *exponent = (scale.to_bits() >> 23) as u8;
        }
    }
}

#[cfg(test)]
mod tests {
    use bodkin_gguf::format::iq4;
    use half::f16;

    use super::super::dense::max_abs;
    use super::super::two_four;
    use super::*;
    use crate::constants::{CHUNK_COLS, CODE_UNIT, INPUT_DIVISOR};
    use crate::packed::{MmaLayout, PackedLayout, Shard};

    /// A number as the kernels read it.
    fn read(shape: &Shape, packed: &[u8], exponents: &[u8], row: usize, column: usize) -> f32 {
        let tile = &packed[row / 16 * shape.tile_bytes()..][..shape.tile_bytes()];
        let chunk = &tile[column / 64 * shape.layout.chunk_bytes()..];
        let (g, high, c, i) = (row % 8, row % 16 / 8, column % 64 / 16, column % 16);
        let lane = 4 * g + c;
        let half = |at: usize| f16::from_le_bytes([chunk[at], chunk[at + 1]]).to_f32();
        let whole_word = |at: usize| u32::from_le_bytes(chunk[at..at + 4].try_into().unwrap());
        let word = |start: usize| whole_word(start + 16 * lane + 8 * high + 4 * (i / 8));
        let nibble = || word(0) >> (4 * (i % 8 / 2 + 4 * (i % 2))) & 15;
        let byte = || f32::from(chunk[512 * high + 16 * lane + i]);
        let [of_32, of_16] = [c / 2, c].map(|group| 4 * (8 * group + g) + 2 * high);
        let pair = |start: usize| (half(start + 2 * of_32), half(start + 2 * of_32 + 2));
        let value = match shape.layout {
            PackedLayout::Mma(
                layout @ (MmaLayout::S24F16 | MmaLayout::S24S8 | MmaLayout::S24S4),
            ) => two_four::read(layout, chunk, row % 16, column % 64),
            PackedLayout::F32 => {
                let at = 4 * (CHUNK_COLS * (row % 16) + column % 64);
                return f32::from_le_bytes(chunk[at..at + 4].try_into().unwrap());
            }
            PackedLayout::Mma(MmaLayout::F16) => {
                half(512 * (2 * high + i / 8) + 16 * lane + 2 * (i % 8))
            }
            PackedLayout::Mma(MmaLayout::S8) => half(1024 + of_32) * CODE_UNIT * (byte() - 128.0),
            PackedLayout::Mma(MmaLayout::S6x16) => {
                let tops = whole_word(512 + 8 * lane + 4 * high);
                let place = [0, 4, 2, 6, 8, 12, 10, 14][i / 2] + 16 * (i % 2);
                let code = nibble() | (tops >> place & 3) << 4;
                half(768 + of_16) * CODE_UNIT * (code as f32 - 32.0)
            }
            PackedLayout::Mma(MmaLayout::U5) => {
                let fifths = whole_word(512 + 4 * lane);
                let places = [[0, 4, 2, 6, 8, 12, 10, 14], [1, 5, 3, 7, 9, 13, 11, 15]];
                let place = places[high][i / 2] + 16 * (i % 2);
                let (scale, min) = pair(640);
                scale * CODE_UNIT * (nibble() | (fifths >> place & 1) << 4) as f32 + min
            }
            PackedLayout::Mma(MmaLayout::U4) => {
                let (scale, min) = pair(512);
                scale * CODE_UNIT * nibble() as f32 + min
            }
            PackedLayout::Mma(MmaLayout::S4x16) => {
                half(512 + of_16) * CODE_UNIT * (nibble() as f32 - 8.0)
            }
            PackedLayout::Mma(MmaLayout::U2x16) => {
                let code = whole_word(8 * lane + 4 * high) >> (i / 2 * 2 + i % 2 * 16) & 3;
                half(256 + 2 * of_16) * CODE_UNIT * code as f32 + half(256 + 2 * of_16 + 2)
            }
            PackedLayout::Mma(MmaLayout::Codebook) => {
                let number = f32::from(chunk[640 + (word(0) >> (4 * (i % 8)) & 15) as usize]);
                half(512 + of_16) * CODE_UNIT * (number - 64.0)
            }
            PackedLayout::Mma(MmaLayout::Iq4) => {
                let number = iq4::CODEBOOK[(word(0) >> (4 * (i % 8)) & 15) as usize];
                half(512 + of_32) * CODE_UNIT * f32::from(number)
            }
            PackedLayout::Mma(MmaLayout::Fp4) => {
                let bits = (word(0) >> (16 * (i % 2))) as u16;
                let sign = bits << [0, 3, 1, 2][i % 8 / 2] & 0x8000;
                let number = f16::from_bits(sign | bits << (3 * (i % 8 / 2)) & 0x0e00);
                let scale = u16::from(chunk[512 + 2 * (8 * (c / 2) + g) + high]) << 8;
                f16::from_bits(scale).to_f32() * number.to_f32()
            }
        };
        value * f32::from_bits(u32::from(exponents[row]) << 23) / INPUT_DIVISOR
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
                let most = max_abs(values.iter().copied());
                if values.iter().all(|x| x.is_finite()) && (0.1..=1e3).contains(&most) {
                    break;
                }
            }
        }
        data
    }

    #[test]
    fn tiles_hold_the_values_of_the_blocks() {
        for &format in Format::all() {
            let (rows, cols) = (37, 2 * format.block_elements().max(48) / 3 * 3);
            let cols = cols.next_multiple_of(format.block_elements());
            let data = random(format, rows, cols);
            let mut values = vec![f32::NAN; rows * cols];
            for (row, values) in values.chunks_exact_mut(cols).enumerate() {
                format.dequantize_row(format.row(&data, rows, row), values);
            }
            let shape = Shape::new(PackedLayout::of(format), 1, rows, cols);
            let mut packed = vec![0; shape.packed_bytes()];
            let mut exponents = vec![0; shape.exponents()];
            pack(&shape, format, &data, 0..shape.tiles(), &mut packed, &mut exponents);
            let (mut error, mut size) = (0.0, 0.0);
            for (i, &wanted) in values.iter().enumerate() {
                let found = read(&shape, &packed, &exponents, i / cols, i % cols);
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
        let shape = Shape::new(PackedLayout::of(Format::MXFP4), 1, 1, 32);
        let mut packed = vec![0; shape.packed_bytes()];
        let mut exponents = vec![0; shape.exponents()];
        pack(&shape, Format::MXFP4, &data, 0..1, &mut packed, &mut exponents);
        assert_eq!(values[0], 2f32.powi(112));
        assert_eq!(read(&shape, &packed, &exponents, 0, 0), values[0]);
    }

    #[test]
    fn experts_are_padded_one_by_one() {
        let shape = Shape::new(PackedLayout::F32, 3, 17, 5);
        let values: Vec<f32> = (0..3 * 17 * 5).map(|i| i as f32).collect();
        let data: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        let mut packed = vec![0; shape.packed_bytes()];
        let mut exponents = vec![0; shape.exponents()];
        pack(&shape, Format::F32, &data, 0..6, &mut packed, &mut exponents);
        for (i, &wanted) in values.iter().enumerate() {
            let (matrix, row, column) = (i / 85, i % 85 / 5, i % 5);
            assert_eq!(read(&shape, &packed, &exponents, 32 * matrix + row, column), wanted);
        }
    }

    #[test]
    fn shards_together_are_the_whole() {
        for &format in Format::all() {
            let (matrices, rows, cols) = (2, 35, 96usize.next_multiple_of(format.block_elements()));
            let data = match format.base() {
                Some(_) => random(format, matrices * rows, cols),
                None => random(format, 14, cols).repeat(5),
            };
            let packed = |shape: Shape| {
                let mut packed = vec![0; shape.packed_bytes()];
                let mut exponents = vec![0; shape.exponents()];
                let tiles = 0..matrices * shape.tiles();
                pack(&shape, format, &data, tiles, &mut packed, &mut exponents);
                let of_matrix = (packed.len() / matrices, exponents.len() / matrices);
                let packed = packed.chunks(of_matrix.0).map(<[u8]>::to_vec);
                packed.zip(exponents.chunks(of_matrix.1).map(<[u8]>::to_vec)).collect::<Vec<_>>()
            };
            let whole = Shape::new(PackedLayout::of(format), matrices, rows, cols);
            let mut together = vec![(Vec::new(), Vec::new()); matrices];
            for index in 0..2 {
                let parts = packed(whole.shard(Shard { index, count: 2 }));
                for ((packed, exponents), part) in together.iter_mut().zip(parts) {
                    packed.extend(part.0);
                    exponents.extend(part.1);
                }
            }
            assert!(together == packed(whole), "{}", format.name());
        }
    }
}
