//! One step as each thread runs it: the stages in order, a barrier after each.

use std::sync::atomic::AtomicUsize;
use std::time::Instant;

use bodkin_backend::{Batch, PAGE_TOKENS};
use bodkin_gguf::File;
use bodkin_model::{Act, EmbedBy, Plan, PoolKind, RopeTable, Rows};

use crate::attend::Attend;
use crate::experts::SortedView;
use crate::isa::Isa;
use crate::kv::KvView;
use crate::linear::{ActivationFormat, ActivationFormats, Activations, OutRows, matmul};
use crate::lower::{Place, Product, Program, RowOp, Stage};
use crate::observe::Show;
use crate::ops::act;
use crate::ops::route::route;
use crate::ops::rows::{self, Norm};
use crate::pieces::{Ahead, FIRST_LINES, WAITING_LINES};
use crate::pool::Worker;
use crate::shared::Shared;
use crate::weights::{Prepared, read_row};

/// Everything that the threads of a step share.
pub(crate) struct Step<'a> {
    pub(crate) isa: Isa,
    pub(crate) program: &'a Program,
    pub(crate) weights: &'a [Prepared],
    pub(crate) plan: &'a Plan,
    pub(crate) file: &'a File,
    pub(crate) batch: &'a Batch,
    /// The position of each row.
    pub(crate) positions: &'a [u32],
    /// The span of each row.
    pub(crate) spans: &'a [u32],
    /// `[tokens, buffer width]` each.
    pub(crate) buffers: &'a [Shared<f32>],
    /// `[outputs, vocabulary]`.
    pub(crate) logits: Shared<f32>,
    /// The prepared input of the next products, one for each form.
    pub(crate) inputs: &'a [Activations; ActivationFormat::ALL.len()],
    pub(crate) kv: &'a [KvView],
    /// The cells of each recurrent state.
    pub(crate) states: &'a [Shared<f32>],
    /// The tables of each sorting.
    pub(crate) sorted: &'a [SortedView],
    /// The page table of each slot among those of a span.
    pub(crate) slot_tables: &'a [usize],
    pub(crate) ropes: &'a [RopeTable],
    /// Cosines, then sines, `[tokens, 2 * pairs]` for each rope.
    pub(crate) angles: &'a [Shared<f32>],
    /// Room of each thread for a tile of attention.
    pub(crate) scratch: &'a [Shared<f32>],
    /// Room for the sums of tiles whose segments are spread over threads.
    pub(crate) partials: Shared<f32>,
    /// Of the inputs of gated products.
    pub(crate) thresholds: &'a [f32],
    /// How much of each stage has been taken, of each thread's share where there are shares; zero
    /// at the start.
    pub(crate) taken: &'a [AtomicUsize],
    /// Is shown the inputs of products, by the first thread.
    pub(crate) show: Option<Show<'a>>,
    /// The seconds that each stage took so far, if they are wanted.
    pub(crate) seconds: Option<Shared<f64>>,
}

