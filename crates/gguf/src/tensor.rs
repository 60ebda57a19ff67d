//! What a file says about one tensor, and the checks of a shape that reader and writer share. It
//! must not touch tensor data.

use crate::Format;
use crate::format::sparse::index;

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
    /// Where its data begin, in bytes from the start of the part that holds them.
    pub offset: u64,
    /// How many bytes its data take.
    pub bytes: u64,
    /// Which part of a split file holds its data; 0 for a file that is whole.
    pub shard: usize,
}

impl Tensor {
    /// Elements of one row.
    pub fn cols(&self) -> usize {
        self.shape[0] as usize
    }

    /// How many rows there are: the product of all dimensions but the first.
    pub fn rows(&self) -> usize {
        self.shape[1..].iter().product::<u64>() as usize
    }

    /// How many elements there are.
    pub fn elements(&self) -> u64 {
        self.shape.iter().product()
    }
}

/// What is wrong with a shape or an index: what was expected and what was found.
pub(crate) struct BadShape {
    pub(crate) expected: String,
    pub(crate) found: String,
}

/// How many bytes a tensor of this shape takes, if the shape is one that a file may hold: 1 to 4
/// dimensions, none zero, whole blocks to a row, and a size that an address can express. None where
/// only the data can tell, see [`indexed_bytes`].
pub(crate) fn checked_bytes(format: Format, shape: &[u64]) -> Result<Option<u64>, BadShape> {
    let bad = |expected: String| Err(BadShape { expected, found: format!("shape {shape:?}") });
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

/// As [`checked_bytes`], refusing formats for which only the data can tell.
pub(crate) fn fixed_bytes(format: Format, shape: &[u64]) -> Result<u64, BadShape> {
    checked_bytes(format, shape)?.ok_or_else(|| BadShape {
        expected: "a format whose rows have one length".to_string(),
        found: format.name().to_string(),
    })
}

/// How many of the bytes of `data` a tensor takes whose rows differ in length, after a check of the
/// index with which they begin. The shape was checked before.
pub(crate) fn indexed_bytes(format: Format, shape: &[u64], data: &[u8]) -> Result<u64, BadShape> {
    let rows = shape[1..].iter().product();
    index::check(format, rows, shape[0], data)
}

/// Exactly the bytes of a tensor, for whoever hands over all of its data.
pub(crate) fn bytes_of(format: Format, shape: &[u64], data: &[u8]) -> Result<u64, BadShape> {
    if let Some(bytes) = checked_bytes(format, shape)? {
        return Ok(bytes);
    }
    let bytes = indexed_bytes(format, shape, data)?;
    if bytes == data.len() as u64 {
        return Ok(bytes);
    }
    let (expected, found) = (format!("rows to byte {}", data.len()), format!("to byte {bytes}"));
    Err(BadShape { expected, found })
}
