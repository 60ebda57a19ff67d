//! The step call: what goes in and what comes out.

use std::ops::ControlFlow;

use crate::{Batch, Observer, SamplingParams};

/// What a step is asked to return for one output row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum OutputRequest<'a> {
    /// The row's logits; the embedding of an encoder; the hidden state of a plan without a head.
    Logits,
    /// A token id sampled from the row's logits.
    Token(&'a SamplingParams),
}

/// The work of one [`crate::Model::step`] call.
pub struct Step<'a> {
    /// The rows to compute.
    pub batch: &'a Batch,
    /// One request for each of [`Batch::outputs`].
    pub requests: &'a [OutputRequest<'a>],
    /// How many steps to run, at least 1. More than one is multi-step decode: every span is one
    /// decode row that asks for a token, which the next step reads at the next position. The page
    /// tables of the batch cover all steps.
    pub steps: usize,
    /// Sees the input of every matmul. The step has the same bits, but is slower.
    pub observer: Option<&'a mut dyn Observer>,
}

/// The results of one step.
#[derive(Debug)]
pub struct StepOutput<'a> {
    /// One token id for each row that asked for a token, in order; none where logits are NaN or
    /// +inf, or all are -inf. Multi-step decode then ends.
    pub tokens: &'a [Option<u32>],
    /// `[rows that asked for logits, width]`, in a buffer of the model that the caller may change.
    pub logits: &'a mut [f32],
}

/// Receives the results of each step and says whether to run the next one.
pub type Sink<'a> = &'a mut dyn FnMut(StepOutput<'_>) -> ControlFlow<()>;
