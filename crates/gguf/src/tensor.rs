//! What a file says about one tensor, and the checks of a shape that reader and writer share. It
//! must not touch tensor data.

use crate::Format;

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

/// What is wrong with a shape: what was expected and what was found.
pub(crate) struct BadShape {
    pub(crate) expected: String,
    pub(crate) found: String,
}

/// How many bytes a tensor of this shape takes, if the shape is one that a file may hold: 1 to 4
/// dimensions, none zero, whole blocks to a row, and a size that an address can express.
pub(crate) fn checked_bytes(format: Format, shape: &[u64]) -> Result<u64, BadShape> {
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
    match (elements / block).checked_mul(format.block_bytes() as u64) {
        Some(bytes) if bytes <= limit => Ok(bytes),
        _ => bad(format!("at most {limit} bytes")),
    }
}
