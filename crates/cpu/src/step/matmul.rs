//! Matmul stages with work stealing. A thread first claims the chunks of its own share of the
//! weights, in order, so that it reads memory sequentially and prefetches what it reads next. Then
//! it steals chunks of other threads' shares, so that a descheduled thread delays nobody. A thread
//! that waits at a barrier prefetches the start of its next share, which keeps memory busy between
//! matmuls.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use bodkin_backend::Worker;
use bodkin_model::Rows;

use super::context::StepContext;
use crate::linear::{OutRows, matmul};
use crate::memory::prefetch_l2;
use crate::program::{Linear, Operand, Stage};
use crate::shared::Shared;

/// The ends of the chunks of a share, in sixteenths of its bytes (rows of sparse weights differ in
/// size). The last chunks are small, so that threads finish together.
const CHUNK_ENDS: &[usize] = &[3, 6, 9, 11, 13, 14, 15, 16];
/// The same for tiles. Each chunk reads the activations of all tokens, so there are few.
const TILE_CHUNK_ENDS: &[usize] = &[10, 14, 16];
/// Panels that tiles multiply together.
const TILE_PANELS: usize = 2;

/// The most bytes that a waiting thread prefetches: they must stay in its L2.
const PREFETCH_BYTES: usize = 128 << 10;
/// Cache lines that every thread prefetches on arrival at a barrier.
pub(super) const ARRIVAL_LINES: usize = 32;
/// Cache lines that a waiting thread prefetches per poll.
pub(super) const WAITING_LINES: usize = 8;

/// The first weights of a thread's share of a later stage, as far as they are not prefetched yet.
pub(super) struct Prefetch {
    /// The stage that reads the weights.
    stage: usize,
    lines: Range<*const u8>,
}

impl Default for Prefetch {
    fn default() -> Prefetch {
        Prefetch { stage: usize::MAX, lines: std::ptr::null()..std::ptr::null() }
    }
}

impl Prefetch {
    /// Prefetches the next `lines` cache lines.
    pub(super) fn advance(&mut self, lines: usize) {
        for _ in 0..lines {
            if self.lines.start >= self.lines.end {
                return;
            }
            prefetch_l2(self.lines.start);
            self.lines.start = self.lines.start.wrapping_add(64);
        }
    }
}

impl StepContext<'_> {
    /// Points `prefetch` to the weights that this thread reads first in the next matmul stage.
    pub(super) fn next_weights(&self, worker: &Worker<'_>, from: usize, prefetch: &mut Prefetch) {
        let mut linears = self.program.stages.iter().enumerate().skip(from);
        let next = linears.find_map(|(stage, what)| match what {
            Stage::Matmul { linears, .. } => Some((stage, linears)),
            _ => None,
        });
        let Some((stage, linears)) = next.filter(|(stage, _)| *stage != prefetch.stage) else {
            return;
        };
        let total = self.bytes(linears);
        let share = (worker.share(total), worker.threads, 1);
        // The first linear only; nothing if its weights are not contiguous.
        let mut first = None;
        self.parts(linears, share, |linear, panels| {
            first
                .get_or_insert_with(|| self.weights[linear.weight.0].matrices[0].addresses(panels));
        });
        let mut lines = first.unwrap_or(std::ptr::null()..std::ptr::null());
        lines.end = lines.end.min(lines.start.wrapping_add(PREFETCH_BYTES));
        *prefetch = Prefetch { stage, lines };
    }

    fn bytes(&self, linears: &[Linear]) -> usize {
        linears.iter().map(|p| self.weights[p.weight.0].matrices[0].bytes()).sum()
    }

    /// Calls `run` with the panels of each linear in a range of the bytes of all of them, for one
    /// of some threads, in multiples of some panels.
    fn parts(
        &self,
        linears: &[Linear],
        (bytes, threads, multiple): (Range<usize>, usize, usize),
        mut run: impl FnMut(&Linear, Range<usize>),
    ) {
        let mut before = 0;
        for linear in linears {
            let matrix = &self.weights[linear.weight.0].matrices[0];
            let start = before;
            before += matrix.bytes();
            let [from, to] = [bytes.start, bytes.end].map(|at| at.clamp(start, before) - start);
            let panels = matrix.panels_in(from..to, threads, multiple);
            if !panels.is_empty() {
                run(linear, panels);
            }
        }
    }

    /// This thread's part of the linears of one input.
    pub(super) fn matmul(
        &self,
        worker: &Worker<'_>,
        rows: Rows,
        input: Operand,
        linears: &[Linear],
        claimed: &[AtomicUsize],
    ) {
        let total = self.bytes(linears);
        let has_tiles =
            self.isa.has_tiles() && (0..self.count(rows)).any(|row| self.is_prefill(rows, row));
        let (chunk_ends, multiple) =
            if has_tiles { (TILE_CHUNK_ENDS, TILE_PANELS) } else { (CHUNK_ENDS, 1) };
        let (threads, units) = (worker.threads, chunk_ends[chunk_ends.len() - 1]);
        let scratch = self.scratch[worker.index];
        for owner in (0..threads).map(|i| (worker.index + i) % threads) {
            let at = |end: usize| (owner * units + end) * total / (threads * units);
            while claimed[owner].load(Relaxed) < chunk_ends.len() {
                let chunk = claimed[owner].fetch_add(1, Relaxed);
                if chunk >= chunk_ends.len() {
                    break;
                }
                let first = chunk.checked_sub(1).map_or(0, |chunk| chunk_ends[chunk]);
                let part = (at(first)..at(chunk_ends[chunk]), threads, multiple);
                self.parts(linears, part, |linear, panels| {
                    self.panels(rows, input, linear, panels, scratch);
                });
            }
        }
    }

    /// Multiplies some panels of a linear with all rows.
    fn panels(
        &self,
        rows: Rows,
        input: Operand,
        linear: &Linear,
        panels: Range<usize>,
        scratch: Shared<f32>,
    ) {
        let matrix = &self.weights[linear.weight.0].matrices[0];
        let bias = linear.bias.map(|id| self.vector(id));
        let count = self.count(rows);
        let (buffer, stride) = self.buffer(linear.out);
        assert!(count * stride <= buffer.len(), "space for every row");
        let is_prefill = |row: usize| self.is_prefill(rows, row);
        self.for_formats(matrix.layout(), 0..count, is_prefill, |tokens, format| {
            let (x, panels) = (self.activations(format, count, input.width), panels.clone());
            // SAFETY: the buffer has the rows, and this thread alone has claimed these panels, so
            // it alone writes their columns. The scratch is this thread's.
            unsafe {
                let out = OutRows::from_raw(buffer.start(), stride, count);
                let scratch = scratch.part_mut(0..scratch.len());
                matmul(self.isa, matrix, bias, panels, &x, tokens, out, scratch);
            }
        });
    }
}
