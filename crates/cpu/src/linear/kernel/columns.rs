//! The micro-kernels of column-major weights with one token: columns whose input is zero are not
//! read. The arithmetic and its order are those of the dense layout without the zero terms, so
//! results have the same bits if the weights are finite. Bound by memory: each non-zero input costs
//! one column.

use super::tile::{Tile, finish};
use crate::linear::activations::{BLOCK_COLS, Block, NonZeros, PREFETCH_COLS};
use crate::linear::columns::layout::{
    ColumnBlock, ColumnInteger, Group, INTERLEAVED_PANELS, SCALE_BYTES,
};
use crate::linear::lanes::{Lanes, PANEL_ROWS};
use crate::linear::layout::{Codes, FloatLayout, IntegerLayout};
use crate::unroll::unrolled;

/// Quartets of panels in the widest group.
const MAX_QUARTETS: usize = 8;

/// The column indices of a half block's non-zeros, four by four, and their activation codes.
type Quads<'a> = (&'a [[u32; 4]], *const i8);

/// Some panels of one group times one token, for the rows of the lanes `L`.
///
/// # Safety
/// The pointers of `tile` are valid: `x` for `cols / 32` blocks whose non-zeros are `nonzeros`,
/// `out` and `bias` for `rows` rows, the first of them that of the first panel of `group`, which
/// has `cols` columns. The instructions of `L` exist, and those that `Isa::for_expansion` checks.
#[inline(always)]
pub(crate) unsafe fn integer<L: Lanes, K: ColumnInteger>(
    tile: &Tile,
    group: &Group,
    nonzeros: NonZeros,
) {
    const { assert!(<K::PanelMajor as IntegerLayout>::COLS == BLOCK_COLS) };
    const { assert!(K::GROUP_PANELS <= MAX_QUARTETS * INTERLEAVED_PANELS) };
    let panels = &group.panels;
    let quartets = panels.start / INTERLEAVED_PANELS..panels.end.div_ceil(INTERLEAVED_PANELS);
    // SAFETY: the loop walks exactly the blocks of the group and of the token.
    unsafe {
        let mut sums = [[L::float(0.0); INTERLEAVED_PANELS]; MAX_QUARTETS];
        let blocks = tile.cols / BLOCK_COLS;
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
            let block = ColumnBlock::of::<K>(group.start, group.panel_count, index);
            for (quartet, sums) in quartets.clone().zip(&mut sums) {
                // Constants, so that the selection of nibbles is resolved at compile time.
                match quartet % 2 {
                    0 => add_block::<L, K, 0>(block, quartet * INTERLEAVED_PANELS, x, halves, sums),
                    _ => add_block::<L, K, 1>(block, quartet * INTERLEAVED_PANELS, x, halves, sums),
                }
            }
        }
        let all = sums.iter().flatten().skip(panels.start % INTERLEAVED_PANELS);
        for (panel, &sum) in all.enumerate().take(panels.len()) {
            finish::<L, 1>(tile, panel, [sum]);
        }
    }
}

