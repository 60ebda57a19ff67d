//! Tensor parallelism. Each device holds some rows, which are outputs, of matmul weights, and does
//! everything else alike. An all-gather follows each sharded matmul before another stage reads its
//! result. So every value has the same bits on all devices, and on one.

use std::mem;

use bodkin_model::{Op, Plan, WeightId};

use super::matrices::{bias_of, matrix_of};
use super::program::{Fusion, Program};
use super::stage::{Epilogue, Gather, Stage, Value, Work};
use crate::constants::TILE_ROWS;
use crate::packed::PackedLayout;

/// For each weight that is sharded over the devices, the number of matrices whose rows are: those
/// of a single matmul with a tile for each device, and their biases. Tables stay whole, and so do
/// routers in f32, which are small.
pub(crate) fn sharded(plan: &Plan, devices: usize) -> Vec<Option<usize>> {
    let mut sharded = vec![None; plan.weights.len()];
    let mut uses = vec![0; plan.weights.len()];
    plan.ops.iter().flat_map(Op::weights).for_each(|id| uses[id.0] += 1);
    for op in plan.ops.iter().filter(|op| devices > 1 && !matches!(op, Op::Embed { .. })) {
        let Some((id, matrices)) = matrix_of(op) else { continue };
        let weight = plan.weight(id);
        let is_own = op.weights().all(|id| uses[id.0] == 1);
        let has_tiles = weight.rows / matrices >= TILE_ROWS * devices;
        if is_own && has_tiles && PackedLayout::of(weight.format) != PackedLayout::F32 {
            let weights = [Some(id), bias_of(op)].into_iter().flatten();
            weights.for_each(|id| sharded[id.0] = Some(matrices));
        }
    }
    sharded
}

/// Puts an all-gather behind each stage that makes a shard of a value. In the persistent kernel the
/// matmul itself stores its results on all devices.
pub(super) fn add_gathers(program: &mut Program, sharded: &[Option<usize>]) {
    let (stages, fusions) = (mem::take(&mut program.stages), mem::take(&mut program.fusions));
    for (stage, fusion) in stages.into_iter().zip(fusions) {
        let gather = gather(&stage, sharded);
        program.stages.push(stage);
        program.fusions.push(fusion);
        if let Some(gather) = gather {
            program.stages.push(gather);
            program.fusions.push(Fusion::FusedAway);
        }
    }
}

