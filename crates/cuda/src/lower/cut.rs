//! A plan on several devices. Each has some rows, which are outputs, of products' weights, and does
//! everything else alike; what a cut product makes is gathered before anybody reads it. So every
//! value has the same bits on all of them, and on one.

use std::ops::Range;

use bodkin_model::{Op, Plan, WeightId};

use super::{After, Stage, Value, Work, matrix_of};
use crate::planes::{Kind, TILE_ROWS};

/// One of several devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Share {
    pub(crate) number: usize,
    pub(crate) of: usize,
}

impl Share {
    /// What this device has of a cut matrix with so many rows: whole tiles.
    pub(crate) fn rows(self, rows: usize) -> Range<usize> {
        let tiles = rows.div_ceil(TILE_ROWS);
        let begin = |number: usize| (tiles * number / self.of * TILE_ROWS).min(rows);
        begin(self.number)..begin(self.number + 1)
    }
}

/// Which weights are cut over so many devices, and into the rows of how many matrices: those of a
/// single product with a tile for each device, and their biases. Tables stay whole, and so do
/// routers in f32, which are small.
pub(crate) fn cuts(plan: &Plan, devices: usize) -> Vec<Option<usize>> {
    let mut cuts = vec![None; plan.weights.len()];
    let mut uses = vec![0; plan.weights.len()];
    plan.ops.iter().flat_map(Op::weights).for_each(|id| uses[id.0] += 1);
    for op in plan.ops.iter().filter(|_| devices > 1) {
        let bias = match op {
            Op::Linear { bias, .. } | Op::ExpertLinear { bias, .. } | Op::Logits { bias, .. } => {
                *bias
            }
            _ => continue,
        };
        let Some((id, matrices)) = matrix_of(op) else { continue };
        let weight = plan.weight(id);
        let is_own = op.weights().all(|id| uses[id.0] == 1);
        let has_tiles = weight.rows / matrices >= TILE_ROWS * devices;
        if is_own && has_tiles && Kind::of(weight.format) != Kind::F32 {
            [Some(id), bias].into_iter().flatten().for_each(|id| cuts[id.0] = Some(matrices));
        }
    }
    cuts
}

/// Puts a stage that gathers behind each one that makes columns of values.
pub(super) fn with_gathers(stages: Vec<Stage>, cuts: &[Option<usize>]) -> Vec<Stage> {
    let gathered = |stage: Stage| {
        let gather = gather(&stage, cuts);
        [Some(stage), gather].into_iter().flatten()
    };
    stages.into_iter().flat_map(gathered).collect()
}

