//! The cache of experts: where not all experts fit on the device, their tiles are in memory of the
//! host, or of some of them there, and each layer has slots for some on the device
//! (`kernels/expert_cache.cu`).

use std::sync::Arc;

use bodkin_backend::{Error, ExpertCacheStats, Result};
use bodkin_model::Plan;
use bytemuck::Pod;

use crate::constants::{CACHE_COUNTERS, MATRICES, NO_SLOT, SPARE_SLOTS};
use crate::driver::{Device, Memory};
use crate::expert_budget::{ExpertSlots, Streamed, cached_at_first};
use crate::lower::Program;
use crate::mapped_experts::MappedExperts;
use crate::packed::{Shape, Shard};
use crate::parameters::expert_cache as p;
use crate::weights::{Cached, Placed};

/// Words of a layer's cache of `experts` experts.
struct LayerWords {
    last_counts: usize,
    scores: usize,
    slots: usize,
    spares: usize,
    counters: usize,
    /// Addresses of the tiles of each weight's experts in memory of the host, of two words each.
    host: usize,
    finished_blocks: usize,
    all: usize,
}

impl LayerWords {
    fn of(experts: usize) -> LayerWords {
        // Counters are of two words each.
        let experts = experts.next_multiple_of(2);
        let spares = 3 * experts;
        let counters = spares + SPARE_SLOTS.next_multiple_of(2);
        let host = counters + 2 * CACHE_COUNTERS;
        let finished_blocks = host + 2 * MATRICES * experts;
        LayerWords {
            last_counts: 0,
            scores: experts,
            slots: 2 * experts,
            spares,
            counters,
            host,
            finished_blocks,
            all: (finished_blocks + 1).next_multiple_of(2),
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
    layers: Memory,
    /// Of each routing; none of those whose experts are all on the device.
    routings: Vec<Option<CachedRouting>>,
    /// If the experts stay in the file.
    pub(crate) mapped: Option<MappedExperts>,
    /// Missed experts of a layer that steps of several rows copy.
    most_streamed: u32,
    _memory: [Memory; 2],
}

/// A layer that is in the list.
struct CachedRouting {
    index: usize,
    experts: usize,
    slots: usize,
    /// The address of its counters.
    counters: u64,
}

/// A layer of the list on the device, which has others behind it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CachedLayer {
    pub(crate) address: u64,
    pub(crate) experts: usize,
    /// Missed ones that steps of several rows copy.
    pub(crate) most_streamed: u32,
}

impl ExpertCache {
    /// Of the weights that have slots, if there are any. The first experts are in the slots.
    pub(crate) fn new(
        device: &Arc<Device>,
        (plan, program): (&Plan, &Program),
        (shard, slots): (Shard, ExpertSlots),
        (placed, mapped): (&[Placed], Option<MappedExperts>),
        counts: &[u64],
    ) -> Result<Option<ExpertCache>> {
        let Some(slots) = slots.on_device else { return Ok(None) };
        let streamed = Streamed::of(plan, shard, slots);
        let words = program.routings.iter().map(|&experts| LayerWords::of(experts).all);
        let state = Memory::zeroed(device, 4 * words.sum::<usize>(), "the cache of experts")?;
        let streamed_memory = Memory::zeroed(device, streamed.bytes(), "experts for one step")?;
        let (mut layers, mut routings) = (Vec::new(), Vec::new());
        let mut next = state.address;
        for (routing, (weights, &counts)) in plan.routed_weights().iter().zip(counts).enumerate() {
            let experts = program.routings[routing];
            let words = LayerWords::of(experts);
            let at = |word: usize| next + 4 * word as u64;
            let cached = weights.iter().map(|id| &placed[id.0]);
            let cached: Vec<_> =
                cached.filter_map(|placed| Some((placed, placed.cached.as_ref()?))).collect();
            let (index, counters) = (layers.len(), at(words.counters));
            routings.push(cached.first().map(|(_, first)| {
                let slots = first.slots;
                CachedRouting { index, experts, slots, counters }
            }));
            let Some((_, first)) = cached.first() else { continue };
            let (slots, resident) = (first.slots, cached_at_first(first.slots, mapped.is_some()));
            let number = |slot: usize, end: usize| if slot < end { slot as u32 } else { NO_SLOT };
            let of_experts: Vec<u32> = (0..experts).map(|slot| number(slot, resident)).collect();
            let spares: Vec<u32> =
                (resident..resident + SPARE_SLOTS).map(|slot| number(slot, slots)).collect();
            send(device, at(words.slots), &of_experts)?;
            send(device, at(words.spares), &spares)?;
            if cached.len() > MATRICES {
                return Err(too_many_matrices(cached.len()));
            }
            let mut layer = p::CachedLayer {
                counts,
                last_counts: at(words.last_counts),
                scores: at(words.scores),
                slots: at(words.slots),
                spares: at(words.spares),
                counters: at(words.counters),
                finished_blocks: at(words.finished_blocks),
                experts: experts as u32,
                weight_count: cached.len() as u32,
                ..p::CachedLayer::default()
            };
            let mut streamed_tiles = streamed_memory.address;
            for (i, (placed, cached)) in cached.into_iter().enumerate() {
                let table = mapped.as_ref().map(|mapped| mapped.table(routing, i));
                let host = table.unwrap_or_else(|| at(words.host + 2 * i * experts));
                if table.is_none() {
                    send_host_addresses(device, host, cached.host, &placed.shape)?;
                }
                let addresses = (host, streamed_tiles);
                layer.weights[i] = cached_weight(placed, cached, addresses, mapped.is_some());
                streamed_tiles += (streamed.experts * placed.shape.expert_bytes()) as u64;
            }
            layers.push(layer);
            next += 4 * words.all as u64;
        }
        let bytes = size_of::<p::CachedLayer>() * layers.len();
        let list = Memory::zeroed(device, bytes, "the cache of experts")?;
        send(device, list.address, &layers)?;
        let (most_streamed, _memory) = (streamed.experts as u32, [state, streamed_memory]);
        Ok(Some(ExpertCache { layers: list, routings, mapped, most_streamed, _memory }))
    }

