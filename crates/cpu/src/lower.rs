//! From a Plan to stages. Threads meet at a barrier after each stage, so fewer stages are faster.
//! Two rewrites make them few, and each can be switched off:
//!
//! - `rows`: operations that look at one row alone run back to back on that row, in one stage;
//! - `siblings`: products with the same input run as one stage.

use bodkin_model::{Act, Attention, EmbedBy, NormKind, Op, Plan, PoolKind, Rope, RopeStyle};
use bodkin_model::{Routing, Rows, Scan, Value, WeightId};

use crate::isa::Isa;
use crate::linear::{ActivationFormats, PackedLayout};

/// Which rewrites are on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fusions {
    /// Row-local operations in one stage.
    pub rows: bool,
    /// Products with one input in one stage.
    pub siblings: bool,
}

impl Fusions {
    /// Everything on.
    pub const ALL: Fusions = Fusions { rows: true, siblings: true };
    /// The plan as it stands.
    pub const NONE: Fusions = Fusions { rows: false, siblings: false };
}

/// Where a value lives: the caller's logits, or a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    /// The buffer; none for the caller's logits.
    pub(crate) buffer: Option<usize>,
    /// Elements of a row that are in use.
    pub(crate) width: usize,
}

/// An operation on one row.
#[derive(Clone, Debug)]
pub(crate) enum RowOp {
    /// Sines and cosines of the row's position, for the rope of this index.
    Angles { rope: usize },
    /// Take a row that comes with the step.
    Input { out: Place },
    /// Read a row of a table.
    Embed { table: WeightId, by: EmbedBy, out: Place },
    /// Normalise.
    Norm {
        input: Place,
        out: Place,
        kind: NormKind,
        weight: WeightId,
        bias: Option<WeightId>,
        eps: f32,
        groups: usize,
    },
    /// Rotate.
    Rope { input: Place, out: Place, head_dim: usize, style: RopeStyle, rope: usize },
    /// Keep keys and values.
    Store { k: Place, v: Place, slot: usize },
    /// `act(input)`.
    Act { input: Place, act: Act, out: Place },
    /// `act(gate) * up`.
    Glu { gate: Place, up: Place, act: Act, out: Place },
    /// `a + b`.
    Add { a: Place, b: Place, out: Place },
    /// `input * factor`.
    Scale { input: Place, factor: f32, out: Place },
    /// `cap * tanh(input / cap)`.
    Softcap { input: Place, cap: f32, out: Place },
    /// Some columns of each part.
    Slice { input: Place, groups: usize, start: usize, out: Place },
    /// Parts of two rows by turns.
    Concat { a: Place, b: Place, groups: usize, out: Place },
    /// Choose experts.
    Route { input: Place, bias: Option<WeightId>, routing: Routing, out: Place },
    /// Add up what the chosen experts made.
    ExpertSum { input: Place, route: Place, out: Place },
    /// The rows of a sequence become one.
    Pool { input: Place, kind: PoolKind, out: Place },
    /// Make the parts of the row, or the row for each part, ready as inputs of experts' products.
    PrepareExperts { input: Place, cols: usize, sorting: usize, formats: ActivationFormats },
    /// Take for zero what is below the threshold of one of the gated products.
    Mask { values: Place, product: usize },
    /// Make the row ready as the input of products, in the forms that their weights take.
    Prepare { input: Place, formats: ActivationFormats },
}

impl RowOp {
    /// A word for profiles.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            RowOp::Angles { .. } => "angles",
            RowOp::Input { .. } => "input",
            RowOp::Embed { .. } => "embed",
            RowOp::Norm { .. } => "norm",
            RowOp::Rope { .. } => "rope",
            RowOp::Store { .. } => "store",
            RowOp::Act { .. } => "act",
            RowOp::Glu { .. } => "glu",
            RowOp::Add { .. } => "add",
            RowOp::Scale { .. } => "scale",
            RowOp::Softcap { .. } => "softcap",
            RowOp::Slice { .. } => "slice",
            RowOp::Concat { .. } => "concat",
            RowOp::Route { .. } => "route",
            RowOp::ExpertSum { .. } => "expert_sum",
            RowOp::Pool { .. } => "pool",
            RowOp::Mask { .. } => "mask",
            RowOp::Prepare { .. } | RowOp::PrepareExperts { .. } => "quantize",
        }
    }
}

/// A product of a stage.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Product {
    pub(crate) weight: WeightId,
    pub(crate) bias: Option<WeightId>,
    pub(crate) out: Place,
}

