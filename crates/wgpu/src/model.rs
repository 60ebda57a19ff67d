//! A loaded model: its buffers, and how a step runs on them.

mod greedy;
mod profile;

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use bodkin_backend::{
    self as backend, Activity, Batch, Error, ExpertStats, HostSampler, Interval, Limits, Memory,
    Model, ModelStats, Observer, Result, Sink, StateBlock, Track, Transfer,
};
use bodkin_gguf::File;
use bodkin_model::{Op, Plan, RopeTable, Value, WeightId};

use crate::batch_data::BatchData;
use crate::buffers::{self, Buffers};
use crate::dispatch::{self, Ready};
use crate::expert_cache::ExpertCaches;
use crate::gpu::Gpu;
use crate::kv;
use crate::lower::{Stage, all_split_elements, lower, stacks, stages, tile_words};
use crate::observe::Observed;
use crate::program::{ARGMAX_DISPATCHES, BufferId, Depth, Program};
use crate::timestamps::Timestamps;
use crate::tuning::Loaded;
use crate::weights;

/// A plan on a GPU.
pub(crate) struct WgpuModel {
    plan: Arc<Plan>,
    limits: Limits,
    gpu: Arc<Gpu>,
    stages: Vec<Stage>,
    program: Program,
    ready: Vec<Ready>,
    buffers: Buffers,
    ropes: Vec<RopeTable>,
    /// Cosines and sines of a position, and those of all rows.
    angles: [Vec<f32>; 3],
    data: BatchData,
    batch: (wgpu::Buffer, wgpu::BindGroup),
    logits: wgpu::Buffer,
    host: HostSampler,
    /// Of a greedy step: where tokens are read from, of this step and of the one after it; the
    /// tokens; and what the next step reads.
    received: [wgpu::Buffer; 2],
    tokens: Vec<Option<u32>>,
    next: Batch,
    trace: Option<Vec<Interval>>,
    profile: Option<Timestamps>,
}

/// The bytes that a model will hold.
pub(crate) fn memory(
    gpu: &Gpu,
    plan: &Plan,
    limits: &Limits,
    kv_type: backend::KvType,
    slots: Option<usize>,
) -> Memory {
    let most_bytes = gpu.limits.max_storage_buffer_binding_size;
    let stages = stages(plan, most_bytes, true);
    let dtypes = kv::dtypes(plan, kv_type);
    let pages = plan.slots.iter().zip(&dtypes).zip(plan.window_indices());
    let pages = pages.map(|((slot, &dtype), window)| {
        limits.pages[window] as u64 * kv::page_bytes(slot, dtype).iter().sum::<u64>()
    });
    let states: usize = plan.states.iter().map(|s| 4 * limits.state_slots * s.elements()).sum();
    let logits = 4 * (limits.outputs * plan.output_width()) as u64;
    let scores = 4 * (limits.tokens * buffers::scores_width(plan, limits)) as u64;
    let mut ropes: Vec<&bodkin_model::Rope> = Vec::new();
    for op in &plan.ops {
        match op {
            Op::Rope { rope, .. } if !ropes.contains(&rope) => ropes.push(rope),
            _ => {}
        }
    }
    let angles: usize = ropes.iter().map(|rope| 4 * rope.dims * limits.tokens).sum();
    let tiles = 4 * tile_words(plan, limits.tokens) as u64;
    let splits = 4 * all_split_elements(plan, limits, &dtypes) as u64;
    let inputs = buffers::halves_bytes(gpu, plan, limits) + buffers::row_bytes(gpu, plan, limits);
    let values = crate::lower::value_buffers(plan, &stages);
    let rows = |is_output| if is_output { limits.outputs } else { limits.tokens };
    let values = values.iter().map(|v| 4 * (v.width * rows(v.is_output)) as u64);
    let caches = ExpertCaches::new(plan, slots);
    let weights = weights::bytes(plan, &stacks(plan, &stages), &caches, most_bytes);
    Memory {
        weight_bytes: weights.device + caches.bytes(),
        state_bytes: pages.sum::<u64>() + states as u64,
        // Logits are staged for the host, and copied to it.
        scratch_bytes: values.sum::<u64>()
            + 2 * logits
            + inputs
            + tiles
            + scores
            + splits
            + angles as u64,
        cached_expert_bytes: weights.slots,
        host_expert_bytes: weights.host,
        maps_experts: false,
        expert_slots: slots,
    }
}