    /// The layer of each routing whose experts are cached.
    pub(crate) fn layers(&self) -> Vec<Option<CachedLayer>> {
        let layer = |routing: &CachedRouting| CachedLayer {
            address: self.layers.address + (size_of::<p::CachedLayer>() * routing.index) as u64,
            experts: routing.experts,
            most_streamed: self.most_streamed,
        };
        self.routings.iter().map(|routing| routing.as_ref().map(layer)).collect()
    }

    /// What the cache of a routing has done.
    pub(crate) fn stats(
        &self,
        device: &Device,
        routing: usize,
    ) -> Result<Option<ExpertCacheStats>> {
        let reads = self.mapped.as_ref().map_or(0, |mapped| mapped.reads(routing));
        let Some(routing) = &self.routings[routing] else { return Ok(None) };
        let mut counters = [0u64; CACHE_COUNTERS];
        // SAFETY: a cache has this number of counters; the copy is waited for.
        unsafe { device.copy_to_host(&mut counters, routing.counters) }?;
        device.synchronize()?;
        let [hits, misses, fills] = counters;
        Ok(Some(ExpertCacheStats {
            slots: routing.slots,
            hits,
            misses,
            fills,
            reads,
            predicted: 0,
        }))
    }
}

fn too_many_matrices(found: usize) -> Error {
    let expected = format!("at most {MATRICES} matrices of a cached expert");
    Error::Config(format!("cuda: expected {expected}, found {found}"))
}

/// Sends the addresses of a weight's experts, which lie one behind the other in memory of the host,
/// to a table.
fn send_host_addresses(device: &Device, table: u64, first: u64, shape: &Shape) -> Result<()> {
    let address = |expert: usize| first + (expert * shape.expert_bytes()) as u64;
    let addresses: Vec<u64> = (0..shape.matrices).map(address).collect();
    send(device, table, &addresses)
}

/// Copies a part of the cache's tables to its place, which has room for it.
fn send<T: Pod>(device: &Device, to: u64, part: &[T]) -> Result<()> {
    // SAFETY: the tables were allocated for all of their parts, and the copy is waited for.
    unsafe { device.copy_to_device(to, part) }?;
    device.synchronize()
}

/// A weight as the kernels take it, with the table of addresses in memory of the host, and the
/// memory for experts of one step.
fn cached_weight(
    placed: &Placed,
    cached: &Cached,
    (host, streamed_tiles): (u64, u64),
    is_mapped: bool,
) -> p::CachedWeight {
    let exponent_bytes = placed.shape.expert_exponents() as u64;
    p::CachedWeight {
        table: cached.table,
        host,
        slots: cached.device,
        streamed_tiles,
        expert_bytes: placed.shape.expert_bytes() as u64,
        exponents: placed.exponents,
        exponent_bytes: if is_mapped { exponent_bytes } else { 0 },
    }
}
