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
use crate::sizes::{SEGMENT, key_stride, value_stride};

/// Query heads of a key head that a block takes, at most.
const HEADS: usize = 4;
/// The widest key or value that tensor cores take for rows that are not a prompt's: `MOST_DIM` in
/// `kernels/meet.cuh`.
const MEET_DIM: usize = 128;
/// The steps of a segment there, each of which is a warp's.
const SEGMENT_STEPS: usize = 8;
/// Shared memory of those who meet a segment there, for queries and results.
pub(crate) const ROOM_BYTES: usize = 20480;
/// Segments whose results a block takes to shared memory at once to join them: `MOST` in
/// `kernels/segment.cuh`.
const JOINED_AT_ONCE: usize = 32;
/// Results of a block that joins segments, at most: `JOINED` in `kernels/attend.cu` by its threads.
const MOST_JOINED: usize = 16 * SEGMENT;
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
        let meets = meets(kept, shape);
        let [least, whole] = shared_bytes(kept, a, shape);
        let prompts = prompt_dims(a).filter(|_| kept == Kept::F16);
        let has_prompts = prompts.is_some() && self.size.has_prompts;
        let is_alone =
            self.size.spans == self.size.tokens && !has_prompts && whole <= ATTEND_SHARED_BYTES;
        if !is_alone {
            self.store(rows, work)?;
        }
        let mut parameters = self.attend_parameters(rows, work, is_alone);
        if let Some(i) = prompts.filter(|_| has_prompts) {
            self.attend_prompts(rows, i, a, &parameters)?;
            if !self.size.has_generated {
                return Ok(());
            }
            parameters.skips_prefill = 1;
        }
        let spread = if parameters.is_split == 1 { self.sizes.segments.min(64) } else { 1 };
        let grid = [rows, blocks(a), spread];
        let (kernels, threads) = if meets {
            (&self.kernels.attend_meet, 32 * SEGMENT_STEPS)
        } else {
            (&self.kernels.attention(kept).attend[usize::from(a.heads > a.kv_heads)], SEGMENT)
        };
        let kernel = kernels[usize::from(is_alone)];
        let shared = if is_alone { whole } else { least };
        // SAFETY: the tables cover what the rows see; partials have room for as many segments.
        unsafe { self.device.launch(kernel, grid, threads, shared, &parameters) }
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
            metadata: self.at.feed,
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
            page_table: self.at.tables[*slot] as u32,
            max_splits: self.sizes.segments as u32,
            is_split: u32::from(is_spread),
            group_heads: (a.heads / a.kv_heads) as u32,
            head_blocks: blocks(a) as u32,
            head_blocks_inverse: inverse(blocks(a)),
            group_blocks_inverse: inverse(blocks(a) / a.kv_heads),
            ..p::Attend::default()
        };
        (parameters.out, parameters.out_stride) = self.place(*out);
        (parameters.half_out, parameters.half_stride) = self.place(*half_out);
        match rotation {
            Some(r) if is_alone => {
                parameters.cos_sin = self.at.angles[r.rope];
                parameters.rotary_pairs = (self.program.ropes[r.rope].dims / 2) as u32;
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
        let mut parameters = p::StoreKv {
            k: self.address(*k),
            v: self.address(*v),
            keys: self.at.kv[*slot][0],
            values: self.at.kv[*slot][1],
            metadata: self.at.feed,
            k_stride: self.stride(*k),
            v_stride: self.stride(*v),
            kv_heads: shape.kv_heads as u32,
            key_dim: shape.key_dim as u32,
            value_dim: shape.value_dim as u32,
            page_table: self.at.tables[*slot] as u32,
            ..p::StoreKv::default()
        };
        let mut width = self.content(*k).stride() + self.content(*v).stride();
        if let Some(r) = rotation {
            (parameters.q, parameters.q_stride) = self.place(Some(*q));
            (parameters.q_out, parameters.q_out_stride) = self.place(Some(r.q_out));
            parameters.heads = self.stride(*q) / parameters.key_dim;
            parameters.cos_sin = self.at.angles[r.rope];
            parameters.rotary_pairs = (self.program.ropes[r.rope].dims / 2) as u32;
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

/// What kernels divide by a number with (`divide` in `kernels/attend.cuh`).
fn inverse(number: usize) -> u32 {
    if number == 1 { 0 } else { (1u64 << 32).div_ceil(number as u64) as u32 }
}

/// Query heads that a block takes at once.
fn heads_of_block(a: &Attention) -> usize {
    if a.heads == a.kv_heads { 1 } else { HEADS }
}

/// Blocks of all query heads of a row.
fn blocks(a: &Attention) -> usize {
    a.kv_heads * (a.heads / a.kv_heads).div_ceil(HEADS)
}

/// Shared memory of a block of rows that are not a prompt's: without and with a segment's keys and
/// values, which for tensor cores are in registers.
fn shared_bytes(kept: Kept, a: &Attention, slot: &KvSlot) -> [usize; 2] {
    if meets(kept, slot) {
        let joined = JOINED_AT_ONCE * HEADS * 4 * (value_stride(slot) + 4);
        return [ROOM_BYTES.max(joined); 2];
    }
    let own = SEGMENT * (kept.bytes(slot.key_dim) + kept.bytes(slot.value_dim));
    let (keys, values) = (kept.stride(slot.key_dim), kept.stride(slot.value_dim));
    // Threads share the positions of a column of values.
    let splits = if values / 8 >= 128 { 1 } else { 128 / (values / 8) };
    // Queries, weights of positions, and sums of values.
    let bytes = 4 * heads_of_block(a) * (keys + SEGMENT + (splits + 1) * values);
    [bytes, bytes + own]
}

/// What no block can do of an attention.
pub(super) fn too_wide(kept: Kept, a: &Attention, slot: &KvSlot) -> Option<String> {
    let [bytes, _] = shared_bytes(kept, a, slot);
    let results = heads_of_block(a) * kept.stride(slot.value_dim);
    let why = if bytes > ATTEND_SHARED_BYTES {
        format!("{bytes} bytes of a block's {ATTEND_SHARED_BYTES}")
    } else if results > MOST_JOINED {
        format!("{results} results of a block's {MOST_JOINED}")
    } else {
        return None;
    };
    Some(format!("heads of {} + {}: {why}", a.key_dim, a.value_dim))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn too_wide_with(kv_heads: usize, dim: usize, kept: Kept) -> Option<String> {
        let a = Attention {
            heads: 8,
            kv_heads,
            key_dim: dim,
            value_dim: dim,
            scale: 1.0,
            causal: true,
            softcap: None,
            window: None,
            sinks: None,
        };
        let slot = KvSlot { kv_heads, key_dim: dim, value_dim: dim, window: None };
        too_wide(kept, &a, &slot)
    }

    #[test]
    fn heads_that_no_block_can_take_are_named() {
        assert_eq!(too_wide_with(2, 512, Kept::F16), None);
        assert_eq!(too_wide_with(8, 1024, Kept::F16), None);
        let results = "heads of 1024 + 1024: 4096 results of a block's 2048";
        assert_eq!(too_wide_with(2, 1024, Kept::F16).as_deref(), Some(results));
        let bytes = "heads of 4096 + 4096: 198656 bytes of a block's 114688";
        assert_eq!(too_wide_with(2, 4096, Kept::F16).as_deref(), Some(bytes));
    }
}
