//! The paged KV cache, laid out for the attention kernel. Keys of a page are `[element, token]`, so
//! that a vector holds sixteen scores; values are `[token, element]`, so that a vector holds
//! sixteen outputs. In int8, the elements of a head in a page are followed by `[block, token]`
//! scales. Storing a token writes its elements once; the strided writes of its keys bound it.

mod gather;
#[cfg(test)]
mod tests;

use std::ops::Range;

use bodkin_backend::{KvType, PAGE_TOKENS, Transfer};
use bodkin_gguf::Format;
use bodkin_model::{KvSlot, Plan};
use half::f16;

use crate::isa::Isa;
use crate::memory::{AlignedMemory, Number};
use crate::shared::Shared;
use crate::vector::{LANES, Vector, dispatch};

pub(crate) use gather::EntryPlace;

/// Elements of a head that share a scale.
pub(crate) const BLOCK: usize = KvType::BLOCK;
const _: () = assert!(BLOCK == 2 * LANES);

/// The type of an element of the cache.
pub(crate) trait KvElement: Copy + Default + Send {
    /// Elements that the scale of a block occupies; 0 without scales.
    const SCALE: usize;

    /// Loads a vector, without applying the scale.
    ///
    /// # Safety
    ///
    /// As for [`Vector::load`].
    unsafe fn load<V: Vector>(from: *const Self) -> V;

    /// Rounds a block and returns its scale in f16.
    ///
    /// # Safety
    ///
    /// As for [`Vector`].
    unsafe fn round<V: Vector>(x: [V; 2], to: &mut [Self; BLOCK]) -> u16;

    /// The number, without applying the scale.
    fn to_f32(self) -> f32;
}

/// Cells of a page for one head of `width` elements with the scales of its tokens.
pub(crate) fn head_elements(width: usize, scale: usize) -> usize {
    PAGE_TOKENS * entry_elements(width, scale)
}

/// Cells of one entry of a page for one head of `width` elements, with its scales.
fn entry_elements(width: usize, scale: usize) -> usize {
    width + scale * width.div_ceil(BLOCK)
}

impl KvElement for f32 {
    const SCALE: usize = 0;

    #[inline(always)]
    unsafe fn load<V: Vector>(from: *const f32) -> V {
        // SAFETY: the caller's promise.
        unsafe { V::load(from) }
    }

    #[inline(always)]
    unsafe fn round<V: Vector>(x: [V; 2], to: &mut [f32; BLOCK]) -> u16 {
        // SAFETY: a block is two vectors; the caller keeps the contract of `Vector`.
        unsafe {
            x[0].store(to.as_mut_ptr());
            x[1].store(to[LANES..].as_mut_ptr());
        }
        0
    }

    fn to_f32(self) -> f32 {
        self
    }
}

/// The bits of an f16.
impl KvElement for u16 {
    const SCALE: usize = 0;

    #[inline(always)]
    unsafe fn load<V: Vector>(from: *const u16) -> V {
        // SAFETY: the caller's promise.
        unsafe { V::load_f16(from) }
    }

    #[inline(always)]
    unsafe fn round<V: Vector>(x: [V; 2], to: &mut [u16; BLOCK]) -> u16 {
        // SAFETY: a block is two vectors; the caller keeps the contract of `Vector`.
        unsafe {
            clamp(x[0], F16_MAX).store_f16(to.as_mut_ptr());
            clamp(x[1], F16_MAX).store_f16(to[LANES..].as_mut_ptr());
        }
        0
    }

    /// In plain arithmetic, which compilers vectorise.
    fn to_f32(self) -> f32 {
        let magnitude = f32::from_bits(u32::from(self & 0x7FFF) << 13) * 2f32.powi(112);
        // The largest exponent is that of NaN: infinities are not stored.
        let magnitude = if magnitude < 65536.0 { magnitude } else { f32::NAN };
        if self >> 15 == 0 { magnitude } else { -magnitude }
    }
}

/// An int8 code, times the scale of its block.
impl KvElement for i8 {
    const SCALE: usize = size_of::<u16>();

    #[inline(always)]
    unsafe fn load<V: Vector>(from: *const i8) -> V {
        // SAFETY: the caller's promise.
        unsafe { V::load_i8(from) }
    }

