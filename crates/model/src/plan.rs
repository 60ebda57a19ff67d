//! The Plan: what a model computes, in the order in which it computes it. One value per
//! operation; the number of a value is the number of the operation that makes it.

use std::fmt;

use bodkin_gguf::Format;

use crate::rope::Rope;

/// A value `[rows, width]` of f32, numbered by the operation that makes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Value(pub usize);

/// An index into [`Plan::weights`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WeightId(pub usize);

/// An index into [`Plan::slots`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SlotId(pub usize);

/// A tensor of the file that the plan reads.
#[derive(Clone, Debug, PartialEq)]
pub struct Weight {
    /// The tensor's name in the file, such as `blk.0.attn_q.weight`.
    pub name: String,
    /// How its blocks are stored.
    pub format: Format,
    /// Elements in a row: the width of the value that it is multiplied with.
    pub cols: usize,
    /// The number of rows: the width of the result.
    pub rows: usize,
}

impl Weight {
    /// The size in the file.
    pub fn bytes(&self) -> u64 {
        let row = self.format.row_bytes(self.cols).expect("the reader checked the row length");
        row as u64 * self.rows as u64
    }
}

/// Which rows of a step a value has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rows {
    /// One row for each token of the step.
    Tokens,
    /// One row for each token whose logits were asked for.
    Outputs,
}

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
    /// `x * sigmoid(x)`.
    Silu,
    /// The tanh approximation of GELU, as trained into Gemma.
    GeluTanh,
}

/// Causal attention over everything that a sequence has stored in a slot.
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
}

/// What an attention operation keeps of each token of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvSlot {
    /// Key and value heads.
    pub kv_heads: usize,
    /// Width of a key head.
    pub key_dim: usize,
    /// Width of a value head.
    pub value_dim: usize,
    /// Tokens further back than this are never read again.
    pub window: Option<usize>,
}

impl KvSlot {
    /// Elements of key and value together that one token adds.
    pub fn elements_per_token(&self) -> usize {
        self.kv_heads * (self.key_dim + self.value_dim)
    }
}

/// One operation. Every operand is a value made before it.
#[derive(Clone, Debug, PartialEq)]
pub enum Op {
    /// The rows of `table` that the token ids name.
    Embed {
        /// `[vocabulary, width]`.
        table: WeightId,
    },
    /// Normalise each of `groups` equal parts of a row on its own.
    Norm {
        /// `[rows, groups * n]`.
        input: Value,
        /// RMS or layer norm.
        kind: NormKind,
        /// `[n]`, shared by all parts.
        weight: WeightId,
        /// `[n]`, added last.
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
    /// `act(gate) * up`.
    Glu {
        /// `[rows, n]`.
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
    /// Columns `start .. start + len` of each row.
    Slice {
        /// `[rows, n]`.
        input: Value,
        /// First column.
        start: usize,
        /// Number of columns.
        len: usize,
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
        let (a, b, c) = match *self {
            Op::Embed { .. } => (None, None, None),
            Op::Norm { input, .. }
            | Op::Linear { input, .. }
            | Op::Rope { input, .. }
            | Op::Scale { input, .. }
            | Op::Softcap { input, .. }
            | Op::Slice { input, .. }
            | Op::Logits { input, .. } => (Some(input), None, None),
            Op::Attention { q, k, v, .. } => (Some(q), Some(k), Some(v)),
            Op::Glu { gate, up, .. } => (Some(gate), Some(up), None),
            Op::Add { a, b } => (Some(a), Some(b), None),
        };
        [a, b, c].into_iter().flatten()
    }

    /// The weights that the operation reads.
    pub fn weights(&self) -> impl Iterator<Item = WeightId> {
        let (a, b) = match self {
            Op::Embed { table } => (Some(*table), None),
            Op::Norm { weight, bias, .. }
            | Op::Linear { weight, bias, .. }
            | Op::Logits { weight, bias, .. } => (Some(*weight), *bias),
            Op::Rope { rope, .. } => (rope.factors, None),
            Op::Attention { .. }
            | Op::Glu { .. }
            | Op::Add { .. }
            | Op::Scale { .. }
            | Op::Softcap { .. }
            | Op::Slice { .. } => (None, None),
        };
        [a, b].into_iter().flatten()
    }

    /// The operation's word in the plan's text.
    pub fn name(&self) -> &'static str {
        match self {
            Op::Embed { .. } => "embed",
            Op::Norm { .. } => "norm",
            Op::Linear { .. } => "linear",
            Op::Rope { .. } => "rope",
            Op::Attention { .. } => "attention",
            Op::Glu { .. } => "glu",
            Op::Add { .. } => "add",
            Op::Scale { .. } => "scale",
            Op::Softcap { .. } => "softcap",
            Op::Slice { .. } => "slice",
            Op::Logits { .. } => "logits",
        }
    }
}

/// A model as data.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// What `general.architecture` says.
    pub architecture: String,
    /// The longest sequence that the model was made for.
    pub context_length: usize,
    /// The number of token ids, and the width of the logits.
    pub vocabulary: usize,
    /// Every tensor that is read, once each.
    pub weights: Vec<Weight>,
    /// The state of a sequence: one slot for each attention operation.
    pub slots: Vec<KvSlot>,
    /// In order of execution; the last one makes the logits.
    pub ops: Vec<Op>,
    /// The width of the value that each operation makes.
    pub widths: Vec<usize>,
}

