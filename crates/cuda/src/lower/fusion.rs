//! Stages that only the persistent kernel fuses: a norm with all matmuls that read it, and experts'
//! matmuls with the weighted sum of their results, and with the residual where that follows.

use bodkin_model::{NormKind, Plan};

use super::program::{Fusion, MatmulFusion, Program};
use super::stage::{Epilogue, Function, InputNorm, Matmul, Norm, Operand, Stage, Value, Work};
use crate::constants::INLINED_COLS;
use crate::packed::PackedLayout;

/// The longest rows whose norm matmuls with f32 weights compute: a row of weights, the input and
/// the norm's weights have to fit in shared memory.
const MAX_F32_COLS: usize = 4800;

/// How the persistent kernel runs each stage of a program.
pub(super) fn fusions(plan: &Plan, program: &Program) -> Vec<Fusion> {
    let mut fusions = vec![Fusion::Runs(MatmulFusion::None); program.stages.len()];
    for (i, stage) in program.stages.iter().enumerate() {
        if let Some((added, out)) = summed(program, i) {
            fusions[i] = Fusion::Runs(MatmulFusion::Sum { added, out });
            fusions[i + 1..=i + 1 + usize::from(added.is_some())].fill(Fusion::FusedAway);
        }
        let Work::Norm(norm) = &stage.work else { continue };
        let &Norm { input, weight: Some(weight), eps, .. } = norm else { continue };
        let readers = if norm.is_inlined { Vec::new() } else { readers(plan, program, i, norm) };
        if norm.is_inlined || !readers.is_empty() {
            fusions[i] = Fusion::FusedAway;
        }
        for reader in readers {
            fusions[reader] = Fusion::Runs(MatmulFusion::Norm(InputNorm { input, weight, eps }));
        }
    }
    fusions
}

/// If the results of the experts' matmul `i` are only summed: the value to which the next stage
/// adds the sum, if nothing else reads the sum, and the result.
fn summed(program: &Program, i: usize) -> Option<(Option<Value>, Value)> {
    let [matmul, sum] = program.stages.get(i..i + 2)? else { return None };
    let Work::Matmul(Matmul { operands, epilogue: Epilogue::None, experts: Some(experts), .. }) =
        &matmul.work
    else {
        return None;
    };
    let [Operand { out: Some(made), .. }] = operands[..] else { return None };
    let Work::ExpertSum { input, route, out: sum } = sum.work else { return None };
    let uses = |value| program.uses(value).len();
    if input != made || experts.route != Some(route) || uses(made) != 2 {
        return None;
    }
    let is_sum = |value| value == sum && uses(sum) == 2;
    match program.stages.get(i + 2).map(|stage| &stage.work) {
        Some(&Work::Elementwise {
            function: Function::Add,
            a,
            b: Some(b),
            out: Some(out),
            half_out: None,
        }) if is_sum(a) || is_sum(b) => Some((Some(if is_sum(a) { b } else { a }), out)),
        _ => Some((None, sum)),
    }
}

/// The readers of the norm of stage `i`, if all are matmuls that can compute it; else none.
fn readers(plan: &Plan, program: &Program, i: usize, norm: &Norm) -> Vec<usize> {
    let &Norm {
        input,
        kind: NormKind::Rms,
        bias: None,
        groups: 1,
        gate: None,
        residual: None,
        out,
        half_out,
        ..
    } = norm
    else {
        return Vec::new();
    };
    let width = program.values[input.0].content.stride();
    let uses = [out, half_out].into_iter().flatten().flat_map(|value| program.uses(value));
    let readers: Vec<usize> = uses.filter(|&reader| reader != i).collect();
    let can = |stage: &Stage| match &stage.work {
        Work::Matmul(matmul) => {
            let format = plan.weight(matmul.operands[0].weight).format;
            let is_f32 = PackedLayout::of(format) == PackedLayout::F32;
            // All experts of a row read the same input.
            let shares = matmul.experts.is_none_or(|experts| experts.shares_input && !is_f32);
            let is_input = [out, half_out].contains(&Some(matmul.input));
            let is_added =
                matches!(matmul.epilogue, Epilogue::Add { residual, .. } if out == Some(residual));
            let fits = !is_f32 || width <= MAX_F32_COLS;
            shares && !matmul.gathers_outputs && is_input && !is_added && fits
        }
        _ => false,
    };
    // The persistent kernel requires that the last stage alone reads its input.
    let last = program.stages.len() - 1;
    let all_can = readers.iter().all(|&reader| reader < last && can(&program.stages[reader]));
    let fits = INLINED_COLS.contains(&width) && width.is_multiple_of(4);
    if fits && all_can { readers } else { Vec::new() }
}

