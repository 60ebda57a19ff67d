//! The weights of a plan that are matrices, and their shapes.

use bodkin_model::fusion::have_same_input;
use bodkin_model::{Op, Plan, WeightId};

use crate::packed::Shape;

/// The weight of a matmul or table, and the number of its matrices.
pub(crate) fn matrix_of(op: &Op) -> Option<(WeightId, usize)> {
    match op {
        Op::Embed { table: weight, .. } | Op::Linear { weight, .. } | Op::Logits { weight, .. } => {
            Some((*weight, 1))
        }
        Op::ExpertLinear { weight, experts, .. } => Some((*weight, *experts)),
        _ => None,
    }
}

/// The bias of a matmul.
pub(super) fn bias_of(op: &Op) -> Option<WeightId> {
    match op {
        Op::Linear { bias, .. } | Op::ExpertLinear { bias, .. } | Op::Logits { bias, .. } => *bias,
        _ => None,
    }
}

/// The number of experts that read the input of a matmul at once; one without experts, or if each
/// has an input of its own.
fn experts_of_input(plan: &Plan, op: &Op) -> usize {
    match op {
        Op::ExpertLinear { input, route, weight, experts, .. }
            if plan.width(*input) == plan.weight(*weight).cols =>
        {
            route.map_or(*experts, |route| plan.width(route) / 2)
        }
        _ => 1,
    }
}

/// The shapes of the weights that are matrices or tables. Consecutive matmuls with the same input
/// record the widest of their layout.
pub(crate) fn shapes(plan: &Plan) -> Vec<Option<Shape>> {
    let mut shapes = vec![None; plan.weights.len()];
    for siblings in plan.ops.chunk_by(have_same_input) {
        let own = siblings.iter().filter_map(|op| {
            let (id, matrices) = matrix_of(op)?;
            let shape = Shape::of(plan.weight(id), matrices);
            Some((id, Shape { widest: shape.rows * experts_of_input(plan, op), ..shape }))
        });
        let own: Vec<(WeightId, Shape)> = own.collect();
        for (WeightId(id), shape) in &own {
            let alike = own.iter().filter(|(_, other)| other.layout == shape.layout);
            let widest = alike.map(|(_, other)| other.widest).max().unwrap_or(0);
            shapes[*id] = Some(Shape { widest, ..*shape });
        }
    }
    shapes
}
