//! The cost of a plan: sums over its operations. The memory planner, the progress bar, the roofline
//! of `bench` and `inspect --memory` use only these numbers.

use crate::ids::Value;
use crate::op::Op;
use crate::plan::{KvSlot, Plan, Rows};

/// Bytes and operations of a plan.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cost {
    /// All weights of the plan, in the file's formats.
    pub weight_bytes: u64,
    /// The number of weights.
    pub parameters: u64,
    /// Weight bytes that one decode step of one sequence reads: one row of an embedding table,
    /// unless it is also the output head, and the selected experts only.
    pub step_weight_bytes: u64,
    /// Those of them that are experts that the token has chosen.
    pub step_expert_bytes: u64,
    /// Multiplications and additions of all matmuls with weights, for one token with logits.
    pub flops_per_token: u64,
}

impl Plan {
    /// The sums over the plan.
    pub fn cost(&self) -> Cost {
        let mut cost = Cost {
            weight_bytes: self.weights.iter().map(|w| w.bytes).sum(),
            parameters: self.weights.iter().map(|w| w.cols as u64 * w.rows as u64).sum(),
            step_weight_bytes: 0,
            step_expert_bytes: 0,
            flops_per_token: 0,
        };
        // A weight that several operations read is counted once.
        let mut read = vec![0; self.weights.len()];
        let mut are_chosen = vec![false; self.weights.len()];
        for (i, op) in self.ops.iter().enumerate() {
            for id in op.weights() {
                let bytes = self.weight(id).bytes;
                match op {
                    Op::Embed { table, .. } => {
                        cost.step_weight_bytes += bytes / self.weight(*table).rows as u64;
                    }
                    Op::ExpertLinear { route: Some(route), experts, .. } => {
                        let used = self.width(*route) as u64 / 2;
                        read[id.0] = bytes / *experts as u64 * used;
                        are_chosen[id.0] = true;
                    }
                    _ => read[id.0] = bytes,
                }
            }
            if let Op::Linear { weight, .. }
            | Op::Logits { weight, .. }
            | Op::ExpertLinear { weight, .. }
            | Op::Conv { weight, .. } = op
            {
                // One multiplication and one addition for each column of each output element.
                cost.flops_per_token +=
                    2 * self.weight(*weight).cols as u64 * self.widths[i] as u64;
            }
        }
        cost.step_weight_bytes += read.iter().sum::<u64>();
        let chosen = read.iter().zip(are_chosen).filter(|(_, is_chosen)| *is_chosen);
        cost.step_expert_bytes = chosen.map(|(bytes, _)| bytes).sum();
        cost
    }

    /// KV cache elements of a sequence of `tokens` tokens, which the next token reads. Slots with a
    /// window cache at most the window.
    pub fn kv_elements(&self, tokens: usize) -> u64 {
        let cached = |window: Option<usize>| window.map_or(tokens, |w| w.min(tokens)) as u64;
        let slots = self.slots.iter();
        let elements = |s: &KvSlot| {
            (s.entry_elements() as u64).saturating_mul(cached(s.window) / s.ratio as u64)
        };
        slots.map(elements).sum()
    }

    /// Elements of recurrent state of a sequence of any length, which every token reads and writes.
    pub fn state_elements(&self) -> u64 {
        self.states.iter().map(|s| s.elements() as u64).sum()
    }
}

/// The buffer of each value: values with disjoint lifetimes share one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Buffers {
    /// The buffer of each value. Values with output rows have none: they share the caller's memory
    /// for logits.
    pub of_value: Vec<Option<usize>>,
    /// The widest value of each buffer, in elements.
    pub widths: Vec<usize>,
}

impl Buffers {
    /// Bytes of all buffers for a step of `tokens` tokens.
    pub fn bytes(&self, tokens: usize) -> u64 {
        4 * self.widths.iter().sum::<usize>() as u64 * tokens as u64
    }
}

impl Plan {
    /// The last operation that reads each value; the output is read after all operations.
    pub fn last_uses(&self) -> Vec<usize> {
        let mut last: Vec<usize> = (0..self.ops.len()).collect();
        for (i, op) in self.ops.iter().enumerate() {
            op.inputs().for_each(|value| last[value.0] = i);
        }
        last[self.output().0] = self.ops.len();
        last
    }

    /// Assigns buffers, best fit. An operation never writes a buffer that it reads, except for an
    /// elementwise operation (see [`Op::in_place_input`]) that is the last use of its input.
    pub fn buffers(&self) -> Buffers {
        let last = self.last_uses();
        let mut buffers = Buffers { of_value: Vec::new(), widths: Vec::new() };
        let mut busy_until: Vec<usize> = Vec::new();
        for (i, &width) in self.widths.iter().enumerate() {
            if self.rows(Value(i)) == Rows::Outputs || i == self.output().0 {
                buffers.of_value.push(None);
                continue;
            }
            let in_place = self.ops[i].in_place_input().filter(|value| last[value.0] == i);
            let in_place = in_place.filter(|value| self.widths[value.0] == width);
            let free = in_place.and_then(|value| buffers.of_value[value.0]).or_else(|| {
                let free = (0..busy_until.len()).filter(|&b| busy_until[b] < i);
                free.min_by_key(|&b| buffers.widths[b].abs_diff(width))
            });
            let b = free.unwrap_or_else(|| {
                busy_until.push(0);
                buffers.widths.push(0);
                busy_until.len() - 1
            });
            busy_until[b] = last[i];
            buffers.widths[b] = buffers.widths[b].max(width);
            buffers.of_value.push(Some(b));
        }
        buffers
    }
}
