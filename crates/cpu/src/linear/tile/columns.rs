//! Products of weights by columns with one token, whose zeros are not read. The arithmetic is the
//! dense kind's, in its order, without the terms that are zero, so that a result has the same bits
//! whichever way it is made, if the weights are finite.

use super::{Tile, finish};
use crate::linear::activations::{AHEAD, BLOCK_COLS, Block, Kept};
use crate::linear::columns::{self as by_columns, COLS, ColumnInteger, FOUR, Group};
use crate::linear::kind::{Codes, FloatKind, IntegerKind};
use crate::linear::level::{Lanes, PANEL_ROWS};

/// Fours of the widest group.
const MOST_FOURS: usize = 8;

/// The names of a half's columns in its block, four by four, and the codes of their inputs.
type Quads<'a> = (&'a [[u32; 4]], *const i8);

/// Some panels of one group times one token, for the rows of the lanes `L`.
///
/// # Safety
/// The pointers of `tile` are valid: `x` for `cols / 32` blocks whose index is `kept`, `out` and
/// `bias` for `rows` rows, the first of them that of the first panel of `group`, which has `cols`
/// columns. The instructions of `L` exist, with those that expand.
#[inline(always)]
pub(crate) unsafe fn integer<L: Lanes, K: ColumnInteger>(tile: &Tile, group: &Group, kept: Kept) {
    const { assert!(COLS == BLOCK_COLS && <K::Dense as IntegerKind>::COLS == COLS) };
    const { assert!(K::GROUP <= MOST_FOURS * FOUR) };
    let panels = &group.panels;
    let fours = panels.start / FOUR..panels.end.div_ceil(FOUR);
    // SAFETY: the loop walks exactly the blocks of the group and of the token.
    unsafe {
        let mut sums = [[L::float(0.0); FOUR]; MOST_FOURS];
        let blocks = tile.cols / COLS;
        for index in 0..blocks {
            if index + 1 < blocks {
                ask::<L, K>(group, index + 1, kept);
            }
            let x = &*tile.x.add(index * tile.x_stride).cast::<Block>();
            let halves = [kept.quads(2 * index), kept.quads(2 * index + 1)];
            // A scale that is not finite has to show, even if all codes are zero.
            let is_zero = halves.iter().all(|(quads, _)| quads.is_empty());
            if is_zero && (x.scales[0] + x.scales[1]).is_finite() {
                continue;
            }
            let block = by_columns::Block::of::<K>(group.start, group.width, index);
            for (four, sums) in fours.clone().zip(&mut sums) {
                // Both are constants for those who make steps.
                match four % 2 {
                    0 => add_block::<L, K, 0>(block, four * FOUR, x, halves, sums),
                    _ => add_block::<L, K, 1>(block, four * FOUR, x, halves, sums),
                }
            }
        }
        let all = sums.iter().flatten().skip(panels.start % FOUR);
        for (panel, &sum) in all.enumerate().take(panels.len()) {
            finish::<L, 1>(tile, panel, [sum]);
        }
    }
}

/// Asks for what a block will be read of.
#[inline(always)]
unsafe fn ask<L: Lanes, K: ColumnInteger>(group: &Group, index: usize, kept: Kept) {
    const LINE: usize = 64;
    let block = by_columns::Block::of::<K>(group.start, group.width, index);
    let (first, last) = (group.panels.start, group.panels.end - 1);
    // SAFETY: passed on; what is asked for need not exist.
    unsafe {
        for half in 0..2 {
            for &column in kept.quads(2 * index + half).0.iter().flatten() {
                let mut line = block.column::<K>(column, first);
                let end = block.column::<K>(column, last).wrapping_add(K::COLUMN);
                while line < end {
                    L::prefetch(line);
                    line = line.wrapping_add(LINE);
                }
            }
        }
        for panel in (first..=last).step_by(2) {
            L::prefetch(block.scales(panel));
        }
    }
}

/// Adds the products of four panels' block with a block of the token.
#[inline(always)]
unsafe fn add_block<L: Lanes, K: ColumnInteger, const PART: usize>(
    block: by_columns::Block,
    first: usize,
    x: &Block,
    halves: [Quads<'_>; 2],
    sums: &mut [L::Floats; FOUR],
) {
    // SAFETY: the caller vouches.
    unsafe {
        let front = half_dots::<L, K, PART>(block, first, x.starts[0], halves[0]);
        let back = half_dots::<L, K, PART>(block, first, x.starts[1], halves[1]);
        let scales = x.scales.map(|scale| L::float(scale));
        unrolled!(FOUR, p => {
            let front = L::mul(L::to_floats(front[p]), scales[0]);
            let both = L::fma(L::to_floats(back[p]), scales[1], front);
            sums[p] = L::fma(both, L::from_f16(block.scales(first + p)), sums[p]);
        });
    }
}

/// The integer dots of half a block of four panels.
#[inline(always)]
unsafe fn half_dots<L: Lanes, K: ColumnInteger, const PART: usize>(
    block: by_columns::Block,
    first: usize,
    start: i32,
    (quads, x): Quads<'_>,
) -> [L::Ints; FOUR] {
    let Codes::Centred { bits, offset } = <K::Dense as IntegerKind>::CODES else {
        unreachable!("all kinds by columns are centred");
    };
    // SAFETY: the caller vouches; there are as many codes as names.
    unsafe {
        let mut dots = [L::centred_start(start, bits, offset); FOUR];
        for (i, quad) in quads.iter().enumerate() {
            let columns = [
                block.column::<K>(quad[0], first),
                block.column::<K>(quad[1], first),
                block.column::<K>(quad[2], first),
                block.column::<K>(quad[3], first),
            ];
            let steps = K::steps::<L>(columns, PART);
            let x = x.add(4 * i);
            unrolled!(FOUR, p => {
                let codes = L::centre(steps[p], bits, offset);
                dots[p] = L::centred_step(dots[p], codes, bits, x);
            });
        }
        dots
    }
}

/// `P` panels of one group times one token, for the rows of the lanes `L`.
///
/// # Safety
/// As [`integer`], for `cols` f32 at `x` and the first panels that are meant.
#[inline(always)]
pub(crate) unsafe fn float<L: Lanes, K: FloatKind, const P: usize>(
    tile: &Tile,
    group: &Group,
    kept: Kept,
) {
    let bytes = PANEL_ROWS * K::BYTES;
    let (start, width) = (group.start.wrapping_add(group.panels.start * bytes), group.width);
    let at = |column: u32| start.wrapping_add(column as usize * width * bytes);
    // SAFETY: the loop walks exactly the columns that are kept; what is asked for need not exist.
    unsafe {
        let mut sums = [L::float(0.0); P];
        let (columns, count) = kept.columns();
        for (&column, &ahead) in columns[..count].iter().zip(&columns[AHEAD..]) {
            for line in (0..P * bytes).step_by(64) {
                L::prefetch(at(ahead).wrapping_add(line));
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
