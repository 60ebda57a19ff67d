//! Recurrent state: the state slots of all sequences, for each convolution, scan and
//! delta rule of the plan.

use bodkin_backend::Transfer;
use bodkin_model::{Plan, RecurrentState};

use crate::ops::{delta_rule, recurrent::head_len};
use crate::shared::Shared;

/// Elements of a state in one slot.
pub(crate) fn slot_len(state: &RecurrentState) -> usize {
    match state {
        RecurrentState::Conv { .. } | RecurrentState::Compression(_) => state.elements(),
        RecurrentState::Scan(s) => s.heads * head_len(s),
        RecurrentState::DeltaRule(r) => {
            r.value_heads * delta_rule::state_len(r.head_dim, r.head_dim)
        }
    }
}

/// Bytes of `slots` slots of all states.
pub(crate) fn bytes(plan: &Plan, slots: usize) -> u64 {
    plan.states.iter().map(|state| 4 * (slots * slot_len(state)) as u64).sum()
}

/// The slots of all states: the memory, and the views of the threads.
pub(crate) struct States {
    pub(crate) views: Vec<Shared<f32>>,
    _owners: Vec<Vec<f32>>,
}

impl States {
    pub(crate) fn new(plan: &Plan, slots: usize) -> States {
        let zeros = |state: &RecurrentState| vec![0.0; slots * slot_len(state)];
        let mut owners: Vec<Vec<f32>> = plan.states.iter().map(zeros).collect();
        let views = owners.iter_mut().map(|owner| Shared::new(owner)).collect();
        States { views, _owners: owners }
    }

    /// Copies a slot of all states. Returns its bytes.
    pub(crate) fn transfer(&mut self, plan: &Plan, transfer: &mut Transfer<'_>) -> usize {
        let views = plan.states.iter().zip(&self.views);
        views
            .map(|(state, view)| {
                // SAFETY: no step is running, and only steps access the views.
                let memory = unsafe { view.bytes_mut() };
                transfer.run_region(memory, size_of::<f32>() * slot_len(state))
            })
            .sum()
    }
}
