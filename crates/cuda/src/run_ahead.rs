//! Steps whose tokens the device samples. In multi-step decode the last kernel of a step writes the
//! tokens of the next one, which is launched before the host has seen them: it runs ahead.

use std::collections::VecDeque;

use bodkin_backend as backend;
use bodkin_backend::{Batch, Result, RowOutput, SamplingParams, Sink, StepOutput};

use crate::constants::{NO_TOKEN, RECORDED_ROWS};
use crate::driver::Event;
use crate::model::{CudaModel, StepEnd};
use crate::step::sampling;

impl CudaModel {
    /// Whether the kernels can sample the tokens of a step.
    pub(crate) fn samples_on_device(&self, step: &backend::Step<'_>) -> bool {
        let can_sample = |params: &SamplingParams| sampling::is_possible(params, step.steps);
        step.observer.is_none()
            && !self.is_profiled()
            // The kernels write a row's token to the metadata of the span of the same index.
            && step.rows.len() <= step.batch.spans.len()
            && step.rows.iter().any(|row| matches!(row, RowOutput::Token(_)))
            && token_rows(step.rows).all(|(_, params)| can_sample(params))
    }

    /// Runs a step that the device can sample, see [`backend::Model::step`].
    pub(crate) fn step_on_device(&mut self, step: backend::Step<'_>, sink: Sink<'_>) -> Result<()> {
        self.host.check(&step)?;
        let backend::Step { batch, rows, steps, .. } = step;
        self.device.enter()?;
        self.send_inputs(batch)?;
        self.send_metadata(batch, rows, steps)?;
        // SAFETY: loading allocated counts for every output row.
        unsafe { self.device.fill(self.addresses.step_counts, 0, 8 * rows.len()) }?;
        let run = self.launch_and_sink(batch, rows, steps, sink);
        // Launched kernels still write; the first error says more than one of waiting.
        let finished = self.device.finish();
        run.and(finished)
    }

    /// Launches steps, and passes the results of each on while the next one runs.
    fn launch_and_sink(
        &mut self,
        batch: &Batch,
        rows: &[RowOutput<'_>],
        steps: usize,
        sink: Sink<'_>,
    ) -> Result<()> {
        let adjusts = token_rows(rows).any(|(_, params)| params.adjusts_logits());
        // A recurrent state cannot go back to where it was before a step. The kernels of a step
        // that is no graph may start before the last kernel of the one before has written their
        // metadata.
        let is_graph = batch.tokens.len() <= RECORDED_ROWS;
        let ahead = usize::from(self.plan.states.is_empty() && is_graph);
        let mut events = VecDeque::new();
        let mut launched = 0;
        for seen in 0..steps {
            while launched < steps && launched <= seen + ahead {
                self.send_stages(batch, StepEnd::Tokens { adjusts })?;
                self.receive_rows(batch, rows)?;
                let event = Event::new(&self.device)?;
                event.record()?;
                events.push_back(event);
                launched += 1;
            }
            if let Some(event) = events.pop_front() {
                event.wait()?;
            }
            let tokens = &self.sampled.slice()[seen % 2 * rows.len()..][..rows.len()];
            self.tokens.clear();
            self.tokens.extend(token_rows(rows).map(|(row, _)| match tokens[row] {
                NO_TOKEN => None,
                token => Some(token),
            }));
            let logits = (rows.len() - self.tokens.len()) * self.plan.output_width();
            let logits = &mut self.received.slice_mut()[..logits];
            let output = StepOutput { tokens: &self.tokens, logits };
            if sink(output).is_break() || self.tokens.contains(&None) {
                break;
            }
        }
        Ok(())
    }

    /// Copies the logits of the rows that ask for them to the host, one after the other.
    fn receive_rows(&mut self, batch: &Batch, rows: &[RowOutput<'_>]) -> Result<()> {
        let from = self.output_address(batch);
        let width = self.plan.output_width();
        let received = self.received.slice_mut().chunks_exact_mut(width);
        let asked = rows.iter().enumerate().filter(|(_, row)| matches!(row, RowOutput::Logits));
        for ((row, _), received) in asked.zip(received) {
            // SAFETY: the output has a row of logits for each output row, and the caller waits.
            unsafe { self.device.receive(received, from + 4 * (row * width) as u64) }?;
        }
        Ok(())
    }
}

/// The index and parameters of each row that asks for a token.
fn token_rows<'a>(rows: &[RowOutput<'a>]) -> impl Iterator<Item = (usize, &'a SamplingParams)> {
    rows.iter().enumerate().filter_map(|(i, row)| match row {
        RowOutput::Token(params) => Some((i, *params)),
        RowOutput::Logits => None,
    })
}