/// What threads do between two barriers.
#[derive(Clone, Debug)]
pub(crate) enum Stage {
    /// Each thread takes some rows through all operations.
    Rows { rows: Rows, ops: Vec<RowOp> },
    /// Each thread takes some rows of the weights. The input was prepared by the stage before.
    Multiply { rows: Rows, input: Place, products: Vec<Product> },
    /// Each thread takes some heads and tokens.
    Attend { q: Place, out: Place, attention: Attention, slot: usize },
    /// One thread sorts the pairs of tokens and experts by expert.
    Sort { sorting: usize },
    /// Each thread takes some rows of the experts' weights, for all tokens that chose them. The
    /// input was prepared by the stage before.
    Experts { input: Place, cols: usize, sorting: usize, products: Vec<Product> },
    /// Each thread takes some columns.
    Conv { input: Place, weight: WeightId, bias: Option<WeightId>, state: usize, out: Place },
    /// Each thread takes some heads.
    Scan(ScanStage),
}

/// A state-space layer as a stage.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ScanStage {
    pub(crate) x: Place,
    pub(crate) b: Place,
    pub(crate) c: Place,
    pub(crate) dt: Place,
    pub(crate) a: WeightId,
    pub(crate) d: WeightId,
    pub(crate) dt_bias: WeightId,
    pub(crate) scan: Scan,
    pub(crate) state: usize,
    pub(crate) out: Place,
}

/// How tokens meet experts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Sorting {
    /// What the router made; without it every token meets all experts.
    pub(crate) route: Option<Place>,
    /// The operation that routes.
    op: Option<usize>,
    /// Experts that a token meets.
    pub(crate) used: usize,
    /// All experts.
    pub(crate) experts: usize,
}

/// The lowered plan.
#[derive(Clone, Debug)]
pub(crate) struct Program {
    pub(crate) stages: Vec<Stage>,
    /// The distinct rotations.
    pub(crate) ropes: Vec<Rope>,
    /// The ways in which tokens meet experts.
    pub(crate) sortings: Vec<Sorting>,
    /// The widest row of each buffer.
    pub(crate) buffer_widths: Vec<usize>,
}

/// Turns a plan into stages. The inputs of `masked` products get thresholds.
pub(crate) fn lower(plan: &Plan, isa: Isa, fusions: Fusions, masked: &[WeightId]) -> Program {
    let buffers = plan.buffers();
    let (stages, ropes, sortings) = (vec![], vec![], vec![]);
    let mut lowering =
        Lowering { plan, isa, fusions, masked, homes: &buffers.of_value, stages, ropes, sortings };
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
    let (ropes, sortings) = (lowering.ropes, lowering.sortings);
    Program { stages, ropes, sortings, buffer_widths: buffers.widths }
}

struct Lowering<'a> {
    plan: &'a Plan,
    isa: Isa,
    fusions: Fusions,
    masked: &'a [WeightId],
    homes: &'a [Option<usize>],
    stages: Vec<Stage>,
    ropes: Vec<Rope>,
    sortings: Vec<Sorting>,
}

