//! Matmuls, with the operations that run with them.

use bodkin_model::fusion::linear;
use bodkin_model::{Op, Plan, Value, WeightId};

use super::rows::activation;
use super::stages::{Kind, Stage};
use super::{Lowering, vector};
use crate::layout::{GROUP_COLS, Layout, Packing};
use crate::program::{BufferId, Depth, Dispatch, Epilogue, Grid, Inputs, Kernel, List, Matmul};
use crate::weights::Matrix;

/// Rows of a weight that a workgroup of the GEMV computes for several rows of the step.
pub(crate) const GEMV_ROWS: usize = 4;
/// Rows of the step that a workgroup of the GEMV computes, if there are several.
const GEMV_TOKENS: usize = 4;
/// Rows and columns of the GEMM's tiles.
const SMALL_TILE: usize = 64;
const LARGE_TILE: usize = 128;
/// Large tiles that keep a GPU busy; where there are fewer, small ones run.
const ENOUGH_TILES: usize = 128;

/// The kernel for a list of rows, and the one for lists up to a length.
type Kernels = (Kernel, Grid, (usize, Kernel, Grid));

/// A matmul, or several as one.
struct Fused {
    input: Value,
    /// The weight, or the first of those that are stacked.
    weight: WeightId,
    bias: BufferId,
    addend: Option<Value>,
    epilogue: Epilogue,
    outs: Vec<Value>,
    /// The numbers of an activation.
    act: [u32; 5],
    lists: [List; 2],
}

impl Lowering<'_> {
    pub(super) fn matrix(&self, weight: WeightId) -> Matrix {
        self.matrices[weight.0].clone().expect("a weight of a matmul is packed")
    }

    /// A matmul of its own.
    pub(super) fn matmul(&mut self) {
        let (input, weight, bias, lists) = match self.plan.ops[self.op] {
            Op::Linear { input, weight, bias } => {
                (input, weight, bias, [List::Decode, List::Prefill])
            }
            Op::Logits { input, weight, bias } => {
                (input, weight, bias, [List::DecodeOutputs, List::PrefillOutputs])
            }
            Op::ExpertLinear { .. } => return self.expert_matmul(),
            ref op => unreachable!("{op:?} multiplies with no matrix"),
        };
        let (bias, outs) = (vector(bias), vec![Value(self.op)]);
        let (addend, epilogue, act) = (None, Epilogue::One, [0; 5]);
        self.linear(&Fused { input, weight, bias, addend, epilogue, outs, act, lists });
    }

    /// Matmuls that run as one, or with what follows.
    pub(super) fn fused_matmuls(&mut self, stage: &Stage) {
        let first = stage.ops.start;
        let (weights, mut act, mut addend) = (stage.stacked(self.plan), [0; 5], None);
        let epilogue = match stage.kind {
            Kind::Gated { act: function, .. } => {
                act = activation(function);
                Epilogue::Gate
            }
            Kind::Residual { to } => {
                addend = Some(to);
                Epilogue::One
            }
            Kind::Siblings => Epilogue::Three,
            Kind::Alone | Kind::Rotated => unreachable!("{stage:?} has no matmul"),
        };
        let Op::Linear { input, weight, bias } = self.plan.ops[first] else {
            unreachable!("{stage:?} begins with a matmul")
        };
        let bias_of = |id: &WeightId| {
            let of = |i: usize| linear(self.plan, i).filter(|(weight, _)| weight == id);
            stage.ops.clone().find_map(of).and_then(|(_, bias)| bias)
        };
        let bias = match bias {
            Some(_) if weights.len() > 1 => {
                BufferId::Concatenated(weights.iter().filter_map(bias_of).collect())
            }
            bias => vector(bias),
        };
        let weight = weights.first().copied().unwrap_or(weight);
        let outs = stage.results().map(Value).collect();
        let lists = [List::Decode, List::Prefill];
        self.linear(&Fused { input, weight, bias, addend, epilogue, outs, act, lists });
    }

    /// A matmul of the rows of two lists: of generated text, and of prompts.
    fn linear(&mut self, fused: &Fused) {
        let matrix = self.matrix(fused.weight);
        let input_width = self.plan.width(fused.input);
        let inputs = inputs(&matrix, input_width);
        let kernel = Matmul { layout: matrix.layout, inputs, epilogue: fused.epilogue };
        let addend = fused.addend.map_or(BufferId::None, |value| self.value(value));
        let flags = [fused.bias != BufferId::None, fused.addend.is_some()].map(u32::from);
        let width = |i: usize| fused.outs.get(i).map_or(0, |&out| self.plan.width(out) as u32);
        let kernels: [fn(Matmul, usize, List) -> Kernels; 2] = [gemv, gemm];
        let lists = || fused.lists.into_iter().zip(kernels);
        for ((list, of), part) in lists().flat_map(|l| (0..matrix.parts.len()).map(move |p| (l, p)))
        {
            let weight = BufferId::Matrix(fused.weight, part);
            let mut buffers =
                vec![weight, self.value(fused.input), fused.bias.clone(), addend.clone()];
            buffers.extend(fused.outs.iter().map(|&out| self.value(out)));
            // A third result that is not there is never written.
            if fused.epilogue == Epilogue::Three {
                buffers.resize(7, BufferId::NoResult);
            }
            let own = [input_width as u32, list as u32];
            let widths = [0, 1, 2].map(width);
            let params = [&matrix.params(part)[..], &own, &flags, &widths, &fused.act].concat();
            let rows = matrix.parts[part].rows;
            let is_prompt = matches!(list, List::Prefill | List::PrefillOutputs);
            let mut kernel = kernel;
            if is_prompt && self.cooperative && matrix.layout.fits_halves() {
                if part == 0 {
                    let buffers = vec![BufferId::Halves, self.value(fused.input)];
                    let params = [&matrix.params(part)[..], &own].concat();
                    self.push(Kernel::Halves(inputs), buffers, params, 1, Depth::List(list, 1));
                }
                kernel.inputs = Inputs::Halves;
                buffers[1] = BufferId::Halves;
            }
            let (kernel, grid, short) = of(kernel, rows, list);
            let (short, op) = (Some(short), self.first);
            self.program.dispatches.push(Dispatch { kernel, buffers, params, grid, short, op });
        }
    }

    fn expert_matmul(&mut self) {
        let Op::ExpertLinear { input, route, weight, bias, experts } = self.plan.ops[self.op]
        else {
            unreachable!("only experts are lowered here")
        };
        let matrix = self.matrix(weight);
        let expert_rows = self.plan.weight(weight).rows / experts;
        let used = route.map_or(experts, |route| self.plan.width(route) / 2);
        let own = [self.plan.width(input), expert_rows, used].map(|x| x as u32);
        let flags = [route.is_some(), bias.is_some()].map(u32::from);
        let tiles = used * expert_rows.div_ceil(GEMV_ROWS);
        let kernel = Kernel::Experts(matrix.layout, inputs(&matrix, self.plan.width(input)));
        for part in 0..matrix.parts.len() {
            let params = [&matrix.params(part)[..], &own, &flags].concat();
            let buffers = vec![
                BufferId::Matrix(weight, part),
                self.value(input),
                vector(bias),
                self.out(),
                route.map_or(BufferId::None, |route| self.value(route)),
            ];
            self.push(kernel, buffers, params, tiles, Depth::Tokens);
        }
    }
}

