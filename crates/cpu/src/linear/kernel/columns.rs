//! The micro-kernels of column-major weights with one token: columns whose input is zero are not
//! read. The arithmetic and its order are those of the dense layout without the zero terms, so
//! results have the same bits if the weights are finite. Bound by memory: each non-zero input costs
//! one column.

use super::tile::{Tile, finish};
use crate::linear::activations::{BLOCK_COLS, Block, NonZeros, PREFETCH_COLS};
use crate::linear::columns::layout::{COLS, ColumnBlock, ColumnInteger, FOUR, Group, SCALES};
use crate::linear::lanes::{Lanes, PANEL_ROWS};
use crate::linear::layout::{Codes, FloatLayout, IntegerLayout};
use crate::unroll::unrolled;

/// Fours of panels in the widest group.
const MAX_FOURS: usize = 8;

/// The column indices of a half block's non-zeros, four by four, and their activation codes.
type Quads<'a> = (&'a [[u32; 4]], *const i8);

/// Some panels of one group times one token, for the rows of the lanes `L`.
///
/// # Safety
/// The pointers of `tile` are valid: `x` for `cols / 32` blocks whose non-zeros are `nonzeros`,
/// `out` and `bias` for `rows` rows, the first of them that of the first panel of `group`, which
/// has `cols` columns. The instructions of `L` exist, with those that expand.
#[inline(always)]
pub(crate) unsafe fn integer<L: Lanes, K: ColumnInteger>(
    tile: &Tile,
    group: &Group,
    nonzeros: NonZeros,
) {
    const { assert!(COLS == BLOCK_COLS && <K::Dense as IntegerLayout>::COLS == COLS) };
    const { assert!(K::GROUP <= MAX_FOURS * FOUR) };
    let panels = &group.panels;
    let fours = panels.start / FOUR..panels.end.div_ceil(FOUR);
    // SAFETY: the loop walks exactly the blocks of the group and of the token.
    unsafe {
        let mut sums = [[L::float(0.0); FOUR]; MAX_FOURS];
        let blocks = tile.cols / COLS;
        for index in 0..blocks {
            if index + 1 < blocks {
                prefetch::<L, K>(group, index + 1, nonzeros);
            }
            let x = &*tile.x.add(index * tile.x_stride).cast::<Block>();
            let halves = [nonzeros.quads(2 * index), nonzeros.quads(2 * index + 1)];
            // NaN and infinity must reach the result, even if all codes are zero.
            let is_zero = halves.iter().all(|(quads, _)| quads.is_empty());
            if is_zero && (x.scales[0] + x.scales[1]).is_finite() {
                continue;
            }
            let block = ColumnBlock::of::<K>(group.start, group.width, index);
            for (four, sums) in fours.clone().zip(&mut sums) {
                // Constants, so that the selection of nibbles is resolved at compile time.
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

/// Prefetches the columns and scales that the kernel will read of a block.
#[inline(always)]
unsafe fn prefetch<L: Lanes, K: ColumnInteger>(group: &Group, index: usize, nonzeros: NonZeros) {
    const LINE: usize = 64;
    let block = ColumnBlock::of::<K>(group.start, group.width, index);
    let (first, last) = (group.panels.start, group.panels.end - 1);
    // SAFETY: passed on; a prefetch takes any address.
    unsafe {
        for half in 0..2 {
            for &column in nonzeros.quads(2 * index + half).0.iter().flatten() {
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

/// Adds the dot products of a block of four panels with the token's block.
#[inline(always)]
unsafe fn add_block<L: Lanes, K: ColumnInteger, const PART: usize>(
    block: ColumnBlock,
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

/// The integer dot products of half a block of four panels.
#[inline(always)]
unsafe fn half_dots<L: Lanes, K: ColumnInteger, const PART: usize>(
    block: ColumnBlock,
    first: usize,
    start: i32,
    (quads, x): Quads<'_>,
) -> [L::Ints; FOUR] {
    let (bits, offset) = const {
        match <K::Dense as IntegerLayout>::CODES {
            Codes::Centred { bits, offset } => (bits, offset),
            Codes::Unsigned { .. } => panic!("column-major layouts have centred codes"),
        }
    };
    // SAFETY: the caller vouches; there is a code for each column index.
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
/// As [`integer`], for `cols` f32 at `x` and the first panels of the range.
#[inline(always)]
pub(crate) unsafe fn float<L: Lanes, K: FloatLayout, const P: usize>(
    tile: &Tile,
    group: &Group,
    nonzeros: NonZeros,
) {
    let bytes = PANEL_ROWS * K::BYTES;
    let (start, width) = (group.start.wrapping_add(group.panels.start * bytes), group.width);
    let at = |column: u32| start.wrapping_add(column as usize * width * bytes);
    // SAFETY: the loop walks exactly the non-zero columns; a prefetch takes any address.
    unsafe {
        let mut sums = [L::float(0.0); P];
        let (columns, count) = nonzeros.columns();
        for (&column, &ahead) in columns[..count].iter().zip(&columns[PREFETCH_COLS..]) {
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

/// Expands some panels of a group to the row-major layout, `dense_bytes` each.
///
/// # Safety
/// `group` is one of `cols` columns, `dense` has space for its panels, and the instructions of `L`
/// exist, with those that expand.
#[inline(always)]
pub(crate) unsafe fn expand<L: Lanes, K: ColumnInteger>(
    group: &Group,
    cols: usize,
    dense: *mut u8,
    dense_bytes: usize,
) {
    let panels = &group.panels;
    for index in 0..cols / COLS {
        let block = ColumnBlock::of::<K>(group.start, group.width, index);
        for first in (panels.start - panels.start % FOUR..panels.end).step_by(FOUR) {
            // SAFETY: the loop walks exactly the blocks, as the caller vouches, and writes the
            // panels of the range.
            unsafe {
                for step in 0..COLS / 4 {
                    let column = |i: usize| block.column::<K>((4 * step + i) as u32, first);
                    let columns = std::array::from_fn(column);
                    let steps = K::steps::<L>(columns, first / FOUR % 2);
                    for (panel, &codes) in (first..).zip(&steps) {
                        if panels.contains(&panel) {
                            let to = dense.add((panel - panels.start) * dense_bytes);
                            K::store::<L>(codes, step, to.add(index * K::Dense::BYTES));
                        }
                    }
                }
                for panel in first.max(panels.start)..panels.end.min(first + FOUR) {
                    let to = dense.add((panel - panels.start) * dense_bytes);
                    let scales = to.add((index + 1) * K::Dense::BYTES - SCALES);
                    scales.copy_from_nonoverlapping(block.scales(panel), SCALES);
                }
            }
        }
    }
}
