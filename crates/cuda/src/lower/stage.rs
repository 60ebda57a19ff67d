//! What a lowered plan is made of: stages, each one kernel or two, over values in memory.

use bodkin_model::{Act, Attention, EmbedBy, NormKind, PoolKind, RopeStyle, Routing, Rows};
use bodkin_model::{Compression, DeltaRule, Indexer, Plan, Scan, WeightId};

pub(crate) use super::value::{Content, F16Rows, Value};

/// A weight of a matmul, with its bias and result.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Operand {
    pub(crate) weight: WeightId,
    pub(crate) bias: Option<WeightId>,
    /// None where an epilogue alone reads the result.
    pub(crate) out: Option<Value>,
}

/// What a matmul does with its results before it stores them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Epilogue {
    /// Nothing.
    None,
    /// Adds a value to the product of the first result and a factor.
    Add { residual: Value, factor: f32 },
    /// Gates the second result by the first, and stores the product as floats or halves.
    Gate { act: Act, out: Value },
    /// Stores the activation of the only result as floats or halves.
    Act { act: Act, out: Value },
}

/// The experts of a matmul.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Experts {
    /// The router's result; without one, part `i` of a row goes to expert `i`.
    pub(crate) route: Option<Value>,
    /// All experts.
    pub(crate) count: usize,
    /// Experts of a row.
    pub(crate) used: usize,
    /// Whether all experts of a row read the same input.
    pub(crate) shares_input: bool,
}

/// A matmul with one or several weights.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Matmul {
    pub(crate) input: Value,
    /// Whether the input has all tokens' rows, of which only the outputs' are read.
    pub(crate) gathers_outputs: bool,
    /// The norm that makes the input, if a matmul of one row can compute it.
    pub(crate) norm: Option<InputNorm>,
    pub(crate) operands: Vec<Operand>,
    pub(crate) epilogue: Epilogue,
    pub(crate) experts: Option<Experts>,
}

impl Matmul {
    pub(crate) fn is_gated(&self) -> bool {
        matches!(self.epilogue, Epilogue::Gate { .. })
    }

    /// Rows of all its weights.
    pub(crate) fn rows(&self, plan: &Plan) -> usize {
        self.operands.iter().map(|operand| plan.weight(operand.weight).rows).sum()
    }

    /// Results of a row: one of each of its experts.
    pub(crate) fn used(&self) -> usize {
        self.experts.map_or(1, |experts| experts.used)
    }
}

/// An RMS norm that matmuls compute themselves where there is one row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct InputNorm {
    pub(crate) input: Value,
    pub(crate) weight: WeightId,
    pub(crate) eps: f32,
}

/// A gate of a stage's result: the product of the result and the activated value is stored.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Gate {
    pub(crate) act: Act,
    pub(crate) by: Value,
}

/// What a norm's result is added to, and the weight that the sum is multiplied by.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Residual {
    pub(crate) to: Value,
    pub(crate) scale: Option<WeightId>,
}

/// A norm.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Norm {
    pub(crate) input: Value,
    pub(crate) kind: NormKind,
    pub(crate) weight: Option<WeightId>,
    pub(crate) bias: Option<WeightId>,
    pub(crate) eps: f32,
    pub(crate) groups: usize,
    pub(crate) gate: Option<Gate>,
    pub(crate) residual: Option<Residual>,
    pub(crate) out: Option<Value>,
    pub(crate) half_out: Option<Value>,
    /// Whether all readers are matmuls that can compute it.
    pub(crate) is_inlined: bool,
}

/// A rotation of the keys that attention stores, and of the queries.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Rotation {
    /// The rotated queries in steps with several rows of a sequence.
    pub(crate) q_out: Value,
    pub(crate) style: RopeStyle,
    pub(crate) rope: usize,
}

/// Stores keys and values in the KV cache, if it has any, and attends to the cache.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Attend {
    pub(crate) q: Value,
    /// The step's keys and values; none if an earlier stage has stored them, and rotated its
    /// queries otherwise.
    pub(crate) kv: Option<[Value; 2]>,
    /// Whether an earlier stage stores them. Kernels that attend and store at once need them all
    /// the same, as the step's own token is in no page for them; they store the same bits again.
    pub(crate) shares_kv: bool,
    pub(crate) rotation: Option<Rotation>,
    pub(crate) attention: Attention,
    pub(crate) slot: usize,
    pub(crate) out: Option<Value>,
    pub(crate) half_out: Option<Value>,
}

