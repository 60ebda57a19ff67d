//! From a Plan to stages. A kernel's start costs about as much as reading five megabytes, so few
//! stages are faster; and what only products read is kept in half precision. The rewrites, none of
//! which changes a bit:
//!
//! - `siblings`: products with the same input run as one stage;
//! - `gates`: two products of which one gates the other keep only the gated result;
//! - `residuals`: a product that is only added to a value is added where it is made;
//! - `rotations`: keys and queries are rotated where keys and values are kept and met;
//! - `norms`: products of a single row normalise it themselves;
//! - `halves`: norms, attention and gates write the inputs of products themselves.
//!
//! Where one kernel runs a step, it joins more (`joined`). For several devices, what products make
//! is gathered (`cut`).

mod attention;
mod cut;
mod joined;
mod products;
mod stage;

use std::collections::HashMap;

use bodkin_model::{NormKind, Op, Plan, Rope, Rows, Value as PlanValue, WeightId};

use crate::planes::{Kind, Shape};
use crate::step::SHORT_NORM;
pub(crate) use cut::{Share, cuts};
pub(crate) use joined::Joined;
pub(crate) use products::{matrix_of, shapes};
pub(crate) use stage::{After, Content, Experts, Factor, Function, InputNorm};
pub(crate) use stage::{Program, Rotation, ScanStage};
pub(crate) use stage::{Spec, Stage, Value, Work};

/// Widths of norms that products make for themselves: blocks of this width sum in the same order
/// as the norm's own, and the row has to fit beside their results.
const INLINED_COLS: std::ops::RangeInclusive<usize> = SHORT_NORM + 1..=12_288;
/// The most matrices of one product.
const FACTORS: usize = 4;

/// Turns a plan into stages for so many devices, which all have the same. Without `fuse`, each
/// operation is a stage of its own.
pub(crate) fn lower(plan: &Plan, fuse: bool, devices: usize) -> Program {
    let mut readers = vec![Vec::new(); plan.ops.len()];
    for (i, op) in plan.ops.iter().enumerate() {
        op.inputs().for_each(|value| readers[value.0].push(i));
    }
    let mut lowering = Lowering {
        plan,
        fuse,
        shapes: shapes(plan),
        cuts: cuts(plan, devices),
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
    let angles = |rope| Stage::new(Rows::Tokens, Work::Angles { rope }, "angles");
    let mut stages: Vec<Stage> = (0..lowering.ropes.len()).map(angles).collect();
    stages.extend(cut::with_gathers(lowering.stages, &lowering.cuts));
    let input = stages.iter().find_map(|stage| match stage.work {
        Work::Input { out } => Some(out),
        _ => None,
    });
    let (values, ropes, routings) = (lowering.values, lowering.ropes, lowering.routings);
    let mut program =
        Program { stages, values, output, input, ropes, routings, joined: Vec::new(), devices };
    program.joined = joined::joined(plan, &program);
    program
}

struct Lowering<'a> {
    plan: &'a Plan,
    fuse: bool,
    /// Of the weights that are matrices.
    shapes: Vec<Option<Shape>>,
    /// Of all weights, as [`cuts`] says.
    cuts: Vec<Option<usize>>,
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
        self.stages.push(Stage::new(rows, work, name));
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
        let work = match &self.plan.ops[i] {
            Op::Linear { input, weight, .. } => {
                let input = self.input(*input, 1, *weight);
                return self.products(i, input, None);
            }
            Op::ExpertLinear { .. } => return self.expert_linear(i),
            Op::Logits { .. } => self.logits(i),
            Op::Input => Work::Input { out: self.out(i) },
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
            Op::Attention { q, k, v, .. } => {
                let (inputs, rotation) = ([*q, *k, *v].map(|value| self.floats(value)), None);
                self.attend(i, inputs, rotation)
            }
            Op::Act { .. }
            | Op::Glu { .. }
            | Op::Add { .. }
            | Op::Scale { .. }
            | Op::Softcap { .. } => self.elementwise(i),
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
            other => other.name().to_owned(),
        };
        self.push(i, work, &name);
        i + 1
    }

    /// The product of the rows that are outputs.
    fn logits(&mut self, i: usize) -> Work {
        let &Op::Logits { input, weight, bias } = &self.plan.ops[i] else {
            unreachable!("called for this operation");
        };
        let input = self.input(input, 1, weight);
        let factors = vec![Factor { weight, bias, out: Some(self.out(i)) }];
        let (after, experts, norm) = (After::Nothing, None, self.norms.get(&input).copied());
        Work::Product { input, is_outputs: true, norm, factors, after, experts }
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

    /// An operation whose elements are functions of elements.
    fn elementwise(&mut self, i: usize) -> Work {
        let (function, a, b) = match &self.plan.ops[i] {
            Op::Act { input, act } => (Function::Act(*act), *input, None),
            Op::Glu { gate, up, act } => {
                let is_row = self.plan.width(*gate) == 1 && self.plan.width(*up) > 1;
                let function = if is_row { Function::GluOfRow(*act) } else { Function::Glu(*act) };
                (function, *gate, Some(*up))
            }
            Op::Add { a, b } => (Function::Add, *a, Some(*b)),
            Op::Scale { input, factor } => (Function::Scale(*factor), *input, None),
            Op::Softcap { input, cap } => (Function::Softcap(*cap), *input, None),
            _ => unreachable!("called for such operations"),
        };
        let (a, b) = (self.floats(a), b.map(|b| self.floats(b)));
        Work::Elementwise { function, a, b, out: self.out(i) }
    }

    fn rope(&mut self, rope: &Rope) -> usize {
        self.ropes.iter().position(|r| r == rope).unwrap_or_else(|| {
            self.ropes.push(*rope);
            self.ropes.len() - 1
        })
    }

    fn kind(&self, weight: WeightId) -> Kind {
        Kind::of(self.plan.weight(weight).format)
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
        lower(&plan, fuse, 1).stages.into_iter().map(|stage| stage.name).collect()
    }

    #[test]
    fn a_layer_is_seven_stages() {
        let names = stages("llama-q4_0", true);
        assert_eq!(names[..2], ["angles", "embed"]);
        let layer = [
            "norm",
            "attn_q + attn_k + attn_v",
            "attention",
            "attn_output",
            "norm",
            "ffn_gate + ffn_up",
            "ffn_down",
        ];
        assert_eq!(names[2..9], layer);
        assert_eq!(names[9..16], layer);
    }

    #[test]
    fn without_rewrites_each_operation_is_a_stage() {
        let names = stages("llama-q4_0", false);
        for name in ["attn_q", "rope", "attention", "prepare", "glu", "add"] {
            assert!(names.iter().any(|other| other == name), "no {name} in {names:?}");
        }
    }

    #[test]
    fn experts_are_chosen_and_summed() {
        let names = stages("mixtral", true);
        for name in ["route", "ffn_up_exps", "ffn_gate_exps", "ffn_down_exps", "expert_sum"] {
            assert!(names.iter().any(|other| other == name), "no {name} in {names:?}");
        }
    }
}
