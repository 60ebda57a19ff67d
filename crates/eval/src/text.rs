//! Measures the windows of a text one by one: adds them to a perplexity, writes their predictions
//! to a base file, or compares them with one.

use std::io::Write;

use bodkin_backend::Model;

use crate::divergence::{Divergence, Values};
use crate::error::Result;
use crate::kld::{Base, BaseWriter, encode_row};
use crate::perplexity::Perplexity;
use crate::score::{LogSoftmax, Row, score};
use crate::windows::Windows;

/// Adds a window's predictions to `perplexity`, and writes them to `base` if there is one. Logits
/// are processed on `threads` threads.
///
/// # Errors
/// The engine's or the file's error.
pub fn measure<W: Write>(
    model: &mut dyn Model,
    windows: &Windows,
    window: usize,
    threads: usize,
    perplexity: &mut Perplexity,
    base: Option<&mut BaseWriter<W>>,
) -> Result<()> {
    let keeps = base.is_some();
    let of = |row: Row<'_>| {
        let softmax = LogSoftmax::of(row.logits);
        let encoded = keeps.then(|| encode_row(row.logits, softmax.log_sum));
        (softmax.log_probability(row.logits[row.next as usize]), encoded)
    };
    let (mut base, mut kept) = (base, Ok(()));
    score(model, windows, window, threads, of, |(log_probability, encoded)| {
        perplexity.add(log_probability);
        if let (Some(base), Some(encoded), Ok(())) = (&mut base, encoded, &kept) {
            kept = base.row(&encoded);
        }
    })?;
    Ok(kept?)
}

/// Adds the divergence of a window's predictions from those of `base`, whose next window it is.
///
/// # Errors
/// The engine's or the file's error.
pub fn compare(
    model: &mut dyn Model,
    windows: &Windows,
    window: usize,
    threads: usize,
    divergence: &mut Divergence,
    base: &mut Base,
) -> Result<()> {
    let mut rows = Vec::new();
    base.read_window(&mut rows)?;
    let of = |row: Row<'_>| Values::of(row, base.row(&rows, row.index));
    score(model, windows, window, threads, of, |values| divergence.add(values))
}
