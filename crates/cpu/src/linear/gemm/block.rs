//! The blocking of a matmul: panels are cut into groups that stay in L2 while all tokens pass over
//! them, and groups into register tiles.

use std::ops::Range;

use crate::isa::Isa;
use crate::linear::activations::{Activations, TILE_ROWS};
use crate::linear::kernel::Tile;
use crate::linear::lanes::PANEL_ROWS;
use crate::linear::out::OutRows;
use crate::linear::weight::PackedWeight;

/// The size of a group of panels, which stays in L2 while all tokens pass over it.
const GROUP_BYTES: usize = 512 << 10;

/// Elements of a thread's scratch for panels that a matmul packs, expands or converts.
pub const SCRATCH_LEN: usize = 1 << 18;

/// The operands of a matmul. `gemm::matmul` checks them and passes on its caller's guarantees.
pub(super) struct Gemm<'a> {
    pub(super) isa: Isa,
    pub(super) weight: &'a PackedWeight,
    pub(super) bias: Option<&'a [f32]>,
    pub(super) panels: Range<usize>,
    pub(super) x: &'a Activations,
    pub(super) tokens: Range<usize>,
    pub(super) out: OutRows<'a>,
    pub(super) scratch: &'a mut [f32],
}

/// Contiguous panels, or a block of their columns.
#[derive(Clone, Copy)]
pub(super) struct PanelGroup {
    /// The number of the first panel in the weight.
    pub(super) first: usize,
    pub(super) count: usize,
    pub(super) start: *const u8,
    /// Bytes from one panel to the next.
    pub(super) bytes: usize,
    /// The first column, and the number of columns.
    pub(super) col: usize,
    pub(super) cols: usize,
    /// Partial sums of the first token between blocks of columns; null if these are all columns.
    pub(super) partial_sums: *mut f32,
}

impl Gemm<'_> {
    /// Calls `run` with each group of panels.
    pub(super) fn for_groups(&mut self, mut run: impl FnMut(&Self, PanelGroup)) {
        let (bytes, cols) = (self.weight.panel_bytes(), self.weight.cols());
        let group = (GROUP_BYTES / bytes.max(1)).max(4);
        let Some(start) = self.weight.start() else { return self.for_packed_groups(run) };
        for first in self.panels.clone().step_by(group) {
            let count = group.min(self.panels.end - first);
            // SAFETY: the memory holds all panels.
            let start = unsafe { start.add(first * bytes) };
            let partial_sums = std::ptr::null_mut();
            run(self, PanelGroup { first, count, start, bytes, col: 0, cols, partial_sums });
        }
    }

    /// As [`Gemm::for_groups`], for a weight whose dense panels are written to scratch first: as
    /// many at a time as fit.
    fn for_packed_groups(&mut self, mut run: impl FnMut(&Self, PanelGroup)) {
        let (bytes, cols) = (self.weight.panel_bytes(), self.weight.cols());
        let group = size_of_val(self.scratch) / bytes.max(1);
        assert!(group > 0, "{} bytes of scratch for a panel of {bytes}", size_of_val(self.scratch));
        let start = self.scratch.as_mut_ptr().cast::<u8>();
        for first in self.panels.clone().step_by(group) {
            let count = group.min(self.panels.end - first);
            // SAFETY: the scratch has space for the group and belongs to this thread.
            unsafe { self.weight.pack_into(self.isa, first..first + count, start) };
            let partial_sums = std::ptr::null_mut();
            run(self, PanelGroup { first, count, start, bytes, col: 0, cols, partial_sums });
        }
    }

    /// Calls `run` with each tile of a group, its number of panels and its number of tokens: the
    /// largest of `shapes`, pairs of tokens and panels, that fits.
    #[inline(always)]
    pub(super) fn tiles(
        &self,
        group: PanelGroup,
        shapes: &[(usize, usize)],
        run: impl Fn(&Tile, usize, usize),
    ) {
        let mut token = self.tokens.start;
        while token < self.tokens.end {
            let left = (self.tokens.end - token).min(TILE_ROWS - token % TILE_ROWS);
            let fits = shapes.iter().rev().find(|(tokens, _)| *tokens <= left);
            let &(tokens, most) = fits.expect("every instruction set has tiles of one token");
            let mut panel = 0;
            while panel < group.count {
                let count = if group.count - panel >= most { most } else { 1 };
                run(&self.tile(group, (panel, count), (token, tokens)), count, tokens);
                panel += count;
            }
            token += tokens;
        }
    }

    pub(super) fn tile(
        &self,
        group: PanelGroup,
        (panel, count): (usize, usize),
        (token, tokens): (usize, usize),
    ) -> Tile {
        let first = (group.first + panel) * PANEL_ROWS;
        let (x, x_stride) = self.x.row(token);
        let bias = self.bias.map_or(std::ptr::null(), |bias| bias[first..].as_ptr());
        let mut out = [std::ptr::null_mut(); TILE_ROWS];
        for (out, token) in out.iter_mut().zip(token..self.tokens.end) {
            // SAFETY: `matmul` checked the tokens and the rows against `out`.
            *out = unsafe { self.out.row(token).add(first) };
        }
        let (is_first, is_last) = (group.col == 0, group.col + group.cols == self.weight.cols());
        let offset = (token - self.tokens.start) * group.count + panel * tokens;
        Tile {
            // SAFETY: the group has the panel.
            panel: unsafe { group.start.add(panel * group.bytes) },
            panel_bytes: group.bytes,
            cols: group.cols,
            is_first,
            is_last,
            partial_sums: group.partial_sums.wrapping_add(offset * PANEL_ROWS),
            // SAFETY: a row has all steps of its columns.
            x: unsafe { x.add(group.col / self.x.format().step_cols() * x_stride) },
            x_stride,
            out,
            rows: (count * PANEL_ROWS).min(self.weight.rows() - first),
            bias,
        }
    }
}
