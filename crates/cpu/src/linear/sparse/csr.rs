//! Compressed sparse rows, the textbook format, as a baseline: a scalar gather and multiply-add per
//! non-zero, bound by the latency of the gathers.
//!
//! ```text
//! panel: 17 u32 row offsets | values, f16 | columns, u16
//! ```

use crate::linear::lanes::{Lanes, PANEL_ROWS};

const STARTS_BYTES: usize = (PANEL_ROWS + 1) * size_of::<u32>();

/// Rows summed at a time, to hide the latency of dependent additions.
const ROWS_AT_ONCE: usize = 4;

/// Packs a dense panel of `[cols][16]` f16.
pub(crate) fn pack(dense: &[u8], out: &mut Vec<u8>) {
    let value = |row: usize, col: usize| {
        let at = 2 * (col * PANEL_ROWS + row);
        [dense[at], dense[at + 1]]
    };
    let cols = dense.len() / (2 * PANEL_ROWS);
    let is_nonzero = |row, col| u16::from_le_bytes(value(row, col)) & 0x7fff != 0;
    let rows = (0..PANEL_ROWS).map(|row| (0..cols).filter(move |&col| is_nonzero(row, col)));
    let (mut start, mut values, mut columns) = (0u32, Vec::new(), Vec::new());
    for (row, nonzeros) in rows.enumerate() {
        out.extend(start.to_le_bytes());
        for col in nonzeros {
            values.extend(value(row, col));
            columns.extend((col as u16).to_le_bytes());
            start += 1;
        }
    }
    out.extend(start.to_le_bytes());
    out.extend(values);
    out.extend(columns);
}

/// A packed panel.
struct Panel {
    starts: *const u8,
    values: *const u8,
    columns: *const u8,
}

impl Panel {
    /// # Safety
    /// `pack` wrote at `panel`.
    #[inline(always)]
    unsafe fn at(panel: *const u8) -> Panel {
        // SAFETY: the last start is the number of values.
        unsafe {
            let values = panel.add(STARTS_BYTES);
            let mut panel = Panel { starts: panel, values, columns: values };
            panel.columns = values.add(2 * panel.start(PANEL_ROWS));
            panel
        }
    }

    /// The offset of a row's first value.
    ///
    /// # Safety
    /// `row` is at most 16.
    #[inline(always)]
    unsafe fn start(&self, row: usize) -> usize {
        // SAFETY: the caller vouches.
        unsafe { self.starts.cast::<u32>().add(row).read_unaligned() as usize }
    }

    /// The value `i` of the panel and its column.
    ///
    /// # Safety
    /// There is such a value, and the instructions of `L` exist.
    #[inline(always)]
    unsafe fn pair<L: Lanes>(&self, i: usize) -> (f32, usize) {
        // SAFETY: the caller vouches.
        unsafe {
            let bits = self.values.cast::<u16>().add(i).read_unaligned();
            let column = self.columns.cast::<u16>().add(i).read_unaligned();
            (L::f16_to_f32(bits), usize::from(column))
        }
    }
}

/// The sums of all rows of a panel with `x`, whose columns are f32 `stride` bytes apart.
///
/// # Safety
/// `pack` wrote at `panel`, `x` has all columns, and the instructions of `L` exist.
#[inline(always)]
pub(crate) unsafe fn sums<L: Lanes>(
    panel: *const u8,
    x: *const u8,
    stride: usize,
) -> [f32; PANEL_ROWS] {
    let mut sums = [0.0; PANEL_ROWS];
    // SAFETY: indexes stay between the starts of the rows, and columns below those of `x`.
    unsafe {
        let panel = Panel::at(panel);
        for first in (0..PANEL_ROWS).step_by(ROWS_AT_ONCE) {
            let mut next = [0; ROWS_AT_ONCE];
            let mut ends = [0; ROWS_AT_ONCE];
            for i in 0..ROWS_AT_ONCE {
                (next[i], ends[i]) = (panel.start(first + i), panel.start(first + i + 1));
            }
            let lengths = (0..ROWS_AT_ONCE).map(|i| ends[i] - next[i]);
            let shared = lengths.min().unwrap_or(0);
            let sums = &mut sums[first..first + ROWS_AT_ONCE];
            for _ in 0..shared {
                for (sum, next) in sums.iter_mut().zip(&mut next) {
                    let (value, column) = panel.pair::<L>(*next);
                    *sum = value.mul_add(*x.add(column * stride).cast(), *sum);
                    *next += 1;
                }
            }
            for (i, sum) in sums.iter_mut().enumerate() {
                for at in next[i]..ends[i] {
                    let (value, column) = panel.pair::<L>(at);
                    *sum = value.mul_add(*x.add(column * stride).cast(), *sum);
                }
            }
        }
    }
    sums
}

/// Expands a panel to `[cols][16]` f16; `dense` is zero before.
///
/// # Safety
/// `pack` wrote at `panel`, and `dense` has space for all columns that it was packed from.
pub(crate) unsafe fn expand(panel: *const u8, dense: *mut u8) {
    // SAFETY: as for `sums`.
    unsafe {
        let panel = Panel::at(panel);
        for row in 0..PANEL_ROWS {
            for i in panel.start(row)..panel.start(row + 1) {
                let column = panel.columns.cast::<u16>().add(i).read_unaligned();
                let at = dense.cast::<u16>().add(usize::from(column) * PANEL_ROWS + row);
                at.write_unaligned(panel.values.cast::<u16>().add(i).read_unaligned());
            }
        }
    }
}
