//! Formats of pruned weights, which leave zeros out. Each packs the codes of a dense format, its
//! *base*, block by block of 32 elements, and reads back as exactly that: a sparse row and its base
//! row hold the same values. None of these ids is known outside this project.
//!
//! - `S24_*`, 2:4: of four neighbours two are kept. Blocks have one size, as in any format.
//! - `BITMAP_*`: one bit for each element, then the codes of those that are not zero.
//! - `CSR_F16`, compressed sparse rows: the values that are not zero, and their columns.
//!
//! Rows of the latter two differ in length, so a tensor's data begin with an index (`index.rs`).
//! What is in a row is defined for any bytes: codes that a row is too short for are zeros, codes
//! that it is too long for mean nothing. This module must not know files.

mod base;
mod bitmap;
mod csr;
pub(crate) mod index;
mod two_four;

pub use two_four::{S24_F16, S24_Q4_0, S24_Q8_0};

use self::base::{F16, Q4_0, Q8_0};
use super::Format;
use crate::{Error, Result};

/// Elements of a block of every base.
pub(crate) const BLOCK: usize = 32;

/// The most columns of a CSR row: they are numbered by u16.
const CSR_COLS_MAX: usize = 1 << 16;

/// Lengths that a row may have, in bytes.
pub(crate) struct RowBytes {
    pub(crate) min: usize,
    pub(crate) max: usize,
    /// Every length is a multiple of this.
    pub(crate) step: usize,
}

/// Calls a function with the base of a format that has one.
macro_rules! with_base {
    ($format:expr, $module:ident::$function:ident $arguments:tt) => {
        match $format {
            Format::BITMAP_F16 | Format::S24_F16 => $module::$function::<F16> $arguments,
            Format::BITMAP_Q8_0 | Format::S24_Q8_0 => $module::$function::<Q8_0> $arguments,
            Format::BITMAP_Q4_0 | Format::S24_Q4_0 => $module::$function::<Q4_0> $arguments,
            other => panic!("{} packs no blocks of another format", other.name()),
        }
    };
}

impl Format {
    /// The dense format whose codes this one packs; none for a format that is dense itself.
    pub fn base(self) -> Option<Format> {
        match self {
            Format::CSR_F16 | Format::BITMAP_F16 | Format::S24_F16 => Some(Format::F16),
            Format::BITMAP_Q8_0 | Format::S24_Q8_0 => Some(Format::Q8_0),
            Format::BITMAP_Q4_0 | Format::S24_Q4_0 => Some(Format::Q4_0),
            _ => None,
        }
    }

    /// Whether rows differ in length, so that a tensor's data begin with an index of them.
    pub fn has_index(self) -> bool {
        use Format::{BITMAP_F16, BITMAP_Q4_0, BITMAP_Q8_0, CSR_F16};
        matches!(self, CSR_F16 | BITMAP_F16 | BITMAP_Q8_0 | BITMAP_Q4_0)
    }

    /// The bytes of one row of a tensor: of its `rows` rows, all of whose data are `data`.
    ///
    /// # Panics
    /// If there is no such row, or if an index was not checked by whoever opened the data.
    pub fn row(self, data: &[u8], rows: usize, row: usize) -> &[u8] {
        assert!(row < rows, "row {row} of {rows}");
        if self.has_index() {
            return index::row(data, row);
        }
        let bytes = data.len() / rows;
        &data[row * bytes..][..bytes]
    }

    /// The values of one row, as [`Format::row`] gives it.
    ///
    /// # Panics
    /// If the row is too short to be one of so many elements, or no whole number of blocks.
    pub fn dequantize_row(self, row: &[u8], out: &mut [f32]) {
        let Some(base) = self.base() else { return self.dequantize(row, out) };
        let mut dense = vec![0; base.row_bytes(out.len()).expect("whole blocks")];
        self.densify_row(row, &mut dense);
        base.dequantize(&dense, out);
    }

