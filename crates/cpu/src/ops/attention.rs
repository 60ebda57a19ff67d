//! Flash attention over the paged KV cache, with an online softmax (Milakov & Gimelshein 2018).
//!
//! A tile is up to sixteen query rows that share a KV head: the heads of a group, for one or
//! several tokens. Decode with grouped queries and prefill are the same code. Positions are divided
//! into KV splits at fixed boundaries. Each split has its own softmax, and the partial results are
//! combined in order. A row therefore gets the same bits whatever shares its tile, however its
//! prefill is chunked, and whether one thread or several work on its splits (as flash decoding
//! does).
//!
//! With an int8 cache, scores are multiplied with the scales of the keys and probabilities with
//! those of the values, so that an element costs only its conversion.
//!
//! The pages of a sequence are spread over memory, so each one is prefetched, line by line, while
//! the one before it is used: the hardware's prefetchers stop at its end.
//!
//! Per page, head and tile of R rows: reads 64 (key_dim + value_dim) bytes of f16, does 64 R
//! (key_dim + value_dim) operations; bound by memory for one row, by arithmetic from about four.

use bodkin_backend::{PAGE_TOKENS, PageTable};

use crate::isa::Isa;
use crate::kv::{BLOCK, KvBuffers, KvElement, KvLayout, KvView, head_elements};
use crate::memory::prefetch_l1;
use crate::shared::Shared;
use crate::unroll::unrolled;
use crate::vector::{LANES, Vector, dispatch, exp};

/// Query rows in a tile.
pub(crate) const TILE_ROWS: usize = 16;
/// Tokens of a KV split: a whole number of pages.
pub(crate) const SPLIT_TOKENS: usize = 8 * PAGE_TOKENS;
/// Vectors of scores per page and row.
const VECTORS: usize = PAGE_TOKENS / LANES;
/// Scores of a tile with a KV split: `[TILE_ROWS, SPLIT_TOKENS]`.
const SCORES: usize = TILE_ROWS * SPLIT_TOKENS;
/// Below every score, but finite.
const LOWEST: f32 = -1e30;

/// The visible positions of a row of a tile.
#[derive(Clone, Copy, Default)]
pub(crate) struct VisibleRange {
    /// The first visible position.
    pub(crate) first: usize,
    /// The last visible position.
    pub(crate) last: usize,
}

/// The query rows of one task.
pub(crate) struct QueryTile<'a> {
    /// `[rows, key_dim]`, scaled.
    pub(crate) q: &'a [f32],
    /// Up to [`TILE_ROWS`].
    pub(crate) ranges: &'a [VisibleRange],
    /// The KV head.
    pub(crate) kv_head: usize,
    /// `cap * tanh(score / cap)`.
    pub(crate) softcap: Option<f32>,
}

/// The softmax of the rows of a tile over some of the positions, not normalised.
pub(crate) struct PartialSoftmax<'a> {
    /// `[TILE_ROWS]`: the maximum score of each row.
    row_max: &'a mut [f32],
    /// `[TILE_ROWS]`: the denominator, the sum of the exponentials.
    row_sum: &'a mut [f32],
    /// `[TILE_ROWS, value_stride]`: the output accumulator, the values weighted by their
    /// exponentials.
    acc: &'a mut [f32],
}

impl<'a> PartialSoftmax<'a> {
    /// Elements of the partial softmax of a tile.
    pub(crate) fn len(value_stride: usize) -> usize {
        TILE_ROWS * (2 + value_stride)
    }

