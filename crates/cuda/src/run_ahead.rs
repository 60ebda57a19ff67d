//! Steps of which nothing is sampled on the host. In multi-step decode the last kernel of a step
//! writes the tokens of the next one, which is launched before the host has seen them: it runs
//! ahead.

use std::collections::VecDeque;

use bodkin_backend as backend;
use bodkin_backend::{Batch, OutputRequest, Result, SamplingParams, Sink, StepOutput};

use crate::constants::NO_TOKEN;
use crate::driver::Event;
use crate::model::{CudaModel, StepEnd};
use crate::step::{Size, sampling};

/// Launches a step on all devices.
pub(crate) type LaunchStep<'a> = &'a mut dyn FnMut(&mut [CudaModel], &Batch, StepEnd) -> Result<()>;

impl CudaModel {
    /// Whether nothing of a step is sampled on the host: the kernels can sample the tokens that it
    /// asks for.
    pub(crate) fn needs_no_host_sampler(&self, step: &backend::Step<'_>) -> bool {
        let can_sample = |params: &SamplingParams| sampling::is_possible(params, step.steps);
        step.observer.is_none()
            && !self.is_profiled()
            // The kernels write a row's token to the metadata of the span of the same index.
            && (token_rows(step.requests).next().is_none()
                || step.requests.len() <= step.batch.spans.len())
            && token_rows(step.requests).all(|(_, params)| can_sample(params))
    }

    /// Runs a step of which nothing is sampled on the host, see [`backend::Model::step`]. All
    /// devices of a model sample the same tokens; the host reads those of the first.
    pub(crate) fn step_on_device(
        parts: &mut [CudaModel],
        step: backend::Step<'_>,
        sink: Sink<'_>,
        launch: LaunchStep<'_>,
    ) -> Result<()> {
        parts[0].host.check(&step)?;
        let backend::Step { batch, requests: rows, steps, .. } = step;
        let begin = |part: &mut CudaModel| {
            if token_rows(rows).next().is_none() {
                return part.begin(batch);
            }
            part.device.make_current()?;
            part.send_inputs(batch)?;
            part.send_metadata(batch, rows, steps)?;
            // SAFETY: loading allocated counts for every output row.
            unsafe { part.device.fill(part.addresses.step_counts, 0, 8 * rows.len()) }
        };
        let begun = parts.iter_mut().try_for_each(begin);
        let run = begun
            .and_then(|()| CudaModel::launch_and_sink(parts, (batch, rows, steps), sink, launch));
        // Launched kernels still write; the first error says more than one of waiting.
        let finished: Vec<Result<()>> = parts.iter().map(CudaModel::synchronize).collect();
        run.and(finished.into_iter().collect())
    }

    /// Waits for all that is in the device's stream, and checks that its results count.
    pub(crate) fn synchronize(&self) -> Result<()> {
        self.device.make_current()?;
        self.device.synchronize()?;
        self.check_experts()
    }

    /// Launches steps, and passes the results of each on while the next one runs.
    fn launch_and_sink(
        parts: &mut [CudaModel],
        (batch, rows, steps): (&Batch, &[OutputRequest<'_>], usize),
        sink: Sink<'_>,
        launch: LaunchStep<'_>,
    ) -> Result<()> {
        let adjusts = token_rows(rows).any(|(_, params)| params.adjusts_logits());
        let end_of_step = match token_rows(rows).next() {
            Some(_) => StepEnd::Tokens { adjusts },
            None => StepEnd::Logits,
        };
        // A recurrent state cannot go back to where it was before a step. Kernels of a step that is
        // no graph must not start before the last kernel of the step before has written their
        // metadata: one device waits for that by itself, several would have to wait for all.
        let is_ordered = parts.len() == 1 || Size::of(batch).is_recorded();
        let ahead = usize::from(parts[0].plan.states.is_empty() && is_ordered);
        let mut events = VecDeque::new();
        let mut launched = 0;
        for seen in 0..steps {
            while launched < steps && launched <= seen + ahead {
                launch(parts, batch, end_of_step)?;
                let first = &mut parts[0];
                first.device.make_current()?;
                first.receive_rows(batch, rows)?;
                let event = Event::new(&first.device)?;
                event.record()?;
                events.push_back(event);
                launched += 1;
            }
            match events.pop_front() {
                Some(event) if ahead > 0 => {
                    event.wait()?;
                    parts.iter().try_for_each(CudaModel::check_experts)?;
                }
                _ => parts.iter().try_for_each(CudaModel::synchronize)?,
            }
            let first = &mut parts[0];
            let tokens = &first.sampled.slice()[seen % 2 * rows.len()..][..rows.len()];
            first.tokens.clear();
            first.tokens.extend(token_rows(rows).map(|(row, _)| match tokens[row] {
                NO_TOKEN => None,
                token => Some(token),
            }));
            let logits = (rows.len() - first.tokens.len()) * first.plan.output_width();
            let logits = &mut first.logits_staging.slice_mut()[..logits];
            let output = StepOutput { tokens: &first.tokens, logits };
            if sink(output).is_break() || first.tokens.contains(&None) {
                break;
            }
        }
        Ok(())
    }

    /// Copies the logits of the rows that ask for them to the host, one after the other.
    fn receive_rows(&mut self, batch: &Batch, rows: &[OutputRequest<'_>]) -> Result<()> {
        let from = self.output_address(batch);
        let width = self.plan.output_width();
        if rows.is_empty() {
            return Ok(());
        }
        if token_rows(rows).next().is_none() {
            let received = &mut self.logits_staging.slice_mut()[..rows.len() * width];
            // SAFETY: the output has a row of logits for each output row, and the caller waits.
            return unsafe { self.device.copy_to_host(received, from) };
        }
        let received = self.logits_staging.slice_mut().chunks_exact_mut(width);
        let asked = rows.iter().enumerate().filter(|(_, row)| matches!(row, OutputRequest::Logits));
        for ((row, _), received) in asked.zip(received) {
            // SAFETY: as above.
            unsafe { self.device.copy_to_host(received, from + 4 * (row * width) as u64) }?;
        }
        Ok(())
    }
}

/// The index and parameters of each row that asks for a token.
fn token_rows<'a>(rows: &[OutputRequest<'a>]) -> impl Iterator<Item = (usize, &'a SamplingParams)> {
    rows.iter().enumerate().filter_map(|(i, row)| match row {
        OutputRequest::Token(params) => Some((i, *params)),
        OutputRequest::Logits => None,
    })
}
