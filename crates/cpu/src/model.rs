//! A loaded model: all memory that steps need, and how a step is set up on it.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

use bodkin_backend::{
    self as backend, Batch, Error, ExpertStats, HostSampler, Limits, Matmul, Memory, Model,
    ModelStats, Observer, PAGE_TOKENS, Pool, Result, Sink, StateBlock, Transfer, WeightLayout,
};
use bodkin_gguf::File;
use bodkin_model::{Entries, Op, Plan, RecurrentState, Rope, RopeTable, WeightId};

use crate::config::{Cpu, Fusions, Sparse};
use crate::expert_cache::{self, ExpertCache, expert_bytes};
use crate::expert_permutation::{PermutationTables, PermutationView};
use crate::isa::Isa;
use crate::kv::{KvDtype, KvLayout, KvPages, KvView};
use crate::linear::{
    ActivationFormat, Activations, PackedLayout, PackedWeight, matmul_scratch_len,
};
use crate::lower::lower;
use crate::memory::AlignedMemory;
use crate::ops::delta_rule;
use crate::profile::Times;
use crate::program::Program;
use crate::shared::Shared;
use crate::state::{self, States};
use crate::step::context::{ObserveFn, StepContext};
use crate::step::{gathered_scratch_len, partials_len, scratch_len, select_scratch_len};
use crate::trace::Trace;
use crate::vector::LANES;
use crate::weights::{EmbeddingTables, LoadedWeight, is_column_major, thresholded, uses};

/// The sizes of buffers that the largest step needs.
struct Sizes {
    /// Columns of the widest input with a threshold.
    thresholded_cols: usize,
    /// Bytes of the largest matmul input in each activation format.
    input_bytes: [usize; ActivationFormat::ALL.len()],
    /// Elements of each thread's scratch.
    scratch: usize,
    /// Elements of the partial results of KV splits.
    partials: usize,
}

/// A plan on the CPU.
pub(crate) struct CpuModel {
    plan: Arc<Plan>,
    file: Arc<File>,
    limits: Limits,
    isa: Isa,
    program: Program,
    pool: Pool,
    weights: Vec<LoadedWeight>,
    tables: EmbeddingTables,
    weight_layouts: Vec<WeightLayout>,
    /// The cache of each expert permutation, if its experts have one.
    caches: Vec<Option<ExpertCache>>,
    ropes: Vec<RopeTable>,
    window_indices: Vec<usize>,
    memory: ModelMemory,
    positions: Vec<u32>,
    span_of_row: Vec<u32>,
    /// Input thresholds of [`Plan::sparse_input_matmuls`]; empty if the model was loaded without.
    thresholds: Vec<f32>,
    /// As in [`StepContext`], where the other fields of a step are described too.
    claimed: Vec<AtomicUsize>,
    profile: Option<Times>,
    trace: Option<Trace>,
    host: HostSampler,
}

/// What threads write; shapes are those of [`StepContext`]. The views point into the owners, the
/// fields with an underscore, which are never touched directly.
struct ModelMemory {
    buffers: Vec<Shared<f32>>,
    angles: Vec<Shared<f32>>,
    scratch: Vec<Shared<f32>>,
    partials: Shared<f32>,
    kv: Vec<KvView>,
    states: States,
    permutations: Vec<PermutationView>,
    quantized_inputs: [Activations; ActivationFormat::ALL.len()],
    _floats: Vec<AlignedMemory>,
    _pages: Vec<KvPages>,
    _permutations: Vec<PermutationTables>,
}

