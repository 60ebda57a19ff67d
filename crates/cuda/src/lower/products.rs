//! Products, and the operations before and after them that run with them.

use bodkin_model::{Act, Op, Plan, Value as PlanValue, WeightId};

use super::{After, Experts, FACTORS, Factor, Lowering, Value, Work};
use crate::planes::{CHUNK_COLS, Kind, Shape};

/// The weight of a product or table, and its matrices.
pub(crate) fn matrix_of(op: &Op) -> Option<(WeightId, usize)> {
    match op {
        Op::Embed { table: weight, .. } | Op::Linear { weight, .. } | Op::Logits { weight, .. } => {
            Some((*weight, 1))
        }
        Op::ExpertLinear { weight, experts, .. } => Some((*weight, *experts)),
        _ => None,
    }
}

/// Whether two products multiply the same input.
fn have_same_input(one: &Op, two: &Op) -> bool {
    match (one, two) {
        (Op::Linear { input, .. }, Op::Linear { input: other, .. }) => input == other,
        (
            Op::ExpertLinear { input, route, experts, .. },
            Op::ExpertLinear { input: other, route: other_route, experts: other_experts, .. },
        ) => (input, route, experts) == (other, other_route, other_experts),
        _ => false,
    }
}

/// How many experts meet the input of a product at once; one without experts, or if each has an
/// input of its own.
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

/// The shapes of the weights that are matrices or tables. Products that follow each other with the
/// same input know of the widest of their kind.
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
            let alike = own.iter().filter(|(_, other)| other.kind == shape.kind);
            let widest = alike.map(|(_, other)| other.widest).max().unwrap_or(0);
            shapes[*id] = Some(Shape { widest, ..*shape });
        }
    }
    shapes
}

impl Lowering<'_> {
    /// The weight, bias and input of a product of all tokens.
    pub(super) fn product(&self, i: usize) -> Option<(WeightId, Option<WeightId>, &Op)> {
        match self.plan.ops.get(i)? {
            op @ (Op::Linear { weight, bias, .. } | Op::ExpertLinear { weight, bias, .. }) => {
                Some((*weight, *bias, op))
            }
            _ => None,
        }
    }

    /// Whether product `j` can run together with product `i`.
    pub(super) fn is_sibling(&self, i: usize, j: usize) -> bool {
        let (Some(one), Some(two)) = (self.plan.ops.get(i), self.plan.ops.get(j)) else {
            return false;
        };
        let shape = |op: &Op| matrix_of(op).and_then(|(WeightId(id), _)| self.shapes[id]);
        // Sums are cut into parts as the plan says, and all in one stage alike.
        let alike = shape(one).zip(shape(two)).is_some_and(|(one, two)| {
            one.kind == two.kind && one.part() == two.part() && one.kind != Kind::F32
        });
        self.fuse && alike && have_same_input(one, two)
    }

    /// If products `i` and `i + 1` are read by a gating alone: the function, and which is the gate.
    pub(super) fn gating(&self, i: usize) -> Option<(Act, usize)> {
        let only_reader = |value: usize| match self.readers[value].as_slice() {
            [reader] if *reader == i + 2 => Some(*reader),
            _ => None,
        };
        if !self.is_sibling(i, i + 1) || self.plan.widths[i] != self.plan.widths[i + 1] {
            return None;
        }
        // A device has to have the same rows of both.
        let cut = |i: usize| self.product(i).map(|(weight, ..)| self.cuts[weight.0]);
        if cut(i) != cut(i + 1) {
            return None;
        }
        only_reader(i)?;
        only_reader(i + 1)?;
        match self.plan.ops.get(i + 2)? {
            Op::Glu { gate, up, act } if gate.0 == i && up.0 == i + 1 => Some((*act, i)),
            Op::Glu { gate, up, act } if gate.0 == i + 1 && up.0 == i => Some((*act, i + 1)),
            _ => None,
        }
    }

    /// What product `i` is added to, if that is all that is done with it, in the next operation.
    pub(super) fn residual(&self, i: usize) -> Option<PlanValue> {
        let next = self.plan.ops.get(i + 1)?;
        let is_alone = self.fuse && self.readers[i] == [i + 1];
        match next {
            Op::Add { a, b } if is_alone && b.0 == i && a.0 < i => Some(*a),
            Op::Add { a, b } if is_alone && a.0 == i && b.0 < i => Some(*b),
            _ => None,
        }
    }

    /// Lowers the experts' product `first` and those operations after it that can run with it.
    pub(super) fn expert_linear(&mut self, first: usize) -> usize {
        let Op::ExpertLinear { input, route, weight, experts, .. } = &self.plan.ops[first] else {
            unreachable!("called for this operation");
        };
        let parts = self.plan.width(*input) / self.plan.weight(*weight).cols;
        let used = route.map_or(*experts, |route| self.plan.width(route) / 2);
        let route = route.map(|route| self.floats(route));
        let input = self.input(*input, parts, *weight);
        // One part for one expert is the same either way.
        let experts = Experts { route, count: *experts, used, is_shared: parts == 1 };
        self.products(first, input, Some(experts))
    }

    /// Lowers the product `first` and those operations after it that can run with it.
    pub(super) fn products(
        &mut self,
        first: usize,
        input: Value,
        experts: Option<Experts>,
    ) -> usize {
        let rows = experts.map_or(1, |e| e.used);
        let (factors, after, made, next) = if let Some((act, gate)) = self.gating(first) {
            let up = 2 * first + 1 - gate;
            let factors = [gate, up].map(|i| self.factor(i, None)).to_vec();
            let cols = self.plan.widths[first] / rows;
            // Other rows would have to be padded.
            let (out, half) = match cols.is_multiple_of(CHUNK_COLS) {
                true => self.outs(first + 2, rows),
                false => (Some(self.out(first + 2)), None),
            };
            let both = out.is_some() && half.is_some();
            if both {
                self.halves.remove(&(first + 2, rows));
            }
            let out = if both { out } else { half.or(out) };
            let out = out.expect("a result goes somewhere");
            (factors, After::Gate { act, out }, first + 2, first + 3)
        } else if let (Some(added), None) = (self.residual(first), experts) {
            let added = self.floats(added);
            let out = self.out(first + 1);
            (vec![self.factor(first, Some(out))], After::Add(added), first + 1, first + 2)
        } else {
            let mut next = first + 1;
            while next - first < FACTORS
                && self.is_sibling(first, next)
                && self.gating(next).is_none()
                && self.residual(next).is_none()
            {
                next += 1;
            }
            let factors = (first..next).map(|i| {
                let out = self.out(i);
                self.factor(i, Some(out))
            });
            (factors.collect(), After::Nothing, first, next)
        };
        let name = self.names(&factors.iter().map(|f| f.weight).collect::<Vec<_>>());
        let norm = self.norms.get(&input).copied();
        let work = Work::Product { input, is_outputs: false, norm, factors, after, experts };
        self.push(made, work, &name);
        next
    }

    pub(super) fn factor(&self, i: usize, out: Option<Value>) -> Factor {
        let (weight, bias, _) = self.product(i).expect("a product");
        Factor { weight, bias, out }
    }
}
