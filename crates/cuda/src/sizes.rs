//! The memory of everything but the weights: the planner adds it up before a weight is read, and
//! loading allocates it. This file must not know the device.

use bodkin_backend::Limits;
use bodkin_model::{Op, Plan, Weight};

use crate::arena::{Arena, aliased, non_aliased};
use crate::constants::{CHUNK_COLS, EXPERT_GEMV_ROWS, GEMV_ROWS, KV_SPLIT, LOGIT_GROUPS};
use crate::constants::{GEMM_TILES, MAX_SLICES, MAX_SPLIT_DIM, MAX_WIDTH, PAGE_TOKENS};
use crate::constants::{PARTIAL_EXTRA, PREFILL_SPLIT, PREFILL_WGMMA_ROWS};
use crate::constants::{SLICE_SUM_BYTES, SPARSE_CHOICE, TILE_ROWS, WGMMA_GEMV_ROWS, WIDTHS};
use crate::kv_layout::KvLayout;
use crate::lower::{Experts, Program, Value, Work};
use crate::packed::PackedLayout;
use crate::parameters::Stage;
use crate::persistent::Persistent;
use crate::step_metadata::{self, PartialLimits};

/// Blocks of attention that may share KV splits with others; more fill any device.
const ARRIVALS: usize = 1024;
/// Rows of decode whose last KV split, which may be partly filled, has a partial result of its own.
const SPLIT_ROWS: usize = 256;
/// The most bytes for the scores of an indexer; longer contexts score fewer rows at once.
const SCORE_BYTES: usize = 64 << 20;

/// Everything that is sized when a model is loaded.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Sizes {
    /// Values between stages.
    pub(crate) arena: Arena,
    pub(crate) kv_layout: KvLayout,
    /// Values of the persistent kernel, where none share memory.
    pub(crate) non_aliased: Arena,
    /// Bytes of its values that its last stage does not read: that stage resets their sentinels.
    pub(crate) reset_bytes: u64,
    /// The stages of the persistent kernel, where a device has it and enough blocks for them.
    pub(crate) persistent: Option<Persistent>,
    /// Of the keys, then the values, of each slot.
    pub(crate) kv_bytes: Vec<[usize; 2]>,
    /// Of each recurrent state.
    pub(crate) state_bytes: Vec<usize>,
    /// Cosines and sines of each rotation.
    pub(crate) angle_bytes: Vec<usize>,
    /// KV splits of a row, at most.
    pub(crate) splits: usize,
    /// KV splits of decode whose partial results have memory.
    pub(crate) partials: PartialLimits,
    pub(crate) partial_bytes: usize,
    /// KV splits of a row of prefill attention, at most.
    pub(crate) prefill_splits: usize,
    /// Partial results of KV splits in the persistent kernel, which polls their sentinels.
    pub(crate) polled_partial_bytes: usize,
    /// Of the swizzled input of `gemm_wgmma`.
    pub(crate) swizzled_bytes: usize,
    /// Of the sums of split-K slices that several blocks of it share.
    pub(crate) slice_sum_bytes: usize,
    /// Of the groups of rows with the same expert.
    pub(crate) group_bytes: usize,
    /// Of the expert permutation.
    pub(crate) permutation_bytes: usize,
    /// Counts of finished blocks of rows and heads.
    pub(crate) arrival_bytes: usize,
    /// Of the scores of an indexer.
    pub(crate) scores: ScoreSizes,
    /// Numbers of a step.
    pub(crate) metadata_len: usize,
    /// Rows of logits.
    pub(crate) outputs: usize,
    /// Floats that come with a step.
    pub(crate) input_len: usize,
    /// Floats that the host reads.
    pub(crate) output_len: usize,
}

/// The partial results of KV splits.
struct SplitSizes {
    /// Splits of a row of decode, at most.
    splits: usize,
    partials: PartialLimits,
    /// Of the partial result of a split.
    split_bytes: usize,
    /// Splits of a row of prefill, at most.
    prefill_splits: usize,
    /// Of the partial results of prefill where a block takes all splits: one of each row.
    prefill_bytes: usize,
}

