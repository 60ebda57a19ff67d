// Kernel parameters, field by field as in the host's parameters.rs. Addresses are global memory; a
// pointer that may be absent is null then. Strides count elements.
#pragma once
#include "types.cuh"

#define MATRICES 4 // of a matmul, at most

// A matrix of a matmul; of experts, all one behind the other, each padded to whole tiles.
struct Matrix {
    const u8 *packed;    // [experts, tiles, chunks] records of codes and scales (packed.cuh)
    const float *scales; // [experts * tiles * 16]: of each row, times 16 to undo INPUT_SCALE
    const float *bias;   // [experts * rows], or none
    float *out;          // [.., out_stride]
    u32 out_stride;
    u32 rows;
    u32 tiles;
    u32 first_tile; // among the tiles of all matrices
};
static_assert(sizeof(Matrix) == 48, "as in parameters.rs");

// A matmul of some input rows with up to four matrices.
struct Matmul {
    Matrix matrices[MATRICES];
    const void *input;         // [.., input_stride] in f16; for f32 weights, in f32
    const u32 *metadata;       // maps outputs to input rows
    const float *residual;     // added to the first matrix's result, or none
    u16 *half_out;             // destination of a gated result that is itself a matmul input, or none
    const float *route;        // [.., route_stride]: expert weights, then expert ids
    const float *norm_input;   // the only row before its RMS norm, or none: replaces `input`
    const float *norm_weight;
    u32 input_stride;
    u32 residual_stride;
    u32 half_stride;
    u32 route_stride;
    u32 matrix_count;
    u32 tiles;           // of all matrices, or of each if gated
    u32 chunks;          // of 64 columns
    u32 slice_chunks;    // chunks of a split-K slice
    u32 rows;            // of the input
    u32 gathers_outputs; // whether input rows are those of the step's outputs
    u32 act;             // activation function of a gated matmul
    u32 experts_used;    // by each row; 0 without experts
    u32 shares_input;    // whether all experts of a row read the same input
    u32 cols;
    float norm_eps;
    u32 slices; // split-K
};
static_assert(sizeof(Matmul) == 312, "as in parameters.rs");

// A matmul of many rows, grouped by expert where there are experts.
struct Gemm {
    Matmul matmul;
    const uint4 *groups;     // [column blocks]: expert, first permuted row, rows; or none
    const u32 *permutation;  // [permuted rows]: the result row of each, or NO_ROW
    u32 panel_rows;          // rows of a panel of the swizzled input
    u32 outputs_per_input;   // result rows that share an input row
};
static_assert(sizeof(Gemm) == 336, "as in parameters.rs");

// Expert permutation: groups the pairs of row and expert by expert.
struct PermuteExperts {
    const float *route; // [rows, route_stride], or none: part `i` of a row belongs to expert `i`
    uint4 *groups;      // [max_groups], as in `Gemm`; the last ones are empty
    u32 *permutation;   // [permuted_rows]
    u32 route_stride, rows, experts_used, experts;
    u32 group_rows; // of a group, at most
    u32 max_groups, permuted_rows;
    u32 padding;
};
static_assert(sizeof(PermuteExperts) == 56, "as in parameters.rs");

// Writes a GEMM's input in the swizzled layout of wgmma's shared-memory operand.
struct SwizzleInput {
    const u16 *input; // [.., stride]
    const u32 *metadata;
    const u32 *permutation; // as in `Gemm`, or none
    u8 *out;                // [panels, chunks, panel_rows, ROW_BYTES]
    u32 stride, chunks, rows, gathers_outputs, panel_rows, outputs_per_input;
};
static_assert(sizeof(SwizzleInput) == 56, "as in parameters.rs");

