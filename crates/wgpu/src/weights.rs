//! The weights of a plan: how they are packed, and their buffers.

use std::sync::Arc;

use bodkin_backend::{Progress, Result};
use bodkin_gguf::File;
use bodkin_model::{Op, Plan, Weight, WeightId};

use crate::gpu::Gpu;
use crate::layout::{GROUP_COLS, Layout, Packing, Sections, chunks};

/// Consecutive rows of a matrix, in a buffer of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    pub(crate) first_row: usize,
    pub(crate) rows: usize,
}

/// How a matrix, or several that are stacked, is stored.
#[derive(Clone, Debug)]
pub(crate) struct Matrix {
    pub(crate) layout: Layout,
    /// The matrices from the top; only one that stands alone can have more than one part.
    weights: Vec<WeightId>,
    cols: usize,
    codebook: [u32; 4],
    pub(crate) parts: Vec<Part>,
}

impl Matrix {
    /// The layout of a weight, in parts of whole experts, if it has any, that a binding takes.
    fn new(plan: &Plan, id: WeightId, experts: Option<usize>, most_bytes: u64) -> Matrix {
        let weight = plan.weight(id);
        let Packing { layout, codebook, .. } = Packing::of(weight.format);
        let row_bytes = 4 * layout.row_words(weight.cols.div_ceil(GROUP_COLS));
        let unit = experts.map_or(1, |experts| weight.rows / experts);
        let most = (most_bytes as usize / row_bytes / unit).max(1) * unit;
        let firsts = (0..weight.rows).step_by(most);
        let part = |first_row| Part { first_row, rows: most.min(weight.rows - first_row) };
        let (weights, parts) = (vec![id], firsts.map(part).collect());
        Matrix { layout, weights, cols: weight.cols, codebook, parts }
    }

    /// Weights of the same layout, one below the other.
    fn stacked(plan: &Plan, weights: Vec<WeightId>) -> Matrix {
        let (first, rows) =
            (plan.weight(weights[0]), weights.iter().map(|&id| plan.weight(id).rows));
        let Packing { layout, codebook, .. } = Packing::of(first.format);
        let parts = vec![Part { first_row: 0, rows: rows.sum() }];
        Matrix { layout, weights, cols: first.cols, codebook, parts }
    }

    /// Whether each row has a multiple of 32 columns, and so no padding.
    pub(crate) fn is_aligned(&self) -> bool {
        self.cols.is_multiple_of(GROUP_COLS)
    }

    fn groups(&self) -> usize {
        self.cols.div_ceil(GROUP_COLS)
    }

    /// Chunks of a row.
    pub(crate) fn chunks(&self) -> usize {
        chunks(self.cols, self.layout.chunk_quads())
    }

    /// Words of a part.
    fn words(&self, part: Part) -> usize {
        part.rows * self.layout.row_words(self.groups())
    }

    /// The bytes of all parts.
    pub(crate) fn bytes(&self) -> u64 {
        self.parts.iter().map(|&part| 4 * self.words(part) as u64).sum()
    }

    /// The parameters of `weight_params.wgsl`.
    pub(crate) fn params(&self, part: usize) -> Vec<u32> {
        let Part { first_row, rows } = self.parts[part];
        let groups = self.groups();
        let scales_at = rows * groups * self.layout.group_words();
        let factors_at = self.words(self.parts[part]) - rows;
        let numbers = [groups, scales_at, factors_at, self.cols, rows, first_row, 0, 0];
        [numbers.map(|x| x as u32).to_vec(), self.codebook.to_vec()].concat()
    }
}

/// The buffers of a weight.
#[derive(Default)]
pub(crate) struct WeightBuffers {
    pub(crate) parts: Vec<wgpu::Buffer>,
    /// In single precision.
    pub(crate) vector: Option<wgpu::Buffer>,
}

/// How each weight of the plan is stored as a matrix; none for those that are only vectors, and
/// those that are stacked below another.
pub(crate) fn matrices(
    plan: &Plan,
    stacks: &[Vec<WeightId>],
    most_bytes: u64,
) -> Vec<Option<Matrix>> {
    let mut matrices = vec![None; plan.weights.len()];
    for op in &plan.ops {
        let (weight, experts) = match *op {
            Op::Embed { table: weight, .. }
            | Op::Linear { weight, .. }
            | Op::Logits { weight, .. } => (weight, None),
            Op::ExpertLinear { weight, experts, .. } => (weight, Some(experts)),
            _ => continue,
        };
        matrices[weight.0] = Some(Matrix::new(plan, weight, experts, most_bytes));
    }
    for weights in stacks {
        weights.iter().for_each(|id| matrices[id.0] = None);
        let first = weights[0].0;
        matrices[first] = Some(Matrix::stacked(plan, weights.clone()));
    }
    matrices
}

