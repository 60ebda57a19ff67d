//! The buffers of a model other than its weights.

use bodkin_backend::{Limits, PAGE_TOKENS, Result};
use bodkin_model::{Op, Plan};

use crate::gpu::Gpu;
use crate::kv::{self, KvCache};
use crate::lower::{
    ARGMAX_PARTS, all_split_elements, byte_row_vectors, half_row_quads, tile_words,
};
use crate::program::{Activations, BufferId, KvDtype, Program};
use crate::weights::upload;

/// All of them, in the order of their numbers.
pub(crate) struct Buffers {
    pub(crate) values: Vec<wgpu::Buffer>,
    pub(crate) kv: Vec<KvCache>,
    pub(crate) states: Vec<wgpu::Buffer>,
    pub(crate) angles: Vec<wgpu::Buffer>,
    pub(crate) counts: wgpu::Buffer,
    pub(crate) expert_caches: wgpu::Buffer,
    expert_tiles: wgpu::Buffer,
    halves: wgpu::Buffer,
    bytes: wgpu::Buffer,
    scores: wgpu::Buffer,
    splits: wgpu::Buffer,
    parts: wgpu::Buffer,
    pub(crate) tokens: wgpu::Buffer,
    none: wgpu::Buffer,
    no_result: wgpu::Buffer,
}

impl Buffers {
    /// Those that steps within `limits` need.
    pub(crate) fn new(
        gpu: &Gpu,
        plan: &Plan,
        program: &Program,
        limits: &Limits,
        dtypes: &[KvDtype],
    ) -> Result<Buffers> {
        let buffer = |label: &str, elements: usize| gpu.buffer(label, 4 * elements as u64);
        let values = program.values.iter().map(|value| {
            let rows = if value.is_output { limits.outputs } else { limits.tokens };
            buffer("values of a step", value.width * rows)
        });
        let states = plan.states.iter().map(|s| buffer("state", limits.state_slots * s.elements()));
        let angles = program.ropes.iter().map(|r| buffer("angles", r.dims * limits.tokens));
        Ok(Buffers {
            values: values.collect::<Result<_>>()?,
            kv: kv::caches(gpu, plan, limits, dtypes)?,
            states: states.collect::<Result<_>>()?,
            angles: angles.collect::<Result<_>>()?,
            counts: buffer("counts of experts", program.counts)?,
            expert_caches: upload(gpu, "caches of experts", &program.caches.words())?,
            expert_tiles: buffer("tiles of experts", tile_words(plan, limits.tokens))?,
            halves: gpu.buffer("inputs in half precision", halves_bytes(gpu, plan, limits))?,
            bytes: gpu.buffer("inputs as bytes", row_bytes(gpu, plan, limits))?,
            scores: buffer("scores", limits.tokens * scores_width(plan, limits))?,
            splits: buffer("splits", all_split_elements(plan, limits, dtypes))?,
            parts: buffer("largest logits", 2 * ARGMAX_PARTS * limits.outputs)?,
            tokens: buffer("tokens", limits.outputs)?,
            none: buffer("none", 0)?,
            no_result: buffer("none", 0)?,
        })
    }

    /// The buffer of an operand that is no weight.
    pub(crate) fn get(&self, id: &BufferId) -> &wgpu::Buffer {
        match *id {
            BufferId::None => &self.none,
            BufferId::NoResult => &self.no_result,
            BufferId::Value(i) => &self.values[i],
            BufferId::Kv(slot) => &self.kv[slot].buffer,
            BufferId::State(i) => &self.states[i],
            BufferId::Angles(i) => &self.angles[i],
            BufferId::Counts => &self.counts,
            BufferId::ExpertCaches => &self.expert_caches,
            BufferId::ExpertTiles => &self.expert_tiles,
            BufferId::Halves => &self.halves,
            BufferId::Bytes => &self.bytes,
            BufferId::Scores => &self.scores,
            BufferId::Splits => &self.splits,
            BufferId::Parts => &self.parts,
            BufferId::Tokens => &self.tokens,
            BufferId::Matrix(..)
            | BufferId::Slots(..)
            | BufferId::Vector(_)
            | BufferId::Concatenated(_) => unreachable!("{id:?} is a weight"),
        }
    }
}

/// Bytes of the inputs of a matmul with cooperative matrices.
pub(crate) fn halves_bytes(gpu: &Gpu, plan: &Plan, limits: &Limits) -> u64 {
    let rows = if gpu.arithmetic.is_cooperative { limits.tokens } else { 0 };
    8 * (rows * half_row_quads(plan)) as u64
}

/// Bytes of the inputs of a matmul as bytes.
pub(crate) fn row_bytes(gpu: &Gpu, plan: &Plan, limits: &Limits) -> u64 {
    let rows = match gpu.arithmetic.activations {
        Activations::Bytes => limits.tokens,
        Activations::Floats => 0,
    };
    16 * (rows * byte_row_vectors(plan)) as u64
}

/// Scores of a row of an indexer.
pub(crate) fn scores_width(plan: &Plan, limits: &Limits) -> usize {
    let windows = plan.window_indices();
    let width = |op: &Op| match op {
        Op::Select { slot, .. } => {
            plan.slots[slot.0].entries(limits.pages[windows[slot.0]] * PAGE_TOKENS)
        }
        _ => 0,
    };
    plan.ops.iter().map(width).max().unwrap_or(0)
}
