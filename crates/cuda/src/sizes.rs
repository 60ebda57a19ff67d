//! How much memory everything but the weights takes: sums that the planner makes before a weight
//! is read, and that loading takes. This file must not know the device.

use std::ops::Range;

use bodkin_backend::{Limits, PAGE_TOKENS};
use bodkin_model::{KvSlot, Plan, Weight};

use crate::arena::{Arena, apart, arrange};
use crate::feed;
use crate::kept::Kept;
use crate::kernels::{WIDEST, WIDTHS};
use crate::lower::{Experts, Program, Value, Work};
use crate::parameters::Stage;
use crate::persistent;
use crate::planes::{CHUNK_COLS, Kind};
use crate::step::{DOT_ROWS, choice};

/// Positions of a segment of attention, as in `kernels/attend.cuh`.
pub(crate) const SEGMENT: usize = 128;
/// Floats of a spread segment's result beside its values, as there.
const PART_EXTRA: usize = 4;
/// Steps of up to so many rows are recorded: those that generate.
pub(crate) const RECORDED_ROWS: usize = 16;
/// The most rows whose segments are spread over blocks.
const SPREAD_ROWS: usize = RECORDED_ROWS;
/// The most bytes for the results of spread segments; longer contexts spread fewer rows.
const PARTIAL_BYTES: usize = 64 << 20;

/// Everything that is sized when a model is loaded.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Sizes {
    /// Values between stages.
    pub(crate) arena: Arena,
    /// What keys and values are kept as.
    pub(crate) kept: Kept,
    /// The same for steps of one row in one kernel, where no value shares memory.
    pub(crate) apart: Arena,
    /// Of those of its values that the last of these stages has no more use for.
    pub(crate) early_bytes: u64,
    /// Stages that one kernel runs, where a device has it and enough blocks for them.
    pub(crate) persistent: Option<Range<usize>>,
    /// Of the keys, then the values, of each slot.
    pub(crate) kv_bytes: Vec<[usize; 2]>,
    /// Of each recurrent state.
    pub(crate) state_bytes: Vec<usize>,
    /// Cosines and sines of each rotation.
    pub(crate) angle_bytes: Vec<usize>,
    /// The segments that a row can see, at most.
    pub(crate) segments: usize,
    /// The rows whose segments are spread.
    pub(crate) spread_rows: usize,
    pub(crate) partial_bytes: usize,
    /// Results of segments that the kernel which runs a step of one row waits for.
    pub(crate) awaited_bytes: usize,
    /// Of a product's input in the order in which `wide` reads it.
    pub(crate) interleaved_bytes: usize,
    /// Of what columns of blocks take of the rows that meet experts.
    pub(crate) group_bytes: usize,
    /// Of those rows in order.
    pub(crate) member_bytes: usize,
    /// Counts of the blocks of rows and heads that are done.
    pub(crate) arrival_bytes: usize,
    /// Numbers of a step.
    pub(crate) feed_len: usize,
    /// Rows of logits.
    pub(crate) outputs: usize,
    /// Floats that come with a step.
    pub(crate) input_len: usize,
    /// Floats that the host reads.
    pub(crate) output_len: usize,
}

impl Sizes {
    pub(crate) fn new(plan: &Plan, program: &Program, limits: &Limits, kept: Kept) -> Sizes {
        let (tokens, outputs) = (limits.tokens, limits.outputs);
        // One kernel for all reads halves, and what its own device has made.
        let run =
            persistent::run_of(plan, program).filter(|_| kept == Kept::F16 && program.devices == 1);
        let last = run.as_ref().map(|run| run.end - 1);
        let (apart, early_bytes) = last.map_or_else(Default::default, |i| apart(program, i));
        let tables = slot_tables(plan);
        let kv_bytes = plan.slots.iter().zip(&tables).map(|(slot, &table)| {
            let heads = limits.pages[table] * PAGE_TOKENS * slot.kv_heads;
            [heads * kept.bytes(slot.key_dim), heads * kept.bytes(slot.value_dim)]
        });
        let states = plan.states.iter().map(|state| 4 * limits.state_slots * state.elements());
        let angles = program.ropes.iter().map(|rope| 4 * tokens * rope.dims);
        let segments = plan.slots.iter().zip(&tables).map(|(_, &table)| {
            // Two pieces of segments at the ends.
            (limits.pages[table] * PAGE_TOKENS).div_ceil(SEGMENT) + 1
        });
        let segments = segments.max().unwrap_or(0);
        let heads = program.stages.iter().filter_map(|stage| match &stage.work {
            Work::Attend { attention, .. } => Some(attention.heads),
            _ => None,
        });
        let heads = heads.max().unwrap_or(0);
        let row = program.stages.iter().filter_map(|stage| match &stage.work {
            Work::Attend { attention: a, slot, .. } => {
                let stride = kept.stride(plan.slots[*slot].value_dim);
                Some(4 * a.heads * segments * (stride + PART_EXTRA))
            }
            _ => None,
        });
        let row_bytes = row.max().unwrap_or(0);
        let most = PARTIAL_BYTES.checked_div(row_bytes).unwrap_or(0);
        let spread_rows = most.clamp(1, SPREAD_ROWS);
        let awaited_bytes = if run.is_some() { row_bytes } else { 0 };
        let rows = tokens.max(outputs);
        let products = products_of_many(plan, program, rows);
        let of_experts = |bytes: fn(Pairs) -> usize| {
            products.iter().filter_map(|(_, pairs)| pairs.map(bytes)).max().unwrap_or(0)
        };
        Sizes {
            arena: arrange(program, tokens, outputs),
            kept,
            apart,
            early_bytes,
            persistent: run,
            kv_bytes: kv_bytes.collect(),
            state_bytes: states.collect(),
            angle_bytes: angles.collect(),
            segments,
            spread_rows,
            partial_bytes: spread_rows * row_bytes,
            awaited_bytes,
            interleaved_bytes: interleaved_bytes(&products, rows),
            group_bytes: of_experts(|pairs| 16 * pairs.columns(WIDTHS[0].0)),
            member_bytes: of_experts(|pairs| 4 * pairs.places()),
            arrival_bytes: 4 * spread_rows * heads,
            feed_len: feed::capacity(tokens, outputs, &limits.pages, outputs.min(RECORDED_ROWS)),
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
        let choice = 8 * (choice::GROUPS + 1) * self.outputs.min(RECORDED_ROWS);
        let list = self.persistent.as_ref().map_or(0, |run| size_of::<Stage>() * run.len());
        self.arena.bytes
            + self.apart.bytes
            + list as u64
            + (self.partial_bytes
                + self.awaited_bytes
                + self.interleaved_bytes
                + self.group_bytes
                + self.member_bytes
                + self.arrival_bytes
                + angles
                + choice
                + 4 * self.feed_len) as u64
    }
}

/// The rows of a step that meet experts, one for each that it meets.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pairs {
    count: usize,
    pub(crate) experts: usize,
}

