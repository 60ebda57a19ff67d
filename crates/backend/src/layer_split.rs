//! Layer split: two backends share a model that does not fit into one device. The second computes
//! the last layers and the head. Activations go through the host; keys, values and states stay with
//! the part that reads them. This file must not know which backends they are.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use bodkin_gguf::File;
use bodkin_model::Plan;

use crate::observe::reborrow;
use crate::{
    Backend, Batch, DeviceInfo, Error, HostSampler, KvType, Limits, Memory, Model, ModelStats,
    Observer, OutputRequest, Progress, Result, Sink, Span, StateBlock, Step, Transfer,
};

/// A backend for the first layers, and one for the rest.
pub struct LayerSplit {
    first: Box<dyn Backend>,
    second: Box<dyn Backend>,
    /// The last layers of a model, which the second backend computes.
    second_layers: usize,
    /// Bytes of weights that each reads in a step of the most recently loaded model.
    step_weight_bytes: [AtomicU64; 2],
}

impl LayerSplit {
    /// `second` computes the last `second_layers` layers and the head, or the whole plan if it has
    /// no more layers; `first` computes the rest.
    pub fn new(
        first: Box<dyn Backend>,
        second: Box<dyn Backend>,
        second_layers: usize,
    ) -> LayerSplit {
        LayerSplit { first, second, second_layers, step_weight_bytes: Default::default() }
    }

    fn note_bytes(&self, bytes: [u64; 2]) {
        self.step_weight_bytes.iter().zip(bytes).for_each(|(own, bytes)| own.store(bytes, Relaxed));
    }

    /// The two parts of a plan; none if one backend computes all of it.
    fn parts(&self, plan: &Plan) -> Result<Option<[Plan; 2]>> {
        let all = plan.layers();
        if self.second_layers == 0 || self.second_layers >= all {
            return Ok(None);
        }
        let parts = plan.split_before_layer(all - self.second_layers);
        parts.map(Some).ok_or_else(|| Error::Unsupported {
            backend: self.name(),
            what: format!(
                "{}: expected a layer before which a model can be split, found that layer {} and \
                 those before it share more than one value, a KV cache or a recurrent state",
                plan.architecture,
                all - self.second_layers,
            ),
        })
    }

    /// The backend of a plan that is not split.
    fn whole(&self) -> &dyn Backend {
        if self.second_layers == 0 { &*self.first } else { &*self.second }
    }

    /// Loads a part, or fails if its backend has too little memory.
    fn load_part(
        &self,
        backend: &dyn Backend,
        part: Arc<Plan>,
        file: &Arc<File>,
        limits: &Limits,
        progress: Progress<'_>,
    ) -> Result<Box<dyn Model>> {
        let Memory { weight_bytes, state_bytes, scratch_bytes, .. } = backend.memory(&part, limits);
        let needed = weight_bytes + state_bytes + scratch_bytes;
        match backend.available_memory().filter(|&free| needed > free) {
            None => backend.load(part, file, limits, progress),
            Some(free) => Err(Error::Config(format!(
                "{}: its layers need {needed} bytes ({weight_bytes} weights, {state_bytes} \
                 context, {scratch_bytes} scratch), {free} are free; another --gpu-layers \
                 puts other layers on the other device",
                backend.name(),
            ))),
        }
    }
}

impl Backend for LayerSplit {
    fn name(&self) -> String {
        format!(
            "{} + up to {} layers on {}",
            self.first.name(),
            self.second_layers,
            self.second.name()
        )
    }

    fn devices(&self) -> Vec<DeviceInfo> {
        let mut devices = self.first.devices();
        devices.extend(self.second.devices());
        devices
    }

    fn threads(&self) -> usize {
        self.first.threads()
    }

    fn kv_type(&self) -> KvType {
        self.first.kv_type()
    }

    /// The mean over a step of the most recently loaded model, whose parts run one after the other.
    fn measure_bandwidth(&self) -> Result<f64> {
        let bytes = self.step_weight_bytes.each_ref().map(|bytes| bytes.load(Relaxed) as f64);
        let speeds = [self.first.measure_bandwidth()?, self.second.measure_bandwidth()?];
        match bytes[0] + bytes[1] {
            0.0 => Ok(speeds[0].min(speeds[1])),
            all => Ok(all / (bytes[0] / speeds[0] + bytes[1] / speeds[1])),
        }
    }

    /// Of the part that has memory of its own.
    fn measure_host_bandwidth(&self) -> Result<Option<f64>> {
        Ok(self.second.measure_host_bandwidth()?.or(self.first.measure_host_bandwidth()?))
    }

