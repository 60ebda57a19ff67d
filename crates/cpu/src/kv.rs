//! Keys and values in pages, laid out for the attention kernel: keys
//! with the tokens of a page side by side, so that a vector is sixteen scores; values with the
//! elements of a token side by side, so that a vector is sixteen outputs. Where they are bytes, the
//! cells of a head in a page are followed by scales, of both with the tokens side by side.

use std::ops::Range;

use bodkin_backend::{KvType, PAGE_TOKENS};
use bodkin_gguf::Format;
use bodkin_model::{KvSlot, Plan};
use half::f16;

use crate::isa::Isa;
use crate::memory::{AlignedMemory, Number};
use crate::shared::Shared;
use crate::vector::{LANES, Vector, dispatch};

/// Elements of a head that share a scale.
pub(crate) const BLOCK: usize = KvType::BLOCK;
const _: () = assert!(BLOCK == 2 * LANES);

/// How a key or value is kept.
pub(crate) trait Cell: Copy + Default + Send {
    /// Cells that the scale of a block takes; 0 where there are no scales.
    const SCALE: usize;

    /// Without the scale.
    ///
    /// # Safety
    ///
    /// As for [`Vector::load`].
    unsafe fn load<V: Vector>(from: *const Self) -> V;

    /// Rounds a block and gives its scale, in half precision.
    ///
    /// # Safety
    ///
    /// As for [`Vector`].
    unsafe fn round<V: Vector>(x: [V; 2], to: &mut [Self; BLOCK]) -> u16;
}

/// Cells of a page for one head of `width` elements with the scales of its tokens.
pub(crate) fn head_cells(width: usize, scale: usize) -> usize {
    PAGE_TOKENS * (width + scale * width.div_ceil(BLOCK))
}

impl Cell for f32 {
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
}

/// The bits of a half-precision number.
impl Cell for u16 {
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
            within(x[0], MOST_HALF).store_f16(to.as_mut_ptr());
            within(x[1], MOST_HALF).store_f16(to[LANES..].as_mut_ptr());
        }
        0
    }
}

/// A number that is multiplied with the scale of its block.
impl Cell for i8 {
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
            let (a, b) = (within(x[0], MOST_CODE * MOST_HALF), within(x[1], MOST_CODE * MOST_HALF));
            let zero = V::splat(0.0);
            let largest = a.max(zero.sub(a)).max(b).max(zero.sub(b)).largest();
            let scale = f16::from_f32(largest / MOST_CODE);
            let inverse = 1.0 / scale.to_f32();
            let inverse = V::splat(if inverse.is_finite() { inverse } else { 0.0 });
            within(a.mul(inverse), MOST_CODE).round().store(codes.as_mut_ptr());
            within(b.mul(inverse), MOST_CODE).round().store(codes[LANES..].as_mut_ptr());
            scale
        };
        *to = codes.map(|code| code as i8);
        scale.to_bits()
    }
}

/// The largest number in half precision, and the largest code of a byte.
const MOST_HALF: f32 = 65504.0;
const MOST_CODE: f32 = 127.0;

/// An infinity would spoil sums in which it counts for nothing. What is no number comes second, as
/// that is what processors keep then.
///
/// # Safety
///
/// As for [`Vector`].
#[inline(always)]
unsafe fn within<V: Vector>(x: V, most: f32) -> V {
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
pub(crate) struct Cells<T> {
    /// `[pages, kv_heads]` of `[key_dim, PAGE_TOKENS]` and the scales `[blocks, PAGE_TOKENS]`.
    pub(crate) keys: T,
    /// `[pages, kv_heads]` of `[PAGE_TOKENS, value_stride]` and the scales `[blocks, PAGE_TOKENS]`.
    pub(crate) values: T,
}

/// Where the keys and values of a slot are; what threads pass around.
#[derive(Clone, Copy)]
pub(crate) enum KvView {
    Byte(Cells<Shared<i8>>, KvLayout),
    Half(Cells<Shared<u16>>, KvLayout),
    Single(Cells<Shared<f32>>, KvLayout),
}

/// How precisely keys and values are kept.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Precision {
    Byte,
    Half,
    Single,
}

