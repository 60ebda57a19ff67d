//! Two backends that share a model: the last layers and the head are the second's, for devices that
//! have not the memory for all. What one part makes goes through the host; keys, values and states
//! belong to the part that reads them. This file must not know which backends they are.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use bodkin_gguf::File;
use bodkin_model::Plan;

use crate::{
    Backend, Batch, Error, KvType, Limits, Memory, Model, Observer, Progress, Result, Span,
    StageProfile, WeightLayout,
};

/// A backend for the first layers, and one for the rest.
pub struct LayerSplit {
    first: Box<dyn Backend>,
    second: Box<dyn Backend>,
    layers: usize,
    /// Bytes of weights that each reads in a step of the last model that was loaded.
    bytes: [AtomicU64; 2],
}

impl LayerSplit {
    /// `second` computes the last `layers` layers and the head, and everything where it is to have
    /// all layers; `first` the rest.
    pub fn new(first: Box<dyn Backend>, second: Box<dyn Backend>, layers: usize) -> LayerSplit {
        LayerSplit { first, second, layers, bytes: Default::default() }
    }

    fn note_bytes(&self, bytes: [u64; 2]) {
        self.bytes.iter().zip(bytes).for_each(|(own, bytes)| own.store(bytes, Relaxed));
    }

    /// The two parts of a plan; none if all of it is one backend's.
    fn parts(&self, plan: &Plan) -> Result<Option<[Plan; 2]>> {
        let all = plan.layers();
        if self.layers == 0 || self.layers >= all {
            return Ok(None);
        }
        let parts = plan.split_before_layer(all - self.layers);
        parts.map(Some).ok_or_else(|| Error::Unsupported {
            backend: self.name(),
            what: format!("{}: its layers share more than one value", plan.architecture),
        })
    }

    /// The backend that has all of a plan that is not cut.
    fn whole(&self) -> &dyn Backend {
        if self.layers == 0 { &*self.first } else { &*self.second }
    }

    /// Loads a part, if its backend has the memory for it.
    fn load_part(
        &self,
        backend: &dyn Backend,
        part: Arc<Plan>,
        file: &Arc<File>,
        limits: &Limits,
        progress: Progress<'_>,
    ) -> Result<Box<dyn Model>> {
        let Memory { weight_bytes, state_bytes, scratch_bytes } = backend.memory(&part, limits);
        let needed = weight_bytes + state_bytes + scratch_bytes;
        match backend.available_memory().filter(|&free| needed > free) {
            None => backend.load(part, file, limits, progress),
            Some(free) => Err(Error::Config(format!(
                "{}: its layers need {needed} bytes ({weight_bytes} weights, {state_bytes} \
                 context, {scratch_bytes} scratch), {free} are free; --gpu-layers moves some",
                backend.name(),
            ))),
        }
    }
}

impl Backend for LayerSplit {
    fn name(&self) -> String {
        format!("{} + up to {} layers on {}", self.first.name(), self.layers, self.second.name())
    }

    fn threads(&self) -> usize {
        self.first.threads()
    }

    fn kv_type(&self) -> KvType {
        self.first.kv_type()
    }

    /// What both reach together where each in its turn reads what it has of the last model.
    fn bandwidth(&self) -> Result<f64> {
        let bytes = self.bytes.each_ref().map(|bytes| bytes.load(Relaxed) as f64);
        let speeds = [self.first.bandwidth()?, self.second.bandwidth()?];
        match bytes[0] + bytes[1] {
            0.0 => Ok(speeds[0].min(speeds[1])),
            all => Ok(all / (bytes[0] / speeds[0] + bytes[1] / speeds[1])),
        }
    }

    /// Of both together; loading checks each of them.
    fn available_memory(&self) -> Option<u64> {
        Some(self.first.available_memory()?.saturating_add(self.second.available_memory()?))
    }

    fn memory(&self, plan: &Plan, limits: &Limits) -> Memory {
        // Loading says what cannot be cut.
        let Ok(Some([first, second])) = self.parts(plan) else {
            return self.whole().memory(plan, limits);
        };
        let [a, b] = cuts(plan, [&first, &second], limits);
        let a = self.first.memory(&first, &a.limits);
        let b = self.second.memory(&second, &b.limits);
        Memory {
            weight_bytes: a.weight_bytes + b.weight_bytes,
            state_bytes: a.state_bytes + b.state_bytes,
            scratch_bytes: a.scratch_bytes + b.scratch_bytes,
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
            self.note_bytes(if self.layers == 0 { [bytes, 0] } else { [0, bytes] });
            return self.load_part(self.whole(), plan, file, limits, progress);
        };
        self.note_bytes([&first, &second].map(|part| part.cost().step_weight_bytes));
        let cuts = cuts(&plan, [&first, &second], limits);
        let (first, second) = (Arc::new(first), Arc::new(second));
        let total = plan.cost().weight_bytes;
        // What both parts read is read twice and counts once.
        let done_first = first.cost().weight_bytes;
        let report = |done| progress(done, total);
        let first = self.load_part(&*self.first, first, file, &cuts[0].limits, &|done, _| {
            report(done.min(total));
        })?;
        let second = self.load_part(&*self.second, second, file, &cuts[1].limits, &|done, _| {
            report((done_first + done).min(total));
        })?;
        let weight_layouts =
            first.weight_layouts().iter().chain(second.weight_layouts()).cloned().collect();
        let limits = limits.clone();
        let batches = [Batch::default(), Batch::default()];
        Ok(Box::new(LayerSplitModel { plan, limits, first, second, cuts, batches, weight_layouts }))
    }
}

