//! Processes a tensor's rows on all threads and emits the results in order. It must not know the
//! processing.

use std::io;
use std::ops::Range;

use bodkin_gguf::Tensor;

use crate::error::{Error, Result};

/// The elements of one piece of work: enough to amortise the start of a thread, and few compared
/// with any tensor that is worth several threads.
const PIECE: usize = 1 << 20;

/// Splits `rows` rows of `cols` elements into pieces, maps each with `make` on one of `threads`
/// threads, and passes the results to `emit` in order. At most `threads` pieces are in memory.
pub(crate) fn in_order<T: Send>(
    rows: usize,
    cols: usize,
    threads: usize,
    make: impl Fn(Range<usize>) -> io::Result<T> + Sync,
    mut emit: impl FnMut(T) -> io::Result<()>,
) -> io::Result<()> {
    let most = (PIECE / cols).max(1);
    // Small tensors are split over the threads, too.
    let piece = rows.div_ceil(threads).clamp(1, most);
    let mut from = 0;
    while from < rows {
        let pieces = (0..threads).map(|i| from + i * piece).take_while(|&start| start < rows);
        let results: Vec<io::Result<T>> = std::thread::scope(|scope| {
            let make = &make;
            let start = |first| scope.spawn(move || make(first..rows.min(first + piece)));
            let running: Vec<_> = pieces.map(start).collect();
            let join = |thread: std::thread::ScopedJoinHandle<'_, _>| {
                thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            };
            running.into_iter().map(join).collect()
        });
        for result in results {
            emit(result?)?;
        }
        from += threads * piece;
    }
    Ok(())
}

/// Dequantises some rows of a tensor whose data are `data`.
pub(crate) fn read(data: &[u8], tensor: &Tensor, rows: Range<usize>) -> Vec<f32> {
    let cols = tensor.cols();
    let mut values = vec![0.0; rows.len() * cols];
    for (row, out) in rows.zip(values.chunks_exact_mut(cols)) {
        tensor.format.dequantize_row(tensor.format.row(data, tensor.rows(), row), out);
    }
    values
}

/// Fails if the values of some rows, the first of which is `first`, are not all finite.
pub(crate) fn check_finite(tensor: &Tensor, first: usize, values: &[f32]) -> Result<()> {
    match values.iter().position(|value| !value.is_finite()) {
        None => Ok(()),
        Some(at) => Err(Error::NotFinite {
            tensor: tensor.name.clone(),
            found: values[at],
            row: first + at / tensor.cols(),
        }),
    }
}
