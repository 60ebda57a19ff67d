//! Which values share a buffer. A result never has the buffer of an operand of its stage: a
//! dispatch must not bind a buffer for reading and for writing.

use bodkin_model::{Plan, Rows, Value};

use super::stages::Stage;
use crate::program::ValueBuffer;

/// The buffers, and the one of each value that is stored.
pub(super) fn buffers(plan: &Plan, stages: &[Stage]) -> (Vec<ValueBuffer>, Vec<Option<usize>>) {
    // The last stage that reads each value, or makes it.
    let mut last_use = vec![0; plan.ops.len()];
    for (s, stage) in stages.iter().enumerate() {
        for i in stage.ops.clone() {
            last_use[i] = s;
            plan.ops[i].inputs().for_each(|value| last_use[value.0] = s);
        }
    }
    last_use[plan.output().0] = usize::MAX;
    let mut buffers: Vec<ValueBuffer> = Vec::new();
    let mut busy_until: Vec<usize> = Vec::new();
    let mut buffer_of = vec![None; plan.ops.len()];
    let stored = stages.iter().enumerate().flat_map(|(s, stage)| {
        let rotated = stage.rotated_queries();
        rotated.into_iter().chain(stage.results()).map(move |i| (s, i))
    });
    for (s, i) in stored {
        let width = plan.widths[i];
        let is_output = plan.rows(Value(i)) == Rows::Outputs;
        let is_free = |b: &usize| busy_until[*b] < s && buffers[*b].is_output == is_output;
        let free = (0..buffers.len()).filter(is_free);
        let buffer = free.min_by_key(|&b| buffers[b].width.abs_diff(width)).unwrap_or_else(|| {
            buffers.push(ValueBuffer { width, is_output });
            busy_until.push(0);
            buffers.len() - 1
        });
        buffers[buffer].width = buffers[buffer].width.max(width);
        busy_until[buffer] = last_use[i];
        buffer_of[i] = Some(buffer);
    }
    (buffers, buffer_of)
}
