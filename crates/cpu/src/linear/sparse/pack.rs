//! Packs weights of sparse formats: each dense panel becomes groups of 256 columns, first the heads
//! of a group's blocks (masks and scales), then the codes of its non-zeros. A kernel thus reads a
//! single stream in which masks come before the codes that they locate.

use std::ops::Range;

use bodkin_gguf::Format;

use super::csr;
use super::format::{SparseFormat, VisitSparse};
use super::layout::{GROUP_BLOCKS, SparseFloat, SparseInteger, SparseLayout};
use super::panels::SparsePanels;
use crate::linear::lanes::PANEL_ROWS;
use crate::linear::layout::PackedLayout;
use crate::linear::source::SourceRows;
use crate::linear::weight::PackedWeight;

/// Some packed panels of a weight.
pub struct SparsePart {
    bytes: Vec<u8>,
    /// The end of each panel.
    ends: Vec<usize>,
}

/// Packs panels of a sparse weight; shareable between threads.
#[derive(Copy, Clone)]
pub struct SparsePacker<'a> {
    format: SparseFormat,
    layout: PackedLayout,
    source: SourceRows<'a>,
    rows: usize,
    cols: usize,
}

impl<'a> SparsePacker<'a> {
    /// Prepares packing `rows` rows of a sparse format.
    ///
    /// # Panics
    /// If the format is dense, or if the source has other rows.
    pub fn new(source: SourceRows<'a>, rows: usize, cols: usize) -> SparsePacker<'a> {
        let format = source.format();
        let known = SparseFormat::of(format).zip(PackedLayout::native(format));
        let (format, layout) = known.unwrap_or_else(|| panic!("{} is not sparse", format.name()));
        source.check(layout, rows, cols);
        SparsePacker { format, layout, source, rows, cols }
    }

    /// Packs a range of panels.
    pub fn pack(self, panels: Range<usize>) -> SparsePart {
        let mut part = SparsePart { bytes: Vec::new(), ends: Vec::new() };
        let panel_bytes = self.layout.panel_bytes(self.cols).expect("`new` checked the columns");
        let (mut dense, mut codes) = (vec![0; panel_bytes], Vec::new());
        for panel in panels {
            let first = panel * PANEL_ROWS;
            let rows = first..self.rows.min(first + PANEL_ROWS);
            dense.fill(0);
            self.source.pack_panel(self.layout, rows, self.cols, &mut dense);
            let panel = PackPanel { dense: &dense, codes: &mut codes, out: &mut part.bytes };
            self.format.visit(panel);
            // Panels begin on a cache line.
            part.bytes.resize(part.bytes.len().next_multiple_of(64), 0);
            part.ends.push(part.bytes.len());
        }
        part
    }

    /// Joins parts that are all panels of the weight, in order.
    pub fn join(self, parts: &[SparsePart]) -> PackedWeight {
        let parts: Vec<_> = parts.iter().map(|part| (&part.bytes[..], &part.ends[..])).collect();
        let panels = SparsePanels::concat(self.format, &parts);
        assert_eq!(panels.count(), self.rows.div_ceil(PANEL_ROWS), "all panels");
        PackedWeight::of_sparse(self.layout, self.rows, self.cols, panels)
    }
}

impl PackedWeight {
    /// Packs a whole weight of a sparse format on this thread, storing non-zeros only.
    ///
    /// # Panics
    /// As [`SparsePacker::new`].
    pub fn pack_sparse(format: Format, source: &[u8], rows: usize, cols: usize) -> PackedWeight {
        let packer = SparsePacker::new(SourceRows::new(format, source, rows), rows, cols);
        packer.join(&[packer.pack(0..rows.div_ceil(PANEL_ROWS))])
    }
}

/// Packs one dense panel.
struct PackPanel<'a> {
    dense: &'a [u8],
    /// Scratch for the codes of a group; empty before and after.
    codes: &'a mut Vec<u8>,
    out: &'a mut Vec<u8>,
}

impl PackPanel<'_> {
    fn pack<K: SparseLayout>(self) {
        for group in self.dense.chunks(GROUP_BLOCKS * K::DENSE) {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_get_equal_shares_of_bytes() {
        let (rows, cols) = (640, 256);
        // Density falls from the first row, which is full, to the last.
        let is_nonzero = |i: usize| (i % cols) * 37 % cols >= i / cols * cols / rows;
        let values: Vec<f32> =
            (0..rows * cols).map(|i| if is_nonzero(i) { 1.0 } else { 0.0 }).collect();
        let data = Format::BITMAP_F16.encode(&values, cols).expect("a format that can be written");
        let weight = PackedWeight::pack_sparse(Format::BITMAP_F16, &data, rows, cols);
        let panels = weight.sparse().expect("a sparse weight");
        let (total, pieces) = (weight.bytes(), 8);
        let longest = (0..weight.panels()).map(|i| panels.panel_bytes(i)).max().unwrap_or(0);
        let mut before = 0;
        for piece in 0..pieces {
            let part = piece * total / pieces..(piece + 1) * total / pieces;
            let taken = weight.panels_in(part, 1, 1);
            assert_eq!(taken.start, before, "every panel once");
            let bytes: usize = taken.clone().map(|i| panels.panel_bytes(i)).sum();
            assert!(bytes.abs_diff(total / pieces) <= longest, "piece {piece}: {bytes}");
            before = taken.end;
        }
        assert_eq!(before, weight.panels());
    }
}
