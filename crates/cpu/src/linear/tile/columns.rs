//! Products of weights by columns with one token, whose zeros are not read. The arithmetic is the
//! dense kind's, in its order, without the terms that are zero, so that a result has the same bits
//! whichever way it is made.

use std::ops::Range;

use super::{Tile, finish};
use crate::linear::activations::{AHEAD, BLOCK_COLS, Block, Kept};
use crate::linear::columns::{CODES, ColumnInteger, GROUP};
use crate::linear::kind::{Codes, FloatKind, IntegerKind};
use crate::linear::level::{Lanes, PANEL_ROWS};

/// Some panels of one group times one token, for the rows of the lanes `L`.
///
/// # Safety
/// The pointers of `tile` are valid: `panel` for a group of `cols` columns, `x` for `cols / 32`
/// blocks whose index is `kept`, `out` and `bias` for `rows` rows, the first of them that of the
/// first of `panels`. The instructions of `L` exist, with those that expand.
#[inline(always)]
pub(crate) unsafe fn integer<L: Lanes, K: ColumnInteger>(
    tile: &Tile,
    panels: Range<usize>,
    kept: Kept,
) {
    const { assert!(<K::Dense as IntegerKind>::COLS == BLOCK_COLS) };
    // SAFETY: the loop walks exactly the blocks of the group and of the token.
    unsafe {
        let mut sums = [L::float(0.0); GROUP];
        let blocks = tile.cols / BLOCK_COLS;
        for index in 0..blocks {
            if index + 1 < blocks {
                ask::<L, K>(tile.panel.add((index + 1) * K::BYTES), index + 1, &panels, kept);
            }
            let x = &*tile.x.add(index * tile.x_stride).cast::<Block>();
            let halves = [kept.quads(2 * index), kept.quads(2 * index + 1)];
            // A scale that is not finite has to show, even if all codes are zero.
            let is_zero = halves.iter().all(|(quads, _)| quads.is_empty());
            if is_zero && (x.scales[0] + x.scales[1]).is_finite() {
                continue;
            }
            let block = tile.panel.add(index * K::BYTES);
            for panel in panels.clone() {
                let sum = &mut sums[panel - panels.start];
                *sum = add_block::<L, K>(block, panel, x, halves, *sum);
            }
        }
        for panel in 0..panels.len() {
            finish::<L, 1>(tile, panel, [sums[panel]]);
        }
    }
}

/// Asks for what the next block will be read of.
#[inline(always)]
unsafe fn ask<L: Lanes, K: ColumnInteger>(
    block: *const u8,
    index: usize,
    panels: &Range<usize>,
    kept: Kept,
) {
    const LINE: usize = 64;
    let panel_bytes = K::COLUMN / GROUP;
    let (start, bytes) = (panels.start * panel_bytes, panels.len() * panel_bytes);
    // SAFETY: passed on; what is asked for need not exist.
    unsafe {
        for half in 0..2 {
            for quad in kept.quads(2 * index + half).0 {
                for &column in quad {
                    let column = block.wrapping_add(CODES + column as usize * K::COLUMN + start);
                    for line in (0..bytes).step_by(LINE) {
                        L::prefetch(column.wrapping_add(line));
                    }
                }
            }
        }
        for line in (0..CODES).step_by(LINE) {
            L::prefetch(block.wrapping_add(line));
        }
    }
}

/// Adds the product of a panel's block with a block of the token.
#[inline(always)]
unsafe fn add_block<L: Lanes, K: ColumnInteger>(
    block: *const u8,
    panel: usize,
    x: &Block,
    halves: [(&[[u32; 4]], *const i8); 2],
    sum: L::Floats,
) -> L::Floats {
    // SAFETY: the caller vouches.
    unsafe {
        let first = half_dot::<L, K>(block, panel, x.starts[0], halves[0]);
        let second = half_dot::<L, K>(block, panel, x.starts[1], halves[1]);
        let first = L::mul(first, L::float(x.scales[0]));
        let both = L::fma(second, L::float(x.scales[1]), first);
        L::fma(both, K::scale::<L>(block, panel), sum)
    }
}

/// The integer dot of half a block, as floats.
#[inline(always)]
unsafe fn half_dot<L: Lanes, K: ColumnInteger>(
    block: *const u8,
    panel: usize,
    start: i32,
    (quads, x): (&[[u32; 4]], *const i8),
) -> L::Floats {
    let Codes::Centred { bits, offset } = <K::Dense as IntegerKind>::CODES else {
        unreachable!("all kinds by columns are centred");
    };
    // SAFETY: the caller vouches; a half has at most four quads.
    unsafe {
        let mut steps = [L::zero_bytes(); 4];
        for (step, &columns) in steps.iter_mut().zip(quads) {
            *step = L::centre(K::step::<L>(block, panel, columns), bits, offset);
        }
        L::to_floats(L::centred_dot(start, &steps[..quads.len().min(4)], bits, offset, x))
    }
}

/// `P` panels of one group times one token, for the rows of the lanes `L`.
///
/// # Safety
/// As [`integer`], for `cols` f32 at `x` and the panels from `first` on.
#[inline(always)]
pub(crate) unsafe fn float<L: Lanes, K: FloatKind, const P: usize>(
    tile: &Tile,
    first: usize,
    kept: Kept,
) {
    let bytes = PANEL_ROWS * K::BYTES;
    // SAFETY: the loop walks exactly the columns that are kept; behind the last name come more that
    // are only asked for.
    unsafe {
        let mut sums = [L::float(0.0); P];
        let columns = kept.columns();
        let at = |column: u32| tile.panel.wrapping_add((column as usize * GROUP + first) * bytes);
        for (i, &column) in columns.iter().enumerate() {
            let ahead = at(*columns.as_ptr().add(i + AHEAD));
            for line in (0..P * bytes).step_by(64) {
                L::prefetch(ahead.wrapping_add(line));
            }
            let x = L::float(*tile.x.add(column as usize * tile.x_stride).cast::<f32>());
            let weights = at(column);
            unrolled!(P, p => {
                sums[p] = L::fma(K::load::<L>(weights.add(p * bytes)), x, sums[p]);
            });
        }
        unrolled!(P, p => { finish::<L, 1>(tile, p, [sums[p]]) });
    }
}
