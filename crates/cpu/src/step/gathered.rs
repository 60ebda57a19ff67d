//! Attention to entries that are not consecutive, and their selection. The entries of a row are
//! gathered into dense pages first, [`SPLIT_TOKENS`] at a time, so that work grows with them and
//! not with the sequence. Each row is computed by itself: it gets the same bits whatever shares its
//! step.

use std::sync::LazyLock;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use bodkin_backend::{PAGE_TOKENS, PageTable, Span, Worker};
use bodkin_model::{Attention, Indexer};

use super::context::StepContext;
use crate::kv::{EntryPlace, KvBuffers, KvView};
use crate::ops::attention::{PartialSoftmax, QueryTile, SPLIT_TOKENS, TILE_ROWS, VisibleRange};
use crate::ops::attention::{add_indexer_scores, attend_split};
use crate::ops::select::select;
use crate::program::{GatheredStage, SelectStage};
use crate::shared::Shared;

/// The pages of gathered entries.
static GATHERED_PAGES: LazyLock<PageTable> = LazyLock::new(|| PageTable {
    skipped: 0,
    pages: (0..(SPLIT_TOKENS / PAGE_TOKENS) as u32).collect(),
});

/// Elements of a thread's scratch for gathered attention: keys and values, the queries of a tile,
/// its partial softmax, and the combined ones of all tiles.
pub(crate) fn gathered_scratch_len(a: &Attention, value_stride: usize) -> usize {
    let tiles = (a.heads / a.kv_heads).div_ceil(TILE_ROWS);
    SPLIT_TOKENS * (a.key_dim + value_stride)
        + TILE_ROWS * a.key_dim
        + (1 + tiles) * PartialSoftmax::len(value_stride)
}

/// Elements of a thread's scratch for a selection of up to `entries` entries: keys, the scores of
/// all entries, and a copy of them.
pub(crate) fn select_scratch_len(indexer: &Indexer, entries: usize) -> usize {
    SPLIT_TOKENS * indexer.dim + 2 * entries.next_multiple_of(SPLIT_TOKENS)
}

/// The entries that one row attends to: tokens, then entries of a slot.
struct RowEntries<'a> {
    span: &'a Span,
    /// The slot of the tokens.
    own: usize,
    first_token: usize,
    tokens: usize,
    /// The slot of the other entries.
    slot: usize,
    /// Their numbers, if not all from the first on.
    selected: Option<&'a [f32]>,
    len: usize,
}

impl RowEntries<'_> {
    /// The slot and the number of an entry.
    fn get(&self, index: usize) -> (usize, usize) {
        match index.checked_sub(self.tokens) {
            None => (self.own, self.first_token + index),
            Some(index) => {
                (self.slot, self.selected.map_or(index, |selected| selected[index] as usize))
            }
        }
    }
}

/// A row of a step: its span, its number in the batch, its position.
#[derive(Clone, Copy)]
struct Row<'a> {
    span: &'a Span,
    row: usize,
    position: usize,
}

