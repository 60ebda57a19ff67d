//! Matmul of prefill rows by tile registers. Threads take panels, a thread the columns of a few
//! panels at a time, so that those columns of all tokens stay in L2 while it goes through the
//! panels. Sums wait in scratch between two blocks of columns.

use std::ops::Range;

use super::block::Gemm;
use crate::amx::{Amx, EmulatedAmx, TILE_BYTES, TILE_COLS, TILE_ROWS, TileUnit};
use crate::isa::Isa;
use crate::linear::kernel::amx::{self, TileBlock};
use crate::linear::lanes::PANEL_ROWS;
use crate::linear::layout::{FloatLayout, IntegerLayout, VisitLayout};
use crate::memory::prefetch_l2;

/// Columns that are widened at a time, for each part of the activations: the widened columns of two
/// panels and those of two tiles of tokens fit L1.
const COLS: usize = 256;
/// Panels that share the columns of the activations.
const GROUP_PANELS: usize = 16;
/// Tiles of tokens for which weights are widened once.
const GROUP_TILES: usize = 32;

const WIDENED_LEN: usize = 2 * COLS / TILE_COLS * TILE_BYTES / size_of::<f32>();
const SUMS_LEN: usize = GROUP_PANELS * GROUP_TILES * TILE_BYTES / size_of::<f32>();
/// Elements of scratch that the matmul needs, besides a panel if the weight is not packed densely.
pub(super) const TILE_SCRATCH_LEN: usize = WIDENED_LEN + SUMS_LEN;

/// Runs the matmul, once its layout is known.
pub(super) struct TileGemm<'a>(pub(super) Gemm<'a>);

/// Widens columns of a panel to scratch.
type Widen = unsafe fn(*const u8, Range<usize>, *mut u8);

impl VisitLayout for TileGemm<'_> {
    type Output = ();

    fn integer<K: IntegerLayout>(self) {
        const { assert!(COLS.is_multiple_of(K::COLS)) };
        self.unit::<1, 1>(amx::widen_integers::<K>);
    }

    fn float<K: FloatLayout>(self) {
        match K::BF16_PARTS {
            1 => self.unit::<2, 1>(amx::widen_floats::<K>),
            _ => self.unit::<2, 2>(amx::widen_floats::<K>),
        }
    }
}

impl TileGemm<'_> {
    fn unit<const X: usize, const W: usize>(self, widen: Widen) {
        match self.0.isa {
            Isa::Amx => run::<Amx, X, W>(self.0, widen),
            _ => run::<EmulatedAmx, X, W>(self.0, widen),
        }
    }
}

fn run<U: TileUnit, const X: usize, const W: usize>(mut gemm: Gemm<'_>, widen: Widen) {
    let bytes = gemm.weight.panel_bytes();
    let scratch = std::mem::take(&mut gemm.scratch).split_at_mut_checked(TILE_SCRATCH_LEN);
    let (scratch, panel_scratch) = scratch.expect("scratch for tiles");
    let group = match gemm.weight.start() {
        Some(_) => GROUP_PANELS,
        None => GROUP_PANELS.min(size_of_val(panel_scratch) / bytes.max(1)),
    };
    assert!(group > 0, "{} bytes of scratch for a panel of {bytes}", size_of_val(panel_scratch));
    let (widened, sums) = scratch.split_at_mut(WIDENED_LEN);
    let (widened, sums) = (widened.as_mut_ptr().cast(), sums.as_mut_ptr().cast());
    // SAFETY: an `Isa` proves its instructions; a thread runs one matmul at a time.
    let unit = unsafe { U::configure() };
    let mut matmul = TileMatmul::<U, X, W> { gemm: &gemm, unit, widen, widened, sums };
    for first in gemm.panels.clone().step_by(group) {
        let panels = first..gemm.panels.end.min(first + group);
        let start = match gemm.weight.start() {
            // SAFETY: the memory holds all panels.
            Some(start) => unsafe { start.add(first * bytes) },
            None => {
                let start = panel_scratch.as_mut_ptr().cast();
                // SAFETY: the scratch has space for the group and belongs to this thread.
                unsafe { gemm.weight.pack_into(gemm.isa, panels.clone(), start) };
                start.cast_const()
            }
        };
        matmul.group(panels, start);
    }
}

/// A matmul with activations in `X` parts and weights in `W` parts.
struct TileMatmul<'a, U, const X: usize, const W: usize> {
    gemm: &'a Gemm<'a>,
    unit: U,
    widen: Widen,
    /// `[2 panels]`.
    widened: *mut u8,
    /// `[GROUP_PANELS / 2][tiles of tokens][2 panels]`.
    sums: *mut u8,
}

/// Some columns of up to two panels, and some tiles of tokens.
struct Block {
    /// The numbers of the panels in the weight.
    panels: Range<usize>,
    /// The address of the first panel.
    start: *const u8,
    cols: Range<usize>,
    tiles: Range<usize>,
    /// The sums of the first tile.
    sums: *mut u8,
    /// What the next block widens.
    next: *const u8,
}