impl SplitSizes {
    fn new(plan: &Plan, program: &Program, limits: &Limits, kv: KvLayout) -> SplitSizes {
        let window_indices = plan.window_indices();
        let pages = window_indices.iter().map(|&window_index| limits.pages[window_index]);
        let positions = PAGE_TOKENS * pages.max().unwrap_or(0);
        let attends = || {
            program.stages.iter().filter_map(|stage| match &stage.work {
                Work::Attend(attend) => Some(attend),
                _ => None,
            })
        };
        let split_bytes = attends().map(|attend| {
            let stride = kv.stride(plan.slots[attend.slot].value_dim);
            4 * attend.attention.heads * (stride + PARTIAL_EXTRA)
        });
        let split_bytes = split_bytes.max().unwrap_or(0);
        let row = attends().map(|attend| match attend.attention.window {
            Some(window) => window.div_ceil(KV_SPLIT) + 1,
            None => usize::MAX,
        });
        // A window may begin and end within a split.
        let splits = if plan.slots.is_empty() { 0 } else { positions.div_ceil(KV_SPLIT) + 1 };
        let slots = plan.slots.iter().zip(&window_indices).filter(|(slot, _)| {
            kv != KvLayout::F32 && slot.key_dim.max(slot.value_dim) <= MAX_SPLIT_DIM
        });
        let prefill = slots.map(|(slot, &window_index)| {
            let pool = PAGE_TOKENS * limits.pages[window_index];
            prefill_splits(slot.window, pool, plan.max_positions())
        });
        let prefill_splits = prefill.max().unwrap_or(0);
        SplitSizes {
            splits,
            partials: PartialLimits {
                row: row.max().unwrap_or(0),
                all: splits + SPLIT_ROWS.min(limits.tokens),
            },
            split_bytes,
            prefill_splits,
            prefill_bytes: if prefill_splits > 1 { limits.tokens * split_bytes } else { 0 },
        }
    }
}

/// The most KV splits that the rows of a block of prefill attention can attend to. A sequence has
/// at most `max_positions`; without a window, its positions also fit the `pool` of cached ones.
fn prefill_splits(window: Option<usize>, pool: usize, max_positions: usize) -> usize {
    let most = match window {
        None => pool.div_ceil(PREFILL_SPLIT),
        // The rows of a block begin one after the other, anywhere in a split.
        Some(window) => window.saturating_add(PREFILL_WGMMA_ROWS).div_ceil(PREFILL_SPLIT) + 1,
    };
    most.min(max_positions.div_ceil(PREFILL_SPLIT))
}

/// The scores of the entries that indexers select from, of some rows at once.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct ScoreSizes {
    pub(crate) rows: usize,
    /// Of a row, at most.
    pub(crate) entries: usize,
}

impl ScoreSizes {
    fn new(plan: &Plan, limits: &Limits) -> ScoreSizes {
        let window_indices = plan.window_indices();
        let entries = plan.ops.iter().filter_map(|op| match op {
            Op::Select { slot, .. } => {
                let positions = limits.pages[window_indices[slot.0]] * PAGE_TOKENS;
                Some(plan.slots[slot.0].entries(positions))
            }
            _ => None,
        });
        let entries = entries.max().unwrap_or(0);
        let most = SCORE_BYTES.checked_div(4 * entries).unwrap_or(0);
        ScoreSizes { rows: most.clamp(1, limits.tokens.max(1)), entries }
    }

    pub(crate) fn bytes(&self) -> usize {
        4 * self.rows * self.entries
    }
}

impl Sizes {
    pub(crate) fn new(plan: &Plan, program: &Program, limits: &Limits, kv: KvLayout) -> Sizes {
        let (tokens, outputs) = (limits.tokens, limits.outputs);
        let can_poll = program.devices == 1 || program.are_connected;
        let can_poll = can_poll && kv != KvLayout::F32;
        let persistent = if can_poll { Persistent::of(plan, program, kv) } else { None };
        let last = persistent.as_ref().map(|persistent| persistent.stages.end - 1);
        let (non_aliased, reset_bytes) =
            last.map_or_else(Default::default, |i| non_aliased(program, i));
        let window_indices = plan.window_indices();
        let kv_bytes = kv.page_bytes(plan).into_iter().zip(&window_indices);
        let kv_bytes = kv_bytes.map(|(page, &index)| page.map(|bytes| limits.pages[index] * bytes));
        let states = plan.states.iter().map(|state| 4 * limits.state_slots * state.elements());
        let angles = program.ropes.iter().map(|rope| 4 * tokens * rope.dims);
        let of_splits = SplitSizes::new(plan, program, limits, kv);
        let SplitSizes { splits, partials, split_bytes, .. } = of_splits;
        let polled_partial_bytes = if persistent.is_some() { splits * split_bytes } else { 0 };
        let rows = tokens.max(outputs);
        let gemms = gemms(plan, program, rows);
        let of_experts = |bytes: fn(Pairs) -> usize| {
            gemms.iter().filter_map(|(_, pairs)| pairs.map(bytes)).max().unwrap_or(0)
        };
        Sizes {
            arena: aliased(program, tokens, outputs),
            kv_layout: kv,
            non_aliased,
            reset_bytes,
            persistent,
            kv_bytes: kv_bytes.collect(),
            state_bytes: states.collect(),
            angle_bytes: angles.collect(),
            splits,
            partials,
            partial_bytes: of_splits.prefill_bytes.max(partials.all * split_bytes),
            prefill_splits: of_splits.prefill_splits,
            polled_partial_bytes,
            swizzled_bytes: swizzled_bytes(&gemms, rows),
            slice_sum_bytes: most_slice_sum_bytes(plan, program, rows),
            group_bytes: of_experts(|pairs| 16 * pairs.groups(WIDTHS[0].rows)),
            permutation_bytes: of_experts(|pairs| 4 * pairs.permuted_rows()),
            arrival_bytes: 4 * ARRIVALS,
            scores: ScoreSizes::new(plan, limits),
            metadata_len: step_metadata::capacity(tokens, outputs, &limits.pages),
            outputs,
            input_len: program
                .input
                .map_or(0, |Value(v)| tokens * program.values[v].content.stride()),
            output_len: outputs * plan.output_width(),
        }
    }

