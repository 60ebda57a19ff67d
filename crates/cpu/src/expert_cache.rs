//! The cache of experts: where memory has no room for all experts of a model, each layer has slots
//! for packed experts, and all stay in the file. A chosen expert without a slot is read from there.
//! It takes a free slot, or that of the expert with the lowest score (LRFU) if its own is higher:
//! the threads pack its panels there when they multiply them.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{PoisonError, RwLock, RwLockReadGuard};

use bodkin_backend::{EXPERT_SCORE_DECAY, ExpertBudget, ExpertBytes, ExpertCacheStats, Worker};
use bodkin_gguf::{File, Tensor};
use bodkin_model::{Op, Plan, WeightId};

use crate::config::Cpu;
use crate::linear::{PackedLayout, PackedWeight};
use crate::weights::{tensor, uses};

/// The most experts of a layer that are read from the file before threads need them, and the most
/// bytes of them if they are large.
const READ_AHEAD: usize = 16;
const READ_AHEAD_BYTES: usize = 128 << 20;
/// Predicted experts of a layer after which older ones count half.
const REMEMBERED_PREDICTIONS: u32 = 64;
/// By default one part in this number of the memory for experts is reserved for the page cache.
const PAGE_CACHE_SHARE: u64 = 8;

/// The name of a weight that could be cached if the file held its bytes as they are, instead of
/// others from which they are made.
pub(crate) fn derived_weight(plan: &Plan, file: &File) -> Option<String> {
    let weights = plan.weights.iter().zip(uses(plan));
    let mut cached = weights.filter(|(_, uses)| uses.can_be_cached);
    let found = cached.find(|(weight, _)| file.is_derived(tensor(file, weight)));
    found.map(|(weight, _)| weight.name.clone())
}

/// What the experts of a plan take when they are packed.
pub(crate) fn expert_bytes(plan: &Plan) -> ExpertBytes {
    let weights = plan.weights.iter().zip(uses(plan));
    let cached = weights.filter(|(_, uses)| uses.can_be_cached);
    cached.fold(ExpertBytes::default(), |sum, (weight, uses)| {
        let (layout, rows) = (PackedLayout::planned(weight.format), weight.rows / uses.matrices);
        let bytes = PackedWeight::bytes_for(layout, rows, weight.cols);
        let slot = bytes.expect("no tensor of a file overflows") as u64;
        ExpertBytes {
            experts: sum.experts.max(uses.matrices),
            slot: sum.slot + slot,
            all: sum.all + uses.matrices as u64 * slot,
        }
    })
}

/// The slots of each layer, or none if all experts have room beside `others`, the bytes of the rest
/// of the model.
pub(crate) fn slots(cpu: &Cpu, plan: &Plan, others: u64) -> Option<usize> {
    let (bytes, budget) = (expert_bytes(plan), cpu.expert_budget);
    let free = cpu.free_memory().map_or(u64::MAX, |free| free.saturating_sub(others));
    match budget {
        // Without repacking, weights take no memory.
        ExpertBudget::Auto if !cpu.repack => None,
        ExpertBudget::Auto => bytes
            .slots(budget, free)
            .and_then(|_| bytes.slots(budget, free - free / PAGE_CACHE_SHARE)),
        _ => bytes.slots(budget, free),
    }
}

/// The cache of a layer's experts.
pub(crate) struct ExpertCache {
    weights: Vec<CachedWeight>,
    state: RwLock<State>,
}

/// A weight of the experts in the file.
struct CachedWeight {
    id: WeightId,
    tensor: Tensor,
    /// Of one expert.
    bytes: usize,
}

/// Which experts have slots.
struct State {
    /// Of each expert: counts of uses, which decay.
    scores: Vec<f32>,
    /// The slot of each expert.
    slot_of: Vec<Option<usize>>,
    /// The expert in each slot.
    experts: Vec<Option<usize>>,
    /// Whether the running step has chosen each expert.
    is_chosen: Vec<bool>,
    /// The experts that it has chosen and that had no slot, ascending.
    missed: Vec<usize>,
    /// The same, by falling score: the order in which they get slots.
    by_score: Vec<usize>,
    /// The experts that the next step will probably choose, of those without a slot.
    predicted: Vec<usize>,
    /// How many predicted experts were chosen, and how many were not.
    right: u32,
    wrong: u32,
    stats: ExpertCacheStats,
}

