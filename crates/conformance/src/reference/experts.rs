//! Experts of the reference interpreter: who is chosen with which weight, and their products.

use bodkin_model::{Gating, Routing};

use super::rows::{dot, softplus};

/// The smallest sum that weights are divided by.
const SMALLEST_SUM: f64 = 1.0 / 16384.0;

/// Rows of the chosen experts' weights and then of their numbers, from rows of scores. With
/// `chosen`, its rows are the numbers.
pub(super) fn route(
    scores: &[f32],
    chosen: Option<&[f32]>,
    bias: Option<&[f32]>,
    r: &Routing,
) -> Vec<f32> {
    let rows = scores.chunks_exact(r.experts).enumerate();
    rows.flat_map(|(row, scores)| {
        let scores: Vec<f64> = scores.iter().map(|&s| f64::from(s)).collect();
        let probabilities = match r.gating {
            Gating::Softmax => softmax(&scores),
            Gating::Sigmoid => scores.iter().map(|s| 1.0 / (1.0 + (-s).exp())).collect(),
            Gating::SoftmaxOfChosen => scores,
            Gating::SqrtSoftplus => scores.iter().map(|&s| softplus(s).sqrt()).collect(),
        };
        let ranks: Vec<f64> = match bias {
            Some(bias) => probabilities.iter().zip(bias).map(|(p, &b)| p + f64::from(b)).collect(),
            None => probabilities.clone(),
        };
        let chosen: Vec<usize> = match chosen {
            Some(chosen) => {
                let numbers = chosen[row * r.used..][..r.used].iter();
                numbers.map(|&number| (number as usize).min(r.experts - 1)).collect()
            }
            None => choose(&ranks, r),
        };
        let mut weights: Vec<f64> = chosen.iter().map(|&e| probabilities[e]).collect();
        if r.gating == Gating::SoftmaxOfChosen {
            weights = softmax(&weights);
        }
        if r.normalize {
            let sum = weights.iter().sum::<f64>().max(SMALLEST_SUM);
            weights.iter_mut().for_each(|w| *w /= sum);
        }
        let weights = weights.into_iter().map(|w| (w * f64::from(r.scale)) as f32);
        weights.chain(chosen.into_iter().map(|e| e as f32)).collect::<Vec<f32>>()
    })
    .collect()
}

fn softmax(scores: &[f64]) -> Vec<f64> {
    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = scores.iter().map(|s| (s - max).exp()).sum();
    scores.iter().map(|s| (s - max).exp() / sum).collect()
}

/// The experts that are used, the best first.
fn choose(ranks: &[f64], r: &Routing) -> Vec<usize> {
    let in_group = r.experts / r.groups;
    let two_best = |group: &[f64]| {
        let best = descending(group);
        best.iter().take(2).map(|&i| group[i]).sum::<f64>()
    };
    let groups: Vec<f64> = ranks.chunks_exact(in_group).map(two_best).collect();
    let mut open = vec![false; r.groups];
    descending(&groups).into_iter().take(r.groups_used).for_each(|group| open[group] = true);
    let experts = descending(ranks).into_iter().filter(|expert| open[expert / in_group]);
    experts.take(r.used).collect()
}

/// Indices from the largest value to the smallest, the lower index first among equals.
pub(super) fn descending(values: &[f64]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    // Adding zero makes both zeros the same.
    order.sort_by(|&a, &b| (values[b] + 0.0).total_cmp(&(values[a] + 0.0)));
    order
}

/// The chosen experts of a row that [`route`] made.
pub(super) fn chosen(route: &[f32]) -> impl Iterator<Item = usize> {
    route[route.len() / 2..].iter().map(|&e| e as usize)
}

/// The experts of a token, each with its part of the token's input: those that `route`
/// chose, or all. They share the input if it is as wide as one part.
pub(super) fn pairs<'a>(
    input: &'a [f32],
    cols: usize,
    route: Option<&[f32]>,
    experts: usize,
) -> Vec<(usize, &'a [f32])> {
    let experts: Vec<usize> = match route {
        Some(route) => chosen(route).collect(),
        None => (0..experts).collect(),
    };
    experts.into_iter().zip(input.chunks_exact(cols).cycle()).collect()
}

/// Products with the matrices of the chosen experts.
pub(super) struct ExpertLinear<'a> {
    /// `[experts * n, cols]`.
    pub(super) weight: &'a [f32],
    /// `[experts, n]`.
    pub(super) bias: Option<&'a [f32]>,
    pub(super) cols: usize,
    pub(super) experts: usize,
}

impl ExpertLinear<'_> {
    /// The products of rows of `width`; `route` has a row for each, or all experts are used.
    pub(super) fn run(&self, x: &[f32], width: usize, route: Option<&[f32]>) -> Vec<f32> {
        let rows = x.len() / width;
        let mut out = Vec::new();
        for (i, row) in x.chunks_exact(width).enumerate() {
            let route = route.map(|route| &route[i * (route.len() / rows)..][..route.len() / rows]);
            for (expert, part) in pairs(row, self.cols, route, self.experts) {
                self.product(part, expert, &mut out);
            }
        }
        out
    }

    fn product(&self, x: &[f32], expert: usize, out: &mut Vec<f32>) {
        let n = self.weight.len() / self.cols / self.experts;
        let matrix = &self.weight[expert * n * self.cols..][..n * self.cols];
        for (j, w) in matrix.chunks_exact(self.cols).enumerate() {
            out.push(dot(x, w) as f32 + self.bias.map_or(0.0, |b| b[expert * n + j]));
        }
    }
}

/// Rows of [`route`], each weight times the number of its expert.
pub(super) fn scale(route: &[f32], width: usize, numbers: &[f32]) -> Vec<f32> {
    let mut out = route.to_vec();
    for row in out.chunks_exact_mut(width) {
        let (weights, experts) = row.split_at_mut(width / 2);
        weights.iter_mut().zip(experts).for_each(|(w, expert)| *w *= numbers[*expert as usize]);
    }
    out
}

/// The sum of `used` parts of each row, each times its weight.
pub(super) fn expert_sum(x: &[f32], route: &[f32], used: usize) -> Vec<f32> {
    let rows = route.len() / (2 * used);
    let width = x.len() / rows / used;
    let mut out = Vec::with_capacity(rows * width);
    for (row, route) in x.chunks_exact(used * width).zip(route.chunks_exact(2 * used)) {
        for j in 0..width {
            let terms = (0..used).map(|i| f64::from(row[i * width + j]) * f64::from(route[i]));
            out.push(terms.sum::<f64>() as f32);
        }
    }
    out
}
