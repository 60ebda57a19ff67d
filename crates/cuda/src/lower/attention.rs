//! Attention, and the rotations before it that run with it.

use bodkin_model::{Op, Plan};

use super::{Lowering, Rotation, Value, Work};
use crate::planes::CHUNK_COLS;

impl Lowering<'_> {
    /// The attention of operation `i` with queries, keys and values.
    pub(super) fn attend(
        &mut self,
        i: usize,
        [q, k, v]: [Value; 3],
        rotation: Option<Rotation>,
    ) -> Work {
        let Op::Attention { attention, slot, .. } = &self.plan.ops[i] else {
            unreachable!("called for attention");
        };
        let (attention, slot) = (*attention, slot.0);
        // Other rows would have to be padded.
        let (out, half_out) = match self.plan.widths[i].is_multiple_of(CHUNK_COLS) {
            true => self.outs(i, 1),
            false => (Some(self.out(i)), None),
        };
        Work::Attend { q, k, v, rotation, attention, slot, out, half_out }
    }

    /// Whether operations `i` and `i + 1` rotate the queries and keys of attention `i + 2` alike,
    /// and nobody else reads them.
    pub(super) fn is_rotation(&self, i: usize) -> bool {
        let Some([Op::Rope { rope, head_dim, .. }, second, third]) = self.plan.ops.get(i..i + 3)
        else {
            return false;
        };
        let Op::Rope { rope: other, head_dim: other_dim, .. } = second else { return false };
        let Op::Attention { q, k, .. } = third else { return false };
        self.fuse
            && (rope, head_dim) == (other, other_dim)
            && (q.0, k.0) == (i, i + 1)
            && [i, i + 1].iter().all(|&value| self.readers[value] == [i + 2])
    }

    /// Lowers two rotations and the attention after them.
    pub(super) fn rotated_attention(&mut self, i: usize) -> usize {
        let plan: &Plan = self.plan;
        let [Op::Rope { input: q, rope, .. }, Op::Rope { input: k, .. }, Op::Attention { v, .. }] =
            &plan.ops[i..i + 3]
        else {
            unreachable!("called for such operations");
        };
        let inputs = [q, k, v].map(|value| self.floats(*value));
        let (style, rope, q_out) = (rope.style, self.rope(rope), self.out(i));
        let work = self.attend(i + 2, inputs, Some(Rotation { q_out, style, rope }));
        self.push(i + 2, work, "attention");
        i + 3
    }
}
