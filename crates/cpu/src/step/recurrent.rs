//! Convolution and scan stages: threads claim columns or heads of a sequence and process its tokens
//! in order.
//!
//! ```text
//! Conv  input, out [rows, width]; weight [kernel][width], the oldest tap first
//!       state slot [kernel - 1][width], the oldest input first
//! Scan  x, out [rows, heads * head_dim]; b, c [rows, groups * state]
//!       dt [rows, heads], or [rows, heads * head_dim] by channel
//!       state slot [heads][state][head_dim, padded to whole vectors]
//! Compress  input, scores [rows, dim] or [rows, 2 * dim]; out [rows, dim]
//!       state slot [dim][1 or 2 softmaxes]
//! ```
//!
//! Spans are not empty, and `out` is another buffer than the inputs.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use bodkin_model::WeightId;

use super::context::StepContext;
use crate::ops::compress::CompressPart;
use crate::ops::recurrent::{
    ChannelToken, ConvPart, SCAN_TOKENS, ScanToken, conv, head_len, scan, scan_channels,
};
use crate::ops::route::softplus;
use crate::program::{CompressStage, Operand, ScanStage};
use crate::state::slot_len;

/// Columns of a convolution per task: a few cache lines.
const CONV_COLUMNS: usize = 128;
/// Columns of a compression per task.
const COMPRESSED_COLUMNS: usize = 64;
/// The most taps of a convolution. Models have four.
pub(crate) const MAX_TAPS: usize = 16;