    /// Bytes of state.
    pub(crate) fn state(&self) -> u64 {
        let kv: usize = self.kv_bytes.iter().flatten().sum();
        (kv + self.state_bytes.iter().sum::<usize>()) as u64
    }

    /// Bytes of scratch.
    pub(crate) fn scratch(&self) -> u64 {
        let angles: usize = self.angle_bytes.iter().sum();
        let sampling = 8 * (LOGIT_GROUPS + 1) * self.outputs;
        let stages = self.persistent.as_ref().map_or(0, |persistent| persistent.stages.len());
        self.arena.bytes
            + self.non_aliased.bytes
            + (size_of::<Stage>() * stages) as u64
            + (self.partial_bytes
                + self.polled_partial_bytes
                + self.swizzled_bytes
                + self.slice_sum_bytes
                + self.group_bytes
                + self.permutation_bytes
                + self.arrival_bytes
                + self.scores.bytes()
                + angles
                + sampling
                + 4 * self.metadata_len) as u64
    }
}

/// The most rows of a matmul that `gemv_mma` computes, and not a GEMM. Where devices share the
/// weights, each has too few of them for a GEMM.
pub(crate) fn gemv_rows(has_wgmma: bool, experts: Option<Experts>, devices: usize) -> usize {
    match experts {
        _ if !has_wgmma => GEMV_ROWS,
        None if devices > 1 => GEMV_ROWS,
        None => WGMMA_GEMV_ROWS,
        Some(experts) => {
            let apart = experts.count / (SPARSE_CHOICE * experts.used);
            apart.clamp(EXPERT_GEMV_ROWS, WGMMA_GEMV_ROWS)
        }
    }
}

/// The pairs of rows and experts of a step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pairs {
    count: usize,
    pub(crate) experts: usize,
    /// Whether rows choose experts; otherwise each goes to all of them.
    is_chosen: bool,
}

impl Pairs {
    pub(crate) fn of(rows: usize, experts: &Experts) -> Pairs {
        let is_chosen = experts.route.is_some();
        Pairs { count: rows * experts.used, experts: experts.count, is_chosen }
    }

    /// The most experts that have rows.
    fn used_experts(self) -> usize {
        self.count.min(self.experts)
    }

    /// Rows of the expert permutation, in which each expert's begin at a multiple of eight.
    pub(crate) fn permuted_rows(self) -> usize {
        (self.count + 7 * self.used_experts()).next_multiple_of(8)
    }

    /// The most groups of up to `width` rows of one expert.
    pub(crate) fn groups(self, width: usize) -> usize {
        self.count / width + self.used_experts()
    }

    /// The expected number of groups, if rows choose experts at random.
    pub(crate) fn expected_groups(self, width: usize) -> f64 {
        if !self.is_chosen {
            return (self.experts * (self.count / self.experts).div_ceil(width)) as f64;
        }
        let (pairs, experts) = (self.count as f64, self.experts as f64);
        let used = experts * (1.0 - (1.0 - 1.0 / experts).powf(pairs));
        used.max(pairs / width as f64 + 0.5 * used)
    }
}

/// The weights of matmuls that run as GEMMs in steps of `rows` rows, with their pairs of rows and
/// experts.
fn gemms<'a>(plan: &'a Plan, program: &Program, rows: usize) -> Vec<(&'a Weight, Option<Pairs>)> {
    let matmuls = program.stages.iter().filter_map(|stage| match &stage.work {
        Work::Matmul(matmul) => {
            let pairs = matmul.experts.map(|experts| Pairs::of(rows, &experts));
            Some((plan.weight(matmul.operands[0].weight), pairs))
        }
        _ => None,
    });
    let is_mma = |weight: &Weight| PackedLayout::of(weight.format) != PackedLayout::F32;
    matmuls.filter(|(weight, _)| is_mma(weight)).collect()
}

