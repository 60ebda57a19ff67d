//! The contract between the engine and whatever computes: [`Backend`] loads a plan's weights and
//! gives a [`Model`]; [`Model::step`] runs a [`Batch`]. The state of sequences (keys and values in
//! pages) belongs to the model; the engine only numbers the pages. This crate must not know text,
//! scheduling, or any particular device.

#![deny(unsafe_code)]

mod batch;
pub mod candidates;
mod check;
mod device;
mod error;
mod expert_budget;
mod host_sampler;
mod kv;
mod layer_split;
mod mock;
mod observe;
mod parallel;
mod pool;
mod sampling;
mod stats;
mod step;
mod timeline;
mod transfer;
pub mod tuning;

pub use batch::{Batch, PAGE_TOKENS, PageTable, Span};
pub use check::{Limits, StepCheck};
pub use device::{DeviceInfo, DeviceKind};
pub use error::{Error, Result};
pub use expert_budget::{EXPERT_SCORE_DECAY, ExpertBudget, ExpertBytes, ExpertStore};
pub use host_sampler::{Forward, HostSampler};
pub use kv::KvType;
pub use layer_split::LayerSplit;
pub use mock::Mock;
pub use observe::{InputRow, Matmul, Observer};
pub use parallel::{MAX_ROW_THREADS, for_each_row};
pub use pool::{Pool, Worker};
pub use sampling::{Penalties, ReferenceSampler, SamplingParams, are_samplable, argmax};
pub use stats::{
    ExpertCacheStats, ExpertPart, ExpertStats, ExpertTimes, ModelStats, StageProfile, WeightLayout,
};
pub use step::{OutputRequest, Sink, Step, StepOutput};
pub use timeline::{Activity, Interval, Track};
pub use transfer::{StateBlock, Transfer};

use std::ops::ControlFlow;
use std::sync::Arc;

use bodkin_gguf::{File, Format};
use bodkin_model::Plan;

/// The bytes that a loaded model holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// Weights in the backend's layouts.
    pub weight_bytes: u64,
    /// Pages of keys and values, and slots of recurrent state.
    pub state_bytes: u64,
    /// Buffers for values between operations.
    pub scratch_bytes: u64,
    /// Those of the weights that are cached experts: with less memory, fewer are cached.
    pub cached_expert_bytes: u64,
    /// Experts in memory of the host, from where a device reads those without a slot. They are not
    /// among the weights.
    pub host_expert_bytes: u64,
    /// Whether experts stay in the file, and memory holds only some of them.
    pub maps_experts: bool,
    /// Slots for experts in each layer, if not all experts have room.
    pub expert_slots: Option<usize>,
}

/// The matrices of one format in a model's file, as a backend stores them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoredFormat {
    /// The format in the file.
    pub format: Format,
    /// Weight tensors of this format; the stacked matrices of experts count as one.
    pub tensors: usize,
    /// Elements of all of them.
    pub elements: u64,
    /// Their bytes in the file.
    pub file_bytes: u64,
    /// Their bytes in the backend's memory.
    pub stored_bytes: u64,
}

/// Called with the bytes of weights that are ready and with all bytes.
pub type Progress<'a> = &'a (dyn Fn(u64, u64) + Sync);

/// Something that can run plans.
pub trait Backend: Send + Sync {
    /// What it is, for people, such as `cpu (avx512, 8 threads)`.
    fn name(&self) -> String;

    /// The devices that compute; one that has two tensor-parallel shards is listed twice.
    fn devices(&self) -> Vec<DeviceInfo>;

    /// Threads of the host that compute.
    fn threads(&self) -> usize;

    /// The type of the KV cache.
    fn kv_type(&self) -> KvType;

    /// Measures the bytes a second at which a step reads weights from the devices' memory, over all
    /// devices together.
    ///
    /// # Errors
    /// If a device does not answer, or has no memory left to read.
    fn measure_bandwidth(&self) -> Result<f64>;

    /// Measures the bytes a second that the devices read from the host's memory; none if they
    /// do not read experts from there.
    ///
    /// # Errors
    /// As [`Backend::measure_bandwidth`].
    fn measure_host_bandwidth(&self) -> Result<Option<f64>> {
        Ok(None)
    }

    /// Bytes of memory that a model can have, if that can be known.
    fn available_memory(&self) -> Option<u64>;

    /// The bytes that [`Backend::load`] would hold, without reading a weight.
    fn memory(&self, plan: &Plan, limits: &Limits) -> Memory;

    /// How a plan's matrices are stored, format by format; empty if the backend does not report it.
    fn stored_formats(&self, _plan: &Plan) -> Vec<StoredFormat> {
        Vec::new()
    }

    /// Reads the weights and allocates everything that steps need.
    ///
    /// # Errors
    /// If the backend cannot run the plan or has not the memory.
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

    /// Runs a step, or up to [`Step::steps`] of multi-step decode. `sink` gets the results of each
    /// step, and ends them early if it breaks; so does a row from which no token can be sampled. A
    /// row's result depends on its own sequence alone: not on the other rows of the batch, nor on
    /// how its prompt was cut into chunks.
    ///
    /// A backend may run ahead: when `sink` breaks, the keys and values of one more position may
    /// have been written. Recurrent state never runs ahead.
    ///
    /// # Errors
    /// [`Error::Limit`] if the step is larger than the model was loaded for; then nothing has run.
    /// If the device does not answer any more.
    ///
    /// # Panics
    /// If the step contradicts itself.
    fn step(&mut self, step: Step<'_>, sink: Sink<'_>) -> Result<()>;

    /// Copies a block of the state of sequences: a page before it is written, where two
    /// sequences share it, a checkpoint of recurrent state, or a block to or from the host. Later
    /// steps see the copy. Returns the block's bytes.
    ///
    /// # Errors
    /// If the device does not answer any more.
    ///
    /// # Panics
    /// If there is no such block, or the host has fewer bytes than the block.
    fn transfer(&mut self, transfer: Transfer<'_>) -> Result<usize>;

    /// Counts of experts since the model was loaded, times of stages since profiling began, and the
    /// timeline since tracing began. Waits for the device.
    fn stats(&self) -> ModelStats;

    /// Starts profiling, from zero, or ends it.
    fn set_profiling(&mut self, on: bool);

    /// Starts to record the timeline of steps, or ends it. Unlike profiling, it leaves steps as
    /// they are: fused, in graphs, and ahead of the host.
    ///
    /// # Errors
    /// If the device does not answer any more.
    fn set_tracing(&mut self, on: bool) -> Result<()>;

    /// From now on, treats as zero those inputs of [`Plan::sparse_input_matmuls`] whose magnitude
    /// is below the matmul's threshold; there is one for each matmul, in that order. Returns for
    /// how many of them the skipped columns of the weight are not read; the others multiply by
    /// zero.
    ///
    /// # Errors
    /// If the backend cannot do that, or the model was not loaded for it.
    fn set_activation_thresholds(&mut self, thresholds: &[f32]) -> Result<usize>;
}

impl dyn Model + '_ {
    /// Runs one step of `batch` and copies the logits of all its outputs, `[outputs, width]`.
    ///
    /// # Errors
    /// Those of [`Model::step`].
    pub fn forward(&mut self, batch: &Batch, logits: &mut [f32]) -> Result<()> {
        let requests = vec![OutputRequest::Logits; batch.outputs.len()];
        let step = Step { batch, requests: &requests, steps: 1, observer: None };
        self.step(step, &mut |output| {
            logits.copy_from_slice(output.logits);
            ControlFlow::Break(())
        })
    }
}
