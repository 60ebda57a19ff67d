//! Attention over pages with a softmax in parts (Milakov & Gimelshein 2018, as in FlashAttention).
//!
//! A tile is up to sixteen query rows that share a key and value head: the heads of its group for
//! one or several tokens, so decode with grouped queries and prefill are the same code. Positions
//! are cut into segments at fixed places; each segment is summed on its own and the sums are
//! merged in order. A row therefore gets the same bits whatever shares its tile, however its
//! prompt was cut into steps, and whether one thread took all its segments or several did.
//!
//! Where keys and values are bytes, scores are multiplied with the scales of keys, and exponentials
//! with those of values, so that no more is done for each element than to widen it.
//!
//! Per page, head and tile of R rows: reads 64 (key_dim + value_dim) bytes of halves, does
//! 64 R (key_dim + value_dim) operations; bound by memory for one row, by arithmetic from about
//! four rows up.

use bodkin_backend::{PAGE_TOKENS, PageTable};

use crate::isa::Isa;
use crate::kv::{BLOCK, Cell, Cells, KvLayout, KvView, head_cells};
use crate::shared::Shared;
use crate::unroll::unrolled;
use crate::vector::{LANES, Vector, dispatch, exp};

/// Query rows in a tile.
pub(crate) const TILE_ROWS: usize = 16;
/// Tokens in a segment: a whole number of pages.
pub(crate) const SEGMENT_TOKENS: usize = 8 * PAGE_TOKENS;
/// Vectors of scores with a page.
const VECTORS: usize = PAGE_TOKENS / LANES;
/// Scores of a tile with a segment: `[TILE_ROWS, SEGMENT_TOKENS]`.
const SCORES: usize = TILE_ROWS * SEGMENT_TOKENS;
/// Below every score, and still a number.
const LOWEST: f32 = -1e30;

/// One row of a tile: the keys that it may see.
#[derive(Clone, Copy, Default)]
pub(crate) struct RowRange {
    /// The first visible position.
    pub(crate) first: usize,
    /// The last visible position.
    pub(crate) last: usize,
}

/// The query rows of one task.
pub(crate) struct Tile<'a> {
    /// `[rows, key_dim]`, scaled.
    pub(crate) q: &'a [f32],
    /// Up to [`TILE_ROWS`].
    pub(crate) ranges: &'a [RowRange],
    /// Which keys and values.
    pub(crate) kv_head: usize,
    /// `cap * tanh(score / cap)`.
    pub(crate) softcap: Option<f32>,
}

/// The softmax of the rows of a tile over a part of the positions.
pub(crate) struct Sums<'a> {
    /// `[TILE_ROWS]`: the largest score of each row.
    max: &'a mut [f32],
    /// `[TILE_ROWS]`: the sum of the exponentials.
    sum: &'a mut [f32],
    /// `[TILE_ROWS, value_stride]`: the sum of the values, each times its exponential.
    values: &'a mut [f32],
}

impl<'a> Sums<'a> {
    /// Elements that the sums of a tile take.
    pub(crate) fn len(value_stride: usize) -> usize {
        TILE_ROWS * (2 + value_stride)
    }

