//! A lowered plan: stages, which threads run with a barrier after each.

use bodkin_model::{
    Act, Attention, Compression, DeltaRule, EmbedBy, Indexer, NormKind, PoolKind, Rope, RopeStyle,
    Routing, Rows, Scan, WeightId,
};

use crate::linear::ActivationFormats;

/// The location of a value: a buffer, or the caller's logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Operand {
    /// The buffer; `None` for the caller's logits.
    pub(crate) buffer: Option<usize>,
    /// Elements of a row.
    pub(crate) width: usize,
}

/// A row-local operation.
#[derive(Clone, Debug)]
pub(crate) enum RowOp {
    /// Computes the cosines and sines of the row's position for a rope.
    Angles { rope: usize },
    /// Copies an input row of the batch.
    Input { out: Operand },
    /// Looks up a row of an embedding table.
    Embed { table: WeightId, by: EmbedBy, out: Operand },
    /// Normalises.
    Norm {
        input: Operand,
        out: Operand,
        kind: NormKind,
        weight: Option<WeightId>,
        bias: Option<WeightId>,
        eps: f32,
        groups: usize,
    },
    /// Applies the rope.
    Rope { input: Operand, out: Operand, head_dim: usize, style: RopeStyle, rope: usize },
    /// Stores keys, and values if there are any, in the KV cache, if the row ends an entry.
    Store { k: Operand, v: Option<Operand>, slot: usize },
    /// `act(input)`.
    Act { input: Operand, act: Act, out: Operand },
    /// `act(gate) * up`.
    Glu { gate: Operand, up: Operand, act: Act, out: Operand },
    /// `a + b`.
    Add { a: Operand, b: Operand, out: Operand },
    /// `input * factor`.
    Scale { input: Operand, factor: f32, out: Operand },
    /// `input * weight`.
    ScaleBy { input: Operand, weight: WeightId, out: Operand },
    /// `cap * tanh(input / cap)`.
    Softcap { input: Operand, cap: f32, out: Operand },
    /// `min(max(input, low), high)`.
    Clamp { input: Operand, low: f32, high: f32, out: Operand },
    /// Sums of the parts of a row.
    Mix { input: Operand, weights: Operand, results: usize, out: Operand },
    /// The weights of hyper-connections.
    HyperWeights {
        input: Operand,
        scale: WeightId,
        base: WeightId,
        streams: usize,
        iterations: usize,
        eps: f32,
        out: Operand,
    },
    /// Copies some columns of each group.
    Slice { input: Operand, groups: usize, start: usize, out: Operand },
    /// Interleaves the groups of two rows.
    Concat { a: Operand, b: Operand, groups: usize, out: Operand },
    /// Chooses experts.
    Route {
        input: Operand,
        chosen: Option<Operand>,
        bias: Option<WeightId>,
        routing: Routing,
        out: Operand,
    },
    /// Gives parts of a row the length of another row.
    Rescale { input: Operand, like: Operand, out: Operand },
    /// What exceeds the mean of the row by some standard deviations.
    Cutoff { input: Operand, deviations: f32, out: Operand },
    /// Multiplies the weights of the chosen experts.
    ScaleExperts { route: Operand, weight: WeightId, out: Operand },
    /// Adds up the outputs of the chosen experts by their weights.
    ExpertSum { input: Operand, route: Operand, out: Operand },
    /// Pools the rows of a sequence.
    Pool { input: Operand, kind: PoolKind, out: Operand },
    /// Converts the row, or its part for each expert, to activation formats in permuted order.
    QuantizeExpertInputs {
        input: Operand,
        cols: usize,
        permutation: usize,
        formats: ActivationFormats,
    },
    /// Zeroes values below the threshold of a linear with sparse input.
    Mask { values: Operand, linear: usize },
    /// Converts the row to the activation formats of the next linears.
    Quantize { input: Operand, formats: ActivationFormats },
}

impl RowOp {
    /// The name in profiles.
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
            RowOp::ScaleBy { .. } => "scale_by",
            RowOp::Rescale { .. } => "rescale",
            RowOp::Cutoff { .. } => "cutoff",
            RowOp::Softcap { .. } => "softcap",
            RowOp::Clamp { .. } => "clamp",
            RowOp::Mix { .. } => "mix",
            RowOp::HyperWeights { .. } => "hyper_weights",
            RowOp::Slice { .. } => "slice",
            RowOp::Concat { .. } => "concat",
            RowOp::Route { .. } => "route",
            RowOp::ScaleExperts { .. } => "scale_experts",
            RowOp::ExpertSum { .. } => "expert_sum",
            RowOp::Pool { .. } => "pool",
            RowOp::Mask { .. } => "mask",
            RowOp::Quantize { .. } | RowOp::QuantizeExpertInputs { .. } => "quantize",
        }
    }
}

