//! What kernels are told: the structures of `kernels/*.cu`, field by field, with their bytes, which
//! are checked there too. Addresses are those of the device; 0 is none.

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
    /// A matrix of a product.
    struct Matrix: 48 {
        planes: u64,
        scales: u64,
        bias: u64,
        out: u64,
        out_stride: u32,
        rows: u32,
        tiles: u32,
        first_tile: u32,
    }

    /// A product with up to four matrices.
    struct Product: 312 {
        matrices: [Matrix; 4],
        input: u64,
        feed: u64,
        residual: u64,
        half_out: u64,
        route: u64,
        norm_x: u64,
        norm_weight: u64,
        input_stride: u32,
        residual_stride: u32,
        half_stride: u32,
        route_stride: u32,
        count: u32,
        tiles: u32,
        chunks: u32,
        part: u32,
        rows: u32,
        is_outputs: u32,
        act: u32,
        used: u32,
        is_shared: u32,
        cols: u32,
        norm_eps: f32,
        parts: u32,
    }

    /// A product of many rows.
    struct Many: 336 {
        product: Product,
        groups: u64,
        members: u64,
        cell: u32,
        share: u32,
    }

    /// Rows put in order by the experts that they meet.
    struct Group: 56 {
        route: u64,
        groups: u64,
        members: u64,
        route_stride: u32,
        rows: u32,
        used: u32,
        experts: u32,
        width: u32,
        columns: u32,
        places: u32,
        padding: u32,
    }

    /// Input of products of many rows, put in order.
    struct Interleave: 56 {
        input: u64,
        feed: u64,
        members: u64,
        out: u64,
        stride: u32,
        chunks: u32,
        rows: u32,
        is_outputs: u32,
        cell: u32,
        share: u32,
    }

    /// Attention.
    struct Attend: 192 {
        q: u64,
        keys: u64,
        values: u64,
        feed: u64,
        k: u64,
        v: u64,
        angles: u64,
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
        pairs: u32,
        is_neox: u32,
        heads: u32,
        kv_heads: u32,
        key_dim: u32,
        value_dim: u32,
        window: u32,
        is_causal: u32,
        table: u32,
        segments: u32,
        is_spread: u32,
        skips_prompts: u32,
        group: u32,
        blocks: u32,
        by_blocks: u32,
        by_group_blocks: u32,
        padding: u32,
    }

    /// Keeping keys and values, and rotating them and queries.
    struct Store: 112 {
        q: u64,
        k: u64,
        v: u64,
        angles: u64,
        q_out: u64,
        keys: u64,
        values: u64,
        feed: u64,
        q_stride: u32,
        k_stride: u32,
        v_stride: u32,
        q_out_stride: u32,
        heads: u32,
        kv_heads: u32,
        key_dim: u32,
        value_dim: u32,
        table: u32,
        pairs: u32,
        is_neox: u32,
        padding: u32,
    }

    /// Sines and cosines.
    struct Angles: 32 {
        turns: u64,
        feed: u64,
        out: u64,
        magnitude: f32,
        pairs: u32,
    }

    /// Rows of a table.
    struct Embed: 48 {
        planes: u64,
        scales: u64,
        feed: u64,
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

    /// Inputs of products.
    struct Prepare: 32 {
        x: u64,
        out: u64,
        stride: u32,
        out_stride: u32,
        cols: u32,
        parts: u32,
    }

    /// Functions of one or two elements.
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

    /// A rotation.
    struct Rotate: 48 {
        x: u64,
        angles: u64,
        out: u64,
        stride: u32,
        out_stride: u32,
        width: u32,
        head_dim: u32,
        pairs: u32,
        is_neox: u32,
    }

    /// Columns of one or two values.
    struct Arrange: 64 {
        a: u64,
        b: u64,
        out: u64,
        a_stride: u32,
        b_stride: u32,
        out_stride: u32,
        groups: u32,
        a_part: u32,
        start: u32,
        taken: u32,
        b_part: u32,
        b_is_shared: u32,
        padding: u32,
    }

    /// Pooling.
    struct Pool: 40 {
        x: u64,
        feed: u64,
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
        used: u32,
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
        used: u32,
        padding: u32,
    }

    /// A convolution.
    struct Conv: 64 {
        x: u64,
        weight: u64,
        bias: u64,
        feed: u64,
        cells: u64,
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
        feed: u64,
        cells: u64,
        out: u64,
        x_stride: u32,
        b_stride: u32,
        c_stride: u32,
        dt_stride: u32,
        out_stride: u32,
        heads: u32,
        head_dim: u32,
        groups: u32,
        state: u32,
        padding: u32,
    }

    /// The choice of tokens.
    struct Choose: 56 {
        logits: u64,
        feed: u64,
        peaks: u64,
        counts: u64,
        chosen: u64,
        stride: u32,
        width: u32,
        outputs: u32,
        padding: u32,
    }

    /// A step of one row in one kernel.
    struct Persistent: 48 {
        stages: u64,
        feed: u64,
        values: u64,
        last: u64,
        count: u32,
        area: u32,
        values_len: u32,
        last_len: u32,
    }

    /// Reading for its own sake.
    struct Read: 24 {
        from: u64,
        sums: u64,
        count: u64,
    }
}

/// A stage of a step in one kernel: the words of a [`Product`] or of an [`Attend`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub(crate) struct Stage {
    work: u32,
    padding: [u32; 3],
    words: [[u32; 16]; 5],
}
const _: () = assert!(size_of::<Stage>() == 336);

impl Stage {
    /// Work of this number with its parameters.
    pub(crate) fn new<P: Pod>(work: u32, parameters: &P) -> Stage {
        let mut stage = Stage { work, ..Stage::zeroed() };
        let bytes = bytemuck::bytes_of(parameters);
        bytemuck::bytes_of_mut(&mut stage.words)[..bytes.len()].copy_from_slice(bytes);
        stage
    }
}
