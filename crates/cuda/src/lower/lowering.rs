//! Lowers one operation after the other.

use std::collections::HashMap;

use bodkin_model::fusion::Readers;
use bodkin_model::{
    Act, Entries, NormKind, Op, Plan, Rope, Routing, Rows, Value as PlanValue, WeightId,
};

use super::matrices::shapes;
use super::stage::{Content, Conv, DeltaRuleStage, Epilogue, Function, Gate, SliceConcat};
use super::stage::{
    InputNorm, Matmul, Norm, Operand, Residual, Rotate, Route, RouteChosen, ScanStage, Sparse,
    Stage, Value, Work,
};
use super::value::ValueShape;
use crate::constants::INLINED_COLS;
use crate::packed::{PackedLayout, Shape};

pub(super) struct Lowering<'a> {
    pub(super) plan: &'a Plan,
    pub(super) fuse: bool,
    /// Of the weights that are matrices.
    pub(super) shapes: Vec<Option<Shape>>,
    /// Of all weights, from [`super::sharded`].
    pub(super) sharded: &'a [Option<usize>],
    /// The operations that read each value of the plan.
    pub(super) readers: Readers,
    /// The floats of each value of the plan.
    floats: HashMap<usize, Value>,
    /// Its halves, by the number of parts.
    pub(super) halves: HashMap<(usize, usize), Value>,
    /// The norms that make halves, where matmuls can compute them.
    pub(super) norms: HashMap<Value, InputNorm>,
    pub(super) stages: Vec<Stage>,
    pub(super) values: Vec<ValueShape>,
    pub(super) ropes: Vec<Rope>,
    pub(super) routings: Vec<usize>,
}