fn gather(stage: &Stage, sharded: &[Option<usize>]) -> Option<Stage> {
    let Work::Matmul(matmul) = &stage.work else { return None };
    let is_sharded = |weight: WeightId| sharded[weight.0].is_some();
    let results: Vec<(Value, WeightId)> = match matmul.epilogue {
        Epilogue::Gate { out, .. } | Epilogue::Act { out, .. } => {
            let weight = matmul.operands[0].weight;
            is_sharded(weight).then_some((out, weight)).into_iter().collect()
        }
        Epilogue::None | Epilogue::Add { .. } => {
            let operands = matmul.operands.iter().filter(|operand| is_sharded(operand.weight));
            operands.filter_map(|operand| Some((operand.out?, operand.weight))).collect()
        }
    };
    let (is_gathered, used) = (!results.is_empty(), matmul.used());
    let are_stored = matmul.operands.iter().all(|operand| is_sharded(operand.weight));
    let work = Work::Gather(Gather { results, used, are_stored });
    is_gathered.then(|| Stage::new(stage.rows, work, "gather"))
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::super::stage::{Content, Matmul, Operand};
    use super::super::{lower, shapes};
    use super::*;
    use crate::packed::Shard;

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

    /// The weights of matmuls, and whether one has experts.
    fn weights(program: &Program) -> impl Iterator<Item = (WeightId, bool)> {
        program.stages.iter().flat_map(|stage| match &stage.work {
            Work::Matmul(Matmul { operands, experts, .. }) => {
                operands.iter().map(|operand| (operand.weight, experts.is_some())).collect()
            }
            _ => Vec::new(),
        })
    }

    #[test]
    fn every_row_belongs_to_one_device_or_to_all() {
        let (mut count, mut expert_count) = (0, 0);
        for (name, plan) in plans() {
            let shapes = shapes(&plan);
            for devices in 1..=3 {
                let sharded = sharded(&plan, devices);
                for (id, has_experts) in weights(&lower(&plan, true, devices)) {
                    let whole = shapes[id.0].unwrap();
                    if sharded[id.0].is_none() {
                        continue;
                    }
                    let mut next = 0;
                    for index in 0..devices {
                        let own = whole.shard(Shard { index, count: devices });
                        let what = format!("{name}, {}: {own:?}", plan.weight(id).name);
                        assert_eq!((own.first_row, own.full_rows), (next, whole.rows), "{what}");
                        assert!(own.rows > 0 && own.first_row.is_multiple_of(TILE_ROWS), "{what}");
                        // The sums of a row have the same split-K slices as on one device.
                        assert_eq!(own.slice_chunks(), whole.slice_chunks());
                        assert_eq!(own.slices(), whole.slices());
                        next += own.rows;
                    }
                    assert_eq!(next, whole.rows, "{name}, {}", plan.weight(id).name);
                    (count, expert_count) = (count + 1, expert_count + usize::from(has_experts));
                }
            }
        }
        assert!(
            count > 100 && expert_count > 10,
            "only {count} weights, {expert_count} of experts"
        );
    }

    #[test]
    fn weights_that_stay_whole_are_tables_or_f32_or_small() {
        for (name, plan) in plans() {
            let sharded = sharded(&plan, 2);
            for (id, _) in weights(&lower(&plan, true, 2)) {
                let (weight, shape) = (plan.weight(id), shapes(&plan)[id.0].unwrap());
                let embeds = |op: &Op| matches!(op, Op::Embed { table, .. } if *table == id);
                let stays = plan.ops.iter().any(embeds)
                    || shape.layout == PackedLayout::F32
                    || shape.rows < 2 * TILE_ROWS;
                assert_eq!(sharded[id.0].is_none(), stays, "{name}: {} {shape:?}", weight.name);
            }
        }
    }

    #[test]
    fn shards_are_gathered_before_other_stages_read_them() {
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
        // Three devices have both kinds.
        let programs = plans().into_iter().map(|(_, plan)| lower(&plan, true, 3));
        let stages: Vec<Stage> = programs.flat_map(|program| program.stages).collect();
        let has = |are_stored: bool| {
            let is_it = |g: &Gather| g.are_stored == are_stored;
            stages.iter().any(|stage| matches!(&stage.work, Work::Gather(g) if is_it(g)))
        };
        assert!(has(true) && has(false), "{} and {}", has(true), has(false));
    }

    /// Tracks the values of which a device has only its own columns through the stages.
    fn check_gathers(name: &str, plan: &Plan, program: &Program) -> usize {
        let shard = Shard { index: 0, count: program.devices };
        let sharded = sharded(plan, program.devices);
        let shapes = shapes(plan);
        let own = |id: WeightId| {
            let whole = shapes[id.0].unwrap();
            if sharded[id.0].is_some() { whole.shard(shard) } else { whole }
        };
        let (mut partial, mut gathers) = (HashSet::new(), 0);
        for stage in &program.stages {
            if let Work::Gather(Gather { results, used, .. }) = &stage.work {
                for (value, weight) in results {
                    assert!(partial.remove(value), "{name}: {value:?} is gathered for nothing");
                    let columns = match program.values[value.0].content {
                        Content::Floats(width) => width / used,
                        Content::F16(halves) => halves.cols,
                    };
                    assert_eq!(own(*weight).full_rows, columns, "{name}: {value:?}");
                    assert_eq!(program.values[value.0].rows, stage.rows, "{name}: {value:?}");
                }
                gathers += 1;
                continue;
            }
            stage.values(&mut |value| {
                assert!(!partial.contains(&value), "{name}: {} reads a shard", stage.name);
            });
            let Work::Matmul(matmul) = &stage.work else { continue };
            let (operands, epilogue) = (&matmul.operands, matmul.epilogue);
            let is_shard = |o: &&Operand| own(o.weight).rows < own(o.weight).full_rows;
            let shards: Vec<_> = operands.iter().filter(is_shard).collect();
            partial.extend(shards.iter().filter_map(|operand| operand.out));
            if let Epilogue::Gate { .. } = epilogue {
                let rows: Vec<_> = operands.iter().map(|o| own(o.weight).rows).collect();
                assert_eq!(rows[0], rows[1], "{name}: rows of a gate and of what it gates");
            }
            if let Epilogue::Gate { out, .. } | Epilogue::Act { out, .. } = epilogue {
                partial.extend((!shards.is_empty()).then_some(out));
            }
        }
        assert!(partial.is_empty(), "{name}: {partial:?} stay shards");
        gathers
    }
}
