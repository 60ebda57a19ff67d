//! From a Plan to stages. A kernel's start costs about as much as reading five megabytes, so few
//! stages are faster; and what only matmuls read is stored in half precision. The rewrites, none of
//! which changes a bit:
//!
//! - `siblings`: matmuls with the same input run as one stage;
//! - `gates`: two matmuls, one of which gates the other, store only the gated result;
//! - `residuals`: a matmul whose result is only added to a value adds it in its epilogue;
//! - `rotations`: attention rotates queries and keys;
//! - `norms`: matmuls of a single row normalise it themselves;
//! - `halves`: norms, attention and gates store the inputs of matmuls themselves.
//!
//! The persistent kernel fuses more (`fusion`). For several devices, all-gathers follow sharded
//! matmuls (`shard`).

mod attention;
mod fusion;
mod halves;
mod lowering;
mod matmul;
mod matrices;
mod program;
mod shard;
mod sparse;
mod stage;
mod swizzle;
mod value;

use bodkin_model::{Plan, Rows};

use lowering::Lowering;
pub(crate) use matrices::{matrix_of, shapes};
pub(crate) use program::{Fusion, MatmulFusion, Program};
pub(crate) use shard::sharded;
pub(crate) use stage::{
    Attend, Content, Conv, DeltaRuleStage, Epilogue, F16Rows, Function, Gate, Gather, SliceConcat,
};
pub(crate) use stage::{
    AttendEntries, CompressStage, HyperWeights, Mix, RouteChosen, SelectStage, Sparse,
};
pub(crate) use stage::{Experts, InputNorm, Matmul, Norm, Operand, Rotate};
pub(crate) use stage::{Route, ScanStage, Stage, Value, Work};

/// Turns a plan into stages for `devices` devices, which all run the same. Without `fuse`, each
/// operation is a stage of its own.
pub(crate) fn lower(plan: &Plan, fuse: bool, devices: usize) -> Program {
    let sharded = sharded(plan, devices);
    let mut lowering = Lowering::new(plan, fuse, &sharded);
    let mut next = 0;
    while next < plan.ops.len() {
        next = lowering.op(next);
    }
    let output = lowering.output();
    let angles = |rope| Stage::new(Rows::Tokens, Work::Angles { rope }, "angles");
    let mut stages: Vec<Stage> = (0..lowering.ropes.len()).map(angles).collect();
    stages.extend(lowering.stages);
    let input = stages.iter().find_map(|stage| match stage.work {
        Work::Input { out } => Some(out),
        _ => None,
    });
    let (values, ropes, routings) = (lowering.values, lowering.ropes, lowering.routings);
    let fusions = Vec::new();
    let are_connected = false;
    let mut program =
        Program { stages, values, output, input, ropes, routings, fusions, devices, are_connected };
    program.fusions = fusion::fusions(plan, &program);
    shard::add_gathers(&mut program, &sharded);
    swizzle::mark(plan, &mut program);
    program
}

/// The plan of a model that tests have.
#[cfg(test)]
pub(crate) fn plan_of(model: &str) -> Plan {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/parity/models");
    let file = bodkin_model::open(format!("{folder}/{model}.gguf")).unwrap();
    bodkin_model::plan(file.metadata(), file.tensors()).unwrap()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stages(model: &str, fuse: bool) -> Vec<String> {
        lower(&plan_of(model), fuse, 1).stages.into_iter().map(|stage| stage.name).collect()
    }

    #[test]
    fn a_layer_is_seven_stages() {
        let names = stages("llama-q4_0", true);
        assert_eq!(names[..2], ["angles", "embed"]);
        let layer = [
            "norm",
            "attn_q + attn_k + attn_v",
            "attention",
            "attn_output",
            "norm",
            "ffn_gate + ffn_up",
            "ffn_down",
        ];
        assert_eq!(names[2..9], layer);
        assert_eq!(names[9..16], layer);
    }

    #[test]
    fn without_rewrites_each_operation_is_a_stage() {
        let names = stages("llama-q4_0", false);
        for name in ["attn_q", "rope", "attention", "convert input", "glu", "add"] {
            assert!(names.iter().any(|other| other == name), "no {name} in {names:?}");
        }
    }

    #[test]
    fn experts_are_chosen_and_summed() {
        let names = stages("mixtral", true);
        for name in ["route", "ffn_up_exps", "ffn_gate_exps", "ffn_down_exps", "expert_sum"] {
            assert!(names.iter().any(|other| other == name), "no {name} in {names:?}");
        }
    }
}
