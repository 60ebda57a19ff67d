//! How an attention stage is shared out. Usually a thread takes a tile with all its segments;
//! where there are fewer tiles than threads could use, as in decode with few key heads, segments
//! are taken one by one, their sums put aside, and merged after a barrier.

use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use bodkin_model::Attention;

use crate::lower::Place;
use crate::ops::attention::{RowRange, SEGMENT_TOKENS, Sums, TILE_ROWS, Tile, attend_segment};
use crate::pool::Worker;
use crate::step::Step;

/// One attention stage.
pub(crate) struct Attend<'a> {
    pub(crate) step: &'a Step<'a>,
    pub(crate) q: Place,
    pub(crate) out: Place,
    pub(crate) attention: &'a Attention,
    pub(crate) slot: usize,
}

/// A tile of query rows: consecutive pairs of a token and a head that share a key head.
struct Work {
    span: usize,
    /// The row of the batch with which the span begins.
    span_row: usize,
    kv_head: usize,
    /// The pairs: `token * group + head`.
    pairs: std::ops::Range<usize>,
    ranges: [RowRange; TILE_ROWS],
}

/// Elements of room that a thread needs for a tile: queries, and two sets of sums.
pub(crate) fn scratch_len(key_dim: usize, value_stride: usize) -> usize {
    TILE_ROWS * key_dim + 2 * Sums::len(value_stride)
}

/// Elements of room for the sums that are put aside, for sequences of up to `tokens` tokens.
pub(crate) fn partials_len(threads: usize, tokens: usize, value_stride: usize) -> usize {
    if threads == 1 {
        return 0;
    }
    2 * threads * tokens.div_ceil(SEGMENT_TOKENS) * Sums::len(value_stride)
}

