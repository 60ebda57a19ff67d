//! A loaded model: its memory on the device, and how a step is set up, captured and launched.

mod allocate;
mod connect;
mod profile;
mod tune;

use std::cell::Cell;
use std::collections::HashMap;
use std::sync::Arc;

use bodkin_backend as backend;
use bodkin_backend::{
    Batch, Error, HostSampler, Limits, Model, ModelStats, Observer, OutputRequest, Progress,
    Result, Sink, StateBlock, Transfer,
};
use bodkin_gguf::File;
use bodkin_model::{Plan, WeightId};

use crate::constants::{LOGIT_GROUPS, MAX_CHOSEN};
use crate::driver::{Device, Graph, Kernel, Memory, Pinned};
use crate::expert_budget::ExpertSlots;
use crate::expert_cache::ExpertCache;
use crate::kernels::Kernels;
use crate::lower::{Program, Stage, Work};
use crate::mapped_experts::MappedExperts;
use crate::observe;
use crate::packed::Shard;
use crate::parameters;
use crate::persistent::Persistent;
use crate::sizes::Sizes;
use crate::step::{Addresses, Size, Step};
use crate::step_metadata;
use crate::tuning::Tuning;
use crate::watchdog::Watchdog;
use crate::weights::Weights;

/// A captured graph depends on the size of the step and on its last kernels.
type GraphKey = (Size, StepEnd);

/// The most graphs of a model. Bounds their memory, which the planner does not count.
const MAX_GRAPHS: usize = 256;

/// What the last kernels of a step compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum StepEnd {
    /// Its logits.
    Logits,
    /// Tokens, of some of its rows at least.
    Tokens {
        /// Whether biases or penalties change logits.
        adjusts: bool,
    },
}

/// A plan on a device.
pub(crate) struct CudaModel {
    // Graphs are dropped before the kernels and the memory that they use.
    graphs: HashMap<GraphKey, Graph>,
    pub(crate) device: Arc<Device>,
    kernels: Arc<Kernels>,
    pub(crate) plan: Arc<Plan>,
    pub(crate) limits: Limits,
    pub(crate) program: Program,
    pub(crate) sizes: Sizes,
    weights: Weights,
    pub(crate) addresses: Addresses,
    pub(crate) tuning: Arc<Tuning>,
    /// Everything but the weights.
    memory: Vec<Memory>,
    metadata: Vec<u32>,
    metadata_staging: Pinned<u32>,
    /// Rows that come with a step.
    inputs: Pinned<f32>,
    pub(crate) logits_staging: Pinned<f32>,
    /// Tokens that the device sampled, of even and of odd steps.
    pub(crate) sampled: Pinned<u32>,
    /// Those of the rows that ask for tokens.
    pub(crate) tokens: Vec<Option<u32>>,
    pub(crate) host: HostSampler,
    metadata_memory: Memory,
    profile: Option<Times>,
    /// The persistent kernel, the stages that it runs in steps of one row, and its watchdog.
    persistent: Option<(Kernel, Persistent, Watchdog)>,
    /// Whether every stage of the current step is launched as kernels of its own.
    pub(crate) runs_stages: bool,
    pub(crate) expert_cache: Option<ExpertCache>,
}

/// Where the time of steps goes.
struct Times {
    /// Of each stage.
    seconds: Vec<f64>,
    steps: u64,
    tokens: u64,
    outputs: u64,
}

