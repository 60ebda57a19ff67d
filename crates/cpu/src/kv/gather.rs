//! Entries gathered from anywhere in the cache into dense pages of f32, where the attention kernel
//! reads them as it reads a sequence. Gathering an entry costs a conversion of each element, which
//! the heads that read it share.

use bodkin_backend::PAGE_TOKENS;

use super::{BLOCK, KvBuffers, KvElement, KvLayout, KvView};
use crate::shared::Shared;

/// An entry of the cache: its page, its place in the page, and the head.
#[derive(Clone, Copy)]
pub(crate) struct EntryPlace {
    pub(crate) page: usize,
    pub(crate) place: usize,
    pub(crate) kv_head: usize,
}

impl KvView {
    /// Copies the key and the value of an entry to column `to` of gathered pages: `keys` are
    /// `[key_dim, PAGE_TOKENS]` and `values` `[PAGE_TOKENS, value_stride]` each.
    ///
    /// # Safety
    ///
    /// No thread writes the entry in this stage.
    pub(crate) unsafe fn gather(
        self,
        from: EntryPlace,
        to: usize,
        keys: &mut [f32],
        values: &mut [f32],
    ) {
        // SAFETY: the caller's promise.
        unsafe {
            match self {
                KvView::Int8(cells, layout) => cells.gather(&layout, from, to, keys, values),
                KvView::F16(cells, layout) => cells.gather(&layout, from, to, keys, values),
                KvView::F32(cells, layout) => cells.gather(&layout, from, to, keys, values),
            }
        }
    }
}

impl<C: KvElement> KvBuffers<Shared<C>> {
    /// # Safety
    ///
    /// As for [`KvView::gather`].
    unsafe fn gather(
        self,
        layout: &KvLayout,
        from: EntryPlace,
        to: usize,
        keys: &mut [f32],
        values: &mut [f32],
    ) {
        let EntryPlace { page, place, kv_head } = from;
        let (to_page, column) = (to / PAGE_TOKENS, to % PAGE_TOKENS);
        let (key_dim, stride) = (layout.key_dim, layout.value_stride);
        // SAFETY: the caller's promise.
        let cells = unsafe { self.keys.part(layout.keys(page, kv_head)) };
        let out = &mut keys[to_page * PAGE_TOKENS * key_dim..][..PAGE_TOKENS * key_dim];
        let elements = cells[..layout.entries * key_dim].iter().skip(place).step_by(layout.entries);
        let out = out.iter_mut().skip(column).step_by(PAGE_TOKENS);
        for (i, (out, element)) in out.zip(elements).enumerate() {
            *out = element.to_f32() * scale(cells, layout.scale_at(key_dim, i / BLOCK, place));
        }
        if stride == 0 {
            return;
        }
        // SAFETY: the caller's promise.
        let cells = unsafe { self.values.part(layout.values(page, kv_head)) };
        let out = &mut values[to * stride..][..stride];
        let blocks = out.chunks_mut(BLOCK).zip(cells[place * stride..][..stride].chunks(BLOCK));
        for (i, (out, elements)) in blocks.enumerate() {
            let scale = scale(cells, layout.scale_at(stride, i, place));
            out.iter_mut().zip(elements).for_each(|(out, x)| *out = x.to_f32() * scale);
        }
    }
}

/// The scale at a cell of a head; 1 if the type has none.
fn scale<C: KvElement>(cells: &[C], at: usize) -> f32 {
    if C::SCALE == 0 {
        return 1.0;
    }
    let cell = cells[at..at + C::SCALE].as_ptr().cast::<u16>();
    // SAFETY: the scale lies in the cells of the slice above.
    unsafe { cell.read_unaligned() }.to_f32()
}
