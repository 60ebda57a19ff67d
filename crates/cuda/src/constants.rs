//! Sizes that more than one module uses. `kernels/constants.cuh` is generated from those that the
//! host shares with the kernels (`header.rs`).

use std::ops::RangeInclusive;

/// Defines constants, and lists them for the kernels' header.
macro_rules! shared {
    ($($(#[doc = $doc:literal])+ $name:ident: $type:ty = $value:expr;)*) => {
        $($(#[doc = $doc])+ pub(crate) const $name: $type = $value;)*

        /// The name, the value in CUDA C++ and the description of each shared constant.
        pub(crate) fn definitions() -> Vec<(&'static str, String, &'static str)> {
            vec![$((stringify!($name), Literal::literal($name), concat!($($doc, "\n"),+))),*]
        }
    };
}

/// A value that can be written in CUDA C++.
trait Literal {
    fn literal(self) -> String;
}

impl Literal for usize {
    fn literal(self) -> String {
        format!("{self}u")
    }
}

impl Literal for u32 {
    fn literal(self) -> String {
        format!("{self}u")
    }
}

impl Literal for u64 {
    fn literal(self) -> String {
        format!("{self}ull")
    }
}

impl Literal for f32 {
    fn literal(self) -> String {
        format!("{self:e}f")
    }
}

shared! {
    /// Tokens of a page of the KV cache.
    PAGE_TOKENS: usize = bodkin_backend::PAGE_TOKENS;
    /// Rows of a tile of packed weights.
    TILE_ROWS: usize = 16;
    /// Tiles of weights that a block of a GEMM takes.
    GEMM_TILES: usize = 8;
    /// Columns of a chunk of a tile.
    CHUNK_COLS: usize = 64;
    /// Multiplies matmul inputs before they are stored, so that large ones fit half precision.
    INPUT_SCALE: f32 = 1.0 / 16.0;
    /// The value of a code whose bits stand alone in a half: 2^-24 for code 1.
    CODE_UNIT: f32 = 1.0 / (1 << 24) as f32;
    /// Rows of a panel of swizzled matmul inputs.
    PANEL_ROWS: usize = 128;
    /// Marks the stride of matmul inputs that are swizzled.
    SWIZZLED: u32 = 1 << 31;
    /// Matrices of a matmul, at most.
    MATRICES: usize = 4;
    /// Devices of a tensor-parallel group beside one, at most, that store into its memory.
    MAX_PEERS: usize = 7;
    /// Threads of a block that normalises a row. They decide the order of the sum of squares, so
    /// the persistent kernel computes with the same number, and `gemv_mma` with half of it, each
    /// for two.
    NORM_THREADS: usize = 32 * PERSISTENT_WARPS;
    /// Rows of up to this many elements are normalised by one warp.
    SHORT_NORM: usize = 256;
    /// The same for layer norms: longer rows take a block.
    SHORT_LAYER_NORM: usize = 1024;
    /// Threads of a block of matmuls with f32 weights.
    GEMV_F32_THREADS: usize = 512;
    /// Input rows of such a block, at most.
    GEMV_F32_ROWS: usize = 8;
    /// Warps of a block of the GEMV kernel.
    GEMV_WARPS: usize = 8;
    /// Positions of a KV split.
    KV_SPLIT: usize = 128;
    /// Floats of a KV split's partial result beside its values.
    PARTIAL_EXTRA: usize = 4;
    /// Instead of the index of a row's first partial result: a block takes all its KV splits.
    NO_PARTIALS: u32 = u32::MAX;
    /// Tiles of positions of a KV split on tensor cores, one for each warp.
    SPLIT_TILES: usize = 8;
    /// Query heads of one KV head that a block takes, at most.
    BLOCK_HEADS: usize = 4;
    /// The widest key or value that decode attention takes on tensor cores.
    MAX_MMA_DIM: usize = 576;
    /// Columns of keys or values that it takes at once.
    MMA_COLUMNS: usize = 128;
    /// Shared memory of the warps of one KV split on tensor cores, for queries and results.
    MMA_WORKSPACE_BYTES: usize = 28928;
    /// KV splits whose results a block copies to shared memory at once to combine them.
    COMBINED_AT_ONCE: usize = 32;
    /// Results that a thread combines, at most.
    COMBINED_PER_THREAD: usize = 16;
    /// Queries of a block of prefill attention.
    PREFILL_ROWS: usize = 64;
    /// Positions that a block of prefill attention without `wgmma` takes at a time.
    PREFILL_POSITIONS: usize = 64;
    /// Likewise with `wgmma`.
    PREFILL_WGMMA_ROWS: usize = 128;
    /// Positions of a KV split of prefill attention.
    PREFILL_SPLIT: usize = 2048;
    /// The widest heads whose positions prefill attention splits.
    MAX_SPLIT_DIM: usize = 128;
    /// Rows of a sequence that a thread of the convolution takes.
    CONV_ROWS: usize = 32;
    /// Columns of a head's state that a block of a delta rule takes.
    RULE_BLOCK: usize = 32;
    /// The widest heads of a delta rule.
    MAX_RULE_DIM: usize = 256;
    /// The widest heads of a delta rule in the persistent kernel.
    PERSISTENT_RULE_DIM: usize = 128;
    /// The most state elements of a row of a scan.
    MAX_SCAN_STATE: usize = 256;
    /// Threads of a block of a scan or a delta rule.
    RECURRENT_THREADS: usize = 256;
    /// Rows of a head's state that a warp of a scan takes.
    SCAN_ROWS: usize = 2;
    /// The same where each sequence has one token and decays are those of heads.
    SCAN_DECODE_ROWS: usize = 4;
    /// Groups of a row's logits in sampling.
    LOGIT_GROUPS: usize = 512;
    /// Sampled where a row's logits are not finite.
    NO_TOKEN: u32 = u32::MAX;
    /// Multiplies an expert's score in the cache of experts at each update.
    EXPERT_SCORE_DECAY: f32 = bodkin_backend::EXPERT_SCORE_DECAY;
    /// Experts of a layer that an update copies to the device, at most.
    MAX_FILLS: usize = 32;
    /// Counters of a layer's cache of experts.
    CACHE_COUNTERS: usize = 3;
    /// Slots of a layer in which a step of one row leaves experts that it read from the host.
    SPARE_SLOTS: usize = 2;
    /// Marks the address of an expert that is not cached.
    ON_HOST: u64 = 1;
    /// The slot of an expert that is not cached.
    NO_SLOT: u32 = u32::MAX;
    /// Words of the mailbox between `request_experts` and the thread that reads experts.
    MAILBOX: usize = 6;
    /// Of them, the clock, which counts the kernels `request_experts`.
    CLOCK: usize = 0;
    /// The time of the last request.
    REQUEST: usize = 1;
    /// Its routing.
    REQUESTED_ROUTING: usize = 2;
    /// The time of the last request that was answered.
    ANSWER: usize = 3;
    /// Whether no more will be.
    READER_HAS_ENDED: usize = 4;
    /// Whether the thread is reading experts ahead: then the next layer makes a request even if it
    /// misses none.
    IS_READING_AHEAD: usize = 5;
    /// Words of a row's sampling parameters besides their lists.
    SAMPLING_WORDS: usize = 16;
    /// Warps of a block of the persistent kernel that compute.
    PERSISTENT_WARPS: usize = 16;
    /// Bytes that a warp of the persistent kernel copies at once: chunks of a tile, or a slice of
    /// keys.
    SLOT_BYTES: usize = 2560;
    /// Chunks of a slot of the persistent kernel, at most.
    MAX_SLOT_CHUNKS: usize = 4;
    /// Slots of a warp of the persistent kernel.
    SLOT_DEPTH: usize = 4;
    /// Shared memory of a block of the persistent kernel beside a stage's workspace: slots of
    /// weights with their barriers and where they are stored, partial sums, six stages, page
    /// tables, addresses of experts, the position, the state slot and sums of warps.
    PERSISTENT_BYTES: usize = PERSISTENT_WARPS * SLOT_DEPTH * (SLOT_BYTES + 16 + 8)
        + 2 * PERSISTENT_WARPS * 2 * 4 * TILE_ROWS
        + 6 * 368
        + 32 * MAX_CHOSEN
        + 128;
    /// Page tables that the persistent kernel's attention may have.
    MAX_TABLES: usize = 4;
    /// Experts of a row in the persistent kernel, at most.
    MAX_CHOSEN: usize = 32;
    /// Results of expert tiles that a block of the persistent kernel holds until it sums them.
    MAX_RESULTS: usize = 64;
    /// The workspace of a row's experts in the persistent kernel beside a stage's input.
    CHOSEN_BYTES: usize = 8 * MAX_CHOSEN + 5 * MAX_RESULTS * TILE_ROWS;
    /// The op of a matmul in the persistent kernel is its layout, plus this where it is gated.
    OP_GATED: u32 = 16;
    /// The op of attention.
    OP_ATTENTION: u32 = 32;
    /// The op of a norm.
    OP_NORM: u32 = 33;
    /// The op of a matmul with f32 weights.
    OP_GEMV_F32: u32 = 34;
    /// The op of the choice of experts.
    OP_ROUTE: u32 = 35;
    /// The op of a convolution.
    OP_CONV: u32 = 36;
    /// The op of a state-space layer's scan.
    OP_SCAN: u32 = 37;
    /// The op of a delta rule.
    OP_DELTA_RULE: u32 = 38;
    /// The op of elementwise functions.
    OP_ELEMENTWISE: u32 = 39;
    /// The op of slices and concatenations.
    OP_SLICE_CONCAT: u32 = 40;
    /// The op that converts floats to matmul inputs.
    OP_CONVERT_INPUT: u32 = 41;
    /// The op of a rotation.
    OP_ROTATE: u32 = 42;
}

/// Matmul inputs are stored divided by this.
pub(crate) const INPUT_DIVISOR: f32 = 1.0 / INPUT_SCALE;
/// The most split-K slices of a sum: the persistent kernel has a warp for each.
pub(crate) const MAX_SLICES: usize = PERSISTENT_WARPS;
/// Teams of a block's warps in the persistent kernel's attention.
pub(crate) const ATTENTION_TEAMS: usize = PERSISTENT_WARPS / SPLIT_TILES;
/// Shared memory that a block may ask for on every supported device.
pub(crate) const GUARANTEED_SHARED_BYTES: usize = 160 << 10;
/// Rows of input up to which matmuls read every weight once; experts' once for each row.
pub(crate) const GEMV_ROWS: usize = 16;
/// Rows of input up to which such a matmul is faster than `gemm_wgmma`.
pub(crate) const WGMMA_GEMV_ROWS: usize = 8;
/// The same with experts, unless even more rows hardly choose an expert twice.
pub(crate) const EXPERT_GEMV_ROWS: usize = 3;
/// Rows hardly do so while their choices are fewer than all experts divided by this, as measured on
/// an H200.
pub(crate) const SPARSE_CHOICE: usize = 5;
/// Input rows that a block of `gemm_mma` takes.
pub(crate) const GEMM_WIDTH: usize = 128;
/// The most bytes for the sums of split-K slices that several blocks of `gemm_wgmma` share.
pub(crate) const SLICE_SUM_BYTES: usize = 32 << 20;
/// The most input rows that a block of `gemm_wgmma` takes.
pub(crate) const MAX_WIDTH: usize = PANEL_ROWS;
/// The input rows that a block of `gemm_wgmma` can take.
pub(crate) const WIDTHS: [Width; 4] = [
    Width { rows: 16, blocks: 2, chunk_time: 0.38 },
    Width { rows: 32, blocks: 2, chunk_time: 0.4 },
    Width { rows: 64, blocks: 2, chunk_time: 0.46 },
    Width { rows: MAX_WIDTH, blocks: 1, chunk_time: 0.38 },
];

/// A number of input rows for which there is a kernel.
pub(crate) struct Width {
    pub(crate) rows: usize,
    /// Blocks that share a multiprocessor, if their weights leave enough shared memory.
    pub(crate) blocks: usize,
    /// Microseconds that each of them takes for a chunk of its weights, as measured on an H200.
    pub(crate) chunk_time: f64,
}
/// Widths of norms that matmuls compute: blocks of this width sum in the same order as the norm's
/// kernel, and the row has to fit in shared memory beside their results.
pub(crate) const INLINED_COLS: RangeInclusive<usize> = SHORT_NORM + 1..=12_288;
/// Tokens with penalties, and tokens with biases, that the sampling kernel takes at most: each of
/// its threads reads all others.
pub(crate) const MAX_LISTED: usize = 1024;
/// Steps of up to this many rows are recorded as graphs even with prefill rows; steps that only
/// decode always are.
pub(crate) const RECORDED_ROWS: usize = 16;