impl CudaModel {
    pub(crate) fn load(
        device: &Arc<Device>,
        plan: Arc<Plan>,
        file: &Arc<File>,
        limits: &Limits,
        (program, sizes, kernels, experts): (Program, Sizes, Arc<Kernels>, (Shard, ExpertSlots)),
        progress: Progress<'_>,
    ) -> Result<CudaModel> {
        // Everything but the weights is allocated first: the weights are what may not fit.
        let mut memory = Vec::new();
        let mut take = |bytes: usize, what: &str| -> Result<u64> {
            memory.push(Memory::zeroed(device, bytes, what)?);
            Ok(memory[memory.len() - 1].address)
        };
        let mut addresses = allocate::addresses(&plan, &program, &sizes, &mut take)?;
        let weights = Weights::load(device, &plan, experts, file, progress)?;
        let (placed, counts) = (&weights.placed, &addresses.expert_counts);
        let shape = |id: WeightId| placed[id.0].shape;
        let mapped = experts.1.on_device.zip(experts.1.on_host);
        let mapped = mapped.map(|slots| MappedExperts::new(device, &plan, file, shape, slots));
        let placed = (placed.as_slice(), mapped.transpose()?);
        let expert_cache = ExpertCache::new(device, (&plan, &program), experts, placed, counts)?;
        addresses.expert_cache = expert_cache.as_ref().map_or_else(Vec::new, ExpertCache::layers);
        for rope in &program.ropes {
            let (frequencies, magnitude) = allocate::inverse_frequencies(&plan, file, rope);
            let address = take(8 * frequencies.len(), "the frequencies")?;
            // SAFETY: the allocation above has this size, and the copy has ended after
            // `synchronize`.
            unsafe { device.copy_to_device(address, &frequencies) }
                .and_then(|()| device.synchronize())?;
            addresses.inverse_frequencies.push((address, magnitude));
        }
        addresses.numbers = take(4 * MAX_CHOSEN, "the numbers of parts")?;
        let numbers: Vec<f32> = (0..MAX_CHOSEN).map(|i| i as f32).collect();
        // SAFETY: as above.
        unsafe { device.copy_to_device(addresses.numbers, &numbers) }
            .and_then(|()| device.synchronize())?;
        addresses.group_max = take(8 * LOGIT_GROUPS * sizes.outputs, "the largest logits")?;
        addresses.step_counts = take(8 * sizes.outputs, "the counts of steps")?;
        let sampled = Pinned::zeroed(device, 2 * sizes.outputs)?;
        addresses.sampled = sampled.address();
        let metadata_memory = Memory::zeroed(device, 4 * sizes.metadata_len, "step metadata")?;
        addresses.metadata = metadata_memory.address;
        Ok(CudaModel {
            graphs: HashMap::new(),
            kernels,
            host: HostSampler::new(&plan, limits),
            plan,
            limits: limits.clone(),
            weights,
            addresses,
            tuning: Arc::default(),
            memory,
            metadata: Vec::with_capacity(sizes.metadata_len),
            metadata_staging: Pinned::zeroed(device, sizes.metadata_len)?,
            inputs: Pinned::zeroed(device, sizes.input_len)?,
            logits_staging: Pinned::zeroed(device, sizes.output_len)?,
            sampled,
            tokens: Vec::with_capacity(sizes.outputs),
            metadata_memory,
            program,
            sizes,
            device: Arc::clone(device),
            profile: None,
            persistent: None,
            runs_stages: false,
            expert_cache,
        })
    }

    /// Copies the list of the persistent kernel's stages to the device, if it can run them.
    pub(crate) fn list_persistent_stages(&mut self) -> Result<()> {
        let blocks = self.device.processors as usize;
        // It cannot wait for the file.
        let fits = |persistent: &&Persistent| {
            self.mapped_experts().is_none() && persistent.fits(blocks, &self.plan, &self.program)
        };
        let (Some(kernels), Some(persistent)) =
            (&self.kernels.persistent, self.sizes.persistent.as_ref().filter(fits))
        else {
            return Ok(());
        };
        let kernel = kernels[persistent.kernel(self.expert_cache.is_some())];
        let persistent = persistent.clone();
        let list_bytes = size_of::<parameters::Stage>() * persistent.stages.len();
        let list = Memory::zeroed(&self.device, list_bytes, "the list of stages")?;
        self.addresses.persistent_stages = list.address;
        self.memory.push(list);
        let watchdog = Watchdog::new(&self.device, persistent.stage_names(&self.program))?;
        self.addresses.stalled_stages = watchdog.address();
        self.persistent = Some((kernel, persistent.clone(), watchdog));
        let stages = self.sized_step(Size::of_one()).persistent_stages(&persistent);
        let bytes = self.sizes.non_aliased.bytes as usize;
        let partial_bytes = self.sizes.polled_partial_bytes;
        // SAFETY: both allocations have this size, and the copy has ended after `synchronize`. All
        // values are sentinels before the first step, and each step resets them.
        unsafe {
            self.device.copy_to_device(self.addresses.persistent_stages, &stages)?;
            self.device.fill(self.addresses.non_aliased, 0xff, bytes)?;
            self.device.fill(self.addresses.polled_partials, 0xff, partial_bytes)?;
        }
        self.device.synchronize()
    }