impl<U: TileUnit, const X: usize, const W: usize> TileMatmul<'_, U, X, W> {
    /// Columns of a block.
    const COLS: usize = COLS / X;
    /// Bytes of the widened columns of a panel.
    const WIDENED_BYTES: usize = Self::COLS / TILE_COLS * W * TILE_BYTES;

    /// Multiplies a group of panels, which begins at `start`, with all tokens.
    fn group(&mut self, panels: Range<usize>, start: *const u8) {
        let (cols, bytes) = (self.gemm.weight.cols(), self.gemm.weight.panel_bytes());
        let tokens = self.gemm.tokens.clone();
        let tiles = tokens.start / TILE_ROWS..tokens.end.div_ceil(TILE_ROWS);
        for tile in tiles.clone().step_by(GROUP_TILES) {
            let tiles = tile..tiles.end.min(tile + GROUP_TILES);
            for col in (0..cols).step_by(Self::COLS) {
                let cols = col..cols.min(col + Self::COLS);
                for first in panels.clone().step_by(2) {
                    let index = first - panels.start;
                    let pair = first..panels.end.min(first + 2);
                    let next = match pair.end < panels.end {
                        true => self.source(start, index + 2, cols.start),
                        false => self.source(start, 0, cols.end),
                    };
                    self.block(Block {
                        panels: pair,
                        start: start.wrapping_add(index * bytes),
                        cols: cols.clone(),
                        tiles: tiles.clone(),
                        sums: self.sums.wrapping_add(index * GROUP_TILES * TILE_BYTES),
                        next,
                    });
                }
            }
        }
    }

    /// The address of a column of a panel.
    fn source(&self, start: *const u8, panel: usize, col: usize) -> *const u8 {
        let (cols, bytes) = (self.gemm.weight.cols(), self.gemm.weight.panel_bytes());
        start.wrapping_add(panel * bytes + col * bytes / cols)
    }

    fn block(&mut self, block: Block) {
        let (gemm, bytes) = (self.gemm, self.gemm.weight.panel_bytes());
        let (panels, cols) = (block.panels.len(), block.cols.clone());
        for panel in 0..panels {
            let to = self.widened.wrapping_add(panel * Self::WIDENED_BYTES);
            // SAFETY: the memory holds the panels, the scratch the columns of two; an `Isa` proves
            // its instructions.
            unsafe { (self.widen)(block.start.add(panel * bytes), cols.clone(), to) }
        }
        let lines = panels * (cols.len() * bytes / gemm.weight.cols()).div_ceil(64);
        let line = |i: usize| {
            let per_panel = lines / panels;
            block.next.wrapping_add(i / per_panel * bytes + i % per_panel * 64)
        };
        let count = block.tiles.len();
        for (index, tile) in block.tiles.clone().enumerate().step_by(2) {
            let tiles = (block.tiles.end - tile).min(2);
            let prefetched = index * lines / count..(index + tiles) * lines / count;
            prefetched.for_each(|i| prefetch_l2(line(i)));
            let (x, _) = gemm.x.row(tile * TILE_ROWS);
            let operands = TileBlock {
                x: x.wrapping_add(cols.start / TILE_COLS * X * TILE_BYTES),
                x_stride: gemm.x.tile_bytes(),
                weights: self.widened,
                weights_stride: Self::WIDENED_BYTES,
                steps: cols.len().div_ceil(TILE_COLS),
                is_first: cols.start == 0,
                sums: block.sums.wrapping_add(index * panels * TILE_BYTES),
            };
            let unit = &mut self.unit;
            // SAFETY: the activations have the tiles and the columns, the scratch has space for
            // both panels and for the sums of the group.
            unsafe {
                match (panels, tiles) {
                    (2, 2) => amx::multiply::<U, 2, 2, X, W>(unit, &operands),
                    (2, _) => amx::multiply::<U, 2, 1, X, W>(unit, &operands),
                    (_, 2) => amx::multiply::<U, 1, 2, X, W>(unit, &operands),
                    (_, _) => amx::multiply::<U, 1, 1, X, W>(unit, &operands),
                }
            }
            if cols.end == gemm.weight.cols() {
                (tile..tile + tiles).enumerate().for_each(|(i, tile)| {
                    let sums = operands.sums.wrapping_add(i * panels * TILE_BYTES);
                    finish(gemm, block.panels.clone(), tile, sums);
                });
            }
        }
    }
}

/// Writes the sums of a tile of tokens with some panels.
fn finish(gemm: &Gemm<'_>, panels: Range<usize>, tile: usize, sums: *const u8) {
    let first_token = tile * TILE_ROWS;
    let begin = gemm.tokens.start.max(first_token) - first_token;
    let end = gemm.tokens.end.min(first_token + TILE_ROWS) - first_token;
    for (i, panel) in panels.enumerate() {
        let first = panel * PANEL_ROWS;
        let rows = PANEL_ROWS.min(gemm.weight.rows() - first);
        let bias = gemm.bias.map(|bias| bias[first..].as_ptr());
        let sums = sums.wrapping_add(i * TILE_BYTES);
        // SAFETY: `matmul` checked the tokens and the rows against `out`; an `Isa` proves its
        // instructions.
        unsafe {
            let out = |token: usize| gemm.out.row(first_token + token).add(first);
            amx::finish(sums, begin..end, rows, bias, out);
        }
    }
}
