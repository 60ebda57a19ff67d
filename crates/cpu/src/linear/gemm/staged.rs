//! Large batches: a block of columns of a few panels is converted in scratch to what the tiles read
//! fastest, f32 or unpacked integers, and stays in L1 while all tokens pass over it. BLIS packs its
//! A blocks in the same way.

use std::ops::Range;

use super::block::{Gemm, PanelGroup, SCRATCH_LEN};
use crate::linear::activations::TILE_ROWS;
use crate::linear::lanes::PANEL_ROWS;

/// Columns of float weights that are converted to f32 at a time: those of a few panels fit L1.
pub(super) const STAGED_COLS: usize = 256;

/// The most tokens per converted block: their partial sums stay in L2 between blocks of columns.
const STAGED_TOKENS: usize = 1024;

/// The block of weights that is converted at a time.
#[derive(Clone, Copy)]
pub(super) struct Staging {
    pub(super) panels: usize,
    /// Blocks of panels that share the columns of the activations, before the next columns.
    pub(super) passes: usize,
    pub(super) cols: usize,
    /// Bytes of the converted columns of a panel, a multiple of 4.
    pub(super) bytes: usize,
}

impl Gemm<'_> {
    /// Whether the batch is large enough to convert weights first, which costs a quarter of a tile,
    /// and the scratch too.
    pub(super) fn should_stage(&self) -> bool {
        let is_packed = self.weight.start().is_some();
        is_packed && self.tokens.len() >= 2 * TILE_ROWS && self.scratch.len() >= SCRATCH_LEN
    }

    /// As [`Gemm::for_groups`], for large batches: calls `run` with each converted block. `convert`
    /// writes a range of a panel's columns to scratch.
    pub(super) fn for_staged_groups(
        &mut self,
        staging: Staging,
        convert: impl Fn(*const u8, Range<usize>, *mut u8),
        mut run: impl FnMut(&Self, PanelGroup),
    ) {
        let (cols, panel_bytes) = (self.weight.cols(), self.weight.panel_bytes());
        let start = self.weight.start().expect("the weight is packed");
        let scratch = self.scratch.as_mut_ptr();
        let len = staging.panels * staging.bytes / size_of::<f32>();
        let sums_len = staging.panels * PANEL_ROWS * STAGED_TOKENS;
        assert!(len + staging.passes * sums_len <= self.scratch.len(), "scratch for partial sums");
        let (tokens, panels) = (self.tokens.clone(), self.panels.clone());
        for token in tokens.clone().step_by(STAGED_TOKENS) {
            self.tokens = token..tokens.end.min(token + STAGED_TOKENS);
            for begin in panels.clone().step_by(staging.passes * staging.panels) {
                let end = panels.end.min(begin + staging.passes * staging.panels);
                for col in (0..cols).step_by(staging.cols) {
                    let cols = staging.cols.min(cols - col);
                    for (pass, first) in (begin..end).step_by(staging.panels).enumerate() {
                        let count = staging.panels.min(end - first);
                        for i in 0..count {
                            // SAFETY: the memory holds all panels, the scratch the columns.
                            let (panel, to) = unsafe {
                                let to = scratch.cast::<u8>().add(i * staging.bytes);
                                (start.add((first + i) * panel_bytes), to)
                            };
                            convert(panel, col..col + cols, to);
                        }
                        // SAFETY: as asserted.
                        let partial_sums = unsafe { scratch.add(len + pass * sums_len) };
                        let (start, bytes) = (scratch.cast(), staging.bytes);
                        run(
                            self,
                            PanelGroup { first, count, start, bytes, col, cols, partial_sums },
                        );
                    }
                }
            }
        }
    }
}
