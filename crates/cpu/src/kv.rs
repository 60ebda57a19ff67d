//! Keys and values in pages, laid out for the attention kernel: keys
//! with the tokens of a page side by side, so that a vector is sixteen scores; values with the
//! elements of a token side by side, so that a vector is sixteen outputs.

use std::ops::Range;

use bodkin_backend::PAGE_TOKENS;
use bodkin_gguf::Format;
use bodkin_model::{KvSlot, Plan};

use crate::linear::{Memory, Number};
use crate::shared::Shared;
use crate::simd::Simd;
use crate::vector::{LANES, Vector, dispatch};

/// How a key or value is kept.
pub(crate) trait Cell: Copy + Default + Send {
    /// # Safety
    ///
    /// As for [`Vector::load`].
    unsafe fn load<V: Vector>(from: *const Self) -> V;

    /// # Safety
    ///
    /// As for [`Vector::store`].
    unsafe fn store<V: Vector>(x: V, to: *mut Self);
}

impl Cell for f32 {
    #[inline(always)]
    unsafe fn load<V: Vector>(from: *const f32) -> V {
        // SAFETY: the caller's promise.
        unsafe { V::load(from) }
    }

    #[inline(always)]
    unsafe fn store<V: Vector>(x: V, to: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe { x.store(to) }
    }
}

/// The bits of a half-precision number.
impl Cell for u16 {
    #[inline(always)]
    unsafe fn load<V: Vector>(from: *const u16) -> V {
        // SAFETY: the caller's promise.
        unsafe { V::load_f16(from) }
    }

    #[inline(always)]
    unsafe fn store<V: Vector>(x: V, to: *mut u16) {
        // An infinity would spoil sums in which it counts for nothing. What is no number comes
        // second, as that is what processors keep then.
        // SAFETY: the caller's promise.
        unsafe { V::splat(65504.0).min(V::splat(-65504.0).max(x)).store_f16(to) }
    }
}

/// The pages of one slot.
pub(crate) struct KvPages {
    keys: Memory,
    values: Memory,
}

/// Keys and values of a slot.
#[derive(Clone, Copy, Default)]
pub(crate) struct Cells<T> {
    /// `[pages, kv_heads, key_dim, PAGE_TOKENS]`.
    pub(crate) keys: T,
    /// `[pages, kv_heads, PAGE_TOKENS, value_stride]`.
    pub(crate) values: T,
}

/// Where the keys and values of a slot are; what threads pass around.
#[derive(Clone, Copy)]
pub(crate) enum KvView {
    Half(Cells<Shared<u16>>, KvLayout),
    Single(Cells<Shared<f32>>, KvLayout),
}

/// How precisely keys and values are kept.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Precision {
    Half,
    Single,
}

impl Precision {
    /// Half, but for models whose weights are all single: there, the rounding of keys and values
    /// would be the largest error by far.
    pub(crate) fn of(plan: &Plan) -> Precision {
        let single = plan.weights.iter().all(|w| w.format == Format::F32);
        if single { Precision::Single } else { Precision::Half }
    }

    fn bytes(self) -> usize {
        match self {
            Precision::Half => 2,
            Precision::Single => 4,
        }
    }
}

/// The shape of a page.
#[derive(Clone, Copy)]
pub(crate) struct KvLayout {
    precision: Precision,
    kv_heads: usize,
    pub(crate) key_dim: usize,
    pub(crate) value_dim: usize,
    /// `value_dim` rounded up to whole vectors.
    pub(crate) value_stride: usize,
}

impl KvLayout {
    pub(crate) fn new(slot: &KvSlot, precision: Precision) -> KvLayout {
        KvLayout {
            precision,
            kv_heads: slot.kv_heads,
            key_dim: slot.key_dim,
            value_dim: slot.value_dim,
            value_stride: slot.value_dim.next_multiple_of(LANES),
        }
    }

    /// Elements of a page: of its keys, and of its values.
    fn page_len(&self) -> (usize, usize) {
        let heads = self.kv_heads * PAGE_TOKENS;
        (heads * self.key_dim, heads * self.value_stride)
    }

    /// Bytes of a page.
    pub(crate) fn page_bytes(&self) -> u64 {
        let (keys, values) = self.page_len();
        (self.precision.bytes() * (keys + values)) as u64
    }

    /// The keys of one head in a page: `[key_dim, PAGE_TOKENS]`.
    pub(crate) fn keys(&self, page: usize, kv_head: usize) -> Range<usize> {
        let len = self.key_dim * PAGE_TOKENS;
        let start = (page * self.kv_heads + kv_head) * len;
        start..start + len
    }