/// Where a step finds an expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Location {
    /// Packed in a slot.
    Slot(usize),
    /// In the file, to be packed in a slot.
    NewSlot(usize),
    /// In the file, where it stays.
    File,
}

impl ExpertCache {
    /// The caches of all routings with cached weights, by the routing's operation.
    pub(crate) fn all(
        plan: &Plan,
        file: &File,
        slots: Option<usize>,
    ) -> BTreeMap<usize, ExpertCache> {
        let (uses, mut caches) = (uses(plan), BTreeMap::<usize, ExpertCache>::new());
        let Some(slots) = slots else { return caches };
        for op in &plan.ops {
            let &Op::ExpertLinear { route: Some(route), weight: id, experts, .. } = op else {
                continue;
            };
            if !uses[id.0].can_be_cached {
                continue;
            }
            let other = caches.iter().find(|(_, cache)| cache.position(id).is_some());
            assert!(other.is_none(), "{} is read once", plan.weight(id).name);
            let new = || {
                let state = RwLock::new(State::new(experts, slots));
                ExpertCache { weights: Vec::new(), state }
            };
            let (weight, cache) = (plan.weight(id), caches.entry(route.0).or_insert_with(new));
            let (tensor, bytes) = (tensor(file, weight).clone(), weight.bytes as usize / experts);
            cache.weights.push(CachedWeight { id, tensor, bytes });
        }
        caches
    }

    fn state(&self) -> RwLockReadGuard<'_, State> {
        self.state.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives slots to experts that the running step has chosen, and writes the chosen ones to
    /// `order`: those that had no slot come last, so that the others hide the wait for the file.
    pub(crate) fn choose(&self, is_chosen: impl Fn(usize) -> bool, order: &mut [u32]) {
        let mut state = self.state.write().unwrap_or_else(PoisonError::into_inner);
        state.choose(&is_chosen);
        let experts = 0..state.scores.len();
        let present = experts.filter(|&expert| is_chosen(expert) && !state.is_missed(expert));
        let chosen = present.chain(state.missed.iter().copied());
        order.iter_mut().zip(chosen).for_each(|(next, expert)| *next = expert as u32);
    }

    /// Where the running step finds an expert that it has chosen.
    pub(crate) fn location(&self, expert: usize) -> Location {
        let state = self.state();
        match (state.slot_of[expert], state.is_missed(expert)) {
            (Some(slot), false) => Location::Slot(slot),
            (Some(slot), true) => Location::NewSlot(slot),
            (None, _) => Location::File,
        }
    }

    /// The number of experts that the running step has chosen and that had no slot.
    pub(crate) fn missed(&self) -> usize {
        self.state().missed.len()
    }

    /// Tells the system to read the matrices of an expert in some weights of the layer.
    pub(crate) fn will_need(&self, file: &File, expert: usize, weights: Range<usize>) {
        for weight in &self.weights[weights] {
            file.will_need(&weight.tensor, weight.range(expert));
        }
    }

    /// Notes which experts the layer will probably choose next.
    pub(crate) fn predict(&self, experts: impl Iterator<Item = usize>) {
        self.state.write().unwrap_or_else(PoisonError::into_inner).predict(experts);
    }

    /// Tells the system to read predicted experts, this thread's share of them.
    pub(crate) fn will_need_predicted(&self, file: &File, worker: &Worker<'_>) {
        let state = self.state();
        if !state.trusts_predictions() {
            return;
        }
        // An expert is divided, as most layers miss one or two.
        let predicted = state.predicted.iter().take(self.read_ahead());
        let weights = predicted.flat_map(|&expert| (0..self.weights()).map(move |w| (expert, w)));
        for (expert, weight) in weights.skip(worker.index).step_by(worker.threads) {
            self.will_need(file, expert, weight..weight + 1);
        }
    }

