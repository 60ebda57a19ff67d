//! The attention stage. Usually a thread claims a query tile with all its KV splits. If there are
//! too few tiles for the threads, as in decode with few KV heads, threads claim single splits
//! (flash decoding); the partial results are combined after a barrier.

use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use bodkin_backend::Worker;
use bodkin_model::Attention;

use super::context::StepContext;
use crate::ops::attention::{
    PartialSoftmax, QueryTile, SPLIT_TOKENS, TILE_ROWS, VisibleRange, attend_split,
};
use crate::program::Operand;
use crate::shared::Shared;

/// One attention stage.
pub(super) struct AttentionStage<'a> {
    pub(super) step: &'a StepContext<'a>,
    pub(super) q: Operand,
    pub(super) out: Operand,
    pub(super) attention: &'a Attention,
    pub(super) slot: usize,
}

/// A tile of query rows: consecutive (token, head) pairs that share a KV head.
struct TileWork {
    span: usize,
    /// The first row of the span in the batch.
    span_row: usize,
    kv_head: usize,
    /// The pairs: `token * group + head`.
    pairs: std::ops::Range<usize>,
    ranges: [VisibleRange; TILE_ROWS],
}

/// Elements of a thread's scratch for a tile: queries and two partial softmaxes.
pub(crate) fn scratch_len(key_dim: usize, value_stride: usize) -> usize {
    TILE_ROWS * key_dim + 2 * PartialSoftmax::len(value_stride)
}

/// Elements for the partial results of KV splits, for sequences of up to `tokens` tokens.
pub(crate) fn partials_len(threads: usize, tokens: usize, value_stride: usize) -> usize {
    if threads == 1 {
        return 0;
    }
    2 * threads * tokens.div_ceil(SPLIT_TOKENS) * PartialSoftmax::len(value_stride)
}

