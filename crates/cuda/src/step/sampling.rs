//! Sampling of tokens from a step's logits.

use bodkin_backend::{Result, SamplingParams};

use super::Step;
use crate::constants::{LOGIT_GROUPS, MAX_LISTED};
use crate::model::StepEnd;
use crate::parameters as p;

/// Threads of a block.
const BLOCK: usize = LOGIT_GROUPS;

/// Whether the kernels can sample by these parameters in this many steps.
pub(crate) fn is_possible(params: &SamplingParams, steps: usize) -> bool {
    params.penalty_window.min(params.history.len() + steps) <= MAX_LISTED
        && params.biases.len() <= MAX_LISTED
}

impl Step<'_> {
    /// Samples the tokens that a step ends with, if it does.
    pub(crate) fn end(&self, end_of_step: StepEnd) -> Result<()> {
        match end_of_step {
            StepEnd::Logits => Ok(()),
            StepEnd::Tokens { adjusts } => self.sample(adjusts),
        }
    }

    /// Samples tokens from a step's logits into the host's memory and the next step's metadata.
    fn sample(&self, adjusts: bool) -> Result<()> {
        self.device.label("sampling");
        let width = self.plan.output_width();
        let parameters = p::Sample {
            logits: self.address(self.program.output),
            metadata: self.at.metadata,
            group_max: self.at.group_max,
            counts: self.at.step_counts,
            sampled: self.at.sampled,
            stride: self.stride(self.program.output),
            width: width as u32,
            outputs: self.size.outputs as u32,
            padding: 0,
        };
        if adjusts {
            let (kernel, grid) = (self.kernels.apply_penalties, [self.size.outputs, 1, 1]);
            // SAFETY: the metadata has parameters for every output row.
            unsafe { self.device.launch(kernel, grid, BLOCK, 0, &parameters) }?;
        }
        let grid = [LOGIT_GROUPS / (BLOCK / 32), self.size.outputs, 1];
        // SAFETY: the metadata has parameters for every output row, and there is room for two
        // tokens of each. Rows whose tokens the next step reads are those of spans of one token
        // each.
        unsafe { self.device.launch(self.kernels.sample, grid, BLOCK, 0, &parameters) }
    }
}
