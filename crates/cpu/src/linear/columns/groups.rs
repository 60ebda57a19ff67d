//! Column-major weights in memory: packing, work division, and expansion to ordinary panels for
//! batches of several tokens.

use std::ops::Range;

use super::layout::{
    ColumnInteger, ColumnLayout, Group, PANEL_MULTIPLE, SCALE_BYTES, VisitColumns, block_bytes,
};
use crate::isa::Isa;
use crate::linear::activations::BLOCK_COLS;
use crate::linear::kernel::MicroKernels;
use crate::linear::lanes::PANEL_ROWS;
use crate::linear::layout::{FloatLayout, IntegerLayout, PackedLayout};
#[cfg(target_arch = "aarch64")]
use crate::linear::simd::Neon;
use crate::linear::simd::Portable;
#[cfg(target_arch = "x86_64")]
use crate::linear::simd::{Avx2, Avx512};
use crate::linear::source::SourceRows;
use crate::memory::AlignedMemory;

/// Contiguous groups, all of the layout's size but the last.
pub(crate) struct ColumnGroups {
    pub(crate) layout: ColumnLayout,
    memory: AlignedMemory,
    /// Panels of a group.
    width: usize,
    /// All panels, with those that pad the last group.
    panels: usize,
    /// Bytes of a panel.
    panel_bytes: usize,
}

/// Copies one ordinary panel into its group.
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
        for (span, block) in dense.chunks_exact(K::PanelMajor::BYTES).zip(blocks) {
            let (scales, codes) = block.split_at_mut(panels * SCALE_BYTES);
            // The scales are the end of a dense span.
            scales[panel * SCALE_BYTES..][..SCALE_BYTES]
                .copy_from_slice(&span[span.len() - SCALE_BYTES..]);
            for column in 0..BLOCK_COLS {
                let at =
                    (column * (panels / PANEL_MULTIPLE) + panel / PANEL_MULTIPLE) * K::COLUMN_BYTES;
                let to = &mut codes[at..at + K::COLUMN_BYTES];
                for row in 0..PANEL_ROWS {
                    K::put(K::code(span, row, column), panel % PANEL_MULTIPLE, row, to);
                }
            }
        }
    }

    fn float<K: FloatLayout>(self) {
        let bytes = PANEL_ROWS * K::BYTES;
        let columns = self.group.chunks_exact_mut(self.panels * bytes);
        for (from, to) in self.dense.chunks_exact(bytes).zip(columns) {
            to[self.panel * bytes..][..bytes].copy_from_slice(from);
        }
    }
}

impl ColumnGroups {
    /// Packs rows of any format on this thread.
    pub(super) fn pack(
        (packed, layout): (PackedLayout, ColumnLayout),
        source: SourceRows<'_>,
        rows: usize,
        cols: usize,
    ) -> ColumnGroups {
        let panel_bytes = packed.panel_bytes(cols).expect("the weight was checked");
        let panels = rows.div_ceil(PANEL_ROWS).next_multiple_of(PANEL_MULTIPLE);
        let (memory, width) = (AlignedMemory::zeroed(panels * panel_bytes), layout.group_panels());
        let mut groups = ColumnGroups { layout, memory, width, panels, panel_bytes };
        let mut dense = vec![0; panel_bytes];
        for panel in 0..rows.div_ceil(PANEL_ROWS) {
            let first = panel * PANEL_ROWS;
            dense.fill(0);
            source.pack_panel(packed, first..rows.min(first + PANEL_ROWS), cols, &mut dense);
            let (group, panel, panels) = groups.group_mut(panel);
            layout.visit(PackPanel { dense: &dense, panel, panels, group });
        }
        groups
    }

    /// Bytes of all groups.
    pub(crate) fn len(&self) -> usize {
        self.memory.len()
    }

    /// Flushes the groups from the processor's caches.
    pub(crate) fn evict(&self) {
        self.memory.evict();
    }

