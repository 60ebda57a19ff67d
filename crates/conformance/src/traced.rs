//! The timeline of traced steps: recording it changes no bit, and its intervals lie within the
//! steps and apart on each track.

use std::time::{Duration, Instant};

use bodkin_backend::{Activity, Backend, Interval, Model, Result};

use super::case::Case;
use super::compare::bits;
use super::prompt::{Feeding, run_prompt};

/// How far the clocks of host and device may be apart.
const APART: Duration = Duration::from_millis(1);

pub(super) fn check(
    backend: &dyn Backend,
    case: &Case,
    model: &mut dyn Model,
    failures: &mut Vec<String>,
) -> Result<()> {
    let mut fail = |what: &str| failures.push(format!("{}: traced: {what}", case.name));
    let wanted = run_prompt(model, case, Feeding::Whole)?;
    model.set_tracing(true)?;
    let start = Instant::now();
    let found = run_prompt(model, case, Feeding::Whole)?;
    let end = Instant::now();
    let timeline = model.stats().timeline;
    model.set_tracing(false)?;
    if !bits(&found).eq(bits(&wanted)) {
        fail("other bits");
    }
    let is_inside = |interval: &Interval| {
        interval.start + APART >= start
            && interval.start <= interval.end
            && interval.end <= end + APART
    };
    if !timeline.iter().all(is_inside) {
        fail("an interval outside of its step");
    }
    let is_apart =
        |pair: &[Interval]| pair[0].track != pair[1].track || pair[0].end <= pair[1].start + APART;
    if !timeline.windows(2).all(is_apart) {
        fail("intervals of one track overlap");
    }
    let computes = timeline.iter().any(|interval| interval.activity == Activity::Compute);
    if !computes && backend.name() != "reference" {
        fail("nothing is computed");
    }
    if !model.stats().timeline.is_empty() {
        fail("a timeline without tracing");
    }
    Ok(())
}
