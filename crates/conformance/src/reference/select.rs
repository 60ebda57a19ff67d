//! The selection of cached entries by an indexer.

use bodkin_backend::Batch;
use bodkin_model::Indexer;

use super::attention::KvSlot;
use super::experts::descending;
use super::rows::dot;

/// The best entries of the slot for each row, as [`bodkin_model::Op::Select`] says.
pub(super) fn select(
    slot: &KvSlot,
    batch: &Batch,
    indexer: &Indexer,
    q: &[f32],
    weights: &[f32],
) -> Vec<f32> {
    let Indexer { heads, dim, top_k } = *indexer;
    let mut rows = q.chunks_exact(heads * dim).zip(weights.chunks_exact(heads));
    let mut out = Vec::new();
    for span in &batch.spans {
        for position in span.position..span.position + span.len {
            let (q, weights) = rows.next().expect("a row for each token");
            let score = |entry| {
                let key = slot.key(span, entry, 0);
                let heads = q.chunks_exact(dim).zip(weights);
                heads.map(|(q, &w)| f64::from(w) * dot(q, key).max(0.0)).sum::<f64>()
            };
            let scores: Vec<f64> = (0..slot.slot.entries(position + 1)).map(score).collect();
            let mut best: Vec<usize> = descending(&scores).into_iter().take(top_k).collect();
            best.sort_unstable();
            let missing = std::iter::repeat_n(-1.0, top_k - best.len());
            out.extend(best.into_iter().map(|entry| entry as f32).chain(missing));
        }
    }
    out
}