    /// A partial softmax in a slice of [`PartialSoftmax::len`] elements.
    pub(crate) fn over(slice: &'a mut [f32]) -> PartialSoftmax<'a> {
        let (row_max, rest) = slice.split_at_mut(TILE_ROWS);
        let (row_sum, acc) = rest.split_at_mut(TILE_ROWS);
        PartialSoftmax { row_max, row_sum, acc }
    }

    /// Resets to no positions.
    pub(crate) fn clear(&mut self) {
        self.row_max.fill(LOWEST);
        self.row_sum.fill(0.0);
        self.acc.fill(0.0);
    }

    /// Combines with a later KV split (log-sum-exp). A row without visible positions contributes
    /// zero.
    pub(crate) fn combine(&mut self, part: &PartialSoftmax<'_>, rows: usize) {
        let stride = self.acc.len() / TILE_ROWS;
        for row in 0..rows {
            let max = self.row_max[row].max(part.row_max[row]);
            let (keep, add) = ((self.row_max[row] - max).exp(), (part.row_max[row] - max).exp());
            self.row_max[row] = max;
            self.row_sum[row] = self.row_sum[row] * keep + part.row_sum[row] * add;
            let range = row * stride..(row + 1) * stride;
            for (v, p) in self.acc[range.clone()].iter_mut().zip(&part.acc[range]) {
                *v = *v * keep + p * add;
            }
        }
    }

    /// Normalises a row and writes it. An attention sink adds its score to the denominator only.
    pub(crate) fn write(&self, row: usize, sink: Option<f32>, out: &mut [f32]) {
        let stride = self.acc.len() / TILE_ROWS;
        let scale = match sink {
            None => 1.0 / self.row_sum[row],
            Some(sink) => {
                let max = self.row_max[row].max(sink);
                let keep = (self.row_max[row] - max).exp();
                keep / (self.row_sum[row] * keep + (sink - max).exp())
            }
        };
        out.iter_mut().zip(&self.acc[row * stride..]).for_each(|(y, v)| *y = v * scale);
    }
}

/// The keys or the values of a page for one head.
struct Page<'a, C> {
    /// `[width, PAGE_TOKENS]` keys or `[PAGE_TOKENS, width]` values, then scales.
    elements: &'a [C],
    width: usize,
    /// Tokens stored in the page.
    filled: usize,
    /// The offset of the page in its split.
    at: usize,
    /// What is read after it, to prefetch.
    next: *const C,
}

/// Computes the partial softmax of a tile over one KV split.
pub(crate) fn attend_split(
    isa: Isa,
    tile: &QueryTile<'_>,
    kv: KvView,
    table: &PageTable,
    split: usize,
    partial: &mut PartialSoftmax<'_>,
) {
    match kv {
        KvView::Int8(kv, layout) => dispatch!(isa, attend::<i8>(
            tile: &QueryTile<'_>, kv: KvBuffers<Shared<i8>>, layout: KvLayout, table: &PageTable,
            split: usize, partial: &mut PartialSoftmax<'_>,
        )),
        KvView::F16(kv, layout) => dispatch!(isa, attend::<u16>(
            tile: &QueryTile<'_>, kv: KvBuffers<Shared<u16>>, layout: KvLayout, table: &PageTable,
            split: usize, partial: &mut PartialSoftmax<'_>,
        )),
        KvView::F32(kv, layout) => dispatch!(isa, attend::<f32>(
            tile: &QueryTile<'_>, kv: KvBuffers<Shared<f32>>, layout: KvLayout, table: &PageTable,
            split: usize, partial: &mut PartialSoftmax<'_>,
        )),
    }
}

#[inline(always)]
unsafe fn attend<V: Vector, C: KvElement>(
    tile: &QueryTile<'_>,
    kv: KvBuffers<Shared<C>>,
    layout: KvLayout,
    table: &PageTable,
    split: usize,
    partial: &mut PartialSoftmax<'_>,
) {
    let start = split * SPLIT_TOKENS;
    let first = tile.ranges.iter().map(|r| r.first).min().unwrap_or(0).max(start);
    let last = tile.ranges.iter().map(|r| r.last).max().unwrap_or(0);
    let last = last.min(start + SPLIT_TOKENS - 1);
    let pages = (first / PAGE_TOKENS * PAGE_TOKENS..=last).step_by(PAGE_TOKENS);
    let mut scores = [0.0; SCORES];
    // SAFETY: only earlier stages write the pages of a sequence; the caller keeps the
    // contract of `Vector`.
    unsafe {
        let keys =
            |page_start: usize| kv.keys.part(layout.keys(table.page(page_start), tile.kv_head));
        let values =
            |page_start: usize| kv.values.part(layout.values(table.page(page_start), tile.kv_head));
        let next = |page_start: usize| Some(page_start + PAGE_TOKENS).filter(|&next| next <= last);
        let filled = |page_start: usize| (last + 1 - page_start).min(PAGE_TOKENS);
        for page_start in pages.clone() {
            let page = Page {
                elements: keys(page_start),
                width: layout.key_dim,
                filled: filled(page_start),
                at: page_start - start,
                next: next(page_start).map_or(values(first), keys).as_ptr(),
            };
            page_scores::<V, C>(tile, &page, &mut scores);
        }
        for (row, range) in tile.ranges.iter().enumerate() {
            let scores = &mut scores[row * SPLIT_TOKENS..(row + 1) * SPLIT_TOKENS];
            (partial.row_max[row], partial.row_sum[row]) = exponentials::<V>(range, start, scores);
        }
        for page_start in pages {
            let page = Page {
                elements: values(page_start),
                width: layout.value_stride,
                filled: filled(page_start),
                at: page_start - start,
                next: values(next(page_start).unwrap_or(page_start)).as_ptr(),
            };
            add_values::<V, C>(tile.ranges.len(), &page, &scores, partial.acc);
        }
    }
}