impl WgpuModel {
    pub(crate) fn load(
        gpu: &Arc<Gpu>,
        plan: Arc<Plan>,
        file: &Arc<File>,
        limits: &Limits,
        (kv_type, fuse, tuning, slots): (backend::KvType, bool, Option<&Path>, Option<usize>),
        progress: backend::Progress<'_>,
    ) -> Result<WgpuModel> {
        let dtypes = kv::dtypes(&plan, kv_type);
        let most_bytes = gpu.limits.max_storage_buffer_binding_size;
        let stages = stages(&plan, most_bytes, fuse);
        let caches = ExpertCaches::new(&plan, slots);
        let matrices = weights::matrices(&plan, &stacks(&plan, &stages), &caches, most_bytes);
        let packed = (&matrices[..], caches);
        let mut program = lower(&plan, &stages, limits, packed, &dtypes, gpu.arithmetic)?;
        let buffers = Buffers::new(gpu, &plan, &program, limits, &dtypes)?;
        let loaded = weights::load(gpu, &plan, file, &matrices, progress)?;
        let vector = |id: WeightId| weights::values(file, plan.weight(id));
        let table = |rope: &bodkin_model::Rope| {
            let factors = rope.factors.map(vector);
            rope.table(factors.as_deref())
        };
        let ropes = program.ropes.iter().map(table).collect();
        let find = |id: &BufferId| match id {
            BufferId::Matrix(id, part) => Ok(loaded[id.0].parts[*part].clone()),
            BufferId::Slots(id, part) => Ok(loaded[id.0].slots[*part].clone()),
            BufferId::Vector(id) => Ok(loaded[id.0].vector.clone().expect("read as a vector")),
            BufferId::Concatenated(ids) => weights::concatenated(gpu, &plan, file, ids),
            id => Ok(buffers.get(id).clone()),
        };
        let params = dispatch::params(gpu, &program)?;
        let batch = batch_buffer(gpu, 1 << 12)?;
        if let Some(folder) = tuning {
            let (params, batch) = (&params, &batch);
            let loaded = Loaded { gpu, tokens: limits.tokens, params, batch, find: &find };
            loaded.tune(&mut program, folder)?;
        }
        gpu.compile_all(program.dispatches.iter().map(|dispatch| dispatch.kernel));
        let ready = program.dispatches.iter().enumerate();
        let ready = ready.map(|(i, dispatch)| dispatch::ready(gpu, dispatch, (&params, i), &find));
        let ready = ready.collect::<Result<Vec<_>>>()?;
        gpu.run(None)?;
        Ok(WgpuModel {
            logits: gpu.staging(4 * (limits.outputs * plan.output_width()) as u64),
            host: HostSampler::new(&plan, limits),
            received: [0, 1].map(|_| gpu.staging(4 * limits.outputs as u64)),
            tokens: Vec::with_capacity(limits.outputs),
            next: Batch::default(),
            data: BatchData::default(),
            angles: Default::default(),
            trace: None,
            profile: None,
            gpu: Arc::clone(gpu),
            limits: limits.clone(),
            plan,
            stages,
            program,
            ready,
            buffers,
            ropes,
            batch,
        })
    }

    /// Computes the logits of all outputs of a batch.
    fn forward(
        &mut self,
        batch: &Batch,
        logits: &mut [f32],
        observer: Option<&mut dyn Observer>,
    ) -> Result<()> {
        self.gpu.check()?;
        let start = Instant::now();
        self.send(batch)?;
        let sent = Instant::now();
        let mut first = 0;
        let is_observed = observer.is_some();
        if let Some(observer) = observer {
            let plan = Arc::clone(&self.plan);
            for (op, matmul) in Observed::all(&plan) {
                let end = self.ready.partition_point(|ready| ready.op < op);
                self.submit(first..end, false)?;
                first = end;
                let input = self.read_value(matmul.input, batch)?;
                let route = matmul.route.map(|route| self.read_value(route, batch)).transpose()?;
                matmul.show(&plan, batch, &input, route.as_deref(), observer);
            }
        }
        self.submit(first..self.forward_len(), true)?;
        let bytes = size_of_val(logits) as u64;
        self.gpu.read(&self.logits, bytes, None, |read| {
            bytemuck::cast_slice_mut(logits).copy_from_slice(read);
        })?;
        if !is_observed {
            self.add_times(batch)?;
        }
        if let Some(trace) = &mut self.trace {
            let end = Instant::now();
            let interval = |track, activity, name: &str, start, end| Interval {
                track,
                activity,
                name: name.into(),
                start,
                end,
            };
            trace.push(interval(Track::Host, Activity::Launch, "step data", start, sent));
            trace.push(interval(Track::Device(0), Activity::Compute, "step", sent, end));
        }
        Ok(())
    }