    /// The position of a weight among those of the layer.
    pub(crate) fn position(&self, id: WeightId) -> Option<usize> {
        self.weights.iter().position(|weight| weight.id == id)
    }

    /// How many experts to read before threads need them.
    pub(crate) fn read_ahead(&self) -> usize {
        let bytes: usize = self.weights.iter().map(|weight| weight.bytes).sum();
        (READ_AHEAD_BYTES / bytes.max(1)).clamp(1, READ_AHEAD)
    }

    /// The number of the layer's weights.
    pub(crate) fn weights(&self) -> usize {
        self.weights.len()
    }

    /// Unmaps the pages of the file that a step has read, so that the system drops them first when
    /// memory is short.
    pub(crate) fn after_step(&self, file: &File) {
        for &expert in &self.state().missed {
            for weight in &self.weights {
                file.release_part(&weight.tensor, weight.range(expert));
            }
        }
    }

    /// What the cache did since the model was loaded.
    pub(crate) fn stats(&self) -> ExpertCacheStats {
        self.state().stats
    }
}

impl CachedWeight {
    /// The bytes of an expert in the tensor.
    fn range(&self, expert: usize) -> Range<usize> {
        expert * self.bytes..(expert + 1) * self.bytes
    }
}

impl State {
    fn new(experts: usize, slots: usize) -> State {
        let slots = slots.min(experts);
        State {
            scores: vec![0.0; experts],
            slot_of: vec![None; experts],
            experts: vec![None; slots],
            is_chosen: vec![false; experts],
            missed: Vec::with_capacity(experts),
            by_score: Vec::with_capacity(experts),
            predicted: Vec::with_capacity(experts),
            right: 0,
            wrong: 0,
            stats: ExpertCacheStats { slots, ..ExpertCacheStats::default() },
        }
    }

    fn is_missed(&self, expert: usize) -> bool {
        self.missed.binary_search(&expert).is_ok()
    }

    fn choose(&mut self, is_chosen: impl Fn(usize) -> bool) {
        self.missed.clear();
        for expert in 0..self.scores.len() {
            let chosen = is_chosen(expert);
            self.is_chosen[expert] = chosen;
            self.scores[expert] *= EXPERT_SCORE_DECAY;
            if !chosen {
                continue;
            }
            self.scores[expert] += 1.0;
            match self.slot_of[expert] {
                Some(_) => self.stats.hits += 1,
                None => self.missed.push(expert),
            }
        }
        self.stats.misses += self.missed.len() as u64;
        self.stats.reads = self.stats.misses;
        self.check_predictions();
        let scores = &self.scores;
        self.by_score.clone_from(&self.missed);
        self.by_score.sort_unstable_by(|&a, &b| scores[b].total_cmp(&scores[a]).then(a.cmp(&b)));
        for i in 0..self.by_score.len() {
            let expert = self.by_score[i];
            if let Some(slot) = self.free_slot(self.scores[expert]) {
                self.slot_of[expert] = Some(slot);
                if let Some(victim) = self.experts[slot].replace(expert) {
                    self.slot_of[victim] = None;
                }
                self.stats.fills += 1;
            }
        }
    }

    fn predict(&mut self, experts: impl Iterator<Item = usize>) {
        self.predicted.clear();
        for expert in experts {
            if self.slot_of[expert].is_none() && !self.predicted.contains(&expert) {
                self.predicted.push(expert);
            }
        }
    }

    /// Whether three quarters of the experts that were predicted lately have been chosen. What
    /// others take of the storage costs more than an earlier read gains.
    fn trusts_predictions(&self) -> bool {
        self.right >= 3 * self.wrong
    }

    /// Counts which of the predicted experts the step has chosen.
    fn check_predictions(&mut self) {
        let right = self.predicted.iter().filter(|expert| self.is_chosen[**expert]).count() as u32;
        self.stats.predicted += u64::from(right);
        self.wrong += self.predicted.len() as u32 - right;
        self.right += right;
        if self.right + self.wrong > REMEMBERED_PREDICTIONS {
            self.right /= 2;
            self.wrong /= 2;
        }
        self.predicted.clear();
    }

