//! From a Plan to stages. Threads meet at a barrier after each stage, so fewer stages are faster.
//! Two rewrites make them few, and each can be switched off:
//!
//! - `rows`: operations that look at one row alone run back to back on that row, in one stage;
//! - `siblings`: products with the same input run as one stage.

use bodkin_model::{Act, Attention, NormKind, Op, Plan, Rope, RopeStyle, Rows, Value, WeightId};

use crate::linear::Form;
use crate::weights::kind;

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
    /// Read a row of a table.
    Embed { table: WeightId, out: Place },
    /// Normalise.
    Norm {
        input: Place,
        out: Place,
        kind: NormKind,
        weight: WeightId,
        bias: Option<WeightId>,
        eps: f32,
    },
    /// Rotate.
    Rope { input: Place, out: Place, head_dim: usize, style: RopeStyle, rope: usize },
    /// Keep keys and values.
    Store { k: Place, v: Place, slot: usize },
    /// `act(gate) * up`.
    Glu { gate: Place, up: Place, act: Act, out: Place },
    /// `a + b`.
    Add { a: Place, b: Place, out: Place },
    /// `input * factor`.
    Scale { input: Place, factor: f32, out: Place },
    /// `cap * tanh(input / cap)`.
    Softcap { input: Place, cap: f32, out: Place },
    /// Some columns.
    Slice { input: Place, start: usize, out: Place },
    /// Make the row ready as the input of products, in the forms that their weights take.
    Prepare { input: Place, blocks: bool, floats: bool },
}

impl RowOp {
    /// A word for profiles.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            RowOp::Angles { .. } => "angles",
            RowOp::Embed { .. } => "embed",
            RowOp::Norm { .. } => "norm",
            RowOp::Rope { .. } => "rope",
            RowOp::Store { .. } => "store",
            RowOp::Glu { .. } => "glu",
            RowOp::Add { .. } => "add",
            RowOp::Scale { .. } => "scale",
            RowOp::Softcap { .. } => "softcap",
            RowOp::Slice { .. } => "slice",
            RowOp::Prepare { .. } => "quantize",
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
}

/// The lowered plan.
#[derive(Clone, Debug)]
pub(crate) struct Program {
    pub(crate) stages: Vec<Stage>,
    /// The distinct rotations.
    pub(crate) ropes: Vec<Rope>,
    /// The widest row of each buffer.
    pub(crate) buffer_widths: Vec<usize>,
}

/// Turns a plan into stages.
pub(crate) fn lower(plan: &Plan, fusions: Fusions) -> Program {
    let buffers = plan.buffers();
    let mut lowering =
        Lowering { plan, fusions, homes: &buffers.of, stages: vec![], ropes: vec![] };
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
    Program { stages, ropes: lowering.ropes, buffer_widths: buffers.widths }
}

struct Lowering<'a> {
    plan: &'a Plan,
    fusions: Fusions,
    homes: &'a [Option<usize>],
    stages: Vec<Stage>,
    ropes: Vec<Rope>,
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
                self.multiply(Rows::Outputs, *input, vec![product]);
                return i + 1;
            }
            Op::Attention { q, k, v, attention, slot } => {
                let (k, v, slot) = (self.place(*k), self.place(*v), slot.0);
                self.row(Rows::Tokens, RowOp::Store { k, v, slot });
                let q = self.place(*q);
                self.stages.push(Stage::Attend { q, out, attention: *attention, slot });
                return i + 1;
            }
            Op::Embed { table, .. } => RowOp::Embed { table: *table, out },
            Op::Norm { input, kind, weight, bias, eps, groups: _ } => {
                let (input, kind, weight, bias, eps) =
                    (self.place(*input), *kind, *weight, *bias, *eps);
                RowOp::Norm { input, out, kind, weight, bias, eps }
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
            Op::Slice { input, start, .. } => {
                RowOp::Slice { input: self.place(*input), start: *start, out }
            }
            Op::Act { .. }
            | Op::Concat { .. }
            | Op::Route { .. }
            | Op::ExpertLinear { .. }
            | Op::ExpertSum { .. }
            | Op::Conv { .. }
            | Op::Scan { .. }
            | Op::Pool { .. } => unimplemented!("{}", self.plan.ops[i].name()),
        };
        self.row(self.plan.rows(Value(i)), row_op);
        i + 1
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
        self.multiply(Rows::Tokens, input, products);
        next
    }

    fn multiply(&mut self, rows: Rows, input: Value, products: Vec<Product>) {
        let input = self.place(input);
        let forms: Vec<Form> =
            products.iter().map(|p| kind(self.plan.weight(p.weight)).form()).collect();
        let (blocks, floats) = (forms.contains(&Form::Blocks), forms.contains(&Form::Floats));
        self.row(rows, RowOp::Prepare { input, blocks, floats });
        self.stages.push(Stage::Multiply { rows, input, products });
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
