//! The plan of every architecture and feature as text, and what holds for all of them.
//! `cargo xtask golden` rewrites the texts.

#![allow(clippy::unwrap_used)]

mod rules;

use std::collections::BTreeSet;
use std::path::Path;

use bodkin_model::{Op, Plan, Rows, Value, architectures, plan, plan_for};

/// The name of each golden text, which is that of its model, and its content.
fn texts() -> impl Iterator<Item = (String, String)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    rules::models().into_iter().map(move |name| {
        let text = std::fs::read_to_string(folder.join(&name).with_extension("txt")).unwrap();
        (name, text)
    })
}

fn plan_of(name: &str) -> Plan {
    let file = rules::open(name);
    plan(file.metadata(), file.tensors()).unwrap()
}

fn plans() -> impl Iterator<Item = (String, Plan)> {
    rules::models().into_iter().map(|name| (name.clone(), plan_of(&name)))
}

#[test]
fn plans_are_as_written_down() {
    for (name, wanted) in texts() {
        let found = plan_of(&name).to_string();
        let lines = found.lines().zip(wanted.lines());
        let different = lines.enumerate().find(|(_, (found, wanted))| found != wanted);
        if let Some((line, (found, wanted))) = different {
            panic!(
                "{name}.txt:{}:\n  wanted {wanted}\n  found  {found}\n\
                 `cargo xtask golden` rewrites the texts, if this is meant",
                line + 1
            );
        }
        assert_eq!(found.lines().count(), wanted.lines().count(), "lines of {name}");
    }
}

#[test]
fn every_architecture_has_a_golden_text() {
    let found: Vec<String> = plans().map(|(_, plan)| plan.architecture).collect();
    for name in architectures() {
        assert!(found.iter().any(|found| found == name), "no golden text for {name}");
    }
}

/// The table of models has every architecture, and none that is unknown; nor has the README.
#[test]
fn documents_name_the_architectures() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let named = |document: &str| -> BTreeSet<String> {
        let text = std::fs::read_to_string(root.join(document)).unwrap();
        let table = text.split("`general.architecture` |\n").nth(1).unwrap();
        let rows = table.lines().take_while(|line| line.starts_with('|'));
        let cells = rows.map(|row| row.rsplit('|').nth(1).unwrap());
        cells.flat_map(|cell| cell.split('`').skip(1).step_by(2)).map(str::to_owned).collect()
    };
    let known: BTreeSet<String> = architectures().map(str::to_owned).collect();
    assert_eq!(named("docs/models.md"), known);
    let short = named("README.md");
    assert!(!short.is_empty() && short.is_subset(&known), "{short:?}");
}

#[test]
fn plans_keep_the_rules() {
    plans().for_each(|(_, plan)| rules::check(&plan));
}

/// Of some tensors a file holds one for short contexts and one for long ones. Blocks for
/// multi-token prediction, behind all layers, take no part.
#[test]
fn all_tensors_are_used() {
    for (name, plan) in plans() {
        let file = rules::open(&name);
        let short = plan_for(file.metadata(), file.tensors(), 1).unwrap();
        let behind = format!("blk.{}.", plan.layers());
        for tensor in file.tensors().iter().filter(|tensor| !tensor.name.starts_with(&behind)) {
            let mut weights = plan.weights.iter().chain(&short.weights);
            let used = weights.any(|weight| weight.name == tensor.name);
            let for_nothing = name == "gemma3n" && is_of_unused_kv(&tensor.name);
            assert!(used != for_nothing, "{name}: the plan leaves {} unused", tensor.name);
        }
    }
}

/// Files of Gemma 3n have projections of keys and values also for its last layers, which attend to
/// those of earlier ones.
fn is_of_unused_kv(tensor: &str) -> bool {
    let last = ["blk.20.", "blk.21."].iter().find_map(|layer| tensor.strip_prefix(layer));
    matches!(last, Some("attn_k.weight" | "attn_k_norm.weight" | "attn_v.weight"))
}

#[test]
fn buffers_are_never_shared_by_living_values() {
    for (name, plan) in plans() {
        let buffers = plan.buffers();
        let last = plan.last_uses();
        for (i, op) in plan.ops.iter().enumerate() {
            assert_eq!(buffers.of_value[i].is_none(), plan.rows(Value(i)) == Rows::Outputs);
            let Some(buffer) = buffers.of_value[i] else { continue };
            assert!(buffers.widths[buffer] >= plan.widths[i], "{name}: %{i} fits");
            for other in (0..i).filter(|&other| buffers.of_value[other] == Some(buffer)) {
                let updates = op.in_place_input() == Some(Value(other)) && last[other] == i;
                let dead = last[other] < i;
                assert!(updates || dead, "{name}: %{i} overwrites %{other}, which is still read");
            }
        }
        let alone: usize = plan.widths.iter().sum();
        assert!(buffers.bytes(3) < 4 * 3 * alone as u64 / 2, "{name}: buffers are reused");
    }
}

#[test]
fn last_uses_are_the_last() {
    for (_, plan) in plans() {
        let last = plan.last_uses();
        for value in (0..plan.ops.len()).map(Value) {
            let reads = |op: &Op| op.inputs().any(|input| input == value);
            let found = plan.ops.iter().rposition(reads);
            let wanted = if value == plan.output() { plan.ops.len() } else { found.unwrap() };
            assert_eq!(last[value.0], wanted);
        }
    }
}
