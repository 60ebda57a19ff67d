//! Products of panels with zeros left out, for one token, and the way back to the dense kind for
//! more. The arithmetic is the dense kind's, in its order, so that a result has the same bits
//! whichever way it is made.

use super::{Tile, Weights, add_blocks, finish};
use crate::linear::activations::BLOCK_COLS;
use crate::linear::kind::{Codes, IntegerKind};
use crate::linear::level::{Lanes, PANEL_ROWS};
use crate::linear::sparse::{
    COLS, FAR_BYTES, PREFETCH_BYTES, SparseFloat, SparseInteger, SparseKind, csr as rows,
};

/// How far ahead of their use heads are asked for, and those of integers are asked into the
/// second-level cache. They are a fourth of the bytes.
const PREFETCH_HEADS: usize = 16;
const FAR_HEADS: usize = 48;

/// The line to ask for at one of the last of `steps` of a panel, so that `lines` have been asked
/// for of the next panel's codes, which begin at `next`: its heads lie right behind this one's
/// codes, but its codes do not.
#[inline(always)]
fn line_of_next(next: *const u8, lines: usize, step: usize, steps: usize) -> Option<*const u8> {
    (step + lines).checked_sub(steps).map(|line| next.wrapping_add(64 * line))
}

/// One panel times one token, for the rows of the lanes `L`.
///
/// # Safety
/// The pointers of `tile` are valid: `panel` for a panel of the kind with `cols` columns, after
/// `panel_bytes` the next one, if there is one, `x` for `cols / 32` blocks, `out` and `bias` for
/// `rows` rows. The instructions of `L` exist, with those that expand.
#[inline(always)]
pub(crate) unsafe fn integer<L: Lanes, K: SparseInteger>(tile: &Tile) {
    const { assert!(COLS == BLOCK_COLS && <K::Dense as IntegerKind>::COLS == COLS) };
    // SAFETY: the loop walks exactly the heads, codes and blocks, as the caller vouches.
    unsafe {
        let mut sums = [L::float(0.0)];
        let (mut head, mut x) = (tile.panel, tile.x);
        let blocks = tile.cols / COLS;
        let mut left = tile.panel.add(blocks * K::HEAD);
        let next = left.wrapping_add(tile.panel_bytes);
        for block in 0..blocks {
            if let Some(line) = line_of_next(next, FAR_BYTES / 64, block, blocks) {
                L::prefetch_far(line);
            }
            for line in 0..K::HEAD.div_ceil(64) {
                L::prefetch(head.wrapping_add(PREFETCH_HEADS * K::HEAD + 64 * line));
                L::prefetch_far(head.wrapping_add(FAR_HEADS * K::HEAD + 64 * line));
            }
            let (mut codes, taken) = K::codes::<L>(head, left);
            if let Codes::Centred { bits, offset } = <K::Dense as IntegerKind>::CODES {
                for codes in &mut codes {
                    *codes = L::centre(*codes, bits, offset);
                }
            }
            let scale = K::scale::<L>(head);
            let weights = Weights { codes, scales: [scale; 2], mins: [L::float(0.0); 2] };
            add_blocks::<L, K::Dense, 1>(&weights, x.cast(), &mut sums);
            (head, left) = (head.add(K::HEAD), left.add(taken));
            x = x.add(tile.x_stride);
        }
        finish::<L, 1>(tile, 0, sums);
    }
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
        let (mut heads, mut left, mut x) = (panels, panels, tile.x);
        let heads_bytes = tile.cols / COLS * K::HEAD;
        for left in &mut left {
            *left = left.add(heads_bytes);
        }
        for four in 0..tile.cols / 4 {
            let mut inputs = [L::float(0.0); 4];
            for (i, input) in inputs.iter_mut().enumerate() {
                *input = L::float(*x.add(i * tile.x_stride).cast::<f32>());
            }
            unrolled!(P, p => {
                if four % 8 == 0 {
                    L::prefetch(heads[p].wrapping_add(PREFETCH_HEADS * K::HEAD));
                    let (next, lines) = (next[p].wrapping_add(heads_bytes), PREFETCH_BYTES / 64);
                    if let Some(line) = line_of_next(next, lines, four / 8, tile.cols / COLS) {
                        L::prefetch(line);
                    }
                }
                let (weights, taken) = K::load::<L>(heads[p], left[p]);
                for (&weights, &input) in weights.iter().zip(&inputs) {
                    sums[p][0] = L::fma(weights, input, sums[p][0]);
                }
                heads[p] = heads[p].add(K::STEP);
                left[p] = left[p].add(taken);
            });
            x = x.add(4 * tile.x_stride);
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
        let mut left = panel.add(cols / COLS * K::HEAD);
        for i in 0..cols / COLS {
            left = left.add(K::expand::<L>(panel.add(i * K::HEAD), left, dense.add(i * K::DENSE)));
        }
    }
}
