//! Attention over pages with a running softmax (Milakov & Gimelshein 2018, as in FlashAttention).
//!
//! A tile is up to sixteen query rows that share a key and value head: the heads of its group for
//! one or several tokens, so decode with grouped queries and prefill are the same code. Positions
//! are cut into segments at fixed places; each segment is summed on its own and the sums are
//! merged in order. A row therefore gets the same bits whatever shares its tile, however its
//! prompt was cut into steps, and whether one thread took all its segments or several did.
//!
//! Per page, head and tile of R rows: reads 64 (key_dim + value_dim) bytes, does
//! 64 R (key_dim + value_dim) operations; bound by memory for one row, by arithmetic from about
//! four rows up.

use bodkin_backend::{PAGE_TOKENS, PageTable};

use crate::kv::{Cell, Cells, KvLayout, KvView};
use crate::shared::Shared;
use crate::simd::Simd;
use crate::vector::{LANES, Vector, dispatch, exp};

/// Query rows in a tile.
pub(crate) const TILE_ROWS: usize = 16;
/// Tokens in a segment: a whole number of pages.
pub(crate) const SEGMENT_TOKENS: usize = 8 * PAGE_TOKENS;
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

/// The running softmax of the rows of a tile.
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
    simd: Simd,
    tile: &Tile<'_>,
    kv: KvView,
    table: &PageTable,
    segment: usize,
    sums: &mut Sums<'_>,
) {
    match kv {
        KvView::Half(kv, layout) => dispatch!(simd, half(
            tile: &Tile<'_>, kv: Cells<Shared<u16>>, layout: KvLayout, table: &PageTable,
            segment: usize, sums: &mut Sums<'_>,
        )),
        KvView::Single(kv, layout) => dispatch!(simd, single(
            tile: &Tile<'_>, kv: Cells<Shared<f32>>, layout: KvLayout, table: &PageTable,
            segment: usize, sums: &mut Sums<'_>,
        )),
    }
}

#[inline(always)]
unsafe fn half<V: Vector>(
    tile: &Tile<'_>,
    kv: Cells<Shared<u16>>,
    layout: KvLayout,
    table: &PageTable,
    segment: usize,
    sums: &mut Sums<'_>,
) {
    // SAFETY: the caller keeps the contract of `Vector`.
    unsafe { segment_of::<V, u16>(tile, kv, layout, table, segment, sums) }
}

#[inline(always)]
unsafe fn single<V: Vector>(
    tile: &Tile<'_>,
    kv: Cells<Shared<f32>>,
    layout: KvLayout,
    table: &PageTable,
    segment: usize,
    sums: &mut Sums<'_>,
) {
    // SAFETY: the caller keeps the contract of `Vector`.
    unsafe { segment_of::<V, f32>(tile, kv, layout, table, segment, sums) }
}

#[inline(always)]
unsafe fn segment_of<V: Vector, C: Cell>(
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
    let mut scores = [0.0; TILE_ROWS * PAGE_TOKENS];
    let mut decay = [1.0; TILE_ROWS];
    for page_start in (first / PAGE_TOKENS * PAGE_TOKENS..=last).step_by(PAGE_TOKENS) {
        let page = table.page(page_start);
        let filled = (last + 1 - page_start).min(PAGE_TOKENS);
        // SAFETY: the pages of a sequence are written by earlier stages only; the caller keeps
        // the contract of `Vector`.
        unsafe {
            let keys = kv.keys.part(layout.keys(page, tile.kv_head));
            let values = kv.values.part(layout.values(page, tile.kv_head));
            page_scores::<V, C>(tile, keys, layout.key_dim, &mut scores);
            exponentials::<V>(tile, page_start, &mut scores, &mut decay, sums);
            let stride = layout.value_stride;
            add_values::<V, C>(tile.ranges.len(), values, stride, filled, &scores, &decay, sums);
        }
    }
}

/// Runs a function on the rows of a tile, 8, 4, 2 or 1 at a time, as
/// `name::<V, C, N>(first row, ...)`.
macro_rules! by_rows {
    ($rows:expr, $name:ident($($arg:expr),*)) => {{
        let mut row = 0;
        while row < $rows {
            let count = 1 << ($rows - row).min(V::ROWS).ilog2();
            match count {
                8 => $name::<V, C, 8>(row, $($arg),*),
                4 => $name::<V, C, 4>(row, $($arg),*),
                2 => $name::<V, C, 2>(row, $($arg),*),
                _ => $name::<V, C, 1>(row, $($arg),*),
            }
            row += count;
        }
    }};
}

/// The scores of a tile with the keys of a page: `[rows, PAGE_TOKENS]`.
#[inline(always)]
unsafe fn page_scores<V: Vector, C: Cell>(
    tile: &Tile<'_>,
    keys: &[C],
    key_dim: usize,
    scores: &mut [f32; TILE_ROWS * PAGE_TOKENS],
) {
    let rows = tile.ranges.len();
    assert!(tile.q.len() == rows * key_dim && keys.len() == key_dim * PAGE_TOKENS);
    // SAFETY: rows and elements stay within the lengths asserted above; the caller keeps the
    // contract of `Vector`.
    unsafe { by_rows!(rows, score_rows(tile, keys, key_dim, scores)) }
}

