//! What a model takes on a device and beside it, part by part, and the speed that this allows.

use bodkin_backend::{Backend, KvType, Limits, Memory, PAGE_TOKENS};
use bodkin_engine::EngineOptions;
use bodkin_gguf::Format;
use bodkin_model::{Part, Plan};

use crate::backends::backend;
use crate::error::Result;
use crate::memory::{human_bytes, kv_bytes, recurrent_bytes, total_bytes};
use crate::model_file::ModelFile;
use crate::options::Options;
use crate::progress::Reporter;

/// Tokens of a step that needs little scratch.
const SMALL_BATCH: usize = 64;
/// Formats that a model can be quantised to, the largest first.
const FORMATS: [Format; 4] = [Format::Q8_0, Format::Q6_K, Format::Q5_K, Format::Q4_K];

/// Where the bytes of a model go.
#[derive(Clone, Debug, PartialEq)]
pub struct Placement {
    /// Tokens of context, of each of the requests that run at the same time.
    pub context: usize,
    /// Those requests.
    pub parallel: usize,
    /// The bytes of each part in the file; parts without weights are missing.
    pub parts: Vec<(Part, u64)>,
    /// Bytes of the KV cache for each window of attention, none for all positions.
    pub kv: Vec<(Option<usize>, u64)>,
    /// Bytes of recurrent state.
    pub recurrent_bytes: u64,
    /// What is allocated.
    pub memory: Memory,
    /// Bytes that the model may take.
    pub available_bytes: u64,
    /// Bytes of the host that experts may take.
    pub host_available_bytes: u64,
    /// Where not all experts have a place on the device, what fits there.
    pub expert_slots: Option<ExpertSlots>,
}

/// The slots for experts of each layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertSlots {
    /// Slots of a layer.
    pub slots: usize,
    /// Experts of a layer.
    pub experts: usize,
    /// Layers with experts.
    pub layers: usize,
}

impl Placement {
    /// The placement of a model that is planned for `sizes`.
    pub(crate) fn new(file: &ModelFile, sizes: &EngineOptions, backend: &dyn Backend) -> Placement {
        let plan = &file.plan;
        let limits = sizes.limits(plan);
        let memory = file.memory(backend, &limits);
        let of_parts = plan.parts();
        let bytes = |part: Part| {
            let weights = plan.weights.iter().zip(&of_parts).filter(|(_, of)| **of == part);
            weights.map(|(weight, _)| weight.bytes).sum::<u64>()
        };
        let parts = Part::ALL.into_iter().map(|part| (part, bytes(part)));
        Placement {
            context: sizes.context,
            parallel: sizes.parallel,
            parts: parts.filter(|(_, bytes)| *bytes > 0).collect(),
            kv: kv_by_window(plan, backend, &limits),
            recurrent_bytes: recurrent_bytes(plan, backend) * limits.state_slots as u64,
            memory,
            available_bytes: file.available_memory(backend),
            host_available_bytes: bodkin_cpu::available_memory().unwrap_or(u64::MAX),
            expert_slots: expert_slots(plan, &memory),
        }
    }

    /// Whether the model can be loaded.
    pub fn fits(&self) -> bool {
        total_bytes(&self.memory) <= self.available_bytes
            && self.memory.host_expert_bytes <= self.host_available_bytes
    }

    /// Bytes of a part in the file.
    pub fn part(&self, part: Part) -> u64 {
        self.parts.iter().find(|(other, _)| *other == part).map_or(0, |(_, bytes)| *bytes)
    }

    /// The bytes that weights take more on the device than in the file, without experts that have
    /// no slots, or less.
    pub fn packing(&self) -> i64 {
        let file: u64 = self.parts.iter().map(|(_, bytes)| bytes).sum();
        let (file, cached) = match self.expert_slots {
            Some(_) => (file - self.part(Part::Experts), self.memory.cached_expert_bytes),
            None => (file, 0),
        };
        (self.memory.weight_bytes - cached) as i64 - file as i64
    }

    /// What one token reads with `tokens` tokens before it: bytes on the device, and of the host if
    /// this share of chosen experts has slots.
    pub fn bytes_per_token(
        &self,
        plan: &Plan,
        backend: &dyn Backend,
        tokens: usize,
        hit_rate: f64,
    ) -> (u64, u64) {
        let cost = plan.cost();
        let state = kv_bytes(plan, backend, tokens) + recurrent_bytes(plan, backend);
        let missed = match self.expert_slots {
            Some(_) => ((1.0 - hit_rate) * cost.step_expert_bytes as f64) as u64,
            None => 0,
        };
        (cost.step_weight_bytes.saturating_sub(missed) + state, missed)
    }
}

