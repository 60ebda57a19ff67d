//! The kinds of operation with their shapes, weights and state. The reference interpreter of the
//! backend crate defines their semantics, formula by formula.

mod functions;
mod operands;
mod recurrent;
mod sparse;

use std::ops::Range;

pub use sparse::{Compression, Entries, Indexer};

use crate::ids::{SlotId, StateId, Value, WeightId};
use crate::rope::Rope;

pub use functions::{Temperature, Xielu};
pub use recurrent::{DeltaRule, Scan};

/// How a norm centres and scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormKind {
    /// Divide by the root of the mean square.
    Rms,
    /// Subtract the mean, divide by the standard deviation.
    Layer,
}

/// An elementwise activation function.
#[derive(Clone, Copy, Debug, PartialEq)]
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
    /// `ln(1 + exp(x))`.
    Softplus,
    /// xIELU, of [`Op::Act`] only.
    Xielu(Xielu),
    /// GPT-OSS's gate, of [`Op::Glu`] only: `g * sigmoid(1.702 * g) * (u + 1)`, with
    /// `g = min(gate, 7)` and `u` the other value clamped to -7 to 7.
    ClampedSwish,
}

/// The table row that a token reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EmbedBy {
    /// The row of the token id.
    Token,
    /// The row of the position in the sequence.
    Position,
    /// The row of the position modulo the number of rows.
    PositionModulo,
    /// Row 0 for every token.
    First,
}

/// How the rows of a sequence are pooled into one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PoolKind {
    /// The mean of all rows.
    Mean,
    /// The first row.
    First,
    /// The last row.
    Last,
    /// The sum of the rows up to the output's own, where the sequence begins in the step; else the
    /// output's own row, for a caller that has the sum of those before it.
    Sum,
}

/// How the scores of experts become probabilities.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gating {
    /// Softmax over all experts.
    Softmax,
    /// The sigmoid of each score.
    Sigmoid,
    /// Experts are selected by score; softmax over the selected ones.
    SoftmaxOfChosen,
    /// `sqrt(softplus(score))`.
    SqrtSoftplus,
}

/// How a token's experts are selected and weighted.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Routing {
    /// Experts of the layer.
    pub experts: usize,
    /// Experts selected for each token.
    pub used: usize,
    /// From scores to probabilities.
    pub gating: Gating,
    /// Groups of experts, of equal size; 1 for no groups.
    pub groups: usize,
    /// Groups from which experts are selected: those with the largest sums of their two highest
    /// probabilities.
    pub groups_used: usize,
    /// Divide the weights of the selected experts by their sum, or by 2^-14 if that is larger.
    pub normalize: bool,
    /// Multiplies the weights.
    pub scale: f32,
}

/// Attention over the cached keys and values of a sequence.
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
    /// Multiplies the dot products.
    pub scale: f32,
    /// Multiplies them too, by the query's position.
    pub temperature: Option<Temperature>,
    /// `cap * tanh(score / cap)` on the scaled scores.
    pub softcap: Option<f32>,
    /// A query attends to itself and the `window - 1` tokens before it; if attention is not causal,
    /// to itself and `window / 2` tokens on each side.
    pub window: Option<usize>,
    /// Whether windows do not slide: a query attends to the earlier tokens of its own chunk of
    /// `window` tokens.
    pub chunked: bool,
    /// Whether a query attends only to itself and earlier tokens. If not, its whole sequence must
    /// be in one step.
    pub causal: bool,
    /// `[heads]`: attention sinks, scores that only add to the softmax denominator.
    pub sinks: Option<WeightId>,
    /// The entries that queries attend to. Other than [`Entries::Tokens`], of causal attention
    /// only.
    pub entries: Entries,
}

impl Attention {
    /// The positions that a query at `position` attends to, of a sequence that ends before `end`.
    pub fn visible(&self, position: usize, end: usize) -> Range<usize> {
        match (self.causal, self.window) {
            (true, None) => 0..position + 1,
            (true, Some(w)) if self.chunked => position / w * w..position + 1,
            (true, Some(w)) => (position + 1).saturating_sub(w)..position + 1,
            (false, None) => 0..end,
            (false, Some(w)) => position.saturating_sub(w / 2)..end.min(position + w / 2 + 1),
        }
    }
}

