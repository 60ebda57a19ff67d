//! The update of the cache of experts behind a step.

use bodkin_backend::Result;

use super::{Step, THREADS};
use crate::parameters::expert_cache as p;

/// Blocks of all layers that copy experts, for each multiprocessor.
const FILL_BLOCKS: usize = 4;

impl Step<'_> {
    /// Gives slots to the experts that the step used, if the model's experts are cached.
    pub(crate) fn update_expert_cache(&self) -> Result<()> {
        let (layers, count) = self.at.expert_cache;
        if count == 0 {
            return Ok(());
        }
        self.device.label("expert cache");
        let parameters = p::UpdateExpertCache { layers };
        let (update, fill) = (self.kernels.update_expert_cache, self.kernels.fill_expert_cache);
        let blocks = FILL_BLOCKS * self.device.processors as usize;
        // SAFETY: the list has `count` layers, whose addresses are those of the loaded model.
        unsafe {
            self.device.launch(update, [count, 1, 1], 32, 0, &parameters)?;
            self.device.launch(fill, [blocks.div_ceil(count), count, 1], THREADS, 0, &parameters)
        }
    }
}
