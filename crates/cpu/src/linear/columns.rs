//! Weights by columns: what one token's zeros leave unread. In a panel, a column is 16 or 32 bytes,
//! and skipping it saves no cache line; so 8 panels make a group, in which a column is 64 to 256
//! bytes side by side. A product with one token reads the columns whose input is not zero; for more
//! tokens, panels are written as the dense kind, a group that stays in the second-level cache at a
//! time. It knows how groups are packed and where they lie; products are the tiles' business.
//!
//! ```text
//! floats   group: [cols] of [8 panels][16]
//! Q8_0     group: [cols / 32] of scales [8 panels][16] f16 | [32] of codes [8 panels][16]
//! Q4_0     the same, with the codes of an odd panel in the high nibbles of the even one before
//! ```

use std::ops::Range;

use super::kind::{self, FloatKind, IntegerKind, Kind};
use super::level::{Lanes, Level, PANEL_ROWS, Portable};
use super::memory::Memory;
use super::weight::{PackedWeight, Rows};
use crate::simd::Simd;

#[cfg(target_arch = "x86_64")]
use super::level::{Avx2, Avx512};

/// Panels of a group.
pub(crate) const GROUP: usize = 8;
/// Columns of a block.
const COLS: usize = 32;
/// Bytes of the scales of a panel in a block.
const SCALES: usize = 2 * PANEL_ROWS;
/// Where the codes of a block begin.
pub(crate) const CODES: usize = GROUP * SCALES;

/// An integer kind by columns.
///
/// # Safety
/// The functions want a `block` of a group, a panel of it, and the instructions of `L` with those
/// that expand.
pub(crate) trait ColumnInteger {
    /// The kind whose arithmetic it is.
    type Dense: IntegerKind;
    /// Bytes of a column of a group.
    const COLUMN: usize;
    /// Bytes of a block.
    const BYTES: usize = CODES + COLS * Self::COLUMN;

    /// Packs a panel of a block, which is zero before, from a span of the dense kind.
    fn pack(dense: &[u8], panel: usize, block: &mut [u8]);

    /// The codes of four columns as a step.
    unsafe fn step<L: Lanes>(block: *const u8, panel: usize, columns: [u32; 4]) -> L::Bytes;

    /// Writes the codes of a panel as the dense kind.
    unsafe fn expand<L: Lanes>(block: *const u8, panel: usize, dense: *mut u8);

    /// The scales of a panel.
    #[inline(always)]
    unsafe fn scale<L: Lanes>(block: *const u8, panel: usize) -> L::Floats {
        // SAFETY: the scales are the first bytes of the block.
        unsafe { L::from_f16(block.add(panel * SCALES)) }
    }
}

/// Copies the scales, with which a span of the dense kind ends.
fn pack_scales(dense: &[u8], panel: usize, block: &mut [u8]) {
    block[panel * SCALES..][..SCALES].copy_from_slice(&dense[dense.len() - SCALES..]);
}

/// The four columns of a step.
#[inline(always)]
fn step_columns(step: usize) -> [u32; 4] {
    std::array::from_fn(|i| (4 * step + i) as u32)
}

/// Where the codes of four columns begin, `distance` bytes apart.
#[inline(always)]
fn starts(codes: *const u8, distance: usize, columns: [u32; 4]) -> [*const u8; 4] {
    columns.map(|column| codes.wrapping_add(column as usize * distance))
}

/// int8 codes.
pub(crate) struct Q8_0;

impl ColumnInteger for Q8_0 {
    type Dense = kind::Q8_0;
    const COLUMN: usize = GROUP * PANEL_ROWS;

    fn pack(dense: &[u8], panel: usize, block: &mut [u8]) {
        pack_scales(dense, panel, block);
        for (i, &code) in dense[..COLS * PANEL_ROWS].iter().enumerate() {
            // Step by step, row by row, four columns.
            let (column, row) = (i / 64 * 4 + i % 4, i % 64 / 4);
            block[CODES + column * Self::COLUMN + panel * PANEL_ROWS + row] = code;
        }
    }