impl Step<'_> {
    /// Runs all stages. Every thread calls it.
    pub(crate) fn run(&self, worker: &Worker<'_>) {
        // One clock is enough: all threads leave a stage together.
        let mut clock = self.seconds.filter(|_| worker.index == 0).map(|s| (s, Instant::now()));
        let stages = &self.program.stages;
        let mut next = 0;
        let mut ahead = Ahead::default();
        while next < stages.len() {
            let this = next;
            self.stage(this, worker);
            let serial = stages[this + 1..].iter().take_while(|stage| self.is_serial(stage));
            next = this + 1 + serial.count();
            self.look_ahead(worker, next, &mut ahead);
            ahead.ask(FIRST_LINES);
            worker.barrier_then(
                || stages[this + 1..next].iter().for_each(|stage| self.serial(stage)),
                || ahead.ask(WAITING_LINES),
            );
            if let Some((seconds, start)) = &mut clock {
                let now = Instant::now();
                // SAFETY: only this thread touches the times.
                let stage = unsafe { seconds.part_mut(this..this + 1) };
                stage[0] += (now - *start).as_secs_f64();
                *start = now;
            }
        }
    }

    /// This thread's part of a stage.
    fn stage(&self, index: usize, worker: &Worker<'_>) {
        let taken = &self.taken[index * worker.threads..][..worker.threads];
        if let Some(show) = self.show.filter(|_| worker.index == 0) {
            self.show_products(&self.program.stages[index], show);
        }
        match &self.program.stages[index] {
            Stage::Rows { rows, ops } => {
                for row in worker.share(self.count(*rows)) {
                    ops.iter().for_each(|op| self.row(op, *rows, row));
                }
            }
            Stage::Multiply { rows, input, products } => {
                self.matmul(worker, *rows, *input, products, taken);
            }
            Stage::Sort { sorting } => {
                if worker.index == 0 {
                    self.sort(*sorting);
                }
            }
            Stage::Experts { input: _, cols, sorting, products } => {
                self.experts(worker, *cols, *sorting, products, &taken[0]);
            }
            Stage::Conv { input, weight, bias, state, out } => {
                self.conv(*input, *weight, *bias, (*state, *out), &taken[0]);
            }
            Stage::Scan(stage) => self.scan(stage, &taken[0]),
            Stage::Attend { q, out, attention, slot } => {
                let (q, out, slot) = (*q, *out, *slot);
                Attend { step: self, q, out, attention, slot }.run(worker, &taken[0]);
            }
        }
    }

    /// Whether a stage is one thread's work, so that it needs no barrier of its own: in decode,
    /// what is done to the one row. Times are taken stage by stage.
    fn is_serial(&self, stage: &Stage) -> bool {
        self.seconds.is_none()
            && match stage {
                Stage::Rows { rows, .. } => self.count(*rows) <= 1,
                Stage::Sort { .. } => self.batch.tokens.len() <= 1,
                _ => false,
            }
    }

    /// A stage that is one thread's work.
    fn serial(&self, stage: &Stage) {
        match stage {
            Stage::Rows { rows, ops } => {
                for row in 0..self.count(*rows) {
                    ops.iter().for_each(|op| self.row(op, *rows, row));
                }
            }
            Stage::Sort { sorting } => self.sort(*sorting),
            _ => unreachable!("every thread has a part of this stage"),
        }
    }

    fn count(&self, rows: Rows) -> usize {
        match rows {
            Rows::Tokens => self.batch.tokens.len(),
            Rows::Outputs => self.batch.outputs.len(),
        }
    }

    /// What a place lies in, and the distance of its rows.
    pub(crate) fn buffer(&self, place: Place) -> (Shared<f32>, usize) {
        match place.buffer {
            Some(b) => (self.buffers[b], self.program.buffer_widths[b]),
            None => (self.logits, place.width),
        }
    }

    /// Where a row of a place begins, and in what.
    fn locate(&self, place: Place, row: usize) -> (Shared<f32>, usize) {
        let (buffer, stride) = self.buffer(place);
        (buffer, row * stride)
    }

    /// Some columns of a row, to be written.
    ///
    /// # Safety
    ///
    /// Only one thread touches these columns in this stage.
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn columns(
        &self,
        place: Place,
        row: usize,
        columns: std::ops::Range<usize>,
    ) -> &mut [f32] {
        let (buffer, start) = self.locate(place, row);
        // SAFETY: the caller's promise.
        unsafe { buffer.part_mut(start + columns.start..start + columns.end) }
    }

    pub(crate) fn read(&self, place: Place, row: usize) -> &[f32] {
        let (buffer, start) = self.locate(place, row);
        // SAFETY: a row-local stage touches a row from one thread only, and other stages write
        // other buffers than they read.
        unsafe { buffer.part(start..start + place.width) }
    }

    #[allow(clippy::mut_from_ref)]
    fn write(&self, place: Place, row: usize) -> &mut [f32] {
        let (buffer, start) = self.locate(place, row);
        // SAFETY: a row is written by one thread of a stage, and an operation never writes what
        // it reads, but for those that work in place, which take one reference to it only.
        unsafe { buffer.part_mut(start..start + place.width) }
    }

    fn row(&self, op: &RowOp, rows: Rows, row: usize) {
        let vector = |id: bodkin_model::WeightId| {
            self.weights[id.0].vector.as_deref().expect("prepared as a vector")
        };
        match *op {
            RowOp::Angles { rope } => self.set_angles(rope, row),
            RowOp::Input { out } => {
                let input = &self.batch.inputs[row * out.width..][..out.width];
                self.write(out, row).copy_from_slice(input);
            }
            RowOp::Embed { table, by, out } => {
                let index = match by {
                    EmbedBy::Token => self.batch.tokens[row] as usize,
                    EmbedBy::Position => self.positions[row] as usize,
                    EmbedBy::First => 0,
                };
                read_row(self.file, self.plan.weight(table), index, self.write(out, row));
            }
            RowOp::Norm { input, out, kind, weight, bias, eps, groups } => {
                let (x, out) = (self.read(input, row), self.write(out, row));
                let (weight, bias) = (vector(weight), bias.map(vector));
                rows::norm(self.isa, x, Norm { kind, weight, bias, eps, groups }, out);
            }
            RowOp::Rope { input, out, head_dim, style, rope } => {
                let (x, out) = (self.read(input, row), self.write(out, row));
                let (cos, sin) = self.read_angles(rope, row);
                rows::rope(self.isa, style, x, head_dim, (cos, sin), out);
            }
            RowOp::Store { k, v, slot } => self.store(k, v, slot, row),
            RowOp::Glu { gate, up, act, out } => self.glu(row, gate, up, act, out),
            RowOp::Act { input, act: kind, out } => {
                act::act(self.isa, kind, self.copied(input, out, row));
            }
            RowOp::Add { a, b, out } => {
                rows::add(self.isa, self.copied(a, out, row), self.read(b, row));
            }
            RowOp::Scale { input, factor, out } => {
                self.copied(input, out, row).iter_mut().for_each(|x| *x *= factor);
            }
            RowOp::Softcap { input, cap, out } => {
                rows::cap_in_place(self.isa, self.copied(input, out, row), cap);
            }
            RowOp::Slice { input, groups, start, out } => {
                rows::slice(self.read(input, row), groups, start, self.write(out, row));
            }
            RowOp::Concat { a, b, groups, out } => {
                let (a, b) = (self.read(a, row), self.read(b, row));
                rows::concat(a, b, groups, self.write(out, row));
            }
            RowOp::Route { input, bias, ref routing, out } => {
                let scores = self.read(input, row);
                route(routing, scores, bias.map(vector), self.write(out, row));
            }
            RowOp::ExpertSum { input, route, out } => {
                let (parts, route) = (self.read(input, row), self.read(route, row));
                rows::weighted_sum(self.isa, parts, route, self.write(out, row));
            }
            RowOp::Pool { input, kind, out } => self.pool(input, kind, row, out),
            RowOp::Mask { values, product } => {
                rows::mask(self.write(values, row), self.thresholds[product]);
            }
            RowOp::PrepareExperts { input, cols, sorting, formats } => {
                self.prepare_experts(row, input, cols, sorting, formats);
            }
            RowOp::Prepare { input, formats } => self.prepare(rows, row, input, formats),
        }
    }

    fn glu(&self, row: usize, gate: Place, up: Place, kind: Act, out: Place) {
        let up = self.read(up, row);
        if gate.width != out.width {
            let gate = self.read(gate, row)[0];
            act::glu_by_one(self.isa, kind, gate, up, self.write(out, row));
        } else {
            act::glu(self.isa, kind, self.copied(gate, out, row), up);
        }
    }

    /// The row of `out`, holding that of `input`, which may lie in the same place.
    #[allow(clippy::mut_from_ref)]
    fn copied(&self, input: Place, out: Place, row: usize) -> &mut [f32] {
        if input != out {
            self.write(out, row).copy_from_slice(self.read(input, row));
        }
        self.write(out, row)
    }

    /// Makes a row ready as the input of products.
    fn prepare(&self, rows: Rows, row: usize, input: Place, formats: ActivationFormats) {
        let from = match rows {
            Rows::Tokens => row,
            Rows::Outputs => self.batch.outputs[row] as usize,
        };
        let x = self.read(input, from);
        for format in formats.iter() {
            let activations = self.activations(format, self.count(rows), input.width);
            // SAFETY: one thread sets this row; products read it after a barrier.
            unsafe { activations.writer().set(self.isa, row, x) };
        }
    }

    /// Makes the row of an output from the rows of its sequence.
    fn pool(&self, input: Place, kind: PoolKind, output: usize, out: Place) {
        let span = self.spans[self.batch.outputs[output] as usize] as usize;
        let first: usize = self.batch.spans[..span].iter().map(|s| s.len).sum();
        let len = self.batch.spans[span].len;
        let out = self.write(out, output);
        match kind {
            PoolKind::First => out.copy_from_slice(self.read(input, first)),
            PoolKind::Last => out.copy_from_slice(self.read(input, first + len - 1)),
            PoolKind::Mean => {
                out.fill(0.0);
                for row in first..first + len {
                    out.iter_mut().zip(self.read(input, row)).for_each(|(y, x)| *y += x);
                }
                out.iter_mut().for_each(|y| *y /= len as f32);
            }
        }
    }

    pub(crate) fn activations(
        &self,
        format: ActivationFormat,
        rows: usize,
        cols: usize,
    ) -> Activations {
        self.inputs[format as usize].shaped(format, rows, cols)
    }

    fn set_angles(&self, rope: usize, row: usize) {
        let table = &self.ropes[rope];
        let pairs = table.inverse_frequencies.len();
        // SAFETY: one thread sets the angles of a row, and only in the first stage.
        let angles = unsafe { self.angles[rope].part_mut(2 * pairs * row..2 * pairs * (row + 1)) };
        let (cos, sin) = angles.split_at_mut(pairs);
        table.cos_sin_at(self.positions[row], cos, sin);
    }

    fn read_angles(&self, rope: usize, row: usize) -> (&[f32], &[f32]) {
        let pairs = self.ropes[rope].inverse_frequencies.len();
        // SAFETY: the angles of a row were set by this thread or before a barrier.
        let angles = unsafe { self.angles[rope].part(2 * pairs * row..2 * pairs * (row + 1)) };
        angles.split_at(pairs)
    }

    fn store(&self, k: Place, v: Place, slot: usize, row: usize) {
        let span = &self.batch.spans[self.spans[row] as usize];
        let position = self.positions[row] as usize;
        let page = span.tables[self.slot_tables[slot]].page(position);
        let (k, v) = (self.read(k, row), self.read(v, row));
        // SAFETY: the cells of this token are written here only, and read after a barrier.
        unsafe { self.kv[slot].store(self.isa, (page, position % PAGE_TOKENS), k, v) };
    }

    pub(crate) fn product(
        &self,
        rows: Rows,
        input: Place,
        product: &Product,
        panels: std::ops::Range<usize>,
        scratch: Shared<f32>,
    ) {
        let matrix = &self.weights[product.weight.0].matrices[0];
        let bias = product
            .bias
            .map(|id| self.weights[id.0].vector.as_deref().expect("prepared as a vector"));
        let count = self.count(rows);
        let activations =
            self.activations(matrix.layout().activation_format(self.isa), count, input.width);
        let (buffer, stride) = self.buffer(product.out);
        assert!(count * stride <= buffer.len(), "room for every row of the result");
        // SAFETY: the buffer has the rows, and this thread alone has taken these panels, so it
        // alone writes their columns. The scratch is this thread's.
        unsafe {
            let out = OutRows::from_raw(buffer.start(), stride, count);
            let room = scratch.part_mut(0..scratch.len());
            matmul(self.isa, matrix, bias, panels, &activations, 0..count, out, room);
        }
    }
}