    #[inline(always)]
    unsafe fn round<V: Vector>(x: [V; 2], to: &mut [i8; BLOCK]) -> u16 {
        let mut codes = [0.0; BLOCK];
        // SAFETY: a block is two vectors; the caller keeps the contract of `Vector`.
        let scale = unsafe {
            let (a, b) = (clamp(x[0], INT8_MAX * F16_MAX), clamp(x[1], INT8_MAX * F16_MAX));
            let zero = V::splat(0.0);
            let largest = a.max(zero.sub(a)).max(b).max(zero.sub(b)).largest();
            let scale = f16::from_f32(largest / INT8_MAX);
            let inverse = 1.0 / scale.to_f32();
            let inverse = V::splat(if inverse.is_finite() { inverse } else { 0.0 });
            clamp(a.mul(inverse), INT8_MAX).round().store(codes.as_mut_ptr());
            clamp(b.mul(inverse), INT8_MAX).round().store(codes[LANES..].as_mut_ptr());
            scale
        };
        *to = codes.map(|code| code as i8);
        scale.to_bits()
    }

    fn to_f32(self) -> f32 {
        f32::from(self)
    }
}

/// The largest finite f16, and the largest int8 code.
const F16_MAX: f32 = 65504.0;
const INT8_MAX: f32 = 127.0;

/// Clamps to `±most`: an infinity would turn masked terms (0 times infinity) into NaN. NaN is the
/// second operand of `max`, which is returned then, so NaN stays NaN.
///
/// # Safety
///
/// As for [`Vector`].
#[inline(always)]
unsafe fn clamp<V: Vector>(x: V, most: f32) -> V {
    // SAFETY: the caller keeps the contract of `Vector`.
    unsafe { V::splat(most).min(V::splat(-most).max(x)) }
}

/// The pages of one slot.
pub(crate) struct KvPages {
    keys: AlignedMemory,
    values: AlignedMemory,
}

/// Keys and values of a slot.
#[derive(Clone, Copy, Default)]
pub(crate) struct KvBuffers<T> {
    /// `[pages, kv_heads]` of `[key_dim, PAGE_TOKENS]` and the scales `[blocks, PAGE_TOKENS]`.
    pub(crate) keys: T,
    /// `[pages, kv_heads]` of `[PAGE_TOKENS, value_stride]` and the scales `[blocks, PAGE_TOKENS]`.
    pub(crate) values: T,
}

/// Access to the keys and values of a slot for the threads of a step.
#[derive(Clone, Copy)]
pub(crate) enum KvView {
    Int8(KvBuffers<Shared<i8>>, KvLayout),
    F16(KvBuffers<Shared<u16>>, KvLayout),
    F32(KvBuffers<Shared<f32>>, KvLayout),
}

/// The element types of the cache.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum KvDtype {
    Int8,
    F16,
    F32,
}

impl KvDtype {
    /// The type of a slot. The default is F16, but F32 for models whose weights are all F32, where
    /// the rounding of keys and values would dominate the error. Keys of an indexer, which have no
    /// values, are F32: they are few, and decide.
    pub(crate) fn of(kv_type: KvType, plan: &Plan, slot: &KvSlot) -> KvDtype {
        if slot.value_dim == 0 {
            return KvDtype::F32;
        }
        let is_exact = |format| matches!(format, Format::F32 | Format::I32);
        let single = || plan.weights.iter().all(|w| is_exact(w.format));
        match kv_type {
            KvType::Q8_0 => KvDtype::Int8,
            KvType::Auto if single() => KvDtype::F32,
            KvType::Auto | KvType::F16 => KvDtype::F16,
        }
    }

    /// Of a element.
    fn bytes(self) -> usize {
        match self {
            KvDtype::Int8 => 1,
            KvDtype::F16 => 2,
            KvDtype::F32 => 4,
        }
    }

    /// See [`KvElement::SCALE`].
    fn scale(self) -> usize {
        match self {
            KvDtype::Int8 => i8::SCALE,
            KvDtype::F16 => u16::SCALE,
            KvDtype::F32 => f32::SCALE,
        }
    }
}

/// The shape of a page.
#[derive(Clone, Copy)]
pub(crate) struct KvLayout {
    dtype: KvDtype,
    kv_heads: usize,
    /// Entries of a page: [`PAGE_TOKENS`] unless an entry has several tokens.
    entries: usize,
    pub(crate) key_dim: usize,
    pub(crate) value_dim: usize,
    /// `value_dim` rounded up to whole vectors.
    pub(crate) value_stride: usize,
}

