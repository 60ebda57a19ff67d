//! The tokens that may be drawn, and the steps that make them fewer. A step that needs an order
//! sorts only as much as it needs: a vocabulary has a quarter of a million tokens, and sorting it
//! takes longer than many models take for a token.

use std::cmp::Ordering;

#[derive(Clone, Copy, Debug)]
struct Candidate {
    id: u32,
    logit: f32,
    /// Valid after `softmax`, until the candidates change.
    p: f32,
}

/// Candidates, and whether the best come first.
#[derive(Clone, Debug, Default)]
pub struct Candidates {
    items: Vec<Candidate>,
    is_sorted: bool,
}

/// The best first; of equals, the lowest id.
fn order(a: &Candidate, b: &Candidate) -> Ordering {
    b.logit.total_cmp(&a.logit).then(a.id.cmp(&b.id))
}

/// Makes tokens impossible whose logit is more than `n` standard deviations below the highest
/// (Tang et al. 2024, "Top-nσ").
pub fn top_n_sigma(logits: &mut [f32], n: f32) {
    let (mut count, mut sum, mut max) = (0.0, 0.0, f32::NEG_INFINITY);
    for &logit in logits.iter().filter(|logit| logit.is_finite()) {
        count += 1.0;
        sum += f64::from(logit);
        max = max.max(logit);
    }
    if count < 2.0 {
        return;
    }
    let mean = sum / count;
    let squares = logits.iter().filter(|logit| logit.is_finite());
    let variance = squares.map(|&logit| (f64::from(logit) - mean).powi(2)).sum::<f64>() / count;
    let floor = max - n * variance.sqrt() as f32;
    for logit in logits.iter_mut().filter(|logit| **logit < floor) {
        *logit = f32::NEG_INFINITY;
    }
}

impl Candidates {
    /// Takes the `k` tokens with the highest logits, sorted, or all that are possible if `k` is 0.
    /// There is always one.
    pub fn fill(&mut self, logits: &[f32], k: usize) {
        let items = &mut self.items;
        items.clear();
        let k = if k == 0 { logits.len() } else { k.min(logits.len()) };
        self.is_sorted = k < logits.len();
        // At twice the wanted number, the worse half goes, and what is no
        // better than the rest need not come at all.
        let room = 2 * k + 64;
        items.reserve(room.min(logits.len()));
        let mut floor = f32::NEG_INFINITY;
        for (id, &logit) in logits.iter().enumerate() {
            if logit > floor {
                items.push(Candidate { id: id as u32, logit, p: 0.0 });
                if items.len() == room {
                    items.select_nth_unstable_by(k - 1, order);
                    items.truncate(k);
                    floor = items[k - 1].logit;
                }
            }
        }
        if items.is_empty() {
            items.push(Candidate { id: 0, logit: 0.0, p: 0.0 });
        }
        if self.is_sorted {
            if items.len() > k {
                items.select_nth_unstable_by(k - 1, order);
                items.truncate(k);
            }
            items.sort_unstable_by(order);
        }
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.items.len()
    }

    /// Sorts the best `count` to the front.
    fn sort_front(&mut self, count: usize) {
        if self.is_sorted {
            return;
        }
        if count < self.items.len() {
            self.items.select_nth_unstable_by(count, order);
            self.items[..count].sort_unstable_by(order);
        } else {
            self.items.sort_unstable_by(order);
            self.is_sorted = true;
        }
    }

    fn max(&self) -> f32 {
        match self.is_sorted {
            true => self.items[0].logit,
            false => self.items.iter().map(|c| c.logit).fold(f32::NEG_INFINITY, f32::max),
        }
    }

    fn softmax(&mut self) {
        // An infinite logit leaves nothing for the others.
        let max = self.max().min(f32::MAX);
        // In f32, a sum of a whole vocabulary would miss a ten-thousandth.
        let mut sum = 0.0;
        for candidate in &mut self.items {
            candidate.p = (candidate.logit.min(f32::MAX) - max).exp();
            sum += f64::from(candidate.p);
        }
        let share = |p: f32| (f64::from(p) / sum) as f32;
        self.items.iter_mut().for_each(|candidate| candidate.p = share(candidate.p));
    }

    /// Locally typical sampling (Meister et al. 2022): keeps the tokens whose surprise is nearest
    /// to the expected one, until they have the probability `p`.
    pub fn typical(&mut self, p: f32, min_keep: usize) {
        if p >= 1.0 {
            return;
        }
        self.softmax();
        let terms = self.items.iter().filter(|c| c.p > 0.0).map(|c| -c.p * c.p.ln());
        let entropy: f32 = terms.sum();
        let distance = |c: &Candidate| (-c.p.ln() - entropy).abs();
        self.items
            .sort_unstable_by(|a, b| distance(a).total_cmp(&distance(b)).then_with(|| order(a, b)));
        self.is_sorted = false;
        let mut sum = 0.0;
        let enough = self.items.iter().enumerate().position(|(index, candidate)| {
            sum += candidate.p;
            sum > p && index + 1 >= min_keep
        });
        self.items.truncate(enough.map_or(self.items.len(), |index| index + 1));
    }