impl ModelMemory {
    fn new(
        cpu: &Cpu,
        plan: &Plan,
        program: &Program,
        limits: &Limits,
        sizes: &Sizes,
        threads: usize,
    ) -> ModelMemory {
        let mut owners: Vec<AlignedMemory> = Vec::new();
        let mut floats = |len: usize| {
            let mut owner = AlignedMemory::zeroed(size_of::<f32>() * len);
            let view = Shared::new(owner.numbers_mut());
            owners.push(owner);
            view
        };
        let rows = limits.tokens;
        let buffers = program.buffer_widths.iter().map(|w| floats(w * rows)).collect();
        let angles = program.ropes.iter().map(|r| floats(r.dims * rows)).collect();
        let scratch = (0..threads).map(|_| floats(sizes.scratch)).collect();
        let partials = floats(sizes.partials);
        let mut pages = Vec::new();
        let mut kv = Vec::new();
        for (slot, window_index) in plan.slots.iter().zip(plan.window_indices()) {
            let layout = KvLayout::new(slot, KvDtype::of(cpu.kv_type, plan, slot));
            let mut owner = KvPages::new(&layout, limits.pages[window_index]);
            kv.push(owner.view(layout));
            pages.push(owner);
        }
        let mut permutations: Vec<PermutationTables> = program
            .permutations
            .iter()
            .map(|permutation| PermutationTables::new(permutation, rows, threads))
            .collect();
        ModelMemory {
            states: States::new(plan, limits.state_slots),
            permutations: permutations.iter_mut().map(PermutationTables::view).collect(),
            _permutations: permutations,
            buffers,
            angles,
            scratch,
            partials,
            kv,
            quantized_inputs: ActivationFormat::ALL.map(|format| {
                let input = Activations::with_bytes(sizes.input_bytes[format as usize]);
                input.with_nonzeros(sizes.thresholded_cols)
            }),
            _floats: owners,
            _pages: pages,
        }
    }
}

fn sizes(cpu: &Cpu, plan: &Plan, limits: &Limits) -> Sizes {
    let cols = thresholded(cpu, plan).into_iter().map(|id| plan.weight(id).cols);
    let thresholded_cols = cols.max().unwrap_or(0);
    let (scratch, partials) = (matmul_scratch_len(cpu.isa, 0), 0);
    let mut sizes = Sizes { thresholded_cols, input_bytes: [0; _], scratch, partials };
    for op in &plan.ops {
        let (weight, rows) = match op {
            Op::Linear { weight, .. } => (plan.weight(*weight), limits.tokens),
            Op::Logits { weight, .. } => (plan.weight(*weight), limits.outputs),
            Op::ExpertLinear { weight, route, experts, .. } => {
                // A row of the router's output is the weights, then the ids, of its experts.
                // Without a router, every row uses all, as the heads of latent attention do.
                let used = route.map_or(*experts, |route| plan.width(route) / 2);
                (plan.weight(*weight), limits.tokens * used)
            }
            _ => continue,
        };
        let formats = |layout: PackedLayout| layout.activation_formats(cpu.isa);
        for format in PackedLayout::possible(weight.format).flat_map(formats) {
            let input_bytes = &mut sizes.input_bytes[format as usize];
            *input_bytes = (*input_bytes).max(format.bytes(rows, weight.cols));
        }
        // A thread packs the panels of a weight that is not repacked at load in its scratch.
        let layout = PackedLayout::native(weight.format).unwrap_or(PackedLayout::F32);
        let panel = layout.panel_bytes(weight.cols).unwrap_or(0);
        sizes.scratch = sizes.scratch.max(matmul_scratch_len(cpu.isa, panel));
    }
    let window_indices = plan.window_indices();
    for (slot, &window_index) in plan.slots.iter().zip(&window_indices) {
        let stride = KvLayout::new(slot, KvDtype::of(cpu.kv_type, plan, slot)).value_stride;
        let tokens = limits.pages[window_index] * PAGE_TOKENS;
        sizes.scratch = sizes.scratch.max(scratch_len(slot.key_dim, stride));
        sizes.partials = sizes.partials.max(partials_len(cpu.threads, tokens, stride));
    }
    for state in &plan.states {
        if let RecurrentState::DeltaRule(rule) = state {
            sizes.scratch = sizes.scratch.max(delta_rule::scratch_len(rule.head_dim));
        }
    }
    for op in &plan.ops {
        let scratch = match op {
            Op::Attention { attention: a, .. } if a.entries != Entries::Tokens => {
                gathered_scratch_len(a, a.value_dim.next_multiple_of(LANES))
            }
            Op::Select { indexer, slot, .. } => {
                let pages = limits.pages[window_indices[slot.0]];
                select_scratch_len(indexer, plan.slots[slot.0].entries(pages * PAGE_TOKENS))
            }
            _ => continue,
        };
        sizes.scratch = sizes.scratch.max(scratch);
    }
    sizes
}