    /// The sum of both; loading checks each of them.
    fn available_memory(&self) -> Option<u64> {
        Some(self.first.available_memory()?.saturating_add(self.second.available_memory()?))
    }

    fn memory(&self, plan: &Plan, limits: &Limits) -> Memory {
        // Loading reports plans that cannot be split.
        let Ok(Some([first, second])) = self.parts(plan) else {
            return self.whole().memory(plan, limits);
        };
        let [a, b] = part_mappings(plan, [&first, &second], limits);
        let a = self.first.memory(&first, &a.limits);
        let b = self.second.memory(&second, &b.limits);
        Memory {
            weight_bytes: a.weight_bytes + b.weight_bytes,
            state_bytes: a.state_bytes + b.state_bytes,
            scratch_bytes: a.scratch_bytes + b.scratch_bytes,
            cached_expert_bytes: a.cached_expert_bytes + b.cached_expert_bytes,
            host_expert_bytes: a.host_expert_bytes + b.host_expert_bytes,
            maps_experts: a.maps_experts || b.maps_experts,
            // Layers with fewer slots decide the speed.
            expert_slots: a.expert_slots.into_iter().chain(b.expert_slots).min(),
        }
    }

    fn load(
        &self,
        plan: Arc<Plan>,
        file: &Arc<File>,
        limits: &Limits,
        progress: Progress<'_>,
    ) -> Result<Box<dyn Model>> {
        let Some([first, second]) = self.parts(&plan)? else {
            let bytes = plan.cost().step_weight_bytes;
            self.note_bytes(if self.second_layers == 0 { [bytes, 0] } else { [0, bytes] });
            return self.load_part(self.whole(), plan, file, limits, progress);
        };
        self.note_bytes([&first, &second].map(|part| part.cost().step_weight_bytes));
        let mappings = part_mappings(&plan, [&first, &second], limits);
        let (first, second) = (Arc::new(first), Arc::new(second));
        let total = plan.cost().weight_bytes;
        // A weight that both parts use is loaded by each, and counts once in the total.
        let done_first = first.cost().weight_bytes;
        let report = |done| progress(done, total);
        let first =
            self.load_part(&*self.first, first, file, &mappings[0].limits, &|done, _| {
                report(done.min(total));
            })?;
        let second =
            self.load_part(&*self.second, second, file, &mappings[1].limits, &|done, _| {
                report((done_first + done).min(total));
            })?;
        Ok(Box::new(LayerSplitModel {
            host_sampler: HostSampler::new(&plan, limits),
            requests: vec![OutputRequest::Logits; limits.tokens.max(limits.outputs)],
            limits: limits.clone(),
            part_batches: Default::default(),
            plan,
            first,
            second,
            mappings,
        }))
    }
}

/// How windows, batches and limits of a part follow from those of the whole model.
struct PartMapping {
    /// For each of the part's windows, its index in the whole plan's.
    window_indices: Vec<usize>,
    limits: Limits,
}

/// The mappings of both parts. Every row of the first one is an output, which the second reads.
fn part_mappings(whole: &Plan, [first, second]: [&Plan; 2], limits: &Limits) -> [PartMapping; 2] {
    [(first, limits.tokens), (second, limits.outputs)].map(|(part, outputs)| {
        let windows = whole.windows();
        let index = |window| windows.iter().position(|w| *w == window).expect("a window of all");
        let window_indices: Vec<usize> = part.windows().into_iter().map(index).collect();
        let limits = Limits {
            tokens: limits.tokens,
            outputs,
            pages: window_indices.iter().map(|&index| limits.pages[index]).collect(),
            state_slots: if part.states.is_empty() { 0 } else { limits.state_slots },
        };
        PartMapping { window_indices, limits }
    })
}

impl PartMapping {
    /// What the part calls a block of the whole; none if it has no such state.
    fn block(&self, block: StateBlock) -> Option<StateBlock> {
        match block {
            StateBlock::Page { window_index, page } => {
                let is_same = |&whole: &usize| whole == window_index;
                let window_index = self.window_indices.iter().position(is_same)?;
                Some(StateBlock::Page { window_index, page })
            }
            StateBlock::StateSlot(_) => (self.limits.state_slots > 0).then_some(block),
        }
    }

