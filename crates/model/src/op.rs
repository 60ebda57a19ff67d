//! The kinds of operation, with what each needs to know: shapes, weights, state. Their meaning is
//! the reference interpreter's, formula by formula.

use crate::plan::{SlotId, StateId, Value, WeightId};
use crate::rope::Rope;

/// How a norm centres and scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormKind {
    /// Divide by the root of the mean square.
    Rms,
    /// Subtract the mean, divide by the standard deviation.
    Layer,
}

/// An elementwise activation function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Act {
    /// `x`.
    Identity,
    /// `x * sigmoid(x)`.
    Silu,
    /// `1 / (1 + exp(-x))`.
    Sigmoid,
    /// `x / 2 * (1 + erf(x / sqrt(2)))`.
    Gelu,
    /// The tanh approximation of GELU, as trained into Gemma.
    GeluTanh,
    /// `max(x, 0)^2`.
    ReluSquared,
    /// GPT-OSS's gate, of [`Op::Glu`] only: with `g = min(gate, 7)` and `u` the other value held
    /// within 7 of zero, `g * sigmoid(1.702 * g) * (u + 1)`.
    ClampedSwish,
}

/// Which row of a table a token reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EmbedBy {
    /// That of the token's id.
    Token,
    /// That of its position in the sequence.
    Position,
    /// The first, whatever the token.
    First,
}

/// How the rows of a sequence become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PoolKind {
    /// The mean of all rows.
    Mean,
    /// The first row.
    First,
    /// The last row.
    Last,
}

/// How the scores of experts become probabilities.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gating {
    /// Softmax over all experts.
    Softmax,
    /// The sigmoid of each score.
    Sigmoid,
    /// Experts are chosen by score; softmax over the chosen ones.
    SoftmaxOfChosen,
}

/// How a token's experts are chosen and weighted.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Routing {
    /// All experts of the layer.
    pub experts: usize,
    /// Experts that a token passes through.
    pub used: usize,
    /// From scores to probabilities.
    pub gating: Gating,
    /// Experts come in so many groups of equal size; 1 for no groups.
    pub groups: usize,
    /// The groups with the largest sums of their two best experts' probabilities, of which the
    /// experts are chosen.
    pub groups_used: usize,
    /// Divide the weights of the chosen by their sum, or by 2^-14 if that is more.
    pub normalize: bool,
    /// Multiplies the weights.
    pub scale: f32,
}

/// A state-space layer of Mamba 2: each head carries `h`, `[head_dim, state]`, along the sequence:
///
/// ```text
/// dt = softplus(dt + dt_bias);  h = exp(dt * a) * h + dt * x outer b;  y = h c + d * x
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scan {
    /// Heads; a multiple of `groups`.
    pub heads: usize,
    /// Width of a head of x.
    pub head_dim: usize,
    /// Heads of one group share b and c.
    pub groups: usize,
    /// Width of b and c in a group.
    pub state: usize,
}

/// Attention over everything that a sequence has stored in a slot.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Attention {
    /// Query heads; a multiple of `kv_heads`.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Width of a query and key head.
    pub key_dim: usize,
    /// Width of a value head.
    pub value_dim: usize,
    /// What the dot products are multiplied with.
    pub scale: f32,
    /// `cap * tanh(score / cap)` on the scaled scores.
    pub softcap: Option<f32>,
    /// A query sees itself and the `window - 1` tokens before it.
    pub window: Option<usize>,
    /// Whether a query sees only itself and what came before it. If not, it sees its whole
    /// sequence, which has to come in one step.
    pub causal: bool,
    /// `[heads]`: a score of each head that takes part in the softmax and adds nothing.
    pub sinks: Option<WeightId>,
}