/// The bytes that a model will hold.
pub(crate) fn memory(cpu: &Cpu, plan: &Plan, limits: &Limits) -> Memory {
    let slots = expert_slots(cpu, plan, limits);
    let cached = slots.map_or(0, |slots| slots as u64 * expert_bytes(plan).slot);
    Memory {
        weight_bytes: weight_bytes(cpu, plan, slots.is_some()) + cached,
        cached_expert_bytes: cached,
        maps_experts: slots.is_some(),
        expert_slots: slots,
        ..memory_besides_weights(cpu, plan, limits, slots.is_some())
    }
}

/// The slots for experts in each layer, or none if all have room.
pub(crate) fn expert_slots(cpu: &Cpu, plan: &Plan, limits: &Limits) -> Option<usize> {
    let Memory { state_bytes, scratch_bytes, .. } = memory_besides_weights(cpu, plan, limits, true);
    let others = weight_bytes(cpu, plan, true) + state_bytes + scratch_bytes;
    expert_cache::slots(cpu, plan, others)
}

/// Bytes of the weights, without experts that can be cached if they are.
fn weight_bytes(cpu: &Cpu, plan: &Plan, are_cached: bool) -> u64 {
    let thresholded = thresholded(cpu, plan);
    let weights = plan.weights.iter().zip(uses(plan)).enumerate().map(|(id, (w, uses))| {
        let is_column_major = thresholded.contains(&WeightId(id)) && is_column_major(cpu, w);
        let multiple = if is_column_major { PackedWeight::GROUP_ROWS } else { 1 };
        let rows = (w.rows / uses.matrices.max(1)).next_multiple_of(multiple);
        let packed = PackedWeight::bytes_for(PackedLayout::planned(w.format), rows, w.cols);
        let dense = uses.matrices as u64 * packed.expect("no tensor of a file overflows") as u64;
        // Two lists of 4-bit codes share their bytes: where one is longer, packing adds a little.
        let sparse = w.bytes + w.bytes / 16;
        let matrices = match (w.format.base().is_some(), cpu.sparse) {
            _ if uses.matrices == 0 || (are_cached && uses.can_be_cached) => 0,
            (true, Sparse::Always) => sparse,
            (true, Sparse::Auto) => dense.max(sparse),
            (false, _) if !cpu.repack => 0,
            _ => dense,
        };
        let vector = 4 * (w.rows * w.cols) as u64;
        matrices + u64::from(uses.vector) * vector
    });
    weights.sum()
}

/// The bytes of state and scratch.
fn memory_besides_weights(cpu: &Cpu, plan: &Plan, limits: &Limits, are_cached: bool) -> Memory {
    let (threads, sizes) = (cpu.threads, sizes(cpu, plan, limits));
    let pages = plan.slots.iter().zip(plan.window_indices());
    // Nothing is read that depends on fusions.
    let program = lower(plan, cpu.isa, Fusions::ALL, &thresholded(cpu, plan), are_cached);
    let buffers = 4 * limits.tokens * program.buffer_widths.iter().sum::<usize>();
    let angles: usize = program.ropes.iter().map(|rope| rope.dims * limits.tokens).sum();
    let permutations =
        program.permutations.iter().map(|p| PermutationTables::bytes(p, limits.tokens, threads));
    let permutations: usize = permutations.sum();
    let scratch = 4 * (threads * sizes.scratch + sizes.partials + angles) + permutations + buffers;
    let logits = 4 * limits.outputs * plan.output_width();
    Memory {
        state_bytes: pages
            .map(|(slot, window_index)| {
                let layout = KvLayout::new(slot, KvDtype::of(cpu.kv_type, plan, slot));
                limits.pages[window_index] as u64 * layout.page_bytes()
            })
            .sum::<u64>()
            + state::bytes(plan, limits.state_slots),
        scratch_bytes: (sizes.input_bytes.iter().sum::<usize>() + scratch + logits) as u64,
        ..Memory::default()
    }
}

