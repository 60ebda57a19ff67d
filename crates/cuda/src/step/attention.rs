//! Attention: rows keep their keys and values in their sequences' pages, and attend to them. Rows
//! that are alone in their sequences do both at once, unless there are rows of prompts beside them;
//! of others every row has to be kept first.

use bodkin_backend::Result;
use bodkin_model::{Attention, KvSlot, RopeStyle};

use super::{Step, THREADS};
use crate::kept::Kept;
use crate::kernels::{ATTEND_SHARED_BYTES, PROMPT_DIMS, prompt_shared_bytes};
use crate::lower::Work;
use crate::parameters as p;
use crate::persistent::HEADS;
use crate::sizes::{SEGMENT, key_stride, value_stride};

/// The widest key or value that tensor cores take for rows that are not a prompt's.
const MEET_DIM: usize = 128;
/// Queries of a block of attention for prompts, and its threads.
const PROMPT_ROWS: usize = 64;
const PROMPT_THREADS: usize = 128;

impl Step<'_> {
    pub(super) fn attend(&self, rows: usize, work: &Work) -> Result<()> {
        let Work::Attend { attention: a, slot, .. } = work else {
            unreachable!("called for attention");
        };
        let shape = &self.plan.slots[*slot];
        let kept = self.sizes.kept;
        let own = SEGMENT * (kept.bytes(shape.key_dim) + kept.bytes(shape.value_dim));
        let meets = meets(kept, shape);
        let bytes = if meets { meet_bytes(shape) } else { shared_bytes(kept, a, shape) };
        let prompts = prompt_dims(a).filter(|_| kept == Kept::F16);
        let has_prompts = prompts.is_some() && self.size.has_prompts;
        let is_alone = self.size.spans == self.size.tokens
            && !has_prompts
            && bytes + own <= ATTEND_SHARED_BYTES;
        if !is_alone {
            self.store(rows, work)?;
        }
        let mut parameters = self.attend_parameters(rows, work, is_alone);
        if let Some(i) = prompts.filter(|_| has_prompts) {
            self.attend_prompts(rows, i, a, &parameters)?;
            if !self.size.has_generated {
                return Ok(());
            }
            parameters.skips_prompts = 1;
        }
        let spread = if parameters.is_spread == 1 { self.sizes.segments.min(64) } else { 1 };
        let group = a.heads / a.kv_heads;
        let heads = if meets { HEADS } else { heads_of_block(a) };
        let grid = [rows, a.kv_heads * group.div_ceil(heads), spread];
        let kernels = if meets {
            &self.kernels.attend_meet
        } else {
            &self.kernels.attention(kept).attend[usize::from(group > 1)]
        };
        let kernel = kernels[usize::from(is_alone)];
        let shared = bytes + if is_alone || meets { own } else { 0 };
        // SAFETY: the tables cover what the rows see; partials have room for as many segments.
        unsafe { self.device.launch(kernel, grid, SEGMENT, shared, &parameters) }
    }

    /// The rows of prompts, by the kernel for heads of so many dimensions.
    fn attend_prompts(
        &self,
        rows: usize,
        i: usize,
        a: &Attention,
        parameters: &p::Attend,
    ) -> Result<()> {
        let queries = rows * (a.heads / a.kv_heads);
        // Every span may have a block that is not full.
        let grid = [queries / PROMPT_ROWS + self.size.spans, a.kv_heads, 1];
        let kernel = self.kernels.attend_prompt[i];
        let shared = prompt_shared_bytes(PROMPT_DIMS[i]);
        // SAFETY: the tables cover what the rows see.
        unsafe { self.device.launch(kernel, grid, PROMPT_THREADS, shared, parameters) }
    }

    /// What attention is told.
    pub(crate) fn attend_parameters(&self, rows: usize, work: &Work, is_alone: bool) -> p::Attend {
        let Work::Attend { q, k, v, rotation, attention: a, slot, out, half_out } = work else {
            unreachable!("called for attention");
        };
        let is_spread = rows <= self.sizes.spread_rows && self.sizes.segments > 1;
        let mut parameters = p::Attend {
            q: self.address(*q),
            keys: self.at.kv[*slot][0],
            values: self.at.kv[*slot][1],
            feed: self.at.feed,
            k: self.address(*k),
            v: self.address(*v),
            sinks: self.vector(a.sinks),
            partials: self.at.partials,
            arrivals: self.at.arrivals,
            scale: a.scale,
            softcap: a.softcap.unwrap_or(0.0),
            q_stride: self.stride(*q),
            k_stride: self.stride(*k),
            v_stride: self.stride(*v),
            heads: a.heads as u32,
            kv_heads: a.kv_heads as u32,
            key_dim: a.key_dim as u32,
            value_dim: a.value_dim as u32,
            window: a.window.unwrap_or(0) as u32,
            is_causal: u32::from(a.causal),
            table: self.at.tables[*slot] as u32,
            segments: self.sizes.segments as u32,
            is_spread: u32::from(is_spread),
            group: (a.heads / a.kv_heads) as u32,
            ..p::Attend::default()
        };
        let blocks_of_group = parameters.group.div_ceil(HEADS as u32);
        parameters.blocks = parameters.kv_heads * blocks_of_group;
        parameters.by_blocks = inverse(parameters.blocks);
        parameters.by_group_blocks = inverse(blocks_of_group);
        (parameters.out, parameters.out_stride) = self.place(*out);
        (parameters.half_out, parameters.half_stride) = self.place(*half_out);
        match rotation {
            Some(r) if is_alone => {
                parameters.angles = self.at.angles[r.rope];
                parameters.pairs = (self.program.ropes[r.rope].dims / 2) as u32;
                parameters.is_neox = u32::from(r.style == RopeStyle::Neox);
            }
            Some(r) => (parameters.q, parameters.q_stride) = self.place(Some(r.q_out)),
            None => {}
        }
        parameters
    }

    /// Keeps the keys and values of all rows, and rotates keys and queries on the way.
    fn store(&self, rows: usize, work: &Work) -> Result<()> {
        let Work::Attend { q, k, v, rotation, slot, .. } = work else {
            unreachable!("called for attention");
        };
        let shape = &self.plan.slots[*slot];
        let mut parameters = p::Store {
            k: self.address(*k),
            v: self.address(*v),
            keys: self.at.kv[*slot][0],
            values: self.at.kv[*slot][1],
            feed: self.at.feed,
            k_stride: self.stride(*k),
            v_stride: self.stride(*v),
            kv_heads: shape.kv_heads as u32,
            key_dim: shape.key_dim as u32,
            value_dim: shape.value_dim as u32,
            table: self.at.tables[*slot] as u32,
            ..p::Store::default()
        };
        let mut width = self.content(*k).stride() + self.content(*v).stride();
        if let Some(r) = rotation {
            (parameters.q, parameters.q_stride) = self.place(Some(*q));
            (parameters.q_out, parameters.q_out_stride) = self.place(Some(r.q_out));
            parameters.heads = self.stride(*q) / parameters.key_dim;
            parameters.angles = self.at.angles[r.rope];
            parameters.pairs = (self.program.ropes[r.rope].dims / 2) as u32;
            parameters.is_neox = u32::from(r.style == RopeStyle::Neox);
            width += self.content(*q).stride();
        }
        let kernel = self.kernels.attention(self.sizes.kept).store;
        let grid = self.elements(rows, width);
        // SAFETY: the step's pages are pages of the slot, and each belongs to one row's sequence.
        unsafe { self.device.launch(kernel, grid, THREADS, 0, &parameters) }
    }
}