impl KvLayout {
    pub(crate) fn new(slot: &KvSlot, dtype: KvDtype) -> KvLayout {
        KvLayout {
            dtype,
            kv_heads: slot.kv_heads,
            entries: slot.entries_per_page(PAGE_TOKENS),
            key_dim: slot.key_dim,
            value_dim: slot.value_dim,
            value_stride: slot.value_dim.next_multiple_of(LANES),
        }
    }

    /// Pages that hold the keys and values of one head, gathered from others, in f32.
    pub(crate) fn gathered(&self) -> KvLayout {
        KvLayout { dtype: KvDtype::F32, kv_heads: 1, entries: PAGE_TOKENS, ..*self }
    }

    /// Cells of a page: of its keys, and of its values.
    fn page_len(&self) -> (usize, usize) {
        let elements = |width| self.kv_heads * self.head_elements(width);
        (elements(self.key_dim), elements(self.value_stride))
    }

    /// Cells of one head in a page, with its scales.
    fn head_elements(&self, width: usize) -> usize {
        self.entries * entry_elements(width, self.dtype.scale())
    }

    /// Bytes of a page.
    pub(crate) fn page_bytes(&self) -> u64 {
        let (keys, values) = self.page_len();
        (self.dtype.bytes() * (keys + values)) as u64
    }

    /// The cell of the scale of a block of an entry, after the elements `[width, entries]` of its
    /// head.
    fn scale_at(&self, width: usize, block: usize, place: usize) -> usize {
        width * self.entries + self.dtype.scale() * (block * self.entries + place)
    }

    /// The keys of one head in a page: `[key_dim, PAGE_TOKENS]`, and their scales.
    pub(crate) fn keys(&self, page: usize, kv_head: usize) -> Range<usize> {
        let len = self.head_elements(self.key_dim);
        let start = (page * self.kv_heads + kv_head) * len;
        start..start + len
    }

    /// The values of one head in a page: `[PAGE_TOKENS, value_stride]`, and their scales.
    pub(crate) fn values(&self, page: usize, kv_head: usize) -> Range<usize> {
        let len = self.head_elements(self.value_stride);
        let start = (page * self.kv_heads + kv_head) * len;
        start..start + len
    }
}

impl KvView {
    pub(crate) fn layout(&self) -> &KvLayout {
        match self {
            KvView::Int8(_, layout) | KvView::F16(_, layout) | KvView::F32(_, layout) => layout,
        }
    }

    /// Copies a page of keys and one of values. Returns their bytes.
    ///
    /// # Safety
    ///
    /// No step is running.
    pub(crate) unsafe fn transfer(self, transfer: &mut Transfer<'_>) -> usize {
        // SAFETY: the caller's promise.
        let [keys, values] = unsafe {
            match self {
                KvView::Int8(elements, _) => elements.bytes_mut(),
                KvView::F16(elements, _) => elements.bytes_mut(),
                KvView::F32(elements, _) => elements.bytes_mut(),
            }
        };
        let (layout, bytes) = (self.layout(), self.layout().dtype.bytes());
        let (key_len, value_len) = layout.page_len();
        transfer.run_region(keys, bytes * key_len) + transfer.run_region(values, bytes * value_len)
    }

    /// Stores the keys `[kv_heads, key_dim]` and values `[kv_heads, value_dim]` of an entry, at its
    /// page and its place in it.
    ///
    /// # Safety
    ///
    /// No other thread accesses this entry of this page before the next barrier.
    pub(crate) unsafe fn store(self, isa: Isa, at: (usize, usize), k: &[f32], v: &[f32]) {
        let view = self;
        dispatch!(isa, store(view: KvView, at: (usize, usize), k: &[f32], v: &[f32]));
    }
}

/// See [`KvView::store`].
#[inline(always)]
unsafe fn store<V: Vector>(view: KvView, at: (usize, usize), k: &[f32], v: &[f32]) {
    // SAFETY: the caller's promise.
    unsafe {
        match view {
            KvView::Int8(elements, layout) => elements.store::<V>(&layout, at, k, v),
            KvView::F16(elements, layout) => elements.store::<V>(&layout, at, k, v),
            KvView::F32(elements, layout) => elements.store::<V>(&layout, at, k, v),
        }
    }
}

impl<C: Number> KvBuffers<Shared<C>> {
    /// All keys and all values.
    ///
    /// # Safety
    ///
    /// The memory still lives, and nothing else accesses it.
    unsafe fn bytes_mut<'a>(self) -> [&'a mut [u8]; 2] {
        // SAFETY: the caller's promise.
        unsafe { [self.keys.bytes_mut(), self.values.bytes_mut()] }
    }
}

