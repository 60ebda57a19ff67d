//! The micro-kernels of sparse panels with one token, and their expansion to the dense layout for
//! more tokens. The arithmetic and its order are those of the dense layout, so results have the
//! same bits. Bound by memory, or by the expansion of masks where few weights are zero.

use super::dense::add_halves;
use super::tile::{Tile, finish};
use crate::linear::activations::{BLOCK_COLS, Block};
use crate::linear::lanes::{Lanes, PANEL_ROWS};
use crate::linear::layout::IntegerLayout;
use crate::linear::sparse::csr;
use crate::linear::sparse::layout::{
    COLS, MASKS, SparseFloat, SparseInteger, SparseLayout, group_blocks,
};
use crate::unroll::unrolled;

/// Prefetch distances of integer panels: first into L2, which can have more requests open than L1,
/// then into L1. Each line is prefetched once, since a repeated request takes the place of another.
const L2_BYTES: usize = 8192;
const L1_BYTES: usize = 2048;

/// Prefetch distances of float panels. Requests are spread between the columns: a burst of them
/// delays the loads behind it.
const L2_FLOAT_BYTES: usize = 6144;
const L1_FLOAT_BYTES: usize = 2048;

/// One panel times one token, for the rows of the lanes `L`.
///
/// # Safety
/// The pointers of `tile` are valid: `panel` for a panel of the layout with `cols` columns,
/// followed after `panel_bytes` by the next one if there is one, `x` for `cols / 32` blocks, `out`
/// and `bias` for `rows` rows. The instructions of `L` exist, and those that `Isa::for_expansion`
/// checks.
#[inline(always)]
pub(crate) unsafe fn integer<L: Lanes, K: SparseInteger>(tile: &Tile) {
    const { assert!(COLS == BLOCK_COLS && <K::Dense as IntegerLayout>::COLS == COLS) };
    const { assert!(<K::Dense as IntegerLayout>::GROUPS == 1) };
    const { assert!(!<K::Dense as IntegerLayout>::HAS_MINS) };
    // SAFETY: the loop walks exactly the heads, codes and blocks, as the caller vouches.
    unsafe {
        let mut sums = [L::float(0.0)];
        let (mut at, mut x) = (tile.panel, tile.x);
        let lines = lines_per_block(tile);
        let (mut prefetched, end) = (tile.panel, tile.panel.wrapping_add(tile.panel_bytes));
        for blocks in group_blocks(tile.cols) {
            let mut head = at;
            at = at.add(blocks * K::HEAD);
            for _ in 0..blocks {
                if prefetched < end {
                    for _ in 0..lines {
                        L::prefetch_l2(prefetched.wrapping_add(L2_BYTES));
                        L::prefetch(prefetched.wrapping_add(L1_BYTES));
                        prefetched = prefetched.wrapping_add(64);
                    }
                }
                let block = &*x.cast::<Block>();
                let ([first, second], used) = K::dots::<L>(head, at, block);
                let halves = [L::to_floats(first), L::to_floats(second)];
                sums[0] = add_halves::<L>(halves, block, K::scale::<L>(head), sums[0]);
                (head, at) = (head.add(K::HEAD), at.add(used));
                x = x.add(tile.x_stride);
            }
        }
        finish::<L, 1>(tile, 0, sums);
    }
}

/// Cache lines of a panel per block, rounded up.
fn lines_per_block(tile: &Tile) -> usize {
    (tile.panel_bytes / 64).div_ceil((tile.cols / COLS).max(1))
}

/// `P` panels times one token, for the rows of the lanes `L`. `next` are the panels to prefetch
/// after them.
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
        let lines = lines_per_block(tile);
        let mut prefetched = 0;
        // The distance from the end of a panel to the panel after it.
        let jumps = std::array::from_fn::<_, P, _>(|p| {
            next[p].addr().wrapping_sub(panels[p].addr() + tile.panel_bytes)
        });
        for blocks in group_blocks(tile.cols) {
            let mut heads = at;
            unrolled!(P, p => { at[p] = at[p].add(blocks * K::HEAD) });
            for step in 0..blocks * MASKS {
                for _ in 0..lines / MASKS + usize::from(step % MASKS < lines % MASKS) {
                    let (far, near) = (prefetched + L2_FLOAT_BYTES, prefetched + L1_FLOAT_BYTES);
                    unrolled!(P, p => {
                        let jump = |at: usize| if at < tile.panel_bytes { 0 } else { jumps[p] };
                        L::prefetch_l2(panels[p].wrapping_add(far.wrapping_add(jump(far))));
                        L::prefetch(panels[p].wrapping_add(near.wrapping_add(jump(near))));
                    });
                    prefetched += 64;
                }
                let mut inputs = [L::float(0.0); 4];
                unrolled!(4, i => {
                    inputs[i] = L::float(*x.add(i * tile.x_stride).cast::<f32>());
                });
                unrolled!(P, p => {
                    let (weights, used) = K::load::<L>(heads[p], at[p]);
                    unrolled!(4, i => { sums[p][0] = L::fma(weights[i], inputs[i], sums[p][0]) });
                    (heads[p], at[p]) = (heads[p].add(K::STEP), at[p].add(used));
                });
                x = x.add(4 * tile.x_stride);
            }
        }
        unrolled!(P, p => { finish::<L, 1>(tile, p, sums[p]) });
    }
}

/// One CSR panel times one token. The kernel is scalar: the lanes of the first rows compute all 16.
///
/// # Safety
/// As [`integer`], for a CSR panel and `cols` f32 at `x`.
#[inline(always)]
pub(crate) unsafe fn csr<L: Lanes>(tile: &Tile) {
    if L::FIRST > 0 {
        return;
    }
    // SAFETY: the caller vouches; only rows below `tile.rows` are written.
    unsafe {
        let sums = csr::sums::<L>(tile.panel, tile.x, tile.x_stride);
        for (row, &sum) in sums.iter().enumerate().take(tile.rows.min(PANEL_ROWS)) {
            let sum = if tile.bias.is_null() { sum } else { sum + *tile.bias.add(row) };
            *tile.out[0].add(row) = sum;
        }
    }
}

/// Expands a sparse panel to the dense layout.
///
/// # Safety
/// `panel` has `cols` columns, `dense` has space for them, and the instructions of `L` exist, and
/// those that `Isa::for_expansion` checks.
#[inline(always)]
pub(crate) unsafe fn expand<L: Lanes, K: SparseLayout>(
    panel: *const u8,
    cols: usize,
    dense: *mut u8,
) {
    // SAFETY: the loop walks exactly the heads, codes and columns, as the caller vouches.
    unsafe {
        let (mut at, mut dense) = (panel, dense);
        for blocks in group_blocks(cols) {
            let mut head = at;
            at = at.add(blocks * K::HEAD);
            for _ in 0..blocks {
                at = at.add(K::expand::<L>(head, at, dense));
                (head, dense) = (head.add(K::HEAD), dense.add(K::DENSE));
            }
        }
    }
}