/// What a part sees of steps of the whole.
struct Cut {
    /// The whole plan's page tables that are the part's, in its order.
    tables: Vec<usize>,
    limits: Limits,
}

/// What both parts see. Of the first, every row goes on to the second.
fn cuts(whole: &Plan, [first, second]: [&Plan; 2], limits: &Limits) -> [Cut; 2] {
    [(first, limits.tokens), (second, limits.outputs)].map(|(part, outputs)| {
        let windows = whole.windows();
        let place = |window| windows.iter().position(|w| *w == window).expect("a window of all");
        let tables: Vec<usize> = part.windows().into_iter().map(place).collect();
        let limits = Limits {
            tokens: limits.tokens,
            outputs,
            pages: tables.iter().map(|&table| limits.pages[table]).collect(),
            state_slots: if part.states.is_empty() { 0 } else { limits.state_slots },
        };
        Cut { tables, limits }
    })
}

impl Cut {
    /// Makes the part's step of one of the whole, in the place of what was there.
    fn fill(&self, whole: &Batch, part: &mut Batch) {
        part.tokens.clone_from(&whole.tokens);
        part.spans.resize_with(whole.spans.len(), Default::default);
        for (part, whole) in part.spans.iter_mut().zip(&whole.spans) {
            let mut tables = std::mem::take(&mut part.tables);
            tables.resize_with(self.tables.len(), Default::default);
            for (table, &place) in tables.iter_mut().zip(&self.tables) {
                table.clone_from(&whole.tables[place]);
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
    cuts: [Cut; 2],
    /// The last step of each part.
    batches: [Batch; 2],
    weight_layouts: Vec<WeightLayout>,
}

impl LayerSplitModel {
    /// Makes the steps of both parts.
    fn begin(&mut self, batch: &Batch) -> Result<()> {
        batch.check(&self.plan, &self.limits)?;
        let [first, second] = &mut self.batches;
        self.cuts[0].fill(batch, first);
        self.cuts[1].fill(batch, second);
        first.outputs.clear();
        first.outputs.extend(0..batch.tokens.len() as u32);
        second.outputs.clone_from(&batch.outputs);
        second.inputs.resize(batch.tokens.len() * self.first.plan().output_width(), 0.0);
        Ok(())
    }
}

impl Model for LayerSplitModel {
    fn plan(&self) -> &Plan {
        &self.plan
    }

    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn forward(&mut self, batch: &Batch, logits: &mut [f32]) -> Result<()> {
        self.begin(batch)?;
        let [first, second] = &mut self.batches;
        self.first.forward(first, &mut second.inputs)?;
        self.second.forward(second, logits)
    }

    fn observe(
        &mut self,
        batch: &Batch,
        logits: &mut [f32],
        observer: &mut dyn Observer,
    ) -> Result<()> {
        self.begin(batch)?;
        let [first, second] = &mut self.batches;
        self.first.observe(first, &mut second.inputs, observer)?;
        self.second.observe(second, logits, observer)
    }

    fn copy_state(&mut self, from: u32, to: u32) -> Result<()> {
        self.first.copy_state(from, to)?;
        self.second.copy_state(from, to)
    }

    fn expert_counts(&self) -> Vec<Vec<u64>> {
        let mut counts = self.first.expert_counts();
        counts.extend(self.second.expert_counts());
        counts
    }

    fn weight_layouts(&self) -> &[WeightLayout] {
        &self.weight_layouts
    }

    fn set_profiling(&mut self, on: bool) {
        self.first.set_profiling(on);
        self.second.set_profiling(on);
    }

    fn profile(&self) -> Vec<StageProfile> {
        let mut stages = self.first.profile();
        stages.extend(self.second.profile());
        stages
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
        Cut { tables: vec![1], limits }.fill(&whole, &mut part);
        assert_eq!(part.tokens, whole.tokens);
        assert_eq!(part.spans, [Span { tables: vec![table(8)], ..span }]);
    }
}