/// The kernel for prompts whose heads have these dimensions, if there is one.
fn prompt_dims(a: &Attention) -> Option<usize> {
    let dim = a.key_dim.max(a.value_dim);
    PROMPT_DIMS.iter().position(|&most| dim <= most)
}

/// Whether tensor cores can take these heads (`kernels/meet.cuh`).
pub(crate) fn meets(kept: Kept, slot: &KvSlot) -> bool {
    kept == Kept::F16 && key_stride(slot).max(value_stride(slot)) <= MEET_DIM
}

/// Shared memory of a block of such heads beside its keys and values: the sums of values of eight
/// steps and of all, queries, and weights of positions.
fn meet_bytes(slot: &KvSlot) -> usize {
    4 * HEADS * value_stride(slot) + met_bytes(slot)
}

/// That of a segment that is met, likewise.
pub(crate) fn met_bytes(slot: &KvSlot) -> usize {
    let columns = if value_stride(slot) > 64 { 128 } else { 64 };
    let query = key_stride(slot).next_multiple_of(16);
    // Rows have eight elements more, against conflicts of banks.
    4 * (8 * HEADS * (columns + 8)) + 2 * (2 * HEADS * (query + 8 + SEGMENT + 8))
}

/// What kernels divide by a number with (`divide` in `kernels/attend.cuh`).
fn inverse(number: u32) -> u32 {
    if number == 1 { 0 } else { (1u64 << 32).div_ceil(u64::from(number)) as u32 }
}

/// Query heads that a block takes at once.
fn heads_of_block(a: &Attention) -> usize {
    if a.heads == a.kv_heads { 1 } else { HEADS }
}

/// Shared memory of a block for queries, weights of positions and sums of values.
pub(super) fn shared_bytes(kept: Kept, a: &Attention, slot: &KvSlot) -> usize {
    let (keys, values) = (kept.stride(slot.key_dim), kept.stride(slot.value_dim));
    // Threads share the positions of a column of values.
    let splits = if values / 8 >= 128 { 1 } else { 128 / (values / 8) };
    4 * heads_of_block(a) * (keys + SEGMENT + (splits + 1) * values)
}
