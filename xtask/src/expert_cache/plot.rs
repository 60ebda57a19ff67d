//! The plot of hits against the share of experts that have a slot.

use std::fmt::Write;

use anyhow::Result;
use bodkin_eval::{Outcome, Policy};

use crate::svg::{self, label};

const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 420.0;
const MARGIN: f64 = 55.0;
/// The policies that are drawn, with their colours.
const SERIES: [(Policy, &str); 5] = [
    (Policy::Belady, "#9a9a9a"),
    (Policy::Lrfu(0.8), "#d62728"),
    (Policy::Lru, "#1f77b4"),
    (Policy::Lfu, "#2ca02c"),
    (Policy::Static, "#9467bd"),
];

/// A line for each policy, over the budgets in percent, from 0 to 100 % both ways.
pub(super) fn image<const N: usize>(
    budgets: &[usize; N],
    lines: &[(Policy, [Outcome; N])],
) -> Result<String> {
    let x = |percent: f64| MARGIN + percent / 100.0 * (WIDTH - 2.0 * MARGIN);
    let y = |percent: f64| HEIGHT - MARGIN - percent / 100.0 * (HEIGHT - 2.0 * MARGIN);
    let mut svg = svg::start(WIDTH, HEIGHT);
    for percent in (0..=100).step_by(20).map(f64::from) {
        let (at_x, at_y) = (x(percent), y(percent));
        let (top, right) = (y(100.0), x(100.0));
        writeln!(svg, "<path d=\"M{at_x:.1} {top}V{}\" stroke=\"#ddd\"/>", y(0.0))?;
        writeln!(svg, "<path d=\"M{MARGIN} {at_y:.1}H{right}\" stroke=\"#ddd\"/>")?;
        label(&mut svg, (at_x, y(0.0) + 16.0), "middle", &format!("{percent}"))?;
        label(&mut svg, (MARGIN - 6.0, at_y + 4.0), "end", &format!("{percent}"))?;
    }
    label(&mut svg, (WIDTH / 2.0, HEIGHT - 18.0), "middle", "slots, % of a layer's experts")?;
    label(&mut svg, (MARGIN, MARGIN - 14.0), "start", "hits, % of the experts that tokens choose")?;
    for (i, (policy, colour)) in SERIES.iter().enumerate() {
        let Some((_, outcomes)) = lines.iter().find(|(other, _)| other == policy) else { continue };
        let points = budgets.iter().zip(outcomes);
        let points = points.map(|(&budget, outcome)| [x(budget as f64), y(outcome.hits_percent())]);
        let points: Vec<String> = points.map(|[x, y]| format!("{x:.1},{y:.1}")).collect();
        writeln!(
            svg,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>",
            points.join(" ")
        )?;
        let (left, at) = (x(64.0), y(34.0 - 6.0 * i as f64));
        writeln!(svg, "<path d=\"M{left} {at}h22\" stroke=\"{colour}\" stroke-width=\"2\"/>")?;
        label(&mut svg, (left + 28.0, at + 4.0), "start", &policy.name())?;
    }
    svg.push_str("</svg>\n");
    Ok(svg)
}
