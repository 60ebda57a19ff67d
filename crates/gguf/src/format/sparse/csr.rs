//! Compressed sparse rows (CSR): the non-zero values as f16, then their columns as u16. A stored
//! element takes 32 bits, so the format is smaller than F16 only below 50 % density. It is the
//! baseline for the other sparse formats.
//!
//! ```text
//! row of n values: n f16 | n u16, ascending
//! ```
//!
//! A column behind the end of the row is ignored; of two equal columns the later one counts.

use super::index::RowBytes;

/// Bytes of a value and its column.
pub(in crate::format) const PAIR: usize = 4;

/// The most columns of a row: column numbers are u16.
const COLS_MAX: usize = 1 << 16;

/// The lengths of rows of `cols` columns.
pub(in crate::format) fn row_bytes(cols: usize) -> Option<RowBytes> {
    (cols <= COLS_MAX).then(|| RowBytes { min: 0, max: PAIR * cols, step: PAIR })
}

/// Writes the row as F16.
pub(in crate::format) fn densify(row: &[u8], dense: &mut [u8]) {
    let (values, columns) = row.split_at(row.len() / PAIR * 2);
    dense.fill(0);
    for (value, column) in values.chunks_exact(2).zip(columns.chunks_exact(2)) {
        let column = usize::from(u16::from_le_bytes([column[0], column[1]]));
        if let Some(place) = dense.get_mut(2 * column..2 * column + 2) {
            place.copy_from_slice(value);
        }
    }
}

/// Converts a row of F16.
pub(in crate::format) fn sparsify(dense: &[u8]) -> Vec<u8> {
    assert!(dense.len() / 2 <= COLS_MAX, "columns of 16 bits");
    let is_nonzero = |value: &[u8]| value[0] != 0 || value[1] & 0x7f != 0;
    let nonzero = || dense.chunks_exact(2).enumerate().filter(|(_, value)| is_nonzero(value));
    let mut row: Vec<u8> = nonzero().flat_map(|(_, value)| [value[0], value[1]]).collect();
    row.extend(nonzero().flat_map(|(column, _)| (column as u16).to_le_bytes()));
    row
}
