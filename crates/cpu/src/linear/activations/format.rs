//! The formats of activations, and their sizes.

use half::bf16;

use super::block::{BLOCK_COLS, Block};

/// Rows (tokens) of a full tile.
pub(crate) const TILE_ROWS: usize = 16;

/// The format in which kernels read activations.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum ActivationFormat {
    /// int8 blocks of 32 columns.
    Int8,
    /// f32, as they are.
    F32,
    /// bfloat16, rounded to nearest, in pairs of columns.
    Bf16,
}

/// The set of formats that the matmuls of one input read.
#[derive(Copy, Clone, Debug, Default)]
pub(crate) struct ActivationFormats([bool; ActivationFormat::ALL.len()]);

impl ActivationFormats {
    /// The formats in the set.
    pub(crate) fn iter(self) -> impl Iterator<Item = ActivationFormat> {
        ActivationFormat::ALL.into_iter().filter(move |&format| self.0[format as usize])
    }
}

impl FromIterator<ActivationFormat> for ActivationFormats {
    fn from_iter<I: IntoIterator<Item = ActivationFormat>>(wanted: I) -> ActivationFormats {
        let mut formats = ActivationFormats::default();
        wanted.into_iter().for_each(|format| formats.0[format as usize] = true);
        formats
    }
}

impl ActivationFormat {
    /// All formats, in the order of their discriminants.
    pub(crate) const ALL: [ActivationFormat; 3] =
        [ActivationFormat::Int8, ActivationFormat::F32, ActivationFormat::Bf16];

    /// Bytes of `rows` rows of `cols` columns.
    pub fn bytes(self, rows: usize, cols: usize) -> usize {
        rows * self.row_bytes(cols) + rows.saturating_sub(1) / TILE_ROWS * self.gap_bytes()
    }

    pub(super) fn row_bytes(self, cols: usize) -> usize {
        match self {
            ActivationFormat::Int8 => cols / BLOCK_COLS * size_of::<Block>(),
            ActivationFormat::F32 => cols * size_of::<f32>(),
            ActivationFormat::Bf16 => cols.div_ceil(2) * size_of::<[bf16; 2]>(),
        }
    }

    /// Padding between two tiles. A kernel reads the same columns of all tiles; tiles a power of
    /// two apart would map them to the same few sets of L2.
    pub(super) fn gap_bytes(self) -> usize {
        match self {
            ActivationFormat::Int8 | ActivationFormat::Bf16 => 0,
            ActivationFormat::F32 => 8 << 10,
        }
    }

    /// Columns of one step.
    pub(crate) fn step_cols(self) -> usize {
        match self {
            ActivationFormat::Int8 => BLOCK_COLS,
            ActivationFormat::F32 => 1,
            ActivationFormat::Bf16 => 2,
        }
    }

    /// Bytes of one step along the columns of one row.
    pub(crate) fn step_bytes(self) -> usize {
        match self {
            ActivationFormat::Int8 => size_of::<Block>(),
            ActivationFormat::F32 => size_of::<f32>(),
            ActivationFormat::Bf16 => size_of::<[bf16; 2]>(),
        }
    }
}
