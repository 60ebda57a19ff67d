//! What the experts of a model take on devices. This file must not know the driver.

use bodkin_backend::ExpertBytes;
use bodkin_model::{Plan, WeightId};

use crate::constants::SPARE_SLOTS;
use crate::lower::{shapes, sharded};
use crate::mapped_experts::slot_bytes;
use crate::packed::{Shape, Shard};

/// How many experts have room in memory.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ExpertSlots {
    /// Of each layer, on the device; none if all experts are there.
    pub(crate) on_device: Option<usize>,
    /// Of all layers together, in memory of the host; none if it holds all cached experts.
    pub(crate) on_host: Option<usize>,
}

/// Whether each weight of a plan can be cached.
pub(crate) fn can_be_cached(plan: &Plan) -> Vec<bool> {
    let mut can_be = vec![false; plan.weights.len()];
    plan.routed_weights().iter().flatten().for_each(|id| can_be[id.0] = true);
    can_be
}

/// How many of a layer's slots are spare ones, in which a step of one row leaves new experts.
pub(crate) fn spare_slots(slots: usize) -> usize {
    (slots / 4).min(SPARE_SLOTS)
}

/// The shapes of the routed weights of each layer, on the device of a shard.
fn routed_shapes(plan: &Plan, shard: Shard) -> Vec<Vec<Shape>> {
    let (shapes, sharded) = (shapes(plan), sharded(plan, shard.count));
    let shape = |&WeightId(id): &WeightId| {
        let shape = shapes[id]?;
        Some(if sharded[id].is_some() { shape.shard(shard) } else { shape })
    };
    plan.routed_weights().iter().map(|ids| ids.iter().filter_map(shape).collect()).collect()
}

/// What the experts of a plan take on the device of a shard.
pub(crate) fn expert_bytes(plan: &Plan, shard: Shard) -> ExpertBytes {
    let shapes = routed_shapes(plan, shard).into_iter().flatten();
    shapes.fold(ExpertBytes::default(), |sum, shape| ExpertBytes {
        experts: sum.experts.max(shape.matrices),
        slot: sum.slot + shape.expert_bytes() as u64,
        all: sum.all + shape.packed_bytes() as u64,
    })
}

/// The bytes of a slot in memory of the host for a mapped expert of any layer, on the device of a
/// shard.
pub(crate) fn host_slot_bytes(plan: &Plan, shard: Shard) -> usize {
    routed_shapes(plan, shard).iter().map(slot_bytes).max().unwrap_or(0)
}

/// How many of a layer's slots on the device have experts when a model is loaded: the first ones.
/// The persistent kernel needs spare ones; it runs no model whose other experts are in the file.
pub(crate) fn cached_at_first(slots: usize, are_in_file: bool) -> usize {
    if are_in_file { slots } else { slots - spare_slots(slots) }
}