    /// The values of one head in a page: `[PAGE_TOKENS, value_stride]`.
    pub(crate) fn values(&self, page: usize, kv_head: usize) -> Range<usize> {
        let len = self.value_stride * PAGE_TOKENS;
        let start = (page * self.kv_heads + kv_head) * len;
        start..start + len
    }
}

impl KvView {
    pub(crate) fn layout(&self) -> &KvLayout {
        match self {
            KvView::Half(_, layout) | KvView::Single(_, layout) => layout,
        }
    }

    /// Keeps the keys `[kv_heads, key_dim]` and values `[kv_heads, value_dim]` of a token.
    ///
    /// # Safety
    ///
    /// No other thread touches this token of this page before the next barrier.
    pub(crate) unsafe fn store(self, simd: Simd, at: (usize, usize), k: &[f32], v: &[f32]) {
        let view = self;
        dispatch!(simd, store(view: KvView, at: (usize, usize), k: &[f32], v: &[f32]));
    }
}

/// See [`KvView::store`].
#[inline(always)]
unsafe fn store<V: Vector>(view: KvView, at: (usize, usize), k: &[f32], v: &[f32]) {
    // SAFETY: the caller's promise.
    unsafe {
        match view {
            KvView::Half(cells, layout) => cells.store::<V>(&layout, at, k, v),
            KvView::Single(cells, layout) => cells.store::<V>(&layout, at, k, v),
        }
    }
}

impl<C: Cell> Cells<Shared<C>> {
    /// # Safety
    ///
    /// As for [`KvView::store`] and [`Vector`].
    #[inline(always)]
    unsafe fn store<V: Vector>(
        self,
        layout: &KvLayout,
        (page, token): (usize, usize),
        k: &[f32],
        v: &[f32],
    ) {
        assert!(token < PAGE_TOKENS, "a token of a page");
        for (head, k) in k.chunks_exact(layout.key_dim).enumerate() {
            let cells = layout.keys(page, head);
            assert!(cells.end <= self.keys.len(), "a page of the slot");
            for (i, k) in k.chunks(LANES).enumerate() {
                let at = cells.start + i * LANES * PAGE_TOKENS + token;
                // SAFETY: within the page's cells, which lie in the buffer; the caller rules out
                // other threads.
                unsafe {
                    for (j, cell) in converted::<V, C>(k).into_iter().take(k.len()).enumerate() {
                        self.keys.start().add(at + j * PAGE_TOKENS).write(cell);
                    }
                }
            }
        }
        for (head, v) in v.chunks_exact(layout.value_dim).enumerate() {
            let start = layout.values(page, head).start + token * layout.value_stride;
            // SAFETY: the caller's promise.
            unsafe {
                let cells = self.values.part_mut(start..start + layout.value_dim);
                for (cells, v) in cells.chunks_mut(LANES).zip(v.chunks(LANES)) {
                    cells.copy_from_slice(&converted::<V, C>(v)[..v.len()]);
                }
            }
        }
    }
}

/// Up to a vector of numbers as cells; the rest is zero.
///
/// # Safety
///
/// As for [`Vector`].
#[inline(always)]
unsafe fn converted<V: Vector, C: Cell>(x: &[f32]) -> [C; LANES] {
    let mut padded = [0.0; LANES];
    let mut cells = [C::default(); LANES];
    padded[..x.len()].copy_from_slice(x);
    // SAFETY: both arrays are as long as a vector.
    unsafe { C::store(V::load(padded.as_ptr()), cells.as_mut_ptr()) };
    cells
}

impl KvPages {
    /// So many pages of zeros.
    pub(crate) fn new(layout: &KvLayout, pages: usize) -> KvPages {
        let (keys, values) = layout.page_len();
        let zeroed = |len| Memory::zeroed(pages * len * layout.precision.bytes());
        KvPages { keys: zeroed(keys), values: zeroed(values) }
    }

    pub(crate) fn view(&mut self, layout: KvLayout) -> KvView {
        match layout.precision {
            Precision::Half => KvView::Half(self.cells(), layout),
            Precision::Single => KvView::Single(self.cells(), layout),
        }
    }

    fn cells<T: Number>(&mut self) -> Cells<Shared<T>> {
        let keys = Shared::new(self.keys.numbers_mut());
        Cells { keys, values: Shared::new(self.values.numbers_mut()) }
    }
}
