//! Replacement policies of an expert cache, and what each does on a routing trace. It must not know
//! budgets, tables or files.

use super::RoutingTrace;

/// Caches fill during the first part of a trace, one in this number, which is not counted.
const WARM_UP: usize = 8;

/// Which experts have slots.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Policy {
    /// Those that are used most in the whole trace, always.
    Static,
    /// The last used.
    Lru,
    /// The most used so far.
    Lfu,
    /// Those with the highest counts of uses, which decay by a factor per token.
    Lrfu(f64),
    /// Those that are used next: no policy has fewer misses (Belady 1966).
    Belady,
}

/// What happened to a cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Experts that tokens chose.
    pub uses: usize,
    /// Those of them that had a slot.
    pub hits: usize,
    /// Experts copied into a slot after a miss.
    pub copies: usize,
}

impl Outcome {
    /// Percent of choices that had a slot.
    pub fn hits_percent(&self) -> f64 {
        100.0 * self.hits as f64 / self.uses.max(1) as f64
    }
}

impl std::ops::AddAssign for Outcome {
    fn add_assign(&mut self, other: Outcome) {
        self.uses += other.uses;
        self.hits += other.hits;
        self.copies += other.copies;
    }
}

impl Policy {
    /// Its name, for people.
    pub fn name(self) -> String {
        match self {
            Policy::Static => "static, most used".to_owned(),
            Policy::Lru => "LRU".to_owned(),
            Policy::Lfu => "LFU".to_owned(),
            Policy::Lrfu(decay) => format!("LRFU {decay}"),
            Policy::Belady => "Belady (knows the future)".to_owned(),
        }
    }

    /// Runs all layers of a trace, each with `slots`. An eighth of the tokens fills the caches and
    /// is not counted.
    pub fn run_all(self, trace: &RoutingTrace, slots: usize) -> Outcome {
        let mut outcome = Outcome::default();
        for layer in 0..trace.layers().len() {
            let chosen: Vec<&[u16]> =
                (0..trace.tokens()).map(|token| trace.chosen(token, layer)).collect();
            outcome += self.run(&chosen, trace.experts(), slots, trace.tokens() / WARM_UP);
        }
        outcome
    }

    /// Runs one layer: `chosen` has the experts of each token. The first `warm_up` tokens are not
    /// counted. A missed expert gets a slot after the token if there is a free one, or if its score
    /// exceeds that of the slot with the lowest.
    fn run(self, chosen: &[&[u16]], experts: usize, slots: usize, warm_up: usize) -> Outcome {
        let mut scores = Scores::new(self, chosen, experts);
        let mut resident = if self == Policy::Static { scores.best(slots) } else { Vec::new() };
        let mut outcome = Outcome::default();
        for (token, chosen) in chosen.iter().enumerate() {
            let is_missed = |expert: &&u16| !resident.contains(*expert);
            let missed: Vec<u16> = chosen.iter().filter(is_missed).copied().collect();
            scores.advance(token, chosen);
            let mut copies = 0;
            for &expert in &missed {
                let score = |expert: u16| scores.values[usize::from(expert)];
                if resident.len() < slots {
                    resident.push(expert);
                    copies += 1;
                    continue;
                }
                let by_score = |a: &&mut u16, b: &&mut u16| score(**a).total_cmp(&score(**b));
                let Some(victim) = resident.iter_mut().min_by(by_score) else { continue };
                if score(expert) > score(*victim) {
                    *victim = expert;
                    copies += 1;
                }
            }
            if token >= warm_up {
                let (uses, hits) = (chosen.len(), chosen.len() - missed.len());
                outcome += Outcome { uses, hits, copies };
            }
        }
        outcome
    }
}

/// The experts' scores under a policy.
struct Scores {
    policy: Policy,
    values: Vec<f64>,
    /// The tokens that use each expert, the last one first; for the policy that knows them.
    future: Vec<Vec<usize>>,
}

impl Scores {
    fn new(policy: Policy, chosen: &[&[u16]], experts: usize) -> Scores {
        let (mut values, mut future) = (vec![0.0; experts], vec![Vec::new(); experts]);
        for (token, chosen) in chosen.iter().enumerate().rev() {
            for &expert in *chosen {
                match policy {
                    Policy::Static => values[usize::from(expert)] += 1.0,
                    Policy::Belady => future[usize::from(expert)].push(token),
                    _ => {}
                }
            }
        }
        Scores { policy, values, future }
    }

    /// Updates them after a token.
    fn advance(&mut self, token: usize, chosen: &[u16]) {
        if let Policy::Lrfu(decay) = self.policy {
            self.values.iter_mut().for_each(|value| *value *= decay);
        }
        for &expert in chosen {
            let value = &mut self.values[usize::from(expert)];
            match self.policy {
                Policy::Static => {}
                Policy::Lru => *value = token as f64,
                Policy::Lfu | Policy::Lrfu(_) => *value += 1.0,
                Policy::Belady => {
                    let future = &mut self.future[usize::from(expert)];
                    future.pop();
                    *value = future.last().map_or(f64::NEG_INFINITY, |&next| -(next as f64));
                }
            }
        }
    }

    /// The experts with the highest scores.
    fn best(&self, count: usize) -> Vec<u16> {
        let mut order: Vec<u16> = (0..self.values.len() as u16).collect();
        let value = |expert: u16| self.values[usize::from(expert)];
        order.sort_by(|&a, &b| value(b).total_cmp(&value(a)));
        order.truncate(count);
        order
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Misses of a sequence of single experts, in two slots.
    fn misses(policy: Policy, sequence: &[u16]) -> usize {
        let chosen: Vec<&[u16]> = sequence.chunks(1).collect();
        let outcome = policy.run(&chosen, 8, 2, 0);
        assert_eq!(outcome.uses, sequence.len());
        outcome.uses - outcome.hits
    }

    #[test]
    fn policies_choose_their_victims() {
        // 0 is used often, 1 was used last, 2 misses.
        let often = [0, 0, 0, 1, 2, 0];
        // Both slots are filled, then 2 replaces 0; LFU's and LRFU's counts of 0 stay higher.
        assert_eq!(misses(Policy::Lru, &often), 4);
        assert_eq!(misses(Policy::Lfu, &often), 3);
        assert_eq!(misses(Policy::Lrfu(0.9), &often), 3);
        // A count that decays fast is as good as the time of the last use.
        assert_eq!(misses(Policy::Lrfu(0.4), &often), 4);
        // Equal counts: 2 does not exceed 1, so LFU leaves it out each time.
        assert_eq!(misses(Policy::Lfu, &[0, 1, 2]), 3);
        assert_eq!(misses(Policy::Static, &[0, 1, 2, 0, 1, 0]), 1);
        // 2 is never used again, so it gets no slot.
        assert_eq!(misses(Policy::Belady, &[0, 1, 2, 0, 1]), 3);
        assert_eq!(misses(Policy::Lru, &[0, 1, 2, 0, 1]), 5);
    }

    #[test]
    fn copies_and_warm_up_are_counted() {
        let chosen: [&[u16]; 4] = [&[0, 1], &[1, 2], &[2, 3], &[2, 3]];
        let all = Policy::Lru.run(&chosen, 4, 2, 0);
        assert_eq!(all, Outcome { uses: 8, hits: 4, copies: 4 });
        let later = Policy::Lru.run(&chosen, 4, 2, 3);
        assert_eq!(later, Outcome { uses: 2, hits: 2, copies: 0 });
    }
}
