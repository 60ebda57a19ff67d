//! The profile of a step: measuring it changes no bit, and it knows the stages of each layer's
//! experts.

use bodkin_backend::{ExpertTimes, Model, Result};

use super::case::Case;
use super::compare::bits;
use super::prompt::{Feeding, run_prompt};

pub(super) fn check(case: &Case, model: &mut dyn Model, failures: &mut Vec<String>) -> Result<()> {
    let mut fail = |what: &str| failures.push(format!("{}: profiled: {what}", case.name));
    let wanted = run_prompt(model, case, Feeding::Whole)?;
    model.set_profiling(true);
    let found = run_prompt(model, case, Feeding::Whole)?;
    let stages = model.stats().stages;
    model.set_profiling(false);
    if !bits(&found).eq(bits(&wanted)) {
        fail("other bits");
    }
    // A backend may measure no times.
    if stages.is_empty() {
        return Ok(());
    }
    let times = ExpertTimes::of_layers(&stages, 1);
    if times.len() != case.plan.routed_layers().len() {
        fail("not one time for each layer with experts");
    }
    let whole: f64 = stages.iter().map(|stage| stage.seconds).sum();
    let parts: f64 = times.iter().map(|layer| layer.routing + layer.experts).sum();
    if !(0.0..=whole).contains(&parts) {
        fail("experts take longer than the step");
    }
    if !model.stats().stages.is_empty() {
        fail("a profile without profiling");
    }
    Ok(())
}
