//! Attention, and the rotations before it that run with it.

use bodkin_model::{Attention, Entries, Op, Rope, Value as PlanValue};

use super::lowering::Lowering;
use super::stage::{Attend, Rotation, Value, Work};

/// Attention whose queries and keys are rotated alike.
pub(super) struct Rotated<'a> {
    rope: &'a Rope,
    /// Queries and keys before the rotation, and values.
    inputs: [PlanValue; 3],
    attention: Attention,
    slot: usize,
}

impl<'a> Lowering<'a> {
    /// The attention of operation `i` with queries, keys and values.
    pub(super) fn attend(
        &mut self,
        i: usize,
        (q, kv): (Value, Option<[Value; 2]>),
        rotation: Option<Rotation>,
        (attention, slot): (Attention, usize),
    ) -> Attend {
        // Kernels store halves in pairs.
        let (out, half_out) = match attention.value_dim.is_multiple_of(2) {
            true => self.outs_of_whole_chunks(i),
            false => (Some(self.out(i)), None),
        };
        Attend { q, kv, rotation, attention, slot, out, half_out }
    }

    /// Attention `i + 2`, if operations `i` and `i + 1` rotate its queries and keys alike, and no
    /// other operation reads them.
    pub(super) fn rotated(&self, i: usize) -> Option<Rotated<'a>> {
        let [first, second, third] = self.plan.ops.get(i..i + 3)? else { return None };
        let Op::Rope { input: q_input, rope, head_dim, .. } = first else { return None };
        let Op::Rope { input: k_input, rope: other, head_dim: other_dim, .. } = second else {
            return None;
        };
        let Op::Attention { q, kv: Some([k, v]), attention, slot } = third else { return None };
        let is_alike = (rope, head_dim) == (other, other_dim) && (q.0, k.0) == (i, i + 1);
        let is_alike = is_alike && attention.entries == Entries::Tokens;
        let is_alone = [i, i + 1].iter().all(|&value| self.readers.is_only_read_by(value, i + 2));
        let inputs = [*q_input, *k_input, *v];
        let rotated = Rotated { rope, inputs, attention: *attention, slot: slot.0 };
        (self.fuse && is_alike && is_alone).then_some(rotated)
    }

    /// Lowers two rotations and the attention after them.
    pub(super) fn rotated_attention(&mut self, i: usize, rotated: Rotated<'_>) -> usize {
        let Rotated { rope, inputs, attention, slot } = rotated;
        let [q, k, v] = inputs.map(|value| self.floats(value));
        let (style, rope, q_out) = (rope.style, self.rope(rope), self.out(i));
        let rotation = Some(Rotation { q_out, style, rope });
        let attend = self.attend(i + 2, (q, Some([k, v])), rotation, (attention, slot));
        self.push(i + 2, Work::Attend(attend), "attention");
        i + 3
    }
}