impl<'a> Lowering<'a> {
    pub(super) fn new(plan: &'a Plan, fuse: bool, sharded: &'a [Option<usize>]) -> Lowering<'a> {
        Lowering {
            plan,
            fuse,
            shapes: shapes(plan),
            sharded,
            readers: Readers::of(plan),
            floats: HashMap::new(),
            halves: HashMap::new(),
            norms: HashMap::new(),
            stages: Vec::new(),
            values: Vec::new(),
            ropes: Vec::new(),
            routings: Vec::new(),
        }
    }

    /// The value that the host reads.
    pub(super) fn output(&self) -> Value {
        self.floats(self.plan.output())
    }

    pub(super) fn push(&mut self, i: usize, work: Work, name: &str) {
        let rows = self.plan.rows(PlanValue(i));
        self.stages.push(Stage::new(rows, work, name));
    }

    pub(super) fn value(&mut self, rows: Rows, content: Content) -> Value {
        self.values.push(ValueShape { rows, content, view: None, may_be_swizzled: false });
        Value(self.values.len() - 1)
    }

    /// The floats of a value of the plan that the current stage makes.
    pub(super) fn out(&mut self, i: usize) -> Value {
        let content = Content::Floats(self.plan.widths[i]);
        let value = self.value(self.plan.rows(PlanValue(i)), content);
        self.floats.insert(i, value);
        value
    }

    pub(super) fn floats(&self, value: PlanValue) -> Value {
        self.floats[&value.0]
    }

    /// Lowers operation `i` and returns the next one to lower.
    pub(super) fn op(&mut self, i: usize) -> usize {
        let work = match &self.plan.ops[i] {
            Op::Linear { input, weight, .. } => {
                let input = self.input(*input, 1, *weight);
                return self.matmuls(i, input, None);
            }
            &Op::ExpertLinear { input, route, weight, experts, .. } => {
                return self.expert_matmuls(i, input, route, (weight, experts));
            }
            &Op::Logits { input, weight, bias } => self.logits(i, input, (weight, bias)),
            Op::Input => Work::Input { out: self.out(i) },
            Op::Embed { table, by } => Work::Embed { table: *table, by: *by, out: self.out(i) },
            Op::Norm { .. } => return self.norm(i),
            Op::Rope { input, head_dim, rope, heads: _ } => {
                if let Some(rotated) = self.rotated(i) {
                    return self.rotated_attention(i, rotated);
                }
                let (input, head_dim, style) = (self.floats(*input), *head_dim, rope.style);
                let rope = self.rope(rope);
                Work::Rotate(Rotate { input, head_dim, style, rope, out: self.out(i) })
            }
            Op::Attention { attention, .. } if attention.entries != Entries::Tokens => {
                self.sparse(i)
            }
            Op::Attention { q, kv, attention, slot } => {
                let (q, kv) = (self.floats(*q), kv.map(|kv| kv.map(|value| self.floats(value))));
                Work::Attend(self.attend(i, (q, kv), None, (*attention, slot.0)))
            }
            &Op::Act { input, act } => self.elementwise(i, Function::Act(act), input, None),
            &Op::Glu { gate, up, act } => self.glu(i, gate, up, act),
            &Op::Add { a, b } => self.elementwise(i, Function::Add, a, Some(b)),
            &Op::Scale { input, factor } => {
                self.elementwise(i, Function::Scale(factor), input, None)
            }
            Op::ScaleBy { .. }
            | Op::Rescale { .. }
            | Op::Cutoff { .. }
            | Op::ScaleExperts { .. } => self.scaling(i),
            &Op::Softcap { input, cap } => self.elementwise(i, Function::Softcap(cap), input, None),
            &Op::Clamp { input, low, high } => {
                self.elementwise(i, Function::Clamp(low, high), input, None)
            }
            &Op::Slice { input, groups, start, len } => {
                if self.view(i, input, groups, start, len) {
                    return i + 1;
                }
                self.slice_concat(i, input, None, (groups, start))
            }
            &Op::Concat { a, b, groups } => self.slice_concat(i, a, Some(b), (groups, 0)),
            Op::Pool { input, kind } => {
                Work::Pool { input: self.floats(*input), kind: *kind, out: self.out(i) }
            }
            &Op::Route { input, bias, routing, chosen } => {
                self.route(i, (input, chosen), bias, routing)
            }
            Op::ExpertSum { input, route } => {
                let (input, route) = (self.floats(*input), self.floats(*route));
                Work::ExpertSum { input, route, out: self.out(i) }
            }
            Op::Conv { .. } | Op::Scan { .. } | Op::DeltaRule { .. } => return self.recurrent(i),
            Op::Mix { .. } | Op::HyperWeights { .. } | Op::Compress { .. } | Op::Select { .. } => {
                self.sparse(i)
            }
        };
        self.push(i, work, &self.stage_name(i));
        i + 1
    }

    /// A choice of experts, which may be made already.
    fn route(
        &mut self,
        i: usize,
        (input, chosen): (PlanValue, Option<PlanValue>),
        bias: Option<WeightId>,
        routing: Routing,
    ) -> Work {
        let (input, index, out) = (self.floats(input), self.routings.len(), self.out(i));
        self.routings.push(routing.experts);
        let route = Route { input, bias, routing, index, out };
        match chosen.map(|chosen| self.floats(chosen)) {
            None => Work::Route(route),
            Some(chosen) => Work::Sparse(Sparse::Route(RouteChosen { route, chosen })),
        }
    }

    /// An operation that scales rows, or parts of them.
    fn scaling(&mut self, i: usize) -> Work {
        let out = self.out(i);
        match self.plan.ops[i] {
            Op::ScaleBy { input, weight } => {
                Work::ScaleBy { input: self.floats(input), weight, out }
            }
            Op::Rescale { input, like } => {
                Work::Rescale { input: self.floats(input), like: self.floats(like), out }
            }
            Op::Cutoff { input, deviations } => {
                Work::Cutoff { input: self.floats(input), deviations, out }
            }
            Op::ScaleExperts { route, weight } => {
                Work::ScaleExperts { route: self.floats(route), weight, out }
            }
            _ => unreachable!("operation {i} scales nothing"),
        }
    }

    /// Lowers an operation with recurrent state, and the activation or the gate of its result.
    fn recurrent(&mut self, i: usize) -> usize {
        let (work, last) = match &self.plan.ops[i] {
            Op::Conv { input, weight, bias, state } => {
                let (input, weight, bias, state) = (self.floats(*input), *weight, *bias, state.0);
                let act = self.activation_of(i);
                let last = i + usize::from(act.is_some());
                let (act, out) = (act.unwrap_or(Act::Identity), self.out(last));
                (Work::Conv(Conv { input, weight, bias, state, act, out }), last)
            }
            Op::Scan { x, b, c, dt, a, d, dt_bias, scan, state } => {
                let inputs = [x, b, c, dt].map(|value| self.floats(*value));
                let (weights, scan, state) = ([*a, *d, *dt_bias], *scan, state.0);
                let gate = self.gate_of(i);
                let last = i + usize::from(gate.is_some());
                let (out, half_out) = self.outs_of_whole_chunks(last);
                let scan = ScanStage { inputs, weights, scan, state, gate, out, half_out };
                (Work::Scan(scan), last)
            }
            Op::DeltaRule { qkv, decay, beta, a, dt_bias, eps, rule, state } => {
                let inputs = [qkv, decay, beta].map(|value| self.floats(*value));
                let (weights, eps, rule, state) = ([*a, *dt_bias], *eps, *rule, state.0);
                let out = self.out(i);
                (Work::DeltaRule(DeltaRuleStage { inputs, weights, eps, rule, state, out }), i)
            }
            _ => unreachable!("operation {i} has no state"),
        };
        self.push(last, work, &self.stage_name(i));
        last + 1
    }

    /// Lowers a norm, and what is done with its result: it may be gated, or added to a residual.
    fn norm(&mut self, i: usize) -> usize {
        let &Op::Norm { input, kind, weight, bias, eps, groups } = &self.plan.ops[i] else {
            unreachable!("operation {i} is no norm")
        };
        let (input, gate) = (self.floats(input), self.gate_of(i));
        let residual = if gate.is_none() { self.residual_of(i) } else { None };
        let last = match residual {
            Some((_, last)) => last,
            None => i + usize::from(gate.is_some()),
        };
        let residual = residual.map(|(residual, _)| residual);
        let (out, half_out) = self.outs(last, 1);
        let is_inlined = false;
        let norm = Norm {
            input,
            kind,
            weight,
            bias,
            eps,
            groups,
            gate,
            residual,
            out,
            half_out,
            is_inlined,
        };
        let is_inlined = last == i && self.inline_norm(i, &norm);
        self.push(last, Work::Norm(Norm { is_inlined, ..norm }), &self.stage_name(i));
        last + 1
    }

    /// The activation of the result of operation `i`, if it is the next operation and the only
    /// reader.
    pub(super) fn activation_of(&self, i: usize) -> Option<Act> {
        match self.plan.ops.get(i + 1)? {
            &Op::Act { input, act } if input.0 == i && self.is_read_next(i) => {
                (is_of_matmuls(act) && act != Act::ClampedSwish).then_some(act)
            }
            _ => None,
        }
    }

    /// The gate of the result of operation `i`, likewise.
    fn gate_of(&self, i: usize) -> Option<Gate> {
        match self.plan.ops.get(i + 1)? {
            &Op::Glu { gate, up, act } if up.0 == i && gate.0 < i && self.is_read_next(i) => {
                let is_whole = self.plan.width(gate) == self.plan.width(up);
                (is_whole && is_of_matmuls(act)).then(|| Gate { act, by: self.floats(gate) })
            }
            _ => None,
        }
    }

    /// The residual that the result of operation `i` is added to, likewise, with the last
    /// operation: that may scale the sum by one number.
    fn residual_of(&self, i: usize) -> Option<(Residual, usize)> {
        let &Op::Add { a, b } = self.plan.ops.get(i + 1)? else { return None };
        let to = if a.0 == i { b } else { a };
        if !self.is_read_next(i) || to.0 >= i {
            return None;
        }
        let to = self.floats(to);
        match self.plan.ops.get(i + 2) {
            Some(&Op::ScaleBy { input, weight })
                if input.0 == i + 1
                    && self.is_read_next(i + 1)
                    && self.plan.weight(weight).rows * self.plan.weight(weight).cols == 1 =>
            {
                Some((Residual { to, scale: Some(weight) }, i + 2))
            }
            _ => Some((Residual { to, scale: None }, i + 1)),
        }
    }

    /// Whether the next operation alone reads operation `i`, and may be fused with it.
    fn is_read_next(&self, i: usize) -> bool {
        self.fuse && self.readers.is_only_read_by(i, i + 1) && self.plan.output().0 != i
    }

    /// Makes a slice a view of what it is a part of, if kernels can read that: vectors of four
    /// elements begin at multiples of four.
    fn view(
        &mut self,
        i: usize,
        input: PlanValue,
        groups: usize,
        start: usize,
        len: usize,
    ) -> bool {
        let whole = self.floats(input);
        let (base, from) = self.values[whole.0].view.unwrap_or((whole, 0));
        let start = from + start;
        let stride = self.values[base.0].content.stride();
        let is_aligned = start.is_multiple_of(4) && stride.is_multiple_of(4);
        if !self.fuse || groups != 1 || !is_aligned || self.plan.output().0 == i {
            return false;
        }
        let out = self.out(i);
        let (rows, content) = (self.values[whole.0].rows, Content::Floats(len));
        self.values[out.0] =
            ValueShape { rows, content, view: Some((base, start)), may_be_swizzled: false };
        true
    }

    /// A slice of a value, or the concatenation of two.
    fn slice_concat(
        &mut self,
        i: usize,
        a: PlanValue,
        b: Option<PlanValue>,
        (groups, start): (usize, usize),
    ) -> Work {
        let (a, b) = (self.floats(a), b.map(|b| self.floats(b)));
        Work::SliceConcat(SliceConcat { a, b, groups, start, out: self.out(i) })
    }

    /// The weight of a head, or the operation.
    fn stage_name(&self, i: usize) -> String {
        match &self.plan.ops[i] {
            Op::Logits { weight, .. } => self.names(&[*weight]),
            other => other.name().to_owned(),
        }
    }

    /// A gated linear unit; a narrower gate has one element for each of equal parts of the row.
    fn glu(&mut self, i: usize, gate: PlanValue, up: PlanValue, act: Act) -> Work {
        let has_parts = self.plan.width(gate) < self.plan.width(up);
        let function = if has_parts { Function::GluOfParts(act) } else { Function::Glu(act) };
        self.elementwise(i, function, gate, Some(up))
    }

    /// The matmul of the rows that are outputs.
    fn logits(
        &mut self,
        i: usize,
        input: PlanValue,
        (weight, bias): (WeightId, Option<WeightId>),
    ) -> Work {
        let input = self.input(input, 1, weight);
        let operands = vec![Operand { weight, bias, out: Some(self.out(i)) }];
        let (epilogue, experts) = (Epilogue::None, None);
        let norm = self.norms.get(&input).copied();
        Work::Matmul(Matmul { input, gathers_outputs: true, norm, operands, epilogue, experts })
    }

    /// Whether the matmuls that read norm `i` can compute it, in which case it is recorded for
    /// them.
    fn inline_norm(&mut self, i: usize, norm: &Norm) -> bool {
        let width = self.plan.widths[i];
        let is_plain = norm.kind == NormKind::Rms
            && norm.groups == 1
            && norm.bias.is_none()
            && norm.out.is_none();
        let is_linear = |&reader: &usize| {
            matches!(self.plan.ops[reader], Op::Linear { .. } | Op::Logits { .. })
        };
        let fits = INLINED_COLS.contains(&width) && self.readers.get(i).iter().all(is_linear);
        let &Norm { input, weight: Some(weight), half_out: Some(half), eps, .. } = norm else {
            return false;
        };
        if !is_plain || !fits {
            return false;
        }
        self.norms.insert(half, InputNorm { input, weight, eps });
        true
    }

    /// An operation whose elements are functions of elements.
    fn elementwise(
        &mut self,
        i: usize,
        function: Function,
        a: PlanValue,
        b: Option<PlanValue>,
    ) -> Work {
        let (a, b) = (self.floats(a), b.map(|b| self.floats(b)));
        let (out, half_out) = self.outs(i, 1);
        Work::Elementwise { function, a, b, out, half_out }
    }

    pub(super) fn rope(&mut self, rope: &Rope) -> usize {
        self.ropes.iter().position(|r| r == rope).unwrap_or_else(|| {
            self.ropes.push(*rope);
            self.ropes.len() - 1
        })
    }

    pub(super) fn layout(&self, weight: WeightId) -> PackedLayout {
        PackedLayout::of(self.plan.weight(weight).format)
    }

    /// Names of weights without their layer.
    pub(super) fn names(&self, weights: &[WeightId]) -> String {
        let name = |id: &WeightId| self.plan.weight(*id).role().to_owned();
        weights.iter().map(name).collect::<Vec<_>>().join(" + ")
    }
}

/// Whether kernels besides the elementwise one know a function.
fn is_of_matmuls(act: Act) -> bool {
    !matches!(act, Act::Softplus | Act::Xielu(_))
}
