//! What a plan costs: sums over its operations. The memory planner, the progress bar, the
//! roofline of `bench` and `inspect --memory` all use these numbers and no others.

use crate::op::Op;
use crate::plan::{Plan, Rows, Value};

/// Bytes and operations of a plan.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cost {
    /// All weights that the plan names, in the file's formats.
    pub weight_bytes: u64,
    /// The number of weights.
    pub parameters: u64,
    /// Weight bytes that one decode step reads: of a table only a row, unless it is also the head;
    /// of experts only the share of those that are chosen.
    pub step_weight_bytes: u64,
    /// Multiplications and additions of the products with weights, for one token with logits.
    pub flops_per_token: u64,
}

impl Plan {
    /// The sums over the plan.
    pub fn cost(&self) -> Cost {
        let mut cost = Cost {
            weight_bytes: self.weights.iter().map(|w| w.bytes).sum(),
            parameters: self.weights.iter().map(|w| w.cols as u64 * w.rows as u64).sum(),
            step_weight_bytes: 0,
            flops_per_token: 0,
        };
        // Of each weight the most that one operation reads: what is read twice comes once.
        let mut read = vec![0; self.weights.len()];
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
                    }
                    _ => read[id.0] = bytes,
                }
            }
            if let Op::Linear { weight, .. }
            | Op::Logits { weight, .. }
            | Op::ExpertLinear { weight, .. }
            | Op::Conv { weight, .. } = op
            {
                // Every element of the result is the sum of so many products.
                cost.flops_per_token +=
                    2 * self.weight(*weight).cols as u64 * self.widths[i] as u64;
            }
        }
        cost.step_weight_bytes += read.iter().sum::<u64>();
        cost
    }

    /// Elements of keys and values that a sequence of `tokens` tokens holds, and that the next
    /// token reads: slots with a window hold no more than that.
    pub fn kv_elements(&self, tokens: usize) -> u64 {
        let held = |window: Option<usize>| window.map_or(tokens, |w| w.min(tokens)) as u64;
        let slots = self.slots.iter();
        slots.map(|s| (s.elements_per_token() as u64).saturating_mul(held(s.window))).sum()
    }

    /// Elements of recurrent state that a sequence of any length holds, and that every token reads
    /// and writes.
    pub fn state_elements(&self) -> u64 {
        self.states.iter().map(|s| s.elements() as u64).sum()
    }
}

/// Which buffer each value lives in: values whose lifetimes do not meet share one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Buffers {
    /// The buffer of each value. The output has none, nor has what comes after logits: they live,
    /// one in the place of the other, where the caller wants the logits.
    pub of_value: Vec<Option<usize>>,
    /// The widest value of each buffer, in elements.
    pub widths: Vec<usize>,
}

impl Buffers {
    /// Bytes of all buffers for a step of so many tokens.
    pub fn bytes(&self, tokens: usize) -> u64 {
        4 * self.widths.iter().sum::<usize>() as u64 * tokens as u64
    }
}

impl Plan {
    /// The last operation that reads each value; the output is read after all of them.
    pub fn last_uses(&self) -> Vec<usize> {
        let mut last: Vec<usize> = (0..self.ops.len()).collect();
        for (i, op) in self.ops.iter().enumerate() {
            op.inputs().for_each(|value| last[value.0] = i);
        }
        last[self.output().0] = self.ops.len();
        last
    }

    /// Assigns buffers, best fit. An operation never writes a buffer that it reads, but for those
    /// that turn a value into another element by element (see [`Op::in_place_input`]): they work in place
    /// where that is the last use of the value.
    pub fn buffers(&self) -> Buffers {
        let last = self.last_uses();
        let mut buffers = Buffers { of_value: Vec::new(), widths: Vec::new() };
        let mut busy_until: Vec<usize> = Vec::new();
        for (i, &width) in self.widths.iter().enumerate() {
            if self.rows(Value(i)) == Rows::Outputs || i == self.output().0 {
                buffers.of_value.push(None);
                continue;
            }
            let updated = self.ops[i].in_place_input().filter(|value| last[value.0] == i);
            let updated = updated.filter(|value| self.widths[value.0] == width);
            let free = updated.and_then(|value| buffers.of_value[value.0]).or_else(|| {
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
