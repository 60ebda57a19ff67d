//! Expert routing of one token: a few hundred scalar operations on a row of scores.

use bodkin_model::{Gating, Routing};

/// Chooses experts from `scores`, `[experts]`, and writes their weights, then their indices, which
/// are `chosen` if that is given. `bias` is added to the probabilities for the choice only.
pub(crate) fn route(
    routing: &Routing,
    scores: &[f32],
    chosen: Option<&[f32]>,
    bias: Option<&[f32]>,
    out: &mut [f32],
) {
    let (weights, indices) = out.split_at_mut(routing.used);
    let probability = Probability::new(routing.gating, scores);
    match chosen {
        Some(chosen) => {
            // The numbers come from the file.
            let last = (routing.experts - 1) as f32;
            indices.iter_mut().zip(chosen).for_each(|(i, &number)| *i = number.max(0.0).min(last));
        }
        None => choose_by_score(routing, &probability, scores, bias, (weights, indices)),
    }
    for (weight, index) in weights.iter_mut().zip(&*indices) {
        *weight = probability.of(scores[*index as usize]);
    }
    if routing.gating == Gating::SoftmaxOfChosen {
        let largest = weights.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        weights.iter_mut().for_each(|w| *w = (*w - largest).exp());
        scale_to_one(weights);
    }
    if routing.normalize {
        scale_to_one(weights);
    }
    weights.iter_mut().for_each(|w| *w *= routing.scale);
}

/// Writes the experts with the highest merits of the groups with the highest merits.
fn choose_by_score(
    routing: &Routing,
    probability: &Probability,
    scores: &[f32],
    bias: Option<&[f32]>,
    (merits, indices): (&mut [f32], &mut [f32]),
) {
    let merit = |i: usize| probability.of(scores[i]) + bias.map_or(0.0, |b| b[i]);
    let size = scores.len() / routing.groups;
    let in_group = |group: usize| group * size..(group + 1) * size;
    // Recomputed rather than stored: there are few groups.
    let group_merit = |group: usize| {
        let (mut best, mut second) = (f32::NEG_INFINITY, f32::NEG_INFINITY);
        for m in in_group(group).map(&merit) {
            (best, second) = (best.max(m), second.max(best.min(m)));
        }
        if size > 1 { best + second } else { best }
    };
    let is_open = |expert: usize| {
        if routing.groups_used >= routing.groups {
            return true;
        }
        let this = group_merit(expert / size);
        let ahead = (0..routing.groups).filter(|&g| {
            let other = group_merit(g);
            other > this || (other == this && g < expert / size)
        });
        ahead.count() < routing.groups_used
    };
    let open = (0..routing.groups).filter(|&g| is_open(g * size)).flat_map(in_group);
    choose(open, merit, merits, indices);
}

/// From a score to a probability.
struct Probability {
    gating: Gating,
    largest: f32,
    sum: f32,
}

impl Probability {
    fn new(gating: Gating, scores: &[f32]) -> Probability {
        let largest = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum = scores.iter().map(|s| (s - largest).exp()).sum();
        Probability { gating, largest, sum }
    }

    /// The score itself, if the softmax is over the chosen experts only.
    fn of(&self, score: f32) -> f32 {
        match self.gating {
            Gating::Softmax => (score - self.largest).exp() / self.sum,
            Gating::Sigmoid => 1.0 / (1.0 + (-score).exp()),
            Gating::SoftmaxOfChosen => score,
            Gating::SqrtSoftplus => softplus(score).sqrt(),
        }
    }
}

/// `ln(1 + exp(x))`, which is `x` in f32 long before the exponential overflows.
pub(crate) fn softplus(x: f32) -> f32 {
    if x > 20.0 { x } else { x.exp().ln_1p() }
}

/// Writes the best candidates, best first, with the lower index first among equals.
fn choose(
    candidates: impl Iterator<Item = usize>,
    merit: impl Fn(usize) -> f32,
    merits: &mut [f32],
    out: &mut [f32],
) {
    let mut count = 0;
    for candidate in candidates {
        let merit = merit(candidate);
        let at = merits[..count].iter().position(|&other| merit > other).unwrap_or(count);
        if at == out.len() {
            continue;
        }
        count = (count + 1).min(out.len());
        merits[at..count].rotate_right(1);
        out[at..count].rotate_right(1);
        (merits[at], out[at]) = (merit, candidate as f32);
    }
    // The open groups may have too few experts; every entry must still be a valid index.
    out[count..].fill(0.0);
}

fn scale_to_one(weights: &mut [f32]) {
    // Sums below this are noise of sigmoids far out.
    const SMALLEST: f32 = 1.0 / 16384.0;
    let sum = weights.iter().sum::<f32>().max(SMALLEST);
    weights.iter_mut().for_each(|w| *w /= sum);
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROUTING: Routing = Routing {
        experts: 6,
        used: 2,
        gating: Gating::SoftmaxOfChosen,
        groups: 1,
        groups_used: 1,
        normalize: false,
        scale: 1.0,
    };

    fn run(routing: &Routing, scores: &[f32], bias: Option<&[f32]>) -> Vec<f32> {
        let mut out = vec![f32::NAN; 2 * routing.used];
        route(routing, scores, None, bias, &mut out);
        out
    }

    #[test]
    fn equal_scores_give_the_lower_index_first() {
        assert_eq!(run(&ROUTING, &[1.0, 2.0, 2.0, 2.0, 0.0, 0.0], None), [0.5, 0.5, 1.0, 2.0]);
    }

    #[test]
    fn a_bias_chooses_and_does_not_weigh() {
        let routing = Routing { gating: Gating::Sigmoid, ..ROUTING };
        let bias = [0.0, 0.0, 0.0, 0.0, 0.0, 9.0];
        let found = run(&routing, &[0.0, 1.0, 0.0, 0.0, 0.0, 0.0], Some(&bias));
        assert_eq!(&found[2..], [5.0, 1.0]);
        assert_eq!(found[0], 0.5);
    }

    #[test]
    fn closed_groups_are_passed_over() {
        let (gating, normalize) = (Gating::Sigmoid, true);
        let routing = Routing { groups: 3, groups_used: 1, gating, normalize, ..ROUTING };
        let found = run(&routing, &[5.0, -9.0, 3.0, 3.0, 4.0, 0.0], None);
        assert_eq!(found, [0.5, 0.5, 2.0, 3.0]);
    }

    #[test]
    fn nan_scores_still_give_experts() {
        let found = run(&ROUTING, &[f32::NAN; 6], None);
        assert!(found[2..].iter().all(|e| (0.0..6.0).contains(e)), "{found:?}");
    }
}
