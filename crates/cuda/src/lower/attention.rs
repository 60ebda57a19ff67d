//! Attention, and the rotations before it that run with it.

use bodkin_model::{Attention, Entries, Op, Rope, Value as PlanValue};

use super::lowering::Lowering;
use super::stage::{Attend, Rotation, Value, Work};

/// Attention whose queries and keys are rotated alike.
pub(super) struct Rotated<'a> {
    rope: &'a Rope,
    head_dim: usize,
    /// Queries and keys before the rotation, and values.
    inputs: [PlanValue; 3],
    /// Whether the keys and values are an earlier layer's.
    shares_kv: bool,
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
        Attend { q, kv, shares_kv: false, rotation, attention, slot, out, half_out }
    }

    /// The attention behind the rotations from operation `i` on, if they rotate its queries and
    /// keys alike, and no other operation reads them.
    pub(super) fn rotated(&self, i: usize) -> Option<Rotated<'a>> {
        self.rotated_with_own(i).or_else(|| self.rotated_with_shared(i))
    }

    /// Attention `i + 1`, if operation `i` rotates its queries as the keys are rotated, which are
    /// an earlier layer's.
    fn rotated_with_shared(&self, i: usize) -> Option<Rotated<'a>> {
        let [first, second] = self.plan.ops.get(i..i + 2)? else { return None };
        let Op::Rope { input: q_input, rope, head_dim, .. } = first else { return None };
        let Op::Attention { q, kv: None, attention, slot } = second else { return None };
        let own = |op: &Op| matches!(op, Op::Attention { kv: Some(_), slot: s, .. } if s == slot);
        let owner =
            self.rotated_with_own(self.plan.ops[..i].iter().rposition(own)?.checked_sub(2)?)?;
        let is_alike = (rope, *head_dim, q.0) == (owner.rope, owner.head_dim, i);
        let is_alike = is_alike && attention.entries == Entries::Tokens;
        let inputs = [*q_input, owner.inputs[1], owner.inputs[2]];
        let rotated = Rotated { inputs, shares_kv: true, attention: *attention, ..owner };
        (is_alike && self.readers.is_only_read_by(i, i + 1)).then_some(rotated)
    }

    /// Attention `i + 2`, if operations `i` and `i + 1` rotate its queries and keys.
    fn rotated_with_own(&self, i: usize) -> Option<Rotated<'a>> {
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
        let (head_dim, shares_kv) = (*head_dim, false);
        let rotated =
            Rotated { rope, head_dim, inputs, shares_kv, attention: *attention, slot: slot.0 };
        (self.fuse && is_alike && is_alone).then_some(rotated)
    }

    /// Lowers rotations and the attention after them.
    pub(super) fn rotated_attention(&mut self, i: usize, rotated: Rotated<'_>) -> usize {
        let Rotated { rope, inputs, shares_kv, attention, slot, .. } = rotated;
        let [q, k, v] = inputs.map(|value| self.floats(value));
        let (style, rope, q_out) = (rope.style, self.rope(rope), self.out(i));
        let rotation = Some(Rotation { q_out, style, rope });
        let last = i + if shares_kv { 1 } else { 2 };
        let attend = self.attend(last, (q, Some([k, v])), rotation, (attention, slot));
        self.push(last, Work::Attend(Attend { shares_kv, ..attend }), "attention");
        last + 1
    }
}
