//! Recurrent stages: where the state of sequences is kept, and how a stage is shared out. Threads
//! take columns or heads of a sequence and follow it from token to token.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use bodkin_model::{Plan, StateSlot, WeightId};

use crate::lower::{Place, ScanStage};
use crate::ops::recurrent::{ConvPart, SCAN_TOKENS, ScanToken, conv, head_len, scan};
use crate::shared::Shared;
use crate::step::Step;

/// Columns of a convolution that a thread takes at a time: a few cache lines.
const CONV_COLUMNS: usize = 128;
/// The most taps of a convolution; models have four.
pub(crate) const MOST_TAPS: usize = 16;

/// Elements of one cell of a state as it is kept.
pub(crate) fn cell_len(slot: &StateSlot) -> usize {
    match slot {
        StateSlot::Conv { .. } => slot.elements(),
        StateSlot::Scan(s) => s.heads * head_len(s),
    }
}

/// Bytes of `cells` cells of all states.
pub(crate) fn bytes(plan: &Plan, cells: usize) -> u64 {
    plan.states.iter().map(|slot| 4 * (cells * cell_len(slot)) as u64).sum()
}

/// The taps of a convolution as its stage reads them: `[kernel][width]`, from `[width][kernel]`.
pub(crate) fn transposed(weight: &[f32], kernel: usize) -> Vec<f32> {
    let columns = weight.len() / kernel;
    (0..kernel).flat_map(|k| (0..columns).map(move |c| weight[c * kernel + k])).collect()
}

