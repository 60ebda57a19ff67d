//! The reference interpreter: every operation as its definition says, in f32 with f64 sums, one
//! after the other, on weights dequantised to f32. Slow and obvious; the oracle for the rest.

mod attention;
mod compress;
mod experts;
mod hyper;
mod rows;
mod select;
mod state;

use std::sync::Arc;

use bodkin_backend::{
    Backend, Batch, DeviceInfo, DeviceKind, Error, ExpertStats, HostSampler, InputRow, KvType,
    Limits, Matmul, Memory, Model, ModelStats, Observer, PAGE_TOKENS, Progress, Result, Sink,
    StateBlock, Step, Transfer,
};
use bodkin_gguf::File;
use bodkin_model::{Entries, Op, Plan, Rope, RopeTable, Value, Weight, WeightId};
use bytemuck::cast_slice_mut;

use attention::{AttentionRows, KvSlot};
use experts::ExpertLinear;
use rows::Norm;

use state::StateSlots;

/// The plain meaning of a plan.
pub struct Reference;

struct ReferenceModel {
    plan: Arc<Plan>,
    limits: Limits,
    /// Every weight in f32, `[rows, cols]`.
    weights: Vec<Vec<f32>>,
    /// The frequencies of every rope operation, by operation.
    ropes: Vec<Option<RopeTable>>,
    /// One for each of the plan's slots.
    slots: Vec<KvSlot>,
    /// Recurrent state, one for each of the plan's.
    states: Vec<StateSlots>,
    /// For each routing of the plan, how often each expert was chosen.
    expert_counts: Vec<Vec<u64>>,
    host: HostSampler,
}

impl Backend for Reference {
    fn name(&self) -> String {
        "reference".to_owned()
    }

    fn devices(&self) -> Vec<DeviceInfo> {
        let (kind, name) = (DeviceKind::Cpu, self.name());
        vec![DeviceInfo { kind, name, total_bytes: None, free_bytes: None }]
    }

    fn threads(&self) -> usize {
        1
    }

    fn kv_type(&self) -> KvType {
        KvType::Auto
    }

    /// Speed is not what this backend is for: it reports that of a plain sum.
    fn measure_bandwidth(&self) -> Result<f64> {
        let words = vec![1u64; 1 << 23];
        let start = std::time::Instant::now();
        let sum: u64 = words.iter().copied().sum();
        assert_eq!(sum, 1 << 23, "the words were read");
        Ok(8.0 * (1u64 << 23) as f64 / start.elapsed().as_secs_f64())
    }

    fn available_memory(&self) -> Option<u64> {
        None
    }

    fn memory(&self, plan: &Plan, limits: &Limits) -> Memory {
        let widths: u64 = plan.widths.iter().map(|&w| w as u64).sum();
        let kv = plan.slots.iter().zip(plan.window_indices());
        let kv = kv.map(|(s, window_index)| {
            limits.pages[window_index] * s.entries_per_page(PAGE_TOKENS) * s.entry_elements()
        });
        let slots = limits.state_slots as u64 * plan.state_elements();
        Memory {
            weight_bytes: 4 * plan.cost().parameters,
            state_bytes: 4 * (kv.sum::<usize>() as u64 + slots),
            scratch_bytes: 4 * widths * limits.tokens as u64,
            ..Memory::default()
        }
    }

    fn load(
        &self,
        plan: Arc<Plan>,
        file: &Arc<File>,
        limits: &Limits,
        progress: Progress<'_>,
    ) -> Result<Box<dyn Model>> {
        Ok(load(KvType::Auto, plan, file, limits, progress))
    }
}

