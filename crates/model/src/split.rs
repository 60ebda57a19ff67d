//! Layer split: a plan in two parts for two devices, the operations before a layer and the rest,
//! whose input is the output of the first part.

use std::collections::HashMap;
use std::hash::Hash;

use crate::ids::{SlotId, StateId, Value, WeightId};
use crate::op::{Entries, Op};
use crate::plan::Plan;

impl Plan {
    /// The operations before those of layer `first`, and the rest. None if there is no such layer
    /// or no operation before it, if the rest reads more than one value of the first part, or if
    /// the two parts share a KV cache or recurrent state.
    pub fn split_before_layer(&self, first: usize) -> Option<[Plan; 2]> {
        let is_after =
            |op: &Op| op.weights().any(|id| self.weight(id).layer.is_some_and(|l| l >= first));
        let at = self.ops.iter().position(is_after).filter(|&at| at > 0)?;
        let mut crossing = self.ops[at..].iter().flat_map(Op::inputs).filter(|value| value.0 < at);
        if !crossing.all(|value| value.0 == at - 1) {
            return None;
        }
        let before = Part::of(self, &[], 0, &self.ops[..at]);
        let after = Part::of(self, &[Op::Input], at - 1, &self.ops[at..]);
        let shares_slots = before.slots.old.iter().any(|id| after.slots.old.contains(id));
        let shares_states = before.states.old.iter().any(|id| after.states.old.contains(id));
        (!shares_slots && !shares_states).then_some([before.plan, after.plan])
    }
}

/// New numbers, in order of first use.
struct Renumbering<T> {
    new: HashMap<T, usize>,
    old: Vec<T>,
}

impl<T: Copy + Eq + Hash> Renumbering<T> {
    fn new() -> Renumbering<T> {
        Renumbering { new: HashMap::new(), old: Vec::new() }
    }

    fn number(&mut self, old: T) -> usize {
        *self.new.entry(old).or_insert_with(|| {
            self.old.push(old);
            self.old.len() - 1
        })
    }
}

/// A part of a plan, and its slots and states in the whole plan.
pub(crate) struct Part {
    pub(crate) plan: Plan,
    slots: Renumbering<SlotId>,
    states: Renumbering<StateId>,
}

impl Part {
    /// The operations `start`, then `ops`. Value 0 of the part is value `shift` of the whole plan.
    pub(crate) fn of(whole: &Plan, start: &[Op], shift: usize, ops: &[Op]) -> Part {
        let mut weights = Renumbering::new();
        let (mut slots, mut states) = (Renumbering::new(), Renumbering::new());
        let mut renumbered = start.to_vec();
        for op in ops {
            let mut op = op.clone();
            let References { values, weights: used, slots: caches, state } = op.references();
            values.into_iter().for_each(|value| value.0 -= shift);
            used.into_iter().for_each(|id| *id = WeightId(weights.number(*id)));
            caches.into_iter().for_each(|id| *id = SlotId(slots.number(*id)));
            state.into_iter().for_each(|id| *id = StateId(states.number(*id)));
            renumbered.push(op);
        }
        let plan = Plan {
            architecture: whole.architecture.clone(),
            context_length: whole.context_length,
            vocabulary: whole.vocabulary,
            weights: weights.old.iter().map(|&id| whole.weight(id).clone()).collect(),
            slots: slots.old.iter().map(|id| whole.slots[id.0]).collect(),
            states: states.old.iter().map(|id| whole.states[id.0]).collect(),
            widths: whole.widths[shift..][..renumbered.len()].to_vec(),
            ops: renumbered,
        };
        Part { plan, slots, states }
    }
}

/// The numbers in an operation.
struct References<'a> {
    values: Vec<&'a mut Value>,
    weights: Vec<&'a mut WeightId>,
    slots: Vec<&'a mut SlotId>,
    state: Option<&'a mut StateId>,
}

