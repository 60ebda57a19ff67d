//! Row-local stages: a list of operations, run back to back on each row. Bound by the latency of
//! the arithmetic on rows that stay in L1.

use std::ops::Range;

use bodkin_backend::PAGE_TOKENS;
use bodkin_model::{Act, EmbedBy, PoolKind, Rows, WeightId};

use super::context::StepContext;
use crate::linear::ActivationFormats;
use crate::ops::route::route;
use crate::ops::rows::{self, Norm};
use crate::ops::{act, hyper};
use crate::program::{Operand, RowOp};
use crate::weights::read_row;

impl StepContext<'_> {
    /// Runs row-local operations on some rows.
    pub(super) fn rows_stage(&self, ops: &[RowOp], rows: Rows, range: Range<usize>) {
        for row in range {
            ops.iter().for_each(|op| self.row(op, rows, row));
        }
    }

    fn row(&self, op: &RowOp, rows: Rows, row: usize) {
        let vector = |id| self.vector(id);
        match *op {
            RowOp::Angles { rope } => self.set_angles(rope, row),
            RowOp::Input { out } => {
                let input = &self.batch.inputs[row * out.width..][..out.width];
                self.write(out, row).copy_from_slice(input);
            }
            RowOp::Embed { table, by, out } => self.embed(table, by, row, out),
            RowOp::Norm { input, out, kind, weight, bias, eps, groups } => {
                let (x, out) = (self.read(input, row), self.write(out, row));
                let (weight, bias) = (weight.map(vector), bias.map(vector));
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
            RowOp::ScaleBy { .. }
            | RowOp::Rescale { .. }
            | RowOp::Cutoff { .. }
            | RowOp::ScaleExperts { .. } => self.scale(op, row),
            RowOp::Softcap { .. } | RowOp::Clamp { .. } => self.bound(op, row),
            RowOp::Mix { input, weights, results, out } => {
                let (x, weights) = (self.read(input, row), self.read(weights, row));
                hyper::mix(self.isa, x, weights, results, self.write(out, row));
            }
            RowOp::HyperWeights { input, scale, base, streams, iterations, eps, out } => {
                let (x, weights) = (self.read(input, row), [vector(scale), vector(base)]);
                hyper::weights(x, weights, streams, (iterations, eps), self.write(out, row));
            }
            RowOp::Slice { input, groups, start, out } => {
                rows::slice(self.read(input, row), groups, start, self.write(out, row));
            }
            RowOp::Concat { a, b, groups, out } => {
                let (a, b) = (self.read(a, row), self.read(b, row));
                rows::concat(a, b, groups, self.write(out, row));
            }
            RowOp::Route { input, chosen, bias, ref routing, out } => {
                let (scores, out) = (self.read(input, row), self.write(out, row));
                let chosen = chosen.map(|chosen| self.read(chosen, row));
                route(routing, scores, chosen, bias.map(vector), out);
            }
            RowOp::ExpertSum { input, route, out } => {
                let (parts, route) = (self.read(input, row), self.read(route, row));
                rows::weighted_sum(self.isa, parts, route, self.write(out, row));
            }
            RowOp::Pool { input, kind, out } => self.pool(input, kind, row, out),
            RowOp::Mask { values, linear } => {
                rows::mask(self.write(values, row), self.thresholds[linear]);
            }
            RowOp::QuantizeExpertInputs { input, cols, permutation, formats } => {
                self.quantize_expert_inputs(row, input, cols, permutation, formats);
            }
            RowOp::Quantize { input, formats } => self.quantize(rows, row, input, formats),
        }
    }

    fn bound(&self, op: &RowOp, row: usize) {
        match *op {
            RowOp::Softcap { input, cap, out } => {
                rows::cap_in_place(self.isa, self.copied(input, out, row), cap);
            }
            RowOp::Clamp { input, low, high, out } => {
                let out = self.copied(input, out, row);
                out.iter_mut().for_each(|x| *x = x.max(low).min(high));
            }
            _ => unreachable!("{op:?} bounds nothing"),
        }
    }

    fn embed(&self, table: WeightId, by: EmbedBy, row: usize, out: Operand) {
        let index = match by {
            EmbedBy::Token => self.batch.tokens[row] as usize,
            EmbedBy::Position => self.positions[row] as usize,
            EmbedBy::PositionModulo => self.positions[row] as usize % self.plan.weight(table).rows,
            EmbedBy::First => 0,
        };
        read_row(self.file, self.plan.weight(table), index, self.write(out, row));
    }

    /// Scales a row, or parts of it.
    fn scale(&self, op: &RowOp, row: usize) {
        match *op {
            RowOp::ScaleBy { input, weight, out } => {
                let (x, weight) = (self.read(input, row), self.vector(weight));
                rows::multiply(self.isa, x, weight, self.write(out, row));
            }
            RowOp::Rescale { input, like, out } => {
                let (x, like) = (self.read(input, row), self.read(like, row));
                rows::rescale(self.isa, x, like, self.write(out, row));
            }
            RowOp::Cutoff { input, deviations, out } => {
                rows::cutoff(self.isa, self.copied(input, out, row), deviations);
            }
            RowOp::ScaleExperts { route, weight, out } => {
                let out = self.copied(route, out, row);
                let (weights, experts) = out.split_at_mut(route.width / 2);
                let numbers = self.vector(weight);
                weights.iter_mut().zip(experts).for_each(|(w, e)| *w *= numbers[*e as usize]);
            }
            _ => unreachable!("{} scales nothing", op.name()),
        }
    }

    fn glu(&self, row: usize, gate: Operand, up: Operand, kind: Act, out: Operand) {
        let up = self.read(up, row);
        if gate.width != out.width {
            act::glu_by_part(self.isa, kind, self.read(gate, row), up, self.write(out, row));
        } else {
            act::glu(self.isa, kind, self.copied(gate, out, row), up);
        }
    }

    /// The row of `out`, with a copy of the row of `input` if that is another operand.
    #[allow(clippy::mut_from_ref)]
    fn copied(&self, input: Operand, out: Operand, row: usize) -> &mut [f32] {
        if input != out {
            self.write(out, row).copy_from_slice(self.read(input, row));
        }
        self.write(out, row)
    }

    /// Converts a row to the activation formats of the next linears.
    fn quantize(&self, rows: Rows, row: usize, input: Operand, formats: ActivationFormats) {
        let from = match rows {
            Rows::Tokens => row,
            Rows::Outputs => self.batch.outputs[row] as usize,
        };
        let x = self.read(input, from);
        for format in formats.iter(self.is_prefill(rows, row)) {
            let activations = self.activations(format, self.count(rows), input.width);
            // SAFETY: one thread sets this row; matmuls read it after a barrier.
            unsafe { activations.writer().set(self.isa, row, x) };
        }
    }

    /// Pools the rows of an output's sequence.
    fn pool(&self, input: Operand, kind: PoolKind, output: usize, out: Operand) {
        let row = self.batch.outputs[output] as usize;
        let span = self.span_of_row[row] as usize;
        let first: usize = self.batch.spans[..span].iter().map(|s| s.len).sum();
        let len = self.batch.spans[span].len;
        let out = self.write(out, output);
        match kind {
            PoolKind::First => out.copy_from_slice(self.read(input, first)),
            PoolKind::Last => out.copy_from_slice(self.read(input, first + len - 1)),
            PoolKind::Mean => {
                self.add_rows(input, first..first + len, out);
                out.iter_mut().for_each(|y| *y /= len as f32);
            }
            PoolKind::Sum if self.batch.spans[span].position == 0 => {
                self.add_rows(input, first..row + 1, out);
            }
            PoolKind::Sum => out.copy_from_slice(self.read(input, row)),
        }
    }

    fn add_rows(&self, input: Operand, rows: Range<usize>, out: &mut [f32]) {
        out.fill(0.0);
        for row in rows {
            out.iter_mut().zip(self.read(input, row)).for_each(|(y, x)| *y += x);
        }
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

    fn store(&self, k: Operand, v: Option<Operand>, slot: usize, row: usize) {
        let layout = &self.plan.slots[slot];
        let Some(entry) = layout.entry_ending_at(self.positions[row] as usize) else { return };
        let (position, place) = layout.place(entry, PAGE_TOKENS);
        let span = &self.batch.spans[self.span_of_row[row] as usize];
        let page = span.tables[self.window_indices[slot]].page(position);
        let v: &[f32] = v.map_or(&[], |v| self.read(v, row));
        // SAFETY: only this thread writes this entry; other threads read it after a barrier.
        unsafe { self.kv[slot].store(self.isa, (page, place), self.read(k, row), v) };
    }
}
