//! Attention. Rows store their keys and values in their sequences' pages, and attend to them: in
//! one kernel where the step has one row a sequence and no prefill rows; else all are stored first.

use bodkin_backend::Result;
use bodkin_model::{Attention, RopeStyle};

use super::gemm::WGMMA_THREADS;
use super::{Step, THREADS};
use crate::constants::{
    BLOCK_HEADS, KV_SPLIT, MAX_SPLIT_DIM, PARTIAL_EXTRA, PREFILL_ROWS, PREFILL_SPLIT,
    PREFILL_WGMMA_ROWS, SPLIT_TILES,
};
use crate::kernels::{DECODE_DIMS, PREFILL_DIMS};
use crate::kv_layout::KvLayout;
use crate::lower::{Attend, Value};
use crate::parameters as p;
use crate::shared_memory::{self, ATTENTION_BYTES};

/// How prefill attention is launched.
struct PrefillLaunch {
    /// Query rows of a block.
    rows: usize,
    threads: usize,
    shared_bytes: usize,
    /// Blocks that a multiprocessor runs at once.
    resident: usize,
}

impl PrefillLaunch {
    fn new(uses_wgmma: bool, dims: usize, kv: KvLayout) -> PrefillLaunch {
        if uses_wgmma {
            let shared_bytes = shared_memory::prefill_wgmma_bytes(dims, kv);
            let (rows, threads) = (PREFILL_WGMMA_ROWS, WGMMA_THREADS);
            PrefillLaunch { rows, threads, shared_bytes, resident: 1 }
        } else {
            let shared_bytes = shared_memory::prefill_bytes(dims);
            PrefillLaunch { rows: PREFILL_ROWS, threads: 128, shared_bytes, resident: 2 }
        }
    }
}

