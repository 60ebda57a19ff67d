//! Matmuls, with the operations that run with them.

use std::ops::RangeInclusive;

use bodkin_model::{Op, Plan, Value, WeightId};

use super::rows::activation;
use super::stages::{Kind, Stage, matmul};
use super::{Lowering, THREADS, vector};
use crate::layout::{GROUP_COLS, Layout, Packing, chunks, word_vectors};
use crate::program::{
    Activations, BufferId, Depth, Epilogue, GemvShape, Grid, Inputs, Kernel, List, Matmul,
};
use crate::weights::Matrix;

/// Rows of the step that a workgroup of the GEMV computes, if there are a few or many.
pub(crate) const GEMV_TOKENS: [usize; 2] = [4, 8];
/// Rows and columns of the GEMM's tiles.
pub(super) const SMALL_TILE: usize = 64;
const LARGE_TILE: usize = 128;
/// Large tiles that keep a GPU busy; where there are fewer, small ones run.
const ENOUGH_TILES: usize = 128;

/// The input rows of a matmul.
#[derive(Clone)]
pub(super) struct Input {
    pub(super) buffer: BufferId,
    pub(super) inputs: Inputs,
    /// From one row to the next: columns, or vectors of four words for bytes.
    pub(super) stride: usize,
}

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
            Kind::Alone | Kind::Rotated | Kind::Summed { .. } => {
                unreachable!("{stage:?} has no matmul")
            }
        };
        let Op::Linear { input, weight, bias } = self.plan.ops[first] else {
            unreachable!("{stage:?} begins with a matmul")
        };
        let bias = match weights.len() {
            0 => vector(bias),
            _ => self.stacked_bias(stage, &weights),
        };
        let weight = weights.first().copied().unwrap_or(weight);
        let outs = stage.results().map(Value).collect();
        let lists = [List::Decode, List::Prefill];
        self.linear(&Fused { input, weight, bias, addend, epilogue, outs, act, lists });
    }

    /// The biases of stacked weights, in their order, if they have any.
    pub(super) fn stacked_bias(&self, stage: &Stage, weights: &[WeightId]) -> BufferId {
        let bias_of = |id: &WeightId| {
            let of = |i: usize| matmul(self.plan, i).filter(|(weight, _)| weight == id);
            stage.ops.clone().find_map(of).and_then(|(_, bias)| bias)
        };
        let biases: Vec<WeightId> = weights.iter().filter_map(bias_of).collect();
        if biases.is_empty() { BufferId::None } else { BufferId::Concatenated(biases) }
    }

    /// A matmul of the rows of two lists: of generated text, and of prompts.
    fn linear(&mut self, fused: &Fused) {
        let matrix = self.matrix(fused.weight);
        for part in 0..matrix.parts.len() {
            self.decode_matmul(fused, &matrix, part);
        }
        for part in 0..matrix.parts.len() {
            self.prompt_matmul(fused, &matrix, part);
        }
    }

    /// Generated text: one row has a kernel of its own. Several rows become bytes first, where the
    /// device multiplies bytes, and one row when it is read.
    fn decode_matmul(&mut self, fused: &Fused, matrix: &Matrix, part: usize) {
        let list = fused.lists[0];
        let plain = self.plain_input(fused.input, matrix);
        let several = self.bytes_input(matrix).unwrap_or_else(|| plain.clone());
        let are_bytes = several.inputs == Inputs::Bytes;
        let is_stored = are_bytes && self.has_bytes(fused.input, matrix);
        let one = if is_stored { several.clone() } else { plain.clone() };
        self.push_gemv(fused, matrix, part, (&one, list, 1, 1..=1));
        if are_bytes && !is_stored && part == 0 {
            let kernel = Kernel::Bytes(plain.inputs, matrix.layout.chunk_quads());
            let chunks = matrix.chunks();
            self.push_input(
                kernel,
                matrix,
                (&plain, BufferId::Bytes, list),
                chunks.div_ceil(THREADS),
                2,
            );
            // What was there is lost with several rows, and nothing new is there with one.
            self.bytes = None;
        }
        let [few, many] = GEMV_TOKENS;
        self.push_gemv(fused, matrix, part, (&several, list, few, 2..=few));
        self.push_gemv(fused, matrix, part, (&several, list, many, few + 1..=usize::MAX));
    }

    fn push_gemv(
        &mut self,
        fused: &Fused,
        matrix: &Matrix,
        part: usize,
        (input, list, tokens, lens): (&Input, List, usize, RangeInclusive<usize>),
    ) {
        let shape = gemv_shape(matrix.layout, tokens);
        let groups = shape.groups(matrix.parts[part].rows);
        let grid = Grid { groups, depth: Depth::List(list, tokens) };
        let kernel = |matmul| Kernel::Gemv(matmul, shape);
        self.push_matmul(fused, (matrix, part), (input, list), kernel, (grid, lens));
    }

    /// Prompts: with cooperative matrices, all rows are turned into halves first.
    fn prompt_matmul(&mut self, fused: &Fused, matrix: &Matrix, part: usize) {
        let (list, rows) = (fused.lists[1], matrix.parts[part].rows);
        let plain = self.plain_input(fused.input, matrix);
        let input = self.prompt_input((fused.input, &plain, 1), matrix, list);
        // A router has few rows, so the GEMM would have too few tiles.
        if self.plan.is_router(fused.weight) && input.inputs != Inputs::Halves {
            let tokens = GEMV_TOKENS[1];
            return self.push_gemv(fused, matrix, part, (&input, list, tokens, 1..=usize::MAX));
        }
        let most = (ENOUGH_TILES - 1) / rows.div_ceil(LARGE_TILE).max(1) * LARGE_TILE;
        let most = most.max(SMALL_TILE);
        for (tile, lens) in [(SMALL_TILE, 1..=most), (LARGE_TILE, most + 1..=usize::MAX)] {
            let grid = Grid { groups: rows.div_ceil(tile), depth: Depth::List(list, tile) };
            let kernel = |matmul| Kernel::Gemm(matmul, tile);
            self.push_matmul(fused, (matrix, part), (&input, list), kernel, (grid, lens));
        }
    }

    /// The input rows of prompts, of which a token has `token_rows`: in half precision, where the
    /// device has cooperative matrices for them.
    pub(super) fn prompt_input(
        &mut self,
        (value, plain, token_rows): (Value, &Input, usize),
        matrix: &Matrix,
        list: List,
    ) -> Input {
        if !self.arithmetic.is_cooperative || !matrix.layout.fits_halves() {
            return plain.clone();
        }
        if self.halves != Some((value, token_rows, list)) {
            self.halves = Some((value, token_rows, list));
            let kernel = Kernel::Halves(plain.inputs);
            self.push_input(kernel, matrix, (plain, BufferId::Halves, list), token_rows, 1);
        }
        Input { buffer: BufferId::Halves, inputs: Inputs::Halves, stride: plain.stride }
    }

    /// A kernel that prepares the input rows of a list of at least `least` rows for a matmul.
    fn push_input(
        &mut self,
        kernel: Kernel,
        matrix: &Matrix,
        (input, to, list): (&Input, BufferId, List),
        groups: usize,
        least: usize,
    ) {
        let params =
            [&matrix.params(matrix.parts[0])[..], &[input.stride as u32, list as u32]].concat();
        let grid = Grid { groups, depth: Depth::List(list, 1) };
        let (buffers, lens) = (vec![to, input.buffer.clone()], least..=usize::MAX);
        self.push_for(lens, kernel, buffers, params, grid);
    }

    fn push_matmul(
        &mut self,
        fused: &Fused,
        (matrix, part): (&Matrix, usize),
        (input, list): (&Input, List),
        kernel: impl Fn(Matmul) -> Kernel,
        (grid, lens): (Grid, RangeInclusive<usize>),
    ) {
        let addend = fused.addend.map_or(BufferId::None, |value| self.value(value));
        let flags = [fused.bias != BufferId::None, fused.addend.is_some()].map(u32::from);
        let width = |i: usize| fused.outs.get(i).map_or(0, |&out| self.plan.width(out) as u32);
        let weight = BufferId::Matrix(fused.weight, part);
        let mut buffers = vec![weight, input.buffer.clone(), fused.bias.clone(), addend];
        buffers.extend(fused.outs.iter().map(|&out| self.value(out)));
        // A third result that is not there is never written.
        if fused.epilogue == Epilogue::Three {
            buffers.resize(7, BufferId::NoResult);
        }
        let own = [input.stride as u32, list as u32];
        let widths = [0, 1, 2].map(width);
        let params =
            [&matrix.params(matrix.parts[part])[..], &own, &flags, &widths, &fused.act].concat();
        let (layout, inputs) = (matrix.layout, input.inputs);
        let kernel = kernel(Matmul { layout, inputs, epilogue: fused.epilogue });
        self.push_for(lens, kernel, buffers, params, grid);
    }

    /// The rows of a value as they are.
    fn plain_input(&self, value: Value, matrix: &Matrix) -> Input {
        self.rows_input(value, self.plan.width(value), matrix)
    }

    /// The rows of `stride` columns of a value, of which a token may have several.
    pub(super) fn rows_input(&self, value: Value, stride: usize, matrix: &Matrix) -> Input {
        let is_aligned = matrix.is_aligned() && stride.is_multiple_of(4);
        let inputs = if is_aligned { Inputs::Aligned } else { Inputs::Padded };
        Input { buffer: self.value(value), inputs, stride }
    }

    /// Rows that are bytes, if the device multiplies those with the matrix.
    fn bytes_input(&self, matrix: &Matrix) -> Option<Input> {
        let stride = byte_vectors(matrix.layout, matrix.chunks());
        let input = Input { buffer: BufferId::Bytes, inputs: Inputs::Bytes, stride };
        self.takes_bytes(matrix.layout).then_some(input)
    }

    fn takes_bytes(&self, layout: Layout) -> bool {
        self.arithmetic.activations == Activations::Bytes && layout.has_scales()
    }

    /// Whether the buffer of bytes has the rows of a value in the chunks of a matrix.
    fn has_bytes(&self, value: Value, matrix: &Matrix) -> bool {
        self.bytes == Some((value, matrix.layout.chunk_quads()))
    }

    /// The vectors of four columns in a chunk of the first matmul that takes the result of this
    /// operation as bytes.
    pub(super) fn byte_chunk_quads(&self) -> Option<usize> {
        let reader = |op: &Op| match *op {
            Op::Linear { input, weight, .. } | Op::Logits { input, weight, .. } => {
                (input.0 == self.op).then_some(weight)
            }
            _ => None,
        };
        let readers = self.plan.ops[self.op + 1..].iter().filter_map(reader);
        let layouts = readers.map(|weight| Packing::of(self.plan.weight(weight).format).layout);
        let mut taken = layouts.filter(|&layout| self.takes_bytes(layout));
        taken.next().map(Layout::chunk_quads)
    }
}

