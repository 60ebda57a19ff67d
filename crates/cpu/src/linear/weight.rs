//! Weight matrices as kernels read them: contiguous panels of 16 rows, packed at load.

use std::marker::PhantomData;
use std::ops::Range;

use bodkin_gguf::Format;

use super::columns::groups::ColumnGroups;
use super::columns::layout::PANEL_MULTIPLE;
use super::lanes::PANEL_ROWS;
use super::layout::PackedLayout;
use super::source::{SourceRows, float_layout};
use super::sparse::panels::SparsePanels;
use crate::isa::Isa;
use crate::memory::AlignedMemory;

/// A weight matrix `[rows, cols]`, packed.
pub struct PackedWeight {
    layout: PackedLayout,
    rows: usize,
    cols: usize,
    /// Bytes of a dense panel.
    panel_bytes: usize,
    store: Store,
}

/// Where the panels are.
enum Store {
    /// Dense panels.
    Dense(AlignedMemory),
    /// Not packed: `[rows, cols]` in the format, packed into scratch by each matmul.
    Source(Source, Format),
    /// Panels without zeros.
    Sparse(SparsePanels),
    /// Column-major panels.
    Columns(ColumnGroups),
}

/// The data of a tensor, owned elsewhere.
pub type Source = Box<dyn AsRef<[u8]> + Send + Sync>;

impl PackedWeight {
    /// Rows of a panel.
    pub const PANEL_ROWS: usize = PANEL_ROWS;
    /// Rows of column-major weights are padded to a multiple of this.
    pub const GROUP_ROWS: usize = PANEL_MULTIPLE * PANEL_ROWS;

    /// Bytes of a dense packed weight; `None` if that overflows or if the layout cannot have this
    /// number of columns.
    pub fn bytes_for(layout: PackedLayout, rows: usize, cols: usize) -> Option<usize> {
        layout.panel_bytes(cols)?.checked_mul(rows.div_ceil(PANEL_ROWS))
    }

    /// A weight of zeros, to be filled through [`PackedWeight::packer`].
    ///
    /// # Panics
    /// If [`PackedWeight::bytes_for`] returns `None`.
    pub fn zeroed(layout: PackedLayout, rows: usize, cols: usize) -> PackedWeight {
        let bytes = PackedWeight::bytes_for(layout, rows, cols);
        let bytes = bytes.unwrap_or_else(|| panic!("{layout:?}: no panels of {rows} x {cols}"));
        PackedWeight::new(layout, rows, cols, Store::Dense(AlignedMemory::zeroed(bytes)))
    }

    /// Packs a whole weight on this thread, zeros included; `source` is `[rows, cols]` in `format`.
    ///
    /// # Panics
    /// As [`PackedWeight::zeroed`] and [`PackedWeight::packer`].
    pub fn pack(format: Format, source: &[u8], rows: usize, cols: usize) -> PackedWeight {
        let layout = PackedLayout::native(format);
        let layout = layout.unwrap_or_else(|| float_layout(format, source, cols));
        let mut weight = PackedWeight::zeroed(layout, rows, cols);
        let panels = 0..weight.panels();
        // SAFETY: no other thread has this weight.
        unsafe { weight.packer(SourceRows::new(format, source, rows)).pack(panels) };
        weight
    }

    fn new(layout: PackedLayout, rows: usize, cols: usize, store: Store) -> PackedWeight {
        let panel_bytes = layout.panel_bytes(cols);
        let panel_bytes = panel_bytes.unwrap_or_else(|| panic!("{layout:?}: no panels of {cols}"));
        PackedWeight { layout, rows, cols, panel_bytes, store }
    }

    /// A weight of sparse panels, which expand to `layout`.
    pub(super) fn of_sparse(
        layout: PackedLayout,
        rows: usize,
        cols: usize,
        panels: SparsePanels,
    ) -> PackedWeight {
        PackedWeight::new(layout, rows, cols, Store::Sparse(panels))
    }

    /// A column-major weight, whose groups expand to panels of `layout`.
    pub(super) fn of_columns(
        layout: PackedLayout,
        rows: usize,
        cols: usize,
        groups: ColumnGroups,
    ) -> PackedWeight {
        PackedWeight::new(layout, rows, cols, Store::Columns(groups))
    }

