//! Weights by columns: what one token's zeros leave unread. In a panel, a column is 16 or 32 bytes,
//! and skipping it saves no cache line, and hardly anything where the processor fetches lines ahead
//! that lie side by side. So panels make groups in which a column is 256 bytes or more. A product
//! with one token reads the columns whose input is not zero; for more tokens, panels are written as
//! the dense kind, a group that stays in the second-level cache at a time. It knows how groups are
//! packed and where they lie; products are the tiles' business.
//!
//! ```text
//! floats   group of 8:   [cols] of [panels][16]
//! Q8_0     group of 16:  [cols / 32] of scales [panels][16] f16 | [32] of codes [panels / 4][64]
//! Q4_0     group of 32:  the same, [panels / 8][64]: high nibbles are the four panels behind
//! ```
//!
//! Codes lie by four panels, in the order in which the bytes of four columns side by side become
//! dot steps of these panels by two rounds of interleaving, see [`Lanes::interleave`].
//!
//! The last group has the panels that there are, filled up to 8.

use std::ops::Range;

use super::kind::{self, FloatKind, IntegerKind, Kind};
use super::level::{Lanes, Level, PANEL_ROWS, Portable};
use super::memory::Memory;
use super::weight::{PackedWeight, Rows};
use crate::simd::Simd;

#[cfg(target_arch = "x86_64")]
use super::level::{Avx2, Avx512};

/// Panels whose codes lie together.
pub(crate) const FOUR: usize = 4;
/// What the panels of a weight are filled up to.
pub(crate) const EIGHT: usize = 8;
/// Columns of a block.
pub(crate) const COLS: usize = 32;
/// Bytes of the scales of a panel in a block.
const SCALES: usize = 2 * PANEL_ROWS;

/// An integer kind by columns.
///
/// # Safety
/// The functions want the instructions of `L`, with those that expand.
pub(crate) trait ColumnInteger {
    /// The kind whose arithmetic it is.
    type Dense: IntegerKind;
    /// Panels of a group, a multiple of eight.
    const GROUP: usize;
    /// Bytes of a column of eight panels.
    const COLUMN: usize;

    /// Packs a row's code of the panel `panel` of eight, into a column of these, which is zero
    /// before.
    fn put(code: u8, panel: usize, row: usize, column: &mut [u8]);

    /// The codes of four columns of eight panels as steps of the four panels `four`, 0 or 1.
    unsafe fn steps<L: Lanes>(columns: [*const u8; 4], four: usize) -> [L::Bytes; FOUR];

    /// The code of a row and a column of a dense span.
    fn code(dense: &[u8], row: usize, column: usize) -> u8;

    /// Writes step `step` of a dense span, whose steps are written in order.
    unsafe fn store<L: Lanes>(codes: L::Bytes, step: usize, dense: *mut u8);
}

/// Where the code of a row stands among those of four panels.
fn place(panel: usize, row: usize) -> usize {
    row / 4 * 16 + panel * 4 + row % 4
}

/// A block of a group of so many panels.
#[derive(Copy, Clone)]
pub(crate) struct Block {
    start: *const u8,
    panels: usize,
}

impl Block {
    /// Block `index` of a group.
    pub(crate) fn of<K: ColumnInteger>(group: *const u8, panels: usize, index: usize) -> Block {
        Block { start: group.wrapping_add(index * block_bytes::<K>(panels)), panels }
    }

    /// A column of eight panels of the group, the first of which is the one before `panel`.
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

/// Bytes of a block of a group of so many panels.
const fn block_bytes<K: ColumnInteger>(panels: usize) -> usize {
    panels * SCALES + COLS * (panels / EIGHT) * K::COLUMN
}

/// int8 codes.
pub(crate) struct Q8_0;

impl ColumnInteger for Q8_0 {
    type Dense = kind::Q8_0;
    const GROUP: usize = 16;
    const COLUMN: usize = EIGHT * PANEL_ROWS;

