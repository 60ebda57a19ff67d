//! How the data of a tensor change between safetensors and GGUF. It must not know families.

use bodkin_gguf::Format;

use crate::safetensors::Stored;

/// How the data of a tensor change on the way. Shapes have rows first.
pub(crate) enum Change {
    None,
    /// Another shape of the same number of elements.
    Shape(Vec<u64>),
    /// In each head, rows i and i + half become neighbours.
    HalvesToPairs {
        rows_per_head: u64,
    },
    /// One is added, in the precision of the source.
    AddOne,
    /// The negative of the exponential, in another shape.
    NegativeExp(Vec<u64>),
    /// Without this number of rows at the start.
    WithoutRows(u64),
    /// The first or the second half of the rows of each expert.
    HalfOfExperts {
        second: bool,
    },
}

impl Change {
    pub(crate) fn apply(&self, stored: &Stored, bytes: Vec<u8>) -> Vec<u8> {
        match self {
            Change::None | Change::Shape(_) => bytes,
            Change::HalvesToPairs { rows_per_head } => {
                let row_bytes = bytes.len() / stored.shape[0] as usize;
                halves_to_pairs(&bytes, row_bytes, *rows_per_head as usize)
            }
            Change::AddOne => map(stored, &bytes, |value| value + 1.0),
            Change::NegativeExp(_) => map(stored, &bytes, |value| -value.exp()),
            Change::WithoutRows(rows) => {
                let row_bytes = bytes.len() / stored.shape[0] as usize;
                bytes[*rows as usize * row_bytes..].to_vec()
            }
            Change::HalfOfExperts { second } => {
                let half = bytes.len() / stored.shape[0] as usize / 2;
                let halves = bytes.chunks_exact(half).skip(usize::from(*second)).step_by(2);
                halves.flatten().copied().collect()
            }
        }
    }
}

fn halves_to_pairs(bytes: &[u8], row_bytes: usize, rows_per_head: usize) -> Vec<u8> {
    let mut out = Vec::with_capacity(bytes.len());
    for head in bytes.chunks_exact(rows_per_head * row_bytes) {
        let (first, second) = head.split_at(head.len() / 2);
        for (a, b) in first.chunks_exact(row_bytes).zip(second.chunks_exact(row_bytes)) {
            out.extend(a);
            out.extend(b);
        }
    }
    out
}

/// Values in F32, which are rounded as the source's.
fn map(stored: &Stored, bytes: &[u8], change: impl Fn(f32) -> f32) -> Vec<u8> {
    let format = stored.format.unwrap_or(Format::F32);
    let mut values = vec![0.0; bytes.len() / format.block_bytes().unwrap_or(4)];
    format.dequantize(bytes, &mut values);
    values.iter_mut().for_each(|value| *value = change(*value));
    // llama.cpp computes in F16 what is F16, but in F32 what is BF16.
    if format == Format::F16 {
        let mut rounded = bytes.to_vec();
        if format.quantize(&values, None, &mut rounded).is_ok() {
            format.dequantize(&rounded, &mut values);
        }
    }
    to_bytes(&values)
}

pub(crate) fn to_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}
