//! Experts as stages: the pairs of a token and one of its experts are sorted by expert, so that the
//! products of a step read each expert's weights once, for all tokens that chose it.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Instant;

use crate::linear::{ActivationFormats, OutRows, matmul};
use crate::lower::{Place, Product, Sorting};
use crate::pool::Worker;
use crate::shared::Shared;
use crate::step::Step;

/// Pieces into which a thread's share of a product is cut.
const CHUNKS_PER_THREAD: usize = 8;

/// The tables of one sorting, sized for the largest step.
pub(crate) struct Sorted {
    /// `[experts + 1]`: where the pairs of each expert begin.
    starts: Vec<u32>,
    /// `[tokens * used]`: pairs in order of expert; pair `p` is the token `p / used`.
    pairs: Vec<u32>,
    /// `[tokens * used]`: the place of each pair in that order.
    places: Vec<u32>,
    /// `[experts]`: how often each was chosen since the model was loaded.
    counts: Vec<u64>,
    /// Matrices that all steps read: one for each expert that a step's tokens chose.
    reads: Vec<u64>,
    /// `[threads, experts]`: seconds that each thread spent in each expert's products.
    seconds: Vec<f64>,
}

/// The same for the threads of a step.
#[derive(Clone, Copy)]
pub(crate) struct SortedView {
    starts: Shared<u32>,
    pairs: Shared<u32>,
    places: Shared<u32>,
    counts: Shared<u64>,
    reads: Shared<u64>,
    seconds: Shared<f64>,
}

impl Sorted {
    pub(crate) fn new(sorting: &Sorting, tokens: usize, threads: usize) -> Sorted {
        let pairs = tokens * sorting.used;
        Sorted {
            starts: vec![0; sorting.experts + 1],
            pairs: vec![0; pairs],
            places: vec![0; pairs],
            counts: vec![0; sorting.experts],
            reads: vec![0],
            seconds: vec![0.0; threads * sorting.experts],
        }
    }

    /// Bytes of the tables.
    pub(crate) fn bytes(sorting: &Sorting, tokens: usize, threads: usize) -> usize {
        8 * tokens * sorting.used + (12 + 8 * threads) * sorting.experts + 12
    }

    pub(crate) fn view(&mut self) -> SortedView {
        SortedView {
            starts: Shared::new(&mut self.starts),
            pairs: Shared::new(&mut self.pairs),
            places: Shared::new(&mut self.places),
            counts: Shared::new(&mut self.counts),
            reads: Shared::new(&mut self.reads),
            seconds: Shared::new(&mut self.seconds),
        }
    }
}

impl SortedView {
    /// How often each expert was chosen.
    ///
    /// # Safety
    ///
    /// No step is running.
    pub(crate) unsafe fn counts<'a>(self) -> &'a [u64] {
        // SAFETY: the caller's promise.
        unsafe { self.counts.part(0..self.counts.len()) }
    }

    /// Matrices that all steps read.
    ///
    /// # Safety
    ///
    /// No step is running.
    pub(crate) unsafe fn reads(self) -> u64 {
        // SAFETY: the caller's promise.
        unsafe { self.reads.part(0..1)[0] }
    }

    /// The seconds that all threads together spent in each expert's products.
    ///
    /// # Safety
    ///
    /// No step is running.
    pub(crate) unsafe fn seconds(self) -> Vec<f64> {
        let experts = self.counts.len();
        // SAFETY: the caller's promise.
        let all = unsafe { self.seconds.part(0..self.seconds.len()) };
        let of = |expert: usize| all[expert..].iter().step_by(experts).sum();
        (0..experts).map(of).collect()
    }

    /// Where the pairs of each expert begin.
    fn starts<'a>(self) -> &'a [u32] {
        // SAFETY: written by the stage that sorts only, which lies before a barrier.
        unsafe { self.starts.part(0..self.starts.len()) }
    }
}

