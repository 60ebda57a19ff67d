//! What a lowered plan is made of: stages, each one kernel or two, over values in memory.

use bodkin_model::{Act, Attention, EmbedBy, NormKind, PoolKind, RopeStyle, Routing, Rows, Scan};
use bodkin_model::{Rope, WeightId};

use super::Joined;
use crate::planes::CHUNK_COLS;

/// An index into [`Program::values`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Value(pub(crate) usize);

/// What a value holds in a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Content {
    /// So many f32.
    Floats(usize),
    /// Inputs of products in half precision: so many parts of so many columns, each padded with
    /// zeros to whole chunks.
    Halves { parts: usize, cols: usize },
}

impl Content {
    /// The distance of its rows, of its parts' rows if it has parts, in elements.
    pub(crate) fn stride(self) -> usize {
        match self {
            Content::Floats(width) => width,
            Content::Halves { cols, .. } => cols.next_multiple_of(CHUNK_COLS),
        }
    }

    pub(crate) fn element_bytes(self) -> usize {
        match self {
            Content::Floats(_) => 4,
            Content::Halves { .. } => 2,
        }
    }

    /// The distance of a product's results, of which each row has `used`, in elements.
    pub(crate) fn result_stride(self, used: usize) -> usize {
        match self {
            Content::Floats(width) => width / used,
            Content::Halves { .. } => self.stride(),
        }
    }
}

/// A value of the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Spec {
    pub(crate) rows: Rows,
    pub(crate) content: Content,
}

impl Spec {
    /// Bytes for a step of so many tokens and outputs.
    pub(crate) fn bytes(&self, tokens: usize, outputs: usize) -> u64 {
        let parts = match self.content {
            Content::Floats(_) => 1,
            Content::Halves { parts, .. } => parts,
        };
        let row = self.content.element_bytes() * parts * self.content.stride();
        let rows = match self.rows {
            Rows::Tokens => tokens,
            Rows::Outputs => outputs,
        };
        row as u64 * rows as u64
    }
}

/// A matrix that a product multiplies its input with.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Factor {
    pub(crate) weight: WeightId,
    pub(crate) bias: Option<WeightId>,
    /// None if it is gated, and only the gated result is kept.
    pub(crate) out: Option<Value>,
}

/// What is done with the results of a product.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum After {
    /// They are kept.
    Nothing,
    /// The first is added to a value.
    Add(Value),
    /// The first is the second's gate, and the result is kept as floats or halves.
    Gate { act: Act, out: Value },
}

/// How the rows of a product meet experts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Experts {
    /// What the router made; without it part `i` of a row meets expert `i`.
    pub(crate) route: Option<Value>,
    /// All experts.
    pub(crate) count: usize,
    /// Experts that a row meets.
    pub(crate) used: usize,
    /// Whether all of them meet the same input.
    pub(crate) is_shared: bool,
}

/// A rotation of keys that are stored, and of the queries that meet them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Rotation {
    /// Where the queries go in steps with several rows of a sequence.
    pub(crate) q_out: Value,
    pub(crate) style: RopeStyle,
    pub(crate) rope: usize,
}

/// Functions of single elements.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Function {
    Act(Act),
    Glu(Act),
    /// One gate for the row.
    GluOfRow(Act),
    Add,
    Scale(f32),
    Softcap(f32),
}

/// A state-space layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct ScanStage {
    /// x, b, c, dt.
    pub(crate) inputs: [Value; 4],
    /// a, d, dt_bias.
    pub(crate) weights: [WeightId; 3],
    pub(crate) scan: Scan,
    pub(crate) state: usize,
    pub(crate) out: Value,
}

/// An RMS norm that products can make for themselves where there is one row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct InputNorm {
    pub(crate) input: Value,
    pub(crate) weight: WeightId,
    pub(crate) eps: f32,
}