impl Op {
    fn references(&mut self) -> References<'_> {
        let (mut slots, mut state) = (vec![], None);
        let (values, weights) = match self {
            Op::Input => (vec![], vec![]),
            Op::Embed { table, .. } => (vec![], vec![table]),
            Op::Norm { input, weight, bias, .. } => {
                (vec![input], weight.iter_mut().chain(bias).collect())
            }
            Op::Linear { input, weight, bias } | Op::Logits { input, weight, bias } => {
                (vec![input], [weight].into_iter().chain(bias).collect())
            }
            Op::ExpertLinear { input, route, weight, bias, .. } => {
                let values = [input].into_iter().chain(route).collect();
                (values, [weight].into_iter().chain(bias).collect())
            }
            Op::ScaleBy { input, weight } | Op::ScaleExperts { route: input, weight } => {
                (vec![input], vec![weight])
            }
            Op::Rope { input, rope, .. } => (vec![input], rope.factors.iter_mut().collect()),
            Op::Attention { q, kv, attention, slot: own } => {
                let (others, blocks) = references_of_entries(&mut attention.entries);
                slots.extend([own].into_iter().chain(blocks));
                let values = [q].into_iter().chain(kv.iter_mut().flatten()).chain(others);
                (values.collect(), attention.sinks.iter_mut().collect())
            }
            Op::Act { input, .. }
            | Op::Scale { input, .. }
            | Op::Cutoff { input, .. }
            | Op::Softcap { input, .. }
            | Op::Clamp { input, .. }
            | Op::Slice { input, .. }
            | Op::Pool { input, .. } => (vec![input], vec![]),
            Op::Glu { gate: a, up: b, .. }
            | Op::Add { a, b }
            | Op::Rescale { input: a, like: b }
            | Op::Concat { a, b, .. }
            | Op::Mix { input: a, weights: b, .. }
            | Op::ExpertSum { input: a, route: b } => (vec![a, b], vec![]),
            Op::HyperWeights { input, scale, base, .. } => (vec![input], vec![scale, base]),
            Op::Route { input, chosen, bias, .. } => {
                ([input].into_iter().chain(chosen).collect(), bias.iter_mut().collect())
            }
            Op::Compress { input, scores, state: own, .. } => {
                state = Some(own);
                (vec![input, scores], vec![])
            }
            Op::Select { q, k, weights, slot: own, .. } => {
                slots.push(own);
                (vec![q, k, weights], vec![])
            }
            Op::Conv { input, weight, bias, state: own } => {
                state = Some(own);
                (vec![input], [weight].into_iter().chain(bias).collect())
            }
            Op::Scan { x, b, c, dt, a, d, dt_bias, state: own, .. } => {
                state = Some(own);
                (vec![x, b, c, dt], vec![a, d, dt_bias])
            }
            Op::DeltaRule { qkv, decay, beta, a, dt_bias, state: own, .. } => {
                state = Some(own);
                (vec![qkv, decay, beta], vec![a, dt_bias])
            }
        };
        References { values, weights, slots, state }
    }
}

/// The values of what attention reads beside its own tokens, and its slot.
fn references_of_entries(entries: &mut Entries) -> (Vec<&mut Value>, Option<&mut SlotId>) {
    match entries {
        Entries::Tokens => (vec![], None),
        Entries::Selected(selected) => (vec![selected], None),
        Entries::TokensAndBlocks { blocks, slot, selected } => {
            ([blocks].into_iter().chain(selected).collect(), Some(slot))
        }
    }
}

#[cfg(test)]
mod tests {
    use bodkin_gguf::Format;

    use super::*;
    use crate::plan::Weight;

    /// Two layers of one product each; what the last one adds to is chosen.
    fn plan(added: Value) -> Plan {
        let weight = |name: &str| Weight {
            name: name.to_owned(),
            format: Format::F32,
            cols: 4,
            rows: 4,
            bytes: 64,
            layer: name.contains("blk.1.").then_some(1),
        };
        let linear = |input, weight| {
            let (input, weight) = (Value(input), WeightId(weight));
            Op::Linear { input, weight, bias: None }
        };
        let names = ["token_embd.weight", "blk.0.ffn_up.weight", "blk.1.ffn_up.weight"];
        Plan {
            architecture: "two".to_owned(),
            context_length: 8,
            vocabulary: 4,
            weights: names.map(weight).to_vec(),
            slots: Vec::new(),
            states: Vec::new(),
            ops: vec![
                Op::Embed { table: WeightId(0), by: crate::EmbedBy::Token },
                linear(0, 1),
                Op::Add { a: Value(0), b: Value(1) },
                linear(2, 2),
                Op::Add { a: added, b: Value(3) },
                Op::Logits { input: Value(4), weight: WeightId(0), bias: None },
            ],
            widths: vec![4; 6],
        }
    }

    #[test]
    fn parts_have_what_they_use() {
        let whole = plan(Value(2));
        assert_eq!(whole.layers(), 2);
        let [first, second] = whole.split_before_layer(1).unwrap();
        assert_eq!(first.ops, whole.ops[..3]);
        let names = |plan: &Plan| plan.weights.iter().map(|w| w.name.clone()).collect::<Vec<_>>();
        assert_eq!(names(&first), ["token_embd.weight", "blk.0.ffn_up.weight"]);
        assert_eq!(names(&second), ["blk.1.ffn_up.weight", "token_embd.weight"]);
        let text = "plan two vocabulary 4 context 8\n%0 [4] = input\n";
        assert!(second.to_string().starts_with(text), "{second}");
        assert_eq!(second.ops[2], Op::Add { a: Value(0), b: Value(1) });
        assert_eq!((second.ops.len(), second.widths.len()), (4, 4));
    }

    #[test]
    fn more_than_one_value_is_not_cut() {
        assert_eq!(plan(Value(0)).split_before_layer(1), None);
        assert_eq!(plan(Value(2)).split_before_layer(2), None);
    }
}