struct Attention {
    const float *q; // [rows, q_stride]
    KvElement *keys;   // of all pages
    KvElement *values; // of all pages
    const u32 *metadata;
    const float *k;        // [rows, k_stride]: new keys, of rows that store their own
    const float *v;        // [rows, v_stride]: new values, likewise
    const float2 *cos_sin; // [rows, rotary_pairs], likewise
    const float *sinks;    // [heads], or none
    float *out;            // [rows, out_stride], or none
    u16 *half_out;         // [rows, half_stride], or none
    float *partials;       // [rows, heads, max_splits, value_stride + PARTIAL_EXTRA] of KV splits;
                           // sentinels between uses in the persistent kernel
    u32 *arrivals;         // [rows, blocks of heads]: blocks that have finished their splits, zero before
    float scale, softcap;
    u32 q_stride, k_stride, v_stride, out_stride, half_stride;
    u32 rotary_pairs; // 0 if keys and queries need no rotation
    u32 is_neox;
    u32 heads, kv_heads, key_dim, value_dim;
    u32 window; // 0 for none
    u32 is_causal;
    u32 page_table; // which of a span's page tables, one for each window
    u32 max_splits; // for which the partials have room
    u32 is_split;   // whether blocks share a row's KV splits
    u32 skips_prefill;
    // For the persistent kernel, whose teams take up to four query heads of a KV head.
    u32 group_heads; // query heads of a KV head
    u32 head_blocks; // of all query heads
    u32 head_blocks_inverse, group_blocks_inverse; // for `divide`: by `head_blocks`, by those of a KV head
    u32 padding;
};
static_assert(sizeof(Attention) == 192, "as in parameters.rs");

// Stores new keys and values in their pages, and rotates keys and queries (RoPE).
struct StoreKv {
    const float *q;        // [rows, q_stride], or none if queries need no rotation
    const float *k;        // [rows, k_stride]
    const float *v;        // [rows, v_stride]
    const float2 *cos_sin; // [rows, rotary_pairs]
    float *q_out;          // [rows, q_out_stride]
    KvElement *keys;
    KvElement *values;
    const u32 *metadata;
    u32 q_stride, k_stride, v_stride, q_out_stride;
    u32 heads, kv_heads, key_dim, value_dim, page_table;
    u32 rotary_pairs; // 0 if keys need no rotation
    u32 is_neox;
    u32 padding;
};
static_assert(sizeof(StoreKv) == 112, "as in parameters.rs");

// Cosines and sines of rotary angles.
struct RopeAngles {
    const double *frequencies; // [rotary_pairs]: half turns a position
    const u32 *metadata;
    float2 *out; // [rows, rotary_pairs]: cosine and sine
    float magnitude;
    u32 rotary_pairs;
};
static_assert(sizeof(RopeAngles) == 32, "as in parameters.rs");

struct Embed {
    const u8 *packed;
    const float *scales;
    const u32 *metadata;
    float *out; // [rows, stride]
    u32 stride, cols, chunks;
    u32 by; // 0: token, 1: position, 2: the first row
};
static_assert(sizeof(Embed) == 48, "as in parameters.rs");

// An RMS or layer norm of groups of a row.
struct Norm {
    const float *x; // [rows, stride]
    const float *weight;
    const float *bias; // or none
    float *out;        // [rows, out_stride], or none
    u16 *half_out;     // [rows, half_stride], or none
    float eps;
    u32 stride, out_stride, half_stride;
    u32 n;          // elements of a group
    u32 groups;     // of a row
    u32 weight_len; // n, or groups * n
    u32 is_layer;
};
static_assert(sizeof(Norm) == 72, "as in parameters.rs");

// Converts f32 rows to matmul inputs: scaled f16, padded with zeros.
struct ConvertInput {
    const float *x; // [rows, stride]
    u16 *out;       // [rows, parts, out_stride]
    u32 stride, out_stride, cols, parts;
};
static_assert(sizeof(ConvertInput) == 32, "as in parameters.rs");

struct Elementwise {
    const float *a; // [rows, a_stride]
    const float *b; // [rows, b_stride], or none
    float *out;     // [rows, out_stride]
    float factor;
    u32 a_stride, b_stride, out_stride, width;
    u32 op; // 0: activate, 1: gated, 2: gated by one number a row, 3: add, 4: scale, 5: softcap
    u32 act;
    u32 padding;
};
static_assert(sizeof(Elementwise) == 56, "as in parameters.rs");

// RoPE of rows that no attention kernel rotates.
struct Rotate {
    const float *x;        // [rows, stride]
    const float2 *cos_sin; // [rows, rotary_pairs]
    float *out;            // [rows, out_stride]
    u32 stride, out_stride, width, head_dim, rotary_pairs;
    u32 is_neox;
};
static_assert(sizeof(Rotate) == 48, "as in parameters.rs");

