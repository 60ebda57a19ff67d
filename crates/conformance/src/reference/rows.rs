//! Operations of the reference interpreter that look at rows one by one, and the pooling of rows.

use bodkin_backend::Batch;
use bodkin_model::{Act, EmbedBy, NormKind, PoolKind, Rope, RopeStyle, RopeTable, Xielu};

/// Normalises each of `groups` parts of rows of `width`.
pub(super) struct Norm<'a> {
    pub(super) kind: NormKind,
    /// As wide as a part, or as a row.
    pub(super) weight: Option<&'a [f32]>,
    pub(super) bias: Option<&'a [f32]>,
    pub(super) eps: f32,
    pub(super) groups: usize,
}

impl Norm<'_> {
    pub(super) fn run(&self, x: &[f32], width: usize) -> Vec<f32> {
        let mut out = Vec::with_capacity(x.len());
        for part in x.chunks_exact(width / self.groups) {
            let n = part.len() as f64;
            let mean = match self.kind {
                NormKind::Rms => 0.0,
                NormKind::Layer => part.iter().map(|&x| f64::from(x)).sum::<f64>() / n,
            };
            let mean_square = part.iter().map(|&x| (f64::from(x) - mean).powi(2)).sum::<f64>() / n;
            let scale = 1.0 / (mean_square + f64::from(self.eps)).sqrt();
            for &x in part {
                let at = |weights: &[f32]| weights[out.len() % weights.len()];
                let y = ((f64::from(x) - mean) * scale) as f32 * self.weight.map_or(1.0, at);
                out.push(y + self.bias.map_or(0.0, at));
            }
        }
        out
    }
}

/// Each part of a row, as long as a row of `like`.
pub(super) fn rescale(x: &[f32], width: usize, like: &[f32], part: usize) -> Vec<f32> {
    let length = |x: &[f32]| dot(x, x).sqrt();
    let mut out = Vec::with_capacity(x.len());
    for (row, like) in x.chunks_exact(width).zip(like.chunks_exact(part)) {
        for part in row.chunks_exact(part) {
            let factor = length(like) / length(part).max(f64::from(f32::MIN_POSITIVE));
            out.extend(part.iter().map(|&x| (f64::from(x) * factor) as f32));
        }
    }
    out
}

/// What exceeds the mean of a row by more than some standard deviations.
pub(super) fn cutoff(x: &[f32], width: usize, deviations: f64) -> Vec<f32> {
    let mut out = Vec::with_capacity(x.len());
    for row in x.chunks_exact(width) {
        let mean = row.iter().map(|&x| f64::from(x)).sum::<f64>() / width as f64;
        let squares = row.iter().map(|&x| (f64::from(x) - mean).powi(2)).sum::<f64>();
        let cutoff = mean + deviations * (squares / (width - 1) as f64).sqrt();
        out.extend(row.iter().map(|&x| (f64::from(x) - cutoff).max(0.0) as f32));
    }
    out
}

/// The row of an embedding table that each token reads.
pub(super) fn table_rows(by: EmbedBy, rows: usize, batch: &Batch) -> Vec<usize> {
    match by {
        EmbedBy::Token => batch.tokens.iter().map(|&t| t as usize).collect(),
        EmbedBy::Position => batch.positions().collect(),
        EmbedBy::PositionModulo => batch.positions().map(|position| position % rows).collect(),
        EmbedBy::First => vec![0; batch.tokens.len()],
    }
}

/// These rows of a value or a table, one after the other.
pub(super) fn pick(x: &[f32], width: usize, rows: impl IntoIterator<Item = usize>) -> Vec<f32> {
    rows.into_iter().flat_map(|row| &x[row * width..][..width]).copied().collect()
}

/// `[rows, cols]` times the transpose of `weight`, `[n, cols]`: `[rows, n]`.
pub(super) fn linear(x: &[f32], cols: usize, weight: &[f32], bias: Option<&[f32]>) -> Vec<f32> {
    let mut out = Vec::with_capacity(x.len() / cols * (weight.len() / cols));
    for row in x.chunks_exact(cols) {
        for (j, w) in weight.chunks_exact(cols).enumerate() {
            out.push(dot(row, w) as f32 + bias.map_or(0.0, |b| b[j]));
        }
    }
    out
}