/// A model that rounds its keys and values, which stay in f32, as those of a type are.
pub(crate) fn load(
    kv_type: KvType,
    plan: Arc<Plan>,
    file: &File,
    limits: &Limits,
    progress: Progress<'_>,
) -> Box<dyn Model> {
    let total = plan.cost().weight_bytes;
    let mut done = 0;
    let mut weights = Vec::with_capacity(plan.weights.len());
    for weight in &plan.weights {
        weights.push(dequantize(file, weight));
        done += weight.bytes;
        progress(done, total);
    }
    let ropes = plan.ops.iter().map(|op| match op {
        Op::Rope { rope, .. } => Some(rope_table(rope, &weights)),
        _ => None,
    });
    let ropes = ropes.collect();
    let slots = plan.slots.iter().zip(plan.window_indices()).map(|(&slot, window_index)| {
        let entries = limits.pages[window_index] * slot.entries_per_page(PAGE_TOKENS);
        let zeros = |dim| vec![0.0; entries * slot.kv_heads * dim];
        let (keys, values) = (zeros(slot.key_dim), zeros(slot.value_dim));
        KvSlot { slot, kv_type, window_index, keys, values }
    });
    let slots = slots.collect();
    let states =
        plan.states.iter().map(|s| StateSlots::new(limits.state_slots, s.elements())).collect();
    let expert_counts = plan.ops.iter().filter_map(|op| match op {
        Op::Route { routing, .. } => Some(vec![0; routing.experts]),
        _ => None,
    });
    let (expert_counts, limits) = (expert_counts.collect(), limits.clone());
    Box::new(ReferenceModel {
        host: HostSampler::new(&plan, &limits),
        plan,
        limits,
        weights,
        ropes,
        slots,
        states,
        expert_counts,
    })
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

impl Model for ReferenceModel {
    fn plan(&self) -> &Plan {
        &self.plan
    }

    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn step(&mut self, step: Step<'_>, sink: Sink<'_>) -> Result<()> {
        let mut host = std::mem::take(&mut self.host);
        let result = host.run(step, sink, &mut |batch, logits, observer| {
            self.forward(batch, logits, observer);
            Ok(())
        });
        self.host = host;
        result
    }

    fn transfer(&mut self, mut transfer: Transfer<'_>) -> Result<usize> {
        let mut moved = 0;
        match transfer.block() {
            StateBlock::Page { window_index, .. } => {
                let slots = self.plan.slots.iter().zip(&mut self.slots);
                for (slot, pages) in slots.filter(|(_, pages)| pages.window_index == window_index) {
                    let entries = slot.entries_per_page(PAGE_TOKENS);
                    let bytes = |dim: usize| entries * slot.kv_heads * dim * size_of::<f32>();
                    let (keys, values) = (&mut pages.keys[..], &mut pages.values[..]);
                    moved += transfer.run_region(cast_slice_mut(keys), bytes(slot.key_dim));
                    moved += transfer.run_region(cast_slice_mut(values), bytes(slot.value_dim));
                }
            }
            StateBlock::StateSlot(_) => {
                for slots in &mut self.states {
                    let (memory, elements) = slots.memory();
                    moved += transfer.run_region(cast_slice_mut(memory), 4 * elements);
                }
            }
        }
        Ok(moved)
    }

    fn stats(&self) -> ModelStats {
        let counts = self.plan.routed_layers().into_iter().zip(&self.expert_counts);
        let experts = counts.map(|(layer, counts)| ExpertStats {
            layer,
            counts: counts.clone(),
            seconds: Vec::new(),
            cache: None,
        });
        ModelStats { experts: experts.collect(), ..ModelStats::default() }
    }

    fn set_profiling(&mut self, _: bool) {}

    fn set_tracing(&mut self, _: bool) -> Result<()> {
        Ok(())
    }

    fn set_activation_thresholds(&mut self, thresholds: &[f32]) -> Result<usize> {
        Err(Error::no_thresholds("the reference", thresholds))
    }
}

impl ReferenceModel {
    fn forward(
        &mut self,
        batch: &Batch,
        logits: &mut [f32],
        mut observer: Option<&mut dyn Observer>,
    ) {
        let plan = Arc::clone(&self.plan);
        let mut values: Vec<Vec<f32>> = Vec::with_capacity(plan.ops.len());
        for i in 0..plan.ops.len() {
            if let Some(observer) = &mut observer {
                show(&plan, i, batch, &values, &mut **observer);
            }
            let value = self.run(&plan, i, batch, &values);
            values.push(value);
        }
        logits.copy_from_slice(&values[plan.output().0]);
    }

    /// The value of operation `i`, from those before it.
    fn run(&mut self, plan: &Plan, i: usize, batch: &Batch, values: &[Vec<f32>]) -> Vec<f32> {
        let of = |value: Value| values[value.0].as_slice();
        let weight = |id: WeightId| self.weights[id.0].as_slice();
        match &plan.ops[i] {
            Op::Input => batch.inputs.clone(),
            Op::Embed { table, by } => {
                let table_rows = rows::table_rows(*by, plan.weight(*table).rows, batch);
                rows::pick(weight(*table), plan.widths[i], table_rows)
            }
            Op::Norm { input, kind, weight: w, bias, eps, groups } => {
                let (weight, bias) = (w.map(weight), bias.map(weight));
                let norm = Norm { kind: *kind, weight, bias, eps: *eps, groups: *groups };
                norm.run(of(*input), plan.widths[i])
            }
            Op::Linear { input, weight: w, bias } => {
                rows::linear(of(*input), plan.width(*input), weight(*w), bias.map(weight))
            }
            Op::Rope { input, head_dim, rope, .. } => {
                let table = self.ropes[i].as_ref().expect("every rope has its table");
                rows::rotate(of(*input), plan.widths[i], *head_dim, rope, table, batch)
            }
            op @ Op::Attention { .. } => self.attended(op, batch, values),
            Op::Act { input, act } => of(*input).iter().map(|&x| rows::activate(*act, x)).collect(),
            Op::Glu { gate, up, act } => rows::glu(of(*gate), of(*up), *act),
            Op::Add { a, b } => of(*a).iter().zip(of(*b)).map(|(a, b)| a + b).collect(),
            Op::Scale { input, factor } => of(*input).iter().map(|x| x * factor).collect(),
            op @ (Op::ScaleBy { .. }
            | Op::Rescale { .. }
            | Op::Cutoff { .. }
            | Op::ScaleExperts { .. }) => self.scaled(plan, op, values),
            op @ (Op::Softcap { .. } | Op::Clamp { .. }) => bounded(op, values),
            op @ (Op::Mix { .. } | Op::HyperWeights { .. }) => self.mixed(plan, op, values),
            Op::Slice { input, groups, start, len } => {
                rows::slice(of(*input), plan.width(*input) / groups, *start, *len)
            }
            Op::Concat { a, b, groups } => {
                let widths = [plan.width(*a), plan.width(*b)];
                rows::concat(of(*a), of(*b), widths, *groups, plan.widths[i])
            }
            Op::Route { input, chosen, bias, routing } => {
                let (chosen, bias) = (chosen.map(of), bias.map(weight));
                let route = experts::route(of(*input), chosen, bias, routing);
                self.count(plan, i, &route);
                route
            }
            Op::ExpertLinear { input, route, weight: w, bias, experts } => {
                let (experts, cols) = (*experts, plan.weight(*w).cols);
                let (weight, bias) = (weight(*w), bias.map(weight));
                let linear = ExpertLinear { weight, bias, cols, experts };
                linear.run(of(*input), plan.width(*input), route.map(of))
            }
            Op::ExpertSum { input, route } => {
                experts::expert_sum(of(*input), of(*route), plan.width(*route) / 2)
            }
            Op::Pool { input, kind } => rows::pool(of(*input), plan.widths[i], *kind, batch),
            op @ (Op::Conv { .. }
            | Op::Compress { .. }
            | Op::Select { .. }
            | Op::Scan { .. }
            | Op::DeltaRule { .. }) => self.stateful(op, batch, values),
            Op::Logits { input, weight: w, bias } => {
                let (width, rows) = (plan.width(*input), batch.outputs.iter().map(|&i| i as usize));
                let rows = rows::pick(of(*input), width, rows);
                rows::linear(&rows, width, weight(*w), bias.map(weight))
            }
        }
    }
}

/// The value of an operation that bounds elements.
fn bounded(op: &Op, values: &[Vec<f32>]) -> Vec<f32> {
    let each = |value: Value, bound: &dyn Fn(f32) -> f32| {
        values[value.0].iter().map(|&x| bound(x)).collect()
    };
    match *op {
        Op::Softcap { input, cap } => each(input, &|x| (x / cap).tanh() * cap),
        Op::Clamp { input, low, high } => each(input, &|x| x.max(low).min(high)),
        _ => unreachable!("{op:?} bounds nothing"),
    }
}

impl ReferenceModel {
    /// Stores the keys and values of an attention, then the value of it.
    fn attended(&mut self, op: &Op, batch: &Batch, values: &[Vec<f32>]) -> Vec<f32> {
        let Op::Attention { q, kv, attention, slot } = op else {
            unreachable!("{op:?} attends to nothing")
        };
        let of = |value: Value| values[value.0].as_slice();
        if let Some([k, v]) = kv {
            self.slots[slot.0].store(of(*k), of(*v), batch);
        }
        if let Entries::TokensAndBlocks { blocks, slot, .. } = attention.entries {
            self.slots[slot.0].store(of(blocks), of(blocks), batch);
        }
        let selected = attention.entries.selected().map(of);
        let sinks = attention.sinks.map(|id| self.weights[id.0].as_slice());
        let rows = AttentionRows { attention, own: slot.0, selected, sinks };
        rows.attend(&self.slots, of(*q), batch)
    }

    /// The value of an operation of hyper-connections.
    fn mixed(&self, plan: &Plan, op: &Op, values: &[Vec<f32>]) -> Vec<f32> {
        let of = |value: Value| values[value.0].as_slice();
        match *op {
            Op::Mix { input, weights, results } => {
                let widths = [plan.width(input), plan.width(weights)];
                hyper::mix(of(input), of(weights), widths, results)
            }
            Op::HyperWeights { input, scale, base, streams, iterations, eps } => {
                let weights = [scale, base].map(|id| self.weights[id.0].as_slice());
                hyper::weights(of(input), weights, streams, iterations, eps)
            }
            _ => unreachable!("{op:?} mixes nothing"),
        }
    }

    /// The value of an operation that scales rows, or parts of them.
    fn scaled(&self, plan: &Plan, op: &Op, values: &[Vec<f32>]) -> Vec<f32> {
        let of = |value: Value| values[value.0].as_slice();
        let weight = |id: WeightId| self.weights[id.0].as_slice();
        match op {
            Op::ScaleBy { input, weight: w } => {
                let factors = weight(*w).iter().cycle();
                of(*input).iter().zip(factors).map(|(x, factor)| x * factor).collect()
            }
            Op::Rescale { input, like } => {
                rows::rescale(of(*input), plan.width(*input), of(*like), plan.width(*like))
            }
            Op::Cutoff { input, deviations } => {
                rows::cutoff(of(*input), plan.width(*input), f64::from(*deviations))
            }
            Op::ScaleExperts { route, weight: w } => {
                experts::scale(of(*route), plan.width(*route), weight(*w))
            }
            _ => unreachable!("{op:?} scales nothing"),
        }
    }

    /// The value of an operation with recurrent state, or with a KV cache of its own.
    fn stateful(&mut self, op: &Op, batch: &Batch, values: &[Vec<f32>]) -> Vec<f32> {
        let of = |value: Value| values[value.0].as_slice();
        let weight = |id: WeightId| self.weights[id.0].as_slice();
        match op {
            Op::Conv { input, weight: w, bias, state } => {
                let (weight, bias) = (weight(*w), bias.map(weight));
                state::conv(&mut self.states[state.0], batch, of(*input), weight, bias)
            }
            Op::Compress { input, scores, compression, state } => {
                let state = &mut self.states[state.0];
                compress::compress(state, batch, *compression, [of(*input), of(*scores)])
            }
            Op::Select { q, k, weights, indexer, slot } => {
                let slot = &mut self.slots[slot.0];
                slot.store(of(*k), &[], batch);
                select::select(slot, batch, indexer, of(*q), of(*weights))
            }
            Op::Scan { x, b, c, dt, a, d, dt_bias, scan, state } => {
                let values = [x, b, c, dt].map(|value| of(*value));
                let weights = [a, d, dt_bias].map(|id| weight(*id));
                state::scan(&mut self.states[state.0], batch, *scan, values, weights)
            }
            Op::DeltaRule { qkv, decay, beta, a, dt_bias, eps, rule, state } => {
                let values = [qkv, decay, beta].map(|value| of(*value));
                let weights = [a, dt_bias].map(|id| weight(*id));
                state::delta_rule(&mut self.states[state.0], batch, *rule, *eps, values, weights)
            }
            _ => unreachable!("{op:?} has no state"),
        }
    }

    /// Adds the experts that the routing at operation `i` chose to its counts.
    fn count(&mut self, plan: &Plan, i: usize, route: &[f32]) {
        let routing = plan.ops[..i].iter().filter(|op| matches!(op, Op::Route { .. })).count();
        for row in route.chunks_exact(plan.widths[i]) {
            experts::chosen(row).for_each(|e| self.expert_counts[routing][e] += 1);
        }
    }
}

/// Shows the input of operation `i`, if that is a product.
fn show(plan: &Plan, i: usize, batch: &Batch, values: &[Vec<f32>], observer: &mut dyn Observer) {
    let rows = |input: Value| values[input.0].chunks_exact(plan.width(input));
    let alone = |values| InputRow { expert: 0, values };
    let (weight, experts, rows): (_, _, Vec<InputRow<'_>>) = match &plan.ops[i] {
        Op::Linear { input, weight, .. } => (weight, 1, rows(*input).map(alone).collect()),
        Op::Logits { input, weight, .. } => {
            let rows: Vec<&[f32]> = rows(*input).collect();
            (weight, 1, batch.outputs.iter().map(|&row| alone(rows[row as usize])).collect())
        }
        Op::ExpertLinear { input, route, weight, experts, .. } => {
            let cols = plan.weight(*weight).cols;
            let pairs = rows(*input).enumerate().flat_map(|(token, row)| {
                let route = route.map(|route| {
                    &values[route.0][token * plan.width(route)..][..plan.width(route)]
                });
                experts::pairs(row, cols, route, *experts)
            });
            (weight, *experts, pairs.map(|(expert, values)| InputRow { expert, values }).collect())
        }
        _ => return,
    };
    observer.matmul(&Matmul { weight: plan.weight(*weight), experts, rows: &rows });
}
