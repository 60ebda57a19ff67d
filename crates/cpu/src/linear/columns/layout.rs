//! Column-major layouts: a column of a full group of panels is contiguous, 256 bytes or more, so
//! that a kernel saves the memory traffic of a column whose input is zero. In a single panel a
//! column is 8 to 64 bytes, a cache line at most.
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

use crate::linear::activations::BLOCK_COLS;
use crate::linear::lanes::{Lanes, PANEL_ROWS};
use crate::linear::layout::{self, FloatLayout, IntegerLayout, PackedLayout};

/// Panels whose codes are interleaved.
pub(crate) const INTERLEAVED_PANELS: usize = 4;
/// The number of panels of a group is a multiple of this.
pub(crate) const PANEL_MULTIPLE: usize = 8;
/// Bytes of the scales of a panel in a block.
pub(crate) const SCALE_BYTES: usize = 2 * PANEL_ROWS;

/// A column-major integer layout.
///
/// # Safety
/// The functions require the instructions of `L`, and those that `Isa::for_expansion` checks.
pub(crate) trait ColumnInteger {
    /// The ordinary layout, panel after panel, with the same arithmetic.
    type PanelMajor: IntegerLayout;
    /// Panels of a group, a multiple of eight.
    const GROUP_PANELS: usize;
    /// Bytes of a column of eight panels.
    const COLUMN_BYTES: usize;

    /// Stores a row's code of panel `panel` of eight in their column, which is zero before.
    fn put(code: u8, panel: usize, row: usize, column: &mut [u8]);

    /// A dot operand, four columns, for each of the first (`panel_half` is 0) or last four of eight
    /// panels.
    unsafe fn dot_operands<L: Lanes>(
        columns: [*const u8; 4],
        panel_half: usize,
    ) -> [L::Bytes; INTERLEAVED_PANELS];

    /// The code of a row and a column of a block of 32 columns of a panel.
    fn code(panel_block: &[u8], row: usize, column: usize) -> u8;

    /// Stores step `step`, four columns, of a panel's block; steps are stored in order.
    unsafe fn store<L: Lanes>(codes: L::Bytes, step: usize, panel_block: *mut u8);
}

/// The position of a row's code among those of four panels.
fn interleaved(panel: usize, row: usize) -> usize {
    row / 4 * 16 + panel * 4 + row % 4
}

/// A block of 32 columns of a group.
#[derive(Copy, Clone)]
pub(crate) struct ColumnBlock {
    start: *const u8,
    panel_count: usize,
}

impl ColumnBlock {
    /// Block `index` of a group.
    pub(crate) fn of<K: ColumnInteger>(
        group: *const u8,
        panel_count: usize,
        index: usize,
    ) -> ColumnBlock {
        let start = group.wrapping_add(index * block_bytes::<K>(panel_count));
        ColumnBlock { start, panel_count }
    }

    /// A column of the eight panels that contain `panel`.
    #[inline(always)]
    pub(crate) fn column<K: ColumnInteger>(self, column: u32, panel: usize) -> *const u8 {
        let before = column as usize * (self.panel_count / PANEL_MULTIPLE) + panel / PANEL_MULTIPLE;
        self.start.wrapping_add(self.panel_count * SCALE_BYTES + before * K::COLUMN_BYTES)
    }

    /// The scales of a panel.
    #[inline(always)]
    pub(crate) fn scales(self, panel: usize) -> *const u8 {
        self.start.wrapping_add(panel * SCALE_BYTES)
    }
}

/// Bytes of a block of a group of `panels` panels.
pub(crate) const fn block_bytes<K: ColumnInteger>(panels: usize) -> usize {
    panels * SCALE_BYTES + BLOCK_COLS * (panels / PANEL_MULTIPLE) * K::COLUMN_BYTES
}

/// int8 codes.
pub(crate) struct Q8_0;

impl ColumnInteger for Q8_0 {
    type PanelMajor = layout::Q8_0;
    const GROUP_PANELS: usize = 16;
    const COLUMN_BYTES: usize = PANEL_MULTIPLE * PANEL_ROWS;

    fn put(code: u8, panel: usize, row: usize, column: &mut [u8]) {
        column[panel / INTERLEAVED_PANELS * 64 + interleaved(panel % INTERLEAVED_PANELS, row)] =
            code;
    }

    #[inline(always)]
    unsafe fn dot_operands<L: Lanes>(
        columns: [*const u8; 4],
        panel_half: usize,
    ) -> [L::Bytes; INTERLEAVED_PANELS] {
        // SAFETY: the caller vouches.
        unsafe { L::interleave(columns.map(|column| column.wrapping_add(64 * panel_half))) }
    }

    fn code(panel_block: &[u8], row: usize, column: usize) -> u8 {
        // Step by step, row by row, four columns.
        panel_block[column / 4 * 64 + row * 4 + column % 4]
    }

    #[inline(always)]
    unsafe fn store<L: Lanes>(codes: L::Bytes, step: usize, panel_block: *mut u8) {
        // SAFETY: the caller vouches; a block has eight steps of 64 bytes.
        unsafe { L::store_bytes(codes, panel_block.add(64 * step)) }
    }
}

/// 4-bit codes with zero point 8.
pub(crate) struct Q4_0;

impl ColumnInteger for Q4_0 {
    type PanelMajor = layout::Q4_0;
    const GROUP_PANELS: usize = 32;
    const COLUMN_BYTES: usize = PANEL_MULTIPLE * PANEL_ROWS / 2;

    fn put(code: u8, panel: usize, row: usize, column: &mut [u8]) {
        column[interleaved(panel % INTERLEAVED_PANELS, row)] |=
            code << (4 * (panel / INTERLEAVED_PANELS));
    }

    #[inline(always)]
    unsafe fn dot_operands<L: Lanes>(
        columns: [*const u8; 4],
        panel_half: usize,
    ) -> [L::Bytes; INTERLEAVED_PANELS] {
        // SAFETY: the caller vouches.
        unsafe {
            let mut operands = L::interleave(columns);
            for operand in &mut operands {
                *operand = match panel_half {
                    0 => L::field::<0, 0, 0x0f>(*operand),
                    _ => L::field::<4, 0, 0x0f>(*operand),
                };
            }
            operands
        }
    }

    fn code(panel_block: &[u8], row: usize, column: usize) -> u8 {
        // The low nibbles are steps 0 to 3, the high ones steps 4 to 7.
        let pair = panel_block[column % 16 / 4 * 64 + row * 4 + column % 4];
        pair >> (column / 16 * 4) & 15
    }

    #[inline(always)]
    unsafe fn store<L: Lanes>(codes: L::Bytes, step: usize, panel_block: *mut u8) {
        // SAFETY: the caller vouches; a block has four vectors of 64 bytes.
        unsafe {
            let at = panel_block.add(64 * (step % 4));
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
    pub(crate) panel_count: usize,
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
            ColumnLayout::F32 | ColumnLayout::F16 | ColumnLayout::Bf16 => PANEL_MULTIPLE,
            ColumnLayout::Q8_0 => Q8_0::GROUP_PANELS,
            ColumnLayout::Q4_0 => Q4_0::GROUP_PANELS,
        }
    }
}
