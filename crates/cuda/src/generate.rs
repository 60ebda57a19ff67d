//! Generation without the host: a step's last kernel chooses the tokens of the next step, which is
//! sent before the host has seen them.

use std::collections::VecDeque;

use bodkin_backend::{Batch, Result, SamplingParams};

use crate::driver::Event;
use crate::model::{CudaModel, Ending};

impl CudaModel {
    /// What `Model::generate` promises, for steps that are recorded and rules that kernels can do.
    ///
    /// # Panics
    /// If a row is no output, is of a prompt, or has no rule or not enough draws.
    pub(crate) fn generate_ahead(
        &mut self,
        batch: Batch,
        rules: &[SamplingParams],
        steps: usize,
        each: &mut dyn FnMut(&[u32]) -> bool,
    ) -> Result<()> {
        assert_eq!(batch.outputs.len(), batch.tokens.len(), "every row is an output");
        assert!(batch.spans.iter().all(|span| !span.is_prefill), "nothing is read of a prompt");
        assert_eq!(rules.len(), batch.outputs.len(), "a rule for each row");
        let has_draws =
            |rule: &SamplingParams| rule.temperature <= 0.0 || rule.uniforms.len() >= steps;
        assert!(rules.iter().all(has_draws), "a draw for each step");
        let mut end = batch.clone();
        end.spans.iter_mut().for_each(|span| span.position += steps.saturating_sub(1));
        end.check(&self.plan, &self.limits)?;
        batch.check(&self.plan, &self.limits)?;
        self.device.enter()?;
        self.send_feed(&batch, rules, steps)?;
        // SAFETY: so much was taken when the model was loaded.
        unsafe { self.device.fill(self.addresses.step_counts, 0, 8 * batch.outputs.len()) }?;
        let ending = Ending::Choice { adjusts: rules.iter().any(SamplingParams::adjusts_logits) };
        let run = self.send_and_show(&batch, ending, steps, each);
        // What was sent still writes; the first error says more than one of waiting.
        let finished = self.device.finish();
        run.and(finished)
    }

    /// Sends steps, and shows the tokens of each while the next one runs.
    fn send_and_show(
        &mut self,
        batch: &Batch,
        ending: Ending,
        steps: usize,
        each: &mut dyn FnMut(&[u32]) -> bool,
    ) -> Result<()> {
        // A recurrent state cannot go back to where it was before a step.
        let ahead = usize::from(self.plan.states.is_empty());
        let mut events = VecDeque::new();
        let mut sent = 0;
        for seen in 0..steps {
            while sent < steps && sent <= seen + ahead {
                self.send_stages(batch, ending)?;
                let event = Event::new(&self.device)?;
                event.record()?;
                events.push_back(event);
                sent += 1;
            }
            if let Some(event) = events.pop_front() {
                event.wait()?;
            }
            let rows = batch.outputs.len();
            if !each(&self.chosen.slice()[seen % 2 * rows..][..rows]) {
                break;
            }
        }
        Ok(())
    }
}