impl Step<'_> {
    /// Some elements of a sequence's cell, which begin as zero at its first token.
    ///
    /// # Safety
    ///
    /// Only the calling thread touches these elements in this stage.
    #[allow(clippy::mut_from_ref)]
    unsafe fn cell(&self, state: usize, span: usize, part: std::ops::Range<usize>) -> &mut [f32] {
        let span = &self.batch.spans[span];
        let start = span.state_slot as usize * cell_len(&self.plan.states[state]);
        // SAFETY: the caller's promise.
        let cell = unsafe { self.states[state].part_mut(start + part.start..start + part.end) };
        if span.position == 0 {
            cell.fill(0.0);
        }
        cell
    }

    pub(crate) fn vector(&self, id: WeightId) -> &[f32] {
        self.weights[id.0].vector.as_deref().expect("prepared as a vector")
    }

    /// Tasks are some columns of one sequence.
    pub(crate) fn conv(
        &self,
        input: Place,
        weight: WeightId,
        bias: Option<WeightId>,
        (state, out): (usize, Place),
        taken: &AtomicUsize,
    ) {
        let width = input.width;
        let parts = width.div_ceil(CONV_COLUMNS);
        let weight = self.vector(weight);
        let kernel = weight.len() / width;
        loop {
            let task = taken.fetch_add(1, Relaxed);
            let (span, part) = (task / parts, task % parts);
            if span >= self.batch.spans.len() {
                return;
            }
            let columns = part * CONV_COLUMNS..width.min((part + 1) * CONV_COLUMNS);
            let mut taps: [&[f32]; MOST_TAPS] = [&[]; MOST_TAPS];
            for (k, taps) in taps[..kernel].iter_mut().enumerate() {
                *taps = &weight[k * width..][columns.clone()];
            }
            let bias = bias.map(|id| &self.vector(id)[columns.clone()]);
            let part = ConvPart { taps: &taps[..kernel], bias };
            self.conv_part(&part, input, span, columns, (state, out));
        }
    }

    fn conv_part(
        &self,
        part: &ConvPart<'_>,
        input: Place,
        span: usize,
        columns: std::ops::Range<usize>,
        (state, out): (usize, Place),
    ) {
        let before = part.taps.len() - 1;
        let first: usize = self.batch.spans[..span].iter().map(|s| s.len).sum();
        let len = self.batch.spans[span].len;
        // The cell holds rows as the value has them; a thread owns its columns of each.
        let mut old: [&mut [f32]; MOST_TAPS] = Default::default();
        for (i, old) in old[..before].iter_mut().enumerate() {
            let row = i * input.width;
            // SAFETY: this thread alone has taken these columns of this sequence.
            *old = unsafe { self.cell(state, span, row + columns.start..row + columns.end) };
        }
        for t in 0..len {
            let mut inputs: [&[f32]; MOST_TAPS] = [&[]; MOST_TAPS];
            for (k, input_k) in inputs[..=before].iter_mut().enumerate() {
                *input_k = match (t + k).checked_sub(before) {
                    Some(t) => &self.read(input, first + t)[columns.clone()],
                    None => old[t + k],
                };
            }
            // SAFETY: as above.
            let out = unsafe { self.columns(out, first + t, columns.clone()) };
            conv(self.isa, part, &inputs[..=before], out);
        }
        // The last inputs, of which the oldest may have been in the cell already.
        for i in 0..before {
            let (new, rest) = old[i..before].split_first_mut().expect("more rows");
            match (len + i).checked_sub(before) {
                Some(t) => new.copy_from_slice(&self.read(input, first + t)[columns.clone()]),
                None => new.copy_from_slice(rest[len - 1]),
            }
        }
    }

    /// Tasks are heads of one sequence.
    pub(crate) fn scan(&self, stage: &ScanStage, taken: &AtomicUsize) {
        let s = stage.scan;
        let len = head_len(&s);
        let (a, d, dt_bias) =
            (self.vector(stage.a), self.vector(stage.d), self.vector(stage.dt_bias));
        loop {
            let task = taken.fetch_add(1, Relaxed);
            let (span, head) = (task / s.heads, task % s.heads);
            if span >= self.batch.spans.len() {
                return;
            }
            let first: usize = self.batch.spans[..span].iter().map(|s| s.len).sum();
            // SAFETY: this thread alone has taken this head of this sequence.
            let state = unsafe { self.cell(stage.state, span, head * len..(head + 1) * len) };
            let group = head / (s.heads / s.groups) * s.state;
            let last = first + self.batch.spans[span].len;
            for chunk in (first..last).step_by(SCAN_TOKENS) {
                let mut tokens: [ScanToken<'_>; SCAN_TOKENS] = Default::default();
                let tokens = &mut tokens[..SCAN_TOKENS.min(last - chunk)];
                for (token, row) in tokens.iter_mut().zip(chunk..) {
                    let dt = softplus(self.read(stage.dt, row)[head] + dt_bias[head]);
                    let columns = head * s.head_dim..(head + 1) * s.head_dim;
                    *token = ScanToken {
                        x: &self.read(stage.x, row)[columns.clone()],
                        b: &self.read(stage.b, row)[group..group + s.state],
                        c: &self.read(stage.c, row)[group..group + s.state],
                        dt,
                        decay: (dt * a[head]).exp(),
                        d: d[head],
                        // SAFETY: as above.
                        out: unsafe { self.columns(stage.out, row, columns) },
                    };
                }
                scan(self.isa, tokens, state);
            }
        }
    }
}

/// `ln(1 + exp(x))`, which is `x` in f32 long before the exponential overflows.
fn softplus(x: f32) -> f32 {
    if x > 20.0 { x } else { x.exp().ln_1p() }
}

/// The cells of all states: the memory, and what threads see of it.
pub(crate) struct States {
    pub(crate) views: Vec<Shared<f32>>,
    _owners: Vec<Vec<f32>>,
}

impl States {
    pub(crate) fn new(plan: &Plan, cells: usize) -> States {
        let zeros = |slot: &StateSlot| vec![0.0; cells * cell_len(slot)];
        let mut owners: Vec<Vec<f32>> = plan.states.iter().map(zeros).collect();
        let views = owners.iter_mut().map(|owner| Shared::new(owner)).collect();
        States { views, _owners: owners }
    }

    /// Copies all states of a cell.
    pub(crate) fn copy(&mut self, plan: &Plan, from: u32, to: u32) {
        for (slot, view) in plan.states.iter().zip(&self.views) {
            let len = cell_len(slot);
            // SAFETY: no step is running, and the views are not touched otherwise.
            let all = unsafe { view.part_mut(0..view.len()) };
            all.copy_within(from as usize * len..(from as usize + 1) * len, to as usize * len);
        }
    }
}
