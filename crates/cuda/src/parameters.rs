//! Kernel parameters: the structures of `kernels/parameters.cuh`, field by field, with their sizes
//! in bytes, which are checked there too. Addresses are those of the device; 0 is none.

use bytemuck::{Pod, Zeroable};

/// Derives what lets a structure be handed to a kernel.
macro_rules! parameters {
    ($($(#[$about:meta])* struct $name:ident: $bytes:literal { $($field:ident: $type:ty,)* })*) => {
        $($(#[$about])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
        pub(crate) struct $name { $(pub(crate) $field: $type,)* }
        const _: () = assert!(size_of::<$name>() == $bytes);)*
    };
}

parameters! {
    /// A matrix of a matmul.
    struct Matrix: 48 {
        packed: u64,
        scales: u64,
        bias: u64,
        out: u64,
        out_stride: u32,
        rows: u32,
        tiles: u32,
        first_tile: u32,
    }

    /// A matmul with up to four matrices.
    struct Matmul: 312 {
        matrices: [Matrix; 4],
        input: u64,
        metadata: u64,
        residual: u64,
        half_out: u64,
        route: u64,
        norm_input: u64,
        norm_weight: u64,
        input_stride: u32,
        residual_stride: u32,
        half_stride: u32,
        route_stride: u32,
        matrix_count: u32,
        tiles: u32,
        chunks: u32,
        slice_chunks: u32,
        rows: u32,
        gathers_outputs: u32,
        act: u32,
        experts_used: u32,
        shares_input: u32,
        cols: u32,
        norm_eps: f32,
        slices: u32,
    }

    /// A GEMM of many rows, grouped by expert where there are experts.
    struct Gemm: 336 {
        matmul: Matmul,
        groups: u64,
        permutation: u64,
        panel_rows: u32,
        outputs_per_input: u32,
    }

    /// The expert permutation.
    struct PermuteExperts: 56 {
        route: u64,
        groups: u64,
        permutation: u64,
        route_stride: u32,
        rows: u32,
        experts_used: u32,
        experts: u32,
        group_rows: u32,
        max_groups: u32,
        permuted_rows: u32,
        padding: u32,
    }

    /// The swizzled input of a GEMM.
    struct SwizzleInput: 56 {
        input: u64,
        metadata: u64,
        permutation: u64,
        out: u64,
        stride: u32,
        chunks: u32,
        rows: u32,
        gathers_outputs: u32,
        panel_rows: u32,
        outputs_per_input: u32,
    }

    /// Attention.
    struct Attention: 192 {
        q: u64,
        keys: u64,
        values: u64,
        metadata: u64,
        k: u64,
        v: u64,
        cos_sin: u64,
        sinks: u64,
        out: u64,
        half_out: u64,
        partials: u64,
        arrivals: u64,
        scale: f32,
        softcap: f32,
        q_stride: u32,
        k_stride: u32,
        v_stride: u32,
        out_stride: u32,
        half_stride: u32,
        rotary_pairs: u32,
        is_neox: u32,
        heads: u32,
        kv_heads: u32,
        key_dim: u32,
        value_dim: u32,
        window: u32,
        is_causal: u32,
        page_table: u32,
        max_splits: u32,
        is_split: u32,
        skips_prefill: u32,
        group_heads: u32,
        head_blocks: u32,
        head_blocks_inverse: u32,
        group_blocks_inverse: u32,
        padding: u32,
    }

    /// Stores keys and values in their pages and rotates keys and queries (RoPE).
    struct StoreKv: 112 {
        q: u64,
        k: u64,
        v: u64,
        cos_sin: u64,
        q_out: u64,
        keys: u64,
        values: u64,
        metadata: u64,
        q_stride: u32,
        k_stride: u32,
        v_stride: u32,
        q_out_stride: u32,
        heads: u32,
        kv_heads: u32,
        key_dim: u32,
        value_dim: u32,
        page_table: u32,
        rotary_pairs: u32,
        is_neox: u32,
        padding: u32,
    }

    /// Cosines and sines of rotary angles.
    struct RopeAngles: 32 {
        frequencies: u64,
        metadata: u64,
        out: u64,
        magnitude: f32,
        rotary_pairs: u32,
    }

    /// Rows of a table.
    struct Embed: 48 {
        packed: u64,
        scales: u64,
        metadata: u64,
        out: u64,
        stride: u32,
        cols: u32,
        chunks: u32,
        by: u32,
    }

    /// A norm.
    struct Norm: 72 {
        x: u64,
        weight: u64,
        bias: u64,
        out: u64,
        half_out: u64,
        eps: f32,
        stride: u32,
        out_stride: u32,
        half_stride: u32,
        n: u32,
        groups: u32,
        weight_len: u32,
        is_layer: u32,
    }

    /// Conversion of f32 rows to matmul inputs.
    struct ConvertInput: 32 {
        x: u64,
        out: u64,
        stride: u32,
        out_stride: u32,
        cols: u32,
        parts: u32,
    }

    /// Elementwise functions of one or two values.
    struct Elementwise: 56 {
        a: u64,
        b: u64,
        out: u64,
        factor: f32,
        a_stride: u32,
        b_stride: u32,
        out_stride: u32,
        width: u32,
        op: u32,
        act: u32,
        padding: u32,
    }

    /// RoPE.
    struct Rotate: 48 {
        x: u64,
        cos_sin: u64,
        out: u64,
        stride: u32,
        out_stride: u32,
        width: u32,
        head_dim: u32,
        rotary_pairs: u32,
        is_neox: u32,
    }

    /// Slices and concatenations of columns.
    struct SliceConcat: 64 {
        a: u64,
        b: u64,
        out: u64,
        a_stride: u32,
        b_stride: u32,
        out_stride: u32,
        groups: u32,
        a_width: u32,
        a_start: u32,
        a_len: u32,
        b_len: u32,
        is_b_shared: u32,
        padding: u32,
    }

    /// Pooling.
    struct Pool: 40 {
        x: u64,
        metadata: u64,
        out: u64,
        stride: u32,
        out_stride: u32,
        width: u32,
        kind: u32,
    }

    /// The choice of experts.
    struct Route: 72 {
        scores: u64,
        bias: u64,
        out: u64,
        counts: u64,
        scale: f32,
        stride: u32,
        out_stride: u32,
        experts: u32,
        experts_used: u32,
        groups: u32,
        groups_used: u32,
        gating: u32,
        normalize: u32,
        padding: u32,
    }

    /// The weighted sum of experts' results.
    struct ExpertSum: 48 {
        x: u64,
        route: u64,
        out: u64,
        stride: u32,
        route_stride: u32,
        out_stride: u32,
        width: u32,
        experts_used: u32,
        padding: u32,
    }

    /// A convolution.
    struct Conv: 64 {
        x: u64,
        weight: u64,
        bias: u64,
        metadata: u64,
        states: u64,
        out: u64,
        stride: u32,
        out_stride: u32,
        width: u32,
        taps: u32,
    }

    /// A state-space layer.
    struct Scan: 120 {
        x: u64,
        b: u64,
        c: u64,
        dt: u64,
        a: u64,
        d: u64,
        dt_bias: u64,
        metadata: u64,
        states: u64,
        out: u64,
        x_stride: u32,
        b_stride: u32,
        c_stride: u32,
        dt_stride: u32,
        out_stride: u32,
        heads: u32,
        head_dim: u32,
        groups: u32,
        state_dim: u32,
        padding: u32,
    }

    /// Sampling of tokens.
    struct Sample: 56 {
        logits: u64,
        metadata: u64,
        group_max: u64,
        counts: u64,
        sampled: u64,
        stride: u32,
        width: u32,
        outputs: u32,
        padding: u32,
    }

    /// A decode step of one row in the persistent kernel.
    struct PersistentStep: 48 {
        stages: u64,
        metadata: u64,
        values: u64,
        last_input: u64,
        stage_count: u32,
        workspace_bytes: u32,
        values_len: u32,
        last_input_len: u32,
    }

    /// Reads memory to measure its bandwidth.
    struct ReadAll: 24 {
        from: u64,
        sums: u64,
        count: u64,
    }
}

/// A stage of the persistent kernel: the words of a [`Matmul`], an [`Attention`] or another op.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub(crate) struct Stage {
    op: u32,
    padding: [u32; 3],
    words: [[u32; 16]; 5],
}
const _: () = assert!(size_of::<Stage>() == 336);

impl Stage {
    /// An op with its parameters.
    pub(crate) fn new<P: Pod>(op: u32, parameters: &P) -> Stage {
        let mut stage = Stage { op, ..Stage::zeroed() };
        let bytes = bytemuck::bytes_of(parameters);
        bytemuck::bytes_of_mut(&mut stage.words)[..bytes.len()].copy_from_slice(bytes);
        stage
    }
}
