//! One step: every stage as the kernels that run it, with their parameters. The step's `Size` alone
//! decides the kernels and their grids, so that a step can be recorded once and launched again for
//! other tokens.

mod attention;
mod exchange;
mod expert_cache;
mod gemm;
mod launch_shape;
mod matmul;
mod persistent;
mod recurrent;
mod rows;
pub(crate) mod sampling;
mod sparse;

use std::cell::Cell;

use bodkin_backend::{Batch, Result};
use bodkin_model::{Plan, Rows, WeightId};

use crate::arena::Arena;
use crate::constants::{GEMV_ROWS, RECORDED_ROWS, SWIZZLED};
use crate::driver::Device;
use crate::expert_cache::CachedLayer;
use crate::kernels::Kernels;
use crate::lower::{Content, Program, Stage, Value, Work};
use crate::mapped_experts::MappedExperts;
use crate::sizes::{Sizes, gemv_rows};
use crate::tuning::Tuning;
use crate::weights::Placed;

/// Threads of a block of most kernels.
const THREADS: usize = 256;

/// The addresses of everything that steps read and write besides weights.
#[derive(Clone, Debug, Default)]
pub(crate) struct Addresses {
    pub(crate) arena: u64,
    /// Values of the persistent kernel, which never share memory.
    pub(crate) non_aliased: u64,
    /// The stages of the persistent kernel.
    pub(crate) persistent_stages: u64,
    /// Where its blocks report that they are stuck, in memory of the host.
    pub(crate) stalled_stages: u64,
    pub(crate) metadata: u64,
    pub(crate) partials: u64,
    /// Partial results of KV splits that the persistent kernel polls: sentinels between steps.
    pub(crate) polled_partials: u64,
    /// The swizzled input of `gemm_wgmma`.
    pub(crate) swizzled: u64,
    /// The sums of split-K slices that several blocks of it share.
    pub(crate) slice_sums: u64,
    /// The groups of rows with the same expert, and the expert permutation.
    pub(crate) groups: u64,
    pub(crate) permutation: u64,
    /// Counts of finished blocks of attention, zero between steps.
    pub(crate) arrival_counts: u64,
    /// The scores of an indexer's entries.
    pub(crate) entry_scores: u64,
    /// Keys and values of each KV slot.
    pub(crate) kv: Vec<[u64; 2]>,
    /// The index of each KV slot's window, which is that of its page table.
    pub(crate) window_indices: Vec<usize>,
    pub(crate) states: Vec<u64>,
    /// The inverse frequencies of each rotation, in half turns a position, and its attention
    /// factor.
    pub(crate) inverse_frequencies: Vec<(u64, f32)>,
    pub(crate) angles: Vec<u64>,
    /// The numbers from 0 on, of the most parts that have matrices of their own in the persistent
    /// kernel.
    pub(crate) numbers: u64,
    /// The largest logit of each group of a row's.
    pub(crate) group_max: u64,
    /// Counters of sampling, two for each row: zero before the first step.
    pub(crate) step_counts: u64,
    /// Sampled tokens, in memory of the host.
    pub(crate) sampled: u64,
    /// Counts of each routing's choices.
    pub(crate) expert_counts: Vec<u64>,
    /// The layers of routings whose experts are cached.
    pub(crate) expert_cache: Vec<Option<CachedLayer>>,
    /// Of each other device of the tensor-parallel group, if they are connected: where it reads how
    /// many barriers this one has reached.
    pub(crate) arrivals: Vec<u64>,
    /// Bytes from this device's values to those of each of them, modulo 2^64: of steps whose values
    /// share memory, and of the persistent kernel.
    pub(crate) peer_offsets: [u64; 2],
    /// The barriers that each of them has reached.
    pub(crate) barriers_reached: u64,
    /// The barriers that each of them has to have reached.
    pub(crate) barriers_expected: u64,
    /// Of an all-gather.
    pub(crate) finished_blocks: u64,
}

/// The properties of a step that decide its grids.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Size {
    pub(crate) tokens: usize,
    pub(crate) outputs: usize,
    pub(crate) spans: usize,
    pub(crate) has_prefill: bool,
    pub(crate) has_decode: bool,
    /// At least the rows up to the last one of decode.
    pub(crate) decode_rows: usize,
    /// The longest context of decode in multiples of the mean, as a power of two.
    pub(crate) context_skew: usize,
    /// At least the tokens and spans of prefill, and the positions that they attend to.
    pub(crate) prefill_tokens: usize,
    pub(crate) prefill_spans: usize,
    pub(crate) prefill_positions: usize,
}

