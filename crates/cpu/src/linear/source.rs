//! Rows of a GGUF tensor, and their packing into panels of a layout.

use std::ops::Range;

use bodkin_gguf::Format;
use bodkin_gguf::format::{CodedBlockReader, coded_blocks};
use half::f16;

use super::lanes::PANEL_ROWS;
use super::layout::{Codebook, FloatLayout, IntegerLayout, PackedLayout, VisitLayout, put_source};

/// Columns that are dequantised at a time; the block sizes of all formats divide it.
const CHUNK_COLS: usize = 256;

/// Rows of a tensor in a GGUF format.
#[derive(Copy, Clone)]
pub struct SourceRows<'a> {
    format: Format,
    /// The data of the whole tensor.
    data: &'a [u8],
    /// Rows of the whole tensor.
    total: usize,
    /// The tensor's row that is row 0 here.
    first: usize,
}

impl<'a> SourceRows<'a> {
    /// All `total` rows of a tensor.
    pub fn new(format: Format, data: &'a [u8], total: usize) -> SourceRows<'a> {
        SourceRows { format, data, total, first: 0 }
    }

    /// The rows from row `count` on.
    pub fn from(self, count: usize) -> SourceRows<'a> {
        SourceRows { first: self.first + count, ..self }
    }

    /// The GGUF format.
    pub(crate) fn format(&self) -> Format {
        self.format
    }

    /// The format of the rows when they are packed: never a sparse one.
    fn dense_format(&self) -> Format {
        self.format.base().unwrap_or(self.format)
    }

    /// Asserts that `rows` rows of `cols` columns can be packed as `layout`.
    ///
    /// # Panics
    /// If there are fewer rows, if they have another length, or if the layout cannot store the
    /// format: an integer layout stores those whose native one it is, and sparse ones over
    /// them, a float layout any.
    pub(super) fn check(&self, layout: PackedLayout, rows: usize, cols: usize) {
        let format = self.dense_format();
        let fits = format.row_bytes(cols).is_some_and(|bytes| {
            let is_whole = self.total.checked_mul(bytes) == Some(self.data.len());
            (is_whole || self.format.base().is_some()) && self.first + rows <= self.total
        });
        assert!(fits, "{}: {} bytes for {rows} x {cols}", format.name(), self.data.len());
        let is_native = PackedLayout::native(format) == Some(layout);
        let is_integer = layout.cols_multiple() > 1;
        assert!(!is_integer || is_native, "{} as {layout:?}", format.name());
    }

    /// Packs up to 16 rows as a panel, which is zero before. See [`SourceRows::check`].
    pub(super) fn pack_panel(
        self,
        layout: PackedLayout,
        rows: Range<usize>,
        cols: usize,
        panel: &mut [u8],
    ) {
        let (format, count, mut dense) = (self.dense_format(), rows.len(), Vec::new());
        if let Some(reader) = coded_blocks(format).filter(|_| layout == PackedLayout::Codebook) {
            return self.pack_coded(reader, rows, panel);
        }
        let source = self.dense(rows, cols, &mut dense);
        let row_bytes = source.len() / count.max(1);
        let is_same = format == layout.format();
        layout.visit(PackPanel { format, is_same, cols, row_bytes, source, rows: count, panel });
    }

    /// Packs rows as [`PackedLayout::Codebook`]: a block at a time, as steps may allocate nothing.
    fn pack_coded(
        self,
        (codebook, block): (&[i8; 16], CodedBlockReader),
        rows: Range<usize>,
        panel: &mut [u8],
    ) {
        let bytes = self.data.len() / self.total;
        let mut source = [0; Codebook::SOURCE_BYTES];
        for (lane, row) in rows.enumerate() {
            let row = &self.data[(self.first + row) * bytes..][..bytes];
            for (i, span) in panel.chunks_exact_mut(Codebook::BYTES).enumerate() {
                put_source(&block(row, i), codebook, &mut source);
                Codebook::pack(&source, lane, span);
            }
        }
    }

    /// Some contiguous rows, in the dense format. A sparse format is expanded into `scratch`.
    fn dense<'b>(self, rows: Range<usize>, cols: usize, scratch: &'b mut Vec<u8>) -> &'b [u8]
    where
        'a: 'b,
    {
        let rows = self.first + rows.start..self.first + rows.end;
        let Some(base) = self.format.base() else {
            let bytes = self.data.len() / self.total;
            return &self.data[rows.start * bytes..rows.end * bytes];
        };
        let bytes = base.row_bytes(cols).expect("`check` accepted the columns");
        scratch.resize(rows.len() * bytes, 0);
        for (row, dense) in rows.zip(scratch.chunks_exact_mut(bytes)) {
            self.format.densify_row(self.format.row(self.data, self.total, row), dense);
        }
        scratch
    }
}

