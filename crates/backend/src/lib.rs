//! The contract between the engine and whatever computes: [`Backend`] loads a plan's weights and
//! gives a [`Model`]; a model runs a [`Batch`]. The state of sequences (keys and values in pages)
//! belongs to the model; the engine only numbers the pages. The reference interpreter is the plain
//! meaning of every operation, and [`conformance`] compares any other backend with it. This crate
//! must not know text, scheduling, or any particular device.

#![forbid(unsafe_code)]

mod batch;
pub mod candidates;
pub mod conformance;
mod error;
mod generate;
mod kv;
mod layer_split;
mod observe;
mod reference;
mod sampling;

pub use batch::{Batch, PAGE_TOKENS, PageTable, Span};
pub use error::{Error, Result};
pub use generate::generate;
pub use kv::KvType;
pub use layer_split::LayerSplit;
pub use observe::{InputRow, Matmul, Observer};
pub use reference::Reference;
pub use sampling::{Penalties, ReferenceSampler, SamplingParams, argmax};

use std::sync::Arc;

use bodkin_gguf::{File, Format};
use bodkin_model::Plan;

/// What a model is sized for when it is loaded; a step never asks for more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The most tokens in one step.
    pub tokens: usize,
    /// The most rows of logits in one step.
    pub outputs: usize,
    /// Pages for each of [`Plan::windows`], in that order.
    pub pages: Vec<usize>,
    /// Slots of recurrent state, each for one sequence or one copy of its state; 0 where the plan
    /// has none.
    pub state_slots: usize,
}

/// The bytes that a loaded model holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// Weights as the backend keeps them.
    pub weight_bytes: u64,
    /// Pages of keys and values, and slots of recurrent state.
    pub state_bytes: u64,
    /// Buffers for values between operations.
    pub scratch_bytes: u64,
}

/// What a model did in one stage of its steps while profiling was on.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StageProfile {
    /// The operations or weights, without the layer's number.
    pub name: String,
    /// From the start of the work to the moment when the last thread was done.
    pub seconds: f64,
    /// Bytes of weights that were read at least.
    pub bytes: u64,
    /// Multiplications and additions with weights.
    pub operations: u64,
}

impl StageProfile {
    /// Stages of the same name added up, in the order of the first of each.
    pub fn sums(stages: &[StageProfile]) -> Vec<StageProfile> {
        let mut sums: Vec<StageProfile> = Vec::new();
        for stage in stages {
            match sums.iter_mut().find(|sum| sum.name == stage.name) {
                Some(sum) => {
                    sum.seconds += stage.seconds;
                    sum.bytes += stage.bytes;
                    sum.operations += stage.operations;
                }
                None => sums.push(stage.clone()),
            }
        }
        sums
    }
}

/// How a backend keeps a weight of a sparse format.
#[derive(Clone, Debug, PartialEq)]
pub struct WeightLayout {
    /// The weight's name in the file.
    pub weight: String,
    /// How the file stores it.
    pub format: Format,
    /// Whether it is read without its zeros.
    pub sparse: bool,
    /// How many times as fast it is without its zeros, if that was measured.
    pub speedup: Option<f64>,
}

/// Told how many bytes of weights are ready, and how many there are.
pub type Progress<'a> = &'a (dyn Fn(u64, u64) + Sync);

/// Something that can run plans.
pub trait Backend {
    /// A short name, such as `cpu`.
    fn name(&self) -> String;

    /// Threads of the host that compute.
    fn threads(&self) -> usize;

    /// What keys and values are kept as.
    fn kv_type(&self) -> KvType {
        KvType::Auto
    }

    /// Bytes a second that the device reads from its memory, measured now.
    ///
    /// # Errors
    /// If the device does not answer, or has no memory left to read.
    fn bandwidth(&self) -> Result<f64>;

    /// Bytes of the device's memory that are free, if that can be known.
    fn available_memory(&self) -> Option<u64>;

