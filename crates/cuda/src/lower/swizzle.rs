//! Matmul inputs that can be stored in the order in which `gemm_wgmma` copies them to shared
//! memory.

use bodkin_model::{Plan, Rows};

use super::stage::{Content, Epilogue, Halves, Matmul, Program, Stage, Value, Work};
use crate::constants::CHUNK_COLS;
use crate::packed::PackedLayout;

/// Marks the values that are swizzled in steps of many rows: those of whole chunks that stages make
/// whose kernels can do that, and that only matmuls without experts read.
pub(super) fn mark(plan: &Plan, program: &mut Program) {
    for v in 0..program.values.len() {
        let spec = &program.values[v];
        let Content::Halves(Halves { parts: 1, cols }) = spec.content else { continue };
        let is_whole = cols.is_multiple_of(CHUNK_COLS) && spec.rows == Rows::Tokens;
        let uses = program.uses(Value(v));
        let all_can = uses.iter().all(|&i| can_swizzle(plan, &program.stages[i], Value(v)));
        program.values[v].can_swizzle = is_whole && spec.view.is_none() && all_can;
    }
}

/// Whether a stage can store a swizzled value, or read it.
fn can_swizzle(plan: &Plan, stage: &Stage, value: Value) -> bool {
    let can = match &stage.work {
        Work::Norm(norm) => norm.half_out == Some(value),
        Work::Attend(attend) => attend.half_out == Some(value),
        Work::Elementwise { half_out, .. } => *half_out == Some(value),
        Work::Scan(scan) => scan.half_out == Some(value),
        Work::Matmul(matmul) if matmul.experts.is_some() || matmul.is_outputs => false,
        Work::Matmul(matmul) if matmul.input == value => is_wgmma(plan, matmul),
        Work::Matmul(matmul) => matches!(matmul.epilogue, Epilogue::Gate { .. }),
        _ => false,
    };
    can && stage.rows == Rows::Tokens
}

fn is_wgmma(plan: &Plan, matmul: &Matmul) -> bool {
    let layouts = matmul.operands.iter().map(|o| PackedLayout::of(plan.weight(o.weight).format));
    layouts.into_iter().all(PackedLayout::has_wgmma)
}
