//! How many experts of a model the device has room for. This file must not know the device.

use bodkin_model::{Plan, WeightId};

use crate::constants::SPARE_SLOTS;
use crate::lower::{shapes, sharded};
use crate::packed::Shard;

/// How much memory of the device the experts of a model may take.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum ExpertBudget {
    /// All of them if they fit, or else what the rest of the model leaves free.
    #[default]
    Auto,
    /// At most this number of bytes on each device, but at least one expert of each layer.
    Bytes(u64),
    /// At most this share of the experts of each layer, but at least one.
    Share(f64),
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
        let routed = plan.routed_weights();
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
            // If not even one expert of each layer fits, the error says what is missing for that.
            ExpertBudget::Auto => of(free).max(1),
            ExpertBudget::Bytes(bytes) => of(bytes).max(1),
            ExpertBudget::Share(share) => ((share * self.experts as f64) as usize).max(1),
        };
        Some(slots).filter(|&slots| slots < self.experts)
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
            (ExpertBudget::Auto, 99, Some(1)),
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
