//! Column-major layouts: a column of a group of panels is contiguous, 256 bytes or more, so that a
//! kernel saves the memory traffic of a column whose input is zero. In a single panel a column is
//! only 16 or 32 bytes: skipping it would save no cache line.
//!
//! ```text
//! floats   group of 8:   [cols] of [panels][16]
//! Q8_0     group of 16:  [cols / 32] of scales [panels][16] f16 | [32] of codes [panels / 4][64]
//! Q4_0     group of 32:  the same, [panels / 8][64]: high nibbles are the next four panels
//! ```
//!
//! Codes are interleaved by four panels, in the order in which two rounds of byte interleaving turn
//! four columns into dot operands of these panels, see [`Lanes::interleave`]. The last group holds
//! the remaining panels, padded to a multiple of 8.

use std::ops::Range;

use crate::linear::lanes::{Lanes, PANEL_ROWS};
use crate::linear::layout::{self, FloatLayout, IntegerLayout, PackedLayout};

/// Panels whose codes are interleaved.
pub(crate) const FOUR: usize = 4;
/// The number of panels of a group is a multiple of this.
pub(crate) const EIGHT: usize = 8;
/// Columns of a block.
pub(crate) const COLS: usize = 32;
/// Bytes of the scales of a panel in a block.
pub(crate) const SCALES: usize = 2 * PANEL_ROWS;

/// A column-major integer layout.
///
/// # Safety
/// The functions require the instructions of `L`, with those that expand.
pub(crate) trait ColumnInteger {
    /// The row-major layout with the same arithmetic.
    type Dense: IntegerLayout;
    /// Panels of a group, a multiple of eight.
    const GROUP: usize;
    /// Bytes of a column of eight panels.
    const COLUMN: usize;

    /// Stores a row's code of panel `panel` of eight in their column, which is zero before.
    fn put(code: u8, panel: usize, row: usize, column: &mut [u8]);

    /// The dot operands of four columns, for the first (`four` is 0) or last four of eight panels.
    unsafe fn steps<L: Lanes>(columns: [*const u8; 4], four: usize) -> [L::Bytes; FOUR];

    /// The code of a row and a column of a dense span.
    fn code(dense: &[u8], row: usize, column: usize) -> u8;

    /// Stores step `step` of a dense span; steps are stored in order.
    unsafe fn store<L: Lanes>(codes: L::Bytes, step: usize, dense: *mut u8);
}

/// The position of a row's code among those of four panels.
fn interleaved(panel: usize, row: usize) -> usize {
    row / 4 * 16 + panel * 4 + row % 4
}

/// A block of 32 columns of a group.
#[derive(Copy, Clone)]
pub(crate) struct ColumnBlock {
    start: *const u8,
    panels: usize,
}

impl ColumnBlock {
    /// Block `index` of a group.
    pub(crate) fn of<K: ColumnInteger>(
        group: *const u8,
        panels: usize,
        index: usize,
    ) -> ColumnBlock {
        ColumnBlock { start: group.wrapping_add(index * block_bytes::<K>(panels)), panels }
    }

    /// A column of the eight panels that contain `panel`.
    #[inline(always)]
    pub(crate) fn column<K: ColumnInteger>(self, column: u32, panel: usize) -> *const u8 {
        let before = column as usize * (self.panels / EIGHT) + panel / EIGHT;
        self.start.wrapping_add(self.panels * SCALES + before * K::COLUMN)
    }

    /// The scales of a panel.
    #[inline(always)]
    pub(crate) fn scales(self, panel: usize) -> *const u8 {
        self.start.wrapping_add(panel * SCALES)
    }
}

/// Bytes of a block of a group of `panels` panels.
pub(crate) const fn block_bytes<K: ColumnInteger>(panels: usize) -> usize {
    panels * SCALES + COLS * (panels / EIGHT) * K::COLUMN
}

/// int8 codes.
pub(crate) struct Q8_0;

impl ColumnInteger for Q8_0 {
    type Dense = layout::Q8_0;
    const GROUP: usize = 16;
    const COLUMN: usize = EIGHT * PANEL_ROWS;

    fn put(code: u8, panel: usize, row: usize, column: &mut [u8]) {
        column[panel / FOUR * 64 + interleaved(panel % FOUR, row)] = code;
    }

    #[inline(always)]
    unsafe fn steps<L: Lanes>(columns: [*const u8; 4], four: usize) -> [L::Bytes; FOUR] {
        // SAFETY: the caller vouches.
        unsafe { L::interleave(columns.map(|column| column.wrapping_add(64 * four))) }
    }

