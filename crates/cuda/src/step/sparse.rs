//! Hyper-connections, sparse attention, and experts that are chosen already. Entries of several
//! tokens are stored in one kernel, and read in the next.

use bodkin_backend::Result;

use super::attention::blocks;
use super::{Step, THREADS};
use crate::constants::KV_SPLIT;
use crate::driver::Kernel;
use crate::kernels::Kernels;
use crate::kv_layout::INDEX_KEYS;
use crate::lower::{AttendEntries, CompressStage, HyperWeights, Mix, RouteChosen, SelectStage};
use crate::lower::{Sparse, Value};
use crate::parameters::sparse as p;
use crate::shared_memory::{entries_bytes, hyper_bytes, index_bytes, route_bytes};

/// Threads of a block of the indexer, each of which scores an entry at a time; and the most blocks
/// of a row.
const SCORE_THREADS: usize = 128;
const MAX_SCORE_BLOCKS: usize = 64;
/// Threads of a block that stores an entry.
const STORE_THREADS: usize = 128;

impl Step<'_> {
    pub(super) fn sparse(&self, rows: usize, sparse: &Sparse) -> Result<()> {
        match sparse {
            Sparse::Mix(mix) => self.mix(rows, mix),
            Sparse::HyperWeights(weights) => self.hyper_weights(rows, weights),
            Sparse::Compress(compress) => self.compress(compress),
            Sparse::Select(select) => self.select(rows, select),
            Sparse::Attend(attend) => self.attend_entries(rows, attend),
            Sparse::Route(route) => self.route_chosen(rows, route),
        }
    }

    fn mix(&self, rows: usize, mix: &Mix) -> Result<()> {
        let &Mix { input, weights, results, out } = mix;
        let (parts, width) = (self.content(weights).stride() / results, self.content(out).stride());
        let parameters = p::Mix {
            x: self.address(input),
            weights: self.address(weights),
            out: self.address(out),
            stride: self.stride(input),
            weight_stride: self.stride(weights),
            out_stride: self.stride(out),
            width: (width / results) as u32,
            parts: parts as u32,
            results: results as u32,
        };
        let grid = self.elements(rows, width);
        // SAFETY: values have room for the step's rows.
        unsafe { self.device.launch(self.kernels.mix, grid, THREADS, 0, &parameters) }
    }

    fn hyper_weights(&self, rows: usize, weights: &HyperWeights) -> Result<()> {
        let &HyperWeights { input, weights: [scale, base], streams, iterations, eps, out } =
            weights;
        let parameters = p::HyperWeights {
            x: self.address(input),
            scale: self.vector(Some(scale)),
            base: self.vector(Some(base)),
            out: self.address(out),
            stride: self.stride(input),
            out_stride: self.stride(out),
            width: self.stride(out),
            streams: streams as u32,
            iterations: iterations as u32,
            eps,
        };
        let (kernel, shared) = (self.kernels.hyper_weights, hyper_bytes(streams));
        // SAFETY: values have room for the step's rows, and the block for the square.
        unsafe { self.device.launch(kernel, [rows, 1, 1], 32, shared, &parameters) }
    }

    fn compress(&self, stage: &CompressStage) -> Result<()> {
        let &CompressStage { input, scores, compression: c, state, out } = stage;
        let parameters = p::Compress {
            x: self.address(input),
            scores: self.address(scores),
            metadata: self.at.metadata,
            states: self.at.states[state],
            out: self.address(out),
            stride: self.stride(input),
            score_stride: self.stride(scores),
            out_stride: self.stride(out),
            dim: c.dim as u32,
            ratio: c.ratio as u32,
            overlaps: c.overlaps.into(),
        };
        let grid = [self.size.spans, c.dim.div_ceil(THREADS), 1];
        // SAFETY: every span has a state slot of its own.
        unsafe { self.device.launch(self.kernels.compress, grid, THREADS, 0, &parameters) }
    }

    /// Stores the entries of one head that end with rows.
    fn store_entries(&self, rows: usize, kernel: Kernel, value: Value, slot: usize) -> Result<()> {
        let shape = &self.plan.slots[slot];
        let parameters = p::StoreEntries {
            x: self.address(value),
            entries: self.at.kv[slot][0],
            metadata: self.at.metadata,
            stride: self.stride(value),
            dim: shape.key_dim as u32,
            ratio: shape.ratio as u32,
            page_table: self.at.window_indices[slot] as u32,
        };
        // SAFETY: the step's pages are pages of the slot, and each belongs to one row's sequence.
        unsafe { self.device.launch(kernel, [rows, 1, 1], STORE_THREADS, 0, &parameters) }
    }

    fn select(&self, rows: usize, stage: &SelectStage) -> Result<()> {
        let &SelectStage { q, k, weights, indexer, slot, out } = stage;
        self.store_entries(rows, self.kernels.attention(INDEX_KEYS).store_entries, k, slot)?;
        let (shape, sizes) = (&self.plan.slots[slot], &self.sizes.scores);
        let mut score = p::ScoreEntries {
            q: self.address(q),
            weights: self.address(weights),
            keys: self.at.kv[slot][0],
            metadata: self.at.metadata,
            scores: self.at.entry_scores,
            q_stride: self.stride(q),
            weight_stride: self.stride(weights),
            score_stride: sizes.entries as u32,
            first_row: 0,
            heads: indexer.heads as u32,
            dim: indexer.dim as u32,
            ratio: shape.ratio as u32,
            page_table: self.at.window_indices[slot] as u32,
            top_k: indexer.top_k as u32,
            padding: 0,
        };
        let mut select = p::SelectEntries {
            scores: score.scores,
            metadata: score.metadata,
            out: self.address(out),
            score_stride: score.score_stride,
            out_stride: self.stride(out),
            first_row: 0,
            ratio: score.ratio,
            top_k: score.top_k,
            padding: 0,
        };
        let blocks = sizes.entries.div_ceil(SCORE_THREADS).clamp(1, MAX_SCORE_BLOCKS);
        let Kernels { score_entries, select_entries, .. } = self.kernels;
        for first in (0..rows).step_by(sizes.rows) {
            let count = sizes.rows.min(rows - first);
            (score.first_row, select.first_row) = (first as u32, first as u32);
            let (grid, shared) = ([count, blocks, 1], index_bytes(&indexer));
            // SAFETY: the page tables cover the complete entries, and the scores of a row have
            // room for the entries of all pages of a slot.
            unsafe {
                self.device.launch(*score_entries, grid, SCORE_THREADS, shared, &score)?;
                self.device.launch(*select_entries, [count, 1, 1], THREADS, 0, &select)?;
            }
        }
        Ok(())
    }

    fn attend_entries(&self, rows: usize, stage: &AttendEntries) -> Result<()> {
        let AttendEntries { attend, selected, blocks: of_blocks } = stage;
        let (a, kv) = (&attend.attention, self.sizes.kv_layout);
        let kernels = self.kernels.attention(kv);
        if let Some(kv) = attend.kv {
            self.store(rows, attend, kv)?;
        }
        if let Some((value, slot)) = *of_blocks {
            self.store_entries(rows, kernels.store_entries, value, slot)?;
        }
        let attention = self.attend_parameters(attend, false);
        let slot = of_blocks.map(|(_, slot)| slot);
        let (selected, selected_stride) = self.place(*selected);
        let parameters = p::AttendEntries {
            attention,
            selected,
            blocks: slot.map_or(0, |slot| self.at.kv[slot][0]),
            selected_stride,
            top_k: selected_stride,
            block_ratio: slot.map_or(1, |slot| self.plan.slots[slot].ratio) as u32,
            block_page_table: slot.map_or(0, |slot| self.at.window_indices[slot]) as u32,
        };
        let kernel = kernels.attend_entries[usize::from(a.heads > a.kv_heads)];
        let shared = entries_bytes(kv, a);
        let grid = [rows, blocks(a), 1];
        // SAFETY: the page tables cover what the rows attend to: selected entries are complete.
        unsafe { self.device.launch(kernel, grid, KV_SPLIT, shared, &parameters) }
    }

    fn route_chosen(&self, rows: usize, stage: &RouteChosen) -> Result<()> {
        let RouteChosen { route, chosen } = stage;
        let parameters = p::RouteChosen {
            route: self.route_parameters(route),
            chosen: self.address(*chosen),
            chosen_stride: self.stride(*chosen),
            padding: 0,
        };
        let (kernel, shared) = (self.kernels.route_chosen, route_bytes(&route.routing));
        // SAFETY: there are counts of all experts, and numbers beyond them mean the last one.
        unsafe { self.device.launch(kernel, [rows, 1, 1], 32, shared, &parameters) }?;
        self.cache_chosen_experts(route.index)
    }
}
