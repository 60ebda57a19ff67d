//! What the experts of a model take on devices. This file must not know the driver.

use bodkin_backend::ExpertBytes;
use bodkin_model::{Plan, WeightId};

use crate::constants::SPARE_SLOTS;
use crate::lower::{shapes, sharded};
use crate::packed::Shard;

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

/// What the experts of a plan take on the device of a shard.
pub(crate) fn expert_bytes(plan: &Plan, shard: Shard) -> ExpertBytes {
    let (shapes, sharded) = (shapes(plan), sharded(plan, shard.count));
    let routed = plan.routed_weights();
    let shapes = routed.iter().flatten().filter_map(|&WeightId(id)| {
        let shape = shapes[id]?;
        Some(if sharded[id].is_some() { shape.shard(shard) } else { shape })
    });
    shapes.fold(ExpertBytes::default(), |sum, shape| ExpertBytes {
        experts: sum.experts.max(shape.matrices),
        slot: sum.slot + shape.expert_bytes() as u64,
        all: sum.all + shape.packed_bytes() as u64,
    })
}
