//! How many experts of a model get slots on the devices and in memory of the host.

use bodkin_backend::ExpertStore;
use bodkin_model::Plan;

use crate::expert_budget::{ExpertSlots, Streamed, cached_at_first, expert_bytes, host_slot_bytes};
use crate::sizes::Sizes;
use crate::{Cuda, weights};

impl Cuda {
    /// The slots for experts of a model.
    pub(crate) fn expert_slots(&self, plan: &Plan, sizes: &Sizes) -> ExpertSlots {
        let on_device = self.device_slots(plan, sizes);
        let on_host = on_device.and_then(|slots| {
            let count = self.devices.len() as u64;
            let available = (self.host_memory)().map(|bytes| bytes / count);
            let all = self.shards().map(|shard| weights::bytes(plan, shard, on_device).host);
            let all = all.max().unwrap_or(0) as u64;
            let bytes = match self.expert_store {
                // Pinned memory is taken at once, and others may need some meanwhile.
                ExpertStore::Auto if available.is_none_or(|bytes| all + all / 16 <= bytes) => None,
                // The file's pages need memory too.
                ExpertStore::Auto | ExpertStore::Mmap(None) => Some(available.unwrap_or(0) / 2),
                ExpertStore::Mmap(Some(bytes)) => Some(bytes / count),
            };
            let (least, all) = self.host_slots(plan, slots);
            let slot_bytes = self.host_slot_bytes(plan).max(1) as u64;
            bytes.map(|bytes| ((bytes / slot_bytes) as usize).clamp(least, all))
        });
        ExpertSlots { on_device, on_host }
    }

    /// The fewest and the most slots for mapped experts in memory of the host: for all that a step
    /// can miss in a layer whose device has these slots, and for all of the model.
    pub(crate) fn host_slots(&self, plan: &Plan, on_device: usize) -> (usize, usize) {
        let experts = plan.routings().map(|routing| routing.experts);
        let (sum, most) = experts.fold((0, 0), |(sum, most), n| (sum + n, most.max(n)));
        let least = most.saturating_sub(cached_at_first(on_device, true)).max(1);
        (least, sum.max(least))
    }

    /// The bytes of a slot for a mapped expert in memory of the host.
    pub(crate) fn host_slot_bytes(&self, plan: &Plan) -> usize {
        self.shards().map(|shard| host_slot_bytes(plan, shard)).max().unwrap_or(0)
    }

    /// The slots for experts in each layer of a model, or none if all experts are on the device.
    fn device_slots(&self, plan: &Plan, sizes: &Sizes) -> Option<usize> {
        let bytes = |shard| expert_bytes(plan, shard);
        let experts = self.shards().map(bytes).max_by_key(|experts| experts.slot)?;
        let weights = self.shards().map(|shard| weights::bytes(plan, shard, None).device as u64);
        let model = weights.max().unwrap_or(0) + sizes.state() + sizes.scratch();
        let devices = self.devices.len() as u64;
        let [free, limit] = [self.free_memory(), self.memory_limit];
        let of_each = |bytes: Option<u64>| bytes.map(|bytes| bytes / devices);
        let limits = (of_each(free), of_each(limit));
        let missed = |slots: usize| self.streamed(plan, slots).bytes() as u64;
        experts.slots_on_device(self.expert_budget, model, limits, missed)
    }

    /// Memory for missed experts where each layer has these slots.
    pub(crate) fn streamed(&self, plan: &Plan, slots: usize) -> Streamed {
        let streamed = self.shards().map(|shard| Streamed::of(plan, shard, slots));
        streamed.max_by_key(|streamed| streamed.bytes()).expect("a device")
    }
}
