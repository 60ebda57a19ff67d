//! The choice of the next step's tokens from a step's logits.

use bodkin_backend::{Result, SamplingParams};

use super::Step;
use crate::constants::LOGIT_GROUPS;
use crate::parameters as p;

/// Threads of a block.
const BLOCK: usize = LOGIT_GROUPS;
/// The most tokens with penalties, and with biases: a thread looks at all others.
const MOST_LISTED: usize = 1024;

/// Whether kernels can do what a rule says in so many steps.
pub(crate) fn is_possible(rule: &SamplingParams, steps: usize) -> bool {
    rule.penalty_window.min(rule.history.len() + steps) <= MOST_LISTED
        && rule.biases.len() <= MOST_LISTED
}

impl Step<'_> {
    /// Makes tokens of a step's logits, those of the next one, and shows the host.
    pub(crate) fn choose(&self, adjusts: bool) -> Result<()> {
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
            let (kernel, grid) = (self.kernels.adjust, [self.size.outputs, 1, 1]);
            // SAFETY: every row of the step has a rule, whose lists are in the feed.
            unsafe { self.device.launch(kernel, grid, BLOCK, 0, &parameters) }?;
        }
        let grid = [LOGIT_GROUPS / (BLOCK / 32), self.size.outputs, 1];
        // SAFETY: every row of the step is an output and a span and has a rule, and there is room
        // for their tokens twice.
        unsafe { self.device.launch(self.kernels.choose, grid, BLOCK, 0, &parameters) }
    }
}
