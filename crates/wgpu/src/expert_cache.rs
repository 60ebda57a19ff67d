//! The caches of experts: where not all experts fit on the device, all of them are in memory of the
//! host, and each layer has slots for some of them on the device (`shaders/expert_cache.wgsl`).
//! This file must not know the device.

use bodkin_backend::{ExpertBytes, ExpertCacheStats};
use bodkin_model::{Op, Plan, WeightId};

use crate::layout::Packing;

/// The most experts of a layer that get a slot in one step.
pub(crate) const MAX_FILLS: usize = 32;
/// What the table of slots has for an expert without one.
pub(crate) const NO_SLOT: u32 = u32::MAX;
/// Words of a cache for each expert: its slot, its score, and how often it was chosen until the
/// last step.
pub(crate) const EXPERT_WORDS: usize = 3;
/// Counters behind those: slots with an expert, hits, misses, all fills, and those of the step.
pub(crate) const COUNTERS: usize = 5;

/// The cache of a layer's experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ExpertCache {
    pub(crate) experts: usize,
    pub(crate) slots: usize,
    /// Its first word in the buffer of all caches.
    pub(crate) at: usize,
}

impl ExpertCache {
    /// The first of its counters.
    pub(crate) fn counters_at(self) -> usize {
        self.at + EXPERT_WORDS * self.experts
    }

    /// The experts that get a slot in a step, each with its slot.
    pub(crate) fn fills_at(self) -> usize {
        self.counters_at() + COUNTERS
    }

    fn end(self) -> usize {
        self.fills_at() + 2 * MAX_FILLS
    }
}

/// All caches of a plan.
#[derive(Clone, Debug)]
pub(crate) struct ExpertCaches {
    of_weights: Vec<Option<ExpertCache>>,
    of_routings: Vec<Option<ExpertCache>>,
    /// Of the buffer of all caches.
    words: usize,
}

impl ExpertCaches {
    /// The caches of the layers that have more experts than slots.
    pub(crate) fn new(plan: &Plan, slots: Option<usize>) -> ExpertCaches {
        let mut of_weights = vec![None; plan.weights.len()];
        let (mut of_routings, mut words) = (Vec::new(), 0);
        for Routing { experts, weights } in routings(plan) {
            let slots = slots.filter(|&slots| slots < experts && !weights.is_empty());
            let cache = slots.map(|slots| ExpertCache { experts, slots, at: words });
            weights.iter().for_each(|id| of_weights[id.0] = cache);
            words = cache.map_or(words, ExpertCache::end);
            of_routings.push(cache);
        }
        ExpertCaches { of_weights, of_routings, words }
    }

    /// The cache of a weight's experts; none if all are on the device, or it has none.
    pub(crate) fn of_weight(&self, id: WeightId) -> Option<ExpertCache> {
        self.of_weights[id.0]
    }

    /// The cache of the experts that a routing chooses from, in the plan's order.
    pub(crate) fn of_routing(&self, routing: usize) -> Option<ExpertCache> {
        self.of_routings[routing]
    }

    /// Bytes of the buffer of all caches.
    pub(crate) fn bytes(&self) -> u64 {
        4 * self.words as u64
    }

    /// The words of the buffer at first: no expert has a slot.
    pub(crate) fn words(&self) -> Vec<u32> {
        let mut words = vec![0; self.words];
        for cache in self.of_routings.iter().flatten() {
            words[cache.at..cache.at + cache.experts].fill(NO_SLOT);
        }
        words
    }

    /// What the cache of each routing has done, by the words of the buffer.
    pub(crate) fn stats(&self, words: &[u32]) -> Vec<Option<ExpertCacheStats>> {
        let stats = |cache: &ExpertCache| {
            let at = cache.counters_at() + 1;
            let [hits, misses, fills] = [0, 1, 2].map(|i| u64::from(words[at + i]));
            ExpertCacheStats { slots: cache.slots, hits, misses, fills, ..Default::default() }
        };
        self.of_routings.iter().map(|cache| cache.as_ref().map(stats)).collect()
    }
}

/// What the experts of a plan take on the device.
pub(crate) fn expert_bytes(plan: &Plan) -> ExpertBytes {
    let mut bytes = ExpertBytes::default();
    for Routing { experts, weights } in routings(plan) {
        for id in weights {
            let weight = plan.weight(id);
            bytes.experts = bytes.experts.max(experts);
            let layout = Packing::of(weight.format).layout;
            let slot = layout.bytes(weight.rows / experts, weight.cols);
            bytes.slot += slot;
            bytes.all += experts as u64 * slot;
        }
    }
    bytes
}

/// A routing of a plan, and the weights of its experts that can be cached.
struct Routing {
    experts: usize,
    weights: Vec<WeightId>,
}

/// All of them in order. A weight that other operations read too, whose choices may be others, is
/// not cached.
fn routings(plan: &Plan) -> Vec<Routing> {
    let is_of = |id: WeightId, all: usize| {
        let mut uses = plan.ops.iter().filter(|op| op.weights().any(|other| other == id));
        let first = uses.next();
        matches!(first, Some(Op::ExpertLinear { experts, .. }) if *experts == all)
            && uses.next().is_none()
    };
    let experts = plan.routings().map(|routing| routing.experts);
    let routings = experts.zip(plan.routed_weights()).map(|(experts, mut weights)| {
        weights.retain(|&id| is_of(id, experts));
        Routing { experts, weights }
    });
    routings.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn caches_follow_each_other_in_the_buffer() {
        let first = ExpertCache { experts: 8, slots: 3, at: 0 };
        let second = ExpertCache { experts: 4, slots: 3, at: first.end() };
        let of_routings = vec![Some(first), None, Some(second)];
        let caches = ExpertCaches { of_weights: Vec::new(), of_routings, words: second.end() };
        let mut words = caches.words();
        assert_eq!(words.len() as u64 * 4, caches.bytes());
        assert_eq!(words.iter().filter(|&&word| word == NO_SLOT).count(), 12);
        let at = second.counters_at();
        words[at..at + 4].copy_from_slice(&[2, 7, 5, 4]);
        let stats = caches.stats(&words);
        let wanted =
            ExpertCacheStats { slots: 3, hits: 7, misses: 5, fills: 4, ..Default::default() };
        assert_eq!(stats[1..], [None, Some(wanted)]);
        assert_eq!(stats[0], Some(ExpertCacheStats { slots: 3, ..Default::default() }));
    }
}