impl Pairs {
    pub(crate) fn of(rows: usize, experts: &Experts) -> Pairs {
        Pairs { count: rows * experts.used, experts: experts.count }
    }

    /// The most experts that have rows.
    fn met(self) -> usize {
        self.count.min(self.experts)
    }

    /// Places for all in order, where each expert's begin at a multiple of eight.
    pub(crate) fn places(self) -> usize {
        (self.count + 7 * self.met()).next_multiple_of(8)
    }

    /// The most columns of blocks that take up to `width` rows of one expert.
    pub(crate) fn columns(self, width: usize) -> usize {
        self.count / width + self.met()
    }

    /// How many of them to expect.
    pub(crate) fn likely_columns(self, width: usize) -> f64 {
        self.count as f64 / width as f64 + 0.5 * self.met() as f64
    }
}

/// The weights of products that steps of so many rows read by kernels for many, and what of the
/// rows meets experts.
fn products_of_many<'a>(
    plan: &'a Plan,
    program: &Program,
    rows: usize,
) -> Vec<(&'a Weight, Option<Pairs>)> {
    if rows <= DOT_ROWS {
        return Vec::new();
    }
    let products = program.stages.iter().filter_map(|stage| match &stage.work {
        Work::Product { factors, experts, .. } => {
            let pairs = experts.map(|experts| Pairs::of(rows, &experts));
            Some((plan.weight(factors[0].weight), pairs))
        }
        _ => None,
    });
    products.filter(|(weight, _)| Kind::of(weight.format) != Kind::F32).collect()
}

/// Bytes for the longest input of such a product.
fn interleaved_bytes(products: &[(&Weight, Option<Pairs>)], rows: usize) -> usize {
    let wide = products.iter().filter(|(weight, _)| Kind::of(weight.format).has_wide());
    let bytes = wide.map(|(weight, pairs)| {
        // The last expert's columns of blocks may look beyond its rows.
        let rows = match pairs {
            Some(pairs) => pairs.places() + WIDEST,
            None => rows.next_multiple_of(WIDEST),
        };
        2 * weight.cols.next_multiple_of(CHUNK_COLS) * rows
    });
    bytes.max().unwrap_or(0)
}

/// Elements of a key as it is kept in half precision.
pub(crate) fn key_stride(slot: &KvSlot) -> usize {
    Kept::F16.stride(slot.key_dim)
}

/// Elements of a value as it is kept in half precision.
pub(crate) fn value_stride(slot: &KvSlot) -> usize {
    Kept::F16.stride(slot.value_dim)
}

/// The page table of each slot among those of a span.
pub(crate) fn slot_tables(plan: &Plan) -> Vec<usize> {
    let windows = plan.windows();
    let table = |window| windows.iter().position(|&w| w == window).expect("a window of the plan");
    plan.slots.iter().map(|slot| table(slot.window)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_room_however_rows_meet_experts() {
        // So many rows of each expert.
        for counts in [&[1, 1, 1, 1][..], &[0, 600, 1, 0], &[64, 128, 65, 9], &[7, 0, 0, 0], &[0]] {
            let pairs = Pairs { count: counts.iter().sum(), experts: counts.len() };
            let places: usize = counts.iter().map(|count| usize::next_multiple_of(*count, 8)).sum();
            assert!(places <= pairs.places(), "{counts:?}: {places} places");
            for width in [64, 128] {
                let columns: usize = counts.iter().map(|count| count.div_ceil(width)).sum();
                assert!(columns <= pairs.columns(width), "{counts:?}: {columns} columns");
            }
        }
    }
}