/// Prefetches the columns and scales that the kernel will read of a block.
#[inline(always)]
unsafe fn prefetch<L: Lanes, K: ColumnInteger>(group: &Group, index: usize, nonzeros: NonZeros) {
    const LINE: usize = 64;
    let block = ColumnBlock::of::<K>(group.start, group.panel_count, index);
    let (first, last) = (group.panels.start, group.panels.end - 1);
    // SAFETY: passed on; a prefetch takes any address.
    unsafe {
        for half in 0..2 {
            for &column in nonzeros.quads(2 * index + half).0.iter().flatten() {
                let mut line = block.column::<K>(column, first);
                let end = block.column::<K>(column, last).wrapping_add(K::COLUMN_BYTES);
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
unsafe fn add_block<L: Lanes, K: ColumnInteger, const PANEL_HALF: usize>(
    block: ColumnBlock,
    first: usize,
    x: &Block,
    halves: [Quads<'_>; 2],
    sums: &mut [L::Floats; INTERLEAVED_PANELS],
) {
    // SAFETY: the caller vouches.
    unsafe {
        let front = half_dots::<L, K, PANEL_HALF>(block, first, x.starts[0], halves[0]);
        let back = half_dots::<L, K, PANEL_HALF>(block, first, x.starts[1], halves[1]);
        let scales = x.scales.map(|scale| L::float(scale));
        unrolled!(INTERLEAVED_PANELS, p => {
            let front = L::mul(L::to_floats(front[p]), scales[0]);
            let both = L::fma(L::to_floats(back[p]), scales[1], front);
            sums[p] = L::fma(both, L::from_f16(block.scales(first + p)), sums[p]);
        });
    }
}

/// The integer dot products of half a block of four panels.
#[inline(always)]
unsafe fn half_dots<L: Lanes, K: ColumnInteger, const PANEL_HALF: usize>(
    block: ColumnBlock,
    first: usize,
    start: i32,
    (quads, x): Quads<'_>,
) -> [L::Ints; INTERLEAVED_PANELS] {
    let (bits, offset) = const {
        match <K::PanelMajor as IntegerLayout>::CODES {
            Codes::Centred { bits, offset } => (bits, offset),
            Codes::Unsigned { .. } => panic!("column-major layouts have centred codes"),
        }
    };
    // SAFETY: the caller vouches; there is a code for each column index.
    unsafe {
        let mut dots = [L::centred_start(start, bits, offset); INTERLEAVED_PANELS];
        for (i, quad) in quads.iter().enumerate() {
            let columns = [
                block.column::<K>(quad[0], first),
                block.column::<K>(quad[1], first),
                block.column::<K>(quad[2], first),
                block.column::<K>(quad[3], first),
            ];
            let operands = K::dot_operands::<L>(columns, PANEL_HALF);
            let x = x.add(4 * i);
            unrolled!(INTERLEAVED_PANELS, p => {
                let codes = L::centre(operands[p], bits, offset);
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
    let (start, width) = (group.start.wrapping_add(group.panels.start * bytes), group.panel_count);
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

/// Expands some panels of a group to the ordinary layout, `dense_bytes` each.
///
/// # Safety
/// `group` is one of `cols` columns, `dense` has space for its panels, and the instructions of `L`
/// exist, and those that `Isa::for_expansion` checks.
#[inline(always)]
pub(crate) unsafe fn expand<L: Lanes, K: ColumnInteger>(
    group: &Group,
    cols: usize,
    dense: *mut u8,
    dense_bytes: usize,
) {
    let panels = &group.panels;
    for index in 0..cols / BLOCK_COLS {
        let block = ColumnBlock::of::<K>(group.start, group.panel_count, index);
        for first in (panels.start - panels.start % INTERLEAVED_PANELS..panels.end)
            .step_by(INTERLEAVED_PANELS)
        {
            // SAFETY: the loop walks exactly the blocks, as the caller vouches, and writes the
            // panels of the range.
            unsafe {
                for step in 0..BLOCK_COLS / 4 {
                    let column = |i: usize| block.column::<K>((4 * step + i) as u32, first);
                    let columns = std::array::from_fn(column);
                    let operands = K::dot_operands::<L>(columns, first / INTERLEAVED_PANELS % 2);
                    for (panel, &codes) in (first..).zip(&operands) {
                        if panels.contains(&panel) {
                            let to = dense.add((panel - panels.start) * dense_bytes);
                            K::store::<L>(codes, step, to.add(index * K::PanelMajor::BYTES));
                        }
                    }
                }
                for panel in first.max(panels.start)..panels.end.min(first + INTERLEAVED_PANELS) {
                    let to = dense.add((panel - panels.start) * dense_bytes);
                    let scales = to.add((index + 1) * K::PanelMajor::BYTES - SCALE_BYTES);
                    scales.copy_from_nonoverlapping(block.scales(panel), SCALE_BYTES);
                }
            }
        }
    }
}
