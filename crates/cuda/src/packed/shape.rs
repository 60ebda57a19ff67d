//! The shapes of weights on a device, and the split-K slices in which their sums are taken: the
//! same on any number of devices.

use std::ops::Range;

use bodkin_model::Weight;

use super::layout::PackedLayout;
use crate::constants::{CHUNK_COLS, MAX_SLICES, TILE_ROWS};

/// Warps of a large device: 132 blocks of 16.
const WARPS: usize = 132 * 16;
/// Split-K slices for fewer than this many tiles: where tiles are few, only slices give all warps
/// of a large device weights to read.
const SLICES: [(usize, usize); 5] =
    [(160, MAX_SLICES), (384, 8), (768, 4), (1536, 2), (usize::MAX, 1)];
/// The same for experts. Their tiles outnumber a device's teams of warps, but not by much, and
/// smaller teams would leave many warps idle in the last wave.
const EXPERT_SLICES: [(usize, usize); 5] =
    [(160, MAX_SLICES), (768, 8), (1536, 4), (3072, 2), (usize::MAX, 1)];

/// One of the devices of a tensor-parallel group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shard {
    pub(crate) index: usize,
    pub(crate) count: usize,
}

impl Shard {
    /// The rows of a sharded matrix that this device holds: whole tiles.
    pub(crate) fn rows(self, rows: usize) -> Range<usize> {
        let tiles = rows.div_ceil(TILE_ROWS);
        let begin = |index: usize| (tiles * index / self.count * TILE_ROWS).min(rows);
        begin(self.index)..begin(self.index + 1)
    }
}

/// The shape of a weight: one matrix, or one for each expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) layout: PackedLayout,
    pub(crate) matrices: usize,
    /// Rows of each matrix that the device holds.
    pub(crate) rows: usize,
    /// The first of them in the file's matrix.
    pub(crate) first_row: usize,
    /// Rows of each of the file's matrices.
    pub(crate) full_rows: usize,
    pub(crate) cols: usize,
    /// Rows of the widest matrix of this layout with the same input, or of all experts that read
    /// it.
    pub(crate) widest: usize,
}

/// Split-K slices for dense codes of less than a byte, which a device's instructions limit rather
/// than its memory, so that no warp may stand idle. Where warps take slices of tiles in waves, they
/// are the fewest within a sixteenth of the least time.
fn slices_of_small_codes(tiles: usize) -> usize {
    let time = |slices: usize| (tiles * slices).div_ceil(WARPS) * (MAX_SLICES / slices);
    let all = [1, 2, 4, 8, MAX_SLICES];
    let least = all.map(time).into_iter().min().unwrap_or(0);
    all.into_iter().find(|&slices| 16 * time(slices) <= 17 * least).unwrap_or(MAX_SLICES)
}

impl Shape {
    /// The shape of a weight that holds `matrices` matrices, alone with its input.
    pub(crate) fn of(weight: &Weight, matrices: usize) -> Shape {
        let layout = PackedLayout::of(weight.format);
        Shape::new(layout, matrices, weight.rows / matrices, weight.cols)
    }

    pub(super) fn new(layout: PackedLayout, matrices: usize, rows: usize, cols: usize) -> Shape {
        Shape { layout, matrices, rows, first_row: 0, full_rows: rows, cols, widest: rows }
    }

    /// A device's shard of these matrices. The split-K slices stay the same.
    pub(crate) fn shard(self, shard: Shard) -> Shape {
        let rows = shard.rows(self.full_rows);
        Shape { rows: rows.len(), first_row: rows.start, ..self }
    }

    /// Tiles of each matrix.
    pub(crate) fn tiles(&self) -> usize {
        self.rows.div_ceil(TILE_ROWS)
    }

    /// Chunks of a row.
    pub(crate) fn chunks(&self) -> usize {
        self.cols.div_ceil(CHUNK_COLS)
    }

    /// Chunks of each split-K slice. The plan alone decides it, as it decides the order of sums.
    /// Weights with the same input have equal slices, so that one stage can run them.
    pub(crate) fn slice_chunks(&self) -> usize {
        let widest = self.widest.div_ceil(TILE_ROWS);
        let up_to = |slices: &[(usize, usize)]| {
            slices.iter().find(|(tiles, _)| widest < *tiles).map_or(1, |(_, slices)| *slices)
        };
        self.chunks().div_ceil(match self.layout {
            _ if self.matrices > 1 => up_to(&EXPERT_SLICES),
            PackedLayout::Mma(layout) if layout.has_dense_small_codes() => {
                slices_of_small_codes(widest)
            }
            _ => up_to(&SLICES),
        })
    }

    /// Tiles that a block of eight warps takes at once: each slice has a warp, or shares one with
    /// another where there are more than eight.
    pub(crate) fn tiles_per_block(&self) -> usize {
        8 / self.slices().next_power_of_two().min(8)
    }

    /// Split-K slices of a row.
    pub(crate) fn slices(&self) -> usize {
        self.chunks().div_ceil(self.slice_chunks())
    }

    /// Bytes of a tile.
    pub(crate) fn tile_bytes(&self) -> usize {
        self.chunks() * self.layout.chunk_bytes()
    }

    /// Bytes of one matrix's tiles.
    pub(crate) fn expert_bytes(&self) -> usize {
        self.tiles() * self.tile_bytes()
    }

    /// Bytes of all tiles.
    pub(crate) fn packed_bytes(&self) -> usize {
        self.matrices * self.expert_bytes()
    }

    /// Exponents of the scales of all rows, a byte each.
    pub(crate) fn exponents(&self) -> usize {
        self.matrices * self.expert_exponents()
    }

    /// Those of one matrix.
    pub(crate) fn expert_exponents(&self) -> usize {
        self.tiles() * TILE_ROWS
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::packed::MmaLayout;

    #[test]
    fn slices_give_all_warps_weights_to_read() {
        // Usual shapes of models with one and eight billion weights: hidden width, inner width and
        // vocabulary.
        for (rows, slices) in [(2048, 16), (4096, 8), (8192, 4), (14_336, 2), (128_256, 1)] {
            let of =
                |layout| Shape::new(PackedLayout::Mma(layout), 1, rows, 64 * CHUNK_COLS).slices();
            assert_eq!(of(MmaLayout::S8), slices, "{rows}");
            assert_eq!(of(MmaLayout::U4), if rows == 14_336 { 16 } else { slices }, "{rows}");
        }
        let u4 = PackedLayout::Mma(MmaLayout::U4);
        assert_eq!(Shape::new(u4, 1, 1, 64 * CHUNK_COLS).slices(), MAX_SLICES);
    }
}
