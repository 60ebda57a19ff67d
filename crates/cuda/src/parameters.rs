//! Kernel parameters: the only definition of the structures that the host passes to the kernels.
//! `kernels/parameters.cuh` is generated from them (`header.rs`). Addresses are those of the
//! device; 0 is none. Strides count elements.

// Shapes in brackets are no links.
#![allow(rustdoc::broken_intra_doc_links)]

mod stage;

use std::mem::offset_of;

use bytemuck::{Pod, Zeroable};

use crate::constants::MATRICES;

pub(crate) use recurrent::{Conv, DeltaRule, Scan};
pub(crate) use stage::{STAGE, Stage};

/// A field of a structure in the kernels' header.
pub(crate) struct Field {
    pub(crate) about: &'static str,
    pub(crate) name: &'static str,
    /// The type in CUDA C++, pointers in parentheses.
    pub(crate) c_type: &'static str,
    pub(crate) offset: usize,
}

/// A structure in the kernels' header.
pub(crate) struct Structure {
    pub(crate) about: &'static str,
    pub(crate) name: &'static str,
    pub(crate) bytes: usize,
    pub(crate) fields: &'static [Field],
}

/// The host's type of a field: pointers are addresses.
macro_rules! rust_type {
    (($($pointer:tt)*)) => {
        u64
    };
    ([$type:ident; $len:expr]) => {
        [$type; $len]
    };
    ($type:ident) => {
        $type
    };
}

