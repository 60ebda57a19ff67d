//! The index of row offsets at the start of a tensor whose rows differ in length.
//!
//! ```text
//! rows + 1 u64: the offset of each row in bytes from the start of the data, and the last row's end
//! ```
//!
//! So the first entry is the length of the index itself. The index is checked once, when a file is
//! opened; every later read relies on that check.

use crate::error::Mismatch;

const ENTRY: usize = size_of::<u64>();

/// The lengths that a row may have, in bytes.
pub(in crate::format) struct RowBytes {
    pub(in crate::format) min: usize,
    pub(in crate::format) max: usize,
    /// Every length is a multiple of this.
    pub(in crate::format) step: usize,
}

/// See [`crate::Format::check_index`].
pub(in crate::format) fn check(lengths: RowBytes, rows: u64, data: &[u8]) -> Result<u64, Mismatch> {
    let bad = |expected: String, found: String| Err(Mismatch { expected, found });
    let index = rows.checked_add(1).and_then(|entries| entries.checked_mul(ENTRY as u64));
    let Some(index) = index.filter(|&bytes| bytes <= data.len() as u64) else {
        return bad(format!("an index of {rows} rows"), format!("{} bytes", data.len()));
    };
    let mut start = entry(data, 0);
    if start != index {
        return bad(format!("the first row at byte {index}"), format!("byte {start}"));
    }
    for row in 0..rows as usize {
        let end = entry(data, row + 1);
        let fits = end.checked_sub(start).is_some_and(|bytes| {
            (lengths.min as u64..=lengths.max as u64).contains(&bytes)
                && bytes.is_multiple_of(lengths.step as u64)
        });
        if !fits || end > data.len() as u64 {
            let expected = format!(
                "row {row} of {} to {} bytes, within {} bytes",
                lengths.min,
                lengths.max,
                data.len()
            );
            return bad(expected, format!("bytes {start} to {end}"));
        }
        start = end;
    }
    Ok(start)
}

/// The number of rows in an index.
pub(in crate::format) fn rows(data: &[u8]) -> usize {
    (entry(data, 0) as usize / ENTRY).saturating_sub(1)
}

/// The bytes of a row.
pub(in crate::format) fn row(data: &[u8], row: usize) -> &[u8] {
    &data[entry(data, row) as usize..entry(data, row + 1) as usize]
}

/// An index, followed by its rows.
pub(in crate::format) fn join(rows: &[Vec<u8>]) -> Vec<u8> {
    let mut data = Vec::with_capacity(rows.iter().map(|row| row.len() + ENTRY).sum());
    let mut end = (rows.len() + 1) * ENTRY;
    data.extend((end as u64).to_le_bytes());
    for row in rows {
        end += row.len();
        data.extend((end as u64).to_le_bytes());
    }
    rows.iter().for_each(|row| data.extend(row));
    data
}

fn entry(data: &[u8], i: usize) -> u64 {
    let mut bytes = [0; ENTRY];
    bytes.copy_from_slice(&data[i * ENTRY..][..ENTRY]);
    u64::from_le_bytes(bytes)
}