/// Adds the scores of up to [`TILE_ROWS`] heads of an indexer with whole pages of keys,
/// `[dim, PAGE_TOKENS]` each, to those of the entries: `weight * max(q . k, 0)` for each head, in
/// order.
pub(crate) fn add_indexer_scores(
    isa: Isa,
    q: &[f32],
    weights: &[f32],
    keys: &[f32],
    scores: &mut [f32],
) {
    dispatch!(isa, add_head_scores(
        q: &[f32], weights: &[f32], keys: &[f32], scores: &mut [f32],
    ));
}

#[inline(always)]
unsafe fn add_head_scores<V: Vector>(q: &[f32], weights: &[f32], keys: &[f32], sums: &mut [f32]) {
    let ranges = [VisibleRange::default(); TILE_ROWS];
    let ranges = &ranges[..weights.len()];
    let tile = QueryTile { q, ranges, kv_head: 0, softcap: None };
    let dim = q.len() / weights.len();
    let mut scores = [0.0; SCORES];
    // SAFETY: whole vectors of a page's scores; the caller keeps the contract of `Vector`.
    unsafe {
        for (i, elements) in keys.chunks_exact(dim * PAGE_TOKENS).enumerate() {
            let (at, next) = (i * PAGE_TOKENS, elements.as_ptr_range().end);
            let page = Page { elements, width: dim, filled: PAGE_TOKENS, at, next };
            page_scores::<V, f32>(&tile, &page, &mut scores);
            for (j, sums) in sums[at..at + PAGE_TOKENS].chunks_exact_mut(LANES).enumerate() {
                let mut sum = V::load(sums.as_ptr());
                for (head, &weight) in weights.iter().enumerate() {
                    let score = V::load(scores.as_ptr().add(head * SPLIT_TOKENS + at + j * LANES));
                    sum = score.max(V::splat(0.0)).mul_add(V::splat(weight), sum);
                }
                sum.store(sums.as_mut_ptr());
            }
        }
    }
}

/// Runs a function on 8, 4, 3, 2 or 1 rows of a tile at a time, as
/// `name::<V, C, N>(first row, ...)`.
macro_rules! by_rows {
    ($rows:expr, $name:ident($($arg:expr),*)) => {{
        let mut row = 0;
        while row < $rows {
            let count = match ($rows - row).min(V::ROWS) {
                count @ 5..8 => count - count % 4,
                count => count,
            };
            match count {
                8 => $name::<V, C, 8>(row, $($arg),*),
                4 => $name::<V, C, 4>(row, $($arg),*),
                3 => $name::<V, C, 3>(row, $($arg),*),
                2 => $name::<V, C, 2>(row, $($arg),*),
                _ => $name::<V, C, 1>(row, $($arg),*),
            }
            row += count;
        }
    }};
}

/// The scores of a tile with a page of keys.
#[inline(always)]
unsafe fn page_scores<V: Vector, C: KvElement>(
    tile: &QueryTile<'_>,
    page: &Page<'_, C>,
    scores: &mut [f32; SCORES],
) {
    let rows = tile.ranges.len();
    assert!(page.elements.len() == head_elements(page.width, C::SCALE));
    assert!(tile.q.len() == rows * page.width);
    assert!(rows <= TILE_ROWS && page.at + PAGE_TOKENS <= SPLIT_TOKENS);
    // SAFETY: rows and elements stay within the lengths asserted above; the caller keeps the
    // contract of `Vector`.
    unsafe { by_rows!(rows, score_rows(tile, page, scores)) }
}

