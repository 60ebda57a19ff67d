//! The cache of experts: where not all experts fit on the device, their tiles are in memory of the
//! host, and each layer has slots for some of them on the device (`kernels/expert_cache.cu`).

use std::sync::Arc;

use bodkin_backend::{ExpertCacheStats, Result};
use bodkin_model::{Op, Plan, WeightId};

use crate::constants::{CACHE_COUNTERS, MATRICES, MAX_FILLS, NO_SLOT};
use crate::driver::{Device, Memory};
use crate::lower::{Program, shapes, sharded};
use crate::packed::Shard;
use crate::parameters::expert_cache as p;
use crate::weights::Placed;

/// How much memory of the device the experts of a model may take.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum ExpertBudget {
    /// All of them if they fit, or else what the rest of the model leaves free.
    #[default]
    Auto,
    /// At most so many bytes on each device, but at least one expert of each layer.
    Bytes(u64),
    /// At most this share of the experts of each layer, but at least one.
    Share(f64),
}

/// The weights of the experts that each routing of a plan chooses from.
fn routed_weights(plan: &Plan) -> Vec<Vec<WeightId>> {
    let is_route = |i: &usize| matches!(plan.ops[*i], Op::Route { .. });
    let weights = |i: usize| {
        let weights = plan.ops.iter().filter_map(|op| match op {
            Op::ExpertLinear { weight, route: Some(route), .. } if route.0 == i => Some(*weight),
            _ => None,
        });
        weights.collect()
    };
    (0..plan.ops.len()).filter(is_route).map(weights).collect()
}

/// Whether each weight of a plan can be cached.
pub(crate) fn can_be_cached(plan: &Plan) -> Vec<bool> {
    let mut can_be = vec![false; plan.weights.len()];
    routed_weights(plan).iter().flatten().for_each(|id| can_be[id.0] = true);
    can_be
}

/// What the experts of a plan take on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ExpertBytes {
    /// Experts of the layer that has most.
    pub(crate) experts: usize,
    /// Of one expert in each layer.
    pub(crate) slot: u64,
}

impl ExpertBytes {
    pub(crate) fn of(plan: &Plan, shard: Shard) -> ExpertBytes {
        let (shapes, sharded) = (shapes(plan), sharded(plan, shard.count));
        let routed = routed_weights(plan);
        let shapes = routed.iter().flatten().filter_map(|&WeightId(id)| {
            let shape = shapes[id]?;
            Some(if sharded[id].is_some() { shape.shard(shard) } else { shape })
        });
        let none = ExpertBytes { experts: 0, slot: 0 };
        shapes.fold(none, |sum, shape| ExpertBytes {
            experts: sum.experts.max(shape.matrices),
            slot: sum.slot + shape.expert_bytes() as u64,
        })
    }

    /// The slots of each layer, or none if all experts stay on the device. `free` are the bytes
    /// that the rest of the model leaves.
    pub(crate) fn slots(self, budget: ExpertBudget, free: u64) -> Option<usize> {
        let of = |bytes: u64| bytes.checked_div(self.slot).unwrap_or(u64::MAX) as usize;
        let slots = match budget {
            // Less than one expert of each layer is an error of memory that says what is missing.
            ExpertBudget::Auto => Some(of(free)).filter(|&slots| slots > 0)?,
            ExpertBudget::Bytes(bytes) => of(bytes).max(1),
            ExpertBudget::Share(share) => ((share * self.experts as f64) as usize).max(1),
        };
        Some(slots).filter(|&slots| slots < self.experts)
    }
}

/// Words of a layer's cache of `experts` experts.
struct LayerWords {
    last_counts: usize,
    scores: usize,
    slots: usize,
    fills: usize,
    counters: usize,
    all: usize,
}

impl LayerWords {
    fn of(experts: usize) -> LayerWords {
        let experts = experts.next_multiple_of(2);
        let counters = 3 * experts + MAX_FILLS.next_multiple_of(2);
        LayerWords {
            last_counts: 0,
            scores: experts,
            slots: 2 * experts,
            fills: 3 * experts,
            counters,
            all: counters + 2 * CACHE_COUNTERS,
        }
    }
}

/// Bytes of the cache besides tiles.
pub(crate) fn table_bytes(program: &Program) -> u64 {
    let words = program.routings.iter().map(|&experts| 4 * LayerWords::of(experts).all);
    let layers = size_of::<p::CachedLayer>() * program.routings.len();
    (words.sum::<usize>() + layers) as u64
}

