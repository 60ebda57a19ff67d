//! The operands of a micro-kernel call, and the epilogue that all micro-kernels share.

use crate::linear::activations::TILE_ROWS;
use crate::linear::lanes::{Lanes, PANEL_ROWS};
use crate::unroll::unrolled;

/// How far ahead weights are prefetched into L1: memory takes about 100 ns, a core reads 20 GB/s.
pub(super) const PREFETCH_BYTES: usize = 2048;

/// The operands of one tile.
pub(crate) struct Tile {
    /// The first panel.
    pub(crate) panel: *const u8,
    /// Distance between panels in bytes.
    pub(crate) panel_bytes: usize,
    /// Columns to sum over.
    pub(crate) cols: usize,
    /// Whether these are the first columns: accumulators start at zero, not at `partial_sums`.
    pub(crate) is_first: bool,
    /// Whether these are the last columns: accumulators go to `out`, not to `partial_sums`.
    pub(crate) is_last: bool,
    /// `[tokens][panels]` of 16 sums between two blocks of columns; unused by a tile of all
    /// columns.
    pub(crate) partial_sums: *mut f32,
    /// The first token's activations.
    pub(crate) x: *const u8,
    /// Distance between two column steps of the activations in bytes.
    pub(crate) x_stride: usize,
    /// The output of the first panel's first row, for each token.
    pub(crate) out: [*mut f32; TILE_ROWS],
    /// Rows to write, up to 16 times the number of panels.
    pub(crate) rows: usize,
    /// `[rows]` to add to the sums, or null.
    pub(crate) bias: *const f32,
}

/// The partial sums of a panel and a token.
///
/// # Safety
/// `partial_sums` has an element for each row of each panel and token.
#[inline(always)]
pub(super) unsafe fn partial_sums_ptr<const P: usize>(
    tile: &Tile,
    panel: usize,
    token: usize,
) -> *mut f32 {
    // SAFETY: the caller vouches for the sums of all panels and tokens.
    unsafe { tile.partial_sums.add((token * P + panel) * PANEL_ROWS) }
}

/// The epilogue: adds the bias to the sums of one panel and writes the rows that exist.
#[inline(always)]
pub(super) unsafe fn finish<L: Lanes, const T: usize>(
    tile: &Tile,
    panel: usize,
    sums: [L::Floats; T],
) {
    // SAFETY: passed on.
    unsafe { finish_from::<L, T>(tile, panel, 0, sums) }
}

/// The epilogue for the tokens from `token` on.
#[inline(always)]
pub(super) unsafe fn finish_from<L: Lanes, const T: usize>(
    tile: &Tile,
    panel: usize,
    token: usize,
    sums: [L::Floats; T],
) {
    let first = panel * PANEL_ROWS;
    let rows = PANEL_ROWS.min(tile.rows - first);
    // SAFETY: only rows below `tile.rows` are read or written, as the caller of the tile vouches.
    unsafe {
        let bias = tile.bias.wrapping_add(first);
        let has_bias = !tile.bias.is_null();
        unrolled!(T, i => {
            let (sums, out) = (sums[i], tile.out[token + i].add(first));
            if rows == PANEL_ROWS && !has_bias {
                L::store(sums, out);
            } else if rows == PANEL_ROWS {
                L::store(L::add(sums, L::from_f32(bias.cast())), out);
            } else {
                let mut lanes = [0.0; PANEL_ROWS];
                L::store(sums, lanes.as_mut_ptr());
                let lanes = lanes.iter().enumerate().take(rows).skip(L::FIRST);
                for (row, &sum) in lanes.take(L::COUNT) {
                    *out.add(row) = if has_bias { sum + *bias.add(row) } else { sum };
                }
            }
        });
    }
}