    fn code(dense: &[u8], row: usize, column: usize) -> u8 {
        // Step by step, row by row, four columns.
        dense[column / 4 * 64 + row * 4 + column % 4]
    }

    #[inline(always)]
    unsafe fn store<L: Lanes>(codes: L::Bytes, step: usize, dense: *mut u8) {
        // SAFETY: the caller vouches; a span has eight steps of 64 bytes.
        unsafe { L::store_bytes(codes, dense.add(64 * step)) }
    }
}

/// Nibbles around 8.
pub(crate) struct Q4_0;

impl ColumnInteger for Q4_0 {
    type Dense = layout::Q4_0;
    const GROUP: usize = 32;
    const COLUMN: usize = EIGHT * PANEL_ROWS / 2;

    fn put(code: u8, panel: usize, row: usize, column: &mut [u8]) {
        column[interleaved(panel % FOUR, row)] |= code << (4 * (panel / FOUR));
    }

    #[inline(always)]
    unsafe fn steps<L: Lanes>(columns: [*const u8; 4], four: usize) -> [L::Bytes; FOUR] {
        // SAFETY: the caller vouches.
        unsafe {
            let mut steps = L::interleave(columns);
            for step in &mut steps {
                *step = match four {
                    0 => L::field::<0, 0, 0x0f>(*step),
                    _ => L::field::<4, 0, 0x0f>(*step),
                };
            }
            steps
        }
    }

    fn code(dense: &[u8], row: usize, column: usize) -> u8 {
        // The low nibbles are steps 0 to 3, the high ones steps 4 to 7.
        let pair = dense[column % 16 / 4 * 64 + row * 4 + column % 4];
        pair >> (column / 16 * 4) & 15
    }

    #[inline(always)]
    unsafe fn store<L: Lanes>(codes: L::Bytes, step: usize, dense: *mut u8) {
        // SAFETY: the caller vouches; a span has four vectors of 64 bytes.
        unsafe {
            let at = dense.add(64 * (step % 4));
            match step {
                0..4 => L::store_bytes(codes, at),
                _ => L::store_bytes(L::or(L::bytes(at), L::field::<0, 4, 0xf0>(codes)), at),
            }
        }
    }
}

/// A group, and a range of its panels.
#[derive(Clone)]
pub(crate) struct Group {
    pub(crate) start: *const u8,
    /// Panels of the group.
    pub(crate) width: usize,
    /// The range.
    pub(crate) panels: Range<usize>,
}

/// The layouts that exist column-major.
#[derive(Copy, Clone)]
pub(crate) enum ColumnLayout {
    F32,
    F16,
    Bf16,
    Q8_0,
    Q4_0,
}

/// A computation that is generic over the column-major layout: see [`ColumnLayout::visit`].
pub(crate) trait VisitColumns {
    /// The result.
    type Output;
    /// For an integer layout.
    fn integer<K: ColumnInteger>(self) -> Self::Output;
    /// For a float layout.
    fn float<K: FloatLayout>(self) -> Self::Output;
}

impl ColumnLayout {
    /// The column-major version of a packed layout, if there is one.
    pub(crate) fn of(layout: PackedLayout) -> Option<ColumnLayout> {
        Some(match layout {
            PackedLayout::F32 => ColumnLayout::F32,
            PackedLayout::F16 => ColumnLayout::F16,
            PackedLayout::BF16 => ColumnLayout::Bf16,
            PackedLayout::Q8_0 => ColumnLayout::Q8_0,
            PackedLayout::Q4_0 => ColumnLayout::Q4_0,
            _ => return None,
        })
    }

    /// Calls the visitor with the layout's type.
    pub(crate) fn visit<V: VisitColumns>(self, visitor: V) -> V::Output {
        match self {
            ColumnLayout::F32 => visitor.float::<layout::F32>(),
            ColumnLayout::F16 => visitor.float::<layout::F16>(),
            ColumnLayout::Bf16 => visitor.float::<layout::Bf16>(),
            ColumnLayout::Q8_0 => visitor.integer::<Q8_0>(),
            ColumnLayout::Q4_0 => visitor.integer::<Q4_0>(),
        }
    }

    /// Panels of a full group.
    pub(crate) fn group_panels(self) -> usize {
        match self {
            ColumnLayout::F32 | ColumnLayout::F16 | ColumnLayout::Bf16 => EIGHT,
            ColumnLayout::Q8_0 => Q8_0::GROUP,
            ColumnLayout::Q4_0 => Q4_0::GROUP,
        }
    }
}
