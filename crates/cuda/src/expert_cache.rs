//! The cache of experts: where not all experts fit on the device, their tiles are in memory of the
//! host, and each layer has slots for some of them on the device (`kernels/expert_cache.cu`).

use std::sync::Arc;

use bodkin_backend::{Error, ExpertCacheStats, Result};
use bodkin_model::Plan;

use crate::constants::{CACHE_COUNTERS, MATRICES, MAX_FILLS, NO_SLOT};
use crate::driver::{Device, Memory};
use crate::lower::Program;
use crate::parameters::expert_cache as p;
use crate::weights::Placed;

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
    /// The list of layers on the device, and its length.
    layers: Memory,
    /// Counters of each routing; none of those whose experts are all on the device.
    counters: Vec<Option<(u64, usize)>>,
    count: usize,
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
        if placed.iter().all(|weight| weight.cached.is_none()) {
            return Ok(None);
        }
        let words = program.routings.iter().map(|&experts| LayerWords::of(experts).all);
        let state = Memory::zeroed(device, 4 * words.sum::<usize>(), "the cache of experts")?;
        let (mut layers, mut counters) = (Vec::new(), Vec::new());
        let mut next = state.address;
        for (routing, (weights, &counts)) in plan.routed_weights().iter().zip(counts).enumerate() {
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
            if cached.len() > MATRICES {
                return Err(Error::Config(format!(
                    "cuda: expected at most {MATRICES} matrices of a cached expert, found {}",
                    cached.len()
                )));
            }
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
        let count = layers.len();
        let bytes = size_of::<p::CachedLayer>() * count;
        let list = Memory::zeroed(device, bytes, "the cache of experts")?;
        // SAFETY: the allocation has this size, and the copy has ended after `finish`.
        unsafe { device.send(list.address, &layers) }.and_then(|()| device.finish())?;
        Ok(Some(ExpertCache { layers: list, counters, count, _state: state }))
    }

    /// The address of the list of layers, and its length.
    pub(crate) fn list(&self) -> (u64, usize) {
        (self.layers.address, self.count)
    }

    /// What the cache of a routing has done.
    pub(crate) fn stats(
        &self,
        device: &Device,
        routing: usize,
    ) -> Result<Option<ExpertCacheStats>> {
        let Some((address, slots)) = self.counters[routing] else { return Ok(None) };
        let mut counters = [0u64; CACHE_COUNTERS];
        // SAFETY: a cache has this number of counters; the copy is waited for.
        unsafe { device.receive(&mut counters, address) }?;
        device.finish()?;
        let [hits, misses, fills, _] = counters;
        Ok(Some(ExpertCacheStats { slots, hits, misses, fills }))
    }
}