impl StepContext<'_> {
    fn row_at(&self, row: usize) -> Row<'_> {
        let span = &self.batch.spans[self.span_of_row[row] as usize];
        Row { span, row, position: self.positions[row] as usize }
    }

    /// Attention to gathered entries; a task is the heads of a row that share a KV head, or a tile
    /// of them if there are few rows.
    pub(super) fn gathered_attention(
        &self,
        stage: &GatheredStage,
        worker: &Worker<'_>,
        claimed: &AtomicUsize,
    ) {
        let a = &stage.attention;
        let group = a.heads / a.kv_heads;
        let rows = self.batch.tokens.len();
        let heads_per_task = if rows < 2 * worker.threads { TILE_ROWS.min(group) } else { group };
        let tasks_per_head = group.div_ceil(heads_per_task);
        loop {
            let task = claimed.fetch_add(1, Relaxed);
            let (row, task) =
                (task / (a.kv_heads * tasks_per_head), task % (a.kv_heads * tasks_per_head));
            if row >= rows {
                return;
            }
            let (kv_head, part) = (task / tasks_per_head, task % tasks_per_head);
            let first = kv_head * group + part * heads_per_task;
            let heads = first..(first + heads_per_task).min((kv_head + 1) * group);
            self.attend_gathered(stage, self.row_at(row), kv_head, heads, worker);
        }
    }

    /// The entries that a row attends to.
    fn row_entries<'a>(&'a self, stage: &GatheredStage, row: Row<'a>) -> RowEntries<'a> {
        let selected = stage.selected.map(|selected| {
            let numbers = self.read(selected, row.row);
            &numbers[..numbers.partition_point(|&number| number >= 0.0)]
        });
        let (first_token, tokens, slot) = match stage.blocks {
            None => (0, 0, stage.slot),
            Some(slot) => {
                let visible = stage.attention.visible(row.position, row.position + 1);
                (visible.start, visible.len(), slot)
            }
        };
        let complete = self.plan.slots[slot].entries(row.position + 1);
        let len = tokens + selected.map_or(complete, <[f32]>::len);
        RowEntries { span: row.span, own: stage.slot, first_token, tokens, slot, selected, len }
    }

    /// Some heads of a row, which share a KV head.
    fn attend_gathered(
        &self,
        stage: &GatheredStage,
        row: Row<'_>,
        kv_head: usize,
        heads: std::ops::Range<usize>,
        worker: &Worker<'_>,
    ) {
        let (a, layout) = (&stage.attention, self.kv[stage.slot].layout().gathered());
        let scale = a.scale * a.temperature.map_or(1.0, |t| t.at(row.position));
        let (key_dim, stride) = (a.key_dim, layout.value_stride);
        let sums = PartialSoftmax::len(stride);
        let entries = self.row_entries(stage, row);
        let (keys, values) = (SPLIT_TOKENS * key_dim, SPLIT_TOKENS * stride);
        let queries = keys + values;
        let softmaxes = queries + TILE_ROWS * key_dim;
        let scratch = self.scratch[worker.index];
        let softmax = |i: usize| {
            let start = softmaxes + i * sums;
            // SAFETY: the scratch belongs to this thread, and its parts do not overlap.
            PartialSoftmax::over(unsafe { scratch.part_mut(start..start + sums) })
        };
        let tiles = || heads.clone().step_by(TILE_ROWS).enumerate();
        tiles().for_each(|(tile, _)| softmax(1 + tile).clear());
        for start in (0..entries.len).step_by(SPLIT_TOKENS) {
            let count = SPLIT_TOKENS.min(entries.len - start);
            self.gather(&entries, start..start + count, kv_head, (key_dim, stride), scratch);
            let ranges = [VisibleRange { first: 0, last: count - 1 }; TILE_ROWS];
            for (tile, first) in tiles() {
                let rows = TILE_ROWS.min(heads.end - first);
                // SAFETY: as above.
                let q = unsafe { scratch.part_mut(queries..queries + rows * key_dim) };
                let from = &self.read(stage.q, row.row)[first * key_dim..][..rows * key_dim];
                q.iter_mut().zip(from).for_each(|(q, x)| *q = x * scale);
                let tile_q =
                    QueryTile { q, ranges: &ranges[..rows], kv_head: 0, softcap: a.softcap };
                // SAFETY: as above.
                let buffers = unsafe {
                    KvBuffers {
                        keys: Shared::new(scratch.part_mut(0..keys)),
                        values: Shared::new(scratch.part_mut(keys..keys + values)),
                    }
                };
                let mut part = softmax(0);
                part.clear();
                let view = KvView::F32(buffers, layout);
                attend_split(self.isa, &tile_q, view, &GATHERED_PAGES, 0, &mut part);
                softmax(1 + tile).combine(&part, rows);
            }
        }
        for (tile, first) in tiles() {
            let total = softmax(1 + tile);
            for head in first..heads.end.min(first + TILE_ROWS) {
                let sink = a.sinks.map(|id| self.vector(id)[head]);
                let columns = head * a.value_dim..(head + 1) * a.value_dim;
                // SAFETY: only this thread has these heads of this row.
                let out = unsafe { self.columns(stage.out, row.row, columns) };
                total.write(head - first, sink, out);
            }
        }
    }

    /// Gathers the keys and values of some entries at the start of the scratch.
    fn gather(
        &self,
        entries: &RowEntries<'_>,
        range: std::ops::Range<usize>,
        kv_head: usize,
        (key_dim, stride): (usize, usize),
        scratch: Shared<f32>,
    ) {
        let (keys, values) = (SPLIT_TOKENS * key_dim, SPLIT_TOKENS * stride);
        // SAFETY: the scratch belongs to this thread, and the parts do not overlap.
        let (keys, values) =
            unsafe { (scratch.part_mut(0..keys), scratch.part_mut(keys..keys + values)) };
        for (to, index) in range.enumerate() {
            let (slot, entry) = entries.get(index);
            let (position, place) = self.plan.slots[slot].place(entry, PAGE_TOKENS);
            let page = entries.span.tables[self.window_indices[slot]].page(position);
            // SAFETY: only earlier stages write entries.
            unsafe { self.kv[slot].gather(EntryPlace { page, place, kv_head }, to, keys, values) };
        }
    }

    /// Selections; a task is one row.
    pub(super) fn select(&self, stage: &SelectStage, worker: &Worker<'_>, claimed: &AtomicUsize) {
        loop {
            let row = claimed.fetch_add(1, Relaxed);
            if row >= self.batch.tokens.len() {
                return;
            }
            self.select_row(stage, self.row_at(row), self.scratch[worker.index]);
        }
    }

    fn select_row(&self, stage: &SelectStage, row: Row<'_>, scratch: Shared<f32>) {
        let Indexer { dim, .. } = stage.indexer;
        let len = self.plan.slots[stage.slot].entries(row.position + 1);
        let (own, slot) = (stage.slot, stage.slot);
        let (first_token, tokens, selected, span) = (0, 0, None, row.span);
        let entries = RowEntries { span, own, first_token, tokens, slot, selected, len };
        let (keys, padded) = (SPLIT_TOKENS * dim, len.next_multiple_of(SPLIT_TOKENS));
        // SAFETY: the scratch belongs to this thread, and the parts do not overlap.
        let (scores, sorted) = unsafe {
            (
                scratch.part_mut(keys..keys + padded),
                scratch.part_mut(keys + padded..keys + padded + len),
            )
        };
        let (q, weights) = (self.read(stage.q, row.row), self.read(stage.weights, row.row));
        scores.fill(0.0);
        for (i, scores) in scores.chunks_exact_mut(SPLIT_TOKENS).enumerate() {
            let start = i * SPLIT_TOKENS;
            let count = SPLIT_TOKENS.min(len - start);
            self.gather(&entries, start..start + count, 0, (dim, 0), scratch);
            // SAFETY: as above.
            let keys = unsafe { scratch.part(0..keys) };
            let pages = count.div_ceil(PAGE_TOKENS);
            let tiles = q.chunks(TILE_ROWS * dim).zip(weights.chunks(TILE_ROWS));
            for (q, weights) in tiles {
                add_indexer_scores(
                    self.isa,
                    q,
                    weights,
                    &keys[..pages * PAGE_TOKENS * dim],
                    scores,
                );
            }
        }
        // SAFETY: only this thread has this row.
        let out = unsafe { self.columns(stage.out, row.row, 0..stage.out.width) };
        select(&scores[..len], sorted, out);
    }
}
