//! Log-probabilities of tokens for clients that ask for them.

use crate::request::Logprobs;

/// Those of the sampled token, or of a prompt's, and of the `top` most probable ones, from finite
/// logits.
pub(crate) fn logprobs(logits: &[f32], sampled: u32, top: usize) -> Logprobs {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&x| f64::from(x - max).exp()).sum();
    let normaliser = max + sum.ln() as f32;
    let logprob = |id: u32| logits[id as usize] - normaliser;
    let top = most_probable(logits, top).into_iter().map(|id| (id, logprob(id))).collect();
    Logprobs { sampled: logprob(sampled), top }
}

/// The ids of the `count` largest logits, the largest first.
fn most_probable(logits: &[f32], count: usize) -> Vec<u32> {
    let mut ids: Vec<u32> = Vec::new();
    for (id, &logit) in logits.iter().enumerate() {
        let is_small = |&last: &u32| logit <= logits[last as usize];
        if ids.len() == count && ids.last().is_none_or(is_small) {
            continue;
        }
        let at = ids.partition_point(|&id| logits[id as usize] >= logit);
        ids.insert(at, id as u32);
        ids.truncate(count);
    }
    ids
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
        let all = logprobs(&logits, 0, 9).top;
        assert_eq!(all.iter().map(|(id, _)| *id).collect::<Vec<_>>(), [1, 3, 2, 0]);
        // Of equal ones, the first.
        assert_eq!(most_probable(&[1.0, 2.0, 2.0, 1.0, 2.0], 4), [1, 2, 4, 0]);
    }
}
