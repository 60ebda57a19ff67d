//! Mixture of experts as a grouped GEMM: (token, expert) pairs are permuted by expert, so that a
//! step reads the weights of each expert once for all tokens that chose it.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Instant;

use bodkin_backend::Worker;
use bodkin_gguf::File;
use bodkin_model::Rows;

use super::context::StepContext;
use crate::expert_cache::{ExpertCache, Location};
use crate::linear::{ActivationFormats, OutRows, PackedWeight, matmul};
use crate::ops::route::route;
use crate::program::{ExpertPermutation, Linear, Operand, Prediction};

/// How often each thread of a grouped GEMM claims a run of panels.
const CLAIMS_PER_THREAD: usize = 8;
/// The most rows of a step that predict what the next layer will choose. More rows choose most of
/// the experts anyway.
pub(super) const MOST_PREDICTED_ROWS: usize = 8;

/// Prefetches missed experts from the mapped file (`madvise`) before threads need them. Waiting for
/// one page after the other would leave the storage idle most of the time.
struct Prefetch<'a> {
    cache: Option<&'a ExpertCache>,
    /// That of the layer whose experts are predicted, in the first stage of this layer.
    next: Option<&'a ExpertCache>,
    file: &'a File,
    order: &'a [u32],
    /// The number of cache hits, at the start of the order; the misses follow.
    hits: usize,
    /// Positions among the cache's weights that this stage reads.
    weights: Range<usize>,
}

impl<'a> Prefetch<'a> {
    fn new(step: &'a StepContext<'_>, permutation: usize, linears: &[Linear]) -> Prefetch<'a> {
        let cache = step.caches[permutation].as_ref();
        let positions = linears.iter().filter_map(|linear| cache?.position(linear.weight));
        let weights = positions.map(|at| at..at + 1);
        let weights = weights.reduce(|a, b| a.start.min(b.start)..a.end.max(b.end));
        let is_first = weights.as_ref().is_some_and(|weights| weights.start == 0);
        let weights = weights.unwrap_or(0..0);
        let prediction = step.program.permutations[permutation].prediction;
        let prediction = prediction.filter(|_| is_first);
        let next = prediction.and_then(|prediction| step.caches[prediction.permutation].as_ref());
        let order = step.permutations[permutation].order();
        let hits = order.len() - cache.map_or(0, ExpertCache::missed);
        Prefetch { cache, next, file: step.file, order, hits, weights }
    }

    /// Begins with the first missed experts: this thread's share of them, in the weights of this
    /// stage and of those after it.
    fn start(&self, worker: &Worker<'_>) {
        let Some(cache) = self.cache else { return };
        let missed = &self.order[self.hits..];
        for &expert in
            missed.iter().take(cache.read_ahead()).skip(worker.index).step_by(worker.threads)
        {
            cache.will_need(self.file, expert as usize, self.weights.start..cache.weights());
        }
        if let Some(next) = self.next {
            next.will_need_predicted(self.file, worker);
        }
    }

    /// Called when a thread begins with `order[at]`: prefetches this stage's weights of a missed
    /// expert farther on.
    fn advance(&self, at: usize) {
        let Some(cache) = self.cache else { return };
        if at >= self.hits
            && let Some(&expert) = self.order.get(at + cache.read_ahead())
        {
            cache.will_need(self.file, expert as usize, self.weights.clone());
        }
    }
}

