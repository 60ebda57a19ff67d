//! Convolutions, state-space layers and delta rules, with their state of fixed size in a slot of
//! the sequence. It is kept in f32 from token to token, so that results do not depend on where a
//! step ends.

use bodkin_backend::{Batch, Span};
use bodkin_model::{DeltaRule, Scan};

use super::rows::softplus;

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
    pub(super) fn before(&mut self, span: &Span) -> &mut [f32] {
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
            for (i, state) in state.chunks_exact_mut(s.state).enumerate() {
                let head = i / s.head_dim;
                let group = row * s.groups + head / (s.heads / s.groups);
                let b = &b[group * s.state..][..s.state];
                let c = &c[group * s.state..][..s.state];
                let x = f64::from(x[row * s.heads * s.head_dim + i]);
                let j = if s.is_channelwise { i } else { head };
                // One `a` of the head, or one for each element of the state.
                let a = &a[j * a.len() / s.dt_width()..];
                let dt = softplus(f64::from(dt[row * s.dt_width() + j] + dt_bias[j]));
                let mut y = f64::from(d[j]) * x;
                for (k, h) in state.iter_mut().enumerate() {
                    let a = if s.is_channelwise { a[k] } else { a[0] };
                    let decay = (dt * f64::from(a)).exp();
                    *h = (decay * f64::from(*h) + dt * x * f64::from(b[k])) as f32;
                    y += f64::from(*h) * f64::from(c[k]);
                }
                out.push(y as f32);
            }
            row += 1;
        }
    }
    out
}

/// The operands are those of [`bodkin_model::Op::DeltaRule`], in their order; a slot holds
/// `[value_heads, head_dim, head_dim]`.
pub(super) fn delta_rule(
    slots: &mut StateSlots,
    batch: &Batch,
    r: DeltaRule,
    eps: f32,
    [qkv, decay, beta]: [&[f32]; 3],
    [a, dt_bias]: [&[f32]; 2],
) -> Vec<f32> {
    let dim = r.head_dim;
    let mut out = Vec::with_capacity(beta.len() * dim);
    let rows = qkv.chunks_exact(r.qkv_width()).zip(decay.chunks_exact(r.decay_width()));
    let mut rows = rows.zip(beta.chunks_exact(r.value_heads));
    for span in &batch.spans {
        let state = slots.before(span);
        for ((qkv, decay), beta) in rows.by_ref().take(span.len) {
            for (head, state) in state.chunks_exact_mut(dim * dim).enumerate() {
                let part = |head: usize| &qkv[head * dim..][..dim];
                let q = normalised(part(r.key_head(head)), eps);
                let k = normalised(part(r.key_heads + r.key_head(head)), eps);
                let v = part(2 * r.key_heads + head);
                for (i, row) in state.chunks_exact_mut(dim).enumerate() {
                    let j = if r.is_channelwise { head * dim + i } else { head };
                    let dt = softplus(f64::from(decay[j] + dt_bias[j]));
                    let decay = (dt * f64::from(a[head])).exp();
                    row.iter_mut().for_each(|s| *s = (decay * f64::from(*s)) as f32);
                }
                let beta = 1.0 / (1.0 + f64::from(-beta[head]).exp());
                for column in 0..dim {
                    let cells = state[column..].iter().step_by(dim);
                    let seen: f64 = cells.zip(&k).map(|(&s, k)| f64::from(s) * k).sum();
                    let delta = beta * (f64::from(v[column]) - seen);
                    let cells = state[column..].iter_mut().step_by(dim);
                    cells.zip(&k).for_each(|(s, k)| *s = (f64::from(*s) + k * delta) as f32);
                    let cells = state[column..].iter().step_by(dim);
                    let y: f64 = cells.zip(&q).map(|(&s, q)| f64::from(s) * q).sum();
                    out.push((y / (dim as f64).sqrt()) as f32);
                }
            }
        }
    }
    out
}

/// `x / sqrt(x . x + eps)`.
fn normalised(x: &[f32], eps: f32) -> Vec<f64> {
    let square: f64 = x.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
    let scale = 1.0 / (square + f64::from(eps)).sqrt();
    x.iter().map(|&x| f64::from(x) * scale).collect()
}