/// Rotates pairs of the first `rope.dims` elements of each head; `x` is `[rows, width]`.
pub(super) fn rotate(
    x: &[f32],
    width: usize,
    head_dim: usize,
    rope: &Rope,
    table: &RopeTable,
    batch: &Batch,
) -> Vec<f32> {
    let pairs = rope.dims / 2;
    let (mut cos, mut sin) = (vec![0.0; pairs], vec![0.0; pairs]);
    let mut out = x.to_vec();
    for (row, position) in out.chunks_exact_mut(width).zip(batch.positions()) {
        table.cos_sin_at(position as u32, &mut cos, &mut sin);
        for head in row.chunks_exact_mut(head_dim) {
            for i in 0..pairs {
                let (a, b) = match rope.style {
                    RopeStyle::Norm => (2 * i, 2 * i + 1),
                    RopeStyle::Neox => (i, i + pairs),
                };
                let (x, y) = (head[a], head[b]);
                head[a] = x * cos[i] - y * sin[i];
                head[b] = x * sin[i] + y * cos[i];
            }
        }
    }
    out
}

pub(super) fn activate(act: Act, x: f32) -> f32 {
    match act {
        Act::Identity => x,
        Act::Silu => x * sigmoid(x),
        Act::Sigmoid => sigmoid(x),
        Act::Gelu => {
            let x = f64::from(x);
            (x / 2.0 * (1.0 + libm::erf(x / 2f64.sqrt()))) as f32
        }
        Act::GeluTanh => {
            let inner = 0.797_884_6 * (x + 0.044_715 * x * x * x);
            0.5 * x * (1.0 + inner.tanh())
        }
        Act::ReluSquared => x.max(0.0) * x.max(0.0),
        Act::Softplus => softplus(f64::from(x)) as f32,
        Act::Xielu(Xielu { positive, beta, .. }) if x > 0.0 => positive * x * x + beta * x,
        Act::Xielu(Xielu { negative, beta, eps, .. }) => {
            negative * (x.min(eps).exp_m1() - x) + beta * x
        }
        Act::ClampedSwish => panic!("{act:?} needs two values"),
    }
}

fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

/// `ln(1 + exp(x))`, which is `x` in f32 long before the exponential overflows.
pub(super) fn softplus(x: f64) -> f64 {
    if x > 20.0 { x } else { x.exp().ln_1p() }
}

/// `act(gate) * up`, with one gate for each element or each of equal parts of a row.
pub(super) fn glu(gate: &[f32], up: &[f32], act: Act) -> Vec<f32> {
    let elements_per_gate = up.len() / gate.len();
    let pairs = up.iter().enumerate().map(|(i, &u)| (gate[i / elements_per_gate], u));
    match act {
        Act::ClampedSwish => pairs
            .map(|(g, u)| (g.min(7.0), u.clamp(-7.0, 7.0)))
            .map(|(g, u)| g * sigmoid(1.702 * g) * (u + 1.0))
            .collect(),
        _ => pairs.map(|(g, u)| activate(act, g) * u).collect(),
    }
}

/// Columns `start .. start + len` of each part of `part` columns.
pub(super) fn slice(x: &[f32], part: usize, start: usize, len: usize) -> Vec<f32> {
    x.chunks_exact(part).flat_map(|part| &part[start..start + len]).copied().collect()
}

/// Each of `groups` parts of a row of `a`, followed by that of `b`, or by all of `b`'s row.
pub(super) fn concat(
    a: &[f32],
    b: &[f32],
    widths: [usize; 2],
    groups: usize,
    out: usize,
) -> Vec<f32> {
    let part = widths[0] / groups;
    let added = out / groups - part;
    let mut result = Vec::with_capacity(a.len() / widths[0] * out);
    for (a, b) in a.chunks_exact(widths[0]).zip(b.chunks_exact(widths[1])) {
        for (a, b) in a.chunks_exact(part).zip(b.chunks_exact(added).cycle()) {
            result.extend_from_slice(a);
            result.extend_from_slice(b);
        }
    }
    result
}

/// One row for each output: of the rows of the sequence that the output's row belongs to.
pub(super) fn pool(x: &[f32], width: usize, kind: PoolKind, batch: &Batch) -> Vec<f32> {
    let mut out = Vec::with_capacity(batch.outputs.len() * width);
    for &output in &batch.outputs {
        let (start, len) = batch.span_of(output as usize);
        let row = |i: usize| &x[i * width..][..width];
        match kind {
            PoolKind::First => out.extend_from_slice(row(start)),
            PoolKind::Last => out.extend_from_slice(row(start + len - 1)),
            PoolKind::Mean => out.extend((0..width).map(|j| {
                let sum: f64 = (start..start + len).map(|i| f64::from(row(i)[j])).sum();
                (sum / len as f64) as f32
            })),
            PoolKind::Sum if batch.positions().nth(start) == Some(0) => {
                // In f32: the caller goes on with it.
                let sum = |j: usize| (start..=output as usize).fold(0.0, |sum, i| sum + row(i)[j]);
                out.extend((0..width).map(sum));
            }
            PoolKind::Sum => out.extend_from_slice(row(output as usize)),
        }
    }
    out
}

pub(super) fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum()
}