/// The scores of `N` rows from `first` on.
#[inline(always)]
unsafe fn score_rows<V: Vector, C: Cell, const N: usize>(
    first: usize,
    tile: &Tile<'_>,
    keys: &[C],
    key_dim: usize,
    scores: &mut [f32; TILE_ROWS * PAGE_TOKENS],
) {
    // SAFETY: as the caller vouches.
    unsafe {
        let (q, keys) = (tile.q.as_ptr().add(first * key_dim), keys.as_ptr());
        let mut sums = [[V::splat(0.0); PAGE_TOKENS / LANES]; N];
        for d in 0..key_dim {
            let k: [V; PAGE_TOKENS / LANES] =
                std::array::from_fn(|j| C::load(keys.add(d * PAGE_TOKENS + j * LANES)));
            for (i, sums) in sums.iter_mut().enumerate() {
                let q = V::splat(*q.add(i * key_dim + d));
                for (sum, k) in sums.iter_mut().zip(k) {
                    *sum = k.mul_add(q, *sum);
                }
            }
        }
        for (i, sums) in sums.into_iter().enumerate() {
            for (j, sum) in sums.into_iter().enumerate() {
                let capped = match tile.softcap {
                    Some(cap) => softcap(sum, V::splat(cap)),
                    None => sum,
                };
                capped.store(scores.as_mut_ptr().add((first + i) * PAGE_TOKENS + j * LANES));
            }
        }
    }
}

/// Turns scores into exponentials relative to the new maximum of each row; `decay` is by what the
/// row's older sums shrink.
#[inline(always)]
unsafe fn exponentials<V: Vector>(
    tile: &Tile<'_>,
    page_start: usize,
    scores: &mut [f32; TILE_ROWS * PAGE_TOKENS],
    decay: &mut [f32; TILE_ROWS],
    sums: &mut Sums<'_>,
) {
    let rows = tile.ranges.iter().zip(scores.chunks_exact_mut(PAGE_TOKENS)).enumerate();
    for (r, (range, row)) in rows {
        let from = range.first.saturating_sub(page_start).min(PAGE_TOKENS);
        let to = (range.last + 1).saturating_sub(page_start).min(PAGE_TOKENS).max(from);
        row[..from].fill(LOWEST);
        row[to..].fill(LOWEST);
        // SAFETY: a row is two vectors long; the caller keeps the contract of `Vector`.
        unsafe {
            let (low, high) = (row.as_mut_ptr(), row.as_mut_ptr().add(LANES));
            let (a, b) = (V::load(low), V::load(high));
            let max = a.max(b).largest().max(sums.max[r]);
            let a = exp(a.sub(V::splat(max)));
            let b = exp(b.sub(V::splat(max)));
            a.store(low);
            b.store(high);
            row[..from].fill(0.0);
            row[to..].fill(0.0);
            let total = V::load(low).add(V::load(high)).sum();
            decay[r] = exp_one::<V>(sums.max[r] - max);
            sums.max[r] = max;
            sums.sum[r] = sums.sum[r] * decay[r] + total;
        }
    }
}

/// `values = values * decay + exponentials * page`, for every row.
#[inline(always)]
unsafe fn add_values<V: Vector, C: Cell>(
    rows: usize,
    values: &[C],
    stride: usize,
    filled: usize,
    scores: &[f32; TILE_ROWS * PAGE_TOKENS],
    decay: &[f32; TILE_ROWS],
    sums: &mut Sums<'_>,
) {
    assert!(values.len() == stride * PAGE_TOKENS && sums.values.len() >= rows * stride);
    assert!(rows <= TILE_ROWS && filled <= PAGE_TOKENS && stride.is_multiple_of(LANES));
    let page = Page { values, stride, filled };
    // SAFETY: rows, tokens and elements stay within the lengths asserted above; the caller keeps
    // the contract of `Vector`.
    unsafe { by_rows!(rows, add_rows(&page, scores, decay, sums.values)) }
}

/// The values of a page.
struct Page<'a, C> {
    /// `[PAGE_TOKENS, stride]`.
    values: &'a [C],
    stride: usize,
    /// Tokens that are there.
    filled: usize,
}

/// Adds a page to the values of `N` rows from `first` on.
#[inline(always)]
unsafe fn add_rows<V: Vector, C: Cell, const N: usize>(
    first: usize,
    page: &Page<'_, C>,
    scores: &[f32; TILE_ROWS * PAGE_TOKENS],
    decay: &[f32; TILE_ROWS],
    values: &mut [f32],
) {
    let stride = page.stride;
    for d in (0..stride).step_by(LANES) {
        // SAFETY: as the caller vouches.
        unsafe {
            let (from, out) = (page.values.as_ptr().add(d), values.as_mut_ptr().add(d));
            let mut sums: [V; N] = std::array::from_fn(|i| {
                V::load(out.add((first + i) * stride)).mul(V::splat(decay[first + i]))
            });
            for t in 0..page.filled {
                let v: V = C::load(from.add(t * stride));
                for (i, sum) in sums.iter_mut().enumerate() {
                    let p = V::splat(scores[(first + i) * PAGE_TOKENS + t]);
                    *sum = v.mul_add(p, *sum);
                }
            }
            for (i, sum) in sums.into_iter().enumerate() {
                sum.store(out.add((first + i) * stride));
            }
        }
    }
}

/// `e^x` of one number, by the vector code.
#[inline(always)]
unsafe fn exp_one<V: Vector>(x: f32) -> f32 {
    let mut lanes = [0.0; LANES];
    // SAFETY: the array is as long as a vector.
    unsafe { exp(V::splat(x)).store(lanes.as_mut_ptr()) };
    lanes[0]
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
