//! What runs in a step: dispatches of kernels on buffers, in the plan's order.

use std::ops::RangeInclusive;

use bodkin_model::WeightId;

use crate::expert_cache::ExpertCaches;
use crate::layout::Layout;

/// The most experts that kernels select from and group by.
pub(crate) const MAX_EXPERTS: usize = 1024;

/// How keys and values are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum KvDtype {
    F32,
    F16,
    /// Blocks of 32 bytes with a scale.
    Q8,
}

impl KvDtype {
    /// Elements that a thread stores at once.
    pub(crate) fn unit(self) -> usize {
        match self {
            KvDtype::F32 => 1,
            KvDtype::F16 => 2,
            KvDtype::Q8 => 32,
        }
    }

    /// Words of a head of `dim` elements.
    pub(crate) fn head_words(self, dim: usize) -> usize {
        let words = if self == KvDtype::Q8 { 9 } else { 1 };
        dim.div_ceil(self.unit()) * words
    }
}

/// A shader, with what is fixed when it is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Kernel {
    Embed(Layout),
    /// Matmuls of few rows.
    Gemv(Matmul, GemvShape),
    /// Matmuls of many rows, with the number of rows of a workgroup: 64 or 128.
    Gemm(Matmul, usize),
    /// Sorts prompts' pairs of rows and experts by expert.
    ExpertPermutation,
    /// Input rows in half precision, from how they lie.
    Halves(Inputs),
    /// Input rows as bytes, from how they lie, with the vectors of four columns in a chunk.
    Bytes(Inputs, usize),
    /// Matmuls of experts of few rows.
    Experts(ExpertGemv),
    /// The same, where experts are cached.
    CachedExperts(ExpertGemv),
    /// Matmuls of cached experts of many rows, with the number of rows of a workgroup.
    CachedGemm(Matmul, usize),
    /// Gives slots to experts that rows of the step have chosen.
    ExpertCache,
    /// Copies experts to their slots.
    ExpertFill,
    ExpertSum,
    Norm,
    /// A norm whose result is also stored as bytes, with the vectors of four columns in a chunk.
    NormBytes(usize),
    Rope,
    Elementwise,
    HyperWeights,
    Route,
    Pool,
    Store(KvDtype),
    /// The types of the cache of tokens and of that of blocks.
    Attention(KvDtype, KvDtype),
    /// Attention to halves, maybe in splits.
    AttentionF16,
    /// Attention of many rows to halves, with cooperative matrices for blocks of 16 columns.
    AttentionCooperative {
        key_blocks: usize,
        value_blocks: usize,
    },
    CombineSplits,
    Conv,
    Scan,
    DeltaRule,
    Compress,
    Select,
    ArgmaxPart,
    Argmax,
}

impl Kernel {
    /// Whether it reads a matrix of weights, not a row of a table.
    pub(crate) fn is_matmul(self) -> bool {
        matches!(
            self,
            Kernel::Gemv(..)
                | Kernel::Gemm(..)
                | Kernel::Experts(_)
                | Kernel::CachedExperts(_)
                | Kernel::CachedGemm(..)
        )
    }

    /// A name for people.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Kernel::Embed(_) => "embed",
            Kernel::Gemv(..) => "GEMV",
            Kernel::Gemm(..) | Kernel::CachedGemm(..) => "GEMM",
            Kernel::Halves(_) => "halves",
            Kernel::Bytes(..) => "bytes",
            Kernel::Experts(_) | Kernel::CachedExperts(_) => "experts",
            Kernel::ExpertCache => "expert cache",
            Kernel::ExpertFill => "expert fill",
            Kernel::ExpertSum => "sum of experts",
            Kernel::ExpertPermutation => "expert permutation",
            Kernel::Norm | Kernel::NormBytes(_) => "norm",
            Kernel::Rope => "rope",
            Kernel::Elementwise => "elementwise",
            Kernel::HyperWeights => "hyper-connections",
            Kernel::Route => "route",
            Kernel::Pool => "pool",
            Kernel::Store(_) => "rope and store",
            Kernel::Attention(..)
            | Kernel::AttentionF16
            | Kernel::AttentionCooperative { .. }
            | Kernel::CombineSplits => "attention",
            Kernel::Conv => "convolution",
            Kernel::Scan => "scan",
            Kernel::DeltaRule => "delta rule",
            Kernel::Compress => "compress",
            Kernel::Select => "select",
            Kernel::ArgmaxPart | Kernel::Argmax => "argmax",
        }
    }
}

