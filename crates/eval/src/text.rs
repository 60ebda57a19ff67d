//! Windows of a text, measured one by one: added to a perplexity, kept for later, or compared with
//! what was kept.

use std::io::Write;

use bodkin_backend::Model;

use crate::divergence::{Divergence, Values};
use crate::error::{Error, Result};
use crate::kld::{Base, BaseWriter, encode_row};
use crate::perplexity::Perplexity;
use crate::score::{LogSoftmax, Row, score};
use crate::windows::Windows;

/// Adds a window's predictions to `perplexity`, and writes them to `base` if there is one. What is
/// made of logits is made on so many threads.
///
/// # Errors
/// What the engine says about the model, or the system about the file; or if the model predicts
/// nothing.
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
    check(perplexity.value(), window)?;
    Ok(kept?)
}

/// Adds how far a window's predictions lie from those of `base`, whose next window it is.
///
/// # Errors
/// What the engine says about the model, or what is wrong with the file; or if the model predicts
/// nothing.
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
    score(model, windows, window, threads, of, |values| divergence.add(values))?;
    check(divergence.log_perplexity().value, window)
}

/// Fails if what was measured up to a window is no number.
fn check(value: f64, window: usize) -> Result<()> {
    if value.is_nan() { Err(Error::NoNumbers { chunk: window + 1 }) } else { Ok(()) }
}
