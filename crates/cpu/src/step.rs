//! One step as each thread runs it: the stages in order, with a barrier after each. A stage that
//! only one thread works on is run by the last thread to arrive at the barrier before it.

mod attention;
pub(crate) mod context;
mod delta_rule;
mod experts;
mod gathered;
mod matmul;
pub(crate) mod recurrent;
mod rows;

use std::time::Instant;

use bodkin_model::Rows;

use bodkin_backend::Worker;

use crate::program::{RowOp, Stage};
use attention::AttentionStage;
use context::StepContext;
use experts::MOST_PREDICTED_ROWS;
use matmul::{ARRIVAL_LINES, Prefetch, WAITING_LINES};

pub(crate) use attention::{partials_len, scratch_len};
pub(crate) use gathered::{gathered_scratch_len, select_scratch_len};

/// A stage for one thread.
enum SerialStage<'a> {
    Rows(Rows, &'a [RowOp]),
    Permute(usize),
}

impl StepContext<'_> {
    /// Runs all stages. Every thread calls it.
    pub(crate) fn run(&self, worker: &Worker<'_>) {
        // One clock is enough: all threads leave a stage together.
        let mut clock = self.seconds.filter(|_| worker.index == 0).map(|s| (s, Instant::now()));
        let mut trace = self.trace.map(|trace| trace.thread(worker.index));
        let stages = &self.program.stages;
        let mut next = 0;
        let mut prefetch = Prefetch::default();
        while next < stages.len() {
            let this = next;
            self.stage(this, worker);
            let serial = || stages[this + 1..].iter().map_while(|stage| self.serial(stage));
            next = this + 1 + serial().count();
            self.next_weights(worker, next, &mut prefetch);
            prefetch.advance(ARRIVAL_LINES);
            if let Some(trace) = &mut trace {
                trace.computed(this);
            }
            let mut serial_end = None;
            worker.barrier_then(
                || {
                    serial().for_each(|stage| self.run_serial(stage));
                    serial_end = self.trace.map(|_| Instant::now());
                },
                || prefetch.advance(WAITING_LINES),
            );
            if let Some(trace) = &mut trace {
                trace.released(this + 1..next, serial_end);
            }
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
        let claimed = &self.claimed[index * worker.threads..][..worker.threads];
        if let Some(observe) = self.observe.filter(|_| worker.index == 0) {
            self.observe_linears(&self.program.stages[index], observe);
        }
        match &self.program.stages[index] {
            Stage::Rows { rows, ops } => {
                self.rows_stage(ops, *rows, worker.share(self.count(*rows)));
            }
            Stage::Matmul { rows, input, linears } => {
                self.matmul(worker, *rows, *input, linears, claimed);
            }
            Stage::Permute { permutation } => {
                if worker.index == 0 {
                    self.permute(*permutation);
                }
            }
            Stage::Prediction { input, linear } => {
                if self.batch.tokens.len() <= MOST_PREDICTED_ROWS {
                    self.matmul(worker, Rows::Tokens, *input, &[*linear], claimed);
                }
            }
            Stage::GroupedGemm { input: _, cols, permutation, linears } => {
                self.grouped_gemm(worker, *cols, *permutation, linears, &claimed[0]);
            }
            Stage::Conv { input, weight, bias, state, out } => {
                self.conv(*input, *weight, *bias, (*state, *out), &claimed[0]);
            }
            Stage::Scan(stage) => self.scan(stage, &claimed[0]),
            Stage::DeltaRule(stage) => self.delta_rule(stage, worker, &claimed[0]),
            Stage::Compress(stage) => self.compress(stage, &claimed[0]),
            Stage::GatheredAttention(stage) => {
                self.gathered_attention(stage, worker, &claimed[0]);
            }
            Stage::Select(stage) => self.select(stage, worker, &claimed[0]),
            Stage::Attention { q, out, attention, slot } => {
                let (q, out, slot) = (*q, *out, *slot);
                AttentionStage { step: self, q, out, attention, slot }.run(worker, &claimed[0]);
            }
        }
    }

    /// The stage, if it is one thread's work and needs no barrier of its own: in decode, all
    /// row-local stages of a single row. A profile measures every stage on its own.
    fn serial<'s>(&self, stage: &'s Stage) -> Option<SerialStage<'s>> {
        match stage {
            _ if self.seconds.is_some() => None,
            Stage::Rows { rows, ops } if self.count(*rows) <= 1 => {
                Some(SerialStage::Rows(*rows, ops))
            }
            Stage::Permute { permutation } if self.batch.tokens.len() <= 1 => {
                Some(SerialStage::Permute(*permutation))
            }
            _ => None,
        }
    }

    fn run_serial(&self, stage: SerialStage<'_>) {
        match stage {
            SerialStage::Rows(rows, ops) => self.rows_stage(ops, rows, 0..self.count(rows)),
            SerialStage::Permute(permutation) => self.permute(permutation),
        }
    }
}
