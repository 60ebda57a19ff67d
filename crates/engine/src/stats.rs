//! What an engine can tell about itself while it runs.

use bodkin_backend::ExpertStats;

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
    pub experts: Vec<ExpertStats>,
}
