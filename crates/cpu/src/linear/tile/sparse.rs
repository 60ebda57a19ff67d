//! Products of panels with zeros left out, for one token, and the way back to the dense kind for
//! more. The arithmetic is the dense kind's, in its order, so that a result has the same bits
//! whichever way it is made.

use super::{Tile, add_halves, finish};
use crate::linear::activations::{BLOCK_COLS, Block};
use crate::linear::kind::IntegerKind;
use crate::linear::level::{Lanes, PANEL_ROWS};
use crate::linear::sparse::{
    COLS, MASKS, SparseFloat, SparseInteger, SparseKind, csr as rows, groups,
};

/// How far ahead of their use lines of integers are asked for: into the second-level cache, which
/// may have more requests open than the first level, and then into the first. Each line is asked
/// for once: asking again where lines are on their way takes the place of those that are not.
const FAR_BYTES: usize = 8192;
const NEAR_BYTES: usize = 2048;

/// The same for floats. They are asked for one by one between the columns: many at once hold up the
/// loads behind them.
const FAR_FLOAT_BYTES: usize = 6144;
const NEAR_FLOAT_BYTES: usize = 2048;

/// One panel times one token, for the rows of the lanes `L`.
///
/// # Safety
/// The pointers of `tile` are valid: `panel` for a panel of the kind with `cols` columns, after
/// `panel_bytes` the next one, if there is one, `x` for `cols / 32` blocks, `out` and `bias` for
/// `rows` rows. The instructions of `L` exist, with those that expand.
#[inline(always)]
pub(crate) unsafe fn integer<L: Lanes, K: SparseInteger>(tile: &Tile) {
    const { assert!(COLS == BLOCK_COLS && <K::Dense as IntegerKind>::COLS == COLS) };
    const { assert!(<K::Dense as IntegerKind>::GROUPS == 1 && !<K::Dense as IntegerKind>::MINS) };
    // SAFETY: the loop walks exactly the heads, codes and blocks, as the caller vouches.
    unsafe {
        let mut sums = [L::float(0.0)];
        let (mut at, mut x) = (tile.panel, tile.x);
        let lines = lines_of_block(tile);
        let (mut asked, end) = (tile.panel, tile.panel.wrapping_add(tile.panel_bytes));
        for blocks in groups(tile.cols) {
            let mut head = at;
            at = at.add(blocks * K::HEAD);
            for _ in 0..blocks {
                if asked < end {
                    for _ in 0..lines {
                        L::prefetch_far(asked.wrapping_add(FAR_BYTES));
                        L::prefetch(asked.wrapping_add(NEAR_BYTES));
                        asked = asked.wrapping_add(64);
                    }
                }
                let block = &*x.cast::<Block>();
                let ([first, second], taken) = K::dots::<L>(head, at, block);
                let halves = [L::to_floats(first), L::to_floats(second)];
                sums[0] = add_halves::<L>(halves, block, K::scale::<L>(head), sums[0]);
                (head, at) = (head.add(K::HEAD), at.add(taken));
                x = x.add(tile.x_stride);
            }
        }
        finish::<L, 1>(tile, 0, sums);
    }
}

/// The lines of a panel for each of its blocks, rounded up.
fn lines_of_block(tile: &Tile) -> usize {
    (tile.panel_bytes / 64).div_ceil((tile.cols / COLS).max(1))
}

/// `P` panels times one token, for the rows of the lanes `L`. `next` are panels that may come after
/// them, or any.
///
/// # Safety
/// As [`integer`], for `panels` in the place of `tile.panel` and `cols` f32 at `x`.
#[inline(always)]
pub(crate) unsafe fn float<L: Lanes, K: SparseFloat, const P: usize>(
    tile: &Tile,
    panels: [*const u8; P],
    next: [*const u8; P],
) {
    // SAFETY: the loop walks exactly the heads, codes and columns, as the caller vouches.
    unsafe {
        let mut sums = [[L::float(0.0)]; P];
        let (mut at, mut x) = (panels, tile.x);
        let lines = lines_of_block(tile);
        let mut asked = 0;
        // From what lies behind a panel to the one that comes after it.
        let jumps = std::array::from_fn::<_, P, _>(|p| {
            next[p].addr().wrapping_sub(panels[p].addr() + tile.panel_bytes)
        });
        for blocks in groups(tile.cols) {
            let mut heads = at;
            unrolled!(P, p => { at[p] = at[p].add(blocks * K::HEAD) });
            for step in 0..blocks * MASKS {
                for _ in 0..lines / MASKS + usize::from(step % MASKS < lines % MASKS) {
                    let (far, near) = (asked + FAR_FLOAT_BYTES, asked + NEAR_FLOAT_BYTES);
                    unrolled!(P, p => {
                        let jump = |at: usize| if at < tile.panel_bytes { 0 } else { jumps[p] };
                        L::prefetch_far(panels[p].wrapping_add(far.wrapping_add(jump(far))));
                        L::prefetch(panels[p].wrapping_add(near.wrapping_add(jump(near))));
                    });
                    asked += 64;
                }
                // Unrolled without fail: the sums of a loop that is not would wait in memory.
                let mut inputs = [L::float(0.0); 4];
                unrolled!(4, i => {
                    inputs[i] = L::float(*x.add(i * tile.x_stride).cast::<f32>());
                });
                unrolled!(P, p => {
                    let (weights, taken) = K::load::<L>(heads[p], at[p]);
                    unrolled!(4, i => { sums[p][0] = L::fma(weights[i], inputs[i], sums[p][0]) });
                    (heads[p], at[p]) = (heads[p].add(K::STEP), at[p].add(taken));
                });
                x = x.add(4 * tile.x_stride);
            }
        }
        unrolled!(P, p => { finish::<L, 1>(tile, p, sums[p]) });
    }
}

/// One panel of compressed rows times one token. Whatever the lanes, those of the first rows do it
/// for all of them.
///
/// # Safety
/// As [`integer`], for a panel of compressed rows and `cols` f32 at `x`.
#[inline(always)]
pub(crate) unsafe fn csr<L: Lanes>(tile: &Tile) {
    if L::FIRST > 0 {
        return;
    }
    // SAFETY: the caller vouches; only rows below `tile.rows` are written.
    unsafe {
        let sums = rows::sums::<L>(tile.panel, tile.x, tile.x_stride);
        for (row, &sum) in sums.iter().enumerate().take(tile.rows.min(PANEL_ROWS)) {
            let sum = if tile.bias.is_null() { sum } else { sum + *tile.bias.add(row) };
            *tile.out[0].add(row) = sum;
        }
    }
}

/// Writes a panel of the kind as the dense kind.
///
/// # Safety
/// `panel` is one of `cols` columns, `dense` has room for it, and the instructions of `L` exist,
/// with those that expand.
#[inline(always)]
pub(crate) unsafe fn expand<L: Lanes, K: SparseKind>(
    panel: *const u8,
    cols: usize,
    dense: *mut u8,
) {
    // SAFETY: the loop walks exactly the heads, codes and columns, as the caller vouches.
    unsafe {
        let (mut at, mut dense) = (panel, dense);
        for blocks in groups(cols) {
            let mut head = at;
            at = at.add(blocks * K::HEAD);
            for _ in 0..blocks {
                at = at.add(K::expand::<L>(head, at, dense));
                (head, dense) = (head.add(K::HEAD), dense.add(K::DENSE));
            }
        }
    }
}
