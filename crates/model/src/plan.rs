//! The Plan: what a model computes, in order of execution. Every operation computes one value, and
//! the number of the value is the number of its operation.

use std::collections::{BTreeSet, HashSet};

use bodkin_gguf::{Format, Tensor};

use crate::ids::{Value, WeightId};
use crate::op::{Attention, Compression, DeltaRule, EmbedBy, Op, PoolKind, Routing, Scan};

/// A tensor of the file that the plan reads.
#[derive(Clone, Debug, PartialEq)]
pub struct Weight {
    /// The tensor's name in the file, such as `blk.0.attn_q.weight`.
    pub name: String,
    /// How its blocks are stored.
    pub format: Format,
    /// Elements in a row: the width of the matmul's input.
    pub cols: usize,
    /// The number of rows: the width of the matmul's output.
    pub rows: usize,
    /// The size in the file.
    pub bytes: u64,
    /// The layer that it belongs to; none for the token table, the head and their norms.
    pub layer: Option<usize>,
}

impl Weight {
    /// The name without layer number and ending, such as `attn_q`.
    pub fn role(&self) -> &str {
        let name = self.name.trim_end_matches(".weight");
        let prefix = self.layer.map(|layer| format!("blk.{layer}."));
        prefix.and_then(|prefix| name.strip_prefix(&prefix)).unwrap_or(name)
    }
}

/// Which rows of a step a value has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rows {
    /// One row for each token of the step.
    Tokens,
    /// One row for each token with requested logits.
    Outputs,
}

/// The KV cache of one operation: what it stores for each token of a sequence, or for each block of
/// tokens.
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
    /// Tokens of an entry, which is stored with the last of them: 1 for a key and value of each
    /// token.
    pub ratio: usize,
}

impl KvSlot {
    /// What an attention keeps. Without causality, a whole sequence is in one step and nothing is
    /// dropped.
    pub fn of(attention: &Attention) -> KvSlot {
        let Attention { kv_heads, key_dim, value_dim, window, causal, .. } = *attention;
        let window = window.filter(|_| causal);
        KvSlot { kv_heads, key_dim, value_dim, window, ratio: 1 }
    }

    /// Elements of the key and the value of one entry together.
    pub fn entry_elements(&self) -> usize {
        self.kv_heads * (self.key_dim + self.value_dim)
    }

    /// The entry that ends with the token at `position`, if one does.
    pub fn entry_ending_at(&self, position: usize) -> Option<usize> {
        (position + 1).is_multiple_of(self.ratio).then_some(position / self.ratio)
    }

    /// The complete entries of a sequence of `tokens` tokens.
    pub fn entries(&self, tokens: usize) -> usize {
        tokens / self.ratio
    }

    /// The most entries in a page of `tokens` tokens.
    pub fn entries_per_page(&self, tokens: usize) -> usize {
        (tokens - 1) / self.ratio + 1
    }

    /// The position whose page an entry is in, and its place among the entries of a page of
    /// `tokens` tokens.
    pub fn place(&self, entry: usize, tokens: usize) -> (usize, usize) {
        let position = (entry + 1) * self.ratio - 1;
        (position, position % tokens / self.ratio)
    }
}

/// The recurrent state of one operation for a sequence of any length: zero before its first token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecurrentState {
    /// The last inputs of a convolution, `[kernel - 1, width]`, the oldest first.
    Conv {
        /// Taps, that of the current token included.
        kernel: usize,
        /// Channels.
        width: usize,
    },
    /// The state of a scan, `[heads, head_dim, state]`.
    Scan(Scan),
    /// The state of a delta rule, `[value_heads, head_dim, head_dim]`.
    DeltaRule(DeltaRule),
    /// Maximum, denominator and numerator of the softmax of each column of a block, `[dim, 3]`, and
    /// if blocks overlap, of the columns for the next one too, `[dim, 6]`.
    Compression(Compression),
}