/// Whether each weight is read as a vector.
pub(crate) fn vectors(plan: &Plan) -> Vec<bool> {
    let mut vectors = vec![false; plan.weights.len()];
    for op in &plan.ops {
        let matrix = match *op {
            Op::Embed { table: weight, .. }
            | Op::Linear { weight, .. }
            | Op::Logits { weight, .. }
            | Op::ExpertLinear { weight, .. } => Some(weight),
            _ => None,
        };
        op.weights().filter(|&id| Some(id) != matrix).for_each(|id| vectors[id.0] = true);
    }
    vectors
}

/// All values of a weight.
pub(crate) fn values(file: &File, weight: &Weight) -> Vec<f32> {
    let tensor = file.tensor(&weight.name).expect("the plan was made from this file");
    let mut out = vec![0.0; weight.cols * weight.rows];
    weight.format.dequantize(file.data(tensor), &mut out);
    out
}

/// Packs and uploads all weights.
pub(crate) fn load(
    gpu: &Gpu,
    plan: &Plan,
    file: &Arc<File>,
    matrices: &[Option<Matrix>],
    progress: Progress<'_>,
) -> Result<Vec<WeightBuffers>> {
    let total = plan.cost().weight_bytes;
    let vectors = vectors(plan);
    let mut done = 0;
    let mut weights = Vec::with_capacity(plan.weights.len());
    for (id, weight) in plan.weights.iter().enumerate() {
        progress(done, total);
        let mut buffers = WeightBuffers::default();
        if let Some(matrix) = &matrices[id] {
            for &part in &matrix.parts {
                let words = packed(file, plan, matrix, part);
                buffers.parts.push(upload(gpu, &weight.name, &words)?);
            }
        }
        if vectors[id] {
            buffers.vector = Some(upload(gpu, &weight.name, &values(file, weight))?);
        }
        // Uploads are staged in memory until something is submitted.
        gpu.run(None)?;
        weights.push(buffers);
        done += weight.bytes;
    }
    progress(total, total);
    Ok(weights)
}

/// The words of a part, packed by all cores.
fn packed(file: &File, plan: &Plan, matrix: &Matrix, part: Part) -> Vec<u32> {
    let groups = matrix.groups();
    let mut words = vec![0; matrix.words(part)];
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let share = part.rows.div_ceil(threads).max(1);
    let mut rest = Sections::of(&mut words, matrix.layout, part.rows, groups);
    std::thread::scope(|scope| {
        for weight in matrix.weights.iter().map(|&id| plan.weight(id)) {
            let tensor = file.tensor(&weight.name).expect("the plan was made from this file");
            let bytes = file.data(tensor);
            // Of a weight that stands alone, the part's rows.
            let to = weight.rows.min(part.first_row + part.rows);
            for first in (part.first_row..to).step_by(share) {
                let (mut sections, below) =
                    rest.split_at(share.min(to - first), groups, matrix.layout);
                rest = below;
                scope.spawn(move || {
                    let packing = Packing::of(weight.format);
                    let rows = (first, weight.rows);
                    packing.pack(weight.format, bytes, rows, weight.cols, &mut sections);
                });
            }
        }
    });
    words
}

/// A buffer with these values.
pub(crate) fn upload<T: bytemuck::NoUninit>(
    gpu: &Gpu,
    label: &str,
    values: &[T],
) -> Result<wgpu::Buffer> {
    let bytes = bytemuck::cast_slice(values);
    let buffer = gpu.buffer(label, bytes.len() as u64)?;
    gpu.queue.write_buffer(&buffer, 0, bytes);
    Ok(buffer)
}

/// The bytes of all weights as they are stored.
pub(crate) fn bytes(plan: &Plan, stacks: &[Vec<WeightId>], most_bytes: u64) -> u64 {
    let matrices = matrices(plan, stacks, most_bytes);
    let packed: u64 = matrices.iter().flatten().map(Matrix::bytes).sum();
    let vectors = vectors(plan);
    let read = plan.weights.iter().zip(vectors).filter(|(_, is_vector)| *is_vector);
    packed + read.map(|(w, _)| 4 * (w.rows * w.cols) as u64).sum::<u64>()
}

/// Weights in single precision, one after the other.
pub(crate) fn concatenated(
    gpu: &Gpu,
    plan: &Plan,
    file: &File,
    ids: &[WeightId],
) -> Result<wgpu::Buffer> {
    let all: Vec<f32> = ids.iter().flat_map(|&id| values(file, plan.weight(id))).collect();
    upload(gpu, "concatenated weights", &all)
}