/// One operation. Every operand is the value of an earlier operation.
#[derive(Clone, Debug, PartialEq)]
pub enum Op {
    /// Input rows of the step: the output of the preceding part of a split plan.
    Input,
    /// One row of `table` for each token.
    Embed {
        /// `[vocabulary, width]`, or one row for each position or type.
        table: WeightId,
        /// Which row.
        by: EmbedBy,
    },
    /// Normalises each of `groups` equal parts of a row.
    Norm {
        /// `[rows, groups * n]`.
        input: Value,
        /// RMS or layer norm.
        kind: NormKind,
        /// `[n]`, shared by all parts, or `[groups * n]`; none multiplies by nothing.
        weight: Option<WeightId>,
        /// Of the weight's length, added last; none without a weight.
        bias: Option<WeightId>,
        /// Added to the mean square.
        eps: f32,
        /// Parts of a row: 1 for a norm over the row, the number of heads for a norm per head.
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
    /// Rotates each head by its token's position.
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
    /// Stores keys and values in the KV cache, then attends with `q`.
    Attention {
        /// `[rows, heads * key_dim]`.
        q: Value,
        /// Keys, `[rows, kv_heads * key_dim]`, and values, `[rows, kv_heads * value_dim]`. Without
        /// them, the slot has those that an earlier operation has stored in this step.
        kv: Option<[Value; 2]>,
        /// Heads, scale, window.
        attention: Attention,
        /// The KV cache.
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
        /// `[rows, n]`, or `[rows, groups]` with one gate for each of equal parts of a row.
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
    /// `input * weight`.
    ScaleBy {
        /// `[rows, n]`.
        input: Value,
        /// `[n]`, or `[1]` for all elements.
        weight: WeightId,
    },
    /// Gives each part of a row the length of another row: the root of the sum of its squares.
    Rescale {
        /// `[rows, parts * n]`.
        input: Value,
        /// `[rows, n]`.
        like: Value,
    },
    /// `max(input - mean - deviations * deviation, 0)` with the mean and the standard deviation of
    /// the row, of `n - 1` degrees of freedom.
    Cutoff {
        /// `[rows, n]`.
        input: Value,
        /// The distance of the cutoff from the mean, in standard deviations.
        deviations: f32,
    },
    /// `cap * tanh(input / cap)`.
    Softcap {
        /// `[rows, n]`.
        input: Value,
        /// The bound of the result.
        cap: f32,
    },
    /// `min(max(input, low), high)`.
    Clamp {
        /// `[rows, n]`.
        input: Value,
        /// The least result.
        low: f32,
        /// The largest result, not below `low`.
        high: f32,
    },
    /// Sums of the parts of a row: result `j` is the sum over parts `i` of `weights[i][j]` times
    /// part `i`.
    Mix {
        /// `[rows, parts * n]`.
        input: Value,
        /// `[rows, parts * results]`, the weights of a part side by side.
        weights: Value,
        /// Parts of a result row, each of `n` elements.
        results: usize,
    },
    /// The weights of hyper-connections (manifold-constrained, Xie et al. 2025), from
    /// `x = input * scale + base`, with one scale for each of the three parts. For `s` streams:
    ///
    /// - `s` weights of the streams in the input of a layer, `sigmoid(x) + eps`;
    /// - `s` weights of the layer's output in each stream, `2 * sigmoid(x)`;
    /// - `[s, s]` weights of the old streams in the new ones: a softmax over each row of x, plus
    ///   `eps`, then columns, and `iterations - 1` times rows and columns, divided by their sums
    ///   plus `eps` (Sinkhorn-Knopp).
    ///
    /// An input of width `s` has the first part only.
    HyperWeights {
        /// `[rows, s * (s + 2)]`, or `[rows, s]`.
        input: Value,
        /// `[3]`, or `[1]`.
        scale: WeightId,
        /// Of the input's width.
        base: WeightId,
        /// `s`.
        streams: usize,
        /// Normalisations of the columns; at least 1.
        iterations: usize,
        /// Added to weights and sums.
        eps: f32,
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
    /// Concatenates each of `groups` equal parts of a row of `a` with the same part of `b`.
    Concat {
        /// `[rows, groups * n]`.
        a: Value,
        /// `[rows, groups * m]`, or `[rows, m]` for all parts.
        b: Value,
        /// Parts of a row.
        groups: usize,
    },
    /// Selects each token's experts. A row is their weights, then their numbers, in order of
    /// descending probability; ties go to the lower number.
    Route {
        /// `[rows, experts]`: the scores.
        input: Value,
        /// `[rows, used]`: the experts' numbers, if not the scores decide on them. Numbers that are
        /// too high mean the last expert.
        chosen: Option<Value>,
        /// `[experts]`, added to the probabilities for the selection only.
        bias: Option<WeightId>,
        /// Expert counts, gating, weights.
        routing: Routing,
    },
    /// Multiplies the weights of a token's experts by numbers of these experts.
    ScaleExperts {
        /// `[rows, 2 * used]`: the output of [`Op::Route`].
        route: Value,
        /// `[experts]`.
        weight: WeightId,
    },
    /// Matmuls with the matrices of the selected experts, concatenated.
    ExpertLinear {
        /// `[rows, cols]` for all experts, or `[rows, used * cols]` with one part for each.
        input: Value,
        /// `[rows, 2 * used]`: the output of [`Op::Route`]. Without it, expert `i` multiplies part
        /// `i` of the input, and all experts are used.
        route: Option<Value>,
        /// `[experts * n, cols]`.
        weight: WeightId,
        /// `[experts, n]`.
        bias: Option<WeightId>,
        /// The number of experts.
        experts: usize,
    },
    /// The weighted sum of the experts' results.
    ExpertSum {
        /// `[rows, used * n]`.
        input: Value,
        /// `[rows, 2 * used]`: the output of [`Op::Route`] or [`Op::ScaleExperts`].
        route: Value,
    },
    /// A causal convolution of each column along its sequence.
    Conv {
        /// `[rows, n]`.
        input: Value,
        /// `[n, kernel]`; the last tap is for the current token.
        weight: WeightId,
        /// `[n]`.
        bias: Option<WeightId>,
        /// The inputs before the step.
        state: StateId,
    },
    /// Compresses blocks of tokens: for each column, the sum of `input` over the tokens of a block
    /// and, if blocks overlap, of the one before, weighted by the softmax of `scores` over them.
    /// The row of a block's last token is the result; the other rows are zero.
    Compress {
        /// `[rows, dim]`, or `[rows, 2 * dim]` if blocks overlap.
        input: Value,
        /// Likewise.
        scores: Value,
        /// Ratio, width, overlap.
        compression: Compression,
        /// The sums of the current block before the step.
        state: StateId,
    },
    /// Stores `k` in a KV cache without values, then selects the entries with the highest scores
    /// for each row. A row of the result is their numbers, ascending, then -1 where there are fewer
    /// entries; ties go to the lower number.
    Select {
        /// `[rows, heads * dim]`.
        q: Value,
        /// `[rows, dim]`: the key of the token, or of the block that ends with it.
        k: Value,
        /// `[rows, heads]`.
        weights: Value,
        /// Heads, width, number of entries.
        indexer: Indexer,
        /// The KV cache.
        slot: SlotId,
    },
    /// The scan of a state-space layer.
    Scan {
        /// `[rows, heads * head_dim]`.
        x: Value,
        /// `[rows, groups * state]`.
        b: Value,
        /// `[rows, groups * state]`.
        c: Value,
        /// `[rows, heads]`, or `[rows, heads * head_dim]` by channel.
        dt: Value,
        /// `[heads]`, or `[heads * head_dim, state]`; all negative.
        a: WeightId,
        /// As wide as `dt`.
        d: WeightId,
        /// As wide as `dt`.
        dt_bias: WeightId,
        /// Heads, widths.
        scan: Scan,
        /// The state before the step.
        state: StateId,
    },
    /// The gated delta rule of a linear-attention layer.
    DeltaRule {
        /// `[rows, (2 * key_heads + value_heads) * head_dim]`: all heads of q, of k, then of v.
        qkv: Value,
        /// `[rows, value_heads]`, or `[rows, value_heads * head_dim]` by channel.
        decay: Value,
        /// `[rows, value_heads]`.
        beta: Value,
        /// `[value_heads]`, all negative.
        a: WeightId,
        /// As wide as `decay`.
        dt_bias: WeightId,
        /// Added to the squared lengths of q and k.
        eps: f32,
        /// Heads, widths.
        rule: DeltaRule,
        /// The state before the step.
        state: StateId,
    },
    /// Makes an output row of the rows of a sequence, which must be in one step, except for
    /// [`PoolKind::Last`] and [`PoolKind::Sum`].
    Pool {
        /// `[tokens, n]`.
        input: Value,
        /// The pooling function.
        kind: PoolKind,
    },
    /// The output head: as [`Op::Linear`], on the rows with requested logits.
    Logits {
        /// `[tokens, weight.cols]`.
        input: Value,
        /// `[vocabulary, weight.cols]`.
        weight: WeightId,
        /// `[vocabulary]`.
        bias: Option<WeightId>,
    },
}