    fn put(code: u8, panel: usize, row: usize, column: &mut [u8]) {
        column[panel / FOUR * 64 + place(panel % FOUR, row)] = code;
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
    type Dense = kind::Q4_0;
    const GROUP: usize = 32;
    const COLUMN: usize = EIGHT * PANEL_ROWS / 2;

    fn put(code: u8, panel: usize, row: usize, column: &mut [u8]) {
        column[place(panel % FOUR, row)] |= code << (4 * (panel / FOUR));
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

/// What is done with a kind by columns once it is known: see [`visit`].
pub(crate) trait VisitColumns {
    /// The result.
    type Output;
    /// The kind is an integer one.
    fn integer<K: ColumnInteger>(self) -> Self::Output;
    /// The kind is a float one.
    fn float<K: FloatKind>(self) -> Self::Output;
}

/// Calls the visitor with the type of a kind that is kept by columns.
///
/// # Panics
/// If it is none of these, see [`is_known`].
pub(crate) fn visit<V: VisitColumns>(kind: Kind, visitor: V) -> V::Output {
    match kind {
        Kind::F32 => visitor.float::<kind::F32>(),
        Kind::F16 => visitor.float::<kind::F16>(),
        Kind::BF16 => visitor.float::<kind::Bf16>(),
        Kind::Q8_0 => visitor.integer::<Q8_0>(),
        Kind::Q4_0 => visitor.integer::<Q4_0>(),
        _ => panic!("{kind:?} is not kept by columns"),
    }
}

/// Whether a kind can be kept by columns.
pub fn is_known(kind: Kind) -> bool {
    matches!(kind, Kind::F32 | Kind::F16 | Kind::BF16 | Kind::Q8_0 | Kind::Q4_0)
}

/// Groups one after the other, all but the last as wide as the kind says.
pub(crate) struct ColumnGroups {
    memory: Memory,
    /// Panels of a group.
    width: usize,
    /// All of them, with those that fill up the last group.
    panels: usize,
    /// Bytes of a panel, wherever it lies.
    panel_bytes: usize,
}

/// Packs rows of any format by columns, as `kind`; on this thread.
///
/// # Panics
/// If the kind cannot be kept by columns, or as [`PackedWeight::packer`].
pub fn pack_columns(kind: Kind, source: Rows<'_>, rows: usize, cols: usize) -> PackedWeight {
    let panel_bytes = kind.panel_bytes(cols).expect("the weight was checked");
    let panels = rows.div_ceil(PANEL_ROWS).next_multiple_of(EIGHT);
    let (memory, width) = (Memory::zeroed(panels * panel_bytes), visit(kind, Width));
    let mut groups = ColumnGroups { memory, width, panels, panel_bytes };
    for panel in 0..rows.div_ceil(PANEL_ROWS) {
        let first = panel * PANEL_ROWS;
        let mut dense = PackedWeight::zeroed(kind, PANEL_ROWS.min(rows - first), cols);
        // SAFETY: no other thread knows this weight.
        unsafe { dense.packer(source.from(first)).pack(0..1) };
        let (group, panel, panels) = groups.group_mut(panel);
        visit(kind, PackPanel { dense: dense.panel_mut(), panel, panels, group });
    }
    PackedWeight::of_columns(kind, rows, cols, groups)
}

/// Panels of a group.
struct Width;

impl VisitColumns for Width {
    type Output = usize;

    fn integer<K: ColumnInteger>(self) -> usize {
        K::GROUP
    }

    fn float<K: FloatKind>(self) -> usize {
        EIGHT
    }
}

/// A panel of the dense kind on its way into a group.
struct PackPanel<'a> {
    dense: &'a [u8],
    panel: usize,
    /// Panels of the group.
    panels: usize,
    group: &'a mut [u8],
}

impl VisitColumns for PackPanel<'_> {
    type Output = ();

    fn integer<K: ColumnInteger>(self) {
        let PackPanel { dense, panel, panels, group } = self;
        let blocks = group.chunks_exact_mut(block_bytes::<K>(panels));
        for (span, block) in dense.chunks_exact(K::Dense::BYTES).zip(blocks) {
            let (scales, codes) = block.split_at_mut(panels * SCALES);
            // A span of the dense kind ends with its scales.
            scales[panel * SCALES..][..SCALES].copy_from_slice(&span[span.len() - SCALES..]);
            for column in 0..COLS {
                let at = (column * (panels / EIGHT) + panel / EIGHT) * K::COLUMN;
                let to = &mut codes[at..at + K::COLUMN];
                for row in 0..PANEL_ROWS {
                    K::put(K::code(span, row, column), panel % EIGHT, row, to);
                }
            }
        }
    }

    fn float<K: FloatKind>(self) {
        let bytes = PANEL_ROWS * K::BYTES;
        let columns = self.group.chunks_exact_mut(self.panels * bytes);
        for (from, to) in self.dense.chunks_exact(bytes).zip(columns) {
            to[self.panel * bytes..][..bytes].copy_from_slice(from);
        }
    }
}

/// A group, and which of its panels are meant.
#[derive(Clone)]
pub(crate) struct Group {
    pub(crate) start: *const u8,
    /// How many it has.
    pub(crate) width: usize,
    /// Those that are meant.
    pub(crate) panels: Range<usize>,
}

impl ColumnGroups {
    /// Bytes of all groups.
    pub(crate) fn len(&self) -> usize {
        self.memory.len()
    }