    #[inline(always)]
    unsafe fn step<L: Lanes>(block: *const u8, panel: usize, columns: [u32; 4]) -> L::Bytes {
        let codes = block.wrapping_add(CODES + panel * PANEL_ROWS);
        // SAFETY: the caller vouches.
        unsafe { L::interleave(starts(codes, Self::COLUMN, columns)) }
    }

    #[inline(always)]
    unsafe fn expand<L: Lanes>(block: *const u8, panel: usize, dense: *mut u8) {
        for step in 0..COLS / 4 {
            // SAFETY: the caller vouches; a span has eight steps of 64 bytes.
            unsafe {
                let codes = Self::step::<L>(block, panel, step_columns(step));
                L::store_bytes(codes, dense.add(64 * step));
            }
        }
    }
}

/// Nibbles around 8.
pub(crate) struct Q4_0;

impl ColumnInteger for Q4_0 {
    type Dense = kind::Q4_0;
    const COLUMN: usize = GROUP * PANEL_ROWS / 2;

    fn pack(dense: &[u8], panel: usize, block: &mut [u8]) {
        pack_scales(dense, panel, block);
        for (i, &pair) in dense[..COLS * PANEL_ROWS / 2].iter().enumerate() {
            // The low nibbles are steps 0 to 3, the high ones steps 4 to 7.
            let (column, row) = (i / 64 * 4 + i % 4, i % 64 / 4);
            for (column, nibble) in [(column, pair & 15), (column + COLS / 2, pair >> 4)] {
                let at = CODES + column * Self::COLUMN + panel / 2 * PANEL_ROWS + row;
                block[at] |= nibble << (panel % 2 * 4);
            }
        }
    }

    #[inline(always)]
    unsafe fn step<L: Lanes>(block: *const u8, panel: usize, columns: [u32; 4]) -> L::Bytes {
        let codes = block.wrapping_add(CODES + panel / 2 * PANEL_ROWS);
        // SAFETY: the caller vouches.
        unsafe {
            let pairs = L::interleave(starts(codes, Self::COLUMN, columns));
            match panel % 2 {
                0 => L::field::<0, 0, 0x0f>(pairs),
                _ => L::field::<4, 0, 0x0f>(pairs),
            }
        }
    }

