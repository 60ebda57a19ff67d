//! Convolutions and state-space layers: what a sequence carries along in a slot of fixed size.
//! State is kept in f32 from token to token, so that it matters nothing where a step ends.

use bodkin_model::Scan;

use crate::batch::{Batch, Span};

/// The slots of one state of the plan, `[slots, elements]`.
pub(super) struct StateSlots {
    elements: usize,
    values: Vec<f32>,
}

impl StateSlots {
    pub(super) fn new(slots: usize, elements: usize) -> StateSlots {
        StateSlots { elements, values: vec![0.0; slots * elements] }
    }

    /// All slots, and the elements of one.
    pub(super) fn memory(&mut self) -> (&mut [f32], usize) {
        (&mut self.values, self.elements)
    }

    /// The state before a span's first token.
    fn before(&mut self, span: &Span) -> &mut [f32] {
        let state = &mut self.values[span.state_slot as usize * self.elements..][..self.elements];
        if span.position == 0 {
            state.fill(0.0);
        }
        state
    }
}

/// `weight` is `[width, kernel]`; a slot holds the last `kernel - 1` rows.
pub(super) fn conv(
    slots: &mut StateSlots,
    batch: &Batch,
    x: &[f32],
    weight: &[f32],
    bias: Option<&[f32]>,
) -> Vec<f32> {
    let width = x.len() / batch.tokens.len();
    let kernel = weight.len() / width;
    let mut out = Vec::with_capacity(x.len());
    let mut rows = x.chunks_exact(width);
    for span in &batch.spans {
        let state = slots.before(span);
        let mut inputs = state.to_vec();
        rows.by_ref().take(span.len).for_each(|row| inputs.extend(row));
        for row in 0..span.len {
            for (column, taps) in weight.chunks_exact(kernel).enumerate() {
                let inputs = inputs[row * width + column..].iter().step_by(width);
                let sum: f64 = inputs.zip(taps).map(|(&x, &w)| f64::from(x) * f64::from(w)).sum();
                out.push(sum as f32 + bias.map_or(0.0, |b| b[column]));
            }
        }
        state.copy_from_slice(&inputs[span.len * width..]);
    }
    out
}

/// The operands are those of [`bodkin_model::Op::Scan`], in their order; a slot holds
/// `[heads, head_dim, state]`.
pub(super) fn scan(
    slots: &mut StateSlots,
    batch: &Batch,
    s: Scan,
    [x, b, c, dt]: [&[f32]; 4],
    [a, d, dt_bias]: [&[f32]; 3],
) -> Vec<f32> {
    let mut out = Vec::with_capacity(x.len());
    let mut row = 0;
    for span in &batch.spans {
        let state = slots.before(span);
        for _ in 0..span.len {
            for (head, state) in state.chunks_exact_mut(s.head_dim * s.state).enumerate() {
                let group = row * s.groups + head / (s.heads / s.groups);
                let b = &b[group * s.state..][..s.state];
                let c = &c[group * s.state..][..s.state];
                let x = &x[(row * s.heads + head) * s.head_dim..][..s.head_dim];
                let dt = softplus(f64::from(dt[row * s.heads + head] + dt_bias[head]));
                let decay = (dt * f64::from(a[head])).exp();
                for (&x, state) in x.iter().zip(state.chunks_exact_mut(s.state)) {
                    let mut y = f64::from(d[head]) * f64::from(x);
                    for ((h, &b), &c) in state.iter_mut().zip(b).zip(c) {
                        *h = (decay * f64::from(*h) + dt * f64::from(x) * f64::from(b)) as f32;
                        y += f64::from(*h) * f64::from(c);
                    }
                    out.push(y as f32);
                }
            }
            row += 1;
        }
    }
    out
}

/// `ln(1 + exp(x))`, which is `x` in f32 long before the exponential overflows.
fn softplus(x: f64) -> f64 {
    if x > 20.0 { x } else { x.exp().ln_1p() }
}