/// What the kernels of a matmul are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Matmul {
    pub(crate) layout: Layout,
    pub(crate) inputs: Inputs,
    pub(crate) epilogue: Epilogue,
}

/// What the GEMV of experts is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ExpertGemv {
    pub(crate) layout: Layout,
    pub(crate) inputs: Inputs,
    /// Whether it is of gates and what they are multiplied with.
    pub(crate) is_gated: bool,
}

/// How a workgroup of the GEMV divides its work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct GemvShape {
    /// Rows of the step.
    pub(crate) tokens: usize,
    /// Threads of a team. They decide the order of sums: they are the same for any number of rows.
    pub(crate) threads: usize,
    /// Teams, which have rows of their own and read the same input rows.
    pub(crate) teams: usize,
    /// Rows of the weight of a team.
    pub(crate) rows: usize,
}

impl GemvShape {
    /// Workgroups for this many rows of the weight.
    pub(crate) fn groups(&self, rows: usize) -> usize {
        rows.div_ceil(self.teams * self.rows)
    }
}

/// How an adapter multiplies.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Arithmetic {
    /// Whether matmuls and attention of prompts use cooperative matrices.
    pub(crate) is_cooperative: bool,
    pub(crate) activations: Activations,
}

/// What the GEMV multiplies codes that are integers with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Activations {
    /// Bytes with a scale for each chunk of the weight, by packed dot products.
    Bytes,
    /// Single precision.
    Floats,
}

/// How input rows lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Inputs {
    /// Without padding, in vectors of four.
    Aligned,
    /// With columns that the weight does not have.
    Padded,
    /// In half precision, for cooperative matrices.
    Halves,
    /// As bytes with a scale for each chunk of the weight, for packed dot products.
    Bytes,
}

/// What a matmul does with its sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Epilogue {
    /// Stores them, maybe added to something.
    One,
    /// Stores those of two or three stacked weights.
    Three,
    /// The first half of the rows are gates, the second what they multiply, after an activation.
    Gate,
    /// Stores those of an expert of a token; tiles have the rows of an expert each.
    Experts,
    /// The same, of gates and what they are multiplied with.
    ExpertGate,
}

/// The operations of `elementwise.wgsl`, numbered alike there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Elementwise {
    Act,
    Glu,
    Add,
    Scale,
    ScaleBy,
    Softcap,
    Clamp,
    Slice,
    Concat,
    Mix,
    ScaleExperts,
}

/// A buffer on the device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum BufferId {
    /// Nothing: for an operand that the dispatch does not have.
    None,
    /// Nothing: for a result that it does not have.
    NoResult,
    /// One of [`Program::values`].
    Value(usize),
    /// A part of a matrix, in its layout.
    Matrix(WeightId, usize),
    /// A part of the slots for a matrix whose experts are cached.
    Slots(WeightId, usize),
    /// A weight in single precision.
    Vector(WeightId),
    /// Weights in single precision, one after the other.
    Concatenated(Vec<WeightId>),
    /// The cache of a KV slot.
    Kv(usize),
    /// The slots of a recurrent state.
    State(usize),
    /// Cosines and sines of one of [`Program::ropes`].
    Angles(usize),
    /// How often experts were selected.
    Counts,
    /// The caches of experts of all layers.
    ExpertCaches,
    /// Tiles of rows that share an expert, and the pairs of rows and experts in them.
    ExpertTiles,
    /// Input rows of a matmul in half precision.
    Halves,
    /// Input rows of a matmul as bytes.
    Bytes,
    /// The scores of an indexer.
    Scores,
    /// The splits of an attention, before they are combined.
    Splits,
    /// The largest logits of parts of a row, and the tokens with the largest of all.
    Parts,
    Tokens,
}