#[cfg(test)]
mod tests {
    use bodkin_model::Op;

    use super::super::{lower, plan_of};
    use super::*;

    /// A model with experts, as if its rows were `width` long.
    fn plan(width: usize) -> Plan {
        let mut plan = plan_of("qwen3moe-q4_k_m");
        let own = plan.widths[0];
        let sizes = plan.weights.iter_mut().flat_map(|w| [&mut w.cols, &mut w.rows]);
        sizes.chain(&mut plan.widths).filter(|size| **size == own).for_each(|size| *size = width);
        plan
    }

    /// The names of the stages that compute the norms of their inputs.
    fn normed(plan: &Plan) -> Vec<String> {
        let program = lower(plan, true, 1);
        let stages = program.stages.iter().zip(&program.fusions);
        let normed =
            stages.filter(|(_, fusion)| matches!(fusion, Fusion::Runs(MatmulFusion::Norm(_))));
        normed.map(|(stage, _)| stage.name.clone()).collect()
    }

    #[test]
    fn routers_and_experts_compute_the_norm_of_their_input() {
        let plan = plan(512);
        let layers = plan.layers();
        let names = normed(&plan);
        assert_eq!(names.len(), 2 * layers, "{names:?}");
        for layer in names.chunks(2) {
            assert_eq!(layer, ["ffn_gate_inp", "ffn_gate_exps + ffn_up_exps"]);
        }
        let program = lower(&plan, true, 1);
        let norms = program.stages.iter().zip(&program.fusions).filter(|(stage, fusion)| {
            matches!(stage.work, Work::Norm(_)) && **fusion == Fusion::FusedAway
        });
        // With those before attention and the head.
        assert_eq!(norms.count(), 2 * layers + 1);
    }

    #[test]
    fn norms_of_short_rows_and_those_with_other_readers_are_stages() {
        assert_eq!(normed(&plan(256)), [""; 0]);
        let mut plan = plan(512);
        // The sum of experts is added to the normed row, not to what it was made of.
        for i in 0..plan.ops.len() {
            if let Op::ExpertSum { .. } = plan.ops[i] {
                let norm = (0..i).rev().find(|&j| is_long_norm(&plan, j)).unwrap();
                let sum = bodkin_model::Value(i);
                plan.ops[i + 1] = Op::Add { a: bodkin_model::Value(norm), b: sum };
            }
        }
        assert_eq!(normed(&plan), [""; 0]);
    }

    #[test]
    fn a_norm_that_is_added_to_something_is_a_stage() {
        let mut plan = plan(512);
        let is_residual = |plan: &Plan, i: usize| match plan.ops[i] {
            Op::Add { b, .. } => matches!(plan.ops[b.0], Op::Linear { .. }),
            _ => false,
        };
        let i = (0..plan.ops.len()).find(|&i| is_residual(&plan, i)).unwrap();
        let norm = (0..i).rev().find(|&j| is_long_norm(&plan, j)).unwrap();
        if let Op::Add { a, .. } = &mut plan.ops[i] {
            *a = bodkin_model::Value(norm);
        }
        let program = lower(&plan, true, 1);
        let has_added = |stage: &Stage| match &stage.work {
            Work::Matmul(Matmul { epilogue: Epilogue::Add { residual, .. }, .. }) => {
                Some(*residual)
            }
            _ => None,
        };
        let added = program.stages.iter().find_map(has_added).unwrap();
        let is_maker = |stage: &Stage| match stage.work {
            Work::Norm(Norm { out, .. }) => out == Some(added),
            _ => false,
        };
        let maker = program.stages.iter().position(is_maker).unwrap();
        assert_eq!(program.fusions[maker], Fusion::Runs(MatmulFusion::None));
        assert_eq!(normed(&plan).iter().filter(|name| name.contains("attn")).count(), 0);
    }

    fn is_long_norm(plan: &Plan, i: usize) -> bool {
        matches!(plan.ops[i], Op::Norm { groups: 1, .. }) && plan.widths[i] == 512
    }
}