impl StepContext<'_> {
    /// Some elements of a sequence's state slot; resets them if the span is the sequence's first.
    ///
    /// # Safety
    ///
    /// Only the calling thread touches these elements in this stage.
    #[allow(clippy::mut_from_ref)]
    pub(super) unsafe fn load_or_reset(
        &self,
        state: usize,
        span: usize,
        elements: Range<usize>,
    ) -> &mut [f32] {
        let span = &self.batch.spans[span];
        let start = span.state_slot as usize * slot_len(&self.plan.states[state]);
        // SAFETY: the caller's promise.
        let slot =
            unsafe { self.states[state].part_mut(start + elements.start..start + elements.end) };
        if span.position == 0 {
            slot.fill(0.0);
        }
        slot
    }

    /// A convolution; a task is some columns of one sequence.
    pub(super) fn conv(
        &self,
        input: Operand,
        weight: WeightId,
        bias: Option<WeightId>,
        (state, out): (usize, Operand),
        claimed: &AtomicUsize,
    ) {
        let width = input.width;
        let tasks_per_span = width.div_ceil(CONV_COLUMNS);
        let weight = self.vector(weight);
        let kernel = weight.len() / width;
        loop {
            let task = claimed.fetch_add(1, Relaxed);
            let (span, first) = (task / tasks_per_span, task % tasks_per_span * CONV_COLUMNS);
            if span >= self.batch.spans.len() {
                return;
            }
            let columns = first..width.min(first + CONV_COLUMNS);
            let mut taps: [&[f32]; MAX_TAPS] = [&[]; MAX_TAPS];
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
        input: Operand,
        span: usize,
        columns: Range<usize>,
        (state, out): (usize, Operand),
    ) {
        let before = part.taps.len() - 1;
        let first: usize = self.batch.spans[..span].iter().map(|s| s.len).sum();
        let len = self.batch.spans[span].len;
        // The slot holds whole rows; a task owns its columns of each.
        let mut old: [&mut [f32]; MAX_TAPS] = Default::default();
        for (i, old) in old[..before].iter_mut().enumerate() {
            let start = i * input.width;
            let elements = start + columns.start..start + columns.end;
            // SAFETY: this thread alone has claimed these columns of this sequence.
            *old = unsafe { self.load_or_reset(state, span, elements) };
        }
        for t in 0..len {
            let mut inputs: [&[f32]; MAX_TAPS] = [&[]; MAX_TAPS];
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
        // Keeps the last inputs, the oldest of which may come from the slot itself.
        for i in 0..before {
            let (new, rest) = old[i..before].split_first_mut().expect("more rows");
            match (len + i).checked_sub(before) {
                Some(t) => new.copy_from_slice(&self.read(input, first + t)[columns.clone()]),
                None => new.copy_from_slice(rest[len - 1]),
            }
        }
    }

    /// A compression; a task is some columns of one sequence.
    pub(super) fn compress(&self, stage: &CompressStage, claimed: &AtomicUsize) {
        let c = stage.compression;
        let tasks_per_span = c.dim.div_ceil(COMPRESSED_COLUMNS);
        let per_column = self.plan.states[stage.state].elements() / c.dim;
        loop {
            let task = claimed.fetch_add(1, Relaxed);
            let (span, start) = (task / tasks_per_span, task % tasks_per_span * COMPRESSED_COLUMNS);
            if span >= self.batch.spans.len() {
                return;
            }
            let columns = start..c.dim.min(start + COMPRESSED_COLUMNS);
            let elements = columns.start * per_column..columns.end * per_column;
            // SAFETY: this thread alone has claimed these columns of this sequence.
            let softmaxes = unsafe { self.load_or_reset(stage.state, span, elements) };
            let first: usize = self.batch.spans[..span].iter().map(|s| s.len).sum();
            for row in first..first + self.batch.spans[span].len {
                let (x, scores) = (self.read(stage.input, row), self.read(stage.scores, row));
                // SAFETY: as above.
                let out = unsafe { self.columns(stage.out, row, columns.clone()) };
                let position = self.positions[row] as usize;
                let parts = CompressPart { x, scores, columns: columns.clone(), position };
                parts.add(&c, softmaxes, out);
            }
        }
    }

    /// A scan; a task is one head of one sequence.
    pub(super) fn scan(&self, stage: &ScanStage, claimed: &AtomicUsize) {
        let s = stage.scan;
        let head_len = head_len(&s);
        loop {
            let task = claimed.fetch_add(1, Relaxed);
            let (span, head) = (task / s.heads, task % s.heads);
            if span >= self.batch.spans.len() {
                return;
            }
            let first: usize = self.batch.spans[..span].iter().map(|s| s.len).sum();
            let rows = first..first + self.batch.spans[span].len;
            // SAFETY: this thread alone has claimed this head of this sequence.
            let head_state = unsafe {
                self.load_or_reset(stage.state, span, head * head_len..(head + 1) * head_len)
            };
            match s.is_channelwise {
                true => self.scan_channels(stage, head, rows, head_state),
                false => self.scan_head(stage, head, rows, head_state),
            }
        }
    }

    /// One head of a scan, through a sequence.
    fn scan_head(&self, stage: &ScanStage, head: usize, rows: Range<usize>, state: &mut [f32]) {
        let s = stage.scan;
        let (a, d, dt_bias) =
            (self.vector(stage.a), self.vector(stage.d), self.vector(stage.dt_bias));
        let bc_start = head / (s.heads / s.groups) * s.state;
        for chunk_start in rows.clone().step_by(SCAN_TOKENS) {
            let mut tokens: [ScanToken<'_>; SCAN_TOKENS] = Default::default();
            let tokens = &mut tokens[..SCAN_TOKENS.min(rows.end - chunk_start)];
            for (token, row) in tokens.iter_mut().zip(chunk_start..) {
                let dt = softplus(self.read(stage.dt, row)[head] + dt_bias[head]);
                let columns = head * s.head_dim..(head + 1) * s.head_dim;
                *token = ScanToken {
                    x: &self.read(stage.x, row)[columns.clone()],
                    b: &self.read(stage.b, row)[bc_start..bc_start + s.state],
                    c: &self.read(stage.c, row)[bc_start..bc_start + s.state],
                    dt,
                    decay: (dt * a[head]).exp(),
                    d: d[head],
                    // SAFETY: this thread alone has claimed this head of this sequence.
                    out: unsafe { self.columns(stage.out, row, columns) },
                };
            }
            scan(self.isa, tokens, state);
        }
    }

    /// One head of a scan by channel, through a sequence.
    fn scan_channels(&self, stage: &ScanStage, head: usize, rows: Range<usize>, state: &mut [f32]) {
        let s = stage.scan;
        let columns = head * s.head_dim..(head + 1) * s.head_dim;
        let bc_start = head / (s.heads / s.groups) * s.state;
        for row in rows {
            let token = ChannelToken {
                x: &self.read(stage.x, row)[columns.clone()],
                b: &self.read(stage.b, row)[bc_start..bc_start + s.state],
                c: &self.read(stage.c, row)[bc_start..bc_start + s.state],
                dt: &self.read(stage.dt, row)[columns.clone()],
                dt_bias: &self.vector(stage.dt_bias)[columns.clone()],
                a: &self.vector(stage.a)[columns.start..],
                channels: s.dt_width(),
                d: &self.vector(stage.d)[columns.clone()],
                // SAFETY: this thread alone has claimed this head of this sequence.
                out: unsafe { self.columns(stage.out, row, columns.clone()) },
            };
            scan_channels(self.isa, token, state);
        }
    }
}
