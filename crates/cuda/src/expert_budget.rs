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

/// Memory for missed experts of a layer, which steps of several rows copy to the device at once.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Streamed {
    pub(crate) experts: usize,
    /// Of one expert of any layer.
    pub(crate) expert_bytes: usize,
}

impl Streamed {
    /// Where each layer has `slots`: all that a layer can miss, but at most an eighth of the memory
    /// of slots.
    pub(crate) fn of(plan: &Plan, shard: Shard, slots: usize) -> Streamed {
        let layers = routed_shapes(plan, shard);
        let bytes = |layer: &Vec<Shape>| layer.iter().map(Shape::expert_bytes).sum::<usize>();
        let expert_bytes = layers.iter().map(bytes).max().unwrap_or(0);
        let all = layers.iter().map(bytes).sum::<usize>() * slots;
        let most = layers.iter().flatten().map(|shape| shape.matrices).max().unwrap_or(0);
        let room = (all / 8).checked_div(expert_bytes).unwrap_or(0).max(1);
        Streamed { experts: most.saturating_sub(slots).min(room), expert_bytes }
    }

    pub(crate) fn bytes(self) -> usize {
        self.experts * self.expert_bytes
    }
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