    /// A weight that takes no memory: each matmul packs panels from `source`, `[rows, cols]` in
    /// `format`. Slower, with the same results.
    ///
    /// # Panics
    /// As [`PackedWeight::zeroed`], or if `source` has another size.
    pub fn unpacked(
        layout: PackedLayout,
        (source, format): (Source, Format),
        rows: usize,
        cols: usize,
    ) -> PackedWeight {
        let bytes = (*source).as_ref();
        assert_eq!(bytes.len(), rows * format.row_bytes(cols).unwrap_or(0), "{rows} x {cols}");
        PackedWeight::new(layout, rows, cols, Store::Source(source, format))
    }

    /// Prepares packing the first rows of `source` into a weight made by [`PackedWeight::zeroed`].
    ///
    /// # Panics
    /// If there are fewer rows, if they have another length, or if the layout cannot store the
    /// format: an integer layout stores its own and sparse ones over it, a float layout any.
    pub fn packer<'a>(&'a mut self, source: SourceRows<'a>) -> Packer<'a> {
        let (layout, rows, cols, panel_bytes) =
            (self.layout, self.rows, self.cols, self.panel_bytes);
        source.check(layout, rows, cols);
        let Store::Dense(memory) = &mut self.store else { panic!("this weight is not dense") };
        let start = memory.start_mut();
        Packer { start, layout, rows, cols, panel_bytes, source, owner: PhantomData }
    }

    /// The first byte of dense panels, to write to.
    pub(crate) fn start_mut(&mut self) -> Option<*mut u8> {
        match &mut self.store {
            Store::Dense(memory) => Some(memory.start_mut()),
            Store::Source(..) | Store::Sparse(_) | Store::Columns(_) => None,
        }
    }

    /// Lets the system swap out no dense panels, as far as it allows that.
    pub(crate) fn lock(&mut self) {
        if let Store::Dense(memory) = &mut self.store {
            memory.lock();
        }
    }

    /// The packed layout.
    pub fn layout(&self) -> PackedLayout {
        self.layout
    }

    /// Rows: the width of the output.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Columns: the width of the activations.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Panels of 16 rows, the last one padded with zeros.
    pub fn panels(&self) -> usize {
        self.rows.div_ceil(PANEL_ROWS)
    }

    /// Bytes that a matmul reads.
    pub fn bytes(&self) -> usize {
        match &self.store {
            Store::Dense(memory) => memory.len(),
            Store::Source(source, _) => (**source).as_ref().len(),
            Store::Sparse(panels) => panels.len(),
            Store::Columns(groups) => groups.len(),
        }
    }

    /// The panels that start in a range of the weight's bytes, for one of `threads` threads, in
    /// multiples of `multiple`. Adjacent ranges cover all panels once; no range gets many more
    /// bytes than its length.
    pub(crate) fn panels_in(
        &self,
        bytes: Range<usize>,
        threads: usize,
        multiple: usize,
    ) -> Range<usize> {
        let panels = self.panels();
        let first = |at: usize| self.first_in(at, threads).next_multiple_of(multiple).min(panels);
        first(bytes.start)..first(bytes.end)
    }

    fn first_in(&self, at: usize, threads: usize) -> usize {
        let panels = self.panels();
        match &self.store {
            Store::Sparse(sparse) => sparse.first_at(at),
            Store::Columns(groups) => {
                let panel = (at * panels).div_ceil(self.bytes().max(1));
                panel.next_multiple_of(groups.granularity(threads))
            }
            _ => (at * panels).div_ceil(self.bytes().max(1)),
        }
    }

    /// The addresses of some panels that a GEMV reads contiguously; null where it does not.
    pub(crate) fn addresses(&self, panels: Range<usize>) -> Range<*const u8> {
        let address = |at: usize| match &self.store {
            Store::Dense(memory) => memory.start().wrapping_add(at * self.panel_bytes),
            Store::Sparse(sparse) => sparse.address(at),
            Store::Source(..) | Store::Columns(_) => std::ptr::null(),
        };
        address(panels.start)..address(panels.end)
    }