impl Lowering<'_> {
    fn place(&self, value: Value) -> Place {
        Place { buffer: self.homes[value.0], width: self.plan.width(value) }
    }

    /// Lowers operation `i` and returns the next one to lower.
    fn op(&mut self, i: usize) -> usize {
        let out = self.place(Value(i));
        let row_op = match &self.plan.ops[i] {
            Op::Linear { input, .. } => return self.products(i, *input),
            Op::Logits { input, weight, bias } => {
                let product = Product { weight: *weight, bias: *bias, out };
                self.matmul(Rows::Outputs, *input, vec![product]);
                return i + 1;
            }
            Op::Attention { q, k, v, attention, slot } => {
                let (k, v, slot) = (self.place(*k), self.place(*v), slot.0);
                self.row(Rows::Tokens, RowOp::Store { k, v, slot });
                let q = self.place(*q);
                self.stages.push(Stage::Attend { q, out, attention: *attention, slot });
                return i + 1;
            }
            Op::ExpertLinear { input, route, .. } => return self.experts(i, *input, *route),
            Op::Conv { .. } | Op::Scan { .. } => {
                self.stages.extend(self.recurrent(i));
                return i + 1;
            }
            Op::Input => RowOp::Input { out },
            Op::Embed { table, by } => RowOp::Embed { table: *table, by: *by, out },
            Op::Norm { input, kind, weight, bias, eps, groups } => {
                let (input, kind, weight, bias, eps, groups) =
                    (self.place(*input), *kind, *weight, *bias, *eps, *groups);
                RowOp::Norm { input, out, kind, weight, bias, eps, groups }
            }
            Op::Rope { input, head_dim, rope, heads: _ } => {
                let (input, head_dim, style) = (self.place(*input), *head_dim, rope.style);
                let rope = self.rope(rope);
                RowOp::Rope { input, out, head_dim, style, rope }
            }
            Op::Glu { gate, up, act } => {
                RowOp::Glu { gate: self.place(*gate), up: self.place(*up), act: *act, out }
            }
            Op::Add { a, b } => RowOp::Add { a: self.place(*a), b: self.place(*b), out },
            Op::Scale { input, factor } => {
                RowOp::Scale { input: self.place(*input), factor: *factor, out }
            }
            Op::Softcap { input, cap } => {
                RowOp::Softcap { input: self.place(*input), cap: *cap, out }
            }
            Op::Slice { input, groups, start, len: _ } => {
                RowOp::Slice { input: self.place(*input), groups: *groups, start: *start, out }
            }
            Op::Act { input, act } => RowOp::Act { input: self.place(*input), act: *act, out },
            Op::Concat { a, b, groups } => {
                RowOp::Concat { a: self.place(*a), b: self.place(*b), groups: *groups, out }
            }
            Op::Route { input, bias, routing } => {
                let (input, bias, routing) = (self.place(*input), *bias, *routing);
                self.row(Rows::Tokens, RowOp::Route { input, bias, routing, out });
                self.sorting(Some(Value(i)), routing.experts);
                return i + 1;
            }
            Op::ExpertSum { input, route } => {
                RowOp::ExpertSum { input: self.place(*input), route: self.place(*route), out }
            }
            Op::Pool { input, kind } => RowOp::Pool { input: self.place(*input), kind: *kind, out },
        };
        self.row(self.plan.rows(Value(i)), row_op);
        i + 1
    }

    /// The stage of a recurrent operation.
    fn recurrent(&self, i: usize) -> Option<Stage> {
        let out = self.place(Value(i));
        match &self.plan.ops[i] {
            Op::Conv { input, weight, bias, state } => {
                let (weight, bias, state) = (*weight, *bias, state.0);
                Some(Stage::Conv { input: self.place(*input), weight, bias, state, out })
            }
            Op::Scan { x, b, c, dt, a, d, dt_bias, scan, state } => {
                let [x, b, c, dt] = [x, b, c, dt].map(|value| self.place(*value));
                let (a, d, dt_bias, scan, state) = (*a, *d, *dt_bias, *scan, state.0);
                Some(Stage::Scan(ScanStage { x, b, c, dt, a, d, dt_bias, scan, state, out }))
            }
            _ => None,
        }
    }

    /// Lowers the product `first` and, fused, those right after it that have the same input.
    fn products(&mut self, first: usize, input: Value) -> usize {
        let mut products = Vec::new();
        let mut next = first;
        while let Some(Op::Linear { input: other, weight, bias }) = self.plan.ops.get(next)
            && *other == input
            && (products.is_empty() || self.fusions.siblings)
        {
            let out = self.place(Value(next));
            products.push(Product { weight: *weight, bias: *bias, out });
            next += 1;
        }
        let is_masked = |product: &Product| self.masked.iter().position(|&w| w == product.weight);
        if let Some(product) = products.first().and_then(is_masked) {
            let values = self.place(input);
            self.row(Rows::Tokens, RowOp::Mask { values, product });
        }
        self.matmul(Rows::Tokens, input, products);
        next
    }

    fn matmul(&mut self, rows: Rows, input: Value, products: Vec<Product>) {
        let input = self.place(input);
        let formats = self.formats(&products);
        self.row(rows, RowOp::Prepare { input, formats });
        self.stages.push(Stage::Multiply { rows, input, products });
    }

    /// Which forms of activations products want.
    fn formats(&self, products: &[Product]) -> ActivationFormats {
        let format = |p: &Product| {
            PackedLayout::planned(self.plan.weight(p.weight).format).activation_format(self.isa)
        };
        products.iter().map(format).collect()
    }

    /// Lowers the experts' product `first` and, fused, those right after it that have the same
    /// input and routing.
    fn experts(&mut self, first: usize, input: Value, route: Option<Value>) -> usize {
        let (mut products, mut next, mut shape) = (Vec::new(), first, None);
        while let Some(op) = self.plan.ops.get(next)
            && let Op::ExpertLinear { input: other, route: other_route, weight, bias, experts } = op
            && (*other, *other_route) == (input, route)
            && (products.is_empty() || self.fusions.siblings)
        {
            let (weight, bias, out) = (*weight, *bias, self.place(Value(next)));
            products.push(Product { weight, bias, out });
            shape = Some((*experts, self.plan.weight(weight).cols));
            next += 1;
        }
        let (experts, cols) = shape.expect("the first operation is one");
        let sorting = self.sorting(route, experts);
        let (formats, input) = (self.formats(&products), self.place(input));
        self.row(Rows::Tokens, RowOp::PrepareExperts { input, cols, sorting, formats });
        self.stages.push(Stage::Experts { input, cols, sorting, products });
        next
    }

    /// The sorting for a routing, with its stage where it is needed for the first time.
    fn sorting(&mut self, route: Option<Value>, experts: usize) -> usize {
        let op = route.map(|value| value.0);
        let known = |s: &Sorting| s.op == op && s.experts == experts;
        if let Some(known) = self.sortings.iter().position(known) {
            return known;
        }
        let used = route.map_or(experts, |route| self.plan.width(route) / 2);
        self.sortings.push(Sorting { route: route.map(|r| self.place(r)), op, used, experts });
        let sorting = self.sortings.len() - 1;
        self.stages.push(Stage::Sort { sorting });
        sorting
    }

    /// Appends to the last stage if that is of the same rows, else starts one.
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
