//! The index of rows that differ in length. A tensor's data begin with it, and it says how long
//! they are: the shape alone does not.
//!
//! ```text
//! rows + 1 u64: where each row begins, in bytes from the data's start, and where the last ends
//! ```
//!
//! So the first entry is the length of the index itself. Whoever opens data checks the index once;
//! the rest trusts it.

use super::Format;
use crate::tensor::BadShape;

const ENTRY: usize = size_of::<u64>();

/// Checks the index at the start of `data`, which may go on behind the tensor, and returns the
/// bytes of the tensor. `rows` is not zero.
pub(crate) fn check(format: Format, rows: u64, cols: u64, data: &[u8]) -> Result<u64, BadShape> {
    let bad = |expected: String, found: String| Err(BadShape { expected, found });
    let lengths = usize::try_from(cols).ok().and_then(|cols| format.row_lengths(cols));
    let Some(lengths) = lengths else {
        return bad(format!("columns that {} can hold", format.name()), cols.to_string());
    };
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

/// How many rows an index has.
pub(super) fn rows(data: &[u8]) -> usize {
    (entry(data, 0) as usize / ENTRY).saturating_sub(1)
}

/// The bytes of a row.
pub(super) fn row(data: &[u8], row: usize) -> &[u8] {
    &data[entry(data, row) as usize..entry(data, row + 1) as usize]
}

/// An index and its rows.
pub(super) fn join(rows: &[Vec<u8>]) -> Vec<u8> {
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