// Slices the columns of each group of one value, or concatenates those of two.
struct SliceConcat {
    const float *a; // [rows, a_stride]
    const float *b; // [rows, b_stride], or none
    float *out;     // [rows, out_stride]
    u32 a_stride, b_stride, out_stride;
    u32 groups;
    u32 a_width, a_start, a_len; // of each of a's groups: its width, and the columns that are taken
    u32 b_len;                   // columns of b that follow
    u32 is_b_shared;             // whether all groups take the same columns of b
    u32 padding;
};
static_assert(sizeof(SliceConcat) == 64, "as in parameters.rs");

struct Pool {
    const float *x; // [rows, stride]
    const u32 *metadata;
    float *out; // [outputs, out_stride]
    u32 stride, out_stride, width;
    u32 kind; // 0: mean, 1: first, 2: last
};
static_assert(sizeof(Pool) == 40, "as in parameters.rs");

// The router's choice of experts.
struct Route {
    const float *scores; // [rows, stride]
    const float *bias;   // [experts], or none
    float *out;          // [rows, out_stride]: weights, then ids, of `experts_used` experts
    u32 *counts;         // [experts]: how often each was chosen
    float scale;
    u32 stride, out_stride, experts, experts_used, groups, groups_used;
    u32 gating; // 0: softmax, 1: sigmoid, 2: softmax of the chosen
    u32 normalize;
    u32 padding;
};
static_assert(sizeof(Route) == 72, "as in parameters.rs");

// The weighted sum of the results of a row's experts.
struct ExpertSum {
    const float *x;     // [rows, stride]: `experts_used` parts
    const float *route; // [rows, route_stride]
    float *out;         // [rows, out_stride]
    u32 stride, route_stride, out_stride, width, experts_used;
    u32 padding;
};
static_assert(sizeof(ExpertSum) == 48, "as in parameters.rs");

// A causal convolution over a sequence's rows.
struct Conv {
    const float *x;      // [rows, stride]
    const float *weight; // [width, taps]
    const float *bias;   // [width], or none
    const u32 *metadata;
    float *states; // [state slots, taps - 1, width]
    float *out;    // [rows, out_stride]
    u32 stride, out_stride, width, taps;
};
static_assert(sizeof(Conv) == 64, "as in parameters.rs");

// The selective scan of a state-space layer.
struct Scan {
    const float *x, *b, *c, *dt;  // [rows, stride of each]
    const float *a, *d, *dt_bias; // [heads]
    const u32 *metadata;
    float *states; // [state slots, heads, head_dim, state_dim]
    float *out;    // [rows, out_stride]
    u32 x_stride, b_stride, c_stride, dt_stride, out_stride;
    u32 heads, head_dim, groups, state_dim;
    u32 padding;
};
static_assert(sizeof(Scan) == 120, "as in parameters.rs");

// Samples the next step's tokens.
struct Sample {
    float *logits;  // [outputs, stride]
    u32 *metadata;  // every row is a sequence's only one, and an output
    u64 *group_max; // [outputs, GROUPS]: the largest logit of each group, as a rank
    u32 *counts;    // [outputs, 2]: finished blocks, zero before; sampled steps
    u32 *sampled;   // [2, outputs]: host memory, for even and odd steps
    u32 stride, width, outputs;
    u32 padding;
};
static_assert(sizeof(Sample) == 56, "as in parameters.rs");

// A stage of the persistent kernel: an op with its parameters.
struct Stage {
    u32 op;
    u32 padding[3];
    union {
        Matmul matmul;
        Attention attention;
        Norm norm;
        Route route;
        u32 words[80];
    };
};
static_assert(sizeof(Stage) == 336, "as in parameters.rs");

// A decode step of one row in one persistent kernel.
struct PersistentStep {
    const Stage *stages;
    const u32 *metadata;
    uint4 *values;     // of the step but the last stage's: that stage resets them to sentinels
    uint4 *last_input; // the last stage's input, which the next step resets to sentinels
    u32 stage_count;
    u32 workspace_bytes;             // of shared memory: a stage's input, or attention's workspaces
    u32 values_len, last_input_len;  // in sixteen bytes
};
static_assert(sizeof(PersistentStep) == 48, "as in parameters.rs");

// Reads memory to measure its bandwidth.
struct ReadAll {
    const uint4 *from;
    float *sums;
    u64 count; // of 16 bytes
};
static_assert(sizeof(ReadAll) == 24, "as in parameters.rs");
