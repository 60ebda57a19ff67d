//! The shapes of weights on a device, and the parts in which their sums are taken: the same on any
//! number of devices.

use bodkin_model::Weight;

use super::{CHUNK_COLS, Kind, TILE_ROWS};
use crate::lower::Share;

/// Parts of a sum over columns for up to so many tiles: where tiles are few, only parts give all
/// warps of a large device something to read.
const PARTS: [(usize, usize); 5] =
    [(160, MOST_PARTS), (384, 8), (768, 4), (1536, 2), (usize::MAX, 1)];
/// The same of experts: their tiles are more than a device has teams of warps at once, but not by
/// much, and smaller teams would leave many without work at the end.
const EXPERT_PARTS: [(usize, usize); 5] =
    [(160, MOST_PARTS), (768, 8), (1536, 4), (3072, 2), (usize::MAX, 1)];
/// The most parts of a sum: `kernels/persistent.cuh` has a place for so many.
pub(crate) const MOST_PARTS: usize = 16;

/// The shape of a weight: one matrix, or one for each expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) kind: Kind,
    pub(crate) matrices: usize,
    /// Of each matrix, those that a device has.
    pub(crate) rows: usize,
    /// The first of them in the file's matrix, and the rows of this.
    pub(crate) first: usize,
    pub(crate) whole: usize,
    pub(crate) cols: usize,
    /// Rows of the widest matrix of this kind that the same input is multiplied with, or of all
    /// experts' that it meets.
    pub(crate) widest: usize,
}

impl Shape {
    /// Of a weight with so many matrices, one behind the other, alone with its input.
    pub(crate) fn of(weight: &Weight, matrices: usize) -> Shape {
        Shape::new(Kind::of(weight.format), matrices, weight.rows / matrices, weight.cols)
    }

    pub(super) fn new(kind: Kind, matrices: usize, rows: usize, cols: usize) -> Shape {
        Shape { kind, matrices, rows, first: 0, whole: rows, cols, widest: rows }
    }

    /// What a device has of these rows of each matrix, where they are cut. Sums stay as they are.
    pub(crate) fn share(self, share: Share) -> Shape {
        let own = share.rows(self.whole);
        Shape { rows: own.len(), first: own.start, ..self }
    }

    /// Tiles of each matrix.
    pub(crate) fn tiles(&self) -> usize {
        self.rows.div_ceil(TILE_ROWS)
    }

    /// Chunks of a row.
    pub(crate) fn chunks(&self) -> usize {
        self.cols.div_ceil(CHUNK_COLS)
    }

    /// Chunks of each part of a sum over columns: set by the plan alone, for the sum's order is.
    /// Weights that the same input is multiplied with have parts alike, so that they can be one
    /// product.
    pub(crate) fn part(&self) -> usize {
        let widest = self.widest.div_ceil(TILE_ROWS);
        let parts = if self.matrices > 1 { &EXPERT_PARTS } else { &PARTS };
        let parts = parts.iter().find(|(tiles, _)| widest < *tiles);
        self.chunks().div_ceil(parts.map_or(1, |(_, parts)| *parts))
    }

    /// Tiles that a block of eight warps takes at once: a warp for each part of their columns, or
    /// for two if there are more than eight.
    pub(crate) fn teams(&self) -> usize {
        8 / self.parts().next_power_of_two().min(8)
    }

    /// Parts of a sum over columns.
    pub(crate) fn parts(&self) -> usize {
        self.chunks().div_ceil(self.part())
    }

    /// Bytes of a tile.
    pub(crate) fn tile_bytes(&self) -> usize {
        self.chunks() * self.kind.chunk_bytes()
    }

    /// Bytes of all planes.
    pub(crate) fn plane_bytes(&self) -> usize {
        self.matrices * self.tiles() * self.tile_bytes()
    }

    /// The number of the rows' scales.
    pub(crate) fn scales(&self) -> usize {
        self.matrices * self.tiles() * TILE_ROWS
    }
}
