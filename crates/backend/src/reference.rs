//! The reference interpreter: every operation as its definition says, in f32 with f64 sums, one
//! after the other, on weights dequantised to f32. Slow and obvious; the oracle for the rest.

mod state;

use std::sync::Arc;

use bodkin_gguf::File;
use bodkin_model::{Act, Attention, NormKind, Op, Plan, Rope, RopeStyle, RopeTable, SlotId, Value};
use bodkin_model::{Weight, WeightId};

use crate::batch::{Batch, PAGE_TOKENS};
use crate::error::Result;
use crate::{Backend, Limits, Memory, Model, Part, Progress};
use state::Cells;

/// The plain meaning of a plan.
pub struct Reference;

struct ReferenceModel {
    plan: Arc<Plan>,
    limits: Limits,
    /// Every weight in f32, `[rows, cols]`.
    weights: Vec<Vec<f32>>,
    /// The frequencies of every rope operation, by operation.
    ropes: Vec<Option<RopeTable>>,
    /// Keys and values of every slot, `[pages * PAGE_TOKENS, width]`.
    keys: Vec<Vec<f32>>,
    values: Vec<Vec<f32>>,
    /// Recurrent state, one for each of the plan's.
    states: Vec<Cells>,
}

impl Backend for Reference {
    fn name(&self) -> String {
        "reference".to_owned()
    }

    fn threads(&self) -> usize {
        1
    }

    /// Speed is not what this backend is for: it reports that of a plain sum.
    fn bandwidth(&self) -> f64 {
        let words = vec![1u64; 1 << 23];
        let start = std::time::Instant::now();
        let sum: u64 = words.iter().copied().sum();
        assert_eq!(sum, 1 << 23, "the words were read");
        8.0 * (1u64 << 23) as f64 / start.elapsed().as_secs_f64()
    }

    fn available_memory(&self) -> Option<u64> {
        None
    }

    fn memory(&self, plan: &Plan, limits: &Limits) -> Memory {
        let widths: u64 = plan.widths.iter().map(|&w| w as u64).sum();
        let kv = plan.slots.iter();
        let kv = kv.map(|s| slot_tokens(plan, limits, s.window) * s.elements_per_token());
        let cells = limits.states as u64 * plan.state_elements();
        Memory {
            weight_bytes: 4 * plan.cost().parameters,
            state_bytes: 4 * (kv.sum::<usize>() as u64 + cells),
            scratch_bytes: 4 * widths * limits.tokens as u64,
        }
    }

    fn load(
        &self,
        plan: Arc<Plan>,
        file: &Arc<File>,
        limits: &Limits,
        progress: Progress<'_>,
    ) -> Result<Box<dyn Model>> {
        let total = plan.cost().weight_bytes;
        let mut done = 0;
        let mut weights = Vec::with_capacity(plan.weights.len());
        for weight in &plan.weights {
            weights.push(dequantize(file, weight));
            done += weight.bytes();
            progress(done, total);
        }
        let ropes = plan.ops.iter().map(|op| match op {
            Op::Rope { rope, .. } => Some(rope_table(rope, &weights)),
            _ => None,
        });
        let ropes = ropes.collect();
        let tokens = |window| slot_tokens(&plan, limits, window);
        let zeros = |heads, dim, window| vec![0.0; tokens(window) * heads * dim];
        let keys = plan.slots.iter().map(|s| zeros(s.kv_heads, s.key_dim, s.window)).collect();
        let values = plan.slots.iter().map(|s| zeros(s.kv_heads, s.value_dim, s.window)).collect();
        let states = plan.states.iter().map(|s| Cells::new(limits.states, s.elements())).collect();
        let limits = limits.clone();
        Ok(Box::new(ReferenceModel { plan, limits, weights, ropes, keys, values, states }))
    }
}

/// All values of a weight, row after row.
fn dequantize(file: &File, weight: &Weight) -> Vec<f32> {
    let tensor = file.tensor(&weight.name).expect("the plan was made from this file");
    let mut out = vec![0.0; weight.cols * weight.rows];
    weight.format.dequantize(file.data(tensor), &mut out);
    out
}

fn rope_table(rope: &Rope, weights: &[Vec<f32>]) -> RopeTable {
    rope.table(rope.factors.map(|WeightId(i)| weights[i].as_slice()))
}

/// The tokens that the pages of a window hold together.
fn slot_tokens(plan: &Plan, limits: &Limits, window: Option<usize>) -> usize {
    let group = plan.windows().iter().position(|&w| w == window).expect("a window of the plan");
    limits.pages[group] * PAGE_TOKENS
}

