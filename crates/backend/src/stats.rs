//! Statistics of a loaded model.

use bodkin_gguf::Format;

use crate::timeline::Interval;

/// What a model tells about its work since it was loaded.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ModelStats {
    /// One for each routing of the plan. Empty for a model without experts, and after the device
    /// stopped answering.
    pub experts: Vec<ExpertStats>,
    /// Whether experts stay in the model's file, and memory holds only some of them.
    pub maps_experts: bool,
    /// All stages in their order in a step, each over all steps since profiling began. Empty
    /// without profiling, and for a backend that measures no times.
    pub stages: Vec<StageProfile>,
    /// What happened since tracing began, track by track in order of time. Empty without tracing.
    pub timeline: Vec<Interval>,
    /// The layouts of sparse weights, in the plan's order. Empty where a backend has only one.
    pub weight_layouts: Vec<WeightLayout>,
}

/// How often the experts of a layer were chosen, and how long their matmuls took.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertStats {
    /// The layer's number in the file.
    pub layer: usize,
    /// One count for each expert.
    pub counts: Vec<u64>,
    /// Thread seconds for each expert; empty if the backend measures no times.
    pub seconds: Vec<f64>,
    /// What the cache of the layer's experts did, if not all are in memory of the device.
    pub cache: Option<ExpertCacheStats>,
}

/// What the cache of a layer's experts did since the model was loaded. An expert counts once in
/// each step that chose it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExpertCacheStats {
    /// Experts that have a slot in memory of the device.
    pub slots: usize,
    /// Chosen experts that had one.
    pub hits: u64,
    /// Chosen experts that were read from memory of the host, or on a CPU from the file.
    pub misses: u64,
    /// Experts that were copied to a slot.
    pub fills: u64,
    /// Experts that were read from the file.
    pub reads: u64,
    /// Misses that the layer before had predicted.
    pub predicted: u64,
}

impl ExpertCacheStats {
    /// Adds what a later cache has done, whose slots are those that count.
    #[must_use]
    pub fn and(self, later: ExpertCacheStats) -> ExpertCacheStats {
        ExpertCacheStats {
            slots: later.slots,
            hits: self.hits + later.hits,
            misses: self.misses + later.misses,
            fills: self.fills + later.fills,
            reads: self.reads + later.reads,
            predicted: self.predicted + later.predicted,
        }
    }
}

/// What a stage does in a layer with experts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ExpertPart {
    /// Nothing.
    #[default]
    None,
    /// Scores and chooses experts, or sorts rows by expert.
    Routing,
    /// Multiplies with experts, or sums their outputs.
    Experts,
}

/// The seconds that routing and experts of one layer take in one step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ExpertTimes {
    /// Of the router, the choice of experts, and the permutation of rows.
    pub routing: f64,
    /// Of the experts' matmuls and their sum.
    pub experts: f64,
}

impl ExpertTimes {
    /// The times of each layer with experts, from the profile of `steps` steps.
    pub fn of_layers(stages: &[StageProfile], steps: usize) -> Vec<ExpertTimes> {
        let mut layers: Vec<ExpertTimes> = Vec::new();
        let mut was_routing = false;
        for stage in stages {
            let is_routing = match stage.expert_part {
                ExpertPart::None => continue,
                part => part == ExpertPart::Routing,
            };
            if is_routing && !was_routing {
                layers.push(ExpertTimes::default());
            }
            was_routing = is_routing;
            // Experts that are not chosen, as the heads of latent attention, have no router.
            let Some(layer) = layers.last_mut() else { continue };
            let sum = if is_routing { &mut layer.routing } else { &mut layer.experts };
            *sum += stage.seconds / steps as f64;
        }
        layers
    }
}

/// The time and work of one stage of a step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StageProfile {
    /// The operations or weights, without the layer's number.
    pub name: String,
    /// From the start of the stage until its last thread was done.
    pub seconds: f64,
    /// Bytes of weights that were read at least.
    pub bytes: u64,
    /// Multiplications and additions with weights.
    pub operations: u64,
    /// Its part in a layer with experts.
    pub expert_part: ExpertPart,
}

impl StageProfile {
    /// Adds up stages of the same name, in the order of the first of each.
    pub fn sums(stages: &[StageProfile]) -> Vec<StageProfile> {
        let mut sums: Vec<StageProfile> = Vec::new();
        for stage in stages {
            match sums.iter_mut().find(|sum| sum.name == stage.name) {
                Some(sum) => {
                    sum.seconds += stage.seconds;
                    sum.bytes += stage.bytes;
                    sum.operations += stage.operations;
                }
                None => sums.push(stage.clone()),
            }
        }
        sums
    }
}

/// How a backend stores a weight of a sparse format.
#[derive(Clone, Debug, PartialEq)]
pub struct WeightLayout {
    /// The weight's name in the file.
    pub weight: String,
    /// Its format in the file.
    pub format: Format,
    /// Whether it is stored without its zeros.
    pub sparse: bool,
    /// The measured speedup of the sparse kernel over the dense one, if it was measured.
    pub speedup: Option<f64>,
}
