//! Checks of an encoder: its embeddings are vectors of length 1 that differ, and that do not depend
//! on the texts beside them.

use bodkin_backend::Model;
use bodkin_engine::embed;

use super::baseline::cosine;
use crate::error::Result;

/// Embeddings of different texts are less similar than this.
const SAME: f64 = 0.9999;
/// How far a length may be from 1.
const LENGTH: f64 = 1e-3;

/// The embeddings of texts, `[texts, width]`, and what is wrong with them.
///
/// # Errors
/// The engine's error.
pub fn check(model: &mut dyn Model, texts: &[Vec<u32>]) -> Result<(Vec<f32>, Vec<String>)> {
    let (mut rows, mut faults) = (Vec::new(), Vec::new());
    embed(model, texts, |_, row| rows.extend_from_slice(row))?;
    let width = model.plan().output_width();
    let each = || rows.chunks_exact(width);
    for (i, (row, text)) in each().zip(texts).enumerate() {
        let (number, tokens) = (i + 1, text.len());
        let length = row.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>().sqrt();
        // NaN fails too.
        if (length - 1.0).abs().partial_cmp(&LENGTH) != Some(std::cmp::Ordering::Less) {
            faults.push(format!("the embedding of text {number} has length {length}, expected 1"));
        }
        let mut alone = Vec::new();
        embed(model, std::slice::from_ref(text), |_, row| alone.extend_from_slice(row))?;
        if !alone.iter().map(|x| x.to_bits()).eq(row.iter().map(|x| x.to_bits())) {
            faults.push(format!("the embedding of {tokens} tokens depends on the texts beside it"));
        }
        let twin = each().take(i).position(|other| cosine(other, row) > SAME);
        if let Some(twin) = twin {
            let other = twin + 1;
            faults.push(format!("texts {other} and {number} have the same embedding"));
        }
    }
    Ok((rows, faults))
}