impl Precision {
    /// Half where nobody chose, but for models whose weights are all single: there, the rounding of
    /// keys and values would be the largest error by far.
    pub(crate) fn of(kv_type: KvType, plan: &Plan) -> Precision {
        let single = || plan.weights.iter().all(|w| w.format == Format::F32);
        match kv_type {
            KvType::Q8_0 => Precision::Byte,
            KvType::Auto if single() => Precision::Single,
            KvType::Auto | KvType::F16 => Precision::Half,
        }
    }

    /// Of a cell.
    fn bytes(self) -> usize {
        match self {
            Precision::Byte => 1,
            Precision::Half => 2,
            Precision::Single => 4,
        }
    }

    /// See [`Cell::SCALE`].
    fn scale(self) -> usize {
        match self {
            Precision::Byte => i8::SCALE,
            Precision::Half => u16::SCALE,
            Precision::Single => f32::SCALE,
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

    /// Cells of a page: of its keys, and of its values.
    fn page_len(&self) -> (usize, usize) {
        let cells = |width| self.kv_heads * head_cells(width, self.precision.scale());
        (cells(self.key_dim), cells(self.value_stride))
    }

    /// Bytes of a page.
    pub(crate) fn page_bytes(&self) -> u64 {
        let (keys, values) = self.page_len();
        (self.precision.bytes() * (keys + values)) as u64
    }

    /// The keys of one head in a page: `[key_dim, PAGE_TOKENS]`, and their scales.
    pub(crate) fn keys(&self, page: usize, kv_head: usize) -> Range<usize> {
        let len = head_cells(self.key_dim, self.precision.scale());
        let start = (page * self.kv_heads + kv_head) * len;
        start..start + len
    }

    /// The values of one head in a page: `[PAGE_TOKENS, value_stride]`, and their scales.
    pub(crate) fn values(&self, page: usize, kv_head: usize) -> Range<usize> {
        let len = head_cells(self.value_stride, self.precision.scale());
        let start = (page * self.kv_heads + kv_head) * len;
        start..start + len
    }
}

impl KvView {
    pub(crate) fn layout(&self) -> &KvLayout {
        match self {
            KvView::Byte(_, layout) | KvView::Half(_, layout) | KvView::Single(_, layout) => layout,
        }
    }

    /// Keeps the keys `[kv_heads, key_dim]` and values `[kv_heads, value_dim]` of a token.
    ///
    /// # Safety
    ///
    /// No other thread touches this token of this page before the next barrier.
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
            KvView::Byte(cells, layout) => cells.store::<V>(&layout, at, k, v),
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
            for (i, k) in k.chunks(BLOCK).enumerate() {
                // SAFETY: within the page's cells, which lie in the buffer; the caller rules out
                // other threads.
                unsafe {
                    let (block, scale) = rounded::<V, C>(k);
                    let to = self.keys.start().add(cells.start + i * BLOCK * PAGE_TOKENS + token);
                    for (j, cell) in block.into_iter().take(k.len()).enumerate() {
                        to.add(j * PAGE_TOKENS).write(cell);
                    }
                    put_scale(scale, self.keys.start(), &cells, layout.key_dim, (i, token));
                }
            }
        }
        for (head, v) in v.chunks_exact(layout.value_dim).enumerate() {
            let cells = layout.values(page, head);
            assert!(cells.end <= self.values.len(), "a page of the slot");
            for (i, v) in v.chunks(BLOCK).enumerate() {
                let start = cells.start + token * layout.value_stride + i * BLOCK;
                // SAFETY: as above.
                unsafe {
                    let (block, scale) = rounded::<V, C>(v);
                    self.values.part_mut(start..start + v.len()).copy_from_slice(&block[..v.len()]);
                    put_scale(scale, self.values.start(), &cells, layout.value_stride, (i, token));
                }
            }
        }
    }
}

