//! The values of a lowered plan: what stages read and write.

use bodkin_model::Rows;

use crate::constants::{CHUNK_COLS, PANEL_ROWS, WGMMA_GEMV_ROWS};

/// An index into the values of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Value(pub(crate) usize);

/// The elements of a value's row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Content {
    /// `width` f32.
    Floats(usize),
    /// Matmul inputs in f16, times `INPUT_SCALE`, each row padded with zeros to whole chunks.
    F16(F16Rows),
}

/// Matmul inputs: `parts` rows of `cols` columns for each row of the plan's value; more than one
/// where experts or heads have inputs of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct F16Rows {
    pub(crate) parts: usize,
    pub(crate) cols: usize,
}

impl F16Rows {
    /// Elements from one part to the next.
    pub(crate) fn stride(self) -> usize {
        self.cols.next_multiple_of(CHUNK_COLS)
    }
}

impl Content {
    /// Elements from one row to the next, or from one part to the next where a row has several.
    pub(crate) fn stride(self) -> usize {
        match self {
            Content::Floats(width) => width,
            Content::F16(halves) => halves.stride(),
        }
    }

    pub(crate) fn element_bytes(self) -> usize {
        match self {
            Content::Floats(_) => 4,
            Content::F16(_) => 2,
        }
    }

    /// Elements from one whole row to the next.
    pub(crate) fn row_stride(self) -> usize {
        match self {
            Content::Floats(width) => width,
            Content::F16(halves) => halves.parts * halves.stride(),
        }
    }
}

/// The shape of a value of the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ValueShape {
    pub(crate) rows: Rows,
    pub(crate) content: Content,
    /// If it is a range of another value's columns: that value, and the first of them.
    pub(crate) view: Option<(Value, usize)>,
    /// Whether the stages that write and read it know `wgmma`'s swizzled order, see
    /// [`swizzle`](super::swizzle). Steps with too few rows, or without `wgmma`, do not use it.
    pub(crate) may_be_swizzled: bool,
}

impl ValueShape {
    /// Bytes for a step of `tokens` tokens and `outputs` outputs.
    pub(crate) fn bytes(&self, tokens: usize, outputs: usize) -> u64 {
        let parts = match self.content {
            Content::Floats(_) => 1,
            Content::F16(halves) => halves.parts,
        };
        let row = self.content.element_bytes() * parts * self.content.stride();
        let rows = match self.rows {
            Rows::Tokens => tokens,
            Rows::Outputs => outputs,
        };
        // Room for the worst case.
        let is_swizzled = self.may_be_swizzled && rows > WGMMA_GEMV_ROWS;
        row as u64 * if is_swizzled { rows.next_multiple_of(PANEL_ROWS) } else { rows } as u64
    }
}