impl Model for ReferenceModel {
    fn plan(&self) -> &Plan {
        &self.plan
    }

    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn forward(&mut self, batch: &Batch, logits: &mut [f32]) -> Result<()> {
        batch.check(&self.plan, &self.limits)?;
        let plan = Arc::clone(&self.plan);
        let mut values: Vec<Vec<f32>> = Vec::with_capacity(plan.ops.len());
        for i in 0..plan.ops.len() {
            let value = self.run(&plan, i, batch, &values);
            values.push(value);
        }
        logits.copy_from_slice(&values[plan.output().0]);
        Ok(())
    }

    fn copy_state(&mut self, from: u32, to: u32) {
        self.states.iter_mut().for_each(|cells| cells.copy(from, to));
    }

    fn expert_counts(&self) -> Vec<Vec<u64>> {
        Vec::new()
    }

    fn set_profiling(&mut self, _: bool) {}

    fn profile(&self) -> Vec<Part> {
        Vec::new()
    }
}

impl ReferenceModel {
    /// The value of operation `i`, from those before it.
    fn run(&mut self, plan: &Plan, i: usize, batch: &Batch, values: &[Vec<f32>]) -> Vec<f32> {
        let of = |value: Value| values[value.0].as_slice();
        let weight = |id: WeightId| self.weights[id.0].as_slice();
        match &plan.ops[i] {
            Op::Embed { table, .. } => {
                let width = plan.widths[i];
                let rows = batch.tokens.iter().map(|&t| t as usize * width);
                rows.flat_map(|start| &weight(*table)[start..start + width]).copied().collect()
            }
            Op::Norm { input, kind, weight: w, bias, eps, groups: _ } => {
                norm(of(*input), *kind, weight(*w), bias.map(weight), *eps)
            }
            Op::Linear { input, weight: w, bias } => {
                linear(of(*input), plan.width(*input), weight(*w), bias.map(weight))
            }
            Op::Rope { input, head_dim, rope, .. } => {
                let table = self.ropes[i].as_ref().expect("every rope has its table");
                rotate(of(*input), plan.widths[i], *head_dim, rope, table, batch)
            }
            Op::Attention { q, k, v, attention, slot } => {
                self.store(*slot, attention, of(*k), of(*v), batch);
                self.attend(*slot, attention, of(*q), batch)
            }
            Op::Glu { gate, up, act } => {
                of(*gate).iter().zip(of(*up)).map(|(&g, &u)| activate(*act, g) * u).collect()
            }
            Op::Add { a, b } => of(*a).iter().zip(of(*b)).map(|(a, b)| a + b).collect(),
            Op::Scale { input, factor } => of(*input).iter().map(|x| x * factor).collect(),
            Op::Softcap { input, cap } => {
                of(*input).iter().map(|x| (x / cap).tanh() * cap).collect()
            }
            Op::Slice { input, start, len, .. } => {
                let rows = of(*input).chunks_exact(plan.width(*input));
                rows.flat_map(|row| &row[*start..*start + *len]).copied().collect()
            }
            Op::Conv { input, weight: w, bias, state } => {
                let (weight, bias) = (weight(*w), bias.map(weight));
                state::conv(&mut self.states[state.0], batch, of(*input), weight, bias)
            }
            Op::Scan { x, b, c, dt, a, d, dt_bias, scan, state } => {
                let (x, b, c, dt) = (of(*x), of(*b), of(*c), of(*dt));
                let (a, d, dt_bias) = (weight(*a), weight(*d), weight(*dt_bias));
                let inputs = state::ScanInputs { x, b, c, dt, a, d, dt_bias };
                state::scan(&mut self.states[state.0], batch, *scan, &inputs)
            }
            Op::Act { .. }
            | Op::Concat { .. }
            | Op::Route { .. }
            | Op::ExpertLinear { .. }
            | Op::ExpertSum { .. }
            | Op::Pool { .. } => unimplemented!("{}", plan.ops[i].name()),
            Op::Logits { input, weight: w, bias } => {
                let width = plan.width(*input);
                let rows = batch.outputs.iter().map(|&row| row as usize * width);
                let rows: Vec<f32> =
                    rows.flat_map(|start| &of(*input)[start..start + width]).copied().collect();
                linear(&rows, width, weight(*w), bias.map(weight))
            }
        }
    }

    fn store(&mut self, slot: SlotId, a: &Attention, k: &[f32], v: &[f32], batch: &Batch) {
        let group = self.group(slot);
        let (k_width, v_width) = (a.kv_heads * a.key_dim, a.kv_heads * a.value_dim);
        let mut row = 0;
        for span in &batch.spans {
            for position in span.position..span.position + span.len {
                let at = cell(span.tables[group].page(position), position);
                self.keys[slot.0][at * k_width..][..k_width]
                    .copy_from_slice(&k[row * k_width..][..k_width]);
                self.values[slot.0][at * v_width..][..v_width]
                    .copy_from_slice(&v[row * v_width..][..v_width]);
                row += 1;
            }
        }
    }