/// The cache of a loaded model.
pub(crate) struct ExpertCache {
    /// The list of layers on the device.
    pub(crate) layers: Memory,
    /// Counters of each routing; none of those whose experts are all on the device.
    counters: Vec<Option<(u64, usize)>>,
    pub(crate) count: usize,
    _state: Memory,
}

impl ExpertCache {
    /// Of the weights that have slots, if there are any. The first experts are in the slots.
    pub(crate) fn new(
        device: &Arc<Device>,
        plan: &Plan,
        program: &Program,
        placed: &[Placed],
        counts: &[u64],
    ) -> Result<Option<ExpertCache>> {
        let words = program.routings.iter().map(|&experts| LayerWords::of(experts).all);
        let state = Memory::zeroed(device, 4 * words.sum::<usize>(), "the cache of experts")?;
        let (mut layers, mut counters) = (Vec::new(), Vec::new());
        let mut next = state.address;
        for (routing, (weights, &counts)) in routed_weights(plan).iter().zip(counts).enumerate() {
            let experts = program.routings[routing];
            let words = LayerWords::of(experts);
            let at = |word: usize| next + 4 * word as u64;
            let cached = weights.iter().filter_map(|id| placed[id.0].cached.as_ref());
            let cached: Vec<_> = cached.collect();
            counters.push(cached.first().map(|first| (at(words.counters), first.slots)));
            let Some(first) = cached.first() else { continue };
            let slots: Vec<u32> =
                (0..experts).map(|e| if e < first.slots { e as u32 } else { NO_SLOT }).collect();
            // SAFETY: the layer has a slot number for each expert; the copy has ended after
            // `finish`.
            unsafe { device.send(at(words.slots), &slots) }.and_then(|()| device.finish())?;
            assert!(cached.len() <= MATRICES, "an expert has at most {MATRICES} matrices");
            let mut layer = p::CachedLayer {
                counts,
                last_counts: at(words.last_counts),
                scores: at(words.scores),
                slots: at(words.slots),
                fills: at(words.fills),
                counters: at(words.counters),
                experts: experts as u32,
                weight_count: cached.len() as u32,
                ..p::CachedLayer::default()
            };
            layer.weights.iter_mut().zip(&cached).for_each(|(to, from)| *to = from.parameters());
            layers.push(layer);
            next += 4 * words.all as u64;
        }
        if layers.is_empty() {
            return Ok(None);
        }
        let count = layers.len();
        let bytes = size_of::<p::CachedLayer>() * count;
        let list = Memory::zeroed(device, bytes, "the cache of experts")?;
        // SAFETY: the allocation has this size, and the copy has ended after `finish`.
        unsafe { device.send(list.address, &layers) }.and_then(|()| device.finish())?;
        Ok(Some(ExpertCache { layers: list, counters, count, _state: state }))
    }

    /// What the cache of a routing has done.
    pub(crate) fn stats(
        &self,
        device: &Device,
        routing: usize,
    ) -> Result<Option<ExpertCacheStats>> {
        let Some((address, slots)) = self.counters[routing] else { return Ok(None) };
        let mut counters = [0u64; CACHE_COUNTERS];
        // SAFETY: a cache has so many counters; the copy is waited for.
        unsafe { device.receive(&mut counters, address) }?;
        device.finish()?;
        let [hits, misses, fills, _] = counters;
        Ok(Some(ExpertCacheStats { slots, hits, misses, fills }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn budgets_become_slots() {
        let bytes = ExpertBytes { experts: 8, slot: 100 };
        for (budget, free, slots) in [
            (ExpertBudget::Auto, 900, None),
            (ExpertBudget::Auto, 800, None),
            (ExpertBudget::Auto, 799, Some(7)),
            (ExpertBudget::Auto, 100, Some(1)),
            (ExpertBudget::Auto, 99, None),
            (ExpertBudget::Bytes(0), 900, Some(1)),
            (ExpertBudget::Bytes(450), 0, Some(4)),
            (ExpertBudget::Bytes(900), 0, None),
            (ExpertBudget::Share(0.0), 0, Some(1)),
            (ExpertBudget::Share(0.5), 0, Some(4)),
            (ExpertBudget::Share(1.0), 0, None),
        ] {
            assert_eq!(bytes.slots(budget, free), slots, "{budget:?} with {free}");
        }
        let none = ExpertBytes { experts: 0, slot: 0 };
        assert_eq!(none.slots(ExpertBudget::Auto, 0), None);
        assert_eq!(none.slots(ExpertBudget::Share(0.5), 0), None);
    }
}