    /// Sends the data of a step to the device.
    fn send(&mut self, batch: &Batch) -> Result<()> {
        self.data.set(batch);
        let bytes = bytemuck::cast_slice(&self.data.words);
        if bytes.len() as u64 > self.batch.0.size() {
            self.batch = batch_buffer(&self.gpu, bytes.len().next_power_of_two() as u64)?;
        }
        self.gpu.queue.write_buffer(&self.batch.0, 0, bytes);
        for (op, &buffer) in self.plan.ops.iter().zip(&self.program.buffer_of) {
            if let (Op::Input, Some(buffer)) = (op, buffer) {
                let bytes = bytemuck::cast_slice(&batch.inputs);
                self.gpu.queue.write_buffer(&self.buffers.values[buffer], 0, bytes);
            }
        }
        for (table, buffer) in self.ropes.iter().zip(&self.buffers.angles) {
            let pairs = table.inverse_frequencies.len();
            let [cos, sin, angles] = &mut self.angles;
            cos.resize(pairs, 0.0);
            sin.resize(pairs, 0.0);
            angles.clear();
            for position in batch.positions() {
                table.cos_sin_at(position as u32, cos, sin);
                angles.extend(cos.iter().zip(&*sin).flat_map(|(&c, &s)| [c, s]));
            }
            self.gpu.queue.write_buffer(buffer, 0, bytemuck::cast_slice(angles));
        }
        Ok(())
    }

    /// The dispatches before those of the largest logits.
    fn forward_len(&self) -> usize {
        self.ready.len() - ARGMAX_DISPATCHES
    }

    /// Records some dispatches in one pass.
    fn record(&self, encoder: &mut wgpu::CommandEncoder, dispatches: std::ops::Range<usize>) {
        let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
        pass.set_bind_group(1, &self.batch.1, &[]);
        let profile = self.profile.as_ref().filter(|_| dispatches.len() == self.forward_len());
        if let Some(profile) = profile {
            profile.mark(&mut pass, 0);
        }
        for (i, ready) in dispatches.clone().zip(&self.ready[dispatches]) {
            ready.record(&mut pass, &self.data);
            if let Some(profile) = profile {
                profile.mark(&mut pass, i + 1);
            }
        }
        drop(pass);
        if let Some(profile) = profile {
            profile.resolve(encoder);
        }
    }

    /// Runs some dispatches, and at the end copies the logits for the host.
    fn submit(&self, dispatches: std::ops::Range<usize>, is_last: bool) -> Result<()> {
        let descriptor = wgpu::CommandEncoderDescriptor { label: Some("step") };
        let mut encoder = self.gpu.device.create_command_encoder(&descriptor);
        self.record(&mut encoder, dispatches);
        let bytes = 4 * (self.data.depth(Depth::Outputs) * self.plan.output_width()) as u64;
        if is_last && bytes > 0 {
            let output = &self.buffers.values[self.buffer_of(self.plan.output())];
            encoder.copy_buffer_to_buffer(output, 0, &self.logits, 0, bytes);
        }
        self.gpu.queue.submit([encoder.finish()]);
        self.gpu.check()
    }

    /// The number of a value's buffer.
    fn buffer_of(&self, value: Value) -> usize {
        self.program.buffer_of[value.0].expect("inputs of matmuls and the output are stored")
    }

    /// Reads the rows of a value of this step.
    fn read_value(&self, value: Value, batch: &Batch) -> Result<Vec<f32>> {
        let buffer = self.buffer_of(value);
        let is_output = self.program.values[buffer].is_output;
        let rows = if is_output { batch.outputs.len() } else { batch.tokens.len() };
        let bytes = 4 * (rows * self.plan.width(value)) as u64;
        let bytes = self.read_buffer(&self.buffers.values[buffer], 0, bytes)?;
        Ok(bytemuck::pod_collect_to_vec(&bytes))
    }

    fn read_buffer(&self, buffer: &wgpu::Buffer, at: u64, bytes: u64) -> Result<Vec<u8>> {
        let staging = self.gpu.staging(bytes);
        self.copy(buffer, at, &staging, 0, bytes);
        let mut read = Vec::new();
        self.gpu.read(&staging, bytes, None, |bytes| read.extend_from_slice(bytes))?;
        Ok(read)
    }

    fn read_words(&self, buffer: &wgpu::Buffer, bytes: u64) -> Result<Vec<u32>> {
        match bytes {
            0 => Ok(Vec::new()),
            _ => Ok(bytemuck::pod_collect_to_vec(&self.read_buffer(buffer, 0, bytes)?)),
        }
    }

    fn copy(&self, from: &wgpu::Buffer, from_at: u64, to: &wgpu::Buffer, to_at: u64, bytes: u64) {
        let descriptor = wgpu::CommandEncoderDescriptor { label: Some("copy") };
        let mut encoder = self.gpu.device.create_command_encoder(&descriptor);
        encoder.copy_buffer_to_buffer(from, from_at, to, to_at, bytes);
        self.gpu.queue.submit([encoder.finish()]);
    }