impl Plan {
    /// The weight behind an index.
    pub fn weight(&self, id: WeightId) -> &Weight {
        &self.weights[id.0]
    }

    /// The width of a value.
    pub fn width(&self, value: Value) -> usize {
        self.widths[value.0]
    }

    /// The rows of a value: those from the logits on are the ones that were asked for.
    pub fn rows(&self, value: Value) -> Rows {
        let logits = self.ops.iter().position(|op| matches!(op, Op::Logits { .. }));
        if logits.is_some_and(|i| value.0 >= i) { Rows::Outputs } else { Rows::Tokens }
    }

    /// The value whose rows are the logits.
    pub fn output(&self) -> Value {
        Value(self.ops.len() - 1)
    }

    /// The distinct windows of the slots, in order of first use: slots with the same window share
    /// a page table.
    pub fn windows(&self) -> Vec<Option<usize>> {
        self.distinct_windows().collect()
    }

    /// As [`Plan::windows`], for steps, which allocate nothing.
    pub fn distinct_windows(&self) -> impl Iterator<Item = Option<usize>> {
        let is_new = |i: usize| self.slots[..i].iter().all(|s| s.window != self.slots[i].window);
        (0..self.slots.len()).filter(move |&i| is_new(i)).map(|i| self.slots[i].window)
    }

    fn fmt_op(&self, f: &mut fmt::Formatter<'_>, op: &Op) -> fmt::Result {
        for (i, value) in op.inputs().enumerate() {
            write!(f, "{} %{}", if i == 0 { "" } else { "," }, value.0)?;
        }
        for id in op.weights() {
            let w = self.weight(id);
            write!(f, " {} {}[{}, {}]", w.name, w.format.name(), w.rows, w.cols)?;
        }
        match op {
            Op::Norm { kind, eps, groups, .. } => {
                let kind = match kind {
                    NormKind::Rms => "rms",
                    NormKind::Layer => "layer",
                };
                write!(f, " {kind} eps {eps:e}")?;
                if *groups > 1 {
                    write!(f, " groups {groups}")?;
                }
                Ok(())
            }
            Op::Rope { heads, head_dim, rope, .. } => write!(f, " heads {heads}x{head_dim} {rope}"),
            Op::Attention { attention: a, slot, .. } => {
                write!(
                    f,
                    " slot {} heads {}/{} dims {}/{} scale {}",
                    slot.0, a.heads, a.kv_heads, a.key_dim, a.value_dim, a.scale
                )?;
                a.window.map_or(Ok(()), |w| write!(f, " window {w}"))?;
                a.softcap.map_or(Ok(()), |c| write!(f, " softcap {c}"))
            }
            Op::Glu { act, .. } => f.write_str(match act {
                Act::Silu => " silu",
                Act::GeluTanh => " gelu_tanh",
            }),
            Op::Scale { factor, .. } => write!(f, " by {factor}"),
            Op::Softcap { cap, .. } => write!(f, " cap {cap}"),
            Op::Slice { start, len, .. } => write!(f, " {start}..{}", start + len),
            Op::Embed { .. } | Op::Linear { .. } | Op::Add { .. } | Op::Logits { .. } => Ok(()),
        }
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "plan {} vocabulary {} context {}",
            self.architecture, self.vocabulary, self.context_length
        )?;
        for (i, op) in self.ops.iter().enumerate() {
            write!(f, "%{i} [{}] = {}", self.widths[i], op.name())?;
            self.fmt_op(f, op)?;
            writeln!(f)?;
        }
        Ok(())
    }
}
