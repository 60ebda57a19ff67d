//! The description of one tensor, and the checks of shapes that reader and writer share. It must
//! not touch tensor data.

use crate::error::Mismatch;
use crate::format::Format;

/// The most dimensions that a tensor may have.
pub(crate) const MAX_DIMS: usize = 4;

/// One tensor of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// Name, unique within the file.
    pub name: String,
    /// How its elements are stored.
    pub format: Format,
    /// Dimensions in GGML's order: columns, the innermost, first; 1 to 4 of them, none zero.
    pub shape: Vec<u64>,
    /// The offset of its data, in bytes from the start of the part that holds them.
    pub offset: u64,
    /// The size of its data, in bytes.
    pub bytes: u64,
    /// The part of a split file that holds its data; 0 for a whole file.
    pub shard: usize,
}

impl Tensor {
    /// Elements of one row.
    pub fn cols(&self) -> usize {
        self.shape[0] as usize
    }

    /// The number of rows: the product of all dimensions but the first.
    pub fn rows(&self) -> usize {
        self.shape[1..].iter().product::<u64>() as usize
    }

    /// The number of elements.
    pub fn elements(&self) -> u64 {
        self.shape.iter().product()
    }
}

/// The bytes of a tensor of this shape; None if they depend on the data, see [`bytes_of`]. A valid
/// shape has 1 to 4 dimensions, none zero, whole blocks in a row, and an addressable size.
pub(crate) fn checked_bytes(format: Format, shape: &[u64]) -> Result<Option<u64>, Mismatch> {
    let bad = |expected: String| Err(Mismatch { expected, found: format!("shape {shape:?}") });
    if shape.is_empty() || shape.len() > MAX_DIMS {
        return bad(format!("1 to {MAX_DIMS} dimensions"));
    }
    if shape.contains(&0) {
        return bad("no dimension of zero".to_string());
    }
    // Both the element count and the byte count must fit what slices can hold.
    let limit = isize::MAX as u64;
    let elements = shape.iter().try_fold(1u64, |product, &dim| product.checked_mul(dim));
    let Some(elements) = elements.filter(|&count| count <= limit) else {
        return bad(format!("at most {limit} elements"));
    };
    let block = format.block_elements() as u64;
    if !shape[0].is_multiple_of(block) {
        return bad(format!("rows of whole {} blocks of {block}", format.name()));
    }
    let Some(block_bytes) = format.block_bytes() else { return Ok(None) };
    match (elements / block).checked_mul(block_bytes as u64) {
        Some(bytes) if bytes <= limit => Ok(Some(bytes)),
        _ => bad(format!("at most {limit} bytes")),
    }
}

/// As [`checked_bytes`], but an error for formats whose size depends on the data.
pub(crate) fn fixed_bytes(format: Format, shape: &[u64]) -> Result<u64, Mismatch> {
    checked_bytes(format, shape)?.ok_or_else(|| Mismatch {
        expected: "a format whose rows have one length".to_string(),
        found: format.name().to_string(),
    })
}

/// The bytes of a tensor whose rows differ in length, from the index at the start of `data`, which
/// is checked here. The shape must be checked before.
pub(crate) fn indexed_bytes(format: Format, shape: &[u64], data: &[u8]) -> Result<u64, Mismatch> {
    format.check_index(shape[1..].iter().product(), shape[0], data)
}

/// The bytes of a tensor whose data are exactly `data`.
pub(crate) fn bytes_of(format: Format, shape: &[u64], data: &[u8]) -> Result<u64, Mismatch> {
    if let Some(bytes) = checked_bytes(format, shape)? {
        return Ok(bytes);
    }
    let bytes = indexed_bytes(format, shape, data)?;
    if bytes == data.len() as u64 {
        return Ok(bytes);
    }
    let (expected, found) = (format!("rows to byte {}", data.len()), format!("to byte {bytes}"));
    Err(Mismatch { expected, found })
}