impl Size {
    pub(crate) fn of(batch: &Batch) -> Size {
        let (tokens, spans) = (batch.tokens.len(), batch.spans.len());
        let mut size = Size {
            tokens,
            outputs: batch.outputs.len(),
            spans,
            has_prefill: batch.spans.iter().any(|span| span.is_prefill),
            has_decode: batch.spans.iter().any(|span| !span.is_prefill),
            decode_rows: tokens,
            context_skew: context_skew(batch),
            prefill_tokens: tokens,
            prefill_spans: spans,
            prefill_positions: usize::MAX,
        };
        // Small steps are recorded once for each size, so these upper bounds have to do. Larger
        // recorded steps have no prefill: theirs are zero.
        if tokens > RECORDED_ROWS {
            let prefill = || batch.spans.iter().filter(|span| span.is_prefill);
            size.prefill_tokens = prefill().map(|span| span.len).sum();
            size.prefill_spans = prefill().count();
            let ends = prefill().map(|span| span.position + span.len);
            size.prefill_positions = ends.max().unwrap_or(0);
            let last = batch.spans.iter().rev().take_while(|span| span.is_prefill);
            size.decode_rows = tokens - last.map(|span| span.len).sum::<usize>();
        }
        size
    }

    /// Whether steps of this size are recorded as graphs: small ones, and those that only decode,
    /// as their sizes recur. Clients can ask for any number of output rows: such steps are not.
    pub(crate) fn is_recorded(&self) -> bool {
        (self.tokens <= RECORDED_ROWS || !self.has_prefill) && self.outputs <= self.spans
    }

    /// Of a decode step of one sequence.
    pub(crate) fn of_one() -> Size {
        Size {
            tokens: 1,
            outputs: 1,
            spans: 1,
            has_prefill: false,
            has_decode: true,
            decode_rows: 1,
            context_skew: 1,
            prefill_tokens: 1,
            prefill_spans: 1,
            prefill_positions: usize::MAX,
        }
    }
}

/// The longest context of decode in multiples of the mean, rounded to a power of two so that few
/// graphs differ in it.
fn context_skew(batch: &Batch) -> usize {
    let decode = batch.spans.iter().filter(|span| !span.is_prefill);
    let contexts = decode.map(|span| (span.position + span.len) as f64);
    let (count, sum, longest) = contexts
        .fold((0.0, 0.0, 1.0_f64), |(n, sum, longest), x| (n + 1.0, sum + x, longest.max(x)));
    let skew = if sum > 0.0 { longest * count / sum } else { 1.0 };
    1 << skew.log2().round() as u32
}

/// The rows that are permuted in memory: the router's result if it has chosen the experts, rows of
/// the step, experts of a row, and rows of a group.
type Permutation = (Option<Value>, u32, usize, usize);

/// The input that is swizzled in memory: whether only its output rows, and whether by the current
/// [`Permutation`].
type Swizzle = (Value, bool, bool);

/// A step of some size on a loaded model.
pub(crate) struct Step<'a> {
    pub(crate) device: &'a Device,
    pub(crate) kernels: &'a Kernels,
    pub(crate) plan: &'a Plan,
    pub(crate) program: &'a Program,
    pub(crate) sizes: &'a Sizes,
    /// The offsets of values, and their address.
    pub(crate) arena: (&'a Arena, u64),
    pub(crate) weights: &'a [Placed],
    pub(crate) at: &'a Addresses,
    /// If experts stay in the file.
    pub(crate) mapped_experts: Option<&'a MappedExperts>,
    pub(crate) tuning: &'a Tuning,
    pub(crate) size: Size,
    /// Whether the host reads matmul inputs: then no matmul computes a norm itself.
    pub(crate) is_observed: bool,
    /// The contents of [`Addresses::swizzled`].
    pub(crate) swizzled: Cell<Option<Swizzle>>,
    /// The contents of [`Addresses::groups`] and [`Addresses::permutation`].
    pub(crate) permuted: Cell<Option<Permutation>>,
}