    /// Moves a block that begins `base` bytes into a buffer, as [`Transfer::run_region`] does in
    /// memory.
    fn transfer_region(
        &self,
        transfer: &mut Transfer<'_>,
        buffer: &wgpu::Buffer,
        base: u64,
        bytes: u64,
    ) -> Result<()> {
        let at = |block: StateBlock| base + block.number() as u64 * bytes;
        match transfer {
            Transfer::Copy { from, to } => {
                let between = self.gpu.buffer("a copy", bytes)?;
                self.copy(buffer, at(*from), &between, 0, bytes);
                self.copy(&between, 0, buffer, at(*to), bytes);
            }
            Transfer::Read { from, to } => {
                to.extend_from_slice(&self.read_buffer(buffer, at(*from), bytes)?);
            }
            Transfer::Write { from, to } => {
                let (now, rest) = from.split_at(bytes as usize);
                self.gpu.queue.write_buffer(buffer, at(*to), now);
                *from = rest;
            }
        }
        self.gpu.check()
    }
}

/// The buffer for the data of a step, and its bind group.
fn batch_buffer(gpu: &Gpu, bytes: u64) -> Result<(wgpu::Buffer, wgpu::BindGroup)> {
    let buffer = gpu.buffer("data of a step", bytes)?;
    let group = gpu.device.create_bind_group(&wgpu::BindGroupDescriptor {
        label: Some("batch"),
        layout: &gpu.batch_layout,
        entries: &[wgpu::BindGroupEntry { binding: 0, resource: buffer.as_entire_binding() }],
    });
    Ok((buffer, group))
}

impl Model for WgpuModel {
    fn plan(&self) -> &Plan {
        &self.plan
    }

    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn step(&mut self, step: backend::Step<'_>, sink: Sink<'_>) -> Result<()> {
        if self.is_greedy(&step) {
            return self.step_greedy(&step, sink);
        }
        let mut host = std::mem::take(&mut self.host);
        let result = host
            .run(step, sink, &mut |batch, logits, observer| self.forward(batch, logits, observer));
        self.host = host;
        result
    }

    fn transfer(&mut self, mut transfer: Transfer<'_>) -> Result<usize> {
        let mut moved = 0;
        match transfer.block() {
            StateBlock::Page { window_index, .. } => {
                for kv in self.buffers.kv.iter().filter(|kv| kv.window_index == window_index) {
                    for (base, bytes) in [0, kv.values_at].into_iter().zip(kv.page_bytes) {
                        if bytes > 0 {
                            self.transfer_region(&mut transfer, &kv.buffer, base, bytes)?;
                        }
                        moved += bytes as usize;
                    }
                }
            }
            StateBlock::StateSlot(_) => {
                for (state, buffer) in self.plan.states.iter().zip(&self.buffers.states) {
                    let bytes = 4 * state.elements();
                    self.transfer_region(&mut transfer, buffer, 0, bytes as u64)?;
                    moved += bytes;
                }
            }
        }
        Ok(moved)
    }

    fn stats(&self) -> ModelStats {
        let timeline = self.trace.clone().unwrap_or_default();
        let stages = self.stage_profiles();
        let (counts, caches) = (&self.buffers.counts, &self.buffers.expert_caches);
        let counts = self.read_words(counts, 4 * self.program.counts as u64);
        let caches = self.read_words(caches, self.program.caches.bytes());
        let (Ok(counts), Ok(caches)) = (counts, caches) else {
            return ModelStats { stages, timeline, ..ModelStats::default() };
        };
        let mut rest = counts.into_iter().map(u64::from);
        let caches = self.program.caches.stats(&caches);
        let routings = self.plan.routings().map(|routing| routing.experts);
        let layers = self.plan.routed_layers().into_iter().zip(caches);
        let experts = routings.zip(layers).map(|(experts, (layer, cache))| {
            let counts = rest.by_ref().take(experts).collect();
            ExpertStats { layer, counts, seconds: Vec::new(), cache }
        });
        ModelStats { experts: experts.collect(), stages, timeline, ..ModelStats::default() }
    }

    fn set_profiling(&mut self, on: bool) {
        self.profile = if on { Timestamps::new(&self.gpu, self.forward_len()) } else { None };
    }

    fn set_tracing(&mut self, on: bool) -> Result<()> {
        self.trace = on.then(Vec::new);
        Ok(())
    }

    fn set_activation_thresholds(&mut self, thresholds: &[f32]) -> Result<usize> {
        Err(Error::no_thresholds(&self.gpu.info.name, thresholds))
    }
}
