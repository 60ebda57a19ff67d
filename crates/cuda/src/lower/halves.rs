//! Matmul inputs: halves, which stages store beside floats or in their place, in the parts in which
//! matmuls read them.

use bodkin_model::{Op, Value as PlanValue, WeightId};

use super::lowering::Lowering;
use super::matrices::matrix_of;
use super::stage::{Content, F16Rows, Value, Work};
use crate::constants::CHUNK_COLS;
use crate::packed::PackedLayout;

impl Lowering<'_> {
    /// The halves of a value of the plan that the current stage makes.
    fn half_out(&mut self, i: usize, parts: usize) -> Value {
        let content = Content::F16(self.halves_of(i, parts));
        let value = self.value(self.plan.rows(PlanValue(i)), content);
        self.halves.insert((i, parts), value);
        value
    }

    fn halves_of(&self, i: usize, parts: usize) -> F16Rows {
        F16Rows { parts, cols: self.plan.widths[i] / parts }
    }

    /// The halves of a value of the plan, converted from its floats if no stage makes them.
    fn halves(&mut self, value: PlanValue, parts: usize) -> Value {
        if let Some(&known) = self.halves.get(&(value.0, parts)) {
            return known;
        }
        let input = self.floats(value);
        let (halves, out) = (self.halves_of(value.0, parts), self.half_out(value.0, parts));
        self.push(value.0, Work::ConvertInput { input, halves, out }, "convert input");
        out
    }

    /// The input of a matmul with this weight: a value's halves in `parts` parts, or its floats.
    pub(super) fn input(&mut self, value: PlanValue, parts: usize, weight: WeightId) -> Value {
        match self.layout(weight) {
            PackedLayout::F32 => self.floats(value),
            PackedLayout::Mma(_) => self.halves(value, parts),
        }
    }

    /// The parts in which a matmul reads a value's halves; none if the reader reads floats.
    fn parts(&self, reader: usize, value: usize) -> Option<usize> {
        let is_f32 = |id: WeightId| self.layout(id) == PackedLayout::F32;
        if self.plan.ops[reader].weights().next().is_some_and(is_f32) {
            return None;
        }
        match &self.plan.ops[reader] {
            Op::Linear { .. } | Op::Logits { .. } => Some(1),
            Op::ExpertLinear { input, route, weight, .. } if input.0 == value => {
                let is_route = route.is_some_and(|route| route.0 == value);
                (!is_route).then(|| self.plan.widths[value] / self.plan.weight(*weight).cols)
            }
            _ => None,
        }
    }

    /// The results of an operation that can store both: floats, and halves in `parts` parts.
    pub(super) fn outs(&mut self, i: usize, parts: usize) -> (Option<Value>, Option<Value>) {
        let is_half = |&reader: &usize| self.parts(reader, i) == Some(parts);
        let is_output = i == self.plan.output().0;
        let half = self.fuse && self.readers.get(i).iter().any(is_half);
        let float = !half || is_output || !self.readers.get(i).iter().all(is_half);
        let out = float.then(|| self.out(i));
        (out, half.then(|| self.half_out(i, parts)))
    }

    /// The same where a stage cannot pad its halves.
    pub(super) fn outs_of_whole_chunks(&mut self, i: usize) -> (Option<Value>, Option<Value>) {
        match self.whole_parts(i) {
            Some(parts) => self.outs(i, parts),
            None => (Some(self.out(i)), None),
        }
    }

    /// The parts in which a matmul reads the halves of operation `i`, if they are whole chunks.
    fn whole_parts(&self, i: usize) -> Option<usize> {
        let parts = self.readers.get(i).iter().find_map(|&reader| self.parts(reader, i))?;
        (self.plan.widths[i] / parts).is_multiple_of(CHUNK_COLS).then_some(parts)
    }

    /// The halves of operation `i`, which is matmul `first` or computed with it, if nothing reads
    /// its floats. Rows have `used` results.
    pub(super) fn only_halves(&mut self, first: usize, i: usize, used: usize) -> Option<Value> {
        let parts = self.whole_parts(i)?;
        let (weight, _) = matrix_of(&self.plan.ops[first])?;
        let readers = self.readers.get(i);
        let all_read = readers.iter().all(|&reader| self.parts(reader, i) == Some(parts));
        let is_whole = (self.plan.widths[i] / used).is_multiple_of(CHUNK_COLS);
        // Shards of a part are gathered as such.
        let can = parts == used || self.sharded[weight.0].is_none();
        let is_output = i == self.plan.output().0;
        (self.fuse && all_read && is_whole && can && !is_output).then(|| self.half_out(i, parts))
    }
}
