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
    /// Matmul inputs in half precision, padded with zeros to whole chunks.
    Halves(Halves),
}

/// Matmul inputs: `parts` rows of `cols` columns for each row of the plan's value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Halves {
    pub(crate) parts: usize,
    pub(crate) cols: usize,
}

impl Halves {
    /// The distance of parts in elements.
    pub(crate) fn stride(self) -> usize {
        self.cols.next_multiple_of(CHUNK_COLS)
    }
}

impl Content {
    /// The distance of rows, or of parts where a row has several, in elements.
    pub(crate) fn stride(self) -> usize {
        match self {
            Content::Floats(width) => width,
            Content::Halves(halves) => halves.stride(),
        }
    }

    pub(crate) fn element_bytes(self) -> usize {
        match self {
            Content::Floats(_) => 4,
            Content::Halves(_) => 2,
        }
    }

    /// The distance of whole rows, in elements.
    pub(crate) fn row_stride(self) -> usize {
        match self {
            Content::Floats(width) => width,
            Content::Halves(halves) => halves.parts * halves.stride(),
        }
    }
}

/// A value of the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ValueSpec {
    pub(crate) rows: Rows,
    pub(crate) content: Content,
    /// If it is a part of another value's rows: that value, and the first column.
    pub(crate) view: Option<(Value, usize)>,
    /// Whether all readers can be `gemm_wgmma`, for which halves can be swizzled.
    pub(crate) can_swizzle: bool,
}

impl ValueSpec {
    /// Bytes for a step of `tokens` tokens and `outputs` outputs.
    pub(crate) fn bytes(&self, tokens: usize, outputs: usize) -> u64 {
        let parts = match self.content {
            Content::Floats(_) => 1,
            Content::Halves(halves) => halves.parts,
        };
        let row = self.content.element_bytes() * parts * self.content.stride();
        let rows = match self.rows {
            Rows::Tokens => tokens,
            Rows::Outputs => outputs,
        };
        let is_swizzled = self.can_swizzle && rows > WGMMA_GEMV_ROWS;
        row as u64 * if is_swizzled { rows.next_multiple_of(PANEL_ROWS) } else { rows } as u64
    }
}