    /// Replaces `part` by the part's share of a step of the whole.
    fn fill(&self, whole: &Batch, part: &mut Batch) {
        part.tokens.clone_from(&whole.tokens);
        part.spans.resize_with(whole.spans.len(), Default::default);
        for (part, whole) in part.spans.iter_mut().zip(&whole.spans) {
            let mut tables = std::mem::take(&mut part.tables);
            tables.resize_with(self.window_indices.len(), Default::default);
            for (table, &index) in tables.iter_mut().zip(&self.window_indices) {
                table.clone_from(&whole.tables[index]);
            }
            *part = Span { tables, ..*whole };
        }
    }
}

/// A model in two parts.
struct LayerSplitModel {
    plan: Arc<Plan>,
    limits: Limits,
    first: Box<dyn Model>,
    second: Box<dyn Model>,
    mappings: [PartMapping; 2],
    /// Each part's share of the current batch.
    part_batches: [Batch; 2],
    /// Asks for the output of every row: of the first part hidden states, of the second logits.
    requests: Vec<OutputRequest<'static>>,
    host_sampler: HostSampler,
}

impl LayerSplitModel {
    /// Runs both parts. The first one's output is the second one's input.
    fn forward(
        &mut self,
        batch: &Batch,
        logits: &mut [f32],
        mut observer: Option<&mut dyn Observer>,
    ) -> Result<()> {
        let [first, second] = &mut self.part_batches;
        self.mappings[0].fill(batch, first);
        self.mappings[1].fill(batch, second);
        first.outputs.clear();
        first.outputs.extend(0..batch.tokens.len() as u32);
        second.outputs.clone_from(&batch.outputs);
        let requests = &self.requests[..first.outputs.len()];
        let step = Step { batch: first, requests, steps: 1, observer: reborrow(&mut observer) };
        self.first.step(step, &mut |output| {
            second.inputs.clear();
            second.inputs.extend_from_slice(output.logits);
            ControlFlow::Break(())
        })?;
        let requests = &self.requests[..second.outputs.len()];
        let step = Step { batch: second, requests, steps: 1, observer: reborrow(&mut observer) };
        self.second.step(step, &mut |output| {
            logits.copy_from_slice(output.logits);
            ControlFlow::Break(())
        })
    }
}

impl Model for LayerSplitModel {
    fn plan(&self) -> &Plan {
        &self.plan
    }

    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn step(&mut self, step: Step<'_>, sink: Sink<'_>) -> Result<()> {
        let mut host = std::mem::take(&mut self.host_sampler);
        let result = host
            .run(step, sink, &mut |batch, logits, observer| self.forward(batch, logits, observer));
        self.host_sampler = host;
        result
    }

    fn transfer(&mut self, mut transfer: Transfer<'_>) -> Result<usize> {
        let mut moved = 0;
        for (model, part) in [&mut self.first, &mut self.second].into_iter().zip(&self.mappings) {
            let block = transfer.block();
            if part.block(block).is_none() {
                continue;
            }
            let bytes =
                model.transfer(transfer.map(|block| part.block(block).expect("as checked")))?;
            transfer.skip(bytes);
            moved += bytes;
        }
        Ok(moved)
    }

    fn stats(&self) -> ModelStats {
        let (mut stats, second) = (self.first.stats(), self.second.stats());
        stats.experts.extend(second.experts);
        stats.maps_experts |= second.maps_experts;
        stats.stages.extend(second.stages);
        stats.weight_layouts.extend(second.weight_layouts);
        stats.timeline.extend(second.timeline);
        stats
    }

    fn set_profiling(&mut self, on: bool) {
        self.first.set_profiling(on);
        self.second.set_profiling(on);
    }

    fn set_tracing(&mut self, on: bool) -> Result<()> {
        self.first.set_tracing(on)?;
        self.second.set_tracing(on)
    }

    fn set_activation_thresholds(&mut self, thresholds: &[f32]) -> Result<usize> {
        Err(Error::no_thresholds("a model on two backends", thresholds))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::PageTable;

    #[test]
    fn a_part_gets_everything_of_a_span_but_the_other_tables() {
        let table = |page| PageTable { skipped: 1, pages: vec![page] };
        let tables = vec![table(7), table(8)];
        let span = Span { len: 2, position: 33, tables, state_slot: 4, is_prefill: true };
        let tokens = vec![5, 6];
        let whole = Batch { tokens, spans: vec![span.clone()], ..Batch::default() };
        let limits = Limits { tokens: 2, outputs: 2, pages: vec![9], state_slots: 5 };
        let mut part = Batch::default();
        PartMapping { window_indices: vec![1], limits }.fill(&whole, &mut part);
        assert_eq!(part.tokens, whole.tokens);
        assert_eq!(part.spans, [Span { tables: vec![table(8)], ..span }]);
    }
}