/// The scores of `N` rows from `first` on.
#[inline(always)]
unsafe fn score_rows<V: Vector, C: KvElement, const N: usize>(
    first: usize,
    tile: &QueryTile<'_>,
    page: &Page<'_, C>,
    scores: &mut [f32; SCORES],
) {
    let key_dim = page.width;
    // SAFETY: as the caller vouches.
    unsafe {
        let (q, keys) = (tile.q.as_ptr().add(first * key_dim), page.elements.as_ptr());
        let scales = keys.add(key_dim * PAGE_TOKENS).cast::<u16>();
        let scores = scores.as_mut_ptr().add(first * SPLIT_TOKENS + page.at);
        // Without scales, all elements are one block.
        let block = if C::SCALE > 0 { BLOCK } else { key_dim };
        let mut start = 0;
        while start < key_dim {
            let end = key_dim.min(start + block);
            let mut sums = [[V::splat(0.0); VECTORS]; N];
            for d in start..end {
                prefetch_l1(page.next.wrapping_add(d * PAGE_TOKENS).cast());
                let mut k = [V::splat(0.0); VECTORS];
                unrolled!(VECTORS, j => { k[j] = C::load(keys.add(d * PAGE_TOKENS + j * LANES)); });
                unrolled!(N, i => {
                    let q = V::splat(*q.add(i * key_dim + d));
                    unrolled!(VECTORS, j => { sums[i][j] = k[j].mul_add(q, sums[i][j]); });
                });
            }
            unrolled!(N, i => {
                unrolled!(VECTORS, j => {
                    let (to, mut sum) = (scores.add(i * SPLIT_TOKENS + j * LANES), sums[i][j]);
                    if C::SCALE > 0 {
                        let scale =
                            V::load_f16(scales.add(start / BLOCK * PAGE_TOKENS + j * LANES));
                        let before = if start > 0 { V::load(to) } else { V::splat(0.0) };
                        sum = sum.mul_add(scale, before);
                    }
                    if let Some(cap) = tile.softcap.filter(|_| end == key_dim) {
                        sum = softcap(sum, V::splat(cap));
                    }
                    sum.store(to);
                });
            });
            start = end;
        }
    }
}

/// Replaces the scores of a row with a split, which begins at position `start`, by exponentials
/// relative to the maximum; masked positions become zero. Returns the maximum and the sum.
#[inline(always)]
unsafe fn exponentials<V: Vector>(
    range: &VisibleRange,
    start: usize,
    scores: &mut [f32],
) -> (f32, f32) {
    let from = range.first.saturating_sub(start).min(SPLIT_TOKENS);
    let to = (range.last + 1).saturating_sub(start).min(SPLIT_TOKENS).max(from);
    let vectors = from / LANES * LANES..to.next_multiple_of(LANES);
    scores[vectors.start..from].fill(LOWEST);
    scores[to..vectors.end].fill(LOWEST);
    let mut max = LOWEST;
    let mut sum = 0.0;
    // SAFETY: whole vectors of the row; the caller keeps the contract of `Vector`.
    unsafe {
        let row = scores.as_mut_ptr();
        let mut largest = V::splat(LOWEST);
        for at in vectors.clone().step_by(LANES) {
            largest = largest.max(V::load(row.add(at)));
        }
        if from < to {
            max = largest.largest();
            let mut sums = V::splat(0.0);
            for at in vectors.step_by(LANES) {
                let e = exp(V::load(row.add(at)).sub(V::splat(max)));
                e.store(row.add(at));
                sums = sums.add(e);
            }
            sum = sums.sum();
        }
    }
    scores[..from].fill(0.0);
    scores[to..].fill(0.0);
    (max, sum)
}