impl<C: KvElement> KvBuffers<Shared<C>> {
    /// # Safety
    ///
    /// As for [`KvView::store`] and [`Vector`].
    #[inline(always)]
    unsafe fn store<V: Vector>(
        self,
        layout: &KvLayout,
        (page, place): (usize, usize),
        k: &[f32],
        v: &[f32],
    ) {
        assert!(place < layout.entries, "an entry of a page");
        for (head, k) in k.chunks_exact(layout.key_dim).enumerate() {
            let elements = layout.keys(page, head);
            assert!(elements.end <= self.keys.len(), "a page of the slot");
            for (i, k) in k.chunks(BLOCK).enumerate() {
                // SAFETY: within the page's elements, which lie in the buffer; the caller rules out
                // other threads.
                unsafe {
                    let (block, scale) = round_block::<V, C>(k);
                    let to =
                        self.keys.start().add(elements.start + i * BLOCK * layout.entries + place);
                    for (j, element) in block.into_iter().take(k.len()).enumerate() {
                        to.add(j * layout.entries).write(element);
                    }
                    let scale_at = layout.scale_at(layout.key_dim, i, place);
                    put_scale(scale, self.keys.start(), &elements, scale_at);
                }
            }
        }
        // A slot of keys only has no values.
        for (head, v) in v.chunks_exact(layout.value_dim.max(1)).enumerate() {
            let elements = layout.values(page, head);
            assert!(elements.end <= self.values.len(), "a page of the slot");
            for (i, v) in v.chunks(BLOCK).enumerate() {
                let start = elements.start + place * layout.value_stride + i * BLOCK;
                // SAFETY: as above.
                unsafe {
                    let (block, scale) = round_block::<V, C>(v);
                    self.values.part_mut(start..start + v.len()).copy_from_slice(&block[..v.len()]);
                    let scale_at = layout.scale_at(layout.value_stride, i, place);
                    put_scale(scale, self.values.start(), &elements, scale_at);
                }
            }
        }
    }
}

/// Rounds up to a block of numbers to elements and a scale, padded with zeros.
///
/// # Safety
///
/// As for [`Vector`].
#[inline(always)]
unsafe fn round_block<V: Vector, C: KvElement>(x: &[f32]) -> ([C; BLOCK], u16) {
    let mut padded = [0.0; BLOCK];
    let mut elements = [C::default(); BLOCK];
    padded[..x.len()].copy_from_slice(x);
    // SAFETY: a block is two vectors; the caller keeps the contract of `Vector`.
    let scale = unsafe {
        C::round([V::load(padded.as_ptr()), V::load(padded[LANES..].as_ptr())], &mut elements)
    };
    (elements, scale)
}

/// Writes the scale of a block to its place among the elements of a head, if the type has scales.
///
/// # Safety
///
/// `start` points to all elements, of which `elements` are those of the head, and no other thread
/// accesses the scales of this entry.
#[inline(always)]
unsafe fn put_scale<C: KvElement>(
    scale: u16,
    start: *mut C,
    elements: &Range<usize>,
    scale_at: usize,
) {
    if C::SCALE > 0 {
        // SAFETY: `head_elements` counts the scales.
        unsafe { start.add(elements.start + scale_at).cast::<u16>().write_unaligned(scale) }
    }
}

impl KvPages {
    /// `pages` pages of zeros.
    pub(crate) fn new(layout: &KvLayout, pages: usize) -> KvPages {
        let (keys, values) = layout.page_len();
        let zeroed = |len| AlignedMemory::zeroed(pages * len * layout.dtype.bytes());
        KvPages { keys: zeroed(keys), values: zeroed(values) }
    }

    pub(crate) fn view(&mut self, layout: KvLayout) -> KvView {
        match layout.dtype {
            KvDtype::Int8 => KvView::Int8(self.elements(), layout),
            KvDtype::F16 => KvView::F16(self.elements(), layout),
            KvDtype::F32 => KvView::F32(self.elements(), layout),
        }
    }

    fn elements<T: Number>(&mut self) -> KvBuffers<Shared<T>> {
        let keys = Shared::new(self.keys.numbers_mut());
        KvBuffers { keys, values: Shared::new(self.values.numbers_mut()) }
    }
}
