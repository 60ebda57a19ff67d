//! The shapes of weights on a device, and the parts in which their sums are taken: the same on any
//! number of devices.

use bodkin_model::Weight;

use super::{CHUNK_COLS, Kind, TILE_ROWS};
use crate::lower::Share;

/// Warps of a large device: of its 132 blocks 16 each.
const WARPS: usize = 132 * 16;
/// Parts of a sum over columns for up to so many tiles: where tiles are few, only parts give all
/// warps of a large device something to read.
const PARTS: [(usize, usize); 5] =
    [(160, MOST_PARTS), (384, 8), (768, 4), (1536, 2), (usize::MAX, 1)];
/// The same of experts: their tiles are more than a device has teams of warps at once, but not by
/// much, and smaller teams would leave many without work at the end.
const EXPERT_PARTS: [(usize, usize); 5] =
    [(160, MOST_PARTS), (768, 8), (1536, 4), (3072, 2), (usize::MAX, 1)];
/// The most parts of a sum: `kernels/persistent.cuh` has a place for so many.
const MOST_PARTS: usize = 16;

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

/// Parts for codes of four bits, which take a device's instructions longer than its memory, so that
/// no warp may stand idle: where all warps go through the parts of tiles by turns, the fewest with
/// which that takes the least time, or a sixteenth more.
fn parts_of_codes(tiles: usize) -> usize {
    let time = |parts: usize| (tiles * parts).div_ceil(WARPS) * (MOST_PARTS / parts);
    let all = [1, 2, 4, 8, MOST_PARTS];
    let least = all.map(time).into_iter().min().unwrap_or(0);
    all.into_iter().find(|&parts| 16 * time(parts) <= 17 * least).unwrap_or(MOST_PARTS)
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
        let up_to = |parts: &[(usize, usize)]| {
            parts.iter().find(|(tiles, _)| widest < *tiles).map_or(1, |(_, parts)| *parts)
        };
        self.chunks().div_ceil(match self.kind {
            _ if self.matrices > 1 => up_to(&EXPERT_PARTS),
            Kind::U4 => parts_of_codes(widest),
            _ => up_to(&PARTS),
        })
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_give_all_warps_something_to_read() {
        // Of usual shapes of one and eight billion weights: their own width, their inner one, and
        // the head.
        for (rows, parts) in [(2048, 16), (4096, 8), (8192, 4), (14_336, 2), (128_256, 1)] {
            let of = |kind| Shape::new(kind, 1, rows, 64 * CHUNK_COLS).parts();
            assert_eq!(of(Kind::U8), parts, "{rows}");
            assert_eq!(of(Kind::U4), if rows == 14_336 { 16 } else { parts }, "{rows}");
        }
        assert_eq!(Shape::new(Kind::U4, 1, 1, 64 * CHUNK_COLS).parts(), MOST_PARTS);
    }
}
