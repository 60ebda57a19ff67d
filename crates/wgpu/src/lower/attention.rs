//! Attention and the selection of entries: keys and values are stored first.

use bodkin_backend::{Limits, PAGE_TOKENS, Result};
use bodkin_model::{Attention, Entries, Op, Plan, Rope, RopeStyle, SlotId, Value, WeightId};

use super::stages::{MAX_HEAD_DIM, Stage};
use super::{Lowering, at_most};
use crate::program::{BufferId, Depth, Kernel, KvDtype, List};

/// The widest head of the kernel for halves.
const MAX_F16_DIM: usize = 256;
/// Rows of a workgroup of the kernel with cooperative matrices.
const TILE_ROWS: usize = 64;
/// The most splits of a decode row, and the most elements of all.
const MAX_SPLITS: usize = 16;
const MAX_SPLIT_ELEMENTS: usize = 16 << 20;

/// The flags of `attention.wgsl`.
const CAUSAL: u32 = 1;
const CHUNKED: u32 = 2;
const HAS_SINKS: u32 = 4;
const SELECTS: u32 = 8;
const HAS_BLOCKS: u32 = 16;
const HAS_TEMPERATURE: u32 = 32;

/// What goes into the cache of a KV slot.
struct Stored {
    k: Value,
    v: Option<Value>,
    slot: SlotId,
    rotation: Option<Rotation>,
}

/// How queries and keys are made before that.
#[derive(Clone, Copy)]
struct Rotation {
    from_q: Value,
    to_q: Value,
    /// Heads of queries.
    heads: usize,
    rope: Rope,
    /// The weight and epsilon of the norms of queries and keys.
    norms: Option<[(WeightId, f32); 2]>,
}

