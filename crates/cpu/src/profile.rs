//! Where the time of steps goes, by kind of stage.

use bodkin_backend::{ExpertPart, StageProfile};
use bodkin_model::{Plan, Rows};

use crate::expert_permutation::PermutationView;
use crate::program::{Linear, Program, RowOp, Stage};
use crate::weights::LoadedWeight;

/// Stage times since profiling began.
pub(crate) struct Times {
    /// Of each stage.
    pub(crate) seconds: Vec<f64>,
    pub(crate) steps: u64,
    pub(crate) tokens: u64,
    pub(crate) outputs: u64,
    /// Of each sorting, the matrices that had been read when profiling began.
    reads: Vec<u64>,
}

impl Times {
    pub(crate) fn new(program: &Program, permutations: &[PermutationView]) -> Times {
        let seconds = vec![0.0; program.stages.len()];
        // SAFETY: no step is running.
        let reads = permutations.iter().map(|s| unsafe { s.reads() }).collect();
        Times { seconds, steps: 0, tokens: 0, outputs: 0, reads }
    }

    /// The profile of each stage.
    pub(crate) fn stages(
        &self,
        plan: &Plan,
        program: &Program,
        weights: &[LoadedWeight],
        permutations: &[PermutationView],
    ) -> Vec<StageProfile> {
        let mut stages: Vec<StageProfile> = Vec::new();
        for (stage, &seconds) in program.stages.iter().zip(&self.seconds) {
            let name = describe(plan, stage);
            let expert_part = expert_part(plan, program, stage);
            let mut profile =
                StageProfile { name, seconds, expert_part, ..StageProfile::default() };
            if let Stage::Matmul { rows, linears, .. } = stage {
                let tokens = match rows {
                    Rows::Tokens => self.tokens,
                    Rows::Outputs => self.outputs,
                };
                for linear in linears {
                    let matrix = &weights[linear.weight.0].matrices[0];
                    let weight = plan.weight(linear.weight);
                    profile.bytes += self.steps * matrix.bytes() as u64;
                    profile.operations += 2 * tokens * (weight.rows * weight.cols) as u64;
                }
            }
            if let Stage::GroupedGemm { permutation, linears, .. } = stage {
                // SAFETY: no step is running.
                let reads =
                    unsafe { permutations[*permutation].reads() } - self.reads[*permutation];
                let pairs = self.tokens * program.permutations[*permutation].used as u64;
                for linear in linears {
                    let matrix = &weights[linear.weight.0].matrices[0];
                    profile.bytes += reads * matrix.bytes() as u64;
                    profile.operations += 2 * pairs * (matrix.rows() * matrix.cols()) as u64;
                }
            }
            stages.push(profile);
        }
        stages
    }
}

/// The part of a stage in a layer with experts. Experts without a route are not chosen.
fn expert_part(plan: &Plan, program: &Program, stage: &Stage) -> ExpertPart {
    let is_routed = |permutation: usize| program.permutations[permutation].route.is_some();
    match stage {
        Stage::Matmul { linears, .. } if linears.iter().any(|l| plan.is_router(l.weight)) => {
            ExpertPart::Routing
        }
        Stage::Rows { ops, .. } if ops.iter().any(|op| matches!(op, RowOp::Route { .. })) => {
            ExpertPart::Routing
        }
        Stage::Prediction { .. } => ExpertPart::Routing,
        Stage::Permute { permutation } if is_routed(*permutation) => ExpertPart::Routing,
        Stage::GroupedGemm { permutation, .. } if is_routed(*permutation) => ExpertPart::Experts,
        _ => ExpertPart::None,
    }
}

/// The stage's operations, or the names of its weights without the layer.
pub(crate) fn describe(plan: &Plan, stage: &Stage) -> String {
    let name = |linear: &Linear| plan.weight(linear.weight).role();
    match stage {
        Stage::Attention { .. } => "attention".to_owned(),
        Stage::Permute { .. } => "permute by expert".to_owned(),
        Stage::Prediction { .. } => "prediction of experts".to_owned(),
        Stage::GatheredAttention(_) => "gathered attention".to_owned(),
        Stage::Select(_) => "select".to_owned(),
        Stage::Conv { .. } => "conv".to_owned(),
        Stage::Compress(_) => "compress".to_owned(),
        Stage::Scan { .. } => "scan".to_owned(),
        Stage::DeltaRule { .. } => "delta_rule".to_owned(),
        Stage::Matmul { linears, .. } | Stage::GroupedGemm { linears, .. } => {
            linears.iter().map(name).collect::<Vec<_>>().join(" + ")
        }
        Stage::Rows { ops, .. } => ops.iter().map(RowOp::name).collect::<Vec<_>>().join(", "),
    }
}