/// Vectors of four halves that one token's input rows take, at most, in any matmul.
pub(crate) fn half_row_quads(plan: &Plan) -> usize {
    let quads = |op: &Op| {
        let (rows, weight) = match *op {
            Op::Linear { weight, .. } | Op::Logits { weight, .. } => (1, plan.weight(weight)),
            Op::ExpertLinear { input, weight, .. } => {
                let weight = plan.weight(weight);
                (plan.width(input) / weight.cols, weight)
            }
            _ => return 0,
        };
        let fits = Packing::of(weight.format).layout.fits_halves();
        // One more holds the exponent of the row.
        if fits { rows * (weight.cols.next_multiple_of(GROUP_COLS) / 4 + 1) } else { 0 }
    };
    plan.ops.iter().map(quads).max().unwrap_or(0)
}

/// Vectors of four words of the widest input row as bytes.
pub(crate) fn byte_row_vectors(plan: &Plan) -> usize {
    let vectors = |op: &Op| match *op {
        Op::Linear { weight, .. } | Op::Logits { weight, .. } => {
            let weight = plan.weight(weight);
            let layout = Packing::of(weight.format).layout;
            let chunks = chunks(weight.cols, layout.chunk_quads());
            if layout.has_scales() { byte_vectors(layout, chunks) } else { 0 }
        }
        _ => 0,
    };
    plan.ops.iter().map(vectors).max().unwrap_or(0)
}

/// Vectors of four words of a row as bytes: those of its chunks, then a scale and a sum of each.
fn byte_vectors(layout: Layout, chunks: usize) -> usize {
    word_vectors(layout.chunk_quads()) * chunks + chunks.div_ceil(2)
}

/// Rows of the weight in a tile of the GEMM that has `tile` rows of a list. An expert has few of
/// those, so with cooperative matrices its tiles have more rows of the weight.
pub(crate) fn weight_tile(m: Matmul, tile: usize) -> usize {
    match (m.epilogue, m.inputs) {
        (Epilogue::Experts | Epilogue::ExpertGate, Inputs::Halves) => LARGE_TILE,
        _ => tile,
    }
}

/// The shape that was fastest on an H100 and an H200 for some rows of the step. Where a chunk has
/// 16 columns, not 32, a row has twice the chunks.
pub(crate) fn gemv_shape(layout: Layout, tokens: usize) -> GemvShape {
    let threads = if layout.chunk_quads() == 4 { 128 } else { 64 };
    match tokens {
        1 => GemvShape { tokens, threads, teams: 1, rows: 512 / threads },
        _ => GemvShape { tokens, threads, teams: 128 / threads, rows: 4 },
    }
}