    /// Takes the groups out of the processor's caches.
    pub(crate) fn evict(&self) {
        self.memory.evict();
    }

    /// Panels that a thread should take at a time, of `threads`: whole groups, if there are enough.
    pub(crate) fn together(&self, threads: usize) -> usize {
        let is_enough = self.panels / self.width >= 2 * threads;
        if is_enough { self.width } else { EIGHT }
    }

    /// Where the group of a panel begins, the panel's number in it, and how many it has.
    fn place(&self, panel: usize) -> (usize, usize, usize) {
        assert!(panel < self.panels, "panel {panel} of {}", self.panels);
        let first = panel - panel % self.width;
        (first * self.panel_bytes, panel - first, self.width.min(self.panels - first))
    }

    fn group_mut(&mut self, panel: usize) -> (&mut [u8], usize, usize) {
        let (start, panel, panels) = self.place(panel);
        (&mut self.memory.bytes_mut()[start..start + panels * self.panel_bytes], panel, panels)
    }

    /// Some panels, group by group, each with the first of its panels.
    pub(crate) fn groups(&self, panels: Range<usize>) -> impl Iterator<Item = (usize, Group)> {
        let Range { start, end } = panels;
        let groups = start / self.width..end.div_ceil(self.width);
        groups.map(move |group| {
            let first = start.max(group * self.width);
            let (offset, panel, width) = self.place(first);
            let count = end.min((group + 1) * self.width) - first;
            // SAFETY: inside the memory.
            let start = unsafe { self.memory.start().add(offset) };
            (first, Group { start, width, panels: panel..panel + count })
        })
    }

    /// Writes some panels as the dense kind, `dense_bytes` each, one after the other.
    ///
    /// # Safety
    /// `room` has place for the panels, of `kind` and `cols` columns as these were packed, and no
    /// other thread touches it.
    pub(crate) unsafe fn expand_into(
        &self,
        simd: Simd,
        kind: Kind,
        panels: Range<usize>,
        (cols, dense_bytes): (usize, usize),
        room: *mut u8,
    ) {
        for (first, group) in self.groups(panels.clone()) {
            // SAFETY: the caller gives the room.
            let dense = unsafe { room.add((first - panels.start) * dense_bytes) };
            visit(kind, Expansion { simd, group, cols, dense, dense_bytes });
        }
    }
}

/// Some panels of a group on their way to the dense kind.
struct Expansion {
    simd: Simd,
    group: Group,
    cols: usize,
    dense: *mut u8,
    dense_bytes: usize,
}

impl VisitColumns for Expansion {
    type Output = ();

    fn integer<K: ColumnInteger>(self) {
        let Expansion { simd, group, cols, dense, dense_bytes } = self;
        // SAFETY: whoever made this gives a group, room for its panels, and a level with its
        // instructions.
        unsafe {
            match simd.expanding() {
                Simd::Portable => {
                    Portable::expand_columns::<K>(&group, cols, dense, dense_bytes);
                }
                #[cfg(target_arch = "x86_64")]
                Simd::Avx2 | Simd::AvxVnni => {
                    Avx2::<0, false>::expand_columns::<K>(&group, cols, dense, dense_bytes);
                }
                #[cfg(target_arch = "x86_64")]
                Simd::Avx512 | Simd::Avx512Bf16 => {
                    Avx512::expand_columns::<K>(&group, cols, dense, dense_bytes);
                }
                #[cfg(not(target_arch = "x86_64"))]
                _ => unreachable!("{simd} on another processor"),
            }
        }
    }

    fn float<K: FloatKind>(self) {
        let (bytes, group) = (PANEL_ROWS * K::BYTES, self.group);
        for (i, panel) in group.panels.enumerate() {
            for col in 0..self.cols {
                // SAFETY: as for integers.
                unsafe {
                    let from = group.start.add((col * group.width + panel) * bytes);
                    let to = self.dense.add(i * self.dense_bytes + col * bytes);
                    to.copy_from_nonoverlapping(from, bytes);
                }
            }
        }
    }
}

/// Writes some panels of a group as the dense kind, `dense_bytes` each.
///
/// # Safety
/// `group` is one of `cols` columns, `dense` has room for its panels, and the instructions of `L`
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
        let block = Block::of::<K>(group.start, group.width, index);
        for first in (panels.start - panels.start % FOUR..panels.end).step_by(FOUR) {
            // SAFETY: the loop walks exactly the blocks, as the caller vouches, and writes those
            // of four panels that are meant.
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