/// A linear layer of a stage: a weight, times the input of the stage.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Linear {
    pub(crate) weight: WeightId,
    pub(crate) bias: Option<WeightId>,
    pub(crate) out: Operand,
}

/// The work between two barriers.
#[derive(Clone, Debug)]
pub(crate) enum Stage {
    /// Row-local operations; threads share the rows.
    Rows { rows: Rows, ops: Vec<RowOp> },
    /// Linears with one input, which the stage before quantised; threads share the weight rows.
    Matmul { rows: Rows, input: Operand, linears: Vec<Linear> },
    /// Attention; threads share query tiles or KV splits.
    Attention { q: Operand, out: Operand, attention: Attention, slot: usize },
    /// Attention to entries that are gathered first; threads share rows and heads.
    GatheredAttention(GatheredStage),
    /// Selects cached entries; threads share the rows.
    Select(SelectStage),
    /// Permutes the (token, expert) pairs by expert, on one thread.
    Permute { permutation: usize },
    /// The scores of the next layer's router for this layer's input, in steps of few rows.
    Prediction { input: Operand, linear: Linear },
    /// A grouped GEMM over the chosen experts, whose input the stage before quantised; threads
    /// share the weight rows.
    GroupedGemm { input: Operand, cols: usize, permutation: usize, linears: Vec<Linear> },
    /// A causal convolution; threads share the columns.
    Conv { input: Operand, weight: WeightId, bias: Option<WeightId>, state: usize, out: Operand },
    /// A compression of blocks of tokens; threads share the columns.
    Compress(CompressStage),
    /// A state-space scan; threads share the heads.
    Scan(ScanStage),
    /// The gated delta rule; threads share the heads, or their columns.
    DeltaRule(DeltaRuleStage),
}

/// The operands of attention to selected entries, or to the blocks of another slot too.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GatheredStage {
    pub(crate) q: Operand,
    pub(crate) out: Operand,
    pub(crate) attention: Attention,
    pub(crate) slot: usize,
    /// The slot of the blocks.
    pub(crate) blocks: Option<usize>,
    /// The selected entries: of the blocks if there are any.
    pub(crate) selected: Option<Operand>,
}

/// The operands of a selection.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SelectStage {
    pub(crate) q: Operand,
    pub(crate) weights: Operand,
    pub(crate) indexer: Indexer,
    pub(crate) slot: usize,
    pub(crate) out: Operand,
}

/// The operands of a compression.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CompressStage {
    pub(crate) input: Operand,
    pub(crate) scores: Operand,
    pub(crate) compression: Compression,
    pub(crate) state: usize,
    pub(crate) out: Operand,
}

/// The operands of a state-space scan.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ScanStage {
    pub(crate) x: Operand,
    pub(crate) b: Operand,
    pub(crate) c: Operand,
    pub(crate) dt: Operand,
    pub(crate) a: WeightId,
    pub(crate) d: WeightId,
    pub(crate) dt_bias: WeightId,
    pub(crate) scan: Scan,
    pub(crate) state: usize,
    pub(crate) out: Operand,
}

/// The operands of the gated delta rule.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DeltaRuleStage {
    pub(crate) qkv: Operand,
    pub(crate) decay: Operand,
    pub(crate) beta: Operand,
    pub(crate) a: WeightId,
    pub(crate) dt_bias: WeightId,
    pub(crate) eps: f32,
    pub(crate) rule: DeltaRule,
    pub(crate) state: usize,
    pub(crate) out: Operand,
}

/// The permutation of (token, expert) pairs by expert, for a grouped GEMM.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct ExpertPermutation {
    /// The output of the router; `None` if every token uses all experts.
    pub(crate) route: Option<Operand>,
    /// The plan's routing operation.
    pub(crate) op: Option<usize>,
    /// Experts per token.
    pub(crate) used: usize,
    /// All experts.
    pub(crate) experts: usize,
    /// What the next layer with experts will probably choose, if those are cached.
    pub(crate) prediction: Option<Prediction>,
}

/// A routing that gets the scores of [`Stage::Prediction`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Prediction {
    /// The permutation of the layer that it is about.
    pub(crate) permutation: usize,
    pub(crate) scores: Operand,
    pub(crate) bias: Option<WeightId>,
    pub(crate) routing: Routing,
    /// Where the weights and numbers of the experts go.
    pub(crate) out: Operand,
}

/// The lowered plan.
#[derive(Clone, Debug)]
pub(crate) struct Program {
    pub(crate) stages: Vec<Stage>,
    /// The distinct ropes.
    pub(crate) ropes: Vec<Rope>,
    /// The distinct expert permutations.
    pub(crate) permutations: Vec<ExpertPermutation>,
    /// The widest row of each buffer.
    pub(crate) buffer_widths: Vec<usize>,
}