/// A list of rows of the step: pairs of an input row and an output row. Numbered as in the data of
/// a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum List {
    /// Tokens of generated text.
    Decode,
    /// Tokens of prompts.
    Prefill,
    /// Outputs of generated text.
    DecodeOutputs,
    /// Outputs of prompts.
    PrefillOutputs,
    /// All outputs.
    Outputs,
}

impl List {
    /// How many there are.
    pub(crate) const COUNT: usize = 5;
}

/// What the workgroups of a dispatch are counted by in the first dimension.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Depth {
    /// One in each step.
    Step,
    Tokens,
    Outputs,
    Spans,
    /// Rows of a list, with the number of rows of a workgroup. Nothing is dispatched for an empty
    /// list.
    List(List, usize),
    /// Tiles of the rows of a list's experts, at most.
    Experts(List, ExpertTiles),
}

/// The tiles of rows that each have one expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ExpertTiles {
    /// All experts, and those of a row of the list.
    pub(crate) experts: usize,
    pub(crate) used: usize,
    /// Rows of a tile.
    pub(crate) rows: usize,
}

impl ExpertTiles {
    /// How many there are at most for a number of rows of the list.
    pub(crate) fn most(self, rows: usize) -> usize {
        let pairs = rows * self.used;
        pairs / self.rows + self.experts.min(pairs)
    }

    /// Where the pairs of rows and experts begin in the buffer, for a number of rows of the list:
    /// behind the tiles' number, and the three words of each.
    pub(crate) fn pairs_at(self, rows: usize) -> usize {
        1 + 3 * self.most(rows)
    }
}

/// One run of a kernel.
#[derive(Clone, Debug)]
pub(crate) struct Dispatch {
    pub(crate) kernel: Kernel,
    /// In the order of the shader's bindings, from 1.
    pub(crate) buffers: Vec<BufferId>,
    /// At most 32 words.
    pub(crate) params: Vec<u32>,
    pub(crate) grid: Grid,
    /// The lengths of a list for which it runs.
    pub(crate) lens: RangeInclusive<usize>,
    /// The first operation of its stage.
    pub(crate) op: usize,
}

/// How many workgroups run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Grid {
    /// For each of `depth`.
    pub(crate) groups: usize,
    pub(crate) depth: Depth,
}

/// A buffer of values.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ValueBuffer {
    pub(crate) width: usize,
    /// Whether it has a row for each output, not for each token.
    pub(crate) is_output: bool,
}

/// Dispatches that find the largest logits.
pub(crate) const ARGMAX_DISPATCHES: usize = 2;

/// The lowered plan.
pub(crate) struct Program {
    /// The last [`ARGMAX_DISPATCHES`] find the largest logits.
    pub(crate) dispatches: Vec<Dispatch>,
    pub(crate) values: Vec<ValueBuffer>,
    /// The buffer of each value of the plan; none for those that only exist inside of a stage.
    pub(crate) buffer_of: Vec<Option<usize>>,
    /// The distinct ropes.
    pub(crate) ropes: Vec<bodkin_model::Rope>,
    /// The first counter of each routing, and the number of all.
    pub(crate) counts: usize,
    pub(crate) caches: ExpertCaches,
}

#[cfg(test)]
mod tests {
    use super::ExpertTiles;

    /// Rows that all choose the same experts, and rows that choose one after the other.
    #[test]
    fn there_are_never_more_tiles_of_experts_than_most() {
        for (experts, used) in [(1, 1), (6, 2), (64, 8), (3, 3)] {
            let tiles = ExpertTiles { experts, used, rows: 64 };
            for rows in 0..300 {
                for shift in [0, 1, used] {
                    let mut pairs = vec![0; experts];
                    for row in 0..rows {
                        (0..used).for_each(|i| pairs[(row * shift + i) % experts] += 1usize);
                    }
                    let needed: usize = pairs.iter().map(|pairs| pairs.div_ceil(64)).sum();
                    assert!(needed <= tiles.most(rows), "{tiles:?}, {rows} rows: {needed}");
                }
            }
        }
    }
}