impl CpuModel {
    pub(crate) fn new(
        cpu: &Cpu,
        plan: Arc<Plan>,
        file: &Arc<File>,
        limits: &Limits,
        pool: Pool,
        (weights, weight_layouts): (Vec<LoadedWeight>, Vec<WeightLayout>),
        mut caches: BTreeMap<usize, ExpertCache>,
    ) -> CpuModel {
        let thresholded = thresholded(cpu, &plan);
        let program = lower(&plan, cpu.isa, cpu.fusions, &thresholded, !caches.is_empty());
        let (sizes, threads) = (sizes(cpu, &plan, limits), pool.threads());
        let memory = ModelMemory::new(cpu, &plan, &program, limits, &sizes, threads);
        let vector = |id: WeightId| weights[id.0].vector.as_deref().expect("prepared as a vector");
        let table = |rope: &Rope| rope.table(rope.factors.map(vector));
        let ropes = program.ropes.iter().map(table).collect();
        let permutations = program.permutations.iter();
        let caches = permutations.map(|p| p.op.and_then(|op| caches.remove(&op))).collect();
        CpuModel {
            window_indices: plan.window_indices(),
            positions: Vec::with_capacity(limits.tokens),
            span_of_row: Vec::with_capacity(limits.tokens),
            thresholds: vec![0.0; thresholded.len()],
            tables: EmbeddingTables::new(cpu, &plan),
            claimed: (0..program.stages.len() * threads).map(|_| AtomicUsize::new(0)).collect(),
            profile: None,
            trace: None,
            host: HostSampler::new(&plan, limits),
            plan,
            file: Arc::clone(file),
            limits: limits.clone(),
            isa: cpu.isa,
            program,
            pool,
            weights,
            weight_layouts,
            caches,
            ropes,
            memory,
        }
    }

    /// The permutation of each routing of the plan, and its cache.
    fn routed(&self) -> impl Iterator<Item = (PermutationView, Option<&ExpertCache>)> {
        let views = self.memory.permutations.iter().zip(&self.caches);
        let routed = self.program.permutations.iter().zip(views);
        let routed = routed.filter(|(permutation, _)| permutation.route.is_some());
        routed.map(|(_, (view, cache))| (*view, cache.as_ref()))
    }

    /// Computes the logits of all outputs of a batch.
    fn forward(&mut self, batch: &Batch, logits: &mut [f32], observer: Option<&mut dyn Observer>) {
        self.positions.clear();
        self.positions.extend(batch.positions().map(|p| p as u32));
        self.span_of_row.clear();
        for (i, span) in batch.spans.iter().enumerate() {
            self.span_of_row.extend(std::iter::repeat_n(i as u32, span.len));
        }
        self.claimed.iter().for_each(|claimed| claimed.store(0, Relaxed));
        let observer = observer.map(Mutex::new);
        let observe = observer.as_ref().map(|observer| {
            |matmul: &Matmul<'_>| {
                observer.lock().unwrap_or_else(PoisonError::into_inner).matmul(matmul);
            }
        });
        let step = StepContext {
            isa: self.isa,
            program: &self.program,
            plan: &self.plan,
            file: &self.file,
            weights: &self.weights,
            batch,
            positions: &self.positions,
            span_of_row: &self.span_of_row,
            buffers: &self.memory.buffers,
            logits: Shared::new(logits),
            quantized_inputs: &self.memory.quantized_inputs,
            kv: &self.memory.kv,
            states: &self.memory.states.views,
            permutations: &self.memory.permutations,
            caches: &self.caches,
            window_indices: &self.window_indices,
            ropes: &self.ropes,
            angles: &self.memory.angles,
            scratch: &self.memory.scratch,
            partials: self.memory.partials,
            thresholds: &self.thresholds,
            claimed: &self.claimed,
            observe: observe.as_ref().map(|observe| observe as ObserveFn<'_>),
            seconds: self.profile.as_mut().map(|times| {
                times.steps += 1;
                times.tokens += batch.tokens.len() as u64;
                times.outputs += batch.outputs.len() as u64;
                Shared::new(&mut times.seconds)
            }),
            trace: self.trace.as_ref(),
        };
        self.pool.run(&|worker| step.run(worker));
        self.caches.iter().flatten().for_each(|cache| cache.after_step(&self.file));
        self.tables.after_step(&self.file, &self.plan, batch.tokens.len());
    }
}

