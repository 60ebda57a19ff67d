//! Lowers a Plan to stages. Each stage ends with a barrier, so fewer stages are faster. Two fusions
//! reduce their number, and each can be switched off:
//!
//! - `rows`: consecutive row-local operations run back to back on each row, in one stage;
//! - `siblings`: linears with the same input run in one stage.

mod prediction;

use bodkin_model::{Attention, Entries, Indexer, Op, Plan, Rope, Routing, Rows, Value, WeightId};

use crate::config::Fusions;
use crate::isa::Isa;
use crate::linear::{ActivationFormats, PackedLayout};
use crate::program::{
    CompressStage, DeltaRuleStage, ExpertPermutation, GatheredStage, Linear, Operand, Program,
    RowOp, ScanStage, SelectStage, Stage,
};

/// Lowers a plan. The inputs of the `thresholded` linears get thresholds. Where experts are cached,
/// layers predict what the next ones will choose.
pub(crate) fn lower(
    plan: &Plan,
    isa: Isa,
    fusions: Fusions,
    thresholded: &[WeightId],
    are_experts_cached: bool,
) -> Program {
    let buffers = plan.buffers();
    let (stages, ropes, permutations) = (vec![], vec![], vec![]);
    let mut lowering = Lowering {
        plan,
        isa,
        fusions,
        thresholded,
        buffer_of: &buffers.of_value,
        stages,
        ropes,
        permutations,
    };
    let mut next = 0;
    while next < plan.ops.len() {
        next = lowering.op(next);
    }
    let angles = (0..lowering.ropes.len()).map(|rope| RowOp::Angles { rope }).collect();
    let mut stages = vec![Stage::Rows { rows: Rows::Tokens, ops: angles }];
    let mut rest = lowering.stages.into_iter().peekable();
    if let Some(Stage::Rows { ops, .. }) =
        rest.next_if(|s| fusions.rows && matches!(s, Stage::Rows { rows: Rows::Tokens, .. }))
        && let Stage::Rows { ops: first, .. } = &mut stages[0]
    {
        first.extend(ops);
    }
    stages.extend(rest);
    let (ropes, permutations) = (lowering.ropes, lowering.permutations);
    let mut program = Program { stages, ropes, permutations, buffer_widths: buffers.widths };
    if are_experts_cached {
        prediction::add_predictions(&mut program, plan);
    }
    program
}

struct Lowering<'a> {
    plan: &'a Plan,
    isa: Isa,
    fusions: Fusions,
    thresholded: &'a [WeightId],
    buffer_of: &'a [Option<usize>],
    stages: Vec<Stage>,
    ropes: Vec<Rope>,
    permutations: Vec<ExpertPermutation>,
}