impl Attend<'_> {
    pub(crate) fn run(&self, worker: &Worker<'_>, taken: &AtomicUsize) {
        let spans = &self.step.batch.spans;
        let tiles: usize = spans.iter().map(|s| self.tiles(s.len)).sum();
        let last = spans.iter().map(|s| s.position + s.len - 1).max().unwrap_or(0);
        let segments = last / SEGMENT_TOKENS + 1;
        let room = tiles * segments * Sums::len(self.value_stride());
        if tiles < 2 * worker.threads && segments > 1 && room <= self.step.partials.len() {
            self.run_split(worker, taken, tiles, segments);
            return;
        }
        let (q, mut part, mut total) = self.scratch(worker);
        loop {
            let Some(work) = self.work(taken.fetch_add(1, Relaxed)) else { return };
            let q = self.load_queries(&work, q);
            total.clear();
            for segment in self.segments(&work) {
                self.sum(&work, q, segment, &mut part);
                total.merge(&part, work.pairs.len());
            }
            self.write(&work, &total);
        }
    }

    /// Tasks are single segments; merging comes after a barrier.
    fn run_split(&self, worker: &Worker<'_>, taken: &AtomicUsize, tiles: usize, segments: usize) {
        let (q, _, mut total) = self.scratch(worker);
        loop {
            let index = taken.fetch_add(1, Relaxed);
            let (tile, segment) = (index / segments, index % segments);
            let Some(work) = self.work(tile) else { break };
            if self.segments(&work).contains(&segment) {
                let q = self.load_queries(&work, q);
                // SAFETY: only this thread has taken this tile and segment.
                let mut part = unsafe { self.partial(index) };
                self.sum(&work, q, segment, &mut part);
            }
        }
        worker.barrier();
        for tile in worker.share(tiles) {
            let work = self.work(tile).expect("there are so many tiles");
            total.clear();
            for segment in self.segments(&work) {
                // SAFETY: written before the barrier, and only this thread has this tile.
                let part = unsafe { self.partial(tile * segments + segment) };
                total.merge(&part, work.pairs.len());
            }
            self.write(&work, &total);
        }
    }

    fn value_stride(&self) -> usize {
        self.step.kv[self.slot].layout().value_stride
    }

    /// Heads that share a key head.
    fn group(&self) -> usize {
        self.attention.heads / self.attention.kv_heads
    }

    fn tiles(&self, span_len: usize) -> usize {
        self.attention.kv_heads * (span_len * self.group()).div_ceil(TILE_ROWS)
    }

    /// The tile of a number, or none past the last.
    fn work(&self, mut index: usize) -> Option<Work> {
        let mut span_row = 0;
        for (i, span) in self.step.batch.spans.iter().enumerate() {
            let tiles = self.tiles(span.len);
            if index < tiles {
                let (kv_head, tile) =
                    (index % self.attention.kv_heads, index / self.attention.kv_heads);
                let end = (span.len * self.group()).min((tile + 1) * TILE_ROWS);
                let pairs = tile * TILE_ROWS..end;
                let mut ranges = [RowRange::default(); TILE_ROWS];
                for (range, pair) in ranges.iter_mut().zip(pairs.clone()) {
                    let own = span.position + pair / self.group();
                    let end = span.position + span.len - 1;
                    let last = if self.attention.causal { own } else { end };
                    let window = self.attention.window;
                    let first = window.map_or(0, |w| (own + 1).saturating_sub(w));
                    *range = RowRange { first, last };
                }
                return Some(Work { span: i, span_row, kv_head, pairs, ranges });
            }
            index -= tiles;
            span_row += span.len;
        }
        None
    }

    /// The segments that any row of the tile sees: the first row reaches back furthest.
    fn segments(&self, work: &Work) -> RangeInclusive<usize> {
        let (first, last) = (work.ranges[0], work.ranges[work.pairs.len() - 1]);
        first.first / SEGMENT_TOKENS..=last.last / SEGMENT_TOKENS
    }

    /// This thread's room: queries, sums of a segment, sums of all.
    fn scratch<'s>(&self, worker: &Worker<'_>) -> (crate::shared::Shared<f32>, Sums<'s>, Sums<'s>) {
        let scratch = self.step.scratch[worker.index];
        let queries = TILE_ROWS * self.attention.key_dim;
        let sums = Sums::len(self.value_stride());
        // SAFETY: the room belongs to this thread, and the three parts do not overlap.
        unsafe {
            let part = Sums::over(scratch.part_mut(queries..queries + sums));
            let total = Sums::over(scratch.part_mut(queries + sums..queries + 2 * sums));
            (scratch, part, total)
        }
    }

    /// # Safety
    ///
    /// Only one thread uses a cell between two barriers.
    unsafe fn partial<'s>(&self, cell: usize) -> Sums<'s> {
        let len = Sums::len(self.value_stride());
        // SAFETY: the caller's promise.
        Sums::over(unsafe { self.step.partials.part_mut(cell * len..(cell + 1) * len) })
    }

    /// The scaled queries of a tile, `[rows, key_dim]`.
    fn load_queries<'s>(&self, work: &Work, room: crate::shared::Shared<f32>) -> &'s [f32] {
        let dim = self.attention.key_dim;
        // SAFETY: the room belongs to this thread.
        let q = unsafe { room.part_mut(0..work.pairs.len() * dim) };
        for (q, pair) in q.chunks_exact_mut(dim).zip(work.pairs.clone()) {
            let (row, head) = self.place(work, pair);
            let from = &self.step.read(self.q, row)[head * dim..][..dim];
            q.iter_mut().zip(from).for_each(|(q, x)| *q = x * self.attention.scale);
        }
        q
    }

    /// The row of the batch and the head of a pair.
    fn place(&self, work: &Work, pair: usize) -> (usize, usize) {
        let group = self.group();
        (work.span_row + pair / group, work.kv_head * group + pair % group)
    }

    fn sum(&self, work: &Work, q: &[f32], segment: usize, part: &mut Sums<'_>) {
        let ranges = &work.ranges[..work.pairs.len()];
        let softcap = self.attention.softcap;
        let tile = Tile { q, ranges, kv_head: work.kv_head, softcap };
        let span = &self.step.batch.spans[work.span];
        let table = &span.tables[self.step.slot_tables[self.slot]];
        part.clear();
        attend_segment(self.step.isa, &tile, self.step.kv[self.slot], table, segment, part);
    }

    fn write(&self, work: &Work, total: &Sums<'_>) {
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
