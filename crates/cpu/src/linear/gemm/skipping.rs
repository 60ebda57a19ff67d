//! GEMV over sparse panels and column-major groups, which skips zeros of the weights or of the
//! input.

use std::marker::PhantomData;

use super::block::{Gemm, PanelGroup};
use crate::linear::activations::NonZeros;
use crate::linear::columns::ColumnGroups;
use crate::linear::columns::layout::{ColumnInteger, PANEL_MULTIPLE, VisitColumns};
use crate::linear::kernel::{MicroKernels, Tile};
use crate::linear::layout::FloatLayout;
use crate::linear::sparse::layout::{SparseFloat, SparseInteger};
use crate::linear::sparse::{SparsePanels, VisitSparse};

/// A GEMV with sparse panels, once their format is known.
pub(super) struct SparseGemv<'a, M>(
    pub(super) Gemm<'a>,
    pub(super) &'a SparsePanels,
    pub(super) PhantomData<M>,
);

impl<M: MicroKernels> SparseGemv<'_, M> {
    /// The operands of `count` panels.
    fn tile(&self, panel: usize, count: usize) -> Tile {
        let (start, cols) = (self.1.panel(panel), self.0.weight.cols());
        let (bytes, partial_sums) = (self.1.panel_bytes(panel), std::ptr::null_mut());
        let group = PanelGroup { first: panel, count, start, bytes, col: 0, cols, partial_sums };
        self.0.tile(group, (0, count), (self.0.tokens.start, 1))
    }

    fn floats<K: SparseFloat, const P: usize>(&self, panel: usize) {
        let panels = std::array::from_fn(|i| self.1.panel(panel + i));
        let last = self.0.weight.panels() - 1;
        let next = std::array::from_fn(|i| self.1.panel(last.min(panel + P + i)));
        // SAFETY: tiles lie inside the operands that `matmul` checked, its caller keeps other
        // threads away, and an `Isa` that expands proves its instructions.
        unsafe { M::Floats::sparse_float::<K, P>(&self.tile(panel, P), panels, next) }
    }
}

impl<M: MicroKernels> VisitSparse for SparseGemv<'_, M> {
    type Output = ();

    fn integer<K: SparseInteger>(self) {
        for panel in self.0.panels.clone() {
            // SAFETY: as for floats.
            unsafe { M::sparse_integer::<K>(&self.tile(panel, 1)) }
        }
    }

    fn float<K: SparseFloat>(self) {
        let mut panels = self.0.panels.clone();
        while panels.len() >= 4 {
            self.floats::<K, 4>(panels.start);
            panels.start += 4;
        }
        panels.for_each(|panel| self.floats::<K, 1>(panel));
    }

    fn csr(self) {
        for panel in self.0.panels.clone() {
            // SAFETY: as for floats.
            unsafe { M::Floats::csr(&self.tile(panel, 1)) }
        }
    }
}

/// A GEMV with column-major groups, once their layout is known.
pub(super) struct ColumnGemv<'a, M>(
    pub(super) Gemm<'a>,
    pub(super) &'a ColumnGroups,
    pub(super) NonZeros,
    pub(super) PhantomData<M>,
);

impl<M: MicroKernels> ColumnGemv<'_, M> {
    /// The operands of `count` panels of one group.
    fn tile(&self, panel: usize, count: usize) -> Tile {
        let (start, cols) = (std::ptr::null(), self.0.weight.cols());
        let partial_sums = std::ptr::null_mut();
        let group = PanelGroup { first: panel, count, start, bytes: 0, col: 0, cols, partial_sums };
        self.0.tile(group, (0, count), (self.0.tokens.start, 1))
    }
}

impl<M: MicroKernels> VisitColumns for ColumnGemv<'_, M> {
    type Output = ();

    fn integer<K: ColumnInteger>(self) {
        for (first, group) in self.1.groups(self.0.panels.clone()) {
            // SAFETY: as for floats.
            unsafe {
                M::columns_integer::<K>(&self.tile(first, group.panels.len()), &group, self.2)
            }
        }
    }

    fn float<K: FloatLayout>(self) {
        for (mut first, mut group) in self.1.groups(self.0.panels.clone()) {
            while !group.panels.is_empty() {
                let count = if group.panels.len() >= PANEL_MULTIPLE { PANEL_MULTIPLE } else { 1 };
                let tile = self.tile(first, count);
                // SAFETY: tiles lie inside the operands that `matmul` checked, its caller keeps
                // other threads away, and an `Isa` proves its instructions.
                unsafe {
                    match count {
                        PANEL_MULTIPLE => {
                            M::Floats::columns_float::<K, PANEL_MULTIPLE>(&tile, &group, self.2)
                        }
                        _ => M::Floats::columns_float::<K, 1>(&tile, &group, self.2),
                    }
                }
                (first, group.panels.start) = (first + count, group.panels.start + count);
            }
        }
    }
}