impl Step<'_> {
    pub(crate) fn rows(&self, rows: Rows) -> usize {
        match rows {
            Rows::Tokens => self.size.tokens,
            Rows::Outputs => self.size.outputs,
        }
    }

    /// The address of a value.
    pub(crate) fn address(&self, value: Value) -> u64 {
        let own = |value: Value| self.arena.1 + self.arena.0.offsets[value.0];
        match self.program.values[value.0].view {
            Some((base, start)) => own(base) + (size_of::<f32>() * start) as u64,
            None => own(value),
        }
    }

    pub(crate) fn content(&self, value: Value) -> Content {
        self.program.values[value.0].content
    }

    /// Whether a value is swizzled in this step.
    fn is_swizzled(&self, value: Value) -> bool {
        let may_be_swizzled =
            self.program.values[value.0].may_be_swizzled && self.kernels.has_wgmma();
        let are_gemms = self.size.tokens > gemv_rows(true, None, self.program.devices);
        may_be_swizzled && are_gemms && !self.is_observed
    }

    /// The mark in a value's stride if it is swizzled.
    fn swizzled_mark(&self, value: Value) -> u32 {
        if self.is_swizzled(value) { SWIZZLED } else { 0 }
    }

    /// The address of matmul inputs and the distance of their rows; zeros for none.
    fn half_place(&self, value: Option<Value>) -> (u64, u32) {
        let Some(value) = value else { return (0, 0) };
        let stride = self.content(self.program.base(value)).row_stride() as u32;
        (self.address(value), stride | self.swizzled_mark(value))
    }

    /// The distance of a value's rows, in elements.
    pub(crate) fn stride(&self, value: Value) -> u32 {
        self.content(self.program.base(value)).stride() as u32
    }

    /// The address of a value and the distance of its rows; zeros for none.
    fn place(&self, value: Option<Value>) -> (u64, u32) {
        value.map_or((0, 0), |value| (self.address(value), self.stride(value)))
    }

    fn vector(&self, id: Option<WeightId>) -> u64 {
        id.map_or(0, |id| self.weights[id.0].vector)
    }

    /// A grid of rows by columns, for kernels whose threads take single elements.
    fn elements(&self, rows: usize, width: usize) -> [usize; 3] {
        let per_thread = if rows > GEMV_ROWS { 4 } else { 1 };
        [rows, width.div_ceil(per_thread * THREADS).clamp(1, 256), 1]
    }

    /// Whether matmuls compute the norm of their input where they can.
    fn inlines_norms(&self) -> bool {
        self.size.tokens == 1 && !self.is_observed
    }

    /// Launches the kernels of a stage.
    pub(crate) fn run(&self, stage: &Stage) -> Result<()> {
        let rows = self.rows(stage.rows);
        if rows == 0 {
            return Ok(());
        }
        self.device.label(&stage.name);
        match &stage.work {
            Work::Angles { rope } => self.angles(*rope),
            // The host has sent it.
            Work::Input { .. } => Ok(()),
            Work::Embed { table, by, out } => self.embed(rows, *table, *by, *out),
            Work::Norm(norm) if norm.is_inlined && self.inlines_norms() => Ok(()),
            Work::Norm(norm) => self.norm(rows, norm),
            Work::ConvertInput { input, halves, out } => {
                self.convert_input(rows, *input, *halves, *out)
            }
            Work::Matmul(matmul) => self.matmul(rows, matmul),
            Work::Rotate(rotate) => self.rotate(rows, rotate),
            Work::Attend(attend) => self.attend(rows, attend),
            Work::Elementwise { function, a, b, out, half_out } => {
                let parameters =
                    self.elementwise_parameters(*function, (*a, *b), (*out, *half_out));
                self.elementwise(rows, &parameters)
            }
            Work::ScaleBy { input, weight, out } => self.scale_by(rows, *input, *weight, *out),
            Work::Rescale { input, like, out } => self.rescale(rows, *input, *like, *out),
            Work::Cutoff { input, deviations, out } => self.cutoff(rows, *input, *deviations, *out),
            Work::SliceConcat(slice_concat) => self.slice_concat(rows, slice_concat),
            Work::Pool { input, kind, out } => self.pool(rows, *input, *kind, *out),
            Work::Route(route) => self.route(rows, route),
            Work::ScaleExperts { route, weight, out } => {
                self.scale_experts(rows, *route, *weight, *out)
            }
            Work::ExpertSum { input, route, out } => self.expert_sum(rows, *input, *route, *out),
            Work::Conv(conv) => self.conv(conv),
            Work::Scan(scan) => self.scan(scan),
            Work::DeltaRule(rule) => self.delta_rule(rule),
            Work::Sparse(sparse) => self.sparse(rows, sparse),
            Work::Gather(gather) => self.all_gather(rows, gather),
        }
    }
}

#[cfg(test)]
mod tests {
    use bodkin_backend::Span;

    use super::*;

    fn batch(spans: &[(usize, usize, bool)]) -> Batch {
        let span = |&(position, len, is_prefill): &(usize, usize, bool)| Span {
            len,
            position,
            tables: Vec::new(),
            state_slot: 0,
            is_prefill,
        };
        let tokens = spans.iter().map(|span| span.1).sum();
        let spans = spans.iter().map(span).collect();
        Batch { tokens: vec![0; tokens], spans, ..Batch::default() }
    }

    #[test]
    fn rows_of_decode_end_with_the_last_of_them() {
        let (prefill, decode) = ((0, 20, true), (40, 1, false));
        let rows = |spans: &[_]| Size::of(&batch(spans)).decode_rows;
        assert_eq!(rows(&[decode, decode, prefill]), 2);
        assert_eq!(rows(&[prefill, decode]), 21);
        assert_eq!(rows(&[prefill, decode, prefill]), 21);
        // Recorded once for all steps of the size.
        assert_eq!(rows(&[decode, (0, 5, true)]), 6);
        assert_eq!(Size::of(&batch(&[(7, 1, false)])).tokens, 1);
    }

    #[test]
    fn a_context_that_is_longer_than_others_is_seen() {
        let skew = |positions: &[usize]| {
            let spans: Vec<_> = positions.iter().map(|&position| (position, 1, false)).collect();
            context_skew(&batch(&spans))
        };
        assert_eq!([skew(&[0]), skew(&[90, 100, 110]), skew(&[])], [1; 3]);
        // The mean is 4100 tokens and 360.
        assert_eq!(skew(&[32_000, 100, 99, 101, 120, 130, 100, 140]), 8);
        assert_eq!(skew(&[1000, 140, 300, 0]), 2);
        // The prompt beside it is not one of them.
        assert_eq!(context_skew(&batch(&[(9, 1, false), (0, 4000, true)])), 1);
    }
}