fn gather(stage: &Stage, cuts: &[Option<usize>]) -> Option<Stage> {
    let Work::Product { factors, after, experts, .. } = &stage.work else { return None };
    let is_cut = |weight: WeightId| cuts[weight.0].is_some();
    let made: Vec<(Value, WeightId)> = match after {
        After::Gate { out, .. } => {
            is_cut(factors[0].weight).then_some((*out, factors[0].weight)).into_iter().collect()
        }
        After::Nothing | After::Add(_) => {
            let cut = factors.iter().filter(|factor| is_cut(factor.weight));
            cut.filter_map(|factor| Some((factor.out?, factor.weight))).collect()
        }
    };
    let used = experts.map_or(1, |e| e.used);
    let is_made = !made.is_empty();
    is_made.then(|| Stage::new(stage.rows, Work::Gather { made, used }, "gather"))
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::super::{Program, lower, shapes};
    use super::*;

    /// The plans of all models that tests have.
    fn plans() -> Vec<(String, Plan)> {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/parity/models");
        let paths = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
        let models = paths.filter(|path| path.extension().is_some_and(|end| end == "gguf"));
        let plans = models.map(|path| {
            let file = bodkin_model::open(&path).unwrap();
            let plan = bodkin_model::plan(file.metadata(), file.tensors()).unwrap();
            (path.file_stem().unwrap().to_string_lossy().into_owned(), plan)
        });
        plans.collect()
    }

    /// The weights of products, and whether one has experts.
    fn factors(program: &Program) -> impl Iterator<Item = (WeightId, bool)> {
        program.stages.iter().flat_map(|stage| match &stage.work {
            Work::Product { factors, experts, .. } => {
                factors.iter().map(|factor| (factor.weight, experts.is_some())).collect()
            }
            _ => Vec::new(),
        })
    }

    #[test]
    fn every_row_belongs_to_one_device_or_to_all() {
        let (mut cut, mut cut_experts) = (0, 0);
        for (name, plan) in plans() {
            let shapes = shapes(&plan);
            for devices in 1..=3 {
                let cuts = cuts(&plan, devices);
                for (id, has_experts) in factors(&lower(&plan, true, devices)) {
                    let whole = shapes[id.0].unwrap();
                    if cuts[id.0].is_none() {
                        continue;
                    }
                    let mut next = 0;
                    for number in 0..devices {
                        let own = whole.share(Share { number, of: devices });
                        let what = format!("{name}, {}: {own:?}", plan.weight(id).name);
                        assert_eq!((own.first, own.whole), (next, whole.rows), "{what}");
                        assert!(own.rows > 0 && own.first.is_multiple_of(TILE_ROWS), "{what}");
                        // Sums of a row are cut as they are on one device.
                        assert_eq!((own.part(), own.parts()), (whole.part(), whole.parts()));
                        next += own.rows;
                    }
                    assert_eq!(next, whole.rows, "{name}, {}", plan.weight(id).name);
                    (cut, cut_experts) = (cut + 1, cut_experts + usize::from(has_experts));
                }
            }
        }
        assert!(cut > 100 && cut_experts > 10, "only {cut} weights are cut, {cut_experts} experts");
    }

    #[test]
    fn what_is_whole_is_a_table_or_exact_or_small() {
        for (name, plan) in plans() {
            let cuts = cuts(&plan, 2);
            for (id, _) in factors(&lower(&plan, true, 2)) {
                let (weight, shape) = (plan.weight(id), shapes(&plan)[id.0].unwrap());
                let embeds = |op: &Op| matches!(op, Op::Embed { table, .. } if *table == id);
                let stays = plan.ops.iter().any(embeds)
                    || shape.kind == Kind::F32
                    || shape.rows < 2 * TILE_ROWS;
                assert_eq!(cuts[id.0].is_none(), stays, "{name}: {} {shape:?}", weight.name);
            }
        }
    }

    #[test]
    fn columns_are_gathered_before_anybody_reads_them() {
        let mut gathers = 0;
        for (name, plan) in plans() {
            for (fuse, devices) in [(false, 2), (true, 2), (true, 3)] {
                let program = lower(&plan, fuse, devices);
                gathers += check_gathers(&name, &plan, &program);
                let others = program.stages.into_iter().filter(|stage| stage.name != "gather");
                assert_eq!(others.collect::<Vec<_>>(), lower(&plan, fuse, 1).stages, "{name}");
            }
        }
        assert!(gathers > 100, "only {gathers}");
    }

    /// Goes through the stages with the values of which a device has its own columns alone.
    fn check_gathers(name: &str, plan: &Plan, program: &Program) -> usize {
        let share = Share { number: 0, of: program.devices };
        let cuts = cuts(plan, program.devices);
        let shapes = shapes(plan);
        let own = |id: WeightId| {
            let whole = shapes[id.0].unwrap();
            if cuts[id.0].is_some() { whole.share(share) } else { whole }
        };
        let (mut partial, mut gathers) = (HashSet::new(), 0);
        for stage in &program.stages {
            if let Work::Gather { made, used } = &stage.work {
                for (value, weight) in made {
                    assert!(partial.remove(value), "{name}: {value:?} is gathered for nothing");
                    let columns = match program.values[value.0].content {
                        super::super::Content::Floats(width) => width / used,
                        super::super::Content::Halves { cols, .. } => cols,
                    };
                    assert_eq!(own(*weight).whole, columns, "{name}: {value:?}");
                    assert_eq!(program.values[value.0].rows, stage.rows, "{name}: {value:?}");
                }
                gathers += 1;
                continue;
            }
            stage.values(&mut |value| {
                assert!(!partial.contains(&value), "{name}: {} meets columns", stage.name);
            });
            let Work::Product { factors, after, .. } = &stage.work else { continue };
            let parts = factors.iter().filter(|f| own(f.weight).rows < own(f.weight).whole);
            let parts: Vec<_> = parts.collect();
            partial.extend(parts.iter().filter_map(|factor| factor.out));
            if let After::Gate { out, .. } = after {
                let rows: Vec<_> = factors.iter().map(|f| own(f.weight).rows).collect();
                assert_eq!(rows[0], rows[1], "{name}: rows of a gate and of what it gates");
                partial.extend((!parts.is_empty()).then_some(*out));
            }
        }
        assert!(partial.is_empty(), "{name}: {partial:?} stay columns");
        gathers
    }
}
