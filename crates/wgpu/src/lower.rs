//! The plan as dispatches: a few for each operation. This file must not know the device.

mod attention;
mod expert_cache;
mod experts;
mod matmul;
mod rows;
mod stages;
mod state;
mod values;

use std::ops::RangeInclusive;

use bodkin_backend::{Error, Limits, Result};
use bodkin_model::{Op, Plan, Rope, Value, WeightId};

pub(crate) use attention::all_split_elements;
pub(crate) use expert_cache::FILL_WORDS;
pub(crate) use experts::{EXPERT_ROWS, result_rows, tile_words};
pub(crate) use matmul::{GEMV_TOKENS, byte_row_vectors, gemv_shape, half_row_quads, weight_tile};
pub(crate) use stages::{Stage, stacks, stages};

use crate::expert_cache::ExpertCaches;
use crate::program::{
    Arithmetic, BufferId, Depth, Dispatch, ExpertTiles, Grid, Kernel, KvDtype, List, Program,
    ValueBuffer,
};
use crate::weights::Matrix;
use stages::Kind;

/// Threads of a workgroup that has an element each.
const THREADS: usize = 64;

/// Parts of a row of logits, as in `argmax_reduce.wgsl`.
pub(crate) const ARGMAX_PARTS: usize = 64;
/// The most workgroups in the first dimension.
const MAX_ROWS: usize = 65_535;

/// What the lowering of an operation needs to know.
pub(crate) struct Lowering<'a> {
    plan: &'a Plan,
    limits: &'a Limits,
    matrices: &'a [Option<Matrix>],
    kv_dtypes: &'a [KvDtype],
    arithmetic: Arithmetic,
    window_indices: Vec<usize>,
    program: Program,
    /// The value whose rows the buffer of bytes has, and the vectors of four columns in its chunks.
    bytes: Option<(Value, usize)>,
    /// The value whose rows the buffer of halves has, the rows of a token, and their list.
    halves: Option<(Value, usize, List)>,
    /// The route by which the buffer of tiles has the experts of rows, and their tiles.
    permutation: Option<(Option<Value>, ExpertTiles)>,
    /// The first operation of the stage, and the last one, whose result is the stage's.
    first: usize,
    op: usize,
}

/// Lowers the stages of a plan whose matrices are packed as `matrices` say.
///
/// # Errors
/// If an operation is larger than its kernel takes.
pub(crate) fn lower(
    plan: &Plan,
    stages: &[Stage],
    limits: &Limits,
    (matrices, caches): (&[Option<Matrix>], ExpertCaches),
    kv_dtypes: &[KvDtype],
    arithmetic: Arithmetic,
) -> Result<Program> {
    // A dispatch counts rows in its first dimension.
    at_most("rows of a step", limits.tokens.max(limits.outputs), MAX_ROWS)?;
    let (values, buffer_of) = values::buffers(plan, stages);
    let (dispatches, ropes, counts) = (Vec::new(), Vec::new(), 0);
    let program = Program { dispatches, values, buffer_of, ropes, counts, caches };
    let window_indices = plan.window_indices();
    let mut lowering = Lowering {
        plan,
        limits,
        matrices,
        kv_dtypes,
        arithmetic,
        window_indices,
        program,
        bytes: None,
        halves: None,
        permutation: None,
        first: 0,
        op: 0,
    };
    for stage in stages {
        (lowering.first, lowering.op) = (stage.ops.start, stage.ops.end - 1);
        match stage.kind {
            Kind::Alone => lowering.lower_op()?,
            Kind::Gated { act, .. }
                if matches!(plan.ops[stage.ops.start], Op::ExpertLinear { .. }) =>
            {
                lowering.gated_experts(stage, act)?;
            }
            Kind::Siblings | Kind::Gated { .. } | Kind::Residual { .. } => {
                lowering.fused_matmuls(stage);
            }
            Kind::Summed { to } => lowering.expert_sum(Some(to)),
            Kind::Rotated => lowering.rotated_attention(stage)?,
        }
    }
    // Of the plan's output, whatever it is: only steps that ask for tokens run it.
    (lowering.first, lowering.op) = (plan.ops.len(), plan.ops.len() - 1);
    let (buffers, params) = (vec![lowering.out(), BufferId::Parts], vec![lowering.width() as u32]);
    lowering.push(Kernel::ArgmaxPart, buffers, params, ARGMAX_PARTS, Depth::Outputs);
    let buffers = vec![BufferId::Parts, BufferId::Tokens];
    lowering.push(Kernel::Argmax, buffers, Vec::new(), 1, Depth::Outputs);
    Ok(lowering.program)
}