    fn attend(&self, slot: SlotId, a: &Attention, q: &[f32], batch: &Batch) -> Vec<f32> {
        let group = self.group(slot);
        let mut out = Vec::with_capacity(batch.tokens.len() * a.heads * a.value_dim);
        let mut rows = q.chunks_exact(a.heads * a.key_dim);
        for span in &batch.spans {
            for position in span.position..span.position + span.len {
                let first = a.window.map_or(0, |w| (position + 1).saturating_sub(w));
                let table = &span.tables[group];
                let cells: Vec<usize> =
                    (first..=position).map(|p| cell(table.page(p), p)).collect();
                let row = rows.next().expect("a row for each token");
                for (head, q) in row.chunks_exact(a.key_dim).enumerate() {
                    self.attend_head(slot, a, head / (a.heads / a.kv_heads), q, &cells, &mut out);
                }
            }
        }
        out
    }

    fn attend_head(
        &self,
        slot: SlotId,
        a: &Attention,
        kv_head: usize,
        q: &[f32],
        cells: &[usize],
        out: &mut Vec<f32>,
    ) {
        let key = |at: usize| &self.keys[slot.0][(at * a.kv_heads + kv_head) * a.key_dim..];
        let value = |at: usize| &self.values[slot.0][(at * a.kv_heads + kv_head) * a.value_dim..];
        let score = |&at: &usize| {
            let score = dot(q, &key(at)[..a.key_dim]) * f64::from(a.scale);
            a.softcap.map_or(score, |cap| (score / f64::from(cap)).tanh() * f64::from(cap))
        };
        let scores: Vec<f64> = cells.iter().map(score).collect();
        let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = scores.iter().map(|s| (s - max).exp()).sum();
        let mut head = vec![0.0f64; a.value_dim];
        for (score, &at) in scores.iter().zip(cells) {
            let p = (score - max).exp() / sum;
            head.iter_mut().zip(value(at)).for_each(|(h, &v)| *h += p * f64::from(v));
        }
        out.extend(head.iter().map(|&h| h as f32));
    }

    fn group(&self, slot: SlotId) -> usize {
        let window = self.plan.slots[slot.0].window;
        self.plan.windows().iter().position(|&w| w == window).expect("a window of the plan")
    }
}

/// The index of a position's keys and values within its slot.
fn cell(page: usize, position: usize) -> usize {
    page * PAGE_TOKENS + position % PAGE_TOKENS
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum()
}

fn norm(x: &[f32], kind: NormKind, weight: &[f32], bias: Option<&[f32]>, eps: f32) -> Vec<f32> {
    let mut out = Vec::with_capacity(x.len());
    for part in x.chunks_exact(weight.len()) {
        let n = part.len() as f64;
        let mean = match kind {
            NormKind::Rms => 0.0,
            NormKind::Layer => part.iter().map(|&x| f64::from(x)).sum::<f64>() / n,
        };
        let square = part.iter().map(|&x| (f64::from(x) - mean).powi(2)).sum::<f64>() / n;
        let scale = 1.0 / (square + f64::from(eps)).sqrt();
        for (i, (&x, &w)) in part.iter().zip(weight).enumerate() {
            let y = ((f64::from(x) - mean) * scale) as f32 * w;
            out.push(y + bias.map_or(0.0, |b| b[i]));
        }
    }
    out
}

fn linear(x: &[f32], cols: usize, weight: &[f32], bias: Option<&[f32]>) -> Vec<f32> {
    let mut out = Vec::with_capacity(x.len() / cols * (weight.len() / cols));
    for row in x.chunks_exact(cols) {
        for (j, w) in weight.chunks_exact(cols).enumerate() {
            out.push(dot(row, w) as f32 + bias.map_or(0.0, |b| b[j]));
        }
    }
    out
}

fn rotate(
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
        table.rotate_at(position as u32, &mut cos, &mut sin);
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

fn activate(act: Act, x: f32) -> f32 {
    match act {
        Act::Identity => x,
        Act::Sigmoid | Act::Gelu | Act::ReluSquared | Act::ClampedSwish => {
            unimplemented!("{act:?}")
        }
        Act::Silu => x / (1.0 + (-x).exp()),
        Act::GeluTanh => {
            let inner = 0.797_884_6 * (x + 0.044_715 * x * x * x);
            0.5 * x * (1.0 + inner.tanh())
        }
    }
}
