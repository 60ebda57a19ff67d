//! What an engine can tell about itself while it runs.

use bodkin_backend::Model;
use bodkin_model::{Op, Plan, Value};

/// The state of an engine between two steps.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Stats {
    /// Requests that are being worked on.
    pub running: usize,
    /// Requests that wait for one of those to end.
    pub waiting: usize,
    /// For each window of the plan, the pages that no sequence holds; a finished one holds its
    /// own until they are needed.
    pub free_pages: Vec<usize>,
    /// How often experts were chosen since the model was loaded and what that took, layer by layer.
    pub experts: Vec<ExpertCounts>,
}

/// How often each expert of a layer was chosen, and what that took.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertCounts {
    /// The layer's number in the file.
    pub layer: usize,
    /// One count for each expert.
    pub counts: Vec<u64>,
    /// For each expert the seconds that threads, added up, spent in its products; empty if the
    /// backend takes no times.
    pub seconds: Vec<f64>,
}

/// How often experts were chosen since the model was loaded and what that took, layer by layer;
/// empty for a model without experts.
pub fn expert_counts(model: &dyn Model) -> Vec<ExpertCounts> {
    let seconds = model.expert_seconds().into_iter().chain(std::iter::repeat(Vec::new()));
    let counts = model.expert_counts().into_iter().zip(seconds);
    routed_layers(model.plan())
        .zip(counts)
        .map(|(layer, (counts, seconds))| ExpertCounts { layer, counts, seconds })
        .collect()
}

/// The layer of each routing of the plan, which the names of the experts' weights tell.
fn routed_layers(plan: &Plan) -> impl Iterator<Item = usize> {
    let routes = (0..plan.ops.len()).filter(|&i| matches!(plan.ops[i], Op::Route { .. }));
    routes.enumerate().map(|(i, route)| {
        let layer = plan.ops.iter().find_map(|op| match op {
            Op::ExpertLinear { route: Some(value), weight, .. } if *value == Value(route) => {
                let name = plan.weight(*weight).name.strip_prefix("blk.")?;
                name.split('.').next()?.parse().ok()
            }
            _ => None,
        });
        layer.unwrap_or(i)
    })
}