    /// If experts stay in the file.
    pub(crate) fn mapped_experts(&self) -> Option<&MappedExperts> {
        self.expert_cache.as_ref()?.mapped.as_ref()
    }

    /// A step of this size.
    pub(crate) fn sized_step(&self, size: Size) -> Step<'_> {
        let arena = match self.persistent_of_step(size) {
            Some(_) => (&self.sizes.non_aliased, self.addresses.non_aliased),
            None => (&self.sizes.arena, self.addresses.arena),
        };
        Step {
            arena,
            device: &self.device,
            kernels: &self.kernels,
            plan: &self.plan,
            program: &self.program,
            sizes: &self.sizes,
            weights: &self.weights.placed,
            at: &self.addresses,
            mapped_experts: self.mapped_experts(),
            tuning: &self.tuning,
            size,
            is_observed: false,
            swizzled: Cell::new(None),
            permuted: Cell::new(None),
        }
    }

    /// The persistent kernel, if it runs steps of this size.
    fn persistent_of_step(&self, size: Size) -> Option<&(Kernel, Persistent, Watchdog)> {
        let is_one = size == Size::of_one() && self.profile.is_none() && !self.runs_stages;
        self.persistent.as_ref().filter(|_| is_one)
    }

    /// Copies the step metadata to the device.
    pub(crate) fn send_metadata(
        &mut self,
        batch: &Batch,
        rows: &[OutputRequest<'_>],
        steps: usize,
    ) -> Result<()> {
        step_metadata::write(batch, rows, steps, self.sizes.partials, &mut self.metadata);
        if self.metadata.len() > self.metadata_staging.slice().len() {
            // Sequences that share many pages, or long parameter lists. Captured graphs hold the
            // old address.
            let len = self.metadata.len().next_power_of_two();
            self.graphs.clear();
            self.metadata_memory = Memory::zeroed(&self.device, 4 * len, "step metadata")?;
            self.addresses.metadata = self.metadata_memory.address;
            self.metadata_staging = Pinned::zeroed(&self.device, len)?;
        }
        let sent = &mut self.metadata_staging.slice_mut()[..self.metadata.len()];
        sent.copy_from_slice(&self.metadata);
        // SAFETY: the device buffer is as long, and every step waits for its end, also a failed
        // one.
        unsafe { self.device.copy_to_device(self.addresses.metadata, sent) }
    }

    /// Computes the logits of all outputs of a batch.
    fn forward(
        &mut self,
        batch: &Batch,
        logits: &mut [f32],
        observer: Option<&mut dyn Observer>,
    ) -> Result<()> {
        let Some(observer) = observer else {
            self.begin(batch)?;
            let launched = self.launch_stages(batch, StepEnd::Logits);
            return self.end(launched, batch, logits);
        };
        // The persistent kernel does not stop between stages, so it cannot be observed.
        self.runs_stages = true;
        let observed = self.begin(batch).and_then(|()| {
            let step = Step { is_observed: true, ..self.sized_step(Size::of(batch)) };
            let launched = observe::run(&step, batch, observer);
            self.end(launched, batch, logits)
        });
        self.runs_stages = false;
        observed
    }

    /// The error of a grid that the watchdog ended: to the driver, that step and all later ones
    /// have failed.
    pub(crate) fn stall(&self) -> Option<Error> {
        self.persistent.as_ref().and_then(|(.., watchdog)| watchdog.error())
    }

    /// Fails if experts could not be read: then the results of a step that is over are wrong.
    pub(crate) fn check_experts(&self) -> Result<()> {
        self.mapped_experts().and_then(MappedExperts::failure).map_or(Ok(()), Err)
    }

    /// The address of the first row of logits.
    pub(crate) fn output_address(&self, batch: &Batch) -> u64 {
        self.sized_step(Size::of(batch)).address(self.program.output)
    }

    /// Sends the inputs and metadata of a step.
    pub(crate) fn begin(&mut self, batch: &Batch) -> Result<()> {
        self.device.make_current()?;
        self.send_inputs(batch)?;
        self.send_metadata(batch, &[], 0)
    }

    /// Copies the rows that come with a step to where its first stage would have made them.
    pub(crate) fn send_inputs(&mut self, batch: &Batch) -> Result<()> {
        let Some(input) = self.program.input else { return Ok(()) };
        let to = self.sized_step(Size::of(batch)).address(input);
        let sent = &mut self.inputs.slice_mut()[..batch.inputs.len()];
        sent.copy_from_slice(&batch.inputs);
        // SAFETY: the value has room for the step's rows, and every step waits for its end.
        unsafe { self.device.copy_to_device(to, sent) }
    }

    /// Waits for a step, whether all of it was launched or not, and copies its logits.
    fn end(&mut self, launched: Result<()>, batch: &Batch, logits: &mut [f32]) -> Result<()> {
        if launched.is_err() {
            // Launched kernels still read the metadata; the first error is returned.
            let _ = self.device.synchronize();
            return launched;
        }
        self.receive_logits(batch, logits)
    }

    /// Waits for a step, and copies its logits.
    pub(crate) fn receive_logits(&mut self, batch: &Batch, logits: &mut [f32]) -> Result<()> {
        if logits.is_empty() {
            return self.synchronize();
        }
        let from = self.output_address(batch);
        let received = &mut self.logits_staging.slice_mut()[..logits.len()];
        // SAFETY: the output holds as much, and the copy is waited for.
        unsafe { self.device.copy_to_host(received, from) }?;
        self.synchronize()?;
        let received = &self.logits_staging.slice()[..logits.len()];
        logits.copy_from_slice(received);
        Ok(())
    }

    /// Launches all stages, as a graph if steps of this size are recorded.
    pub(crate) fn launch_stages(&mut self, batch: &Batch, end_of_step: StepEnd) -> Result<()> {
        if self.profile.is_some() {
            return self.launch_profiled(batch);
        }
        let size = Size::of(batch);
        if !size.is_recorded() {
            // The last kernel of the step before may have written this one's metadata.
            self.device.serialize_next_launch();
            let step = self.sized_step(size);
            self.program.stages.iter().try_for_each(|stage| step.run(stage))?;
            return step.end(end_of_step);
        }
        self.record(size, end_of_step)?;
        self.graphs[&(size, end_of_step)].launch()
    }

    /// Records the graph of steps of this size, if there is none.
    pub(crate) fn record(&mut self, size: Size, end_of_step: StepEnd) -> Result<()> {
        let key = (size, end_of_step);
        if !self.graphs.contains_key(&key) {
            let step = self.sized_step(size);
            let stages = &self.program.stages;
            let persistent = self.persistent_of_step(size);
            let range = persistent.map_or(0..0, |(_, persistent, _)| persistent.stages.clone());
            let launch = || {
                persistent.map_or_else(|| step.barrier(), |_| step.forget_streamed_experts())?;
                stages[..range.start].iter().try_for_each(|stage| step.run(stage))?;
                if let Some((kernel, persistent, _)) = persistent {
                    step.run_persistent(*kernel, persistent)?;
                }
                // The next step may store on other devices once they have reset their sentinels.
                let is_gather = |stage: &Stage| matches!(stage.work, Work::Gather(_));
                if persistent.is_some() && !stages[range.end..].iter().any(is_gather) {
                    step.barrier()?;
                }
                stages[range.end..].iter().try_for_each(|stage| step.run(stage))?;
                step.end(end_of_step)?;
                persistent.map_or(Ok(()), |_| step.update_expert_cache())
            };
            let graph = self.device.record(launch)?;
            if self.graphs.len() == MAX_GRAPHS {
                // Those that are still needed are recorded again.
                self.graphs.clear();
            }
            self.graphs.insert(key, graph);
        }
        Ok(())
    }
}

