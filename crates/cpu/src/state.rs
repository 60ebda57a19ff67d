//! Recurrent state: one slot per sequence for each convolution and scan of the plan.

use bodkin_backend::Transfer;
use bodkin_model::{Plan, StateSlot};

use crate::ops::recurrent::head_len;
use crate::shared::Shared;

/// Elements of one slot of a state in memory.
pub(crate) fn slot_len(slot: &StateSlot) -> usize {
    match slot {
        StateSlot::Conv { .. } => slot.elements(),
        StateSlot::Scan(s) => s.heads * head_len(s),
    }
}

/// Bytes of `slots` slots of all states.
pub(crate) fn bytes(plan: &Plan, slots: usize) -> u64 {
    plan.states.iter().map(|slot| 4 * (slots * slot_len(slot)) as u64).sum()
}

/// The slots of all states: the memory, and the views of the threads.
pub(crate) struct States {
    pub(crate) views: Vec<Shared<f32>>,
    _owners: Vec<Vec<f32>>,
}

impl States {
    pub(crate) fn new(plan: &Plan, slots: usize) -> States {
        let zeros = |slot: &StateSlot| vec![0.0; slots * slot_len(slot)];
        let mut owners: Vec<Vec<f32>> = plan.states.iter().map(zeros).collect();
        let views = owners.iter_mut().map(|owner| Shared::new(owner)).collect();
        States { views, _owners: owners }
    }

    /// Copies a slot of all states. Returns its bytes.
    pub(crate) fn transfer(&mut self, plan: &Plan, transfer: &mut Transfer<'_>) -> usize {
        let views = plan.states.iter().zip(&self.views);
        views
            .map(|(slot, view)| {
                // SAFETY: no step is running, and only steps access the views.
                let memory = unsafe { view.bytes_mut() };
                transfer.run_region(memory, size_of::<f32>() * slot_len(slot))
            })
            .sum()
    }
}