/// Accumulates the weighted values of a page for every row.
#[inline(always)]
unsafe fn add_values<V: Vector, C: KvElement>(
    rows: usize,
    page: &Page<'_, C>,
    scores: &[f32; SCORES],
    values: &mut [f32],
) {
    let stride = page.width;
    let cells = head_elements(stride, C::SCALE);
    assert!(page.elements.len() == cells && values.len() >= rows * stride);
    assert!(rows <= TILE_ROWS && page.filled <= PAGE_TOKENS && stride.is_multiple_of(LANES));
    assert!(page.at + PAGE_TOKENS <= SPLIT_TOKENS);
    // SAFETY: rows, tokens and elements stay within the lengths asserted above; the caller keeps
    // the contract of `Vector`.
    unsafe { by_rows!(rows, add_rows(page, scores, values)) }
}

/// Accumulates a page for `N` rows from `first` on.
#[inline(always)]
unsafe fn add_rows<V: Vector, C: KvElement, const N: usize>(
    first: usize,
    page: &Page<'_, C>,
    scores: &[f32; SCORES],
    values: &mut [f32],
) {
    let pairs = page.width / (2 * LANES) * (2 * LANES);
    // SAFETY: as the caller vouches.
    unsafe {
        for d in (0..pairs).step_by(2 * LANES) {
            add_columns::<V, C, N, 2>(first, d, page, scores, values);
        }
        if pairs < page.width {
            add_columns::<V, C, N, 1>(first, pairs, page, scores, values);
        }
    }
}

/// Accumulates `D` vectors of a page, from column `d` on, for `N` rows from `first` on.
#[inline(always)]
unsafe fn add_columns<V: Vector, C: KvElement, const N: usize, const D: usize>(
    first: usize,
    d: usize,
    page: &Page<'_, C>,
    scores: &[f32; SCORES],
    values: &mut [f32],
) {
    // SAFETY: as the caller vouches.
    unsafe {
        let (from, out) = (page.elements.as_ptr().add(d), values.as_mut_ptr().add(d));
        let scores = scores.as_ptr().add(first * SPLIT_TOKENS + page.at);
        let scales = page.elements.as_ptr().add(page.width * PAGE_TOKENS).cast::<u16>();
        let mut scaled = [[0.0; PAGE_TOKENS]; N];
        let (weights, weight_stride) = if C::SCALE > 0 {
            for (i, scaled) in scaled.iter_mut().enumerate() {
                for j in (0..PAGE_TOKENS).step_by(LANES) {
                    let p = V::load(scores.add(i * SPLIT_TOKENS + j));
                    let scale = V::load_f16(scales.add(d / BLOCK * PAGE_TOKENS + j));
                    p.mul(scale).store(scaled.as_mut_ptr().add(j));
                }
            }
            (scaled.as_ptr().cast::<f32>(), PAGE_TOKENS)
        } else {
            (scores, SPLIT_TOKENS)
        };
        let out = out.add(first * page.width);
        let mut sums = [[V::splat(0.0); D]; N];
        unrolled!(N, i => {
            unrolled!(D, j => { sums[i][j] = V::load(out.add(i * page.width + j * LANES)); });
        });
        let next = page.next.wrapping_add(d * PAGE_TOKENS);
        for t in 0..page.filled {
            prefetch_l1(next.wrapping_add(t * D * LANES).cast());
            let mut v = [V::splat(0.0); D];
            unrolled!(D, j => { v[j] = C::load(from.add(t * page.width + j * LANES)); });
            unrolled!(N, i => {
                let p = V::splat(*weights.add(i * weight_stride + t));
                unrolled!(D, j => { sums[i][j] = v[j].mul_add(p, sums[i][j]); });
            });
        }
        unrolled!(N, i => {
            unrolled!(D, j => { sums[i][j].store(out.add(i * page.width + j * LANES)); });
        });
    }
}

/// `cap * tanh(x / cap)`.
///
/// # Safety
///
/// As for [`Vector`].
#[inline(always)]
pub(crate) unsafe fn softcap<V: Vector>(x: V, cap: V) -> V {
    // SAFETY: the caller keeps the contract of `Vector`.
    unsafe {
        // tanh y = 1 - 2 / (e^2y + 1).
        let e = exp(x.div(cap).mul(V::splat(2.0)));
        let one = V::splat(1.0);
        cap.mul(one.sub(V::splat(2.0).div(e.add(one))))
    }
}
