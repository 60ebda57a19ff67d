//! Weights with zeros left out: panels of a dense kind, packed as a [`Layout`] says. It knows how
//! they are packed and where they lie; products with them are the tiles' business.
//!
//! Panels lie one behind the other, and each in groups of blocks of 32 columns: the heads of a
//! group's blocks, with masks and scales, and behind them the codes that are left. So a thread
//! reads a single stream, and the masks that say where codes lie are there before these.
//!
//! A product with one token reads them as they are. For more tokens, panels are first written as
//! the dense kind, a group that stays in the second-level cache at a time.

use std::ops::Range;

use bodkin_gguf::Format;

use super::kind::Kind;
use super::level::{Level, PANEL_ROWS, Portable};
use super::memory::Memory;
use super::weight::{PackedWeight, Rows};
use crate::simd::Simd;

pub(crate) mod csr;
mod kind;
mod pattern;
mod two_four;

pub(crate) use kind::{COLS, MASKS, SparseFloat, SparseInteger, SparseKind};
use pattern::{Bitmap, TwoFour};

#[cfg(target_arch = "x86_64")]
use super::level::{Avx2, Avx512};

/// The most blocks of a group.
const GROUP: usize = 8;

/// The blocks of each group of a panel.
#[inline(always)]
pub(crate) fn groups(cols: usize) -> impl Iterator<Item = usize> {
    let blocks = cols / COLS;
    (0..blocks).step_by(GROUP).map(move |first| GROUP.min(blocks - first))
}

/// What kernels may read behind the last byte of a panel.
const SLACK: usize = 64;

/// How zeros are left out of which kind.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(crate) enum Layout {
    BitmapF16,
    BitmapQ8_0,
    BitmapQ4_0,
    TwoFourF16,
    TwoFourQ8_0,
    TwoFourQ4_0,
    CsrF16,
}

/// What is done with a layout once it is known: see [`Layout::visit`].
pub(crate) trait VisitSparse {
    /// The result.
    type Output;
    /// The layout is of an integer kind.
    fn integer<K: SparseInteger>(self) -> Self::Output;
    /// The layout is of a float kind.
    fn float<K: SparseFloat>(self) -> Self::Output;
    /// The layout is that of compressed rows.
    fn csr(self) -> Self::Output;
}

impl Layout {
    /// The layout for a sparse format.
    pub(crate) fn of(format: Format) -> Option<Layout> {
        Some(match format {
            Format::BITMAP_F16 => Layout::BitmapF16,
            Format::BITMAP_Q8_0 => Layout::BitmapQ8_0,
            Format::BITMAP_Q4_0 => Layout::BitmapQ4_0,
            Format::S24_F16 => Layout::TwoFourF16,
            Format::S24_Q8_0 => Layout::TwoFourQ8_0,
            Format::S24_Q4_0 => Layout::TwoFourQ4_0,
            Format::CSR_F16 => Layout::CsrF16,
            _ => return None,
        })
    }

    /// Calls the visitor with the layout's type.
    pub(crate) fn visit<V: VisitSparse>(self, visitor: V) -> V::Output {
        match self {
            Layout::BitmapF16 => visitor.float::<kind::F16<Bitmap>>(),
            Layout::BitmapQ8_0 => visitor.integer::<kind::Q8_0>(),
            Layout::BitmapQ4_0 => visitor.integer::<kind::Q4_0>(),
            Layout::TwoFourF16 => visitor.float::<kind::F16<TwoFour>>(),
            Layout::TwoFourQ8_0 => visitor.integer::<two_four::Q8_0>(),
            Layout::TwoFourQ4_0 => visitor.integer::<two_four::Q4_0>(),
            Layout::CsrF16 => visitor.csr(),
        }
    }
}

/// Panels one after the other, each as long as its content makes it.
pub(crate) struct SparsePanels {
    pub(crate) layout: Layout,
    memory: Memory,
    /// Where each panel begins, and where the last ends.
    starts: Vec<usize>,
}

/// Some panels of a weight on their way into it.
pub struct SparsePart {
    bytes: Vec<u8>,
    /// Where each panel ends.
    ends: Vec<usize>,
}