/// One operation. Every operand is a value made before it.
#[derive(Clone, Debug, PartialEq)]
pub enum Op {
    /// Rows that come with the step: those that another part of a plan that was cut has made.
    Input,
    /// One row of `table` for each token.
    Embed {
        /// `[vocabulary, width]`, or as many rows as there are positions or types.
        table: WeightId,
        /// Which row.
        by: EmbedBy,
    },
    /// Normalise each of `groups` equal parts of a row on its own.
    Norm {
        /// `[rows, groups * n]`.
        input: Value,
        /// RMS or layer norm.
        kind: NormKind,
        /// `[n]`, shared by all parts, or `[groups * n]`.
        weight: WeightId,
        /// As long as the weight, added last.
        bias: Option<WeightId>,
        /// Added to the mean square.
        eps: f32,
        /// Parts of a row: 1 for a norm over the row, the number of heads for one per head.
        groups: usize,
    },
    /// `input * weight^T + bias`.
    Linear {
        /// `[rows, weight.cols]`.
        input: Value,
        /// `[weight.rows, weight.cols]`.
        weight: WeightId,
        /// `[weight.rows]`.
        bias: Option<WeightId>,
    },
    /// Rotate each head by its token's position.
    Rope {
        /// `[rows, heads * head_dim]`.
        input: Value,
        /// Heads in a row.
        heads: usize,
        /// Width of a head, of which the first `rope.dims` are rotated.
        head_dim: usize,
        /// Style and frequencies.
        rope: Rope,
    },
    /// Store `k` and `v`, then attend with `q`.
    Attention {
        /// `[rows, heads * key_dim]`.
        q: Value,
        /// `[rows, kv_heads * key_dim]`.
        k: Value,
        /// `[rows, kv_heads * value_dim]`.
        v: Value,
        /// Heads, scale, window.
        attention: Attention,
        /// Where keys and values are kept.
        slot: SlotId,
    },
    /// `act(input)`.
    Act {
        /// `[rows, n]`.
        input: Value,
        /// The function.
        act: Act,
    },
    /// `act(gate) * up`.
    Glu {
        /// `[rows, n]`, or `[rows, 1]` for one gate on the whole row.
        gate: Value,
        /// `[rows, n]`.
        up: Value,
        /// Applied to the gate.
        act: Act,
    },
    /// The sum of two values of the same shape.
    Add {
        /// `[rows, n]`.
        a: Value,
        /// `[rows, n]`.
        b: Value,
    },
    /// `input * factor`.
    Scale {
        /// `[rows, n]`.
        input: Value,
        /// The same for all elements.
        factor: f32,
    },
    /// `cap * tanh(input / cap)`.
    Softcap {
        /// `[rows, n]`.
        input: Value,
        /// The bound of the result.
        cap: f32,
    },
    /// Columns `start .. start + len` of each of `groups` equal parts of a row.
    Slice {
        /// `[rows, groups * n]`.
        input: Value,
        /// Parts of a row.
        groups: usize,
        /// First column in a part.
        start: usize,
        /// Number of columns of a part.
        len: usize,
    },
    /// Each of `groups` equal parts of a row of `a`, followed by that of `b`.
    Concat {
        /// `[rows, groups * n]`.
        a: Value,
        /// `[rows, groups * m]`, or `[rows, m]` for the same in all parts.
        b: Value,
        /// Parts of a row.
        groups: usize,
    },
    /// Chooses each token's experts. A row is the weights of the chosen, then their numbers: those
    /// with the largest probabilities, the largest first, the lower number first among equals.
    Route {
        /// `[rows, experts]`: the scores.
        input: Value,
        /// `[experts]`, added to the probabilities for the choice only.
        bias: Option<WeightId>,
        /// Numbers of experts, gating, weights.
        routing: Routing,
    },
    /// Products with the matrices of the chosen experts, one beside the other.
    ExpertLinear {
        /// `[rows, cols]` for all, or `[rows, used * cols]` with one part for each.
        input: Value,
        /// `[rows, 2 * used]`: what [`Op::Route`] made. Without it, part `i` of the input meets
        /// expert `i`, and all are used.
        route: Option<Value>,
        /// `[experts * n, cols]`.
        weight: WeightId,
        /// `[experts, n]`.
        bias: Option<WeightId>,
        /// The number of experts.
        experts: usize,
    },
    /// The sum of the experts' results, each times its weight.
    ExpertSum {
        /// `[rows, used * n]`.
        input: Value,
        /// `[rows, 2 * used]`: what [`Op::Route`] made.
        route: Value,
    },
    /// A causal convolution of each column along its sequence.
    Conv {
        /// `[rows, n]`.
        input: Value,
        /// `[n, kernel]`; the last tap is for the present token.
        weight: WeightId,
        /// `[n]`.
        bias: Option<WeightId>,
        /// The inputs before this step.
        state: StateId,
    },
    /// A state-space layer.
    Scan {
        /// `[rows, heads * head_dim]`.
        x: Value,
        /// `[rows, groups * state]`.
        b: Value,
        /// `[rows, groups * state]`.
        c: Value,
        /// `[rows, heads]`.
        dt: Value,
        /// `[heads]`, all negative.
        a: WeightId,
        /// `[heads]`.
        d: WeightId,
        /// `[heads]`.
        dt_bias: WeightId,
        /// Heads, widths.
        scan: Scan,
        /// The state before this step.
        state: StateId,
    },
    /// The rows of a sequence, which has to come in one step, become one row: that of an output.
    Pool {
        /// `[tokens, n]`.
        input: Value,
        /// How.
        kind: PoolKind,
    },
    /// The head: as [`Op::Linear`], on the rows whose logits were asked for.
    Logits {
        /// `[tokens, weight.cols]`.
        input: Value,
        /// `[vocabulary, weight.cols]`.
        weight: WeightId,
        /// `[vocabulary]`.
        bias: Option<WeightId>,
    },
}