    /// Sums that are kept in a slice of [`Sums::len`] elements.
    pub(crate) fn over(slice: &'a mut [f32]) -> Sums<'a> {
        let (max, rest) = slice.split_at_mut(TILE_ROWS);
        let (sum, values) = rest.split_at_mut(TILE_ROWS);
        Sums { max, sum, values }
    }

    /// Nothing summed yet.
    pub(crate) fn clear(&mut self) {
        self.max.fill(LOWEST);
        self.sum.fill(0.0);
        self.values.fill(0.0);
    }

    /// Adds the sums of a later segment. What a row has not seen counts for exactly nothing.
    pub(crate) fn merge(&mut self, part: &Sums<'_>, rows: usize) {
        let stride = self.values.len() / TILE_ROWS;
        for row in 0..rows {
            let max = self.max[row].max(part.max[row]);
            let (keep, add) = ((self.max[row] - max).exp(), (part.max[row] - max).exp());
            self.max[row] = max;
            self.sum[row] = self.sum[row] * keep + part.sum[row] * add;
            let range = row * stride..(row + 1) * stride;
            for (v, p) in self.values[range.clone()].iter_mut().zip(&part.values[range]) {
                *v = *v * keep + p * add;
            }
        }
    }

    /// Writes the weighted mean of the values that a row has seen, and of nothing at all with the
    /// score of the sink.
    pub(crate) fn write(&self, row: usize, sink: Option<f32>, out: &mut [f32]) {
        let stride = self.values.len() / TILE_ROWS;
        let scale = match sink {
            None => 1.0 / self.sum[row],
            Some(sink) => {
                let max = self.max[row].max(sink);
                let keep = (self.max[row] - max).exp();
                keep / (self.sum[row] * keep + (sink - max).exp())
            }
        };
        out.iter_mut().zip(&self.values[row * stride..]).for_each(|(y, v)| *y = v * scale);
    }
}

/// Sums the keys and values of one segment of positions.
pub(crate) fn attend_segment(
    isa: Isa,
    tile: &Tile<'_>,
    kv: KvView,
    table: &PageTable,
    segment: usize,
    sums: &mut Sums<'_>,
) {
    match kv {
        KvView::Byte(kv, layout) => dispatch!(isa, attend::<i8>(
            tile: &Tile<'_>, kv: Cells<Shared<i8>>, layout: KvLayout, table: &PageTable,
            segment: usize, sums: &mut Sums<'_>,
        )),
        KvView::Half(kv, layout) => dispatch!(isa, attend::<u16>(
            tile: &Tile<'_>, kv: Cells<Shared<u16>>, layout: KvLayout, table: &PageTable,
            segment: usize, sums: &mut Sums<'_>,
        )),
        KvView::Single(kv, layout) => dispatch!(isa, attend::<f32>(
            tile: &Tile<'_>, kv: Cells<Shared<f32>>, layout: KvLayout, table: &PageTable,
            segment: usize, sums: &mut Sums<'_>,
        )),
    }
}

#[inline(always)]
unsafe fn attend<V: Vector, C: Cell>(
    tile: &Tile<'_>,
    kv: Cells<Shared<C>>,
    layout: KvLayout,
    table: &PageTable,
    segment: usize,
    sums: &mut Sums<'_>,
) {
    let start = segment * SEGMENT_TOKENS;
    let first = tile.ranges.iter().map(|r| r.first).min().unwrap_or(0).max(start);
    let last = tile.ranges.iter().map(|r| r.last).max().unwrap_or(0);
    let last = last.min(start + SEGMENT_TOKENS - 1);
    let pages = (first / PAGE_TOKENS * PAGE_TOKENS..=last).step_by(PAGE_TOKENS);
    let mut scores = [0.0; SCORES];
    // SAFETY: the pages of a sequence are written by earlier stages only; the caller keeps the
    // contract of `Vector`.
    unsafe {
        for page_start in pages.clone() {
            let keys = kv.keys.part(layout.keys(table.page(page_start), tile.kv_head));
            page_scores::<V, C>(tile, keys, layout.key_dim, page_start - start, &mut scores);
        }
        for (row, range) in tile.ranges.iter().enumerate() {
            let scores = &mut scores[row * SEGMENT_TOKENS..(row + 1) * SEGMENT_TOKENS];
            (sums.max[row], sums.sum[row]) = exponentials::<V>(range, start, scores);
        }
        for page_start in pages {
            let page = Page {
                values: kv.values.part(layout.values(table.page(page_start), tile.kv_head)),
                stride: layout.value_stride,
                filled: (last + 1 - page_start).min(PAGE_TOKENS),
                at: page_start - start,
            };
            add_values::<V, C>(tile.ranges.len(), &page, &scores, sums.values);
        }
    }
}

/// Runs a function on the rows of a tile, 8, 4, 3, 2 or 1 at a time, as
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

/// The scores of a tile with the keys of the page that begins `at` tokens into the segment.
#[inline(always)]
unsafe fn page_scores<V: Vector, C: Cell>(
    tile: &Tile<'_>,
    keys: &[C],
    key_dim: usize,
    at: usize,
    scores: &mut [f32; SCORES],
) {
    let rows = tile.ranges.len();
    assert!(tile.q.len() == rows * key_dim && keys.len() == head_cells(key_dim, C::SCALE));
    assert!(rows <= TILE_ROWS && at + PAGE_TOKENS <= SEGMENT_TOKENS);
    // SAFETY: rows and elements stay within the lengths asserted above; the caller keeps the
    // contract of `Vector`.
    unsafe { by_rows!(rows, score_rows(tile, keys, key_dim, at, scores)) }
}

/// The scores of `N` rows from `first` on.
#[inline(always)]
unsafe fn score_rows<V: Vector, C: Cell, const N: usize>(
    first: usize,
    tile: &Tile<'_>,
    keys: &[C],
    key_dim: usize,
    at: usize,
    scores: &mut [f32; SCORES],
) {
    // SAFETY: as the caller vouches.
    unsafe {
        let (q, keys) = (tile.q.as_ptr().add(first * key_dim), keys.as_ptr());
        let scales = keys.add(key_dim * PAGE_TOKENS).cast::<u16>();
        let scores = scores.as_mut_ptr().add(first * SEGMENT_TOKENS + at);
        // Without scales, all is one block.
        let block = if C::SCALE > 0 { BLOCK } else { key_dim };
        let mut start = 0;
        while start < key_dim {
            let end = key_dim.min(start + block);
            let mut sums = [[V::splat(0.0); VECTORS]; N];
            for d in start..end {
                let mut k = [V::splat(0.0); VECTORS];
                unrolled!(VECTORS, j => { k[j] = C::load(keys.add(d * PAGE_TOKENS + j * LANES)); });
                unrolled!(N, i => {
                    let q = V::splat(*q.add(i * key_dim + d));
                    unrolled!(VECTORS, j => { sums[i][j] = k[j].mul_add(q, sums[i][j]); });
                });
            }
            unrolled!(N, i => {
                unrolled!(VECTORS, j => {
                    let (to, mut sum) = (scores.add(i * SEGMENT_TOKENS + j * LANES), sums[i][j]);
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

/// Turns the scores of a row with a segment, which begins at position `start`, into exponentials
/// relative to the largest, and gives that and their sum. What the row may not see becomes zero.
#[inline(always)]
unsafe fn exponentials<V: Vector>(
    range: &RowRange,
    start: usize,
    scores: &mut [f32],
) -> (f32, f32) {
    let from = range.first.saturating_sub(start).min(SEGMENT_TOKENS);
    let to = (range.last + 1).saturating_sub(start).min(SEGMENT_TOKENS).max(from);
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

/// The values of a page.
struct Page<'a, C> {
    /// `[PAGE_TOKENS, stride]`, and scales.
    values: &'a [C],
    stride: usize,
    /// Tokens that are there.
    filled: usize,
    /// Where the page begins in its segment.
    at: usize,
}

/// Adds the values of a page, each times its exponential, to every row.
#[inline(always)]
unsafe fn add_values<V: Vector, C: Cell>(
    rows: usize,
    page: &Page<'_, C>,
    scores: &[f32; SCORES],
    values: &mut [f32],
) {
    let stride = page.stride;
    let cells = head_cells(stride, C::SCALE);
    assert!(page.values.len() == cells && values.len() >= rows * stride);
    assert!(rows <= TILE_ROWS && page.filled <= PAGE_TOKENS && stride.is_multiple_of(LANES));
    assert!(page.at + PAGE_TOKENS <= SEGMENT_TOKENS);
    // SAFETY: rows, tokens and elements stay within the lengths asserted above; the caller keeps
    // the contract of `Vector`.
    unsafe { by_rows!(rows, add_rows(page, scores, values)) }
}

/// Adds a page to the values of `N` rows from `first` on.
#[inline(always)]
unsafe fn add_rows<V: Vector, C: Cell, const N: usize>(
    first: usize,
    page: &Page<'_, C>,
    scores: &[f32; SCORES],
    values: &mut [f32],
) {
    let pairs = page.stride / (2 * LANES) * (2 * LANES);
    // SAFETY: as the caller vouches.
    unsafe {
        for d in (0..pairs).step_by(2 * LANES) {
            add_columns::<V, C, N, 2>(first, d, page, scores, values);
        }
        if pairs < page.stride {
            add_columns::<V, C, N, 1>(first, pairs, page, scores, values);
        }
    }
}

/// Adds `D` vectors of a page, from column `d` on, to the values of `N` rows from `first` on.
#[inline(always)]
unsafe fn add_columns<V: Vector, C: Cell, const N: usize, const D: usize>(
    first: usize,
    d: usize,
    page: &Page<'_, C>,
    scores: &[f32; SCORES],
    values: &mut [f32],
) {
    // SAFETY: as the caller vouches.
    unsafe {
        let (from, out) = (page.values.as_ptr().add(d), values.as_mut_ptr().add(d));
        let scores = scores.as_ptr().add(first * SEGMENT_TOKENS + page.at);
        let scales = page.values.as_ptr().add(page.stride * PAGE_TOKENS).cast::<u16>();
        let mut scaled = [[0.0; PAGE_TOKENS]; N];
        let (weights, weight_stride) = if C::SCALE > 0 {
            for (i, scaled) in scaled.iter_mut().enumerate() {
                for j in (0..PAGE_TOKENS).step_by(LANES) {
                    let p = V::load(scores.add(i * SEGMENT_TOKENS + j));
                    let scale = V::load_f16(scales.add(d / BLOCK * PAGE_TOKENS + j));
                    p.mul(scale).store(scaled.as_mut_ptr().add(j));
                }
            }
            (scaled.as_ptr().cast::<f32>(), PAGE_TOKENS)
        } else {
            (scores, SEGMENT_TOKENS)
        };
        let out = out.add(first * page.stride);
        let mut sums = [[V::splat(0.0); D]; N];
        unrolled!(N, i => {
            unrolled!(D, j => { sums[i][j] = V::load(out.add(i * page.stride + j * LANES)); });
        });
        for t in 0..page.filled {
            let mut v = [V::splat(0.0); D];
            unrolled!(D, j => { v[j] = C::load(from.add(t * page.stride + j * LANES)); });
            unrolled!(N, i => {
                let p = V::splat(*weights.add(i * weight_stride + t));
                unrolled!(D, j => { sums[i][j] = v[j].mul_add(p, sums[i][j]); });
            });
        }
        unrolled!(N, i => {
            unrolled!(D, j => { sums[i][j].store(out.add(i * page.stride + j * LANES)); });
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
