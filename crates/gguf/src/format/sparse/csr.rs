//! Compressed sparse rows, the textbook's format: the values that are not zero as f16, then their
//! columns as u16. An element that is left takes 32 bits, so the format is smaller than F16 only
//! where less than half of the elements are left. It is here as the measure for the others.
//!
//! ```text
//! row of n values: n f16 | n u16, ascending
//! ```
//!
//! A column behind the end of the row means nothing; of two equal ones the later counts.

/// Bytes of a value and its column.
pub(super) const PAIR: usize = 4;

/// Writes the row as F16.
pub(super) fn densify(row: &[u8], dense: &mut [u8]) {
    let (values, columns) = row.split_at(row.len() / PAIR * 2);
    dense.fill(0);
    for (value, column) in values.chunks_exact(2).zip(columns.chunks_exact(2)) {
        let column = usize::from(u16::from_le_bytes([column[0], column[1]]));
        if let Some(place) = dense.get_mut(2 * column..2 * column + 2) {
            place.copy_from_slice(value);
        }
    }
}

/// The row, from one of F16.
pub(super) fn sparsify(dense: &[u8]) -> Vec<u8> {
    assert!(dense.len() / 2 <= super::CSR_COLS_MAX, "columns of 16 bits");
    let is_left = |value: &[u8]| value[0] != 0 || value[1] & 0x7f != 0;
    let left = || dense.chunks_exact(2).enumerate().filter(|(_, value)| is_left(value));
    let mut row: Vec<u8> = left().flat_map(|(_, value)| [value[0], value[1]]).collect();
    row.extend(left().flat_map(|(column, _)| (column as u16).to_le_bytes()));
    row
}