    /// Nucleus sampling (Holtzman et al. 2019): keeps the best tokens that have the probability
    /// `p` together.
    pub fn top_p(&mut self, p: f32, min_keep: usize) {
        if p >= 1.0 {
            return;
        }
        self.softmax();
        let (mut sum, mut sorted) = (0.0, 0);
        for index in 0..self.items.len() {
            if index == sorted {
                // What is sorted already stays in front.
                sorted = (sorted * 4).max(256);
                self.sort_front(sorted);
            }
            sum += f64::from(self.items[index].p);
            if sum >= f64::from(p) && index + 1 >= min_keep {
                self.items.truncate(index + 1);
                break;
            }
        }
        self.is_sorted = true;
    }

    /// Keeps the tokens that have at least the share `p` of the best one's probability.
    pub fn min_p(&mut self, p: f32, min_keep: usize) {
        if p <= 0.0 {
            return;
        }
        let floor = self.max() + p.ln();
        let kept = self.items.iter().filter(|c| c.logit >= floor).count();
        if kept >= min_keep.max(1) {
            self.items.retain(|c| c.logit >= floor);
        } else {
            let count = min_keep.max(1).min(self.items.len());
            self.sort_front(count);
            self.items.truncate(count);
            self.is_sorted = true;
        }
    }

    /// Excludes the top choices (p-e-w's XTC): of the tokens that have at least the probability
    /// `threshold`, only the least likely stays.
    pub fn xtc(&mut self, threshold: f32, min_keep: usize) {
        self.softmax();
        self.sort_front(self.items.len());
        let top = self.items.iter().take_while(|c| c.p >= threshold).count();
        let gone = top.saturating_sub(1);
        if gone > 0 && self.items.len() - gone >= min_keep {
            self.items.drain(..gone);
        }
    }

    /// Divides what logits are below the highest; at 0 or below only the best token stays.
    pub fn temperature(&mut self, temperature: f32) {
        if temperature > 0.0 {
            // The logits themselves might all become infinite.
            let max = self.max().min(f32::MAX);
            let heat = |logit: f32| (logit.min(f32::MAX) - max) / temperature;
            self.items.iter_mut().for_each(|candidate| candidate.logit = heat(candidate.logit));
            return;
        }
        let best = self.items.iter().copied().min_by(order);
        self.items.clear();
        self.items.extend(best);
    }

    /// Keeps the tokens whose surprise is at most this many bits, and the best one in any case.
    pub fn limit_surprise(&mut self, bits: f32) {
        self.softmax();
        let floor = (-bits).exp2();
        if self.items.iter().any(|candidate| candidate.p >= floor) {
            self.items.retain(|candidate| candidate.p >= floor);
        } else {
            self.temperature(0.0);
        }
    }

