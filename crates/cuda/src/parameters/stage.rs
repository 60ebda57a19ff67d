//! Parameters of a stage of the persistent kernel, which is one of several ops.

use bytemuck::{Pod, Zeroable};

/// A stage of the persistent kernel: an op with its parameters.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub(crate) struct Stage {
    op: u32,
    padding: [u32; 3],
    words: [[u32; 4]; 22],
}
const _: () = assert!(size_of::<Stage>() == 368);

/// The same for the kernels, which read the words as the op's parameters.
pub(crate) const STAGE: &str = "struct Stage {
    u32 op;
    u32 padding[3];
    union {
        Matmul matmul;
        Attention attention;
        Norm norm;
        Route route;
        Conv conv;
        Scan scan;
        DeltaRule delta_rule;
        Elementwise elementwise;
        SliceConcat slice_concat;
        ConvertInput convert_input;
        Rotate rotate;
        u32 words[88];
    };
};";

impl Stage {
    /// An op with its parameters.
    pub(crate) fn new<P: Pod>(op: u32, parameters: &P) -> Stage {
        let mut stage = Stage { op, ..Stage::zeroed() };
        let bytes = bytemuck::bytes_of(parameters);
        bytemuck::bytes_of_mut(&mut stage.words)[..bytes.len()].copy_from_slice(bytes);
        stage
    }
}
