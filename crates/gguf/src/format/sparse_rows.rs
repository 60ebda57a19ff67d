//! Rows of sparse formats: conversion to and from rows of the dense base format, and the lookup of
//! a row in a tensor's data.

use super::sparse::base::{F16, Q4_0, Q8_0};
use super::sparse::index::{self, RowBytes};
use super::sparse::{bitmap, csr, two_four};
use super::table::Format;
use crate::error::{Error, Mismatch, Result};

/// Calls a function that is generic over the base of a sparse format.
macro_rules! with_base {
    ($format:expr, $module:ident::$function:ident $arguments:tt) => {
        match $format {
            Format::BITMAP_F16 | Format::S24_F16 => $module::$function::<F16> $arguments,
            Format::BITMAP_Q8_0 | Format::S24_Q8_0 => $module::$function::<Q8_0> $arguments,
            Format::BITMAP_Q4_0 | Format::S24_Q4_0 => $module::$function::<Q4_0> $arguments,
            other => panic!("{} has no base format", other.name()),
        }
    };
}

impl Format {
    /// The dense format whose codes this sparse format packs; none for a dense format.
    pub fn base(self) -> Option<Format> {
        match self {
            Format::CSR_F16 | Format::BITMAP_F16 | Format::S24_F16 => Some(Format::F16),
            Format::BITMAP_Q8_0 | Format::S24_Q8_0 => Some(Format::Q8_0),
            Format::BITMAP_Q4_0 | Format::S24_Q4_0 => Some(Format::Q4_0),
            _ => None,
        }
    }

    /// Whether rows differ in length, so that a tensor's data begin with an index of row offsets.
    pub fn has_index(self) -> bool {
        use Format::{BITMAP_F16, BITMAP_Q4_0, BITMAP_Q8_0, CSR_F16};
        matches!(self, CSR_F16 | BITMAP_F16 | BITMAP_Q8_0 | BITMAP_Q4_0)
    }

    /// The bytes of one row of a tensor with `rows` rows and the bytes `data`.
    ///
    /// # Panics
    /// If the tensor has no such row, or if `data` has an index that was not checked.
    pub fn row(self, data: &[u8], rows: usize, row: usize) -> &[u8] {
        assert!(row < rows, "row {row} of {rows}");
        if self.has_index() {
            return index::row(data, row);
        }
        let bytes = data.len() / rows;
        &data[row * bytes..][..bytes]
    }

    /// Dequantises one row, as [`Format::row`] returns it.
    ///
    /// # Panics
    /// If the row is too short for `out`, or `out` is not a whole number of blocks.
    pub fn dequantize_row(self, row: &[u8], out: &mut [f32]) {
        let Some(base) = self.base() else { return self.dequantize(row, out) };
        let mut dense = vec![0; base.row_bytes(out.len()).expect("whole blocks")];
        self.densify_row(row, &mut dense);
        base.dequantize(&dense, out);
    }

    /// Writes a row of a sparse format as a row of its base.
    ///
    /// # Panics
    /// If the format has no base, or if the row is too short for the blocks of `dense`.
    pub fn densify_row(self, row: &[u8], dense: &mut [u8]) {
        match self {
            Format::CSR_F16 => csr::densify(row, dense),
            _ if self.has_index() => with_base!(self, bitmap::densify(row, dense)),
            _ => with_base!(self, two_four::densify(row, dense)),
        }
    }

    /// Converts a row of the base to a row of this sparse format, without loss.
    ///
    /// # Errors
    /// If the format is 2:4 and more than two of four neighbours are not zero.
    ///
    /// # Panics
    /// If the format has no base, or if `dense` is not a row of the base.
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

    /// The data of a tensor from rows that [`Format::sparsify_row`] returned.
    pub fn join_rows(self, rows: &[Vec<u8>]) -> Vec<u8> {
        if self.has_index() { index::join(rows) } else { rows.concat() }
    }

    /// Quantises a tensor `[values.len() / cols, cols]` to any format with a quantiser. A 2:4
    /// format stores the two values of largest magnitude of every four neighbours.
    ///
    /// # Errors
    /// If there is no quantiser for the format.
    ///
    /// # Panics
    /// If `values` is not a whole number of rows, or a row not a whole number of blocks.
    pub fn encode(self, values: &[f32], cols: usize) -> Result<Vec<u8>> {
        assert!(values.len().is_multiple_of(cols), "{} values of {cols}", values.len());
        let row_format = if self.has_index() { self.base().unwrap_or(self) } else { self };
        let row_bytes = row_format.row_bytes(cols).expect("rows of whole blocks");
        let mut row = vec![0; row_bytes];
        let mut rows = Vec::with_capacity(values.len() / cols);
        for values in values.chunks_exact(cols) {
            row_format.quantize(values, None, &mut row)?;
            rows.push(if self.has_index() { self.sparsify_row(&row)? } else { row.clone() });
        }
        Ok(self.join_rows(&rows))
    }

    /// The stored elements of a row, explicit zeros included; none for a dense format.
    pub fn stored_elements(self, row: &[u8], cols: usize) -> Option<usize> {
        match self {
            Format::CSR_F16 => Some(row.len() / csr::PAIR),
            _ if self.has_index() => Some(bitmap::ones(row, cols)),
            _ => self.base().map(|_| cols / 2),
        }
    }

    /// The possible lengths of a row; none if the format cannot hold `cols` columns.
    fn row_lengths(self, cols: usize) -> Option<RowBytes> {
        match self {
            Format::CSR_F16 => csr::row_bytes(cols),
            _ => with_base!(self, bitmap::row_bytes(cols)),
        }
    }

    /// Checks the index at the start of `data`, which may continue behind the tensor, and returns
    /// the bytes of the tensor. `rows` is not zero.
    pub(crate) fn check_index(self, rows: u64, cols: u64, data: &[u8]) -> Result<u64, Mismatch> {
        let lengths = usize::try_from(cols).ok().and_then(|cols| self.row_lengths(cols));
        let Some(lengths) = lengths else {
            let expected = format!("columns that {} can hold", self.name());
            return Err(Mismatch { expected, found: cols.to_string() });
        };
        index::check(lengths, rows, data)
    }

    /// Dequantises a whole tensor whose data begin with an index.
    pub(super) fn dequantize_indexed(self, data: &[u8], out: &mut [f32]) {
        let rows = index::rows(data);
        assert!(rows > 0 && out.len().is_multiple_of(rows), "{} elements of {rows}", out.len());
        for (row, out) in out.chunks_exact_mut(out.len() / rows).enumerate() {
            self.dequantize_row(index::row(data, row), out);
        }
    }
}