impl Step<'_> {
    /// Sorts the pairs of all tokens by expert: counts, then places, so that the pairs of one
    /// expert stay in order of tokens. A few microseconds; one thread does it.
    pub(crate) fn sort(&self, sorting: usize) {
        let (view, Sorting { route, used, experts, .. }) =
            (self.sorted[sorting], self.program.sortings[sorting]);
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
        // Each start moves to its end while its expert's places are handed out, and back after.
        for (pair, place) in places.iter_mut().enumerate() {
            let next = &mut starts[expert(pair)];
            pairs[*next as usize] = pair as u32;
            *place = *next;
            *next += 1;
        }
        starts.copy_within(0..experts, 1);
        starts[0] = 0;
    }

    /// Sets the activations of one token's pairs, each at its place.
    pub(crate) fn prepare_experts(
        &self,
        row: usize,
        input: Place,
        cols: usize,
        sorting: usize,
        formats: ActivationFormats,
    ) {
        let used = self.program.sortings[sorting].used;
        let count = self.batch.tokens.len() * used;
        // SAFETY: the stage that sorts lies before a barrier.
        let places = unsafe { self.sorted[sorting].places.part(row * used..(row + 1) * used) };
        let x = self.read(input, row);
        for format in formats.iter() {
            let activations = self.activations(format, count, cols);
            for (i, &place) in places.iter().enumerate() {
                // One part of the input for each expert, or the whole for all of them.
                let part = if x.len() == cols { x } else { &x[i * cols..(i + 1) * cols] };
                // SAFETY: one thread sets this row; products read it after a barrier.
                unsafe { activations.writer().set(self.isa, place as usize, part) };
            }
        }
    }

    /// The products of all experts that were chosen; panels of the weights are taken in chunks. The
    /// clock is read once for each expert of a chunk: some 30 ns beside at least a hundred times as
    /// much work.
    pub(crate) fn experts(
        &self,
        worker: &Worker<'_>,
        cols: usize,
        sorting: usize,
        products: &[Product],
        taken: &AtomicUsize,
    ) {
        let starts = self.sorted[sorting].starts();
        let chosen = starts.windows(2).filter(|w| w[0] < w[1]).count();
        let panels = |p: &Product| self.weights[p.weight.0].matrices[0].panels();
        let each: usize = products.iter().map(panels).sum();
        let total = chosen * each;
        let chunk = total.div_ceil(worker.threads * CHUNKS_PER_THREAD).max(1);
        let all = starts.len() - 1;
        let own = worker.index * all..(worker.index + 1) * all;
        // SAFETY: this thread's part, which no other touches.
        let seconds = unsafe { self.sorted[sorting].seconds.part_mut(own) };
        loop {
            let start = taken.fetch_add(chunk, Relaxed);
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
                for product in products {
                    let panels = panels(product);
                    let from = start.clamp(before, before + panels) - before;
                    let to = end.clamp(before, before + panels) - before;
                    before += panels;
                    if from < to {
                        let tokens = pairs[0] as usize..pairs[1] as usize;
                        let part = (expert, tokens, from..to);
                        self.expert(worker, cols, sorting, product, part);
                    }
                }
                let now = Instant::now();
                seconds[expert] += (now - clock).as_secs_f64();
                clock = now;
            }
        }
    }

    /// Some panels of one expert, for the tokens that chose it.
    fn expert(
        &self,
        worker: &Worker<'_>,
        cols: usize,
        sorting: usize,
        product: &Product,
        (expert, tokens, panels): (usize, std::ops::Range<usize>, std::ops::Range<usize>),
    ) {
        let used = self.program.sortings[sorting].used;
        let count = self.batch.tokens.len() * used;
        let matrix = &self.weights[product.weight.0].matrices[expert];
        let bias = product.bias.map(|id| {
            let bias = self.weights[id.0].vector.as_deref().expect("prepared as a vector");
            &bias[expert * matrix.rows()..][..matrix.rows()]
        });
        let activations =
            self.activations(matrix.layout().activation_format(self.isa), count, cols);
        let (buffer, stride) = self.buffer(product.out);
        assert!(self.batch.tokens.len() * stride <= buffer.len(), "room for every row");
        let scratch = self.scratch[worker.index];
        // SAFETY: the buffer has the rows; this thread alone has taken these panels, so it alone
        // writes their columns of these pairs; the scratch is this thread's.
        unsafe {
            let pairs = self.sorted[sorting].pairs.part(0..count);
            let out = OutRows::scattered(buffer.start(), stride, pairs, used, matrix.rows());
            let room = scratch.part_mut(0..scratch.len());
            matmul(self.isa, matrix, bias, panels, &activations, tokens, out, room);
        }
    }
}