impl Op {
    /// The values that the operation reads.
    pub fn inputs(&self) -> impl Iterator<Item = Value> {
        let inputs = match *self {
            Op::Input | Op::Embed { .. } => [None; 4],
            Op::Norm { input, .. }
            | Op::Linear { input, .. }
            | Op::Rope { input, .. }
            | Op::Act { input, .. }
            | Op::Scale { input, .. }
            | Op::Softcap { input, .. }
            | Op::Slice { input, .. }
            | Op::Route { input, .. }
            | Op::Conv { input, .. }
            | Op::Pool { input, .. }
            | Op::Logits { input, .. } => [Some(input), None, None, None],
            Op::Attention { q, k, v, .. } => [Some(q), Some(k), Some(v), None],
            Op::Glu { gate, up, .. } => [Some(gate), Some(up), None, None],
            Op::Add { a, b } | Op::Concat { a, b, .. } => [Some(a), Some(b), None, None],
            Op::ExpertLinear { input, route, .. } => [Some(input), route, None, None],
            Op::ExpertSum { input, route } => [Some(input), Some(route), None, None],
            Op::Scan { x, b, c, dt, .. } => [Some(x), Some(b), Some(c), Some(dt)],
        };
        inputs.into_iter().flatten()
    }

    /// The value that the operation turns into its result element by element, looking at nothing
    /// else of it: the result may take its place.
    pub fn in_place_input(&self) -> Option<Value> {
        match *self {
            Op::Act { input, .. } | Op::Scale { input, .. } | Op::Softcap { input, .. } => {
                Some(input)
            }
            Op::Glu { gate: a, up: b, .. } | Op::Add { a, b } => Some(a).filter(|_| a != b),
            _ => None,
        }
    }

    /// The weights that the operation reads.
    pub fn weights(&self) -> impl Iterator<Item = WeightId> {
        let weights = match self {
            Op::Embed { table, .. } => [Some(*table), None, None],
            Op::Norm { weight, bias, .. }
            | Op::Linear { weight, bias, .. }
            | Op::ExpertLinear { weight, bias, .. }
            | Op::Conv { weight, bias, .. }
            | Op::Logits { weight, bias, .. } => [Some(*weight), *bias, None],
            Op::Rope { rope, .. } => [rope.factors, None, None],
            Op::Attention { attention, .. } => [attention.sinks, None, None],
            Op::Route { bias, .. } => [*bias, None, None],
            Op::Scan { a, d, dt_bias, .. } => [Some(*a), Some(*d), Some(*dt_bias)],
            Op::Input
            | Op::Act { .. }
            | Op::Glu { .. }
            | Op::Add { .. }
            | Op::Scale { .. }
            | Op::Softcap { .. }
            | Op::Slice { .. }
            | Op::Concat { .. }
            | Op::ExpertSum { .. }
            | Op::Pool { .. } => [None; 3],
        };
        weights.into_iter().flatten()
    }

    /// The operation's word in the plan's text.
    pub fn name(&self) -> &'static str {
        match self {
            Op::Input => "input",
            Op::Embed { .. } => "embed",
            Op::Norm { .. } => "norm",
            Op::Linear { .. } => "linear",
            Op::Rope { .. } => "rope",
            Op::Attention { .. } => "attention",
            Op::Act { .. } => "act",
            Op::Glu { .. } => "glu",
            Op::Add { .. } => "add",
            Op::Scale { .. } => "scale",
            Op::Softcap { .. } => "softcap",
            Op::Slice { .. } => "slice",
            Op::Concat { .. } => "concat",
            Op::Route { .. } => "route",
            Op::ExpertLinear { .. } => "expert_linear",
            Op::ExpertSum { .. } => "expert_sum",
            Op::Conv { .. } => "conv",
            Op::Scan { .. } => "scan",
            Op::Pool { .. } => "pool",
            Op::Logits { .. } => "logits",
        }
    }
}
