//! What observers see: the inputs of matmuls, read back before each of them.

use bodkin_backend::{Batch, InputRow, Matmul, Observer};
use bodkin_model::{Op, Plan, Value, WeightId};

/// A matmul of the plan.
pub(crate) struct Observed {
    pub(crate) input: Value,
    pub(crate) route: Option<Value>,
    weight: WeightId,
    experts: usize,
    is_head: bool,
}

impl Observed {
    /// All matmuls, by the number of their operation.
    pub(crate) fn all(plan: &Plan) -> Vec<(usize, Observed)> {
        let matmul = |op: &Op| match *op {
            Op::Linear { input, weight, .. } => {
                Some(Observed { input, route: None, weight, experts: 1, is_head: false })
            }
            Op::Logits { input, weight, .. } => {
                Some(Observed { input, route: None, weight, experts: 1, is_head: true })
            }
            Op::ExpertLinear { input, route, weight, experts, .. } => {
                Some(Observed { input, route, weight, experts, is_head: false })
            }
            _ => None,
        };
        let ops = plan.ops.iter().enumerate();
        ops.filter_map(|(i, op)| matmul(op).map(|observed| (i, observed))).collect()
    }

    /// Shows the matmul; `input` and `route` have a row for each token.
    pub(crate) fn show(
        &self,
        plan: &Plan,
        batch: &Batch,
        input: &[f32],
        route: Option<&[f32]>,
        observer: &mut dyn Observer,
    ) {
        let weight = plan.weight(self.weight);
        let width = plan.width(self.input);
        let row = |i: usize| &input[i * width..][..width];
        let alone = |values| InputRow { expert: 0, values };
        let rows: Vec<InputRow<'_>> = if self.is_head {
            batch.outputs.iter().map(|&i| alone(row(i as usize))).collect()
        } else if self.experts == 1 && self.route.is_none() {
            input.chunks_exact(width).map(alone).collect()
        } else {
            let used = self.route.map_or(self.experts, |route| plan.width(route) / 2);
            let pairs = (0..batch.tokens.len()).flat_map(|i| (0..used).map(move |slot| (i, slot)));
            let pair = |(i, slot): (usize, usize)| {
                let expert = route.map_or(slot, |route| route[(2 * i + 1) * used + slot] as usize);
                let parts = width / weight.cols;
                InputRow { expert, values: &row(i)[slot % parts * weight.cols..][..weight.cols] }
            };
            pairs.map(pair).collect()
        };
        observer.matmul(&Matmul { weight, experts: self.experts, rows: &rows });
    }
}
