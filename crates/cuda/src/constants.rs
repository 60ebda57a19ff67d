//! Sizes that the host and the kernels share.

/// Rows of a tile of packed weights.
pub(crate) const TILE_ROWS: usize = 16;
/// Columns of a chunk of a tile.
pub(crate) const CHUNK_COLS: usize = 64;
/// Matmul inputs are stored divided by this, so that large activations fit half precision.
pub(crate) const INPUT_DIVISOR: f32 = 16.0;
/// The value of a code whose bits stand alone in a half: 2^-24 for code 1.
pub(crate) const CODE_UNIT: f32 = 1.0 / (1 << 24) as f32;
/// The most matrices of one matmul.
pub(crate) const MAX_MATRICES: usize = 4;
/// The most split-K slices of a sum: the persistent kernel has a warp for each.
pub(crate) const MAX_SLICES: usize = 16;

/// Shared memory that a block may ask for on every supported device.
pub(crate) const MIN_SHARED_BYTES: usize = 160 << 10;
/// Warps of a block of `dot`.
pub(crate) const GEMV_WARPS: usize = 8;
/// Rows of input up to which matmuls read every weight once; experts' once for each row.
pub(crate) const GEMV_ROWS: usize = 16;
/// Input rows that a block of `mul` takes.
pub(crate) const MUL_WIDTH: usize = 128;
/// The most input rows that a block of `wide` takes.
pub(crate) const MAX_WIDTH: usize = 128;
/// Input rows that a block of `wide` can take, and its relative time for them.
pub(crate) const WIDTHS: [(usize, f64); 2] = [(64, 0.6), (MAX_WIDTH, 1.0)];

/// Rows of up to this many elements are normalised by one warp.
pub(crate) const SHORT_NORM: usize = 256;

/// Widths of norms that matmuls compute: blocks of this width sum in the same order as the norm's
/// kernel, and the row has to fit in shared memory beside their results.
pub(crate) const INLINED_COLS: std::ops::RangeInclusive<usize> = SHORT_NORM + 1..=12_288;

/// Positions of a KV split.
pub(crate) const SPLIT_POSITIONS: usize = 128;
/// Floats of a split's partial result beside its values.
pub(crate) const PARTIAL_EXTRA: usize = 4;
/// Query heads of one key head that a block takes, at most.
pub(crate) const BLOCK_HEADS: usize = 4;
/// The widest key or value that decode attention takes on tensor cores.
pub(crate) const MAX_MMA_DIM: usize = 128;
/// Steps of a split on tensor cores, one for each warp.
pub(crate) const SPLIT_STEPS: usize = 8;
/// Shared memory of the warps of one split on tensor cores, for queries and results.
pub(crate) const MMA_WORKSPACE_BYTES: usize = 20480;
/// Splits whose results a block copies to shared memory at once to combine them.
pub(crate) const COMBINED_AT_ONCE: usize = 32;
/// Results that a thread combines, at most.
pub(crate) const COMBINED_PER_THREAD: usize = 16;
/// Queries of a block of prefill attention.
pub(crate) const PREFILL_ROWS: usize = 64;

/// Groups of a row's logits in sampling.
pub(crate) const LOGIT_GROUPS: usize = 512;

/// Warps of a block of the persistent kernel that compute.
pub(crate) const PERSISTENT_WARPS: usize = 16;
/// Teams of a block's warps in the persistent kernel's attention.
pub(crate) const ATTENTION_TEAMS: usize = 2;
/// Page tables that the persistent kernel's attention may have.
pub(crate) const MAX_TABLES: usize = 4;
/// The most experts of a row in the persistent kernel.
pub(crate) const MAX_CHOSEN: usize = 16;
/// Results of expert tiles that a block of the persistent kernel holds until it sums them.
pub(crate) const MAX_RESULTS: usize = 64;

/// Steps of up to this many rows are recorded as graphs: decode steps.
pub(crate) const RECORDED_ROWS: usize = 16;