/// A rotation in a stage of its own.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Rotate {
    pub(crate) input: Value,
    pub(crate) head_dim: usize,
    pub(crate) style: RopeStyle,
    pub(crate) rope: usize,
    pub(crate) out: Value,
}

/// Functions of single elements.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Function {
    Act(Act),
    Glu(Act),
    /// One gate for each of equal parts of the row.
    GluOfParts(Act),
    Add,
    Scale(f32),
    Softcap(f32),
    /// To these bounds.
    Clamp(f32, f32),
}

/// Columns of one value, or of two side by side, in each group of columns.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct SliceConcat {
    pub(crate) a: Value,
    pub(crate) b: Option<Value>,
    pub(crate) groups: usize,
    /// The first column of each group of `a`.
    pub(crate) start: usize,
    pub(crate) out: Value,
}

/// The choice of experts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Route {
    pub(crate) input: Value,
    pub(crate) bias: Option<WeightId>,
    pub(crate) routing: Routing,
    /// An index into [`Program::routings`](super::Program::routings).
    pub(crate) index: usize,
    pub(crate) out: Value,
}

/// A convolution with state, and the activation of its result.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Conv {
    pub(crate) input: Value,
    pub(crate) weight: WeightId,
    pub(crate) bias: Option<WeightId>,
    pub(crate) state: usize,
    pub(crate) act: Act,
    pub(crate) out: Value,
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
    pub(crate) gate: Option<Gate>,
    pub(crate) out: Option<Value>,
    pub(crate) half_out: Option<Value>,
}

/// The gated delta rule.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct DeltaRuleStage {
    /// qkv, decay, beta.
    pub(crate) inputs: [Value; 3],
    /// a, dt_bias.
    pub(crate) weights: [WeightId; 2],
    pub(crate) eps: f32,
    pub(crate) rule: DeltaRule,
    pub(crate) state: usize,
    pub(crate) out: Value,
}

/// A stage of hyper-connections, sparse attention or experts that are chosen already. The
/// persistent kernel runs none of them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Sparse {
    Mix(Mix),
    HyperWeights(HyperWeights),
    Compress(CompressStage),
    Select(SelectStage),
    Attend(AttendEntries),
    Route(RouteChosen),
}

/// Sums of the parts of rows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Mix {
    pub(crate) input: Value,
    pub(crate) weights: Value,
    pub(crate) results: usize,
    pub(crate) out: Value,
}

/// The weights of hyper-connections.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct HyperWeights {
    pub(crate) input: Value,
    /// scale, base.
    pub(crate) weights: [WeightId; 2],
    pub(crate) streams: usize,
    pub(crate) iterations: usize,
    pub(crate) eps: f32,
    pub(crate) out: Value,
}

/// The compression of blocks of tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct CompressStage {
    pub(crate) input: Value,
    pub(crate) scores: Value,
    pub(crate) compression: Compression,
    pub(crate) state: usize,
    pub(crate) out: Value,
}

/// Stores an indexer's keys and selects entries.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct SelectStage {
    pub(crate) q: Value,
    pub(crate) k: Value,
    pub(crate) weights: Value,
    pub(crate) indexer: Indexer,
    pub(crate) slot: usize,
    pub(crate) out: Value,
}

/// Stores keys, values and blocks, and attends to entries.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct AttendEntries {
    pub(crate) attend: Attend,
    pub(crate) selected: Option<Value>,
    /// The key and value of the block that ends with each row, and their slot.
    pub(crate) blocks: Option<(Value, usize)>,
}

/// A choice of experts that is made already.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct RouteChosen {
    pub(crate) route: Route,
    /// Numbers of experts.
    pub(crate) chosen: Value,
}

impl Sparse {
    fn values(&self) -> Vec<Option<Value>> {
        match *self {
            Sparse::Mix(m) => vec![Some(m.input), Some(m.weights), Some(m.out)],
            Sparse::HyperWeights(h) => vec![Some(h.input), Some(h.out)],
            Sparse::Compress(c) => vec![Some(c.input), Some(c.scores), Some(c.out)],
            Sparse::Select(s) => vec![Some(s.q), Some(s.k), Some(s.weights), Some(s.out)],
            Sparse::Attend(AttendEntries { attend: a, selected, blocks }) => {
                let [k, v] = a.kv.map_or([None; 2], |kv| kv.map(Some));
                let blocks = blocks.map(|(value, _)| value);
                vec![Some(a.q), k, v, selected, blocks, a.out, a.half_out]
            }
            Sparse::Route(r) => vec![Some(r.route.input), Some(r.chosen), Some(r.route.out)],
        }
    }
}

