//! The stage of the gated delta rule: threads claim a head of a sequence, or some of its columns,
//! and process its tokens in order.
//!
//! ```text
//! qkv [rows, (2 * key_heads + value_heads) * head_dim]; out [rows, value_heads * head_dim]
//! decay [rows, value_heads or value_heads * head_dim]; beta [rows, value_heads]
//! state slot [value_heads][blocks of columns][head_dim][COLUMNS]
//! ```

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use bodkin_backend::Worker;

use super::context::StepContext;
use crate::ops::delta_rule::{COLUMNS, RuleToken, delta_rule, scratch_len, state_len};
use crate::program::DeltaRuleStage;

/// Heads for each thread from which on they are not divided: each part of a head prepares its
/// tokens' keys and queries again.
const HEADS_PER_THREAD: usize = 4;

impl StepContext<'_> {
    pub(super) fn delta_rule(
        &self,
        stage: &DeltaRuleStage,
        worker: &Worker<'_>,
        claimed: &AtomicUsize,
    ) {
        let (heads, dim) = (stage.rule.value_heads, stage.rule.head_dim);
        let is_whole = self.batch.spans.len() * heads >= HEADS_PER_THREAD * worker.threads;
        let part = if is_whole { dim } else { COLUMNS };
        let parts = dim.div_ceil(part);
        // SAFETY: the scratch belongs to this thread.
        let scratch = unsafe { self.scratch[worker.index].part_mut(0..scratch_len(dim)) };
        loop {
            let task = claimed.fetch_add(1, Relaxed);
            let (pair, first) = (task / parts, task % parts * part);
            if pair / heads >= self.batch.spans.len() {
                return;
            }
            let columns = first..dim.min(first + part);
            self.delta_rule_columns(stage, (pair / heads, pair % heads), columns, scratch);
        }
    }

    /// Some columns of one head, through a sequence.
    fn delta_rule_columns(
        &self,
        stage: &DeltaRuleStage,
        (span, head): (usize, usize),
        columns: Range<usize>,
        scratch: &mut [f32],
    ) {
        let (rule, dim) = (stage.rule, stage.rule.head_dim);
        let start = head * state_len(dim, dim) + state_len(dim, columns.start);
        let elements = start..start + state_len(dim, columns.len());
        // SAFETY: this thread alone has claimed these columns of this sequence.
        let state = unsafe { self.load_or_reset(stage.state, span, elements) };
        let decays =
            if rule.is_channelwise { head * dim..(head + 1) * dim } else { head..head + 1 };
        let (a, dt_bias) =
            (self.vector(stage.a)[head], &self.vector(stage.dt_bias)[decays.clone()]);
        let out_columns = head * dim + columns.start..head * dim + columns.end;
        let first: usize = self.batch.spans[..span].iter().map(|s| s.len).sum();
        for row in first..first + self.batch.spans[span].len {
            let qkv = self.read(stage.qkv, row);
            let part = |head: usize| &qkv[head * dim..(head + 1) * dim];
            let token = RuleToken {
                q: part(rule.key_head(head)),
                k: part(rule.key_heads + rule.key_head(head)),
                v: &part(2 * rule.key_heads + head)[columns.clone()],
                decay: &self.read(stage.decay, row)[decays.clone()],
                dt_bias,
                a,
                beta: self.read(stage.beta, row)[head],
                eps: stage.eps,
                // SAFETY: as above.
                out: unsafe { self.columns(stage.out, row, out_columns.clone()) },
            };
            delta_rule(self.isa, token, state, scratch);
        }
    }
}