/// The right to pack panels of a sparse weight, shareable between threads.
#[derive(Copy, Clone)]
pub struct SparsePacker<'a> {
    layout: Layout,
    kind: Kind,
    source: Rows<'a>,
    rows: usize,
    cols: usize,
}

impl<'a> SparsePacker<'a> {
    /// Prepares packing `rows` rows of a sparse format.
    ///
    /// # Panics
    /// If the format is none of these.
    pub fn new(source: Rows<'a>, rows: usize, cols: usize) -> SparsePacker<'a> {
        let format = source.format();
        let known = Layout::of(format).zip(Kind::native(format));
        let (layout, kind) = known.unwrap_or_else(|| panic!("{} is not sparse", format.name()));
        SparsePacker { layout, kind, source, rows, cols }
    }

    /// Packs the panels of a range.
    pub fn pack(self, panels: Range<usize>) -> SparsePart {
        let mut part = SparsePart { bytes: Vec::new(), ends: Vec::new() };
        let mut dense = PackedWeight::zeroed(self.kind, PANEL_ROWS.min(self.rows), self.cols);
        let mut codes = Vec::new();
        for panel in panels {
            let first = panel * PANEL_ROWS;
            let rows = PANEL_ROWS.min(self.rows - first);
            if rows < dense.rows() {
                dense = PackedWeight::zeroed(self.kind, rows, self.cols);
            }
            dense.panel_mut().fill(0);
            // SAFETY: no other thread knows this weight.
            unsafe { dense.packer(self.source.from(first)).pack(0..1) };
            let (dense, codes, out) = (dense.panel_mut(), &mut codes, &mut part.bytes);
            self.layout.visit(PackPanel { dense, codes, out });
            // Heads begin with a line.
            part.bytes.resize(part.bytes.len().next_multiple_of(64), 0);
            part.ends.push(part.bytes.len());
        }
        part
    }

    /// The weight of parts that are all its panels, in order.
    pub fn join(self, parts: &[SparsePart]) -> PackedWeight {
        let mut starts = vec![0];
        let bytes: usize = parts.iter().map(|part| part.bytes.len()).sum();
        let mut memory = Memory::zeroed(bytes + SLACK);
        let mut before = 0;
        for part in parts {
            memory.bytes_mut()[before..before + part.bytes.len()].copy_from_slice(&part.bytes);
            starts.extend(part.ends.iter().map(|end| before + end));
            before += part.bytes.len();
        }
        assert_eq!(starts.len() - 1, self.rows.div_ceil(PANEL_ROWS), "all panels");
        let panels = SparsePanels { layout: self.layout, memory, starts };
        PackedWeight::of_sparse(self.kind, self.rows, self.cols, panels)
    }
}

/// A panel of the dense kind on its way into a part.
struct PackPanel<'a> {
    dense: &'a [u8],
    /// Room for the codes of a group, which come behind its heads; empty before and after.
    codes: &'a mut Vec<u8>,
    out: &'a mut Vec<u8>,
}

impl PackPanel<'_> {
    fn pack<K: SparseKind>(self) {
        for group in self.dense.chunks(GROUP * K::DENSE) {
            let blocks = group.chunks_exact(K::DENSE);
            let first = self.out.len();
            self.out.resize(first + blocks.len() * K::HEAD, 0);
            for (dense, head) in blocks.zip(self.out[first..].chunks_exact_mut(K::HEAD)) {
                K::pack(dense, head, self.codes);
            }
            self.out.append(self.codes);
        }
    }
}

impl VisitSparse for PackPanel<'_> {
    type Output = ();

    fn integer<K: SparseInteger>(self) {
        self.pack::<K>();
    }

    fn float<K: SparseFloat>(self) {
        self.pack::<K>();
    }

    fn csr(self) {
        csr::pack(self.dense, self.out);
    }
}

impl SparsePanels {
    /// Bytes of all panels.
    pub(crate) fn len(&self) -> usize {
        self.memory.len() - SLACK
    }

    /// Takes the panels out of the processor's caches.
    pub(crate) fn evict(&self) {
        self.memory.evict();
    }

    /// The first byte of a panel.
    pub(crate) fn panel(&self, panel: usize) -> *const u8 {
        let start = self.starts[panel];
        assert!(start < self.len(), "panel {panel} of {}", self.starts.len() - 1);
        // SAFETY: inside the memory.
        unsafe { self.memory.start().add(start) }
    }