/// Up to a block of numbers as cells, and their scale; the rest is zero.
///
/// # Safety
///
/// As for [`Vector`].
#[inline(always)]
unsafe fn rounded<V: Vector, C: Cell>(x: &[f32]) -> ([C; BLOCK], u16) {
    let mut padded = [0.0; BLOCK];
    let mut cells = [C::default(); BLOCK];
    padded[..x.len()].copy_from_slice(x);
    // SAFETY: a block is two vectors; the caller keeps the contract of `Vector`.
    let scale = unsafe {
        C::round([V::load(padded.as_ptr()), V::load(padded[LANES..].as_ptr())], &mut cells)
    };
    (cells, scale)
}

/// Writes the scale of a block of a token behind the cells `[width, PAGE_TOKENS]` of a head, if
/// there are scales.
///
/// # Safety
///
/// `start` points to all cells, of which `cells` are those of the head, and no other thread touches
/// the scales of this token.
#[inline(always)]
unsafe fn put_scale<C: Cell>(
    scale: u16,
    start: *mut C,
    cells: &Range<usize>,
    width: usize,
    (block, token): (usize, usize),
) {
    if C::SCALE > 0 {
        let at = cells.start + width * PAGE_TOKENS + C::SCALE * (block * PAGE_TOKENS + token);
        // SAFETY: `head_cells` has room for it.
        unsafe { start.add(at).cast::<u16>().write_unaligned(scale) }
    }
}

impl KvPages {
    /// So many pages of zeros.
    pub(crate) fn new(layout: &KvLayout, pages: usize) -> KvPages {
        let (keys, values) = layout.page_len();
        let zeroed = |len| AlignedMemory::zeroed(pages * len * layout.precision.bytes());
        KvPages { keys: zeroed(keys), values: zeroed(values) }
    }

    pub(crate) fn view(&mut self, layout: KvLayout) -> KvView {
        match layout.precision {
            Precision::Byte => KvView::Byte(self.cells(), layout),
            Precision::Half => KvView::Half(self.cells(), layout),
            Precision::Single => KvView::Single(self.cells(), layout),
        }
    }

    fn cells<T: Number>(&mut self) -> Cells<Shared<T>> {
        let keys = Shared::new(self.keys.numbers_mut());
        Cells { keys, values: Shared::new(self.values.numbers_mut()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Scales and codes of a block.
    #[inline(always)]
    unsafe fn round<V: Vector>(x: &[f32]) -> ([i8; BLOCK], u16) {
        // SAFETY: the caller keeps the contract of `Vector`.
        unsafe { rounded::<V, i8>(x) }
    }

    fn bytes(isa: Isa, x: &[f32]) -> Vec<u8> {
        let (codes, scale) = dispatch!(isa, round(x: &[f32]) -> ([i8; BLOCK], u16));
        scale.to_le_bytes().into_iter().chain(codes.map(|code| code as u8)).collect()
    }

    #[test]
    fn bytes_are_those_of_q8_0() {
        let mut state = 1u32;
        let mut random = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        };
        for isa in Isa::available() {
            for exponent in -45..22 {
                let block: Vec<f32> = (0..BLOCK).map(|_| random() * 2f32.powi(exponent)).collect();
                let wanted = Format::Q8_0.encode(&block, BLOCK).expect("a quantiser");
                assert_eq!(bytes(isa, &block), wanted, "{isa} {block:?}");
                // The rest of a shorter block is zero.
                let mut shorter = block.clone();
                shorter[20..].fill(0.0);
                assert_eq!(bytes(isa, &block[..20]), bytes(isa, &shorter), "{isa}");
            }
            // Nothing that is no number is left of what is none.
            for odd in [f32::INFINITY, f32::NEG_INFINITY, f32::MAX] {
                let kept = bytes(isa, &[1.0, odd]);
                let scale = f16::from_le_bytes([kept[0], kept[1]]).to_f32();
                assert!(scale == MOST_HALF && kept[3] as i8 == 127 * odd.signum() as i8, "{isa}");
            }
        }
    }
}
