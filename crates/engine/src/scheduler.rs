//! Which tokens run in the next step. Pure: it touches no tensor and asks no clock. Decoding
//! sequences go first, one token each; the rest of the step is filled with pieces of prompts, the
//! oldest request first, so no request waits for ever and no prompt stops the others' output.

/// What the scheduler sees of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Waiting {
    /// Tokens that are known and not yet stored: a prompt's rest, or the token sampled last.
    pub(crate) pending: usize,
    /// Whether the prompt has been read.
    pub(crate) decoding: bool,
}

/// How many tokens each request runs in a step of at most `budget` tokens and `outputs` rows of
/// logits; `requests` are oldest first. Writes one number for each request.
pub(crate) fn schedule(requests: &[Waiting], budget: usize, outputs: usize, out: &mut Vec<usize>) {
    out.clear();
    out.resize(requests.len(), 0);
    let (mut budget, mut outputs) = (budget, outputs);
    for decoding in [true, false] {
        for (request, take) in requests.iter().zip(out.iter_mut()) {
            if request.decoding != decoding || budget == 0 {
                continue;
            }
            let tokens = request.pending.min(budget);
            let finishes = tokens == request.pending;
            if finishes && outputs == 0 {
                continue;
            }
            outputs -= usize::from(finishes);
            budget -= tokens;
            *take = tokens;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(requests: &[(usize, bool)], budget: usize, outputs: usize) -> Vec<usize> {
        let requests: Vec<Waiting> =
            requests.iter().map(|&(pending, decoding)| Waiting { pending, decoding }).collect();
        let mut out = Vec::new();
        schedule(&requests, budget, outputs, &mut out);
        out
    }

    #[test]
    fn decoding_goes_first_and_prompts_fill_the_rest() {
        assert_eq!(plan(&[(100, false), (1, true), (50, false)], 64, 8), [63, 1, 0]);
        assert_eq!(plan(&[(20, false), (1, true), (50, false)], 64, 8), [20, 1, 43]);
    }

    #[test]
    fn rows_of_logits_are_bounded() {
        assert_eq!(plan(&[(1, true), (1, true), (5, false)], 64, 2), [1, 1, 0]);
        assert_eq!(plan(&[(1, true), (90, false)], 64, 1), [1, 63]);
    }

    #[test]
    fn every_request_finishes() {
        let mut requests = vec![(500, false), (3, false), (700, false), (1, false)];
        for _ in 0..30 {
            let taken = plan(&requests, 64, 2);
            assert!(taken.iter().sum::<usize>() <= 64);
            for (request, taken) in requests.iter_mut().zip(taken) {
                request.0 -= taken;
            }
            requests.retain(|r| r.0 > 0);
        }
        assert_eq!(requests, []);
    }
}
