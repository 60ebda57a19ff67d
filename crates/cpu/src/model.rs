//! A loaded model: all memory that steps need, and how a step is set up on it.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

use bodkin_backend::{
    self as backend, Batch, Error, ExpertStats, HostSampler, Limits, Matmul, Memory, Model,
    ModelStats, Observer, PAGE_TOKENS, Result, Sink, StateBlock, Transfer, WeightLayout,
};
use bodkin_gguf::File;
use bodkin_model::{Op, Plan, Rope, RopeTable, WeightId};

use crate::config::{Cpu, Fusions, Sparse};
use crate::expert_permutation::{PermutationTables, PermutationView};
use crate::isa::Isa;
use crate::kv::{KvDtype, KvLayout, KvPages, KvView};
use crate::linear::{ActivationFormat, Activations, PackedLayout, PackedWeight, SCRATCH_LEN};
use crate::lower::lower;
use crate::memory::AlignedMemory;
use crate::pool::Pool;
use crate::profile::Times;
use crate::program::Program;
use crate::shared::Shared;
use crate::state::{self, States};
use crate::step::context::{ObserveFn, StepContext};
use crate::step::{partials_len, scratch_len};
use crate::trace::Trace;
use crate::weights::{EmbeddingTables, LoadedWeight, is_column_major, masked, uses};

/// The largest need for scratch of each kind, in elements or bytes.
struct Sizes {
    /// Columns of the widest input with a threshold.
    masked_cols: usize,
    /// Of inputs of products, by their form.
    input_bytes: [usize; ActivationFormat::ALL.len()],
    scratch: usize,
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
    ropes: Vec<RopeTable>,
    slot_tables: Vec<usize>,
    memory: Buffers,
    positions: Vec<u32>,
    spans: Vec<u32>,
    /// Of the inputs of gated products; none if the model was loaded without.
    thresholds: Vec<f32>,
    claimed: Vec<AtomicUsize>,
    profile: Option<Times>,
    trace: Option<Trace>,
    host: HostSampler,
}

/// What threads write. The views point into the owners, which are never touched directly.
struct Buffers {
    values: Vec<Shared<f32>>,
    angles: Vec<Shared<f32>>,
    scratch: Vec<Shared<f32>>,
    partials: Shared<f32>,
    kv: Vec<KvView>,
    states: States,
    sorted: Vec<PermutationView>,
    inputs: [Activations; ActivationFormat::ALL.len()],
    _floats: Vec<AlignedMemory>,
    _pages: Vec<KvPages>,
    _sorted: Vec<PermutationTables>,
}

impl Buffers {
    fn new(
        cpu: &Cpu,
        plan: &Plan,
        program: &Program,
        limits: &Limits,
        sizes: &Sizes,
        threads: usize,
    ) -> Buffers {
        let mut owners: Vec<AlignedMemory> = Vec::new();
        let mut floats = |len: usize| {
            let mut owner = AlignedMemory::zeroed(size_of::<f32>() * len);
            let view = Shared::new(owner.numbers_mut());
            owners.push(owner);
            view
        };
        let rows = limits.tokens;
        let values = program.buffer_widths.iter().map(|w| floats(w * rows)).collect();
        let angles = program.ropes.iter().map(|r| floats(r.dims * rows)).collect();
        let scratch = (0..threads).map(|_| floats(sizes.scratch)).collect();
        let partials = floats(sizes.partials);
        let mut pages = Vec::new();
        let mut kv = Vec::new();
        for (slot, group) in plan.slots.iter().zip(plan.slot_windows()) {
            let layout = KvLayout::new(slot, KvDtype::of(cpu.kv_type, plan));
            let mut owner = KvPages::new(&layout, limits.pages[group]);
            kv.push(owner.view(layout));
            pages.push(owner);
        }
        let mut sorted: Vec<PermutationTables> = program
            .permutations
            .iter()
            .map(|permutation| PermutationTables::new(permutation, rows, threads))
            .collect();
        Buffers {
            states: States::new(plan, limits.state_slots),
            sorted: sorted.iter_mut().map(PermutationTables::view).collect(),
            _sorted: sorted,
            values,
            angles,
            scratch,
            partials,
            kv,
            inputs: ActivationFormat::ALL.map(|format| {
                let input = Activations::with_bytes(sizes.input_bytes[format as usize]);
                input.with_nonzeros(sizes.masked_cols)
            }),
            _floats: owners,
            _pages: pages,
        }
    }
}

