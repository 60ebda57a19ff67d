//! Sizes derived from a plan and a backend, and how they are printed.

use bodkin_backend::{Backend, Limits, Memory, PAGE_TOKENS};
use bodkin_model::Plan;

/// The share of free memory that checkpoints may take beside one for each request.
const CHECKPOINT_SHARE: u64 = 8;
/// The most of them, as a multiple of the slots that requests need.
const MORE_CHECKPOINTS: usize = 3;
/// The most bytes of a layer's state slots with them: every GPU can bind as much.
const MOST_SLOT_BYTES: usize = 128 << 20;

/// All bytes of a loaded model.
pub fn total_bytes(memory: &Memory) -> u64 {
    memory.weight_bytes + memory.state_bytes + memory.scratch_bytes
}

/// Says where the experts of a model are, if they do not all have room.
pub(crate) fn experts_note(memory: &Memory) -> Option<String> {
    let slots = memory.expert_slots?;
    let [cached, host] = [memory.cached_expert_bytes, memory.host_expert_bytes].map(human_bytes);
    Some(match (memory.maps_experts, memory.host_expert_bytes) {
        (_, 0) => format!(
            "experts: {cached} in memory, {slots} of each layer, which needs at least 1; the \
             others are read from the file when they are needed"
        ),
        (true, _) => format!(
            "experts: {cached} on the device, up to {host} in memory of the host; the others are \
             read from the file when they are needed"
        ),
        (false, _) => {
            format!("experts: {host} in memory of the host, {cached} of them also on the device")
        }
    })
}

/// Whether a model takes the larger of two steps, by what it holds with either: each step of a
/// prompt reads most of the experts that have no slot. Decode needs the slots, so the scratch of
/// the larger step may not take half of them.
pub(crate) fn takes_larger_steps(small: &Memory, large: &Memory, available: u64) -> bool {
    let slots = small.expert_slots.zip(large.expert_slots);
    slots.is_some_and(|(small, large)| 2 * large > small) && total_bytes(large) <= available
}

/// Slots for checkpoints of recurrent state beside those of `limits`, for a model that leaves
/// `free` bytes. A turn of a conversation makes two checkpoints, at the end of its prompt and of
/// its answer, and the next turn goes on from one of them, unless those of others have evicted it.
pub(crate) fn more_checkpoints(
    plan: &Plan,
    backend: &dyn Backend,
    limits: &Limits,
    free: u64,
) -> usize {
    let layers = plan.states.iter().map(|state| size_of::<f32>() * state.elements());
    let layer_bytes = layers.max().unwrap_or(0);
    more_slots(limits.state_slots, layer_bytes, recurrent_bytes(plan, backend), free)
}

/// The same from the slots that requests need, and the bytes of a slot in the largest layer and in
/// all of them.
fn more_slots(needed: usize, layer_bytes: usize, slot_bytes: u64, free: u64) -> usize {
    let bindable = (MOST_SLOT_BYTES / layer_bytes.max(1)).saturating_sub(needed);
    let affordable = free / CHECKPOINT_SHARE / slot_bytes.max(1);
    let more = bindable.min(MORE_CHECKPOINTS * needed);
    more.min(usize::try_from(affordable).unwrap_or(usize::MAX))
}

/// KV-cache bytes of a sequence of `tokens` tokens, which its last token reads.
pub fn kv_bytes(plan: &Plan, backend: &dyn Backend, tokens: usize) -> u64 {
    let elements = |tokens| u128::from(plan.kv_elements(tokens));
    // The backend chooses the KV type, so the bytes of one page give the bytes per element.
    let page_elements = elements(1) * PAGE_TOKENS as u128;
    let bytes = elements(tokens) * u128::from(state_bytes(plan, backend, 0));
    // A plan without attention has no KV cache.
    bytes.checked_div(page_elements).unwrap_or(0) as u64
}

/// Bytes of one recurrent state slot, which every token of a sequence reads.
pub fn recurrent_bytes(plan: &Plan, backend: &dyn Backend) -> u64 {
    state_bytes(plan, backend, 1) - state_bytes(plan, backend, 0)
}

/// Bytes of one page for each window, and of `state_slots` recurrent state slots.
fn state_bytes(plan: &Plan, backend: &dyn Backend, state_slots: usize) -> u64 {
    let pages = vec![1; plan.windows().len()];
    backend.memory(plan, &Limits { tokens: 1, outputs: 1, pages, state_slots }).state_bytes
}

/// A number of bytes for people, in decimal units: `98.36 MB`.
pub fn human_bytes(bytes: u64) -> String {
    const UNITS: [&str; 6] = ["kB", "MB", "GB", "TB", "PB", "EB"];
    if bytes < 1000 {
        return format!("{bytes} B");
    }
    let (mut value, mut unit) = (bytes as f64 / 1e3, 0);
    while value >= 1e3 && unit + 1 < UNITS.len() {
        value /= 1e3;
        unit += 1;
    }
    format!("{value:.2} {}", UNITS[unit])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checkpoints_take_a_share_of_free_memory() {
        let (layer, slot) = (1 << 20, 20 << 20);
        assert_eq!(more_slots(2, layer, slot, u64::MAX), 6);
        assert_eq!(more_slots(2, layer, slot, 5 * CHECKPOINT_SHARE * slot), 5);
        assert_eq!(more_slots(2, layer, slot, 0), 0);
        // 128 MiB of a layer.
        assert_eq!(more_slots(100, layer, slot, u64::MAX), 28);
        assert_eq!(more_slots(200, layer, slot, u64::MAX), 0);
        assert_eq!(more_slots(0, 0, 0, u64::MAX), 0, "no states");
    }

    #[test]
    fn larger_steps_leave_slots_for_decode() {
        let memory = |scratch_bytes, expert_slots| Memory {
            scratch_bytes,
            expert_slots,
            ..Memory::default()
        };
        let small = memory(10, Some(8));
        let takes = |large| takes_larger_steps(&small, &large, 40);
        assert!(takes(memory(40, Some(5))));
        assert!(!takes(memory(40, Some(4))), "half of the slots");
        assert!(!takes(memory(41, Some(8))), "no room");
        assert!(!takes_larger_steps(&memory(10, None), &memory(40, Some(5)), 40), "all fit");
    }
}