    /// An empty slot, or that of the expert with the lowest score below this one, of those that the
    /// step has not chosen.
    fn free_slot(&self, score: f32) -> Option<usize> {
        let by_score = |(slot, expert): (usize, &Option<usize>)| match *expert {
            None => Some((slot, f32::NEG_INFINITY)),
            Some(expert) if self.is_chosen[expert] => None,
            Some(expert) => Some((slot, self.scores[expert])),
        };
        let slots = self.experts.iter().enumerate().filter_map(by_score);
        let lowest = slots.min_by(|(_, a), (_, b)| a.total_cmp(b));
        lowest.filter(|(_, lowest)| *lowest < score).map(|(slot, _)| slot)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The missed experts of each step, and whether each got a slot.
    fn run(experts: usize, slots: usize, steps: &[&[usize]]) -> (Vec<Vec<(usize, bool)>>, State) {
        let mut state = State::new(experts, slots);
        let mut missed = Vec::new();
        for chosen in steps {
            state.choose(|expert| chosen.contains(&expert));
            missed.push(state.missed.iter().map(|&e| (e, state.slot_of[e].is_some())).collect());
            let with_slot = (0..experts).filter(|e| state.slot_of[*e].is_some());
            assert!(with_slot.clone().count() <= slots);
            for expert in with_slot {
                assert_eq!(state.experts[state.slot_of[expert].unwrap()], Some(expert));
            }
        }
        (missed, state)
    }

    #[test]
    fn the_lowest_score_loses_its_slot_and_no_chosen_one_does() {
        let (missed, state) = run(4, 2, &[&[0, 1], &[0], &[2], &[0, 1, 3]]);
        // 1 has 0.64 and loses its slot to 2; then 0 stays, as it is chosen, and 2 loses to 1.
        let expected: [&[_]; 4] =
            [&[(0, true), (1, true)], &[], &[(2, true)], &[(1, true), (3, false)]];
        assert_eq!(missed, expected);
        let counted = (state.stats.hits, state.stats.misses, state.stats.fills);
        assert_eq!(counted, (2, 5, 4));
    }

    #[test]
    fn of_the_missed_the_highest_score_gets_the_slot() {
        // 2 keeps the slot until its score is below those of 0 and 1, of which 1 was used before.
        let steps: [&[usize]; 6] = [&[2], &[2], &[1], &[], &[], &[0, 1]];
        let (missed, _) = run(3, 1, &steps);
        assert_eq!(missed[2], [(1, false)]);
        assert_eq!(missed[5], [(0, false), (1, true)]);
    }

    #[test]
    fn predictions_are_trusted_while_most_of_them_are_right() {
        let (_, mut state) = run(8, 2, &[&[0, 1]]);
        // Experts with slots need no prediction.
        state.predict([0, 5, 6, 5].into_iter());
        assert_eq!(state.predicted, [5, 6]);
        state.choose(|expert| [0, 5].contains(&expert));
        assert_eq!((state.right, state.wrong, state.stats.predicted), (1, 1, 1));
        assert!(state.predicted.is_empty() && !state.trusts_predictions());
        for _ in 0..40 {
            let other = (0..8).find(|expert| state.slot_of[*expert].is_none()).unwrap();
            state.predict([other].into_iter());
            state.choose(|expert| expert == other);
        }
        assert!(state.trusts_predictions());
        assert!(state.right + state.wrong <= REMEMBERED_PREDICTIONS);
        // Steps that are not predicted change nothing.
        let before = (state.right, state.wrong);
        state.choose(|expert| expert < 4);
        assert_eq!((state.right, state.wrong), before);
    }

    #[test]
    fn what_is_used_less_than_the_residents_gets_no_slot() {
        let steps: [&[usize]; 4] = [&[0], &[0], &[0], &[1]];
        let (missed, _) = run(2, 1, &steps);
        assert_eq!(missed[3], [(1, false)]);
    }
}