impl Step<'_> {
    pub(super) fn attend(&self, rows: usize, attend: &Attend) -> Result<()> {
        let (a, slot) = (&attend.attention, &self.plan.slots[attend.slot]);
        let kv = self.sizes.kv_layout;
        let [least, whole] = shared_memory::attend_bytes(kv, a, slot);
        let prefill = prefill_kernel(a).filter(|_| kv != KvLayout::F32);
        let prefill = prefill.filter(|_| self.size.has_prefill);
        let fuses_kv_write = self.size.spans == self.size.tokens
            && prefill.is_none()
            && whole <= ATTENTION_BYTES
            && attend.kv.is_some();
        if let (false, Some(kv)) = (fuses_kv_write, attend.kv) {
            self.store(rows, attend, kv)?;
        }
        let mut parameters = self.attend_parameters(attend, fuses_kv_write);
        if let Some(i) = prefill {
            self.attend_prefill(i, a, &parameters)?;
            if !self.size.has_decode {
                return Ok(());
            }
            parameters.skips_prefill = 1;
        }
        let rows = if prefill.is_some() { self.size.decode_rows } else { rows };
        let (kernels, threads, resident) = if kv.has_mma(slot) {
            let dim = kv.stride(slot.key_dim).max(kv.stride(slot.value_dim));
            let i = DECODE_DIMS.partition_point(|&(most, _)| most < dim);
            (&self.kernels.decode_attention(kv)[i], 32 * SPLIT_TILES, DECODE_DIMS[i].1)
        } else {
            let grouped = usize::from(a.heads > a.kv_heads);
            (&self.kernels.attention(kv).decode[grouped], KV_SPLIT, 2)
        };
        // Blocks that have none of a row's splits end at once, so the longest row decides.
        let resident = resident * self.device.processors as usize * self.size.context_skew;
        let sharing = self.blocks_that_share_splits(rows * blocks(a), resident, self.sizes.splits);
        parameters.is_split = u32::from(sharing > 1);
        let grid = [rows, blocks(a), sharing];
        let kernel = kernels[usize::from(fuses_kv_write)];
        let shared = if fuses_kv_write { whole } else { least };
        // SAFETY: the page tables cover what the rows attend to; there is room for the arrivals,
        // and for the partial results that the metadata names.
        unsafe { self.device.launch(kernel, grid, threads, shared, &parameters) }
    }

    /// Prefill rows, by kernel `i`.
    fn attend_prefill(&self, i: usize, a: &Attention, parameters: &p::Attention) -> Result<()> {
        let kv = self.sizes.kv_layout;
        let (kernels, uses_wgmma) = self.kernels.prefill_attention(kv, self.size.prefill_positions);
        let launch = PrefillLaunch::new(uses_wgmma, PREFILL_DIMS[i], kv);
        let queries = self.size.prefill_tokens * (a.heads / a.kv_heads);
        // Every span may have a block that is not full.
        let row_blocks = (queries + (launch.rows - 1) * self.size.prefill_spans) / launch.rows;
        let blocks = row_blocks * a.kv_heads;
        let splits = if PREFILL_DIMS[i] > MAX_SPLIT_DIM {
            1
        } else {
            self.size.prefill_positions.div_ceil(PREFILL_SPLIT).min(self.sizes.prefill_splits)
        };
        let resident = launch.resident * self.device.processors as usize;
        let partial = kv.stride(a.value_dim) + PARTIAL_EXTRA;
        let partial_bytes = 4 * self.size.tokens * a.heads * splits * partial;
        let sharing = if partial_bytes > self.sizes.partial_bytes {
            1
        } else {
            self.blocks_that_share_splits(blocks, resident, splits)
        };
        let max_splits = if sharing > 1 { splits } else { 1 };
        let parameters = p::Attention { max_splits: max_splits as u32, ..*parameters };
        let grid = [row_blocks, a.kv_heads, sharing];
        let (kernel, shared) = (kernels[i], launch.shared_bytes);
        // SAFETY: the page tables cover what the rows attend to; there is room for the partials,
        // of one split of each row in any case.
        unsafe { self.device.launch(kernel, grid, launch.threads, shared, &parameters) }
    }

    /// How many blocks share the KV splits of some query rows, so that the device is full, with
    /// `resident` blocks, although the step has only `blocks` such groups of rows.
    fn blocks_that_share_splits(&self, blocks: usize, resident: usize, splits: usize) -> usize {
        let can_share = 4 * blocks <= self.sizes.arrival_bytes;
        if can_share { (resident / blocks).clamp(1, splits.max(1)) } else { 1 }
    }

    /// The parameters of decode and prefill attention.
    pub(super) fn attend_parameters(&self, attend: &Attend, fuses_kv_write: bool) -> p::Attention {
        let Attend { q, kv, rotation, attention: a, slot, out, half_out, .. } = attend;
        let [(k, k_stride), (v, v_stride)] =
            kv.map_or([None; 2], |kv| kv.map(Some)).map(|value| self.place(value));
        let mut parameters = p::Attention {
            q: self.address(*q),
            keys: self.at.kv[*slot][0],
            values: self.at.kv[*slot][1],
            metadata: self.at.metadata,
            k,
            v,
            sinks: self.vector(a.sinks),
            partials: self.at.partials,
            arrivals: self.at.arrival_counts,
            scale: a.scale,
            softcap: a.softcap.unwrap_or(0.0),
            temperature_growth: a.temperature.map_or(0.0, |t| t.growth),
            temperature_length: a.temperature.map_or(0, |t| t.length),
            temperature_offset: a.temperature.map_or(0, |t| t.offset),
            q_stride: self.stride(*q),
            k_stride,
            v_stride,
            heads: a.heads as u32,
            kv_heads: a.kv_heads as u32,
            key_dim: a.key_dim as u32,
            value_dim: a.value_dim as u32,
            window: a.window.unwrap_or(0) as u32,
            is_causal: u32::from(a.causal),
            is_chunked: u32::from(a.chunked),
            page_table: self.at.window_indices[*slot] as u32,
            max_splits: self.sizes.splits as u32,
            group_heads: (a.heads / a.kv_heads) as u32,
            head_blocks: blocks(a) as u32,
            head_blocks_inverse: inverse(blocks(a)),
            group_blocks_inverse: inverse(blocks(a) / a.kv_heads),
            is_q8: u32::from(self.sizes.kv_layout == KvLayout::Q8),
            ..p::Attention::default()
        };
        (parameters.out, parameters.out_stride) = self.place(*out);
        (parameters.half_out, parameters.half_stride) = self.half_place(*half_out);
        match rotation {
            Some(r) if fuses_kv_write => {
                parameters.cos_sin = self.at.angles[r.rope];
                parameters.rotary_pairs = (self.program.ropes[r.rope].dims / 2) as u32;
                parameters.is_neox = u32::from(r.style == RopeStyle::Neox);
            }
            Some(r) => (parameters.q, parameters.q_stride) = self.place(Some(r.q_out)),
            None => {}
        }
        parameters
    }

    /// Stores the keys and values of all rows, unless an earlier stage has, and rotates keys and
    /// queries on the way.
    pub(super) fn store(&self, rows: usize, attend: &Attend, [k, v]: [Value; 2]) -> Result<()> {
        let Attend { q, shares_kv, rotation, slot, .. } = attend;
        let shape = &self.plan.slots[*slot];
        let mut parameters = p::StoreKv {
            k: self.address(k),
            v: self.address(v),
            keys: self.at.kv[*slot][0],
            values: self.at.kv[*slot][1],
            metadata: self.at.metadata,
            k_stride: self.stride(k),
            v_stride: self.stride(v),
            kv_heads: if *shares_kv { 0 } else { shape.kv_heads as u32 },
            key_dim: shape.key_dim as u32,
            value_dim: shape.value_dim as u32,
            page_table: self.at.window_indices[*slot] as u32,
            ..p::StoreKv::default()
        };
        let of_row = self.content(k).stride() + self.content(v).stride();
        let mut width = if *shares_kv { 0 } else { of_row };
        if let Some(r) = rotation {
            (parameters.q, parameters.q_stride) = self.place(Some(*q));
            (parameters.q_out, parameters.q_out_stride) = self.place(Some(r.q_out));
            parameters.heads = self.content(*q).stride() as u32 / parameters.key_dim;
            parameters.cos_sin = self.at.angles[r.rope];
            parameters.rotary_pairs = (self.program.ropes[r.rope].dims / 2) as u32;
            parameters.is_neox = u32::from(r.style == RopeStyle::Neox);
            width += self.content(*q).stride();
        }
        let kernel = self.kernels.attention(self.sizes.kv_layout).store;
        let grid = self.elements(rows, width);
        // SAFETY: the step's pages are pages of the slot, and each belongs to one row's sequence.
        unsafe { self.device.launch(kernel, grid, THREADS, 0, &parameters) }
    }
}

/// The index of the prefill kernel for heads of these dimensions, if there is one.
fn prefill_kernel(a: &Attention) -> Option<usize> {
    let dim = a.key_dim.max(a.value_dim);
    PREFILL_DIMS.iter().position(|&most| dim <= most)
}

/// The multiplier that kernels divide by a number with (`divide` in `kernels/attention.cuh`).
fn inverse(number: usize) -> u32 {
    if number == 1 { 0 } else { (1u64 << 32).div_ceil(number as u64) as u32 }
}

/// Blocks of all query heads of a row.
pub(super) fn blocks(a: &Attention) -> usize {
    a.kv_heads * (a.heads / a.kv_heads).div_ceil(BLOCK_HEADS)
}
