//! The update of the cache of experts, for the experts that the step's rows have chosen.

use bodkin_backend::Result;

use super::{Step, THREADS};
use crate::expert_cache::CachedLayer;
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
                self.update(layer, 1, false)
            }
            _ => Ok(()),
        }
    }

    /// Gives slots to the experts that the persistent kernel has chosen, for the next step.
    pub(crate) fn update_expert_cache(&self) -> Result<()> {
        let layers = || self.at.expert_cache.iter().flatten();
        let first = layers().next().map(|first| first.address);
        let Some((address, experts)) = first.zip(layers().map(|layer| layer.experts).max()) else {
            return Ok(());
        };
        self.update(CachedLayer { address, experts }, layers().count(), true)
    }

    /// Updates `count` layers, one behind the other in the list, none with more experts than this.
    fn update(
        &self,
        CachedLayer { address, experts }: CachedLayer,
        count: usize,
        uses_spares: bool,
    ) -> Result<()> {
        self.device.label("expert cache");
        let blocks = (BLOCKS * self.device.processors as usize).div_ceil(count);
        let shared = 3 * size_of::<u32>() * experts;
        let uses_spares = u32::from(uses_spares);
        let parameters = p::UpdateExpertCache { layers: address, uses_spares, padding: 0 };
        // SAFETY: the list has these layers, whose addresses are those of the loaded model.
        unsafe {
            let kernel = self.kernels.update_expert_cache;
            self.device.launch(kernel, [blocks, count, 1], THREADS, shared, &parameters)
        }
    }
}
