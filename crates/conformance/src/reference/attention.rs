//! Attention of the reference interpreter: keys and values in their pages, and the sums over them.

use bodkin_backend::{Batch, KvType, PAGE_TOKENS, Span};
use bodkin_gguf::Format;
use bodkin_model::{Attention, Entries};

use super::rows::dot;

/// The keys and values of one slot of the plan.
pub(super) struct KvSlot {
    pub(super) slot: bodkin_model::KvSlot,
    /// Keys and values are rounded to bytes if these are; otherwise not at all.
    pub(super) kv_type: KvType,
    /// The index of the slot's window in the plan's.
    pub(super) window_index: usize,
    /// `[pages * entries of a page, kv_heads * key_dim]`.
    pub(super) keys: Vec<f32>,
    /// `[pages * entries of a page, kv_heads * value_dim]`.
    pub(super) values: Vec<f32>,
}

impl KvSlot {
    /// Puts the keys and values of a step into the pages of its sequences.
    pub(super) fn store(&mut self, k: &[f32], v: &[f32], batch: &Batch) {
        let s = self.slot;
        let (k_width, v_width) = (s.kv_heads * s.key_dim, s.kv_heads * s.value_dim);
        let mut row = 0;
        for span in &batch.spans {
            for position in span.position..span.position + span.len {
                if let Some(entry) = s.entry_ending_at(position) {
                    let at = self.cell(span, entry);
                    let keys = &mut self.keys[at * k_width..][..k_width];
                    keys.copy_from_slice(&k[row * k_width..][..k_width]);
                    let values = &mut self.values[at * v_width..][..v_width];
                    values.copy_from_slice(&v[row * v_width..][..v_width]);
                    // Keys of an indexer, which have no values, are not rounded.
                    if self.kv_type == KvType::Q8_0 && s.value_dim > 0 {
                        round_to_bytes(keys, s.key_dim);
                        round_to_bytes(values, s.value_dim);
                    }
                }
                row += 1;
            }
        }
    }

    /// The index of an entry's keys and values.
    fn cell(&self, span: &Span, entry: usize) -> usize {
        let (position, place) = self.slot.place(entry, PAGE_TOKENS);
        let page = span.tables[self.window_index].page(position);
        page * self.slot.entries_per_page(PAGE_TOKENS) + place
    }

    /// The key of an entry.
    pub(super) fn key(&self, span: &Span, entry: usize, kv_head: usize) -> &[f32] {
        let s = self.slot;
        &self.keys[(self.cell(span, entry) * s.kv_heads + kv_head) * s.key_dim..][..s.key_dim]
    }

    /// The value of an entry.
    fn value(&self, span: &Span, entry: usize, kv_head: usize) -> &[f32] {
        let s = self.slot;
        &self.values[(self.cell(span, entry) * s.kv_heads + kv_head) * s.value_dim..][..s.value_dim]
    }
}

/// One attention operation without its queries.
pub(super) struct AttentionRows<'a> {
    pub(super) attention: &'a Attention,
    /// The slot of keys and values.
    pub(super) own: usize,
    /// The selected entries of each row.
    pub(super) selected: Option<&'a [f32]>,
    /// The sinks of all heads.
    pub(super) sinks: Option<&'a [f32]>,
}

impl AttentionRows<'_> {
    /// Attends with `q` over what the slots hold of each sequence, `[rows, heads * value_dim]`. A
    /// head's sink is a score without a value.
    pub(super) fn attend(&self, slots: &[KvSlot], q: &[f32], batch: &Batch) -> Vec<f32> {
        let a = self.attention;
        let mut out = Vec::with_capacity(batch.tokens.len() * a.heads * a.value_dim);
        let selected_width = self.selected.map_or(0, |s| s.len() / batch.tokens.len());
        let mut row = 0;
        for span in &batch.spans {
            let end = span.position + span.len;
            for position in span.position..end {
                let selected = self.selected.map(|s| &s[row * selected_width..][..selected_width]);
                let entries = self.entries(slots, position, end, selected);
                let q = &q[row * a.heads * a.key_dim..][..a.heads * a.key_dim];
                for (head, q) in q.chunks_exact(a.key_dim).enumerate() {
                    self.attend_head((head, position), q, span, &entries, &mut out);
                }
                row += 1;
            }
        }
        out
    }

    /// The entries that the token at `position` attends to: slots and numbers of entries.
    fn entries<'s>(
        &self,
        slots: &'s [KvSlot],
        position: usize,
        end: usize,
        selected: Option<&[f32]>,
    ) -> Vec<(&'s KvSlot, usize)> {
        let a = self.attention;
        let own = &slots[self.own];
        let tokens = a.visible(position, end);
        let chosen = |all: std::ops::Range<usize>| match selected {
            Some(selected) => numbers(selected).filter(|n| all.contains(n)).collect(),
            None => all.collect::<Vec<usize>>(),
        };
        match a.entries {
            Entries::Tokens | Entries::Selected(_) => {
                chosen(tokens).into_iter().map(|entry| (own, entry)).collect()
            }
            Entries::TokensAndBlocks { slot, .. } => {
                let blocks = &slots[slot.0];
                let complete = chosen(0..blocks.slot.entries(position + 1));
                let tokens = tokens.map(|entry| (own, entry));
                tokens.chain(complete.into_iter().map(|entry| (blocks, entry))).collect()
            }
        }
    }

    fn attend_head(
        &self,
        (head, position): (usize, usize),
        q: &[f32],
        span: &Span,
        entries: &[(&KvSlot, usize)],
        out: &mut Vec<f32>,
    ) {
        let a = self.attention;
        let sink = self.sinks.map(|sinks| f64::from(sinks[head]));
        let scale = a.scale * a.temperature.map_or(1.0, |t| t.at(position));
        let kv_head = head / (a.heads / a.kv_heads);
        let score = |&(slot, entry): &(&KvSlot, usize)| {
            let score = dot(q, slot.key(span, entry, kv_head)) * f64::from(scale);
            a.softcap.map_or(score, |cap| (score / f64::from(cap)).tanh() * f64::from(cap))
        };
        let scores: Vec<f64> = entries.iter().map(score).collect();
        let max = scores.iter().copied().chain(sink).fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = scores.iter().copied().chain(sink).map(|s| (s - max).exp()).sum();
        let mut head = vec![0.0f64; a.value_dim];
        for (score, (slot, entry)) in scores.iter().zip(entries) {
            let p = (score - max).exp() / sum;
            let value = slot.value(span, *entry, kv_head);
            head.iter_mut().zip(value).for_each(|(h, &v)| *h += p * f64::from(v));
        }
        out.extend(head.iter().map(|&h| h as f32));
    }
}

/// The numbers of the entries in a row that an indexer has selected.
fn numbers(row: &[f32]) -> impl Iterator<Item = usize> {
    row.iter().take_while(|&&number| number >= 0.0).map(|&number| number as usize)
}

/// Rounds keys or values, `[heads, dim]`, as a cache of type `Q8_0` does.
fn round_to_bytes(heads: &mut [f32], dim: usize) {
    let format = Format::Q8_0;
    for head in heads.chunks_exact_mut(dim) {
        for part in head.chunks_mut(KvType::BLOCK) {
            let mut block = [0.0; KvType::BLOCK];
            block[..part.len()].copy_from_slice(part);
            let bytes = format.encode(&block, KvType::BLOCK).expect("a format with a quantiser");
            format.dequantize(&bytes, &mut block);
            part.copy_from_slice(&block[..part.len()]);
        }
    }
}
