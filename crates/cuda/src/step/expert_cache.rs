//! The update of the cache of experts, for the experts that the step's rows have chosen.

use bodkin_backend::Result;

use super::{Step, THREADS};
use crate::parameters::expert_cache as p;

/// Blocks of an update for each multiprocessor.
const BLOCKS: usize = 2;

impl Step<'_> {
    /// Gives slots to the experts that a routing has chosen, if they are cached, before they are
    /// read: each then crosses the bus once, however many rows have chosen it. Those that are in
    /// the file come to the host first.
    pub(super) fn cache_chosen_experts(&self, routing: usize) -> Result<()> {
        match self.at.expert_cache.get(routing) {
            Some(&Some(layer)) => {
                if let Some(mapped) = self.mapped_experts {
                    self.device.label("experts from the file");
                    let request = mapped.request(routing, layer.address);
                    let kernel = self.kernels.request_experts;
                    // SAFETY: the addresses are those of the loaded model.
                    unsafe { self.device.launch(kernel, [1; 3], THREADS, 0, &request) }?;
                }
                // Rows that choose the same expert would each read it over the bus.
                let most_streamed = if self.size.tokens > 1 { layer.most_streamed } else { 0 };
                let parameters =
                    p::UpdateExpertCache { layers: layer.address, uses_spares: 0, most_streamed };
                self.update(1, layer.experts, &parameters)
            }
            _ => Ok(()),
        }
    }

    /// Gives slots to the experts that the persistent kernel has chosen, for the next step.
    pub(crate) fn update_expert_cache(&self) -> Result<()> {
        self.update_all(1)
    }

    /// Before the persistent kernel: lets the tables have the addresses on the host again of
    /// experts that a step of several rows has streamed.
    pub(crate) fn forget_streamed_experts(&self) -> Result<()> {
        self.update_all(0)
    }

    fn update_all(&self, uses_spares: u32) -> Result<()> {
        let layers = || self.at.expert_cache.iter().flatten();
        let Some(first) = layers().next() else { return Ok(()) };
        let experts = layers().map(|layer| layer.experts).max().unwrap_or(0);
        let parameters =
            p::UpdateExpertCache { layers: first.address, uses_spares, most_streamed: 0 };
        self.update(layers().count(), experts, &parameters)
    }

    /// Updates `count` layers, one behind the other in the list, none with more experts than this.
    fn update(
        &self,
        count: usize,
        experts: usize,
        parameters: &p::UpdateExpertCache,
    ) -> Result<()> {
        self.device.label("expert cache");
        let blocks = (BLOCKS * self.device.processors as usize).div_ceil(count);
        let shared = 4 * size_of::<u32>() * experts;
        // SAFETY: the list has these layers, whose addresses are those of the loaded model.
        unsafe {
            let kernel = self.kernels.update_expert_cache;
            self.device.launch(kernel, [blocks, count, 1], THREADS, shared, parameters)
        }
    }
}