    /// Panels that one of `threads` threads should take at a time: whole groups, if there are
    /// enough.
    pub(crate) fn granularity(&self, threads: usize) -> usize {
        let is_enough = self.panels / self.width >= 2 * threads;
        if is_enough { self.width } else { PANEL_MULTIPLE }
    }

    /// The offset of a panel's group, the panel's number in it, and the number of its panels.
    fn place(&self, panel: usize) -> (usize, usize, usize) {
        assert!(panel < self.panels, "panel {panel} of {}", self.panels);
        let first = panel - panel % self.width;
        (first * self.panel_bytes, panel - first, self.width.min(self.panels - first))
    }

    fn group_mut(&mut self, panel: usize) -> (&mut [u8], usize, usize) {
        let (start, panel, panels) = self.place(panel);
        (&mut self.memory.bytes_mut()[start..start + panels * self.panel_bytes], panel, panels)
    }

    /// Some panels, group by group, each with the number of its first panel.
    pub(crate) fn groups(&self, panels: Range<usize>) -> impl Iterator<Item = (usize, Group)> {
        let Range { start, end } = panels;
        let groups = start / self.width..end.div_ceil(self.width);
        groups.map(move |group| {
            let first = start.max(group * self.width);
            let (offset, panel, panel_count) = self.place(first);
            let count = end.min((group + 1) * self.width) - first;
            // SAFETY: inside the memory.
            let start = unsafe { self.memory.start().add(offset) };
            (first, Group { start, panel_count, panels: panel..panel + count })
        })
    }

    /// Expands some panels to the ordinary layout, `dense_bytes` each, contiguously.
    ///
    /// # Safety
    /// `scratch` has space for the panels, of `cols` columns, and no other thread accesses it.
    pub(crate) unsafe fn expand_into(
        &self,
        isa: Isa,
        panels: Range<usize>,
        (cols, dense_bytes): (usize, usize),
        scratch: *mut u8,
    ) {
        for (first, group) in self.groups(panels.clone()) {
            // SAFETY: the caller provides the scratch.
            let dense = unsafe { scratch.add((first - panels.start) * dense_bytes) };
            self.layout.visit(Expansion { isa, group, cols, dense, dense_bytes });
        }
    }
}

/// The expansion of some panels of a group to the ordinary layout.
struct Expansion {
    isa: Isa,
    group: Group,
    cols: usize,
    dense: *mut u8,
    dense_bytes: usize,
}

impl VisitColumns for Expansion {
    type Output = ();

    fn integer<K: ColumnInteger>(self) {
        let Expansion { isa, group, cols, dense, dense_bytes } = self;
        // SAFETY: `expand_into` has a group and space for its panels; an `Isa` proves its
        // instructions.
        unsafe {
            match isa.for_expansion() {
                Isa::Portable => {
                    Portable::expand_columns::<K>(&group, cols, dense, dense_bytes);
                }
                #[cfg(target_arch = "x86_64")]
                Isa::Avx2 | Isa::AvxVnni => {
                    Avx2::<0, false>::expand_columns::<K>(&group, cols, dense, dense_bytes);
                }
                #[cfg(target_arch = "x86_64")]
                Isa::Avx512 | Isa::Avx512Bf16 | Isa::Amx | Isa::AmxEmulated => {
                    Avx512::expand_columns::<K>(&group, cols, dense, dense_bytes);
                }
                #[cfg(target_arch = "aarch64")]
                Isa::Neon | Isa::DotProd => {
                    Neon::<0, 4, false>::expand_columns::<K>(&group, cols, dense, dense_bytes);
                }
            }
        }
    }

    fn float<K: FloatLayout>(self) {
        let (bytes, group) = (PANEL_ROWS * K::BYTES, self.group);
        for (i, panel) in group.panels.enumerate() {
            for col in 0..self.cols {
                // SAFETY: as for integers.
                unsafe {
                    let from = group.start.add((col * group.panel_count + panel) * bytes);
                    let to = self.dense.add(i * self.dense_bytes + col * bytes);
                    to.copy_from_nonoverlapping(from, bytes);
                }
            }
        }
    }
}
