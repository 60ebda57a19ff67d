//! The loop that backends share which sample on the host.

use bodkin_model::Plan;

use crate::candidates::Candidates;
use crate::check::{Limits, StepCheck};
use crate::observe::reborrow;
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
    samplers: Vec<ReferenceSampler>,
    candidates: Candidates,
    /// The second and later steps of multi-step decode.
    next: Batch,
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
            samplers: vec![ReferenceSampler::default(); limits.outputs],
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
        self.samplers.iter_mut().zip(requests).for_each(|(sampler, row)| {
            if let OutputRequest::Token(params) = row {
                sampler.begin(params);
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
    fn sample(&mut self, rows: &[OutputRequest<'_>]) -> usize {
        self.tokens.clear();
        let mut kept = 0;
        for (i, row) in rows.iter().enumerate() {
            let logits = i * self.width..(i + 1) * self.width;
            match row {
                OutputRequest::Token(params) => {
                    let logits = &mut self.logits[logits];
                    self.tokens
                        .push(are_samplable(logits).then(|| {
                            self.samplers[i].sample(params, logits, &mut self.candidates)
                        }));
                }
                OutputRequest::Logits => {
                    if kept < logits.start {
                        self.logits.copy_within(logits, kept);
                    }
                    kept += self.width;
                }
            }
        }
        kept
    }
}
