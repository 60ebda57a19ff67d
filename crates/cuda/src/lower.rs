//! From a Plan to stages. A kernel's start costs about as much as reading five megabytes, so few
//! stages are faster; and what only products read is kept in half precision. The rewrites, none of
//! which changes a bit:
//!
//! - `siblings`: products with the same input run as one stage;
//! - `gates`: two products of which one gates the other keep only the gated result;
//! - `residuals`: a product that is only added to a value is added where it is made;
//! - `rotations`: keys and queries are rotated where keys and values are stored;
//! - `norms`: products of a single row normalise it themselves;
//! - `halves`: norms, attention and gates write the inputs of products themselves.

mod stage;

use std::collections::HashMap;

use bodkin_model::{Act, NormKind, Op, Plan, Rope, Rows, Value as PlanValue, WeightId};

use crate::planes::{CHUNK_COLS, Kind, Shape};
pub(crate) use stage::{After, Content, Experts, Factor, Function, InputNorm};
pub(crate) use stage::{Program, Rotation, ScanStage};
pub(crate) use stage::{Spec, Stage, Value, Work};

/// Widths of norms that products make for themselves: blocks of this width sum in the same order
/// as the norm's own, and the row has to fit beside their results.
const INLINED_COLS: std::ops::RangeInclusive<usize> = 257..=12_288;
/// The most matrices of one product.
const FACTORS: usize = 4;

/// Turns a plan into stages. Without `fuse`, each operation is a stage of its own.
pub(crate) fn lower(plan: &Plan, fuse: bool) -> Program {
    let mut readers = vec![Vec::new(); plan.ops.len()];
    for (i, op) in plan.ops.iter().enumerate() {
        op.inputs().for_each(|value| readers[value.0].push(i));
    }
    let mut lowering = Lowering {
        plan,
        fuse,
        readers,
        floats: HashMap::new(),
        halves: HashMap::new(),
        norms: HashMap::new(),
        stages: Vec::new(),
        values: Vec::new(),
        ropes: Vec::new(),
        routings: Vec::new(),
    };
    let mut next = 0;
    while next < plan.ops.len() {
        next = lowering.op(next);
    }
    let output = lowering.floats[&plan.output().0];
    let angles =
        |rope| Stage { rows: Rows::Tokens, work: Work::Angles { rope }, name: "angles".to_owned() };
    let mut stages: Vec<Stage> = (0..lowering.ropes.len()).map(angles).collect();
    stages.extend(lowering.stages);
    let (values, ropes, routings) = (lowering.values, lowering.ropes, lowering.routings);
    Program { stages, values, output, ropes, routings }
}

struct Lowering<'a> {
    plan: &'a Plan,
    fuse: bool,
    /// The operations that read each value of the plan.
    readers: Vec<Vec<usize>>,
    /// The floats of each value of the plan.
    floats: HashMap<usize, Value>,
    /// Its halves, by the number of parts.
    halves: HashMap<(usize, usize), Value>,
    /// What makes halves, where products can do it too.
    norms: HashMap<Value, InputNorm>,
    stages: Vec<Stage>,
    values: Vec<Spec>,
    ropes: Vec<Rope>,
    routings: Vec<usize>,
}