impl RecurrentState {
    /// Elements of the state of one sequence.
    pub fn elements(&self) -> usize {
        match *self {
            RecurrentState::Conv { kernel, width } => (kernel - 1) * width,
            RecurrentState::Scan(s) => s.heads * s.head_dim * s.state,
            RecurrentState::DeltaRule(r) => r.width() * r.head_dim,
            RecurrentState::Compression(c) => {
                if c.overlaps {
                    6 * c.dim
                } else {
                    3 * c.dim
                }
            }
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
    /// Every tensor that the plan reads, without duplicates.
    pub weights: Vec<Weight>,
    /// The KV slots: one for each attention and selection, and one for each cache of blocks.
    pub slots: Vec<KvSlot>,
    /// The recurrent states: one for each convolution, scan, delta rule and compression. A state
    /// slot of a backend holds all of them for one sequence.
    pub states: Vec<RecurrentState>,
    /// In order of execution; the last one computes the logits, or the embeddings of an encoder.
    pub ops: Vec<Op>,
    /// The width of the value of each operation.
    pub widths: Vec<usize>,
}

/// The number of a tensor's block, as its name has it.
fn block_of(name: &str) -> Option<&str> {
    name.strip_prefix("blk.")?.split_once('.').map(|(block, _)| block)
}

impl Plan {
    /// The weight of an index.
    pub fn weight(&self, id: WeightId) -> &Weight {
        &self.weights[id.0]
    }

    /// The tensors of a file that the plan does not read. A block that is not read at all, such as
    /// one for multi-token prediction, has one name: `blk.61.*`.
    pub fn unread(&self, tensors: &[Tensor]) -> BTreeSet<String> {
        let read: HashSet<&str> = self.weights.iter().map(|weight| weight.name.as_str()).collect();
        let blocks: HashSet<&str> = read.iter().filter_map(|name| block_of(name)).collect();
        let unread = tensors.iter().filter(|tensor| !read.contains(tensor.name.as_str()));
        let name = |tensor: &Tensor| match block_of(&tensor.name) {
            Some(block) if !blocks.contains(block) => format!("blk.{block}.*"),
            _ => tensor.name.clone(),
        };
        unread.map(name).collect()
    }

    /// The width of a value.
    pub fn width(&self, value: Value) -> usize {
        self.widths[value.0]
    }

    /// The rows of a value: from the logits or the pooling on, values have output rows only.
    pub fn rows(&self, value: Value) -> Rows {
        let is_output = |op: &Op| matches!(op, Op::Logits { .. } | Op::Pool { .. });
        let first = self.ops.iter().position(is_output);
        if first.is_some_and(|i| value.0 >= i) { Rows::Outputs } else { Rows::Tokens }
    }

    /// The value whose rows are the logits or embeddings.
    pub fn output(&self) -> Value {
        Value(self.ops.len() - 1)
    }

    /// Elements of an output row: the vocabulary of a decoder, the width of an encoder.
    pub fn output_width(&self) -> usize {
        self.width(self.output())
    }

    /// The number of layers.
    pub fn layers(&self) -> usize {
        self.weights.iter().filter_map(|w| w.layer).max().map_or(0, |last| last + 1)
    }

    /// How experts are chosen, in the order of layers.
    pub fn routings(&self) -> impl Iterator<Item = &Routing> {
        self.ops.iter().filter_map(|op| match op {
            Op::Route { routing, .. } => Some(routing),
            _ => None,
        })
    }

    /// The weights of the experts that each routing chooses from, in order.
    pub fn routed_weights(&self) -> Vec<Vec<WeightId>> {
        let is_route = |i: &usize| matches!(self.ops[*i], Op::Route { .. });
        let weights = |i: usize| {
            let weights = self.ops.iter().filter_map(|op| match op {
                Op::ExpertLinear { route: Some(value), weight, .. } if value.0 == i => {
                    Some(*weight)
                }
                _ => None,
            });
            weights.collect()
        };
        (0..self.ops.len()).filter(is_route).map(weights).collect()
    }

    /// The layer of each routing, in order.
    pub fn routed_layers(&self) -> Vec<usize> {
        let layer = |(nth, weights): (usize, Vec<WeightId>)| {
            weights.first().and_then(|id| self.weight(*id).layer).unwrap_or(nth)
        };
        self.routed_weights().into_iter().enumerate().map(layer).collect()
    }

    /// Whether a weight computes the scores by which experts are chosen.
    pub fn is_router(&self, weight: WeightId) -> bool {
        self.ops.iter().any(|op| match op {
            Op::Route { input, .. } => {
                matches!(self.ops[input.0], Op::Linear { weight: router, .. } if router == weight)
            }
            _ => false,
        })
    }

    /// Whether the plan computes embeddings instead of logits.
    pub fn is_encoder(&self) -> bool {
        self.ops.iter().any(|op| matches!(op, Op::Pool { .. }))
    }

    /// Whether the plan gives sums of hidden states, of which the caller makes means.
    pub fn gives_sums(&self) -> bool {
        self.ops.iter().any(|op| matches!(op, Op::Pool { kind: PoolKind::Sum, .. }))
    }

    /// Whether a step must contain whole sequences, because tokens attend to later ones or because
    /// pooling reads them all.
    pub fn needs_whole_sequences(&self) -> bool {
        self.ops.iter().any(|op| match op {
            Op::Attention { attention, .. } => !attention.causal,
            Op::Pool { kind, .. } => matches!(kind, PoolKind::Mean | PoolKind::First),
            _ => false,
        })
    }

    /// The matmuls whose input is the output of an activation or a gate with no other use, in
    /// order: many of its elements are small, and a backend can skip those. Without experts'
    /// matmuls.
    pub fn sparse_input_matmuls(&self) -> Vec<WeightId> {
        let mut uses = vec![0; self.ops.len()];
        self.ops.iter().flat_map(Op::inputs).for_each(|value| uses[value.0] += 1);
        let is_sparse = |value: Value| matches!(self.ops[value.0], Op::Glu { .. } | Op::Act { .. });
        let matmuls = self.ops.iter().filter_map(|op| match op {
            Op::Linear { input, weight, .. } if is_sparse(*input) && uses[input.0] == 1 => {
                Some(*weight)
            }
            _ => None,
        });
        matmuls.collect()
    }

    /// The most positions of a sequence: the rows of the smallest position embedding table.
    pub fn max_positions(&self) -> usize {
        let rows = self.ops.iter().filter_map(|op| match op {
            Op::Embed { table, by: EmbedBy::Position } => Some(self.weight(*table).rows),
            _ => None,
        });
        rows.min().unwrap_or(usize::MAX)
    }

    /// The distinct windows of the KV slots, in order of first use: slots with the same window
    /// share a page table.
    pub fn windows(&self) -> Vec<Option<usize>> {
        self.distinct_windows().collect()
    }

    /// For each KV slot, the index of its window in [`Plan::windows`].
    pub fn window_indices(&self) -> Vec<usize> {
        let windows = self.windows();
        let index = |window| windows.iter().position(|&w| w == window).expect("a window of these");
        self.slots.iter().map(|slot| index(slot.window)).collect()
    }

    /// As [`Plan::windows`], without allocating, for steps.
    pub fn distinct_windows(&self) -> impl Iterator<Item = Option<usize>> {
        let is_new = |i: usize| self.slots[..i].iter().all(|s| s.window != self.slots[i].window);
        (0..self.slots.len()).filter(move |&i| is_new(i)).map(|i| self.slots[i].window)
    }
}