impl Model for CpuModel {
    fn plan(&self) -> &Plan {
        &self.plan
    }

    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn step(&mut self, step: backend::Step<'_>, sink: Sink<'_>) -> Result<()> {
        let mut host = std::mem::take(&mut self.host);
        let result = host.run(step, sink, &mut |batch, logits, observer| {
            self.forward(batch, logits, observer);
            Ok(())
        });
        self.host = host;
        result
    }

    fn transfer(&mut self, mut transfer: Transfer<'_>) -> Result<usize> {
        Ok(match transfer.block() {
            StateBlock::Page { window_index, .. } => {
                let views = self.memory.kv.iter().zip(&self.window_indices);
                // SAFETY: no step is running, and only steps access the views.
                views
                    .filter(|(_, of)| **of == window_index)
                    .map(|(view, _)| unsafe { view.transfer(&mut transfer) })
                    .sum()
            }
            StateBlock::StateSlot(_) => self.memory.states.transfer(&self.plan, &mut transfer),
        })
    }

    fn stats(&self) -> ModelStats {
        let routed = self.plan.routed_layers().into_iter().zip(self.routed());
        // SAFETY: a step borrows the model for as long as it runs.
        let experts = routed.map(|(layer, (view, cache))| unsafe {
            let (counts, seconds) = (view.counts().to_vec(), view.seconds());
            ExpertStats { layer, counts, seconds, cache: cache.map(ExpertCache::stats) }
        });
        let (weights, permutations) = (&self.weights, &self.memory.permutations);
        let stages = |times: &Times| times.stages(&self.plan, &self.program, weights, permutations);
        ModelStats {
            experts: experts.collect(),
            maps_experts: self.caches.iter().any(Option::is_some),
            stages: self.profile.as_ref().map_or_else(Vec::new, stages),
            timeline: self.trace.as_ref().map_or_else(Vec::new, Trace::timeline),
            weight_layouts: self.weight_layouts.clone(),
        }
    }

    fn set_activation_thresholds(&mut self, thresholds: &[f32]) -> Result<usize> {
        if thresholds.len() != self.thresholds.len() {
            let (found, limit) = (thresholds.len(), self.thresholds.len());
            return Err(Error::Limit { what: "activation thresholds", found, limit });
        }
        self.thresholds.copy_from_slice(thresholds);
        let skips_weights = |id: &&WeightId| {
            self.weights[id.0].matrices.iter().all(|matrix| matrix.columns().is_some())
        };
        Ok(self.plan.sparse_input_matmuls().iter().filter(skips_weights).count())
    }

    fn set_profiling(&mut self, on: bool) {
        self.profile = on.then(|| Times::new(&self.program, &self.memory.permutations));
    }

    fn set_tracing(&mut self, on: bool) -> Result<()> {
        self.trace = on.then(|| Trace::new(&self.plan, &self.program, self.pool.threads()));
        Ok(())
    }
}
