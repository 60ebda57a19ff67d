//! Log-probabilities of tokens for clients that ask for them.

use crate::request::Logprobs;

/// Those of the sampled token and of the `top` most probable ones, from finite logits.
pub(crate) fn logprobs(logits: &[f32], sampled: u32, top: usize) -> Logprobs {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&x| f64::from(x - max).exp()).sum();
    let normaliser = max + sum.ln() as f32;
    let logprob = |id: u32| logits[id as usize] - normaliser;
    let mut ids: Vec<u32> = (0..logits.len() as u32).collect();
    let order = |a: &u32, b: &u32| logprob(*b).total_cmp(&logprob(*a)).then(a.cmp(b));
    let top = top.min(ids.len());
    if top > 0 {
        ids.select_nth_unstable_by(top - 1, order);
    }
    ids.truncate(top);
    ids.sort_unstable_by(order);
    Logprobs {
        sampled: logprob(sampled),
        top: ids.into_iter().map(|id| (id, logprob(id))).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logprobs_are_normalised_and_in_order() {
        let p = [0.1f32, 0.4, 0.2, 0.3];
        let logits = p.map(|p| p.ln() + 7.0);
        let found = logprobs(&logits, 0, 2);
        assert!((found.sampled - p[0].ln()).abs() < 1e-5);
        assert_eq!(found.top.iter().map(|(id, _)| *id).collect::<Vec<_>>(), [1, 3]);
        assert!((found.top[1].1 - p[3].ln()).abs() < 1e-5);
        assert!(logprobs(&logits, 0, 0).top.is_empty());
        assert_eq!(logprobs(&logits, 0, 9).top.len(), 4);
    }
}