impl StepContext<'_> {
    /// Permutes the pairs of all tokens by expert with a stable counting sort, on one thread: a few
    /// microseconds.
    pub(super) fn permute(&self, permutation: usize) {
        let (view, ExpertPermutation { route, used, experts, prediction, .. }) =
            (self.permutations[permutation], self.program.permutations[permutation]);
        let tokens = self.batch.tokens.len();
        // A row of a route has the weights of its experts, then their ids as floats. Without a
        // route each token goes to all experts.
        let expert = |pair: usize| match route {
            Some(route) => self.read(route, pair / used)[used + pair % used] as usize,
            None => pair % used,
        };
        // SAFETY: one thread runs this stage.
        let (starts, order, pairs, places, total_pairs, total_reads) = unsafe {
            (
                view.starts.part_mut(0..experts + 1),
                view.order.part_mut(0..experts),
                view.pairs.part_mut(0..tokens * used),
                view.places.part_mut(0..tokens * used),
                view.total_pairs.part_mut(0..experts),
                view.total_reads.part_mut(0..1),
            )
        };
        starts.fill(0);
        (0..tokens * used).for_each(|pair| starts[expert(pair) + 1] += 1);
        for (total, &in_step) in total_pairs.iter_mut().zip(&starts[1..]) {
            *total += u64::from(in_step);
            total_reads[0] += u64::from(in_step > 0);
        }
        let is_chosen = |expert: usize| starts[expert + 1] > 0;
        match &self.caches[permutation] {
            Some(cache) => cache.choose(is_chosen, order),
            None => {
                let chosen = (0..experts).filter(|&expert| is_chosen(expert));
                order.iter_mut().zip(chosen).for_each(|(next, expert)| *next = expert as u32);
            }
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
        if let Some(prediction) = prediction.filter(|_| tokens <= MOST_PREDICTED_ROWS) {
            self.predict(&prediction);
        }
    }

    /// Predicts what the next layer with experts will choose.
    fn predict(&self, prediction: &Prediction) {
        let Prediction { permutation, scores, bias, ref routing, out } = *prediction;
        let Some(cache) = &self.caches[permutation] else { return };
        let bias = bias.map(|id| self.vector(id));
        let experts = (0..self.batch.tokens.len()).flat_map(|row| {
            route(routing, self.read(scores, row), None, bias, self.write(out, row));
            self.read(out, row)[routing.used..].iter().map(|&expert| expert as usize)
        });
        cache.predict(experts);
    }

    /// Converts the input of one token's pairs to activation formats, each at its place in the
    /// permutation.
    pub(super) fn quantize_expert_inputs(
        &self,
        row: usize,
        input: Operand,
        cols: usize,
        permutation: usize,
        formats: ActivationFormats,
    ) {
        let used = self.program.permutations[permutation].used;
        let pair_count = self.batch.tokens.len() * used;
        // SAFETY: the permute stage ended with a barrier, or ran before on this thread.
        let places =
            unsafe { self.permutations[permutation].places.part(row * used..(row + 1) * used) };
        let x = self.read(input, row);
        for format in formats.iter(self.is_prefill(Rows::Tokens, row)) {
            let activations = self.activations(format, pair_count, cols);
            for (i, &place) in places.iter().enumerate() {
                // Each expert has its part of the input, as those of a down projection, or all
                // share it.
                let part = if x.len() == cols { x } else { &x[i * cols..(i + 1) * cols] };
                // SAFETY: one thread sets this row; matmuls read it after a barrier.
                unsafe { activations.writer().set(self.isa, place as usize, part) };
            }
        }
    }

    /// The GEMMs of all chosen experts; threads claim runs of the weight panels. The clock is
    /// read once per expert of a run: about 30 ns, less than 1 % of its work.
    pub(super) fn grouped_gemm(
        &self,
        worker: &Worker<'_>,
        cols: usize,
        permutation: usize,
        linears: &[Linear],
        claimed: &AtomicUsize,
    ) {
        let (starts, order) =
            (self.permutations[permutation].starts(), self.permutations[permutation].order());
        let prefetch = Prefetch::new(self, permutation, linears);
        prefetch.start(worker);
        let panels = |p: &Linear| self.weights[p.weight.0].matrices[0].panels();
        let panels_per_expert: usize = linears.iter().map(panels).sum();
        let total = order.len() * panels_per_expert;
        let run = total.div_ceil(worker.threads * CLAIMS_PER_THREAD).max(1);
        let experts = starts.len() - 1;
        let own = worker.index * experts..(worker.index + 1) * experts;
        // SAFETY: only this thread accesses its part.
        let seconds = unsafe { self.permutations[permutation].seconds.part_mut(own) };
        loop {
            let start = claimed.fetch_add(run, Relaxed);
            if start >= total {
                return;
            }
            let end = (start + run).min(total);
            let mut clock = Instant::now();
            let chosen = order.iter().enumerate();
            let chosen = chosen.take(end.div_ceil(panels_per_expert));
            let chosen = chosen.skip(start / panels_per_expert);
            for (at, &expert) in chosen {
                let (expert, mut before) = (expert as usize, at * panels_per_expert);
                if start <= before {
                    prefetch.advance(at);
                }
                for linear in linears {
                    let panels = panels(linear);
                    let from = start.clamp(before, before + panels) - before;
                    let to = end.clamp(before, before + panels) - before;
                    before += panels;
                    if from < to {
                        let tokens = starts[expert] as usize..starts[expert + 1] as usize;
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

    /// The matrix of an expert. If it gets a slot in this step, packs `panels` there first: no
    /// other panel of the result may be read.
    ///
    /// # Safety
    /// No other thread touches these panels in this step.
    unsafe fn expert_matrix(
        &self,
        permutation: usize,
        linear: &Linear,
        expert: usize,
        panels: Range<usize>,
    ) -> &PackedWeight {
        let weight = &self.weights[linear.weight.0];
        let loaded = &weight.matrices[expert];
        let cache = self.caches[permutation].as_ref().filter(|_| !weight.slots.is_empty());
        match cache.map(|cache| cache.location(expert)) {
            None | Some(Location::File) => loaded,
            Some(Location::Slot(slot)) => weight.slots[slot].matrix(),
            Some(Location::NewSlot(slot)) => {
                let slot = &weight.slots[slot];
                // SAFETY: the caller's promise; the cache evicts no expert that this step has
                // chosen.
                unsafe { slot.pack(self.isa, loaded, panels) };
                slot.matrix()
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
        let pair_count = self.batch.tokens.len() * used;
        // SAFETY: this thread alone has claimed these panels.
        let matrix = unsafe { self.expert_matrix(permutation, linear, expert, panels.clone()) };
        let bias = linear.bias.map(|id| {
            let bias = self.vector(id);
            &bias[expert * matrix.rows()..][..matrix.rows()]
        });
        let (buffer, stride) = self.buffer(linear.out);
        assert!(self.batch.tokens.len() * stride <= buffer.len(), "space for every row");
        let scratch = self.scratch[worker.index];
        // SAFETY: the permute stage ended with a barrier.
        let pairs = unsafe { self.permutations[permutation].pairs.part(0..pair_count) };
        let is_prefill = |pair: usize| self.is_prefill(Rows::Tokens, pairs[pair] as usize / used);
        self.for_formats(matrix.layout(), tokens, is_prefill, |tokens, format| {
            let (x, panels) = (self.activations(format, pair_count, cols), panels.clone());
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
