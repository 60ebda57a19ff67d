//! Sparse storage of a tensor that has zeros already: every value stays, and the format is the one
//! that takes the fewest bytes.

use std::io;
use std::ops::Range;

use bodkin_gguf::{Format, Tensor};

use super::job::{CSR_COLS_MAX, is_prunable};
use crate::rows;

/// A tensor without its zeros.
pub(super) struct Packed {
    pub(super) format: Format,
    pub(super) data: Vec<u8>,
    pub(super) zeros: u64,
}

/// Stores a matrix of a layer, whose data are `data`, in the smallest sparse format of its own
/// precision. None if its format has no sparse variant, or none that is smaller.
pub(super) fn pack(data: &[u8], tensor: &Tensor, threads: usize) -> io::Result<Option<Packed>> {
    let formats = variants(tensor.format);
    if formats.is_empty() || !is_prunable(tensor) {
        return Ok(None);
    }
    let mut smallest: Option<Packed> = None;
    for &format in formats {
        let most = smallest.as_ref().map_or(data.len(), |packed| packed.data.len());
        let packed = in_format(data, tensor, format, threads)?;
        smallest = packed.filter(|packed| packed.data.len() < most).or(smallest);
    }
    Ok(smallest)
}

/// The sparse formats whose base is `format`.
fn variants(format: Format) -> &'static [Format] {
    match format {
        Format::F16 => &[Format::S24_F16, Format::BITMAP_F16, Format::CSR_F16],
        Format::Q8_0 => &[Format::S24_Q8_0, Format::BITMAP_Q8_0],
        Format::Q4_0 => &[Format::S24_Q4_0, Format::BITMAP_Q4_0],
        _ => &[],
    }
}

/// The tensor in a sparse format; None if the format cannot hold each of its rows bit by bit.
fn in_format(
    data: &[u8],
    tensor: &Tensor,
    format: Format,
    threads: usize,
) -> io::Result<Option<Packed>> {
    let (rows, cols) = (tensor.rows(), tensor.cols());
    let is_too_wide = format == Format::CSR_F16 && cols > CSR_COLS_MAX;
    if is_too_wide || !cols.is_multiple_of(format.block_elements()) {
        return Ok(None);
    }
    let make = |range: Range<usize>| {
        let (mut packed, mut values) = (Vec::new(), vec![0.0; cols]);
        let mut zeros = 0;
        for row in range {
            let row = tensor.format.row(data, rows, row);
            let mut back = vec![0; row.len()];
            match format.sparsify_row(row) {
                Ok(sparse) => {
                    format.densify_row(&sparse, &mut back);
                    packed.push(sparse);
                }
                Err(_) => return Ok(None),
            }
            if back != row {
                return Ok(None);
            }
            tensor.format.dequantize_row(row, &mut values);
            zeros += values.iter().filter(|value| **value == 0.0).count() as u64;
        }
        Ok(Some((packed, zeros)))
    };
    let (mut stored, mut zeros, mut is_whole) = (Vec::new(), 0, true);
    rows::in_order(rows, cols, threads, make, |piece| {
        match piece {
            Some((rows, count)) => {
                stored.extend(rows);
                zeros += count;
            }
            None => is_whole = false,
        }
        Ok(())
    })?;
    Ok(is_whole.then(|| Packed { format, data: format.join_rows(&stored), zeros }))
}