/// An all-gather: devices get each other's columns of a matmul's results.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Gather {
    /// Values, each with the weight whose local rows are the device's columns of it.
    pub(crate) results: Vec<(Value, WeightId)>,
    /// Results of each row.
    pub(crate) used: usize,
    /// Whether all weights are sharded: the matmul stores the results on connected devices.
    pub(crate) are_stored: bool,
}

/// The work of a stage.
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
    Norm(Norm),
    /// Converts floats to matmul inputs.
    ConvertInput {
        input: Value,
        halves: F16Rows,
        out: Value,
    },
    Matmul(Matmul),
    Rotate(Rotate),
    Attend(Attend),
    Elementwise {
        function: Function,
        a: Value,
        b: Option<Value>,
        out: Option<Value>,
        half_out: Option<Value>,
    },
    ScaleBy {
        input: Value,
        weight: WeightId,
        out: Value,
    },
    Rescale {
        input: Value,
        like: Value,
        out: Value,
    },
    Cutoff {
        input: Value,
        deviations: f32,
        out: Value,
    },
    SliceConcat(SliceConcat),
    Pool {
        input: Value,
        kind: PoolKind,
        out: Value,
    },
    Route(Route),
    ScaleExperts {
        route: Value,
        weight: WeightId,
        out: Value,
    },
    ExpertSum {
        input: Value,
        route: Value,
        out: Value,
    },
    Conv(Conv),
    Scan(ScanStage),
    DeltaRule(DeltaRuleStage),
    Sparse(Sparse),
    Gather(Gather),
}

/// A stage and the rows that it computes.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Stage {
    pub(crate) rows: Rows,
    pub(crate) work: Work,
    /// A name for profiles.
    pub(crate) name: String,
}

impl Stage {
    pub(crate) fn new(rows: Rows, work: Work, name: &str) -> Stage {
        Stage { rows, work, name: name.to_owned() }
    }

    /// Passes every value that is read or written to `show`.
    pub(crate) fn values(&self, show: &mut dyn FnMut(Value)) {
        let values: Vec<Option<Value>> = match &self.work {
            Work::Angles { .. } => vec![],
            Work::Input { out } | Work::Embed { out, .. } => vec![Some(*out)],
            Work::Norm(n) => {
                let residual = n.residual.map(|residual| residual.to);
                vec![Some(n.input), n.gate.map(|gate| gate.by), residual, n.out, n.half_out]
            }
            Work::ConvertInput { input, out, .. }
            | Work::Pool { input, out, .. }
            | Work::ScaleBy { input, out, .. }
            | Work::Cutoff { input, out, .. }
            | Work::ScaleExperts { route: input, out, .. } => vec![Some(*input), Some(*out)],
            Work::Rotate(r) => vec![Some(r.input), Some(r.out)],
            Work::Route(r) => vec![Some(r.input), Some(r.out)],
            Work::Conv(c) => vec![Some(c.input), Some(c.out)],
            Work::Matmul(m) => {
                let mut values = vec![Some(m.input), m.norm.map(|n| n.input)];
                values.push(m.experts.and_then(|e| e.route));
                values.extend(m.operands.iter().map(|operand| operand.out));
                values.push(match m.epilogue {
                    Epilogue::None => None,
                    Epilogue::Add { residual: value, .. }
                    | Epilogue::Gate { out: value, .. }
                    | Epilogue::Act { out: value, .. } => Some(value),
                });
                values
            }
            Work::Attend(a) => {
                let q_out = a.rotation.map(|r| r.q_out);
                let [k, v] = a.kv.map_or([None; 2], |kv| kv.map(Some));
                vec![Some(a.q), k, v, q_out, a.out, a.half_out]
            }
            Work::Elementwise { a, b, out, half_out, .. } => vec![Some(*a), *b, *out, *half_out],
            Work::Rescale { input, like, out } => vec![Some(*input), Some(*like), Some(*out)],
            Work::SliceConcat(a) => vec![Some(a.a), a.b, Some(a.out)],
            Work::ExpertSum { input, route, out } => vec![Some(*input), Some(*route), Some(*out)],
            Work::Scan(s) => {
                let outs = [s.gate.map(|gate| gate.by), s.out, s.half_out];
                s.inputs.into_iter().map(Some).chain(outs).collect()
            }
            Work::DeltaRule(r) => r.inputs.into_iter().chain([r.out]).map(Some).collect(),
            Work::Sparse(s) => s.values(),
            Work::Gather(g) => g.results.iter().map(|(value, _)| Some(*value)).collect(),
        };
        values.into_iter().flatten().for_each(show);
    }
}
