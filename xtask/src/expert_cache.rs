//! `cargo xtask expert-cache`: what share of the experts that tokens choose has a slot on a device,
//! by the share of experts that have one and by the policy that decides which. It simulates every
//! layer of a routing trace by itself, as every layer has slots of its own.

mod plot;

use std::fmt::Write;
use std::path::{Path, PathBuf};

use anyhow::Result;
use bodkin_eval::{Outcome, Policy, RoutingTrace};

use crate::expert_trace::{Generated, Locality};
use crate::results;

/// The trace.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// A routing trace, as `bodkin bench --record-routing` writes it. Without it one is generated.
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Rewrite docs/experts.svg and the tables of docs/experts.md.
    #[arg(long)]
    document: bool,
    #[command(flatten)]
    generated: Generated,
}

const DOCUMENT: &str = "docs/experts.md";
const PLOT: &str = "docs/experts.svg";

/// Slots of a layer in percent of its experts.
const BUDGETS: [usize; 7] = [5, 10, 15, 25, 40, 50, 75];
const POLICIES: [Policy; 12] = [
    Policy::Static,
    Policy::Lru,
    Policy::Lfu,
    Policy::Lrfu(0.6),
    Policy::Lrfu(0.7),
    Policy::Lrfu(0.8),
    Policy::Lrfu(0.9),
    Policy::Lrfu(0.95),
    Policy::Lrfu(0.97),
    Policy::Lrfu(0.98),
    Policy::Lrfu(0.99),
    Policy::Belady,
];
/// A policy with its outcome at each budget.
type Line = (Policy, [Outcome; BUDGETS.len()]);

/// Simulates all policies and prints their tables.
pub(crate) fn run(root: &Path, args: &Args) -> Result<()> {
    let trace = match &args.trace {
        Some(path) => RoutingTrace::read(path)?,
        None => args.generated.trace(Path::new("generated"))?,
    };
    let lines: Vec<Line> =
        POLICIES.iter().map(|&policy| (policy, outcomes(policy, &trace))).collect();
    let tables = tables(&trace, &lines)?;
    print!("{tables}");
    if args.document {
        std::fs::write(root.join(PLOT), plot::image(&BUDGETS, &lines)?)?;
        results::replace(&root.join(DOCUMENT), "expert-cache --document", &tables)?;
    }
    Ok(())
}

/// What a policy does at each budget, over all layers.
fn outcomes(policy: Policy, trace: &RoutingTrace) -> [Outcome; BUDGETS.len()] {
    BUDGETS.map(|budget| {
        let slots = (trace.experts() * budget + 50) / 100;
        policy.run_all(trace, slots.max(1))
    })
}

/// The trace's locality, and the tables of hits and of copies.
fn tables(trace: &RoutingTrace, lines: &[Line]) -> Result<String> {
    let (experts, used, layers) = (trace.experts(), trace.used(), trace.layers().len());
    let mut out = format!(
        "{} tokens that choose {used} of {experts} experts in {layers} layers: {}.\n",
        trace.tokens(),
        Locality::of(trace)
    );
    let hits = |outcome: &Outcome| format!("{:.1}", outcome.hits_percent());
    let copies = |outcome: &Outcome| {
        format!("{:.2}", (used * outcome.copies) as f64 / outcome.uses.max(1) as f64)
    };
    table(&mut out, "hits, % of choices", lines, hits)?;
    table(&mut out, "copies per token and layer", lines, copies)?;
    Ok(out)
}

/// A table with a line for each policy and a column for each budget.
fn table(
    out: &mut String,
    title: &str,
    lines: &[Line],
    cell: impl Fn(&Outcome) -> String,
) -> Result<()> {
    let heads: Vec<String> = BUDGETS.iter().map(|budget| format!("{budget} %")).collect();
    writeln!(out, "\n| {title} | {} |", heads.join(" | "))?;
    writeln!(out, "| --- |{}", " ---: |".repeat(BUDGETS.len()))?;
    for (policy, outcomes) in lines {
        let cells: Vec<String> = outcomes.iter().map(&cell).collect();
        writeln!(out, "| {} | {} |", policy.name(), cells.join(" | "))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trace(layers: u16) -> RoutingTrace {
        let (experts, used, first_layer, tokens, seed) = (128, 8, 0, 1024, 3);
        let generated = Generated { experts, used, layers, first_layer, tokens, seed };
        generated.trace(Path::new("generated")).unwrap()
    }

    #[test]
    fn generated_traces_hit_as_published() {
        let trace = trace(4);
        let lru = outcomes(Policy::Lru, &trace).map(|outcome| outcome.hits_percent());
        // 37, 74, and 96 % at 5, 15 and 50 %; 90 to 95 % at 40 %.
        for (i, range) in [(0, 33.0..41.0), (2, 70.0..78.0), (4, 90.0..95.0), (5, 93.0..97.0)] {
            assert!(range.contains(&lru[i]), "{} %: {lru:?}", BUDGETS[i]);
        }
        let best = outcomes(Policy::Belady, &trace).map(|outcome| outcome.hits_percent());
        for policy in POLICIES {
            let found = outcomes(policy, &trace).map(|outcome| outcome.hits_percent());
            assert!(found.iter().zip(best).all(|(found, best)| *found <= best), "{policy:?}");
            assert!(found.is_sorted(), "more slots, more hits: {policy:?} {found:?}");
        }
    }

    #[test]
    fn tables_and_plot_have_all_policies() {
        let trace = trace(1);
        let lines: Vec<Line> =
            POLICIES.iter().map(|&policy| (policy, outcomes(policy, &trace))).collect();
        let tables = tables(&trace, &lines).unwrap();
        let svg = plot::image(&BUDGETS, &lines).unwrap();
        for policy in POLICIES {
            assert_eq!(tables.matches(&format!("| {} |", policy.name())).count(), 2);
        }
        assert!(svg.contains(">LRU<") && svg.ends_with("</svg>\n"));
    }
}