    /// The bytes that [`Backend::load`] would hold, without reading a weight.
    fn memory(&self, plan: &Plan, limits: &Limits) -> Memory;

    /// Reads the weights and allocates everything that steps need.
    fn load(
        &self,
        plan: Arc<Plan>,
        file: &Arc<File>,
        limits: &Limits,
        progress: Progress<'_>,
    ) -> Result<Box<dyn Model>>;
}

/// A loaded model with the state of its sequences.
pub trait Model: Send {
    /// What it computes.
    fn plan(&self) -> &Plan;

    /// What it was sized for.
    fn limits(&self) -> &Limits;

    /// Runs one step. `logits` is `[batch.outputs.len(), plan.output_width()]`.
    ///
    /// A row's result depends on its own sequence alone: not on what else is in the batch, nor on
    /// how a prompt was cut into steps.
    fn forward(&mut self, batch: &Batch, logits: &mut [f32]) -> Result<()>;

    /// Runs one step as [`Model::forward`] does, with the same bits, and shows `observer` the input
    /// of every product with weights. Slower than a step that nobody observes, which pays nothing.
    fn observe(
        &mut self,
        batch: &Batch,
        logits: &mut [f32],
        observer: &mut dyn Observer,
    ) -> Result<()>;

    /// Runs up to `steps` steps. The first is `batch`, whose spans have one token each, all of them
    /// outputs and none of a prompt; every later one takes the tokens that `rules`, one for each
    /// span, choose from the logits of the one before, at the positions after its own, which the
    /// batch's page tables cover, too. `each` sees the tokens that a step chose, in the order of
    /// spans, and says whether to go on. A backend may begin the next step before that: then the
    /// pages of one more position have been written, never a recurrent state.
    ///
    /// # Errors
    /// Those of [`Model::forward`].
    fn generate(
        &mut self,
        batch: Batch,
        rules: &[SamplingParams],
        steps: usize,
        each: &mut dyn FnMut(&[u32]) -> bool,
    ) -> Result<()> {
        generate(self, batch, rules, steps, each)
    }

    /// Copies the recurrent state of a sequence from slot to slot, so that it can be gone back to.
    ///
    /// # Errors
    /// If the device does not answer any more.
    fn copy_state(&mut self, from: u32, to: u32) -> Result<()>;

    /// How often each expert was chosen since the model was loaded, for each routing of the plan;
    /// empty if the device does not answer any more, which its next step says.
    fn expert_counts(&self) -> Vec<Vec<u64>>;

    /// The seconds that threads, added up, have spent in each expert's products since the model was
    /// loaded, in the order of [`Model::expert_counts`]. Empty if the backend takes no times.
    fn expert_seconds(&self) -> Vec<Vec<f64>> {
        Vec::new()
    }

    /// How weights of sparse formats are kept, in the plan's order; nothing where the backend has
    /// only one way.
    fn weight_layouts(&self) -> &[WeightLayout] {
        &[]
    }

    /// Takes for zero, from now on, what is smaller in magnitude than a threshold in the input of
    /// each of the plan's [`Plan::gated_matmuls`], in their order. Tells how many of these read
    /// less of their weights then; the others multiply them with zero.
    ///
    /// # Errors
    /// Where the backend cannot do that, or was not told to when the model was loaded.
    fn set_input_thresholds(&mut self, thresholds: &[f32]) -> Result<usize> {
        let what = format!("{} products with thresholds of inputs", thresholds.len());
        Err(Error::Unsupported { backend: "this device".to_owned(), what })
    }

    /// Begins to take the time of the stages of each step, from nothing; or ends it.
    fn set_profiling(&mut self, on: bool);

    /// All stages, each over all steps since profiling began, in the order in which a step comes to
    /// them, one after the other. Empty if the backend takes no times.
    fn profile(&self) -> Vec<StageProfile>;
}
