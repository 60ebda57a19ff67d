//! Matmuls, and the operations before and after them that run with them.

use bodkin_model::fusion::{self, Residual, have_same_input};
use bodkin_model::{Act, Op, Value as PlanValue, WeightId};

use super::lowering::Lowering;
use super::matrices::{bias_of, matrix_of};
use super::stage::{Epilogue, Experts, Matmul, Operand, Value, Work};
use crate::constants::MATRICES;
use crate::packed::PackedLayout;

impl Lowering<'_> {
    /// Whether matmul `j` can run together with matmul `i`.
    fn is_sibling(&self, i: usize, j: usize) -> bool {
        let (Some(one), Some(two)) = (self.plan.ops.get(i), self.plan.ops.get(j)) else {
            return false;
        };
        let shape = |op: &Op| matrix_of(op).and_then(|(WeightId(id), _)| self.shapes[id]);
        // All split-K slices of a stage have the same length.
        let alike = shape(one).zip(shape(two)).is_some_and(|(one, two)| {
            one.layout == two.layout
                && one.slice_chunks() == two.slice_chunks()
                && one.layout != PackedLayout::F32
        });
        self.fuse && alike && have_same_input(one, two)
    }

    /// If only a gate reads matmuls `i` and `i + 1`: its function, and which of them it is.
    fn gating(&self, i: usize) -> Option<(Act, usize)> {
        if !self.is_sibling(i, i + 1) {
            return None;
        }
        // A device has to hold the same rows of both.
        let sharded = |i: usize| matrix_of(&self.plan.ops[i]).map(|(id, _)| self.sharded[id.0]);
        if sharded(i) != sharded(i + 1) {
            return None;
        }
        let gate = fusion::gated(self.plan, &self.readers, i);
        gate.filter(|(act, _)| *act != Act::Softplus)
    }

    /// If matmul `i` is only added to a value, after a factor or without one.
    fn residual(&self, i: usize) -> Option<Residual> {
        fusion::residual(self.plan, &self.readers, i).filter(|_| self.fuse)
    }

    /// Lowers the experts' matmul `first` and those operations after it that can run with it.
    pub(super) fn expert_matmuls(
        &mut self,
        first: usize,
        input: PlanValue,
        route: Option<PlanValue>,
        (weight, count): (WeightId, usize),
    ) -> usize {
        let parts = self.plan.width(input) / self.plan.weight(weight).cols;
        let used = route.map_or(count, |route| self.plan.width(route) / 2);
        let route = route.map(|route| self.floats(route));
        let input = self.input(input, parts, weight);
        // One part for one expert is the same either way.
        let experts = Experts { route, count, used, shares_input: parts == 1 };
        self.matmuls(first, input, Some(experts))
    }

    /// Lowers the matmul `first` and those operations after it that can run with it.
    pub(super) fn matmuls(
        &mut self,
        first: usize,
        input: Value,
        experts: Option<Experts>,
    ) -> usize {
        let rows = experts.map_or(1, |e| e.used);
        let (operands, epilogue, made, next) = if let Some((act, gate)) = self.gating(first) {
            let up = 2 * first + 1 - gate;
            let operands = [gate, up].map(|i| self.operand(i, None)).to_vec();
            let halves = self.only_halves(first, first + 2, rows);
            let out = halves.unwrap_or_else(|| self.out(first + 2));
            (operands, Epilogue::Gate { act, out }, first + 2, first + 3)
        } else if let Some(act) = self.activation_of(first) {
            let halves = self.only_halves(first, first + 1, rows);
            let out = halves.unwrap_or_else(|| self.out(first + 1));
            (vec![self.operand(first, None)], Epilogue::Act { act, out }, first + 1, first + 2)
        } else if let (Some(Residual { to, factor, sum }), None) = (self.residual(first), experts) {
            let to = self.floats(to);
            let out = self.out(sum);
            let operands = vec![self.operand(first, Some(out))];
            (operands, Epilogue::Add { residual: to, factor }, sum, sum + 1)
        } else {
            let mut next = first + 1;
            while next - first < MATRICES
                && self.is_sibling(first, next)
                && self.gating(next).is_none()
                && self.residual(next).is_none()
            {
                next += 1;
            }
            let halves =
                if next == first + 1 { self.only_halves(first, first, rows) } else { None };
            if let Some(out) = halves {
                let epilogue = Epilogue::Act { act: Act::Identity, out };
                (vec![self.operand(first, None)], epilogue, first, next)
            } else {
                let operands = (first..next).map(|i| {
                    let out = self.out(i);
                    self.operand(i, Some(out))
                });
                (operands.collect(), Epilogue::None, first, next)
            }
        };
        let name = self.names(&operands.iter().map(|operand| operand.weight).collect::<Vec<_>>());
        let norm = self.norms.get(&input).copied();
        let matmul = Matmul { input, gathers_outputs: false, norm, operands, epilogue, experts };
        self.push(made, Work::Matmul(matmul), &name);
        next
    }

    /// The weight and bias of matmul `i`.
    fn operand(&self, i: usize, out: Option<Value>) -> Operand {
        let op = &self.plan.ops[i];
        let (weight, _) = matrix_of(op).expect("a stage's matmuls have matrices");
        Operand { weight, bias: bias_of(op), out }
    }
}
