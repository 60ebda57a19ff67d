//! What the threads of a step share, and access to it.

use std::ops::Range;
use std::sync::atomic::AtomicUsize;

use bodkin_backend::{Batch, Matmul};
use bodkin_gguf::File;
use bodkin_model::{Plan, RopeTable, Rows, WeightId};

use crate::expert_cache::ExpertCache;
use crate::expert_permutation::PermutationView;
use crate::isa::Isa;
use crate::kv::KvView;
use crate::linear::{ActivationFormat, Activations, PackedLayout};
use crate::program::{Operand, Program};
use crate::shared::Shared;
use crate::trace::Trace;
use crate::weights::LoadedWeight;

/// Calls the observer of a step with one matmul and its input rows.
pub(crate) type ObserveFn<'a> = &'a (dyn Fn(&Matmul<'_>) + Sync);

/// The state of a step that all threads share.
pub(crate) struct StepContext<'a> {
    pub(crate) isa: Isa,
    pub(crate) program: &'a Program,
    pub(crate) weights: &'a [LoadedWeight],
    pub(crate) plan: &'a Plan,
    pub(crate) file: &'a File,
    pub(crate) batch: &'a Batch,
    /// The position of each row.
    pub(crate) positions: &'a [u32],
    /// The index of the span of each row.
    pub(crate) span_of_row: &'a [u32],
    /// `[tokens, buffer width]` each.
    pub(crate) buffers: &'a [Shared<f32>],
    /// `[outputs, vocabulary]`.
    pub(crate) logits: Shared<f32>,
    /// The quantised input of the next linears, one buffer per activation format.
    pub(crate) quantized_inputs: &'a [Activations; ActivationFormat::ALL.len()],
    pub(crate) kv: &'a [KvView],
    /// The state slots of each recurrent state of the plan.
    pub(crate) states: &'a [Shared<f32>],
    /// The tables of each expert permutation.
    pub(crate) permutations: &'a [PermutationView],
    /// The cache of each, if its experts have one.
    pub(crate) caches: &'a [Option<ExpertCache>],
    /// The index of each KV slot's window, which is that of its page table in a span.
    pub(crate) window_indices: &'a [usize],
    pub(crate) ropes: &'a [RopeTable],
    /// Cosines, then sines, `[tokens, 2 * pairs]` for each rope.
    pub(crate) angles: &'a [Shared<f32>],
    /// Scratch of each thread, for attention tiles or a packed panel.
    pub(crate) scratch: &'a [Shared<f32>],
    /// Partial results of tiles whose KV splits are shared by threads.
    pub(crate) partials: Shared<f32>,
    /// Input thresholds of [`Plan::sparse_input_matmuls`].
    pub(crate) thresholds: &'a [f32],
    /// `[stages, threads]`: the number of tasks claimed, of each thread's share where a stage has
    /// shares; zero at the start.
    pub(crate) claimed: &'a [AtomicUsize],
    /// Observes the inputs of linears, on the first thread.
    pub(crate) observe: Option<ObserveFn<'a>>,
    /// The total seconds of each stage, if the step is profiled.
    pub(crate) seconds: Option<Shared<f64>>,
    /// The timeline, if the step is traced.
    pub(crate) trace: Option<&'a Trace>,
}

impl StepContext<'_> {
    pub(super) fn count(&self, rows: Rows) -> usize {
        match rows {
            Rows::Tokens => self.batch.tokens.len(),
            Rows::Outputs => self.batch.outputs.len(),
        }
    }

    /// Whether a row is of a prompt: rows of prompts have activation formats of their own.
    pub(super) fn is_prefill(&self, rows: Rows, row: usize) -> bool {
        let token = match rows {
            Rows::Tokens => row,
            Rows::Outputs => self.batch.outputs[row] as usize,
        };
        self.batch.spans[self.span_of_row[token] as usize].is_prefill
    }

    /// Calls `run` with ranges of rows and their activation format in matmuls with `layout`.
    /// `is_prefill` tells the kind of a row.
    pub(super) fn for_formats(
        &self,
        layout: PackedLayout,
        mut rows: Range<usize>,
        is_prefill: impl Fn(usize) -> bool,
        mut run: impl FnMut(Range<usize>, ActivationFormat),
    ) {
        let formats = layout.activation_formats(self.isa);
        while !rows.is_empty() {
            let kind = is_prefill(rows.start);
            let is_other = |&row: &usize| is_prefill(row) != kind;
            let is_one_format = formats[0] == formats[1];
            let end = if is_one_format { None } else { rows.clone().find(is_other) };
            let end = end.unwrap_or(rows.end);
            run(rows.start..end, formats[usize::from(kind)]);
            rows.start = end;
        }
    }

    /// The buffer of an operand, and the distance of its rows.
    pub(crate) fn buffer(&self, operand: Operand) -> (Shared<f32>, usize) {
        match operand.buffer {
            Some(b) => (self.buffers[b], self.program.buffer_widths[b]),
            None => (self.logits, operand.width),
        }
    }

    /// The buffer of an operand, and the offset of a row.
    fn locate(&self, operand: Operand, row: usize) -> (Shared<f32>, usize) {
        let (buffer, stride) = self.buffer(operand);
        (buffer, row * stride)
    }

    /// Some columns of a row, for writing.
    ///
    /// # Safety
    ///
    /// Only one thread touches these columns in this stage.
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn columns(
        &self,
        operand: Operand,
        row: usize,
        columns: Range<usize>,
    ) -> &mut [f32] {
        let (buffer, start) = self.locate(operand, row);
        // SAFETY: the caller's promise.
        unsafe { buffer.part_mut(start + columns.start..start + columns.end) }
    }

    pub(crate) fn read(&self, operand: Operand, row: usize) -> &[f32] {
        let (buffer, start) = self.locate(operand, row);
        // SAFETY: a row-local stage touches a row from one thread only, and other stages write
        // other buffers than they read.
        unsafe { buffer.part(start..start + operand.width) }
    }

    #[allow(clippy::mut_from_ref)]
    pub(super) fn write(&self, operand: Operand, row: usize) -> &mut [f32] {
        let (buffer, start) = self.locate(operand, row);
        // SAFETY: a row is written by one thread of a stage, and an operation never writes what
        // it reads, but for those that work in place, which take one reference to it only.
        unsafe { buffer.part_mut(start..start + operand.width) }
    }

    pub(crate) fn vector(&self, id: WeightId) -> &[f32] {
        self.weights[id.0].vector.as_deref().expect("prepared as a vector")
    }

    pub(crate) fn activations(
        &self,
        format: ActivationFormat,
        rows: usize,
        cols: usize,
    ) -> Activations {
        self.quantized_inputs[format as usize].shaped(format, rows, cols)
    }
}