/// A stage.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Work {
    Angles {
        rope: usize,
    },
    /// Rows that the host has sent.
    Input {
        out: Value,
    },
    Embed {
        table: WeightId,
        by: EmbedBy,
        out: Value,
    },
    Norm {
        input: Value,
        kind: NormKind,
        weight: WeightId,
        bias: Option<WeightId>,
        eps: f32,
        groups: usize,
        out: Option<Value>,
        half_out: Option<Value>,
        /// Whether all readers are products that can do it too.
        is_inlined: bool,
    },
    /// Makes floats the inputs of products.
    Prepare {
        input: Value,
        out: Value,
    },
    Product {
        input: Value,
        /// Whether the input has all tokens' rows, of which those of outputs are multiplied.
        is_outputs: bool,
        /// What makes the input, if the product can do it too.
        norm: Option<InputNorm>,
        factors: Vec<Factor>,
        after: After,
        experts: Option<Experts>,
    },
    Rotate {
        input: Value,
        head_dim: usize,
        style: RopeStyle,
        rope: usize,
        out: Value,
    },
    /// Keeps keys and values, and attends to them and to earlier ones.
    Attend {
        q: Value,
        k: Value,
        v: Value,
        /// Of the keys and queries.
        rotation: Option<Rotation>,
        attention: Attention,
        slot: usize,
        out: Option<Value>,
        half_out: Option<Value>,
    },
    Elementwise {
        function: Function,
        a: Value,
        b: Option<Value>,
        out: Value,
    },
    Slice {
        input: Value,
        groups: usize,
        start: usize,
        out: Value,
    },
    Concat {
        a: Value,
        b: Value,
        groups: usize,
        out: Value,
    },
    Pool {
        input: Value,
        kind: PoolKind,
        out: Value,
    },
    Route {
        input: Value,
        bias: Option<WeightId>,
        routing: Routing,
        number: usize,
        out: Value,
    },
    ExpertSum {
        input: Value,
        route: Value,
        out: Value,
    },
    Conv {
        input: Value,
        weight: WeightId,
        bias: Option<WeightId>,
        state: usize,
        out: Value,
    },
    Scan(ScanStage),
    /// Devices get each other's columns of what a product made.
    Gather {
        /// The values, each with the weight that made it: a device has made a column for each row
        /// that it has of this.
        made: Vec<(Value, WeightId)>,
        /// Results for each row.
        used: usize,
    },
}

/// A stage and the rows that it is about.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Stage {
    pub(crate) rows: Rows,
    pub(crate) work: Work,
    /// A word for profiles.
    pub(crate) name: String,
}

impl Stage {
    pub(crate) fn new(rows: Rows, work: Work, name: &str) -> Stage {
        Stage { rows, work, name: name.to_owned() }
    }

    /// Shows every value that is read or written.
    pub(crate) fn values(&self, show: &mut dyn FnMut(Value)) {
        let values: Vec<Option<Value>> = match &self.work {
            Work::Angles { .. } => vec![],
            Work::Input { out } | Work::Embed { out, .. } => vec![Some(*out)],
            Work::Norm { input, out, half_out, .. } => vec![Some(*input), *out, *half_out],
            Work::Prepare { input, out }
            | Work::Rotate { input, out, .. }
            | Work::Slice { input, out, .. }
            | Work::Pool { input, out, .. }
            | Work::Route { input, out, .. }
            | Work::Conv { input, out, .. } => vec![Some(*input), Some(*out)],
            Work::Product { input, norm, factors, after, experts, .. } => {
                let mut values = vec![Some(*input), norm.map(|n| n.input)];
                values.push(experts.and_then(|e| e.route));
                values.extend(factors.iter().map(|f| f.out));
                values.push(match after {
                    After::Nothing => None,
                    After::Add(value) | After::Gate { out: value, .. } => Some(*value),
                });
                values
            }
            Work::Attend { q, k, v, rotation, out, half_out, .. } => {
                vec![Some(*q), Some(*k), Some(*v), rotation.map(|r| r.q_out), *out, *half_out]
            }
            Work::Elementwise { a, b, out, .. } => vec![Some(*a), *b, Some(*out)],
            Work::Concat { a, b, out, .. } => vec![Some(*a), Some(*b), Some(*out)],
            Work::ExpertSum { input, route, out } => vec![Some(*input), Some(*route), Some(*out)],
            Work::Scan(s) => s.inputs.into_iter().chain([s.out]).map(Some).collect(),
            Work::Gather { made, .. } => made.iter().map(|(value, _)| Some(*value)).collect(),
        };
        values.into_iter().flatten().for_each(show);
    }
}

/// The lowered plan.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Program {
    pub(crate) stages: Vec<Stage>,
    pub(crate) values: Vec<Spec>,
    /// The value that the host reads.
    pub(crate) output: Value,
    /// The distinct rotations.
    pub(crate) ropes: Vec<Rope>,
    /// The value whose rows come with the step, if there is one.
    pub(crate) input: Option<Value>,
    /// The number of experts of each routing.
    pub(crate) routings: Vec<usize>,
    /// How each stage takes part where one kernel runs them.
    pub(crate) joined: Vec<Joined>,
    /// The number of devices that it is made for.
    pub(crate) devices: usize,
}

impl Program {
    /// The stages that read or write a value, each as often as it does, and one behind all stages
    /// for the host if that reads it.
    pub(crate) fn uses(&self, value: Value) -> Vec<usize> {
        let mut uses = Vec::new();
        for (i, stage) in self.stages.iter().enumerate() {
            stage.values(&mut |other| {
                if other == value {
                    uses.push(i);
                }
            });
        }
        uses.extend((self.output == value).then_some(self.stages.len()));
        uses
    }
}