impl CudaModel {
    /// The memory that holds blocks of this kind: the first one's address, and the bytes of each.
    fn regions(&self, block: StateBlock) -> Vec<(u64, usize)> {
        let states = || self.plan.states.iter().zip(&self.addresses.states);
        match block {
            StateBlock::Page { window_index, .. } => {
                let pages = self.limits.pages[window_index];
                let slots = self
                    .addresses
                    .window_indices
                    .iter()
                    .zip(&self.addresses.kv)
                    .zip(&self.sizes.kv_bytes);
                let slots = slots.filter(|((of, _), _)| **of == window_index);
                let regions = |((_, addresses), bytes): ((_, &[u64; 2]), &[usize; 2])| {
                    [0, 1].map(|i| (addresses[i], bytes[i] / pages))
                };
                slots.flat_map(regions).filter(|(_, bytes)| *bytes > 0).collect()
            }
            StateBlock::StateSlot(_) => states().map(|(s, &at)| (at, 4 * s.elements())).collect(),
        }
    }
}

impl Model for CudaModel {
    fn plan(&self) -> &Plan {
        &self.plan
    }

    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn step(&mut self, step: backend::Step<'_>, sink: Sink<'_>) -> Result<()> {
        let _step = self.mapped_experts().map(MappedExperts::begin_step);
        let result = if self.needs_no_host_sampler(&step) {
            let launch = &mut |parts: &mut [CudaModel], batch: &Batch, end_of_step| {
                parts.iter_mut().try_for_each(|part| part.launch_stages(batch, end_of_step))
            };
            CudaModel::step_on_device(std::slice::from_mut(self), step, sink, launch)
        } else {
            let mut host = std::mem::take(&mut self.host);
            let result = host.run(step, sink, &mut |batch, logits, observer| {
                self.forward(batch, logits, observer)
            });
            self.host = host;
            result
        };
        result.map_err(|error| self.stall().unwrap_or(error))
    }