    /// The panels of a sparse weight.
    pub(crate) fn sparse(&self) -> Option<&SparsePanels> {
        match &self.store {
            Store::Sparse(panels) => Some(panels),
            _ => None,
        }
    }

    /// The groups of a column-major weight.
    pub(crate) fn columns(&self) -> Option<&ColumnGroups> {
        match &self.store {
            Store::Columns(groups) => Some(groups),
            _ => None,
        }
    }

    /// Flushes the weight from the processor's caches, so that the next matmul reads memory.
    pub(crate) fn evict(&self) {
        match &self.store {
            Store::Dense(memory) => memory.evict(),
            Store::Sparse(panels) => panels.evict(),
            Store::Columns(groups) => groups.evict(),
            Store::Source(..) => {}
        }
    }

    /// Bytes of a dense panel.
    pub(crate) fn panel_bytes(&self) -> usize {
        self.panel_bytes
    }

    /// The first byte of dense panels; `None` if a matmul has to write them to scratch.
    pub(crate) fn start(&self) -> Option<*const u8> {
        match &self.store {
            Store::Dense(memory) => Some(memory.start()),
            Store::Source(..) | Store::Sparse(_) | Store::Columns(_) => None,
        }
    }

    /// Writes some panels of a weight that has no dense ones to scratch.
    ///
    /// # Safety
    /// `scratch` has space for the panels, and no other thread accesses it.
    pub(crate) unsafe fn pack_into(&self, isa: Isa, panels: Range<usize>, scratch: *mut u8) {
        let (cols, panel_bytes) = (self.cols, self.panel_bytes);
        match &self.store {
            Store::Dense(_) => panic!("the weight is packed"),
            // SAFETY: passed on.
            Store::Sparse(sparse) => unsafe {
                sparse.expand_into(isa, panels, cols, panel_bytes, scratch);
            },
            // SAFETY: passed on.
            Store::Columns(groups) => unsafe {
                groups.expand_into(isa, panels, (cols, panel_bytes), scratch);
            },
            Store::Source(source, format) => {
                let source = SourceRows::new(*format, (**source).as_ref(), self.rows);
                // SAFETY: the caller provides the scratch.
                let out = unsafe {
                    scratch.write_bytes(0, panels.len() * panel_bytes);
                    std::slice::from_raw_parts_mut(scratch, panels.len() * panel_bytes)
                };
                for (panel, out) in panels.zip(out.chunks_exact_mut(panel_bytes)) {
                    let first = panel * PANEL_ROWS;
                    let rows = first..self.rows.min(first + PANEL_ROWS);
                    source.pack_panel(self.layout, rows, cols, out);
                }
            }
        }
    }
}

/// Packs panels of a weight; shareable between threads.
#[derive(Copy, Clone)]
pub struct Packer<'a> {
    start: *mut u8,
    layout: PackedLayout,
    rows: usize,
    cols: usize,
    panel_bytes: usize,
    source: SourceRows<'a>,
    owner: PhantomData<&'a mut PackedWeight>,
}

// SAFETY: the pointer stays valid for 'a, and `pack` requires that threads pack different panels.
unsafe impl Send for Packer<'_> {}
// SAFETY: as for Send.
unsafe impl Sync for Packer<'_> {}

impl Packer<'_> {
    /// Packs a range of panels.
    ///
    /// # Safety
    /// No other thread packs the same panels at the same time.
    ///
    /// # Panics
    /// If the weight has fewer panels.
    pub unsafe fn pack(self, panels: Range<usize>) {
        assert!(panels.end <= self.rows.div_ceil(PANEL_ROWS), "panel {}", panels.end);
        for panel in panels {
            let first = panel * PANEL_ROWS;
            let rows = first..self.rows.min(first + PANEL_ROWS);
            // SAFETY: the panel lies in the memory, and the caller keeps other threads off it.
            let out = unsafe {
                let start = self.start.wrapping_add(panel * self.panel_bytes);
                std::slice::from_raw_parts_mut(start, self.panel_bytes)
            };
            self.source.pack_panel(self.layout, rows, self.cols, out);
        }
    }
}