fn sizes(cpu: &Cpu, plan: &Plan, limits: &Limits) -> Sizes {
    let cols = masked(cpu, plan).into_iter().map(|id| plan.weight(id).cols);
    let masked_cols = cols.max().unwrap_or(0);
    let (scratch, partials) = (SCRATCH_LEN, 0);
    let mut sizes = Sizes { masked_cols, input_bytes: [0; _], scratch, partials };
    for op in &plan.ops {
        let (weight, rows) = match op {
            Op::Linear { weight, .. } => (plan.weight(*weight), limits.tokens),
            Op::Logits { weight, .. } => (plan.weight(*weight), limits.outputs),
            Op::ExpertLinear { weight, route, experts, .. } => {
                let used = route.map_or(*experts, |route| plan.width(route) / 2);
                (plan.weight(*weight), limits.tokens * used)
            }
            _ => continue,
        };
        let format = PackedLayout::planned(weight.format).activation_format(cpu.isa);
        let input_bytes = &mut sizes.input_bytes[format as usize];
        *input_bytes = (*input_bytes).max(format.bytes(rows, weight.cols));
        // A panel of a weight that is not repacked at load has to fit.
        let layout = PackedLayout::native(weight.format).unwrap_or(PackedLayout::F32);
        let panel = layout.panel_bytes(weight.cols).map_or(0, |bytes| bytes.div_ceil(4));
        sizes.scratch = sizes.scratch.max(panel);
    }
    for (slot, group) in plan.slots.iter().zip(plan.slot_windows()) {
        let stride = KvLayout::new(slot, KvDtype::of(cpu.kv_type, plan)).value_stride;
        let tokens = limits.pages[group] * PAGE_TOKENS;
        sizes.scratch = sizes.scratch.max(scratch_len(slot.key_dim, stride));
        sizes.partials = sizes.partials.max(partials_len(cpu.threads, tokens, stride));
    }
    sizes
}