impl Lowering<'_> {
    fn operand(&self, value: Value) -> Operand {
        Operand { buffer: self.buffer_of[value.0], width: self.plan.width(value) }
    }

    /// Lowers operation `i` and returns the next one to lower.
    fn op(&mut self, i: usize) -> usize {
        let out = self.operand(Value(i));
        let row_op = match &self.plan.ops[i] {
            Op::Linear { input, .. } => return self.linears(i, *input),
            Op::Logits { input, weight, bias } => {
                let linear = Linear { weight: *weight, bias: *bias, out };
                self.matmul(Rows::Outputs, *input, vec![linear]);
                return i + 1;
            }
            &Op::Attention { q, kv, attention, slot } => {
                return self.attention(i, (q, kv), attention, slot.0);
            }
            &Op::Select { q, k, weights, indexer, slot } => {
                return self.select(i, [q, k, weights], indexer, slot.0);
            }
            Op::ExpertLinear { input, route, .. } => return self.experts(i, *input, *route),
            Op::Conv { .. } | Op::Scan { .. } | Op::DeltaRule { .. } | Op::Compress { .. } => {
                self.stages.extend(self.recurrent(i));
                return i + 1;
            }
            Op::Input => RowOp::Input { out },
            Op::Embed { table, by } => RowOp::Embed { table: *table, by: *by, out },
            &Op::Norm { input, kind, weight, bias, eps, groups } => {
                let input = self.operand(input);
                RowOp::Norm { input, out, kind, weight, bias, eps, groups }
            }
            Op::Rope { input, head_dim, rope, heads: _ } => {
                let (input, head_dim, style) = (self.operand(*input), *head_dim, rope.style);
                let rope = self.rope(rope);
                RowOp::Rope { input, out, head_dim, style, rope }
            }
            Op::Glu { gate, up, act } => {
                RowOp::Glu { gate: self.operand(*gate), up: self.operand(*up), act: *act, out }
            }
            Op::Add { a, b } => RowOp::Add { a: self.operand(*a), b: self.operand(*b), out },
            op @ (Op::Scale { .. }
            | Op::ScaleBy { .. }
            | Op::Rescale { .. }
            | Op::Cutoff { .. }
            | Op::ScaleExperts { .. }) => self.scaling(op, out),
            &Op::Softcap { input, cap } => RowOp::Softcap { input: self.operand(input), cap, out },
            &Op::Clamp { input, low, high } => {
                RowOp::Clamp { input: self.operand(input), low, high, out }
            }
            &Op::Mix { input, weights, results } => {
                let [input, weights] = [input, weights].map(|value| self.operand(value));
                RowOp::Mix { input, weights, results, out }
            }
            &Op::HyperWeights { input, scale, base, streams, iterations, eps } => {
                let input = self.operand(input);
                RowOp::HyperWeights { input, scale, base, streams, iterations, eps, out }
            }
            Op::Slice { input, groups, start, len: _ } => {
                RowOp::Slice { input: self.operand(*input), groups: *groups, start: *start, out }
            }
            Op::Act { input, act } => RowOp::Act { input: self.operand(*input), act: *act, out },
            Op::Concat { a, b, groups } => {
                RowOp::Concat { a: self.operand(*a), b: self.operand(*b), groups: *groups, out }
            }
            &Op::Route { input, chosen, bias, routing } => {
                return self.route(i, (input, chosen), bias, routing);
            }
            Op::ExpertSum { input, route } => {
                RowOp::ExpertSum { input: self.operand(*input), route: self.operand(*route), out }
            }
            &Op::Pool { input, kind } => RowOp::Pool { input: self.operand(input), kind, out },
        };
        self.row(self.plan.rows(Value(i)), row_op);
        i + 1
    }

    /// Lowers a choice of experts, and the order of rows by them.
    fn route(
        &mut self,
        i: usize,
        (input, chosen): (Value, Option<Value>),
        bias: Option<WeightId>,
        routing: Routing,
    ) -> usize {
        let (input, out) = (self.operand(input), self.operand(Value(i)));
        let chosen = chosen.map(|chosen| self.operand(chosen));
        self.row(Rows::Tokens, RowOp::Route { input, chosen, bias, routing, out });
        self.permutation(Some(Value(i)), routing.experts);
        i + 1
    }

    /// Lowers attention, before which the keys and values of its own tokens and blocks are stored.
    fn attention(
        &mut self,
        i: usize,
        (q, kv): (Value, Option<[Value; 2]>),
        a: Attention,
        slot: usize,
    ) -> usize {
        if let Some([k, v]) = kv.map(|kv| kv.map(|value| self.operand(value))) {
            self.row(Rows::Tokens, RowOp::Store { k, v: Some(v), slot });
        }
        let blocks = match a.entries {
            Entries::TokensAndBlocks { blocks, slot, .. } => {
                let (k, slot) = (self.operand(blocks), slot.0);
                self.row(Rows::Tokens, RowOp::Store { k, v: Some(k), slot });
                Some(slot)
            }
            Entries::Tokens | Entries::Selected(_) => None,
        };
        let (q, out) = (self.operand(q), self.operand(Value(i)));
        let selected = a.entries.selected().map(|value| self.operand(value));
        self.stages.push(match a.entries {
            Entries::Tokens => Stage::Attention { q, out, attention: a, slot },
            Entries::Selected(_) | Entries::TokensAndBlocks { .. } => {
                let attention = a;
                Stage::GatheredAttention(GatheredStage {
                    q,
                    out,
                    attention,
                    slot,
                    blocks,
                    selected,
                })
            }
        });
        i + 1
    }

    /// Lowers a choice of entries, before which its own tokens' keys are stored.
    fn select(&mut self, i: usize, values: [Value; 3], indexer: Indexer, slot: usize) -> usize {
        let [q, k, weights] = values.map(|value| self.operand(value));
        let out = self.operand(Value(i));
        self.row(Rows::Tokens, RowOp::Store { k, v: None, slot });
        self.stages.push(Stage::Select(SelectStage { q, weights, indexer, slot, out }));
        i + 1
    }

    /// An operation that scales rows, or parts of them.
    fn scaling(&self, op: &Op, out: Operand) -> RowOp {
        match *op {
            Op::Scale { input, factor } => RowOp::Scale { input: self.operand(input), factor, out },
            Op::ScaleBy { input, weight } => {
                RowOp::ScaleBy { input: self.operand(input), weight, out }
            }
            Op::Rescale { input, like } => {
                RowOp::Rescale { input: self.operand(input), like: self.operand(like), out }
            }
            Op::Cutoff { input, deviations } => {
                RowOp::Cutoff { input: self.operand(input), deviations, out }
            }
            Op::ScaleExperts { route, weight } => {
                RowOp::ScaleExperts { route: self.operand(route), weight, out }
            }
            _ => unreachable!("{op:?} scales nothing"),
        }
    }

    /// The stage of a recurrent operation.
    fn recurrent(&self, i: usize) -> Option<Stage> {
        let out = self.operand(Value(i));
        match &self.plan.ops[i] {
            Op::Conv { input, weight, bias, state } => {
                let (weight, bias, state) = (*weight, *bias, state.0);
                Some(Stage::Conv { input: self.operand(*input), weight, bias, state, out })
            }
            Op::Compress { input, scores, compression, state } => {
                let (input, scores) = (self.operand(*input), self.operand(*scores));
                let (compression, state) = (*compression, state.0);
                Some(Stage::Compress(CompressStage { input, scores, compression, state, out }))
            }
            Op::Scan { x, b, c, dt, a, d, dt_bias, scan, state } => {
                let [x, b, c, dt] = [x, b, c, dt].map(|value| self.operand(*value));
                let (a, d, dt_bias, scan, state) = (*a, *d, *dt_bias, *scan, state.0);
                Some(Stage::Scan(ScanStage { x, b, c, dt, a, d, dt_bias, scan, state, out }))
            }
            Op::DeltaRule { qkv, decay, beta, a, dt_bias, eps, rule, state } => {
                let [qkv, decay, beta] = [qkv, decay, beta].map(|value| self.operand(*value));
                let (a, dt_bias, eps, rule, state) = (*a, *dt_bias, *eps, *rule, state.0);
                let stage = DeltaRuleStage { qkv, decay, beta, a, dt_bias, eps, rule, state, out };
                Some(Stage::DeltaRule(stage))
            }
            _ => None,
        }
    }

    /// Lowers the linear `first`, fused with those right after it that have the same input.
    fn linears(&mut self, first: usize, input: Value) -> usize {
        let mut linears = Vec::new();
        let mut next = first;
        while let Some(Op::Linear { input: other, weight, bias }) = self.plan.ops.get(next)
            && *other == input
            && (linears.is_empty() || self.fusions.siblings)
        {
            let out = self.operand(Value(next));
            linears.push(Linear { weight: *weight, bias: *bias, out });
            next += 1;
        }
        let threshold_of =
            |linear: &Linear| self.thresholded.iter().position(|&w| w == linear.weight);
        if let Some(linear) = linears.first().and_then(threshold_of) {
            let values = self.operand(input);
            self.row(Rows::Tokens, RowOp::Mask { values, linear });
        }
        self.matmul(Rows::Tokens, input, linears);
        next
    }

    fn matmul(&mut self, rows: Rows, input: Value, linears: Vec<Linear>) {
        let input = self.operand(input);
        let formats = self.formats(&linears);
        self.row(rows, RowOp::Quantize { input, formats });
        self.stages.push(Stage::Matmul { rows, input, linears });
    }

    /// The activation formats that linears read.
    fn formats(&self, linears: &[Linear]) -> ActivationFormats {
        let layouts = |p: &Linear| PackedLayout::possible(self.plan.weight(p.weight).format);
        linears.iter().flat_map(layouts).map(|layout| layout.activation_formats(self.isa)).collect()
    }

    /// Lowers the expert linear `first`, fused with those right after it that have the same input
    /// and routing.
    fn experts(&mut self, first: usize, input: Value, route: Option<Value>) -> usize {
        let (mut linears, mut next, mut shape) = (Vec::new(), first, None);
        while let Some(op) = self.plan.ops.get(next)
            && let Op::ExpertLinear { input: other, route: other_route, weight, bias, experts } = op
            && (*other, *other_route) == (input, route)
            && (linears.is_empty() || self.fusions.siblings)
        {
            let (weight, bias, out) = (*weight, *bias, self.operand(Value(next)));
            linears.push(Linear { weight, bias, out });
            shape = Some((*experts, self.plan.weight(weight).cols));
            next += 1;
        }
        let (experts, cols) = shape.expect("the first operation is one");
        let permutation = self.permutation(route, experts);
        let (formats, input) = (self.formats(&linears), self.operand(input));
        self.row(Rows::Tokens, RowOp::QuantizeExpertInputs { input, cols, permutation, formats });
        self.stages.push(Stage::GroupedGemm { input, cols, permutation, linears });
        next
    }

    /// The permutation of a routing, with its stage where it is used first.
    fn permutation(&mut self, route: Option<Value>, experts: usize) -> usize {
        let op = route.map(|value| value.0);
        let known = |s: &ExpertPermutation| s.op == op && s.experts == experts;
        if let Some(known) = self.permutations.iter().position(known) {
            return known;
        }
        let used = route.map_or(experts, |route| self.plan.width(route) / 2);
        self.permutations.push(ExpertPermutation {
            route: route.map(|r| self.operand(r)),
            op,
            used,
            experts,
            prediction: None,
        });
        let permutation = self.permutations.len() - 1;
        self.stages.push(Stage::Permute { permutation });
        permutation
    }

    /// Appends to the last stage if it has the same rows, or starts a stage.
    fn row(&mut self, rows: Rows, op: RowOp) {
        match self.stages.last_mut() {
            Some(Stage::Rows { rows: last, ops }) if *last == rows && self.fusions.rows => {
                ops.push(op);
            }
            _ => self.stages.push(Stage::Rows { rows, ops: vec![op] }),
        }
    }

    fn rope(&mut self, rope: &Rope) -> usize {
        self.ropes.iter().position(|r| r == rope).unwrap_or_else(|| {
            self.ropes.push(*rope);
            self.ropes.len() - 1
        })
    }
}