/// Packs one panel.
struct PackPanel<'a> {
    format: Format,
    /// Whether the layout stores the format as it is.
    is_same: bool,
    cols: usize,
    row_bytes: usize,
    source: &'a [u8],
    rows: usize,
    panel: &'a mut [u8],
}

impl VisitLayout for PackPanel<'_> {
    type Output = ();

    fn integer<K: IntegerLayout>(self) {
        assert_eq!(self.row_bytes, self.cols / K::COLS * K::SOURCE_BYTES);
        for (index, span) in self.panel.chunks_exact_mut(K::BYTES).enumerate() {
            for row in 0..self.rows {
                let at = row * self.row_bytes + index * K::SOURCE_BYTES;
                K::pack(&self.source[at..at + K::SOURCE_BYTES], row, span);
            }
        }
    }

    fn float<K: FloatLayout>(self) {
        if self.is_same { self.transpose::<K>() } else { self.dequantize::<K>() }
    }
}

impl PackPanel<'_> {
    /// Transposes rows of the layout's own floats.
    fn transpose<K: FloatLayout>(self) {
        for (col, column) in self.panel.chunks_exact_mut(PANEL_ROWS * K::BYTES).enumerate() {
            let column = column.chunks_exact_mut(K::BYTES).take(self.rows).enumerate();
            for (row, value) in column {
                let at = row * self.row_bytes + col * K::BYTES;
                value.copy_from_slice(&self.source[at..at + K::BYTES]);
            }
        }
    }

    /// Converts and transposes rows of any format.
    fn dequantize<K: FloatLayout>(self) {
        let (format, cols) = (self.format, self.cols);
        let mut values = [[0.0; CHUNK_COLS]; PANEL_ROWS];
        for first in (0..cols).step_by(CHUNK_COLS) {
            let count = CHUNK_COLS.min(cols - first);
            let bytes = |cols| format.row_bytes(cols).expect("chunks are whole blocks");
            for (row, values) in values[..self.rows].iter_mut().enumerate() {
                let at = row * self.row_bytes + bytes(first);
                format.dequantize(&self.source[at..at + bytes(count)], &mut values[..count]);
            }
            let panel = &mut self.panel[first * PANEL_ROWS * K::BYTES..];
            let columns = panel.chunks_exact_mut(PANEL_ROWS * K::BYTES);
            for (col, column) in columns.take(count).enumerate() {
                for (value, to) in values[..self.rows].iter().zip(column.chunks_mut(K::BYTES)) {
                    K::store(value[col], to);
                }
            }
        }
    }
}

/// The float layout for a format without a native one: F16, or F32 where F16 would lose more than
/// 2^-11 of a row's largest value. Parts of a tensor can be queried one by one; if any needs F32,
/// the tensor needs it.
///
/// | stored as | becomes | loses |
/// | --- | --- | --- |
/// | I8, NVFP4, Q1_0, Q2_0 | F16 | nothing |
/// | Q8_1, Q8_K, I16, I32, I64, F64 | F16 | 2^-12 of a value at most |
/// | any of these with a value above 65504, or with rows too small for F16 | F32 | 2^-25 of it |
///
/// Kernels then multiply f32 activations in f32. `tests/linear_parity.rs` and `tests/linear.rs`
/// compare each of these types with the exact matmul of its dequantised values: NMSE at most 1e-6.
///
/// # Panics
/// If `source` is no whole number of rows of `cols` columns.
pub fn float_layout(format: Format, source: &[u8], cols: usize) -> PackedLayout {
    let row_bytes = format.row_bytes(cols).unwrap_or(0);
    assert!(row_bytes > 0 && source.len().is_multiple_of(row_bytes), "{}", format.name());
    let mut values = vec![0.0; cols];
    let fits = source.chunks_exact(row_bytes).all(|row| {
        format.dequantize(row, &mut values);
        row_fits_f16(&values)
    });
    if fits { PackedLayout::F16 } else { PackedLayout::F32 }
}

fn row_fits_f16(values: &[f32]) -> bool {
    let largest = values.iter().fold(0.0, |max: f32, v| max.max(v.abs()));
    // Rounding loses at most 2^-12 of a normal value and 2^-25 of a smaller one.
    if largest >= f32::from(f16::MIN_POSITIVE) {
        return largest <= f32::from(f16::MAX);
    }
    let bound = largest / 2048.0;
    values.iter().all(|&v| (f16::from_f32(v).to_f32() - v).abs() <= bound)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn f16_is_refused_where_it_loses_too_much() {
        assert!(row_fits_f16(&[0.0, 65504.0, 1e-9]));
        assert!(row_fits_f16(&[0.0; 4]));
        assert!(!row_fits_f16(&[65536.0]));
        assert!(!row_fits_f16(&[1.2345e-7]));
    }
}