    fn transfer(&mut self, mut transfer: Transfer<'_>) -> Result<usize> {
        self.device.make_current()?;
        let mut moved = 0;
        for (address, bytes) in self.regions(transfer.block()) {
            let at = |block: StateBlock| address + (block.number() * bytes) as u64;
            // SAFETY: the blocks are among those of the region; the host's memory is there until
            // the stream has come here, which is awaited.
            unsafe {
                match &mut transfer {
                    Transfer::Copy { from, to } if from == to => {}
                    Transfer::Copy { from, to } => self.device.copy(at(*to), at(*from), bytes)?,
                    Transfer::Read { from, to } => {
                        let start = to.len();
                        to.resize(start + bytes, 0);
                        self.device.copy_to_host(&mut to[start..], at(*from))?;
                        self.device.synchronize()?;
                    }
                    Transfer::Write { from, to } => {
                        let (now, rest) = from.split_at(bytes);
                        self.device.copy_to_device(at(*to), now)?;
                        self.device.synchronize()?;
                        *from = rest;
                    }
                }
            }
            moved += bytes;
        }
        Ok(moved)
    }

    fn stats(&self) -> ModelStats {
        // A device that is lost says so in the next step.
        let experts = self.expert_stats().unwrap_or_default();
        let timeline = self.device.timeline().unwrap_or_default();
        let maps_experts = self.mapped_experts().is_some();
        let stages = self.stage_profiles();
        ModelStats { experts, maps_experts, stages, timeline, weight_layouts: Vec::new() }
    }

    fn set_profiling(&mut self, on: bool) {
        self.profile = on.then(|| Times::new(self.program.stages.len()));
    }

    fn set_tracing(&mut self, on: bool) -> Result<()> {
        self.device.set_tracing(on)
    }

    fn set_activation_thresholds(&mut self, thresholds: &[f32]) -> Result<usize> {
        Err(Error::no_thresholds("cuda", thresholds))
    }
}
