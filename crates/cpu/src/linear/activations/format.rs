//! The formats of activations, and their sizes.

use half::bf16;

use super::block::{BLOCK_COLS, Block};

/// Rows (tokens) of a full tile.
pub(crate) const TILE_ROWS: usize = 16;

/// Bytes of a row of a tile register.
pub(super) const TILE_ROW_BYTES: usize = size_of::<[bf16; 32]>();

/// The format in which kernels read activations.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum ActivationFormat {
    /// int8 blocks of 32 columns.
    Int8,
    /// f32, as they are.
    F32,
    /// bfloat16, rounded to nearest, in pairs of columns.
    Bf16,
    /// bfloat16 in the order of tile registers.
    Bf16Tiles,
    /// As [`ActivationFormat::Bf16Tiles`], with what rounding takes off in tiles of their own:
    /// together 16 bits of each value.
    SplitBf16Tiles,
}

/// The sets of formats that the matmuls of one input read, of decode rows and of prefill rows.
#[derive(Copy, Clone, Debug, Default)]
pub(crate) struct ActivationFormats([[bool; ActivationFormat::ALL.len()]; 2]);

impl ActivationFormats {
    /// The formats in one of the sets.
    pub(crate) fn iter(self, is_prefill: bool) -> impl Iterator<Item = ActivationFormat> {
        let set = self.0[usize::from(is_prefill)];
        ActivationFormat::ALL.into_iter().filter(move |&format| set[format as usize])
    }
}

/// From the formats of each matmul, for decode rows and for prefill rows.
impl FromIterator<[ActivationFormat; 2]> for ActivationFormats {
    fn from_iter<I: IntoIterator<Item = [ActivationFormat; 2]>>(wanted: I) -> ActivationFormats {
        let mut formats = ActivationFormats::default();
        for formats_of_one in wanted {
            for (set, format) in formats.0.iter_mut().zip(formats_of_one) {
                set[format as usize] = true;
            }
        }
        formats
    }
}

impl ActivationFormat {
    /// All formats, in the order of their discriminants.
    pub(crate) const ALL: [ActivationFormat; 5] = [
        ActivationFormat::Int8,
        ActivationFormat::F32,
        ActivationFormat::Bf16,
        ActivationFormat::Bf16Tiles,
        ActivationFormat::SplitBf16Tiles,
    ];

    /// Bytes of `rows` rows of `cols` columns.
    pub fn bytes(self, rows: usize, cols: usize) -> usize {
        let rows = if self.is_tiles() { rows.next_multiple_of(TILE_ROWS) } else { rows };
        rows * self.row_bytes(cols) + rows.saturating_sub(1) / TILE_ROWS * self.gap_bytes()
    }

    pub(super) fn row_bytes(self, cols: usize) -> usize {
        cols.div_ceil(self.step_cols()) * self.step_bytes()
    }

    /// Whether kernels read the rows by tile registers.
    pub(crate) fn is_tiles(self) -> bool {
        matches!(self, ActivationFormat::Bf16Tiles | ActivationFormat::SplitBf16Tiles)
    }

    /// Padding between two tiles. A kernel reads the same columns of all tiles; tiles a power of
    /// two apart would map them to the same few sets of L2.
    pub(super) fn gap_bytes(self) -> usize {
        match self {
            ActivationFormat::Int8 | ActivationFormat::Bf16 => 0,
            ActivationFormat::F32 => 8 << 10,
            ActivationFormat::Bf16Tiles | ActivationFormat::SplitBf16Tiles => 1 << 10,
        }
    }

    /// Columns of one step.
    pub(crate) fn step_cols(self) -> usize {
        match self {
            ActivationFormat::Int8 => BLOCK_COLS,
            ActivationFormat::F32 => 1,
            ActivationFormat::Bf16 => 2,
            ActivationFormat::Bf16Tiles | ActivationFormat::SplitBf16Tiles => 32,
        }
    }

    /// Bytes of one step along the columns of one row.
    pub(crate) fn step_bytes(self) -> usize {
        match self {
            ActivationFormat::Int8 => size_of::<Block>(),
            ActivationFormat::F32 => size_of::<f32>(),
            ActivationFormat::Bf16 => size_of::<[bf16; 2]>(),
            ActivationFormat::Bf16Tiles => size_of::<[bf16; 32]>(),
            ActivationFormat::SplitBf16Tiles => size_of::<[[bf16; 32]; 2]>(),
        }
    }
}