/// Bytes of the largest swizzled input.
fn swizzled_bytes(gemms: &[(&Weight, Option<Pairs>)], rows: usize) -> usize {
    let wide = gemms.iter().filter(|(weight, _)| PackedLayout::of(weight.format).has_wgmma());
    let bytes = wide.map(|(weight, pairs)| {
        // The last expert's blocks may read beyond its rows.
        let rows = match pairs {
            Some(pairs) => pairs.permuted_rows() + MAX_WIDTH,
            None => rows.next_multiple_of(MAX_WIDTH),
        };
        2 * weight.cols.next_multiple_of(CHUNK_COLS) * rows
    });
    bytes.max().unwrap_or(0)
}

/// Bytes of the sums of split-K slices, of blocks of weight tiles with some rows of input.
pub(crate) fn slice_sum_bytes(slices: usize, blocks: usize, rows: usize) -> usize {
    size_of::<f32>() * slices * blocks * GEMM_TILES * TILE_ROWS * rows
}

/// Those of the largest matmul whose blocks may share them.
fn most_slice_sum_bytes(plan: &Plan, program: &Program, rows: usize) -> usize {
    let bytes = program.stages.iter().filter_map(|stage| match &stage.work {
        Work::Matmul(matmul) if matmul.experts.is_none() => {
            let weights = matmul.operands.iter().map(|operand| plan.weight(operand.weight));
            let wide = weights.filter(|weight| PackedLayout::of(weight.format).has_wgmma());
            let tiles: usize = wide.map(|weight| weight.rows.div_ceil(TILE_ROWS)).sum();
            let rows = rows.next_multiple_of(MAX_WIDTH);
            Some(slice_sum_bytes(MAX_SLICES, tiles.div_ceil(GEMM_TILES), rows))
        }
        _ => None,
    });
    bytes.max().unwrap_or(0).min(SLICE_SUM_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_room_however_rows_choose_experts() {
        // Rows of each expert.
        for counts in [&[1, 1, 1, 1][..], &[0, 600, 1, 0], &[64, 128, 65, 9], &[7, 0, 0, 0], &[0]] {
            let (count, experts) = (counts.iter().sum(), counts.len());
            let pairs = Pairs { count, experts, is_chosen: true };
            let rows: usize = counts.iter().map(|count| usize::next_multiple_of(*count, 8)).sum();
            assert!(rows <= pairs.permuted_rows(), "{counts:?}: {rows} rows");
            for width in [16, 32, 64, 128] {
                let groups: usize = counts.iter().map(|count| count.div_ceil(width)).sum();
                assert!(groups <= pairs.groups(width), "{counts:?}: {groups} groups");
            }
        }
    }

    #[test]
    fn few_rows_hardly_choose_an_expert_twice() {
        let of = |count, used| {
            let experts = Experts { route: None, count, used, shares_input: true };
            gemv_rows(true, Some(experts), 1)
        };
        assert_eq!([of(8, 2), of(64, 8), of(128, 6), of(256, 8), of(512, 10)], [3, 3, 4, 6, 8]);
        // Parts with matrices of their own.
        assert_eq!(of(32, 32), 3);
    }

    #[test]
    fn swizzled_inputs_are_those_of_gemms() {
        assert_eq!(gemv_rows(true, None, 1), WGMMA_GEMV_ROWS);
        assert_eq!([gemv_rows(true, None, 2), gemv_rows(false, None, 1)], [GEMV_ROWS; 2]);
    }

    #[test]
    fn groups_are_at_least_the_experts_that_rows_choose() {
        let groups = |count, experts, is_chosen, width| {
            Pairs { count, experts, is_chosen }.expected_groups(width).round()
        };
        // Of 128 experts, 192 pairs of rows and experts choose 100.
        assert_eq!([16, 32, 128].map(|width| groups(192, 128, true, width)), [100.0; 3]);
        assert_eq!(groups(4096, 8, true, 32), 132.0);
        assert_eq!([16, 32].map(|width| groups(17 * 16, 16, false, width)), [32.0, 16.0]);
    }

    #[test]
    fn the_splits_of_a_window_are_counted_wherever_it_begins() {
        for window in [1, 64, 1024, 1985, 2048, 4000] {
            let most = prefill_splits(Some(window), 0, usize::MAX);
            for first_row in 0..3 * PREFILL_SPLIT {
                let from = (first_row + 1).saturating_sub(window);
                let last = first_row + PREFILL_WGMMA_ROWS - 1;
                assert!(last / PREFILL_SPLIT - from / PREFILL_SPLIT < most, "{window} {first_row}");
            }
        }
        assert_eq!(prefill_splits(None, 4097, usize::MAX), 3);
        assert_eq!(prefill_splits(Some(9000), 9000, 2048), 1);
    }
}