/// The buffers of the plan's values.
pub(crate) fn value_buffers(plan: &Plan, stages: &[Stage]) -> Vec<ValueBuffer> {
    values::buffers(plan, stages).0
}

/// An operation that is too large for its kernel.
fn at_most(what: &str, found: usize, most: usize) -> Result<()> {
    match found <= most {
        true => Ok(()),
        false => Err(Error::Unsupported {
            backend: "wgpu".to_owned(),
            what: format!("{what} {found} (at most {most})"),
        }),
    }
}

impl Lowering<'_> {
    fn lower_op(&mut self) -> Result<()> {
        match &self.plan.ops[self.op] {
            // The host writes the rows.
            Op::Input => Ok(()),
            Op::Embed { .. }
            | Op::Norm { .. }
            | Op::Rope { .. }
            | Op::Rescale { .. }
            | Op::Cutoff { .. }
            | Op::HyperWeights { .. }
            | Op::Pool { .. } => self.rows(),
            Op::Linear { .. } | Op::Logits { .. } => {
                self.matmul();
                Ok(())
            }
            Op::ExpertLinear { .. } => self.expert_matmul(),
            Op::Route { .. } => self.route(),
            Op::Attention { .. } | Op::Select { .. } => self.attention(),
            Op::Conv { .. } | Op::Compress { .. } | Op::Scan { .. } | Op::DeltaRule { .. } => {
                self.recurrent()
            }
            Op::Act { .. }
            | Op::Glu { .. }
            | Op::Add { .. }
            | Op::Scale { .. }
            | Op::ScaleBy { .. }
            | Op::Softcap { .. }
            | Op::Clamp { .. }
            | Op::Slice { .. }
            | Op::Concat { .. }
            | Op::Mix { .. }
            | Op::ScaleExperts { .. } => {
                self.elementwise();
                Ok(())
            }
            Op::ExpertSum { .. } => {
                self.expert_sum(None);
                Ok(())
            }
        }
    }

    fn push(
        &mut self,
        kernel: Kernel,
        buffers: Vec<BufferId>,
        params: Vec<u32>,
        groups: usize,
        depth: Depth,
    ) {
        self.push_for(0..=usize::MAX, kernel, buffers, params, Grid { groups, depth });
    }

    /// A dispatch for some lengths of the list of its grid.
    fn push_for(
        &mut self,
        lens: RangeInclusive<usize>,
        kernel: Kernel,
        buffers: Vec<BufferId>,
        params: Vec<u32>,
        grid: Grid,
    ) {
        let dispatch = Dispatch { kernel, buffers, params, grid, lens, op: self.first };
        self.program.dispatches.push(dispatch);
    }

    /// The buffer of a value.
    fn value(&self, value: Value) -> BufferId {
        BufferId::Value(self.buffer_of(value))
    }

    fn buffer_of(&self, value: Value) -> usize {
        self.program.buffer_of[value.0].expect("a value that is read is stored")
    }

    /// The buffer of the operation's result.
    fn out(&self) -> BufferId {
        self.value(Value(self.op))
    }

    /// Columns of the operation's result.
    fn width(&self) -> usize {
        self.plan.widths[self.op]
    }

    /// Rows of the operation's result.
    fn depth(&self) -> Depth {
        match self.program.values[self.buffer_of(Value(self.op))].is_output {
            true => Depth::Outputs,
            false => Depth::Tokens,
        }
    }

    /// The number of a rope among the distinct ones.
    fn rope_index(&mut self, rope: &Rope) -> usize {
        let ropes = &mut self.program.ropes;
        ropes.iter().position(|r| r == rope).unwrap_or_else(|| {
            ropes.push(*rope);
            ropes.len() - 1
        })
    }
}

/// The buffer of a vector that an operation may lack.
fn vector(weight: Option<WeightId>) -> BufferId {
    weight.map_or(BufferId::None, BufferId::Vector)
}
