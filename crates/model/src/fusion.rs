//! Which operations of a plan a backend may run together, as far as the plan alone decides: no
//! other operation reads their intermediate results.

use crate::{Act, Op, Plan, Value, WeightId};

/// The operations that read each value, in order.
pub struct Readers(Vec<Vec<usize>>);

/// The sum of a value and a matmul's result.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Residual {
    /// What the result is added to.
    pub to: Value,
    /// Multiplies the result.
    pub factor: f32,
    /// The operation that adds.
    pub sum: usize,
}

impl Readers {
    /// Those of a plan's values.
    pub fn of(plan: &Plan) -> Readers {
        let mut readers = vec![Vec::new(); plan.ops.len()];
        for (i, op) in plan.ops.iter().enumerate() {
            op.inputs().for_each(|value| readers[value.0].push(i));
        }
        Readers(readers)
    }

    /// Those of the result of operation `i`.
    pub fn get(&self, i: usize) -> &[usize] {
        &self.0[i]
    }

    /// Whether operation `by` alone reads the result of operation `i`.
    pub fn is_only_read_by(&self, i: usize, by: usize) -> bool {
        self.0[i] == [by]
    }
}

/// The weight and the bias of a matmul without experts, before the head.
pub fn linear(plan: &Plan, i: usize) -> Option<(WeightId, Option<WeightId>)> {
    match plan.ops.get(i)? {
        Op::Linear { weight, bias, .. } => Some((*weight, *bias)),
        _ => None,
    }
}

/// Whether two matmuls read the same input, and have the same experts if they have any.
pub fn have_same_input(one: &Op, two: &Op) -> bool {
    match (one, two) {
        (Op::Linear { input, .. }, Op::Linear { input: other, .. }) => input == other,
        (
            Op::ExpertLinear { input, route, experts, .. },
            Op::ExpertLinear { input: other, route: other_route, experts: other_experts, .. },
        ) => (input, route, experts) == (other, other_route, other_experts),
        _ => false,
    }
}

/// If only a gate reads matmuls `i` and `i + 1`, which have the same input and width, and it
/// follows them: its function, and which of them it is.
pub fn gated(plan: &Plan, readers: &Readers, i: usize) -> Option<(Act, usize)> {
    let [one, two, glu] = plan.ops.get(i..i + 3)? else { return None };
    let is_read = |value| readers.is_only_read_by(value, i + 2);
    let are_alike = have_same_input(one, two) && plan.widths[i] == plan.widths[i + 1];
    if !are_alike || !is_read(i) || !is_read(i + 1) {
        return None;
    }
    match *glu {
        Op::Glu { gate, up, act } if gate.0 == i && up.0 == i + 1 => Some((act, i)),
        Op::Glu { gate, up, act } if gate.0 == i + 1 && up.0 == i => Some((act, i + 1)),
        _ => None,
    }
}

/// If the result of matmul `i` is only added to an earlier value, after a factor or without one.
pub fn residual(plan: &Plan, readers: &Readers, i: usize) -> Option<Residual> {
    let is_alone = |i: usize| readers.is_only_read_by(i, i + 1);
    let (scaled, factor) = match plan.ops.get(i + 1)? {
        &Op::Scale { factor, .. } if is_alone(i) => (i + 1, factor),
        _ => (i, 1.0),
    };
    let to = match plan.ops.get(scaled + 1)? {
        Op::Add { a, b } if b.0 == scaled && a.0 < i => *a,
        Op::Add { a, b } if a.0 == scaled && b.0 < i => *b,
        _ => return None,
    };
    is_alone(scaled).then_some(Residual { to, factor, sum: scaled + 1 })
}
