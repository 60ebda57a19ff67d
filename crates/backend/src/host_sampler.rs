//! The loop that backends share which sample on the host.

use bodkin_model::Plan;

use crate::candidates::Candidates;
use crate::check::{Limits, StepCheck};
use crate::observe::reborrow;
use crate::parallel::{MAX_ROW_THREADS, for_each_row};
use crate::step::{OutputRequest, Sink, Step, StepOutput};
use crate::{Batch, Observer, ReferenceSampler, Result, are_samplable};

/// Computes the logits of all output rows of a batch, `[outputs, width]`.
pub type Forward<'a> =
    &'a mut dyn FnMut(&Batch, &mut [f32], Option<&mut dyn Observer>) -> Result<()>;

/// Runs steps for backends that sample on the host: forward, sample, forward. Its buffers are sized
/// at load, so that a step allocates nothing.
#[derive(Default)]
pub struct HostSampler {
    check: StepCheck,
    width: usize,
    /// `[limits.outputs, width]`.
    logits: Vec<f32>,
    tokens: Vec<Option<u32>>,
    rows: Vec<RowSampler>,
    /// Scratch of each thread.
    candidates: [Candidates; MAX_ROW_THREADS],
    /// The second and later steps of multi-step decode.
    next: Batch,
}

/// Samples the row of one request, step after step.
#[derive(Clone, Default)]
struct RowSampler {
    sampler: ReferenceSampler,
    token: Option<u32>,
}

impl HostSampler {
    /// Allocates what steps within `limits` need.
    pub fn new(plan: &Plan, limits: &Limits) -> HostSampler {
        let width = plan.output_width();
        HostSampler {
            check: StepCheck::new(plan, limits),
            width,
            logits: vec![0.0; limits.outputs * width],
            tokens: Vec::with_capacity(limits.outputs),
            rows: vec![RowSampler::default(); limits.outputs],
            ..HostSampler::default()
        }
    }

    /// Checks a step that the device samples.
    ///
    /// # Errors
    /// [`crate::Error::Limit`] if the step is larger than the limits.
    pub fn check(&mut self, step: &Step<'_>) -> Result<()> {
        self.check.check(step)
    }

    /// Runs a step as [`crate::Model::step`] promises, with `forward` for the logits.
    ///
    /// # Errors
    /// [`crate::Error::Limit`] if the step is larger than the limits, and those of `forward`.
    pub fn run(&mut self, step: Step<'_>, sink: Sink<'_>, forward: Forward<'_>) -> Result<()> {
        self.check.check(&step)?;
        let Step { batch, requests, steps, mut observer } = step;
        self.rows.iter_mut().zip(requests).for_each(|(row, request)| {
            if let OutputRequest::Token(params) = request {
                row.sampler.begin(params);
            }
        });
        for done in 1..=steps {
            let batch = if done == 1 { batch } else { &self.next };
            let logits = &mut self.logits[..requests.len() * self.width];
            forward(batch, logits, reborrow(&mut observer))?;
            let kept = self.sample(requests);
            let tokens = &self.tokens[..];
            let output = StepOutput { tokens, logits: &mut self.logits[..kept] };
            if sink(output).is_break() || done == steps || tokens.contains(&None) {
                break;
            }
            if done == 1 {
                self.next.clone_from(step.batch);
            }
            self.next.tokens.clear();
            self.next.tokens.extend(self.tokens.iter().flatten());
            self.next.spans.iter_mut().for_each(|span| span.position += 1);
        }
        Ok(())
    }

    /// Samples the rows that ask for a token, and moves the logits of the others to the front.
    /// Returns the number of these logits.
    fn sample(&mut self, requests: &[OutputRequest<'_>]) -> usize {
        let (rows, width) = (&mut self.rows[..requests.len()], self.width);
        let logits = &mut self.logits[..requests.len() * width];
        if requests.iter().all(|request| *request == OutputRequest::Logits) {
            self.tokens.clear();
            return logits.len();
        }
        let scratch = &mut self.candidates;
        for_each_row(rows, (&mut *logits, width), scratch, |i, row, logits, candidates| {
            if let OutputRequest::Token(params) = requests[i] {
                let RowSampler { sampler, token } = row;
                *token = are_samplable(logits).then(|| sampler.sample(params, logits, candidates));
            }
        });
        self.tokens.clear();
        let mut kept = 0;
        for (i, (row, request)) in rows.iter().zip(requests).enumerate() {
            match request {
                OutputRequest::Token(_) => self.tokens.push(row.token),
                OutputRequest::Logits => {
                    if kept < i * width {
                        logits.copy_within(i * width..(i + 1) * width, kept);
                    }
                    kept += width;
                }
            }
        }
        kept
    }
}
