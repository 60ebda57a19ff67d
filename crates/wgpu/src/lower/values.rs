//! Which values share a buffer. A result never has the buffer of an operand: a dispatch must not
//! bind a buffer for reading and for writing.

use bodkin_model::{Plan, Rows, Value};

use crate::program::ValueBuffer;

/// The buffers, and the one of each value.
pub(super) fn buffers(plan: &Plan) -> (Vec<ValueBuffer>, Vec<usize>) {
    let mut last_use: Vec<usize> = (0..plan.ops.len()).collect();
    for (i, op) in plan.ops.iter().enumerate() {
        op.inputs().for_each(|value| last_use[value.0] = i);
    }
    last_use[plan.output().0] = usize::MAX;
    let mut buffers: Vec<ValueBuffer> = Vec::new();
    let mut busy_until: Vec<usize> = Vec::new();
    let mut buffer_of = Vec::new();
    for (i, &width) in plan.widths.iter().enumerate() {
        let is_output = plan.rows(Value(i)) == Rows::Outputs;
        let is_free = |b: &usize| busy_until[*b] < i && buffers[*b].is_output == is_output;
        let free = (0..buffers.len()).filter(is_free);
        let buffer = free.min_by_key(|&b| buffers[b].width.abs_diff(width)).unwrap_or_else(|| {
            buffers.push(ValueBuffer { width, is_output });
            busy_until.push(0);
            buffers.len() - 1
        });
        buffers[buffer].width = buffers[buffer].width.max(width);
        busy_until[buffer] = last_use[i];
        buffer_of.push(buffer);
    }
    (buffers, buffer_of)
}