/// Vectors of four of the widest input row in half precision.
pub(crate) fn half_row_quads(plan: &Plan) -> usize {
    let quads = |op: &Op| match *op {
        Op::Linear { weight, .. } | Op::Logits { weight, .. } => {
            let weight = plan.weight(weight);
            let fits = Packing::of(weight.format).layout.fits_halves();
            // One more holds the exponent of the row.
            if fits { weight.cols.next_multiple_of(GROUP_COLS) / 4 + 1 } else { 0 }
        }
        _ => 0,
    };
    plan.ops.iter().map(quads).max().unwrap_or(0)
}

/// How input rows of a width lie.
fn inputs(matrix: &Matrix, width: usize) -> Inputs {
    let is_aligned = matrix.is_aligned() && width.is_multiple_of(4);
    if is_aligned { Inputs::Aligned } else { Inputs::Padded }
}

/// Threads of a workgroup of the GEMV, and rows of a weight that it computes for one row of the
/// step: those that were fastest on an H100. Where a chunk has 16 columns, not 32, a row has twice
/// the chunks.
pub(crate) fn gemv_shape(layout: Layout) -> (usize, usize) {
    if layout.chunk_quads() == 4 { (128, 4) } else { (64, 8) }
}

/// The matmul of a list of rows of generated text: one row has a kernel of its own.
fn gemv(matmul: Matmul, rows: usize, list: List) -> Kernels {
    let of = |tokens: usize| {
        let rows_at_once = if tokens == 1 { gemv_shape(matmul.layout).1 } else { GEMV_ROWS };
        let (groups, depth) = (rows.div_ceil(rows_at_once), Depth::List(list, tokens));
        (Kernel::Gemv(matmul, tokens), Grid { groups, depth })
    };
    let (kernel, grid) = of(GEMV_TOKENS);
    let (one, one_grid) = of(1);
    (kernel, grid, (1, one, one_grid))
}

/// The matmul of a list of rows of prompts.
fn gemm(matmul: Matmul, rows: usize, list: List) -> Kernels {
    let of = |tile: usize| {
        let (groups, depth) = (rows.div_ceil(tile), Depth::List(list, tile));
        (Kernel::Gemm(matmul, tile), Grid { groups, depth })
    };
    let (kernel, grid) = of(LARGE_TILE);
    let (small, small_grid) = of(SMALL_TILE);
    let most = (ENOUGH_TILES - 1) / grid.groups.max(1) * LARGE_TILE;
    (kernel, grid, (most.max(SMALL_TILE), small, small_grid))
}
