//! Matmul inputs that can be stored in the order in which `gemm_wgmma` copies them to shared
//! memory.

use bodkin_model::{Plan, Rows};

use super::program::Program;
use super::stage::{Content, Epilogue, F16Rows, Matmul, Stage, Value, Work};
use crate::constants::CHUNK_COLS;
use crate::packed::PackedLayout;

/// Marks the values that are swizzled in steps of many rows: those of whole chunks that stages make
/// whose kernels can do that, and that only matmuls without experts read.
pub(super) fn mark(plan: &Plan, program: &mut Program) {
    for v in 0..program.values.len() {
        let shape = &program.values[v];
        let Content::F16(F16Rows { parts: 1, cols }) = shape.content else { continue };
        let is_whole = cols.is_multiple_of(CHUNK_COLS) && shape.rows == Rows::Tokens;
        let uses = program.uses(Value(v));
        let all_can = uses.iter().all(|&i| knows_swizzled(plan, &program.stages[i], Value(v)));
        program.values[v].may_be_swizzled = is_whole && shape.view.is_none() && all_can;
    }
}

/// Whether a stage can store a swizzled value, or read it.
fn knows_swizzled(plan: &Plan, stage: &Stage, value: Value) -> bool {
    let can = match &stage.work {
        Work::Norm(norm) => norm.half_out == Some(value),
        Work::Attend(attend) => attend.half_out == Some(value),
        Work::Elementwise { half_out, .. } => *half_out == Some(value),
        Work::Scan(scan) => scan.half_out == Some(value),
        Work::Matmul(matmul) if matmul.experts.is_some() || matmul.gathers_outputs => false,
        Work::Matmul(matmul) if matmul.input == value => is_wgmma(plan, matmul),
        Work::Matmul(matmul) => {
            matches!(matmul.epilogue, Epilogue::Gate { .. } | Epilogue::Act { .. })
        }
        // Among them all-gathers: `half_at` cannot know at which column a shard begins.
        _ => false,
    };
    can && stage.rows == Rows::Tokens
}

fn is_wgmma(plan: &Plan, matmul: &Matmul) -> bool {
    let layouts = matmul.operands.iter().map(|o| PackedLayout::of(plan.weight(o.weight).format));
    layouts.into_iter().all(PackedLayout::has_wgmma)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::super::{lower, plan_of};
    use super::*;

    /// The names of the stages that read swizzled values.
    fn readers(model: &str, devices: usize) -> BTreeSet<String> {
        let program = lower(&plan_of(model), true, devices);
        let reads = |stage: &&Stage| match &stage.work {
            Work::Matmul(matmul) => program.values[matmul.input.0].may_be_swizzled,
            _ => false,
        };
        program.stages.iter().filter(reads).map(|stage| stage.name.clone()).collect()
    }

    #[test]
    fn inputs_of_matmuls_without_experts_are_swizzled_but_shards_are_not() {
        let layer = ["attn_q + attn_k + attn_v", "attn_output", "ffn_gate + ffn_up", "ffn_down"];
        assert_eq!(readers("llama-q4_0", 1), layer.map(str::to_owned).into());
        assert_eq!(readers("llama-q4_0", 2), layer[..3].iter().map(|&s| s.to_owned()).collect());
        let experts = readers("qwen3moe-q4_k_m", 1);
        assert!(experts.contains("attn_output"), "{experts:?}");
        assert!(!experts.iter().any(|name| name.contains("exps")), "{experts:?}");
        assert_eq!(readers("llama", 1), BTreeSet::new());
    }
}