    /// The candidate at `target`, from 0 to below 1, where all stand in line as long as they are
    /// probable. Returns its id and its probability among the candidates.
    pub fn sample(&mut self, target: f64) -> (u32, f32) {
        self.softmax();
        let mut sum = 0.0;
        for candidate in &self.items {
            sum += f64::from(candidate.p);
            if sum > target {
                return (candidate.id, candidate.p);
            }
        }
        // Rounding may leave the sum just below 1; the last possible one is then meant.
        let last = self.items.iter().rev().find(|candidate| candidate.p > 0.0);
        last.or(self.items.first()).map_or((0, 1.0), |candidate| (candidate.id, candidate.p))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Fills with logarithms of probabilities, applies a step, and returns what is left with its
    /// probabilities, by id.
    fn after(p: &[f32], step: impl Fn(&mut Candidates)) -> Vec<(u32, f32)> {
        let logits: Vec<f32> = p.iter().map(|p| p.ln()).collect();
        let mut candidates = Candidates::default();
        candidates.fill(&logits, 0);
        step(&mut candidates);
        candidates.softmax();
        let mut left: Vec<_> = candidates.items.iter().map(|c| (c.id, c.p)).collect();
        left.sort_by_key(|(id, _)| *id);
        left
    }

    fn assert_left(found: &[(u32, f32)], expected: &[(u32, f32)]) {
        let is_close = |(a, b): (&(u32, f32), &(u32, f32))| a.0 == b.0 && (a.1 - b.1).abs() < 1e-4;
        let is_same = found.len() == expected.len() && found.iter().zip(expected).all(is_close);
        assert!(is_same, "{found:?} {expected:?}");
    }

    const P: [f32; 4] = [0.1, 0.2, 0.3, 0.4];

    #[test]
    fn top_k_takes_the_best() {
        let logits: Vec<f32> = (0..5000).map(|i| ((i * 7919) % 5000) as f32).collect();
        for k in [1, 2, 40, 4999] {
            let mut candidates = Candidates::default();
            candidates.fill(&logits, k);
            let found: Vec<f32> = candidates.items.iter().map(|c| c.logit).collect();
            let expected: Vec<f32> = (0..k).map(|rank| (4999 - rank) as f32).collect();
            assert_eq!(found, expected);
        }
        // Of equals the lowest ids.
        let mut candidates = Candidates::default();
        candidates.fill(&[1.0; 500], 3);
        assert!(candidates.items.iter().map(|c| c.id).eq(0..3));
    }

    #[test]
    fn top_p() {
        assert_left(&after(&P, |c| c.top_p(0.0, 0)), &[(3, 1.0)]);
        assert_left(&after(&P, |c| c.top_p(0.69, 0)), &[(2, 0.428571), (3, 0.571429)]);
        let three = [(1, 0.222222), (2, 0.333333), (3, 0.444444)];
        assert_left(&after(&P, |c| c.top_p(0.8, 0)), &three);
        assert_left(&after(&P, |c| c.top_p(0.0, 3)), &three);
        // Many candidates, of which more than the first sorted part are needed.
        let flat = vec![0.001; 1000];
        assert_eq!(after(&flat, |c| c.top_p(0.5005, 0)).len(), 501);
    }

    #[test]
    fn min_p() {
        let all = [(0, 0.1), (1, 0.2), (2, 0.3), (3, 0.4)];
        assert_left(&after(&P, |c| c.min_p(0.24, 0)), &all);
        let three = [(1, 0.2 / 0.9), (2, 0.3 / 0.9), (3, 0.4 / 0.9)];
        assert_left(&after(&P, |c| c.min_p(0.26, 0)), &three);
        assert_left(&after(&P, |c| c.min_p(0.74, 0)), &[(2, 0.3 / 0.7), (3, 0.4 / 0.7)]);
        assert_left(&after(&P, |c| c.min_p(0.76, 0)), &[(3, 1.0)]);
        assert_left(&after(&P, |c| c.min_p(1.0, 2)), &[(2, 0.3 / 0.7), (3, 0.4 / 0.7)]);
    }

    #[test]
    fn a_low_temperature_leaves_the_best() {
        // Divided by it, all of these logits would be infinite.
        assert_left(
            &after(&P, |c| c.temperature(1e-40)),
            &[(0, 0.0), (1, 0.0), (2, 0.0), (3, 1.0)],
        );
    }

    #[test]
    fn shares_of_many_tokens_add_up() {
        let mut candidates = Candidates::default();
        candidates.fill(&vec![0.0; 200_000], 0);
        candidates.top_p(0.5, 0);
        assert!((99_999..=100_001).contains(&candidates.count()), "{}", candidates.count());
    }

    #[test]
    fn typical() {
        assert_left(&after(&[0.97, 0.01, 0.01, 0.01], |c| c.typical(0.5, 0)), &[(0, 1.0)]);
        let third = 1.0 / 3.0;
        let found = after(&[0.4, 0.2, 0.2, 0.2], |c| c.typical(0.5, 0));
        assert_left(&found, &[(1, third), (2, third), (3, third)]);
    }

    #[test]
    fn xtc() {
        let xtc = |threshold| {
            let logits: Vec<f32> = [0.4f32, 0.3, 0.2, 0.1].iter().map(|p| p.ln()).collect();
            let mut candidates = Candidates::default();
            candidates.fill(&logits, 0);
            candidates.xtc(threshold, 0);
            candidates.items.iter().map(|c| c.id).collect::<Vec<u32>>()
        };
        assert_eq!(xtc(0.09), [3]);
        assert_eq!(xtc(0.19), [2, 3]);
        assert_eq!(xtc(0.29), [1, 2, 3]);
        // One token alone at the top is no choice.
        assert_eq!(xtc(0.39), [0, 1, 2, 3]);
    }

    #[test]
    fn sigma() {
        let logits: Vec<f32> = P.iter().map(|p| p.ln()).collect();
        let masked = |n| {
            let mut logits = logits.clone();
            top_n_sigma(&mut logits, n);
            logits.iter().map(|logit| logit.is_finite()).collect::<Vec<bool>>()
        };
        assert_eq!(masked(1.0), [false, false, true, true]);
        assert_eq!(masked(3.0), [true; 4]);
    }
}