    #[inline(always)]
    unsafe fn expand<L: Lanes>(block: *const u8, panel: usize, dense: *mut u8) {
        for pair in 0..COLS / 8 {
            // SAFETY: the caller vouches; a span has four vectors of 64 bytes.
            unsafe {
                let low = Self::step::<L>(block, panel, step_columns(pair));
                let high = Self::step::<L>(block, panel, step_columns(pair + 4));
                let high = L::field::<0, 4, 0xf0>(high);
                L::store_bytes(L::or(low, high), dense.add(64 * pair));
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

/// Groups one after the other, all of one length; the last is filled up with zeros.
pub(crate) struct ColumnGroups {
    memory: Memory,
    group_bytes: usize,
}

/// Packs rows of any format by columns, as `kind`; on this thread.
///
/// # Panics
/// If the kind cannot be kept by columns, or as [`PackedWeight::packer`].
pub fn pack_columns(kind: Kind, source: Rows<'_>, rows: usize, cols: usize) -> PackedWeight {
    let group_bytes = GROUP * kind.panel_bytes(cols).expect("the weight was checked");
    let groups = rows.div_ceil(GROUP * PANEL_ROWS);
    let mut memory = Memory::zeroed(groups * group_bytes);
    for (index, group) in memory.bytes_mut().chunks_exact_mut(group_bytes.max(1)).enumerate() {
        for panel in 0..GROUP {
            let first = (index * GROUP + panel) * PANEL_ROWS;
            if first < rows {
                let mut dense = PackedWeight::zeroed(kind, PANEL_ROWS.min(rows - first), cols);
                // SAFETY: no other thread knows this weight.
                unsafe { dense.packer(source.from(first)).pack(0..1) };
                visit(kind, PackPanel { dense: dense.panel_mut(), panel, group });
            }
        }
    }
    PackedWeight::of_columns(kind, rows, cols, ColumnGroups { memory, group_bytes })
}

/// A panel of the dense kind on its way into a group.
struct PackPanel<'a> {
    dense: &'a [u8],
    panel: usize,
    group: &'a mut [u8],
}

impl VisitColumns for PackPanel<'_> {
    type Output = ();

    fn integer<K: ColumnInteger>(self) {
        let spans = self.dense.chunks_exact(K::Dense::BYTES);
        for (span, block) in spans.zip(self.group.chunks_exact_mut(K::BYTES)) {
            K::pack(span, self.panel, block);
        }
    }

    fn float<K: FloatKind>(self) {
        let bytes = PANEL_ROWS * K::BYTES;
        let columns = self.group.chunks_exact_mut(GROUP * bytes);
        for (from, to) in self.dense.chunks_exact(bytes).zip(columns) {
            to[self.panel * bytes..][..bytes].copy_from_slice(from);
        }
    }
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

    /// The first byte of the group of a panel.
    pub(crate) fn group(&self, panel: usize) -> *const u8 {
        let start = panel / GROUP * self.group_bytes;
        assert!(start < self.len(), "panel {panel} of groups of {} bytes", self.len());
        // SAFETY: inside the memory.
        unsafe { self.memory.start().add(start) }
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
        for (i, panel) in panels.enumerate() {
            let (group, panel) = (self.group(panel), panel % GROUP);
            // SAFETY: the caller gives the room.
            let dense = unsafe { room.add(i * dense_bytes) };
            visit(kind, Expansion { simd, group, panel, cols, dense });
        }
    }
}

/// One panel on its way to the dense kind.
struct Expansion {
    simd: Simd,
    group: *const u8,
    panel: usize,
    cols: usize,
    dense: *mut u8,
}

impl VisitColumns for Expansion {
    type Output = ();

    fn integer<K: ColumnInteger>(self) {
        let Expansion { simd, group, panel, cols, dense } = self;
        // SAFETY: whoever made this gives a panel, room for it, and a level with its instructions.
        unsafe {
            match simd.expanding() {
                Simd::Portable => Portable::expand_columns::<K>(group, panel, cols, dense),
                #[cfg(target_arch = "x86_64")]
                Simd::Avx2 | Simd::AvxVnni => {
                    Avx2::<0, false>::expand_columns::<K>(group, panel, cols, dense);
                }
                #[cfg(target_arch = "x86_64")]
                Simd::Avx512 => Avx512::expand_columns::<K>(group, panel, cols, dense),
                #[cfg(not(target_arch = "x86_64"))]
                _ => unreachable!("{simd} on another processor"),
            }
        }
    }

    fn float<K: FloatKind>(self) {
        let bytes = PANEL_ROWS * K::BYTES;
        for col in 0..self.cols {
            // SAFETY: as for integers.
            unsafe {
                let from = self.group.add((col * GROUP + self.panel) * bytes);
                self.dense.add(col * bytes).copy_from_nonoverlapping(from, bytes);
            }
        }
    }
}

/// Writes a panel of a group as the dense kind.
///
/// # Safety
/// `group` is one of `cols` columns, `dense` has room for a panel, and the instructions of `L`
/// exist, with those that expand.
#[inline(always)]
pub(crate) unsafe fn expand<L: Lanes, K: ColumnInteger>(
    group: *const u8,
    panel: usize,
    cols: usize,
    dense: *mut u8,
) {
    for i in 0..cols / COLS {
        // SAFETY: the loop walks exactly the blocks, as the caller vouches.
        unsafe {
            let (block, dense) = (group.add(i * K::BYTES), dense.add(i * K::Dense::BYTES));
            K::expand::<L>(block, panel, dense);
            let scales = dense.add(K::Dense::BYTES - SCALES);
            scales.copy_from_nonoverlapping(block.add(panel * SCALES), SCALES);
        }
    }
}