    /// Where a panel begins, or the last one ends.
    pub(crate) fn place(&self, panel: usize) -> *const u8 {
        self.memory.start().wrapping_add(self.starts[panel])
    }

    /// The first panel that begins with or behind so many bytes.
    pub(crate) fn first_at(&self, bytes: usize) -> usize {
        self.starts.partition_point(|&start| start < bytes)
    }

    /// Bytes of a panel, behind which the next one begins.
    pub(crate) fn panel_bytes(&self, panel: usize) -> usize {
        self.starts[panel + 1] - self.starts[panel]
    }

    /// Writes some panels as the dense kind, `dense_bytes` each, one after the other.
    ///
    /// # Safety
    /// `room` has place for the panels, whose columns are `cols`, and no other thread touches it.
    pub(crate) unsafe fn expand_into(
        &self,
        simd: Simd,
        panels: Range<usize>,
        cols: usize,
        dense_bytes: usize,
        room: *mut u8,
    ) {
        for (i, panel) in panels.enumerate() {
            // SAFETY: the caller gives the room; a `Simd` that expands proves its instructions.
            unsafe {
                let dense = room.add(i * dense_bytes);
                let expansion = Expansion { simd, panel: self.panel(panel), cols, dense };
                if self.layout == Layout::CsrF16 {
                    dense.write_bytes(0, dense_bytes);
                }
                self.layout.visit(expansion);
            }
        }
    }
}

/// One panel on its way to the dense kind.
struct Expansion {
    simd: Simd,
    panel: *const u8,
    cols: usize,
    dense: *mut u8,
}

impl Expansion {
    fn run<K: SparseKind>(self) {
        let Expansion { simd, panel, cols, dense } = self;
        // SAFETY: whoever made this gives a panel, room for it, and a level with its instructions.
        unsafe {
            match simd.expanding() {
                Simd::Portable => Portable::expand::<K>(panel, cols, dense),
                #[cfg(target_arch = "x86_64")]
                Simd::Avx2 | Simd::AvxVnni => Avx2::<0, false>::expand::<K>(panel, cols, dense),
                #[cfg(target_arch = "x86_64")]
                Simd::Avx512 | Simd::Avx512Bf16 => Avx512::expand::<K>(panel, cols, dense),
                #[cfg(not(target_arch = "x86_64"))]
                _ => unreachable!("{simd} on another processor"),
            }
        }
    }
}

impl VisitSparse for Expansion {
    type Output = ();

    fn integer<K: SparseInteger>(self) {
        self.run::<K>();
    }

    fn float<K: SparseFloat>(self) {
        self.run::<K>();
    }

    fn csr(self) {
        // SAFETY: as in `run`; the room was made zero.
        unsafe { csr::expand(self.panel, self.dense) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_get_as_many_bytes_each() {
        let (rows, cols) = (640, 256);
        // Rows become emptier from the first, which is full, to the last.
        let is_left = |i: usize| (i % cols) * 37 % cols >= i / cols * cols / rows;
        let values: Vec<f32> =
            (0..rows * cols).map(|i| if is_left(i) { 1.0 } else { 0.0 }).collect();
        let data = Format::BITMAP_F16.encode(&values, cols).expect("a format that can be written");
        let weight = PackedWeight::pack_sparse(Format::BITMAP_F16, &data, rows, cols);
        let panels = weight.sparse().expect("a weight without zeros");
        let (total, pieces) = (weight.bytes(), 8);
        let longest = (0..weight.panels()).map(|i| panels.panel_bytes(i)).max().unwrap_or(0);
        let mut before = 0;
        for piece in 0..pieces {
            let part = piece * total / pieces..(piece + 1) * total / pieces;
            let taken = weight.panels_in(part, 1);
            assert_eq!(taken.start, before, "every panel once");
            let bytes: usize = taken.clone().map(|i| panels.panel_bytes(i)).sum();
            assert!(bytes.abs_diff(total / pieces) <= longest, "piece {piece}: {bytes}");
            before = taken.end;
        }
        assert_eq!(before, weight.panels());
    }
}