impl Lowering<'_> {
    fn push(&mut self, i: usize, work: Work, name: &str) {
        let rows = self.plan.rows(PlanValue(i));
        self.stages.push(Stage { rows, work, name: name.to_owned() });
    }

    fn value(&mut self, rows: Rows, content: Content) -> Value {
        self.values.push(Spec { rows, content });
        Value(self.values.len() - 1)
    }

    /// The floats of a value of the plan that is made now.
    fn out(&mut self, i: usize) -> Value {
        let content = Content::Floats(self.plan.widths[i]);
        let value = self.value(self.plan.rows(PlanValue(i)), content);
        self.floats.insert(i, value);
        value
    }

    /// The halves of a value of the plan that are made now.
    fn half_out(&mut self, i: usize, parts: usize) -> Value {
        let content = Content::Halves { parts, cols: self.plan.widths[i] / parts };
        let value = self.value(self.plan.rows(PlanValue(i)), content);
        self.halves.insert((i, parts), value);
        value
    }

    fn floats(&self, value: PlanValue) -> Value {
        self.floats[&value.0]
    }

    /// The halves of a value of the plan, made from its floats if nobody has made them.
    fn halves(&mut self, value: PlanValue, parts: usize) -> Value {
        if let Some(&known) = self.halves.get(&(value.0, parts)) {
            return known;
        }
        let input = self.floats(value);
        let out = self.half_out(value.0, parts);
        self.push(value.0, Work::Prepare { input, out }, "prepare");
        out
    }

    /// What a product with this weight reads of a value: halves in so many parts, or floats.
    fn input(&mut self, value: PlanValue, parts: usize, weight: WeightId) -> Value {
        match self.kind(weight) {
            Kind::F32 => self.floats(value),
            _ => self.halves(value, parts),
        }
    }

    /// The parts in which a product reads a value's halves; none if the reader reads floats.
    fn parts(&self, reader: usize, value: usize) -> Option<usize> {
        let is_exact = |id: WeightId| self.kind(id) == Kind::F32;
        if self.plan.ops[reader].weights().next().is_some_and(is_exact) {
            return None;
        }
        match &self.plan.ops[reader] {
            Op::Linear { .. } | Op::Logits { .. } => Some(1),
            Op::ExpertLinear { input, route, weight, .. } if input.0 == value => {
                let is_route = route.is_some_and(|route| route.0 == value);
                (!is_route).then(|| self.plan.widths[value] / self.plan.weight(*weight).cols)
            }
            _ => None,
        }
    }

    /// Where the result of an operation goes that can write both: floats, and halves in so many
    /// parts.
    fn outs(&mut self, i: usize, parts: usize) -> (Option<Value>, Option<Value>) {
        let is_half = |&reader: &usize| self.parts(reader, i) == Some(parts);
        let is_output = i == self.plan.output().0;
        let half = self.fuse && self.readers[i].iter().any(is_half);
        let float = !half || is_output || !self.readers[i].iter().all(is_half);
        let out = float.then(|| self.out(i));
        (out, half.then(|| self.half_out(i, parts)))
    }

    /// Lowers operation `i` and returns the next one to lower.
    fn op(&mut self, i: usize) -> usize {
        let name = self.plan.ops[i].name();
        let work = match &self.plan.ops[i] {
            Op::Linear { input, weight, .. } => {
                let input = self.input(*input, 1, *weight);
                return self.products(i, input, None);
            }
            Op::ExpertLinear { .. } => return self.expert_linear(i),
            Op::Logits { input, weight, bias } => {
                let input = self.input(*input, 1, *weight);
                let factors = vec![Factor { weight: *weight, bias: *bias, out: Some(self.out(i)) }];
                let (after, experts, norm) =
                    (After::Nothing, None, self.norms.get(&input).copied());
                Work::Product { input, is_outputs: true, norm, factors, after, experts }
            }
            Op::Embed { table, by } => Work::Embed { table: *table, by: *by, out: self.out(i) },
            Op::Norm { input, kind, weight, bias, eps, groups } => {
                let input = self.floats(*input);
                let (kind, weight, bias, eps, groups) = (*kind, *weight, *bias, *eps, *groups);
                let (out, half_out) = self.outs(i, 1);
                let is_inlined = self.inline_norm(i, out, half_out);
                Work::Norm { input, kind, weight, bias, eps, groups, out, half_out, is_inlined }
            }
            Op::Rope { .. } if self.is_rotation(i) => return self.rotated_attention(i),
            Op::Rope { input, head_dim, rope, heads: _ } => {
                let (input, head_dim, style) = (self.floats(*input), *head_dim, rope.style);
                let rope = self.rope(rope);
                Work::Rotate { input, head_dim, style, rope, out: self.out(i) }
            }
            Op::Attention { q, k, v, slot, .. } => {
                let (q, k, v) = (self.floats(*q), self.floats(*k), self.floats(*v));
                self.push(i, Work::Store { k, v, slot: slot.0, rotation: None }, "store");
                self.attend(i, q)
            }
            Op::Act { input, act } => self.elementwise(i, Function::Act(*act), *input, None),
            Op::Glu { gate, up, act } => {
                let is_row = self.plan.width(*gate) == 1 && self.plan.width(*up) > 1;
                let function = if is_row { Function::GluOfRow(*act) } else { Function::Glu(*act) };
                self.elementwise(i, function, *gate, Some(*up))
            }
            Op::Add { a, b } => self.elementwise(i, Function::Add, *a, Some(*b)),
            Op::Scale { input, factor } => {
                self.elementwise(i, Function::Scale(*factor), *input, None)
            }
            Op::Softcap { input, cap } => {
                self.elementwise(i, Function::Softcap(*cap), *input, None)
            }
            Op::Slice { input, groups, start, len: _ } => {
                let (input, groups, start) = (self.floats(*input), *groups, *start);
                Work::Slice { input, groups, start, out: self.out(i) }
            }
            Op::Concat { a, b, groups } => {
                let (a, b, groups) = (self.floats(*a), self.floats(*b), *groups);
                Work::Concat { a, b, groups, out: self.out(i) }
            }
            Op::Pool { input, kind } => {
                Work::Pool { input: self.floats(*input), kind: *kind, out: self.out(i) }
            }
            Op::Route { input, bias, routing } => {
                let (input, bias, routing) = (self.floats(*input), *bias, *routing);
                let number = self.routings.len();
                self.routings.push(routing.experts);
                Work::Route { input, bias, routing, number, out: self.out(i) }
            }
            Op::ExpertSum { input, route } => {
                let (input, route) = (self.floats(*input), self.floats(*route));
                Work::ExpertSum { input, route, out: self.out(i) }
            }
            Op::Conv { input, weight, bias, state } => {
                let (input, weight, bias, state) = (self.floats(*input), *weight, *bias, state.0);
                Work::Conv { input, weight, bias, state, out: self.out(i) }
            }
            Op::Scan { x, b, c, dt, a, d, dt_bias, scan, state } => {
                let inputs = [x, b, c, dt].map(|value| self.floats(*value));
                let (weights, scan, state) = ([*a, *d, *dt_bias], *scan, state.0);
                Work::Scan(ScanStage { inputs, weights, scan, state, out: self.out(i) })
            }
        };
        let name = match &self.plan.ops[i] {
            Op::Logits { weight, .. } => self.names(&[*weight]),
            _ => name.to_owned(),
        };
        self.push(i, work, &name);
        i + 1
    }

    /// Whether norm `i` can be left to the products that read it, and if so, notes it for them.
    fn inline_norm(&mut self, i: usize, out: Option<Value>, half_out: Option<Value>) -> bool {
        let &Op::Norm { input, kind, weight, bias, eps, groups } = &self.plan.ops[i] else {
            unreachable!("called for norms");
        };
        let width = self.plan.widths[i];
        let is_plain = kind == NormKind::Rms && groups == 1 && bias.is_none() && out.is_none();
        let is_linear = |&reader: &usize| {
            matches!(self.plan.ops[reader], Op::Linear { .. } | Op::Logits { .. })
        };
        let fits = INLINED_COLS.contains(&width) && self.readers[i].iter().all(is_linear);
        let (true, Some(half)) = (is_plain && fits, half_out) else { return false };
        self.norms.insert(half, InputNorm { input: self.floats(input), weight, eps });
        true
    }

    /// The attention of operation `i`, once keys and values are stored.
    fn attend(&mut self, i: usize, q: Value) -> Work {
        let Op::Attention { attention, slot, .. } = &self.plan.ops[i] else {
            unreachable!("called for attention");
        };
        let (attention, slot) = (*attention, slot.0);
        // Other rows would have to be padded.
        let (out, half_out) = match self.plan.widths[i].is_multiple_of(CHUNK_COLS) {
            true => self.outs(i, 1),
            false => (Some(self.out(i)), None),
        };
        Work::Attend { q, attention, slot, out, half_out }
    }

    /// Whether operations `i` and `i + 1` rotate the queries and keys of attention `i + 2` alike,
    /// and nobody else reads them.
    fn is_rotation(&self, i: usize) -> bool {
        let Some([Op::Rope { rope, head_dim, .. }, second, third]) = self.plan.ops.get(i..i + 3)
        else {
            return false;
        };
        let Op::Rope { rope: other, head_dim: other_dim, .. } = second else { return false };
        let Op::Attention { q, k, .. } = third else { return false };
        self.fuse
            && (rope, head_dim) == (other, other_dim)
            && (q.0, k.0) == (i, i + 1)
            && [i, i + 1].iter().all(|&value| self.readers[value] == [i + 2])
    }

    /// Lowers two rotations and the attention after them.
    fn rotated_attention(&mut self, i: usize) -> usize {
        let ops = &self.plan.ops[i..i + 3];
        let [Op::Rope { input: q, rope, .. }, Op::Rope { input: k, .. }, third] = ops else {
            unreachable!("called for such operations");
        };
        let Op::Attention { v, slot, .. } = third else {
            unreachable!("called for such operations");
        };
        let (k, v, slot, style) = (self.floats(*k), self.floats(*v), slot.0, rope.style);
        let (q, rope, q_out) = (self.floats(*q), self.rope(rope), self.out(i));
        let rotation = Some(Rotation { q, q_out, style, rope });
        self.push(i + 2, Work::Store { k, v, slot, rotation }, "rope + store");
        let work = self.attend(i + 2, q_out);
        self.push(i + 2, work, "attention");
        i + 3
    }

    fn elementwise(
        &mut self,
        i: usize,
        function: Function,
        a: PlanValue,
        b: Option<PlanValue>,
    ) -> Work {
        let (a, b) = (self.floats(a), b.map(|b| self.floats(b)));
        Work::Elementwise { function, a, b, out: self.out(i) }
    }

    fn rope(&mut self, rope: &Rope) -> usize {
        self.ropes.iter().position(|r| r == rope).unwrap_or_else(|| {
            self.ropes.push(*rope);
            self.ropes.len() - 1
        })
    }

    /// The weight, bias and input of a product of all tokens.
    fn product(&self, i: usize) -> Option<(WeightId, Option<WeightId>, &Op)> {
        match self.plan.ops.get(i)? {
            op @ (Op::Linear { weight, bias, .. } | Op::ExpertLinear { weight, bias, .. }) => {
                Some((*weight, *bias, op))
            }
            _ => None,
        }
    }

    fn kind(&self, weight: WeightId) -> Kind {
        Kind::of(self.plan.weight(weight).format)
    }

    /// Whether product `j` can run together with product `i`.
    fn is_sibling(&self, i: usize, j: usize) -> bool {
        let (Some((weight, _, one)), Some((other, _, two))) = (self.product(i), self.product(j))
        else {
            return false;
        };
        let same_input = match (one, two) {
            (Op::Linear { input, .. }, Op::Linear { input: other, .. }) => input == other,
            (
                Op::ExpertLinear { input, route, experts, .. },
                Op::ExpertLinear {
                    input: other, route: other_route, experts: other_experts, ..
                },
            ) => (input, route, experts) == (other, other_route, other_experts),
            _ => false,
        };
        // Sums are cut into parts as the shape says, and all in one stage alike.
        let shape = |id: WeightId, op: &Op| {
            let experts = if let Op::ExpertLinear { experts, .. } = op { *experts } else { 1 };
            Shape::of(self.plan.weight(id), experts)
        };
        let (one, two) = (shape(weight, one), shape(other, two));
        let alike = one.kind == two.kind && one.part() == two.part() && one.kind != Kind::F32;
        self.fuse && same_input && alike
    }

    /// If products `i` and `i + 1` are read by a gating alone: the function, and which is the gate.
    fn gating(&self, i: usize) -> Option<(Act, usize)> {
        let only_reader = |value: usize| match self.readers[value].as_slice() {
            [reader] if *reader == i + 2 => Some(*reader),
            _ => None,
        };
        if !self.is_sibling(i, i + 1) || self.plan.widths[i] != self.plan.widths[i + 1] {
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
    fn residual(&self, i: usize) -> Option<PlanValue> {
        let next = self.plan.ops.get(i + 1)?;
        let is_alone = self.fuse && self.readers[i] == [i + 1];
        match next {
            Op::Add { a, b } if is_alone && b.0 == i && a.0 < i => Some(*a),
            Op::Add { a, b } if is_alone && a.0 == i && b.0 < i => Some(*b),
            _ => None,
        }
    }

    /// Lowers the experts' product `first` and those operations after it that can run with it.
    fn expert_linear(&mut self, first: usize) -> usize {
        let Op::ExpertLinear { input, route, weight, experts, .. } = &self.plan.ops[first] else {
            unreachable!("called for this operation");
        };
        let parts = self.plan.width(*input) / self.plan.weight(*weight).cols;
        let used = route.map_or(*experts, |route| self.plan.width(route) / 2);
        let route = route.map(|route| self.floats(route));
        let input = self.input(*input, parts, *weight);
        // One part for one expert is the same either way.
        self.products(first, input, Some(Experts { route, used, is_shared: parts == 1 }))
    }

    /// Lowers the product `first` and those operations after it that can run with it.
    fn products(&mut self, first: usize, input: Value, experts: Option<Experts>) -> usize {
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

    fn factor(&self, i: usize, out: Option<Value>) -> Factor {
        let (weight, bias, _) = self.product(i).expect("a product");
        Factor { weight, bias, out }
    }

    /// Names of weights without their layer.
    fn names(&self, weights: &[WeightId]) -> String {
        let name = |id: &WeightId| {
            let name = self.plan.weight(*id).name.trim_end_matches(".weight");
            let layer = name.strip_prefix("blk.").and_then(|rest| rest.split_once('.'));
            layer.map_or(name, |(_, name)| name).to_owned()
        };
        weights.iter().map(name).collect::<Vec<_>>().join(" + ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stages(model: &str, fuse: bool) -> Vec<String> {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/parity/models");
        let file = bodkin_model::open(format!("{folder}/{model}.gguf")).unwrap();
        let plan = bodkin_model::plan(file.metadata(), file.tensors()).unwrap();
        lower(&plan, fuse).stages.into_iter().map(|stage| stage.name).collect()
    }

    #[test]
    fn a_layer_is_eight_stages() {
        let names = stages("llama-q4_0", true);
        assert_eq!(names[..2], ["angles", "embed"]);
        let layer = [
            "norm",
            "attn_q + attn_k + attn_v",
            "rope + store",
            "attention",
            "attn_output",
            "norm",
            "ffn_gate + ffn_up",
            "ffn_down",
        ];
        assert_eq!(names[2..10], layer);
        assert_eq!(names[10..18], layer);
    }

    #[test]
    fn without_rewrites_each_operation_is_a_stage() {
        let names = stages("llama-q4_0", false);
        for name in ["attn_q", "rope", "store", "attention", "prepare", "glu", "add"] {
            assert!(names.iter().any(|other| other == name), "no {name} in {names:?}");
        }
    }

    #[test]
    fn experts_gate_and_are_summed() {
        let names = stages("mixtral", true);
        for name in ["route", "ffn_gate_exps + ffn_up_exps", "ffn_down_exps", "expert_sum"] {
            assert!(names.iter().any(|other| other == name), "no {name} in {names:?}");
        }
    }
}
