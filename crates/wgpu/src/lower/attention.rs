//! Attention and the selection of entries: keys and values are stored first.

use bodkin_backend::{PAGE_TOKENS, Result};
use bodkin_model::{Attention, Entries, Op, SlotId, Value};

use super::{Lowering, THREADS, at_most};
use crate::program::{BufferId, Depth, Kernel};

/// The widest head of keys that the kernels take.
const MAX_KEY_DIM: usize = 1024;
/// The widest head of values.
const MAX_VALUE_DIM: usize = 16 * THREADS;

/// The flags of `attention.wgsl`.
const CAUSAL: u32 = 1;
const CHUNKED: u32 = 2;
const HAS_SINKS: u32 = 4;
const SELECTS: u32 = 8;
const HAS_BLOCKS: u32 = 16;
const HAS_TEMPERATURE: u32 = 32;

impl Lowering<'_> {
    pub(super) fn attention(&mut self) -> Result<()> {
        match self.plan.ops[self.op] {
            Op::Attention { q, kv, ref attention, slot } => {
                at_most("key heads of width", attention.key_dim, MAX_KEY_DIM)?;
                at_most("value heads of width", attention.value_dim, MAX_VALUE_DIM)?;
                if let Some([k, v]) = kv {
                    self.store(k, slot, true);
                    self.store(v, slot, false);
                }
                if let Entries::TokensAndBlocks { blocks, slot, .. } = attention.entries {
                    self.store(blocks, slot, true);
                    self.store(blocks, slot, false);
                }
                self.attend(q, attention, slot);
            }
            Op::Select { q, k, weights, indexer, slot } => {
                self.store(k, slot, true);
                let pages = self.limits.pages[self.window_indices[slot.0]];
                let kv_slot = self.plan.slots[slot.0];
                let params = [
                    indexer.heads,
                    indexer.dim,
                    indexer.top_k,
                    kv_slot.ratio,
                    kv_slot.entries_per_page(PAGE_TOKENS),
                    self.window_indices[slot.0],
                    kv_slot.entries(pages * PAGE_TOKENS),
                ];
                let buffers = vec![
                    self.value(q),
                    self.value(weights),
                    BufferId::Kv(slot.0),
                    BufferId::Scores,
                    self.out(),
                ];
                let params = params.map(|x| x as u32).to_vec();
                self.push(Kernel::Select, buffers, params, 1, Depth::Tokens);
            }
            ref op => unreachable!("{op:?} attends to nothing"),
        }
        Ok(())
    }

    /// The word at which the values of a slot begin: behind all keys.
    fn values_at(&self, slot: SlotId) -> usize {
        let kv = &self.plan.slots[slot.0];
        let entries =
            self.limits.pages[self.window_indices[slot.0]] * kv.entries_per_page(PAGE_TOKENS);
        entries * kv.kv_heads * self.kv_dtypes[slot.0].head_words(kv.key_dim)
    }

    /// Stores the keys, or the values, of the step.
    fn store(&mut self, value: Value, slot: SlotId, are_keys: bool) {
        let (kv, dtype) = (self.plan.slots[slot.0], self.kv_dtypes[slot.0]);
        let (dim, first) = match are_keys {
            true => (kv.key_dim, 0),
            false => (kv.value_dim, self.values_at(slot)),
        };
        let params = [
            kv.kv_heads,
            dim,
            dtype.head_words(dim),
            first,
            kv.ratio,
            kv.entries_per_page(PAGE_TOKENS),
            self.window_indices[slot.0],
        ];
        let groups = (kv.kv_heads * dim.div_ceil(dtype.unit())).div_ceil(THREADS);
        let buffers = vec![self.value(value), BufferId::Kv(slot.0)];
        let params = params.map(|x| x as u32).to_vec();
        self.push(Kernel::Store(dtype), buffers, params, groups, Depth::Tokens);
    }

    fn attend(&mut self, q: Value, a: &Attention, slot: SlotId) {
        let flag = |is_set: bool, flag: u32| if is_set { flag } else { 0 };
        let selected = a.entries.selected();
        let blocks = match a.entries {
            Entries::TokensAndBlocks { slot, .. } => Some(slot),
            Entries::Tokens | Entries::Selected(_) => None,
        };
        let flags = flag(a.causal, CAUSAL)
            | flag(a.chunked, CHUNKED)
            | flag(a.sinks.is_some(), HAS_SINKS)
            | flag(selected.is_some(), SELECTS)
            | flag(blocks.is_some(), HAS_BLOCKS)
            | flag(a.temperature.is_some(), HAS_TEMPERATURE);
        let place = |slot: SlotId| {
            let kv = &self.plan.slots[slot.0];
            let entries = kv.entries_per_page(PAGE_TOKENS);
            let place = [self.values_at(slot), self.window_indices[slot.0], entries, kv.ratio];
            place.map(|x| x as u32)
        };
        let heads = [a.heads, a.kv_heads, a.key_dim, a.value_dim].map(|x| x as u32);
        let temperature =
            a.temperature.map_or([0, 1, 0], |t| [t.growth.to_bits(), t.length, t.offset]);
        let params = [
            heads.to_vec(),
            vec![a.scale.to_bits(), a.softcap.unwrap_or(0.0).to_bits()],
            vec![a.window.unwrap_or(0) as u32, flags],
            temperature.to_vec(),
            place(slot)[..3].to_vec(),
            blocks.map_or([0, 0, 0, 1], place).to_vec(),
            vec![selected.map_or(0, |value| self.plan.width(value)) as u32],
        ];
        let buffers = vec![
            self.value(q),
            BufferId::Kv(slot.0),
            blocks.map_or(BufferId::None, |slot| BufferId::Kv(slot.0)),
            selected.map_or(BufferId::None, |value| self.value(value)),
            super::vector(a.sinks),
            self.out(),
        ];
        let dtype = |slot: SlotId| self.kv_dtypes[slot.0];
        let kernel = Kernel::Attention(dtype(slot), dtype(blocks.unwrap_or(slot)));
        self.push(kernel, buffers, params.concat(), a.heads, Depth::Tokens);
    }
}