impl Lowering<'_> {
    pub(super) fn attention(&mut self) -> Result<()> {
        match self.plan.ops[self.op] {
            Op::Attention { q, kv, ref attention, slot } => {
                at_most("key heads of width", attention.key_dim, MAX_HEAD_DIM)?;
                at_most("value heads of width", attention.value_dim, MAX_HEAD_DIM)?;
                if let Some([k, v]) = kv {
                    self.store(&Stored { k, v: Some(v), slot, rotation: None })?;
                }
                if let Entries::TokensAndBlocks { blocks, slot, .. } = attention.entries {
                    self.store(&Stored { k: blocks, v: Some(blocks), slot, rotation: None })?;
                }
                self.attend(q, attention, slot);
            }
            Op::Select { q, k, weights, indexer, slot } => {
                self.store(&Stored { k, v: None, slot, rotation: None })?;
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

    /// An attention, and the operations before it that make its queries and keys.
    pub(super) fn rotated_attention(&mut self, stage: &Stage) -> Result<()> {
        let Op::Attention { q, kv: Some([k, v]), ref attention, slot } = self.plan.ops[self.op]
        else {
            unreachable!("{stage:?} ends with an attention")
        };
        let rotated = |value: Value| match self.plan.ops[value.0] {
            Op::Rope { input, rope, .. } => (input, rope),
            ref op => unreachable!("{op:?} does not rotate"),
        };
        let ((from_q, rope), (from_k, _)) = (rotated(q), rotated(k));
        let norm = |value: Value| match self.plan.ops[value.0] {
            Op::Norm { input, weight: Some(weight), eps, .. } if stage.ops.contains(&value.0) => {
                (input, Some((weight, eps)))
            }
            _ => (value, None),
        };
        let ((from_q, q_norm), (from_k, k_norm)) = (norm(from_q), norm(from_k));
        let norms = q_norm.zip(k_norm).map(|(q, k)| [q, k]);
        let rotation = Some(Rotation { from_q, to_q: q, heads: attention.heads, rope, norms });
        self.store(&Stored { k: from_k, v: Some(v), slot, rotation })?;
        self.attend(q, attention, slot);
        Ok(())
    }

    /// Stores the keys and values of the step.
    fn store(&mut self, stored: &Stored) -> Result<()> {
        let &Stored { k, v, slot, rotation } = stored;
        let (kv, dtype) = (self.plan.slots[slot.0], self.kv_dtypes[slot.0]);
        at_most("keys of width", kv.key_dim, MAX_HEAD_DIM)?;
        at_most("values of width", kv.value_dim, MAX_HEAD_DIM)?;
        let value_dim = v.map_or(0, |_| kv.value_dim);
        let heads = rotation.map_or(0, |rotation| rotation.heads);
        let numbers = [
            heads,
            kv.kv_heads,
            kv.key_dim,
            value_dim,
            dtype.head_words(kv.key_dim),
            dtype.head_words(kv.value_dim),
            self.values_at(slot),
            kv.ratio,
            kv.entries_per_page(PAGE_TOKENS),
            self.window_indices[slot.0],
        ];
        let mut params = numbers.map(|x| x as u32).to_vec();
        let [mut q, mut angles, mut norms] = [const { BufferId::None }; 3];
        let mut to_q = BufferId::NoResult;
        match rotation {
            Some(Rotation { from_q, to_q: to, rope, norms: weights, .. }) => {
                (q, to_q) = (self.value(from_q), self.value(to));
                angles = BufferId::Angles(self.rope_index(&rope));
                let is_norm = rope.style == RopeStyle::Norm;
                params.extend([(rope.dims / 2) as u32, u32::from(is_norm)]);
                params.push(u32::from(weights.is_some()));
                if let Some(weights) = weights {
                    norms = BufferId::Concatenated(weights.map(|(weight, _)| weight).to_vec());
                    params.extend(weights.map(|(_, eps)| eps.to_bits()));
                }
            }
            None => params.extend([0; 3]),
        }
        let v = v.map_or(BufferId::None, |v| self.value(v));
        let buffers = vec![q, self.value(k), v, angles, norms, to_q, BufferId::Kv(slot.0)];
        let groups = heads + kv.kv_heads * (1 + usize::from(value_dim > 0));
        self.push(Kernel::Store(dtype), buffers, params, groups, Depth::Tokens);
        Ok(())
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
        let params = params.concat();
        let splits = splits(a, self.kv_dtypes[slot.0], self.limits);
        if let Some(splits) = splits {
            return self.attend_f16(q, a, slot, &params, splits);
        }
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
        self.push(kernel, buffers, params, a.heads, Depth::Tokens);
    }

    /// Attention to halves: rows of prompts in one go, with cooperative matrices in tiles, decode
    /// rows in splits that are combined.
    fn attend_f16(&mut self, q: Value, a: &Attention, slot: SlotId, params: &[u32], splits: usize) {
        let (q, sinks) = (self.value(q), super::vector(a.sinks));
        let kv = BufferId::Kv(slot.0);
        for (list, splits) in [(List::Decode, splits), (List::Prefill, 1)] {
            let is_tiled = [a.key_dim, a.value_dim].iter().all(|dim| dim.is_multiple_of(32));
            if list == List::Prefill && is_tiled && self.arithmetic.is_cooperative {
                let [key_blocks, value_blocks] = [a.key_dim, a.value_dim].map(|dim| dim / 16);
                let kernel = Kernel::AttentionCooperative { key_blocks, value_blocks };
                let params = [params, &[list as u32]].concat();
                let buffers = vec![q.clone(), kv.clone(), sinks.clone(), self.out()];
                self.push(kernel, buffers, params, a.heads, Depth::List(list, TILE_ROWS));
                continue;
            }
            let depth = Depth::List(list, 1);
            let params = [params, &[list as u32, splits as u32]].concat();
            let out = if splits > 1 { BufferId::Splits } else { self.out() };
            let buffers = vec![q.clone(), kv.clone(), sinks.clone(), out];
            self.push(Kernel::AttentionF16, buffers, params.clone(), a.heads * splits, depth);
            if splits > 1 {
                let buffers = vec![BufferId::Splits, sinks.clone(), self.out()];
                self.push(Kernel::CombineSplits, buffers, params, a.heads, depth);
            }
        }
    }
}

/// The splits of decode rows, if the kernel for halves takes an attention.
fn splits(a: &Attention, dtype: KvDtype, limits: &Limits) -> Option<usize> {
    let fits = |dim: usize| dim.is_multiple_of(8) && dim <= MAX_F16_DIM;
    let is_plain = a.entries == Entries::Tokens && dtype == KvDtype::F16;
    let elements = split_elements(a, limits).max(1);
    (is_plain && fits(a.key_dim) && fits(a.value_dim))
        .then(|| (MAX_SPLIT_ELEMENTS / elements).clamp(1, MAX_SPLITS))
}

/// Elements of one split of all rows and heads: the result, its maximum and its sum.
fn split_elements(a: &Attention, limits: &Limits) -> usize {
    limits.tokens * a.heads * (a.value_dim + 2)
}

/// Elements of the splits of any attention.
pub(crate) fn all_split_elements(plan: &Plan, limits: &Limits, kv_dtypes: &[KvDtype]) -> usize {
    let elements = |op: &Op| match op {
        Op::Attention { attention: a, slot, .. } => {
            let splits = splits(a, kv_dtypes[slot.0], limits).filter(|&splits| splits > 1);
            splits.map_or(0, |splits| splits * split_elements(a, limits))
        }
        _ => 0,
    };
    plan.ops.iter().map(elements).max().unwrap_or(0)
}