    /// Writes a row of a sparse format as a row of its base.
    ///
    /// # Panics
    /// If the format has no base, or if the row is too short to be one of so many blocks.
    pub fn densify_row(self, row: &[u8], dense: &mut [u8]) {
        match self {
            Format::CSR_F16 => csr::densify(row, dense),
            _ if self.has_index() => with_base!(self, bitmap::densify(row, dense)),
            _ => with_base!(self, two_four::densify(row, dense)),
        }
    }

    /// A row of the base as a row of this sparse format, which holds the same values.
    ///
    /// # Errors
    /// If the format cannot: a 2:4 format where of four neighbours more than two are not zero.
    ///
    /// # Panics
    /// If the format has no base, or if `dense` is no row that it could hold.
    pub fn sparsify_row(self, dense: &[u8]) -> Result<Vec<u8>> {
        match self {
            Format::CSR_F16 => Ok(csr::sparsify(dense)),
            _ if self.has_index() => Ok(with_base!(self, bitmap::sparsify(dense))),
            _ => with_base!(self, two_four::sparsify(dense)).ok_or_else(|| Error::NotSparse {
                format: self.name(),
                expected: "at least two zeros among every four neighbours",
            }),
        }
    }

    /// The data of a tensor of rows that [`Format::sparsify_row`] made.
    pub fn join_rows(self, rows: &[Vec<u8>]) -> Vec<u8> {
        if self.has_index() { index::join(rows) } else { rows.concat() }
    }

    /// The data of a tensor, `[values.len() / cols, cols]`, in any format that can be written. A
    /// 2:4 format keeps the larger two of four neighbours.
    ///
    /// # Errors
    /// If there is no quantiser for the format.
    ///
    /// # Panics
    /// If `values` is no whole number of rows, or a row no whole number of blocks.
    pub fn encode(self, values: &[f32], cols: usize) -> Result<Vec<u8>> {
        assert!(values.len().is_multiple_of(cols), "{} values of {cols}", values.len());
        let of_row = if self.has_index() { self.base().unwrap_or(self) } else { self };
        let row_bytes = of_row.row_bytes(cols).expect("rows of whole blocks");
        let mut row = vec![0; row_bytes];
        let mut rows = Vec::with_capacity(values.len() / cols);
        for values in values.chunks_exact(cols) {
            of_row.quantize(values, None, &mut row)?;
            rows.push(if self.has_index() { self.sparsify_row(&row)? } else { row.clone() });
        }
        Ok(self.join_rows(&rows))
    }

    /// How many elements of a row are stored and not left out, those that are zero nevertheless
    /// included; none for a dense format.
    pub fn stored_elements(self, row: &[u8], cols: usize) -> Option<usize> {
        match self {
            Format::CSR_F16 => Some(row.len() / csr::PAIR),
            _ if self.has_index() => Some(bitmap::ones(row, cols)),
            _ => self.base().map(|_| cols / 2),
        }
    }

    /// How long a row may be, of a format whose rows differ; none if no row has so many columns.
    pub(crate) fn row_lengths(self, cols: usize) -> Option<RowBytes> {
        match self {
            Format::CSR_F16 => (cols <= CSR_COLS_MAX).then_some(RowBytes {
                min: 0,
                max: csr::PAIR * cols,
                step: csr::PAIR,
            }),
            _ => with_base!(self, bitmap::row_bytes(cols)),
        }
    }

    /// The values of a whole tensor whose data begin with an index.
    pub(super) fn dequantize_indexed(self, data: &[u8], out: &mut [f32]) {
        let rows = index::rows(data);
        assert!(rows > 0 && out.len().is_multiple_of(rows), "{} elements of {rows}", out.len());
        for (row, out) in out.chunks_exact_mut(out.len() / rows).enumerate() {
            self.dequantize_row(index::row(data, row), out);
        }
    }
}
