//! Attention of the reference interpreter: keys and values in their pages, and the sums over them.

use bodkin_model::{Attention, SlotId};

use super::{ReferenceModel, dot};
use crate::KvType;
use crate::batch::{Batch, PAGE_TOKENS};

impl ReferenceModel {
    /// Puts the keys and values of a step into the pages of its sequences.
    pub(super) fn store(
        &mut self,
        slot: SlotId,
        a: &Attention,
        k: &[f32],
        v: &[f32],
        batch: &Batch,
    ) {
        let group = self.group(slot);
        let (k_width, v_width) = (a.kv_heads * a.key_dim, a.kv_heads * a.value_dim);
        let mut row = 0;
        for span in &batch.spans {
            for position in span.position..span.position + span.len {
                let at = cell(span.tables[group].page(position), position);
                let keys = &mut self.keys[slot.0][at * k_width..][..k_width];
                keys.copy_from_slice(&k[row * k_width..][..k_width]);
                let values = &mut self.values[slot.0][at * v_width..][..v_width];
                values.copy_from_slice(&v[row * v_width..][..v_width]);
                if self.kv_type == KvType::Q8_0 {
                    KvType::round_to_bytes(keys, a.key_dim);
                    KvType::round_to_bytes(values, a.value_dim);
                }
                row += 1;
            }
        }
    }

    /// Attends with `q` over what the slot holds of each sequence, `[rows, heads * value_dim]`.
    pub(super) fn attend(&self, slot: SlotId, a: &Attention, q: &[f32], batch: &Batch) -> Vec<f32> {
        let group = self.group(slot);
        let mut out = Vec::with_capacity(batch.tokens.len() * a.heads * a.value_dim);
        let mut rows = q.chunks_exact(a.heads * a.key_dim);
        for span in &batch.spans {
            let end = span.position + span.len;
            for position in span.position..end {
                let seen = match a.causal {
                    true => a.window.map_or(0, |w| (position + 1).saturating_sub(w))..position + 1,
                    false => 0..end,
                };
                let table = &span.tables[group];
                let cells: Vec<usize> = seen.map(|p| cell(table.page(p), p)).collect();
                let row = rows.next().expect("a row for each token");
                for (head, q) in row.chunks_exact(a.key_dim).enumerate() {
                    self.attend_head(slot, a, head, q, &cells, &mut out);
                }
            }
        }
        out
    }

    fn attend_head(
        &self,
        slot: SlotId,
        a: &Attention,
        head: usize,
        q: &[f32],
        cells: &[usize],
        out: &mut Vec<f32>,
    ) {
        let kv_head = head / (a.heads / a.kv_heads);
        let key = |at: usize| &self.keys[slot.0][(at * a.kv_heads + kv_head) * a.key_dim..];
        let value = |at: usize| &self.values[slot.0][(at * a.kv_heads + kv_head) * a.value_dim..];
        let score = |&at: &usize| {
            let score = dot(q, &key(at)[..a.key_dim]) * f64::from(a.scale);
            a.softcap.map_or(score, |cap| (score / f64::from(cap)).tanh() * f64::from(cap))
        };
        let scores: Vec<f64> = cells.iter().map(score).collect();
        let sink = a.sinks.map(|id| f64::from(self.weights[id.0][head]));
        let max = scores.iter().copied().chain(sink).fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = scores.iter().copied().chain(sink).map(|s| (s - max).exp()).sum();
        let mut head = vec![0.0f64; a.value_dim];
        for (score, &at) in scores.iter().zip(cells) {
            let p = (score - max).exp() / sum;
            head.iter_mut().zip(value(at)).for_each(|(h, &v)| *h += p * f64::from(v));
        }
        out.extend(head.iter().map(|&h| h as f32));
    }

    /// Which of the plan's windows a slot has.
    fn group(&self, slot: SlotId) -> usize {
        self.plan.slot_windows()[slot.0]
    }
}

/// The index of a position's keys and values within its slot.
fn cell(page: usize, position: usize) -> usize {
    page * PAGE_TOKENS + position % PAGE_TOKENS
}