/// The bytes that a model will hold.
pub(crate) fn memory(cpu: &Cpu, plan: &Plan, limits: &Limits) -> Memory {
    let threads = cpu.threads;
    let sizes = sizes(cpu, plan, limits);
    let masked = masked(cpu, plan);
    let weights = plan.weights.iter().zip(uses(plan)).enumerate().map(|(id, (w, uses))| {
        let is_column_major = masked.contains(&WeightId(id)) && is_column_major(cpu, w);
        let multiple = if is_column_major { PackedWeight::GROUP_ROWS } else { 1 };
        let rows = (w.rows / uses.matrices.max(1)).next_multiple_of(multiple);
        let packed = PackedWeight::bytes_for(PackedLayout::planned(w.format), rows, w.cols);
        let dense = uses.matrices as u64 * packed.expect("no tensor of a file overflows") as u64;
        // Nibbles lie in pairs of rows that are not of one length: a little more than in the file.
        let sparse = w.bytes + w.bytes / 16;
        let matrices = match (w.format.base().is_some(), cpu.sparse) {
            _ if uses.matrices == 0 => 0,
            (true, Sparse::Always) => sparse,
            (true, Sparse::Auto) => dense.max(sparse),
            (false, _) if !cpu.repack => 0,
            _ => dense,
        };
        let vector = 4 * (w.rows * w.cols) as u64;
        matrices + u64::from(uses.vector) * vector
    });
    let pages = plan.slots.iter().zip(plan.slot_windows());
    let values = plan.buffers().bytes(limits.tokens);
    let program = lower(plan, cpu.isa, Fusions::ALL, &masked);
    let angles: usize = program.ropes.iter().map(|rope| rope.dims * limits.tokens).sum();
    let sorted =
        program.permutations.iter().map(|s| PermutationTables::bytes(s, limits.tokens, threads));
    let sorted: usize = sorted.sum();
    let scratch = 4 * (threads * sizes.scratch + sizes.partials + angles) + sorted;
    let logits = 4 * limits.outputs * plan.output_width();
    Memory {
        weight_bytes: weights.sum(),
        state_bytes: pages
            .map(|(slot, group)| {
                let layout = KvLayout::new(slot, KvDtype::of(cpu.kv_type, plan));
                limits.pages[group] as u64 * layout.page_bytes()
            })
            .sum::<u64>()
            + state::bytes(plan, limits.state_slots),
        scratch_bytes: values + (sizes.input_bytes.iter().sum::<usize>() + scratch + logits) as u64,
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
    ) -> CpuModel {
        let masked = masked(cpu, &plan);
        let program = lower(&plan, cpu.isa, cpu.fusions, &masked);
        let (sizes, threads) = (sizes(cpu, &plan, limits), pool.threads());
        let memory = Buffers::new(cpu, &plan, &program, limits, &sizes, threads);
        let vector = |id: WeightId| weights[id.0].vector.as_deref().expect("prepared as a vector");
        let table = |rope: &Rope| rope.table(rope.factors.map(vector));
        let ropes = program.ropes.iter().map(table).collect();
        CpuModel {
            slot_tables: plan.slot_windows(),
            positions: Vec::with_capacity(limits.tokens),
            spans: Vec::with_capacity(limits.tokens),
            thresholds: vec![0.0; masked.len()],
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
            ropes,
            memory,
        }
    }

    /// The tables of each routing of the plan.
    fn routed(&self) -> impl Iterator<Item = PermutationView> {
        let routed = self.program.permutations.iter().zip(&self.memory.sorted);
        routed.filter(|(permutation, _)| permutation.route.is_some()).map(|(_, sorted)| *sorted)
    }

    /// Computes the logits of all outputs of a batch.
    fn forward(&mut self, batch: &Batch, logits: &mut [f32], observer: Option<&mut dyn Observer>) {
        self.positions.clear();
        self.positions.extend(batch.positions().map(|p| p as u32));
        self.spans.clear();
        for (i, span) in batch.spans.iter().enumerate() {
            self.spans.extend(std::iter::repeat_n(i as u32, span.len));
        }
        self.claimed.iter().for_each(|claimed| claimed.store(0, Relaxed));
        let observer = observer.map(Mutex::new);
        let show = observer.as_ref().map(|observer| {
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
            spans: &self.spans,
            buffers: &self.memory.values,
            logits: Shared::new(logits),
            inputs: &self.memory.inputs,
            kv: &self.memory.kv,
            states: &self.memory.states.views,
            permutations: &self.memory.sorted,
            slot_tables: &self.slot_tables,
            ropes: &self.ropes,
            angles: &self.memory.angles,
            scratch: &self.memory.scratch,
            partials: self.memory.partials,
            thresholds: &self.thresholds,
            claimed: &self.claimed,
            observe: show.as_ref().map(|show| show as ObserveFn<'_>),
            seconds: self.profile.as_mut().map(|times| {
                times.steps += 1;
                times.tokens += batch.tokens.len() as u64;
                times.outputs += batch.outputs.len() as u64;
                Shared::new(&mut times.seconds)
            }),
            trace: self.trace.as_ref(),
        };
        self.pool.run(&|worker| step.run(worker));
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
            StateBlock::Page { window, .. } => {
                let views = self.memory.kv.iter().zip(&self.slot_tables);
                // SAFETY: no step is running, and only steps access the views.
                views
                    .filter(|(_, table)| **table == window)
                    .map(|(view, _)| unsafe { view.transfer(&mut transfer) })
                    .sum()
            }
            StateBlock::Slot(_) => self.memory.states.transfer(&self.plan, &mut transfer),
        })
    }

    fn stats(&self) -> ModelStats {
        let routed = self.plan.routed_layers().into_iter().zip(self.routed());
        // SAFETY: a step borrows the model for as long as it runs.
        let experts = routed.map(|(layer, sorted)| unsafe {
            ExpertStats { layer, counts: sorted.counts().to_vec(), seconds: sorted.seconds() }
        });
        let (weights, sorted) = (&self.weights, &self.memory.sorted);
        let stages = |times: &Times| times.stages(&self.plan, &self.program, weights, sorted);
        ModelStats {
            experts: experts.collect(),
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
        let is_column_major = |id: &&WeightId| {
            self.weights[id.0].matrices.iter().all(|matrix| matrix.columns().is_some())
        };
        Ok(self.plan.gated_matmuls().iter().filter(is_column_major).count())
    }

    fn set_profiling(&mut self, on: bool) {
        self.profile = on.then(|| Times::new(&self.program, &self.memory.sorted));
    }

    fn set_tracing(&mut self, on: bool) -> Result<()> {
        self.trace = on.then(|| Trace::new(&self.plan, &self.program, self.pool.threads()));
        Ok(())
    }
}
