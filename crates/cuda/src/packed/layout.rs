//! The layouts of packed weights and their sizes.

use crate::constants::{MAX_SLOT_CHUNKS, SLOT_BYTES};

/// How a weight's codes and scales are packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PackedLayout {
    /// Plain rows of f32: for routers, whose top-k is sensitive to rounding, and for small files.
    F32,
    /// A layout for tensor cores.
    Mma(MmaLayout),
}

/// A layout that `mma` kernels read, numbered alike in the kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum MmaLayout {
    /// Half precision.
    F16,
    /// Signed bytes with a scale for 32 columns.
    S8,
    /// Signed six bits with a scale for 16 columns.
    S6x16,
    /// Five bits with a scale and a minimum for 32 columns.
    U5,
    /// Four bits with a scale and a minimum for 32 columns.
    U4,
    /// Signed four bits with a scale for 16 columns.
    S4x16,
    /// Two bits with a scale and a minimum for 16 columns.
    U2x16,
    /// Codes of four bits into IQ4's codebook, with a scale for 32 columns.
    Iq4,
    /// Codes of four bits into a codebook of the weight, with a scale for 16 columns.
    Codebook,
    /// Floats of four bits with a power of two for 32 columns.
    Fp4,
    /// 2:4 sparse half precision.
    S24F16,
    /// 2:4 sparse signed bytes, with a scale for 32 columns.
    S24S8,
    /// 2:4 sparse signed four bits, with a scale for 32 columns.
    S24S4,
}

impl PackedLayout {
    /// The layout's name in the kernels.
    pub(crate) fn name(self) -> &'static str {
        match self {
            PackedLayout::F32 => "f32",
            PackedLayout::Mma(layout) => layout.name(),
        }
    }

    /// The layout's bytes of a chunk of a tile.
    pub(crate) fn chunk_bytes(self) -> usize {
        match self {
            PackedLayout::F32 => 4096,
            PackedLayout::Mma(layout) => layout.chunk_bytes(),
        }
    }

    /// Bytes of a slot of the persistent kernel: whole chunks of a tile.
    pub(crate) fn slot_bytes(self) -> usize {
        (SLOT_BYTES / self.chunk_bytes()).min(MAX_SLOT_CHUNKS) * self.chunk_bytes()
    }

    /// Whether kernels for many rows exist for Hopper's `wgmma`.
    pub(crate) fn has_wgmma(self) -> bool {
        matches!(self, PackedLayout::Mma(layout) if layout.has_wgmma())
    }
}

impl MmaLayout {
    /// All of them, in the kernels' numbering.
    pub(crate) const ALL: [MmaLayout; 13] = [
        MmaLayout::F16,
        MmaLayout::S8,
        MmaLayout::S6x16,
        MmaLayout::U5,
        MmaLayout::U4,
        MmaLayout::S4x16,
        MmaLayout::U2x16,
        MmaLayout::Iq4,
        MmaLayout::Codebook,
        MmaLayout::Fp4,
        MmaLayout::S24F16,
        MmaLayout::S24S8,
        MmaLayout::S24S4,
    ];

    /// The suffix of the layout's kernels, and its name in them.
    pub(crate) fn name(self) -> &'static str {
        match self {
            MmaLayout::F16 => "f16",
            MmaLayout::S8 => "s8",
            MmaLayout::S6x16 => "s6x16",
            MmaLayout::U5 => "u5",
            MmaLayout::U4 => "u4",
            MmaLayout::S4x16 => "s4x16",
            MmaLayout::U2x16 => "u2x16",
            MmaLayout::Iq4 => "iq4",
            MmaLayout::Codebook => "codebook",
            MmaLayout::Fp4 => "fp4",
            MmaLayout::S24F16 => "s24_f16",
            MmaLayout::S24S8 => "s24_s8",
            MmaLayout::S24S4 => "s24_s4",
        }
    }

    /// Whether kernels for many rows exist for Hopper's `wgmma`, which 2:4 weights do without.
    pub(crate) fn has_wgmma(self) -> bool {
        !matches!(self, MmaLayout::S24F16 | MmaLayout::S24S8 | MmaLayout::S24S4)
    }

    /// The layout's bytes of a chunk of a tile.
    pub(crate) fn chunk_bytes(self) -> usize {
        match self {
            MmaLayout::F16 => 2048,
            MmaLayout::S8 => 1088,
            MmaLayout::S24F16 => 1152,
            MmaLayout::S6x16 => 896,
            MmaLayout::U5 => 768,
            MmaLayout::Codebook => 672,
            MmaLayout::U4 | MmaLayout::S4x16 => 640,
            MmaLayout::U2x16 => 512,
            MmaLayout::Iq4 => 576,
            MmaLayout::Fp4 => 544,
            MmaLayout::S24S8 => 704,
            MmaLayout::S24S4 => 448,
        }
    }

    /// Bytes of a chunk's codes, behind which the scales begin; not of 2:4 layouts.
    pub(super) fn code_bytes(self) -> usize {
        match self {
            MmaLayout::U2x16 => 256,
            MmaLayout::U5 => 640,
            MmaLayout::S6x16 => 768,
            MmaLayout::S8 => 1024,
            _ => 512,
        }
    }

    /// Chunks of a tile that a warp of the GEMV kernel copies to shared memory at once.
    pub(crate) fn slot_chunks(self) -> usize {
        match self {
            MmaLayout::F16 | MmaLayout::S8 | MmaLayout::S24F16 => 2,
            _ => 4,
        }
    }

    /// Whether codes take less than a byte and weights are no 2:4 sparse ones, so that a device's
    /// instructions limit matmuls rather than its memory.
    pub(crate) fn has_dense_small_codes(self) -> bool {
        use MmaLayout::{Codebook, Fp4, Iq4, S4x16, S6x16, U2x16, U4, U5};
        matches!(self, S6x16 | U5 | U4 | S4x16 | U2x16 | Iq4 | Codebook | Fp4)
    }
}
