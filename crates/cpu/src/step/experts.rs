//! Mixture of experts as a grouped GEMM: (token, expert) pairs are permuted by expert, so that a
//! step reads the weights of each expert once for all tokens that chose it.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Instant;

use bodkin_model::Rows;

use super::context::StepContext;
use crate::linear::{ActivationFormats, OutRows, matmul};
use crate::pool::Worker;
use crate::program::{ExpertPermutation, Linear, Operand};

/// Chunks per thread of a grouped GEMM.
const CHUNKS_PER_THREAD: usize = 8;

impl StepContext<'_> {
    /// Permutes the pairs of all tokens by expert with a stable counting sort, on one thread: a few
    /// microseconds.
    pub(super) fn permute(&self, permutation: usize) {
        let (view, ExpertPermutation { route, used, experts, .. }) =
            (self.permutations[permutation], self.program.permutations[permutation]);
        let tokens = self.batch.tokens.len();
        let expert = |pair: usize| match route {
            Some(route) => self.read(route, pair / used)[used + pair % used] as usize,
            None => pair % used,
        };
        // SAFETY: one thread runs this stage.
        let (starts, pairs, places, counts, reads) = unsafe {
            (
                view.starts.part_mut(0..experts + 1),
                view.pairs.part_mut(0..tokens * used),
                view.places.part_mut(0..tokens * used),
                view.counts.part_mut(0..experts),
                view.reads.part_mut(0..1),
            )
        };
        starts.fill(0);
        (0..tokens * used).for_each(|pair| starts[expert(pair) + 1] += 1);
        for (count, &new) in counts.iter_mut().zip(&starts[1..]) {
            *count += u64::from(new);
            reads[0] += u64::from(new > 0);
        }
        for i in 0..experts {
            starts[i + 1] += starts[i];
        }
        // Each offset advances to the end of its expert's pairs, and is moved back afterwards.
        for (pair, place) in places.iter_mut().enumerate() {
            let next = &mut starts[expert(pair)];
            pairs[*next as usize] = pair as u32;
            *place = *next;
            *next += 1;
        }
        starts.copy_within(0..experts, 1);
        starts[0] = 0;
    }

    /// Converts the input of one token's pairs to activation formats, each at its sorted position.
    pub(super) fn quantize_experts(
        &self,
        row: usize,
        input: Operand,
        cols: usize,
        permutation: usize,
        formats: ActivationFormats,
    ) {
        let used = self.program.permutations[permutation].used;
        let count = self.batch.tokens.len() * used;
        // SAFETY: the permute stage ended with a barrier.
        let places =
            unsafe { self.permutations[permutation].places.part(row * used..(row + 1) * used) };
        let x = self.read(input, row);
        for format in formats.iter(self.is_prefill(Rows::Tokens, row)) {
            let activations = self.activations(format, count, cols);
            for (i, &place) in places.iter().enumerate() {
                // Each expert has its part of the input, or all share the whole.
                let part = if x.len() == cols { x } else { &x[i * cols..(i + 1) * cols] };
                // SAFETY: one thread sets this row; matmuls read it after a barrier.
                unsafe { activations.writer().set(self.isa, place as usize, part) };
            }
        }
    }

    /// The GEMMs of all chosen experts; threads claim chunks of the weight panels. The clock is
    /// read once per expert of a chunk: about 30 ns, less than 1 % of its work.
    pub(super) fn grouped_gemm(
        &self,
        worker: &Worker<'_>,
        cols: usize,
        permutation: usize,
        linears: &[Linear],
        claimed: &AtomicUsize,
    ) {
        let starts = self.permutations[permutation].starts();
        let chosen = starts.windows(2).filter(|w| w[0] < w[1]).count();
        let panels = |p: &Linear| self.weights[p.weight.0].matrices[0].panels();
        let each: usize = linears.iter().map(panels).sum();
        let total = chosen * each;
        let chunk = total.div_ceil(worker.threads * CHUNKS_PER_THREAD).max(1);
        let all = starts.len() - 1;
        let slots = worker.index * all..(worker.index + 1) * all;
        // SAFETY: only this thread accesses its part.
        let seconds = unsafe { self.permutations[permutation].seconds.part_mut(slots) };
        loop {
            let start = claimed.fetch_add(chunk, Relaxed);
            if start >= total {
                return;
            }
            let end = (start + chunk).min(total);
            let (mut before, mut clock) = (0, Instant::now());
            let experts = starts.windows(2).enumerate().filter(|(_, w)| w[0] < w[1]);
            for (expert, pairs) in experts {
                if before >= end || before + each <= start {
                    before += each;
                    continue;
                }
                for linear in linears {
                    let panels = panels(linear);
                    let from = start.clamp(before, before + panels) - before;
                    let to = end.clamp(before, before + panels) - before;
                    before += panels;
                    if from < to {
                        let tokens = pairs[0] as usize..pairs[1] as usize;
                        let part = (expert, tokens, from..to);
                        self.expert_panels(worker, cols, permutation, linear, part);
                    }
                }
                let now = Instant::now();
                seconds[expert] += (now - clock).as_secs_f64();
                clock = now;
            }
        }
    }

    /// Multiplies some panels of one expert with the tokens that chose it.
    fn expert_panels(
        &self,
        worker: &Worker<'_>,
        cols: usize,
        permutation: usize,
        linear: &Linear,
        (expert, tokens, panels): (usize, Range<usize>, Range<usize>),
    ) {
        let used = self.program.permutations[permutation].used;
        let count = self.batch.tokens.len() * used;
        let matrix = &self.weights[linear.weight.0].matrices[expert];
        let bias = linear.bias.map(|id| {
            let bias = self.vector(id);
            &bias[expert * matrix.rows()..][..matrix.rows()]
        });
        let (buffer, stride) = self.buffer(linear.out);
        assert!(self.batch.tokens.len() * stride <= buffer.len(), "space for every row");
        let scratch = self.scratch[worker.index];
        // SAFETY: the permute stage ended with a barrier.
        let pairs = unsafe { self.permutations[permutation].pairs.part(0..count) };
        let is_prefill = |pair: usize| self.is_prefill(Rows::Tokens, pairs[pair] as usize / used);
        self.for_formats(matrix.layout(), tokens, is_prefill, |tokens, format| {
            let (x, panels) = (self.activations(format, count, cols), panels.clone());
            // SAFETY: the buffer has the rows; this thread alone has claimed these panels, so it
            // alone writes their columns of these pairs; the scratch is this thread's.
            unsafe {
                let out = OutRows::scattered(buffer.start(), stride, pairs, used, matrix.rows());
                let scratch = scratch.part_mut(0..scratch.len());
                matmul(self.isa, matrix, bias, panels, &x, tokens, out, scratch);
            }
        });
    }
}
