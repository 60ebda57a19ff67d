//! Attention of the reference interpreter: keys and values in their pages, and the sums over them.

use bodkin_model::Attention;

use super::rows::dot;
use crate::KvType;
use crate::batch::{Batch, PAGE_TOKENS};

/// The keys and values of one slot of the plan.
pub(super) struct KvSlot {
    /// Keys and values are rounded to bytes if these are; otherwise not at all.
    pub(super) kv_type: KvType,
    /// The index of the slot's window in the plan's.
    pub(super) window_index: usize,
    /// `[pages * PAGE_TOKENS, width]`.
    pub(super) keys: Vec<f32>,
    pub(super) values: Vec<f32>,
}

impl KvSlot {
    /// Puts the keys and values of a step into the pages of its sequences.
    pub(super) fn store(&mut self, a: &Attention, k: &[f32], v: &[f32], batch: &Batch) {
        let (k_width, v_width) = (a.kv_heads * a.key_dim, a.kv_heads * a.value_dim);
        let mut row = 0;
        for span in &batch.spans {
            for position in span.position..span.position + span.len {
                let at = cell(span.tables[self.window_index].page(position), position);
                let keys = &mut self.keys[at * k_width..][..k_width];
                keys.copy_from_slice(&k[row * k_width..][..k_width]);
                let values = &mut self.values[at * v_width..][..v_width];
                values.copy_from_slice(&v[row * v_width..][..v_width]);
                if self.kv_type == KvType::Q8_0 {
                    KvType::round_to_bytes(keys, a.key_dim);
                    KvType::round_to_bytes(values, a.value_dim);
                }
                row += 1;
            }
        }
    }

    /// Attends with `q` over what the slot holds of each sequence, `[rows, heads * value_dim]`. A
    /// head's sink is a score without a value.
    pub(super) fn attend(
        &self,
        a: &Attention,
        q: &[f32],
        sinks: Option<&[f32]>,
        batch: &Batch,
    ) -> Vec<f32> {
        let mut out = Vec::with_capacity(batch.tokens.len() * a.heads * a.value_dim);
        let mut rows = q.chunks_exact(a.heads * a.key_dim);
        for span in &batch.spans {
            let end = span.position + span.len;
            for position in span.position..end {
                let table = &span.tables[self.window_index];
                let seen = a.visible(position, end);
                let cells: Vec<usize> = seen.map(|p| cell(table.page(p), p)).collect();
                let row = rows.next().expect("a row for each token");
                let scale = a.scale * a.temperature.map_or(1.0, |t| t.at(position));
                let a = &Attention { scale, ..*a };
                for (head, q) in row.chunks_exact(a.key_dim).enumerate() {
                    let sink = sinks.map(|sinks| f64::from(sinks[head]));
                    self.attend_head(a, head, q, sink, &cells, &mut out);
                }
            }
        }
        out
    }

    fn attend_head(
        &self,
        a: &Attention,
        head: usize,
        q: &[f32],
        sink: Option<f64>,
        cells: &[usize],
        out: &mut Vec<f32>,
    ) {
        let kv_head = head / (a.heads / a.kv_heads);
        let key = |at: usize| &self.keys[(at * a.kv_heads + kv_head) * a.key_dim..];
        let value = |at: usize| &self.values[(at * a.kv_heads + kv_head) * a.value_dim..];
        let score = |&at: &usize| {
            let score = dot(q, &key(at)[..a.key_dim]) * f64::from(a.scale);
            a.softcap.map_or(score, |cap| (score / f64::from(cap)).tanh() * f64::from(cap))
        };
        let scores: Vec<f64> = cells.iter().map(score).collect();
        let max = scores.iter().copied().chain(sink).fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = scores.iter().copied().chain(sink).map(|s| (s - max).exp()).sum();
        let mut head = vec![0.0f64; a.value_dim];
        for (score, &at) in scores.iter().zip(cells) {
            let p = (score - max).exp() / sum;
            head.iter_mut().zip(value(at)).for_each(|(h, &v)| *h += p * f64::from(v));
        }
        out.extend(head.iter().map(|&h| h as f32));
    }
}

/// The index of a position's keys and values within its slot.
fn cell(page: usize, position: usize) -> usize {
    page * PAGE_TOKENS + position % PAGE_TOKENS
}