/// Defines structures that can be passed to a kernel, and describes them for the kernels' header.
macro_rules! parameters {
    ($($(#[doc = $about:literal])* struct $name:ident: $bytes:literal {
        $($(#[doc = $doc:literal])* $field:ident: $type:tt,)*
    })*) => {
        $($(#[doc = $about])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
        pub(crate) struct $name { $($(#[doc = $doc])* pub(crate) $field: rust_type!($type),)* }
        const _: () = assert!(size_of::<$name>() == $bytes);)*

        /// All structures.
        pub(crate) const STRUCTURES: &[Structure] = &[$(Structure {
            about: concat!($($about, "\n"),*),
            name: stringify!($name),
            bytes: $bytes,
            fields: &[$(Field {
                about: concat!($($doc),*),
                name: stringify!($field),
                c_type: stringify!($type),
                offset: offset_of!($name, $field),
            }),*],
        }),*];
    };
}

parameters! {
    /// A matrix of a matmul, or one for each expert.
    struct Matrix: 48 {
        /// [tiles, chunks] records of codes and scales (packed.cuh); or [experts] addresses of such
        packed: (const void *),
        /// [experts * tiles * 16]: of the rows' scales, 16 times larger to undo INPUT_SCALE
        exponents: (const u8 *),
        /// [experts * rows], or none
        bias: (const float *),
        /// [.., out_stride]
        out: (float *), out_stride: u32, rows: u32, tiles: u32,
        /// among the tiles of all matrices
        first_tile: u32,
    }

    /// A matmul of some input rows with up to four matrices.
    struct Matmul: 344 {
        matrices: [Matrix; MATRICES],
        /// [.., input_stride] in f16; for f32 weights, in f32
        input: (const void *),
        /// maps outputs to input rows, or none: they are the same
        metadata: (const u32 *),
        /// added to the first matrix's result, or none
        residual: (const float *),
        /// destination of a gated or activated result that is itself a matmul input, or none
        half_out: (u16 *),
        /// [.., route_stride]: expert weights, then expert ids
        route: (const float *),
        /// the only row before its RMS norm, or none: replaces `input`
        norm_input: (const float *),
        norm_weight: (const float *), input_stride: u32, residual_stride: u32, half_stride: u32,
        route_stride: u32, matrix_count: u32,
        /// of all matrices, or of each if gated
        tiles: u32,
        /// of 64 columns
        chunks: u32,
        /// chunks of a split-K slice
        slice_chunks: u32,
        /// of the input
        rows: u32,
        /// 0 without experts
        experts: u32,
        /// activation function of a gated matmul, or of a single matrix's result; else 0 (none)
        act: u32,
        /// by each row; 0 without experts
        experts_used: u32,
        /// whether all experts of a row read the same input
        shares_input: u32, cols: u32, norm_eps: f32,
        /// split-K
        slices: u32,
        /// of the weights' layout
        chunk_bytes: u32,
        /// what a slot of the persistent kernel holds
        persistent_slot_bytes: u32,
        /// multiplies the result before the residual is added
        factor: f32,
        /// of the persistent kernel: those that take tiles
        blocks: u32,
        /// whether a single matrix's result is stored as `act` and `half_out` say
        has_act_epilogue: u32,
        /// other devices that the results are also stored on
        peers: u32,
        /// [peers]: bytes from a value on this device to the same one there
        peer_offsets: (const u64 *),
    }

    /// A matmul of many rows, grouped by expert where there are experts.
    struct Gemm: 384 {
        matmul: Matmul,
        /// [column blocks]: expert, first permuted row, rows; or none
        groups: (const uint4 *),
        /// [permuted rows]: the result row of each, or NO_ROW
        permutation: (const u32 *),
        /// sums of split-K slices where several blocks share them, or none
        slice_sums: (float *),
        /// rows of a panel of the swizzled input
        panel_rows: u32,
        /// result rows that share an input row
        outputs_per_input: u32,
        /// chunks of a block: whole slices, or all
        split_chunks: u32, padding: u32,
    }

    /// Expert permutation: groups the pairs of row and expert by expert.
    struct PermuteExperts: 56 {
        /// [rows, route_stride], or none: part `i` of a row belongs to expert `i`
        route: (const float *),
        /// [max_groups], as in `Gemm`; the last ones are empty
        groups: (uint4 *),
        /// [permuted_rows]
        permutation: (u32 *), route_stride: u32, rows: u32, experts_used: u32, experts: u32,
        /// of a group, at most
        group_rows: u32, max_groups: u32, permuted_rows: u32, padding: u32,
    }

    /// Writes a GEMM's input in the swizzled layout of wgmma's shared-memory operand.
    struct SwizzleInput: 56 {
        /// [.., stride]
        input: (const u16 *), metadata: (const u32 *),
        /// as in `Gemm`, or none
        permutation: (const u32 *),
        /// [panels, chunks, panel_rows, ROW_BYTES]
        out: (u8 *), stride: u32, chunks: u32, rows: u32, gathers_outputs: u32, panel_rows: u32,
        outputs_per_input: u32,
    }

    /// Attention.
    struct Attention: 208 {
        /// [rows, q_stride]
        q: (const float *),
        /// of all pages
        keys: (KvElement *),
        /// of all pages
        values: (KvElement *), metadata: (const u32 *),
        /// [rows, k_stride]: new keys, of rows that store their own
        k: (const float *),
        /// [rows, v_stride]: new values, likewise
        v: (const float *),
        /// [rows, rotary_pairs], likewise
        cos_sin: (const float2 *),
        /// [heads], or none
        sinks: (const float *),
        /// [rows, out_stride], or none
        out: (float *),
        /// [rows, half_stride], or none
        half_out: (u16 *),
        /// [rows, heads, max_splits, value_stride + PARTIAL_EXTRA]; of decode a row has its own
        /// number of splits
        partials: (float *),
        /// [rows, blocks of heads]: blocks that have finished their splits, zero before
        arrivals: (u32 *),
        scale: f32, softcap: f32, q_stride: u32, k_stride: u32, v_stride: u32, out_stride: u32,
        half_stride: u32,
        /// 0 if keys and queries need no rotation
        rotary_pairs: u32, is_neox: u32, heads: u32, kv_heads: u32, key_dim: u32, value_dim: u32,
        /// 0 for none; half of it on each side if not causal
        window: u32, is_causal: u32, is_chunked: u32,
        /// which of a span's page tables, one for each window
        page_table: u32,
        /// not of decode: KV splits of a row, at most
        max_splits: u32,
        /// whether blocks of decode share a row's KV splits
        is_split: u32, skips_prefill: u32,
        /// of queries by position, `query_scale`
        temperature_growth: f32,
        /// 0 for none
        temperature_length: u32, temperature_offset: u32,
        /// query heads of a KV head; this and what follows is for the persistent kernel
        group_heads: u32,
        /// of all query heads
        head_blocks: u32,
        /// for `divide`: by `head_blocks`, by those of a KV head
        head_blocks_inverse: u32, group_blocks_inverse: u32,
        /// whether keys and values are bytes with scales, not halves
        is_q8: u32,
    }

    /// Stores new keys and values in their pages, and rotates keys and queries (RoPE).
    struct StoreKv: 112 {
        /// [rows, q_stride], or none if queries need no rotation
        q: (const float *),
        /// [rows, k_stride]
        k: (const float *),
        /// [rows, v_stride]
        v: (const float *),
        /// [rows, rotary_pairs]
        cos_sin: (const float2 *),
        /// [rows, q_out_stride]
        q_out: (float *),
        keys: (KvElement *), values: (KvElement *), metadata: (const u32 *), q_stride: u32,
        k_stride: u32, v_stride: u32, q_out_stride: u32, heads: u32, kv_heads: u32, key_dim: u32,
        value_dim: u32, page_table: u32,
        /// 0 if keys need no rotation
        rotary_pairs: u32, is_neox: u32, padding: u32,
    }

    /// Cosines and sines of rotary angles.
    struct RopeAngles: 40 {
        /// [rotary_pairs]: half turns a position
        frequencies: (const double *), metadata: (const u32 *),
        /// [rows, rotary_pairs]: cosine and sine
        out: (float2 *), magnitude: f32, rotary_pairs: u32,
        /// positions are rounded down to a multiple of it
        block: u32, padding: u32,
    }

    /// Rows of a table.
    struct Embed: 56 {
        packed: (const u8 *), exponents: (const u8 *), metadata: (const u32 *),
        /// [rows, stride]
        out: (float *),
        stride: u32, cols: u32, chunks: u32,
        /// 0: token, 1: position, 2: the first row, 3: position modulo `rows`
        by: u32, rows: u32, padding: u32,
    }

    /// An RMS or layer norm of groups of a row.
    struct Norm: 112 {
        /// [rows, stride]
        x: (const float *),
        /// or none
        weight: (const float *),
        /// or none
        bias: (const float *),
        /// [rows, out_stride], or none
        out: (float *),
        /// [rows, half_stride], or none
        half_out: (u16 *),
        /// [rows, gate_stride], or none: gates the result
        gate: (const float *),
        /// [rows, residual_stride], or none: the result is added to it
        residual: (const float *),
        /// [1], or none: multiplies the sum
        sum_scale: (const float *),
        eps: f32, stride: u32, out_stride: u32, half_stride: u32, gate_stride: u32, act: u32,
        residual_stride: u32, padding: u32,
        /// elements of a group
        n: u32,
        /// of a row
        groups: u32,
        /// n, or groups * n; 0 without a weight
        weight_len: u32,
        is_layer: u32,
    }

    /// Converts f32 rows to matmul inputs: scaled f16, padded with zeros.
    struct ConvertInput: 32 {
        /// [rows, stride]
        x: (const float *),
        /// [rows, parts, out_stride]
        out: (u16 *),
        stride: u32, out_stride: u32, cols: u32, parts: u32,
    }

    /// Elementwise functions of one or two values.
    struct Elementwise: 88 {
        /// [rows, a_stride]
        a: (const float *),
        /// [rows, b_stride], or none
        b: (const float *),
        /// [rows, out_stride], or none
        out: (float *),
        /// [rows, half_stride], or none
        half_out: (u16 *),
        factor: f32, a_stride: u32, b_stride: u32, out_stride: u32, half_stride: u32, width: u32,
        /// 0: activate, 1: gated, 2: gated by one number for each part, 3: add, 4: scale,
        /// 5: softcap, 6: xIELU, 7: clamp
        op: u32, act: u32,
        /// elements of a part
        part: u32,
        /// of xIELU, whose factor of positive inputs is `factor`; `low` and `factor` bound clamps
        negative: f32, beta: f32, eps: f32, low: f32, padding: u32,
    }

    /// RoPE of rows that no attention kernel rotates.
    struct Rotate: 48 {
        /// [rows, stride]
        x: (const float *),
        /// [rows, rotary_pairs]
        cos_sin: (const float2 *),
        /// [rows, out_stride]
        out: (float *),
        stride: u32, out_stride: u32, width: u32, head_dim: u32, rotary_pairs: u32, is_neox: u32,
    }

    /// Slices the columns of each group of one value, or concatenates those of two.
    struct SliceConcat: 64 {
        /// [rows, a_stride]
        a: (const float *),
        /// [rows, b_stride], or none
        b: (const float *),
        /// [rows, out_stride]
        out: (float *),
        a_stride: u32, b_stride: u32, out_stride: u32, groups: u32,
        /// of each of a's groups: its width, and the columns that are taken
        a_width: u32, a_start: u32, a_len: u32,
        /// columns of b that follow
        b_len: u32,
        /// whether all groups take the same columns of b
        is_b_shared: u32,
        padding: u32,
    }

    /// Pooling.
    struct Pool: 40 {
        /// [rows, stride]
        x: (const float *),
        metadata: (const u32 *),
        /// [outputs, out_stride]
        out: (float *),
        stride: u32, out_stride: u32, width: u32,
        /// 0: mean, 1: first, 2: last
        kind: u32,
    }

    /// The router's choice of experts.
    struct Route: 72 {
        /// [rows, stride]
        scores: (const float *),
        /// [experts], or none
        bias: (const float *),
        /// [rows, out_stride]: weights, then ids, of `experts_used` experts
        out: (float *),
        /// [experts]: how often each was chosen
        counts: (u32 *),
        scale: f32, stride: u32, out_stride: u32, experts: u32, experts_used: u32, groups: u32,
        groups_used: u32,
        /// 0: softmax, 1: sigmoid, 2: softmax of the chosen, 3: square root of softplus
        gating: u32, normalize: u32, padding: u32,
    }

    /// The weighted sum of the results of a row's experts.
    struct ExpertSum: 48 {
        /// [rows, stride]: `experts_used` parts
        x: (const float *),
        /// [rows, route_stride]
        route: (const float *),
        /// [rows, out_stride]
        out: (float *),
        stride: u32, route_stride: u32, out_stride: u32, width: u32, experts_used: u32,
        padding: u32,
    }

    /// Parts of a row, each `width` wide, with the length of another row.
    struct Rescale: 40 {
        x: (const float *), like: (const float *), out: (float *), stride: u32, like_stride: u32,
        out_stride: u32, width: u32,
    }

    /// What exceeds the mean of a row by some standard deviations.
    struct Cutoff: 32 {
        x: (const float *), out: (float *), stride: u32, out_stride: u32, width: u32,
        deviations: f32,
    }

    /// Weights of a row's experts, times the scales of these experts.
    struct ScaleExperts: 40 {
        route: (const float *), scales: (const float *), out: (float *), stride: u32,
        out_stride: u32, experts_used: u32, padding: u32,
    }

    /// Samples the next step's tokens.
    struct Sample: 56 {
        /// [outputs, stride]
        logits: (float *),
        /// every row is a sequence's only one, and an output
        metadata: (u32 *),
        /// [outputs, GROUPS]: the largest logit of each group, as a rank
        group_max: (u64 *),
        /// [outputs, 2]: finished blocks, zero before; sampled steps
        counts: (u32 *),
        /// [2, outputs]: host memory, for even and odd steps
        sampled: (u32 *),
        stride: u32, width: u32, outputs: u32, padding: u32,
    }

    /// A decode step of one row in one persistent kernel.
    struct PersistentStep: 56 {
        stages: (const Stage *), metadata: (const u32 *),
        /// of the step but the last stage's: that stage resets them to sentinels
        values: (uint4 *),
        /// the last stage's input, which the next step resets to sentinels
        last_input: (uint4 *),
        /// [blocks], in host memory: the stage in which a block is stuck, from 1 on, or 0
        stalled: (u32 *),
        stage_count: u32,
        /// of shared memory: a stage's input, or attention's workspaces
        workspace_bytes: u32,
        /// in sixteen bytes
        values_len: u32, last_input_len: u32,
    }

    /// Reads memory to measure its bandwidth.
    struct ReadAll: 24 {
        from: (const uint4 *), sums: (float *),
        /// of 16 bytes
        count: u64,
    }
}

pub(crate) mod exchange;
pub(crate) mod expert_cache;
pub(crate) mod recurrent;
pub(crate) mod sparse;