/// Bytes of the KV cache of the slots with each window.
fn kv_by_window(plan: &Plan, backend: &dyn Backend, limits: &Limits) -> Vec<(Option<usize>, u64)> {
    let bytes = |pages: Vec<usize>| {
        backend.memory(plan, &Limits { tokens: 1, outputs: 1, pages, state_slots: 0 }).state_bytes
    };
    let windows = plan.windows();
    let one = bytes(vec![1; windows.len()]);
    let of_window = |(i, window): (usize, Option<usize>)| {
        let pages = (0..windows.len()).map(|j| 1 + usize::from(i == j)).collect();
        (window, (bytes(pages) - one) * limits.pages[i] as u64)
    };
    windows.iter().copied().enumerate().map(of_window).collect()
}

fn expert_slots(plan: &Plan, memory: &Memory) -> Option<ExpertSlots> {
    let slots = memory.expert_slots?;
    let experts = plan.routings().map(|routing| routing.experts);
    Some(ExpertSlots { slots, experts: experts.max()?, layers: plan.routed_layers().len() })
}

impl ModelFile {
    /// Where the bytes of this model would go with these options. Plans the model for its context.
    ///
    /// # Errors
    /// If an option is out of range, or the file has no plan for the context.
    pub fn placement(&mut self, options: &Options, backend: &dyn Backend) -> Result<Placement> {
        let sizes = self.engine_options(options, backend)?;
        Ok(Placement::new(self, &sizes, backend))
    }

    /// What would let a model fit that does not: flags or a format, and the bytes with them.
    ///
    /// # Errors
    /// As [`ModelFile::placement`].
    pub fn alternatives(
        &self,
        options: &Options,
        opened: &dyn Backend,
        placement: &Placement,
    ) -> Result<Vec<String>> {
        let mut found = Vec::new();
        let mut add = |flags: &str, backend: &dyn Backend, options: &Options| -> Result<()> {
            let longest = self.longest_context(options, backend, placement.context)?;
            if let Some((tokens, bytes)) = longest {
                found.push(format!("{flags}--ctx-size {tokens}: {}", human_bytes(bytes)));
            }
            Ok(())
        };
        add("", opened, options)?;
        if options.parallel > 1 {
            add("--parallel 1 ", opened, &Options { parallel: 1, ..options.clone() })?;
        }
        if options.step_tokens()? > SMALL_BATCH {
            add(
                &format!("--batch-size {SMALL_BATCH} "),
                opened,
                &Options { batch_size: Some(SMALL_BATCH), ..options.clone() },
            )?;
        }
        if options.kv_type != KvType::Q8_0 && !self.plan.slots.is_empty() {
            let options = Options { kv_type: KvType::Q8_0, ..options.clone() };
            add("--kv-type q8_0 ", backend(&options, &Reporter::default())?.as_ref(), &options)?;
        }
        found.extend(self.smaller_format(placement));
        Ok(found)
    }

    /// The longest context that fits with these options, halved from `most` until it does, and the
    /// bytes of all.
    fn longest_context(
        &self,
        options: &Options,
        backend: &dyn Backend,
        most: usize,
    ) -> Result<Option<(usize, u64)>> {
        let mut file = self.clone().with_reporter(&Reporter::default());
        let mut context = most;
        while context >= PAGE_TOKENS {
            let sized = Options { ctx_size: Some(context), ..options.clone() };
            let placement = file.placement(&sized, backend)?;
            if placement.fits() {
                return Ok(Some((context, total_bytes(&placement.memory))));
            }
            context /= 2;
        }
        Ok(None)
    }

    /// The largest format whose weights would fit, if a smaller one than the model's does.
    fn smaller_format(&self, placement: &Placement) -> Option<String> {
        let Memory { weight_bytes, state_bytes, scratch_bytes, .. } = placement.memory;
        let left = placement.available_bytes.saturating_sub(state_bytes + scratch_bytes);
        let parameters = self.plan.cost().parameters as f64;
        let bytes = |format: &Format| {
            let block = format.block_bytes().unwrap_or(0) as f64;
            (parameters * block / format.block_elements() as f64) as u64
        };
        let smaller = FORMATS.iter().find(|format| {
            let bytes = bytes(format);
            bytes < weight_bytes && bytes <= left
        })?;
        let (name, bytes) = (smaller.name(), human_bytes(bytes(smaller)));
        Some(format!("weights in {name}: about {bytes} instead of {}", human_bytes(weight_bytes)))
    }
}