impl AttentionStage<'_> {
    pub(super) fn run(&self, worker: &Worker<'_>, claimed: &AtomicUsize) {
        let spans = &self.step.batch.spans;
        let tiles: usize = spans.iter().map(|s| self.tiles(s.len)).sum();
        let last = spans.iter().map(|s| s.position + s.len - 1).max().unwrap_or(0);
        let splits = last / SPLIT_TOKENS + 1;
        let len = tiles * splits * PartialSoftmax::len(self.value_stride());
        if tiles < 2 * worker.threads && splits > 1 && len <= self.step.partials.len() {
            self.run_split(worker, claimed, tiles, splits);
            return;
        }
        let (q, mut part, mut total) = self.scratch(worker);
        loop {
            let Some(work) = self.work(claimed.fetch_add(1, Relaxed)) else { return };
            let q = self.load_queries(&work, q);
            total.clear();
            for split in self.splits(&work) {
                self.attend(&work, q, split, &mut part);
                total.combine(&part, work.pairs.len());
            }
            self.write(&work, &total);
        }
    }

    /// A task is one KV split; partial results are combined after a barrier.
    fn run_split(&self, worker: &Worker<'_>, claimed: &AtomicUsize, tiles: usize, splits: usize) {
        let (q, _, mut total) = self.scratch(worker);
        loop {
            let index = claimed.fetch_add(1, Relaxed);
            let (tile, split) = (index / splits, index % splits);
            let Some(work) = self.work(tile) else { break };
            if self.splits(&work).contains(&split) {
                let q = self.load_queries(&work, q);
                // SAFETY: only this thread has claimed this tile and split.
                let mut part = unsafe { self.partial(index) };
                self.attend(&work, q, split, &mut part);
            }
        }
        worker.barrier();
        for tile in worker.share(tiles) {
            let work = self.work(tile).expect("the tile exists");
            total.clear();
            for split in self.splits(&work) {
                // SAFETY: written before the barrier, and only this thread has this tile.
                let part = unsafe { self.partial(tile * splits + split) };
                total.combine(&part, work.pairs.len());
            }
            self.write(&work, &total);
        }
    }

    fn value_stride(&self) -> usize {
        self.step.kv[self.slot].layout().value_stride
    }

    /// Query heads per KV head.
    fn group(&self) -> usize {
        self.attention.heads / self.attention.kv_heads
    }

    fn tiles(&self, span_len: usize) -> usize {
        self.attention.kv_heads * (span_len * self.group()).div_ceil(TILE_ROWS)
    }

    /// The tile with an index, or `None` after the last.
    fn work(&self, mut index: usize) -> Option<TileWork> {
        let mut span_row = 0;
        for (i, span) in self.step.batch.spans.iter().enumerate() {
            let tiles = self.tiles(span.len);
            if index < tiles {
                let (kv_head, tile) =
                    (index % self.attention.kv_heads, index / self.attention.kv_heads);
                let end = (span.len * self.group()).min((tile + 1) * TILE_ROWS);
                let pairs = tile * TILE_ROWS..end;
                let mut ranges = [VisibleRange::default(); TILE_ROWS];
                for (range, pair) in ranges.iter_mut().zip(pairs.clone()) {
                    let position = span.position + pair / self.group();
                    let seen = self.attention.visible(position, span.position + span.len);
                    *range = VisibleRange { first: seen.start, last: seen.end - 1 };
                }
                return Some(TileWork { span: i, span_row, kv_head, pairs, ranges });
            }
            index -= tiles;
            span_row += span.len;
        }
        None
    }

    /// The KV splits that are visible to any row of the tile. The first row has the first position.
    fn splits(&self, work: &TileWork) -> RangeInclusive<usize> {
        let (first, last) = (work.ranges[0], work.ranges[work.pairs.len() - 1]);
        first.first / SPLIT_TOKENS..=last.last / SPLIT_TOKENS
    }

    /// This thread's scratch: queries, the softmax of a split, and the combined one.
    fn scratch<'s>(
        &self,
        worker: &Worker<'_>,
    ) -> (Shared<f32>, PartialSoftmax<'s>, PartialSoftmax<'s>) {
        let scratch = self.step.scratch[worker.index];
        let queries = TILE_ROWS * self.attention.key_dim;
        let sums = PartialSoftmax::len(self.value_stride());
        // SAFETY: the scratch belongs to this thread, and the three parts do not overlap.
        unsafe {
            let part = PartialSoftmax::over(scratch.part_mut(queries..queries + sums));
            let total = PartialSoftmax::over(scratch.part_mut(queries + sums..queries + 2 * sums));
            (scratch, part, total)
        }
    }

    /// # Safety
    ///
    /// Only one thread uses an entry between two barriers.
    unsafe fn partial<'s>(&self, index: usize) -> PartialSoftmax<'s> {
        let len = PartialSoftmax::len(self.value_stride());
        // SAFETY: the caller's promise.
        PartialSoftmax::over(unsafe { self.step.partials.part_mut(index * len..(index + 1) * len) })
    }

    /// The scaled queries of a tile, `[rows, key_dim]`.
    fn load_queries<'s>(&self, work: &TileWork, scratch: Shared<f32>) -> &'s [f32] {
        let dim = self.attention.key_dim;
        // SAFETY: the scratch belongs to this thread.
        let q = unsafe { scratch.part_mut(0..work.pairs.len() * dim) };
        for (q, pair) in q.chunks_exact_mut(dim).zip(work.pairs.clone()) {
            let (row, head) = self.place(work, pair);
            let from = &self.step.read(self.q, row)[head * dim..][..dim];
            let position = self.step.positions[row] as usize;
            let temperature = self.attention.temperature.map_or(1.0, |t| t.at(position));
            let scale = self.attention.scale * temperature;
            q.iter_mut().zip(from).for_each(|(q, x)| *q = x * scale);
        }
        q
    }

    /// The row of the batch and the head of a pair.
    fn place(&self, work: &TileWork, pair: usize) -> (usize, usize) {
        let group = self.group();
        (work.span_row + pair / group, work.kv_head * group + pair % group)
    }

    fn attend(&self, work: &TileWork, q: &[f32], split: usize, part: &mut PartialSoftmax<'_>) {
        let ranges = &work.ranges[..work.pairs.len()];
        let softcap = self.attention.softcap;
        let tile = QueryTile { q, ranges, kv_head: work.kv_head, softcap };
        let span = &self.step.batch.spans[work.span];
        let table = &span.tables[self.step.window_indices[self.slot]];
        part.clear();
        attend_split(self.step.isa, &tile, self.step.kv[self.slot], table, split, part);
    }

    fn write(&self, work: &TileWork, total: &PartialSoftmax<'_>) {
        let dim = self.attention.value_dim;
        for (i, pair) in work.pairs.clone().enumerate() {
            let (row, head) = self.place(work, pair);
            let start = head * dim;
            let sink = self.attention.sinks.map(|id| self.step.vector(id)[head]);
            // SAFETY: only this thread has this tile, so it alone writes these columns.
            let out = unsafe { self.step.columns(self.out, row, start..start + dim) };
            total.write(i, sink, out);
        }
    }
}
