//! The weights of a plan: how they are packed, and their buffers.

use std::sync::Arc;

use bodkin_backend::{Progress, Result};
use bodkin_gguf::File;
use bodkin_model::{Op, Plan, Weight, WeightId};

use crate::expert_cache::{ExpertCache, ExpertCaches};
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
    /// All rows. Those of cached experts are in memory of the host.
    pub(crate) parts: Vec<Part>,
    /// Of cached experts, the slots on the device.
    pub(crate) slots: Vec<Part>,
}

impl Matrix {
    /// The layout of a weight, in parts of whole experts, if it has any, that a binding takes.
    fn new(plan: &Plan, id: WeightId, experts: Option<usize>, most_bytes: u64) -> Matrix {
        let weight = plan.weight(id);
        let Packing { layout, codebook, .. } = Packing::of(weight.format);
        let unit = experts.map_or(1, |experts| weight.rows / experts);
        let (weights, cols) = (vec![id], weight.cols);
        let mut matrix =
            Matrix { layout, weights, cols, codebook, parts: Vec::new(), slots: Vec::new() };
        matrix.parts = matrix.divided(weight.rows, unit, most_bytes);
        matrix
    }

    /// Weights of the same layout, one below the other.
    fn stacked(plan: &Plan, weights: Vec<WeightId>) -> Matrix {
        let (first, rows) =
            (plan.weight(weights[0]), weights.iter().map(|&id| plan.weight(id).rows));
        let Packing { layout, codebook, .. } = Packing::of(first.format);
        let parts = vec![Part { first_row: 0, rows: rows.sum() }];
        Matrix { layout, weights, cols: first.cols, codebook, parts, slots: Vec::new() }
    }

    /// With slots for its experts.
    fn cached(mut self, plan: &Plan, cache: ExpertCache, most_bytes: u64) -> Matrix {
        let unit = plan.weight(self.weights[0]).rows / cache.experts;
        let rows = self.weights.len() * cache.slots * unit;
        self.slots = self.divided(rows, unit, most_bytes);
        self
    }

    /// Rows in parts of a multiple of `unit` rows that a binding takes.
    fn divided(&self, rows: usize, unit: usize, most_bytes: u64) -> Vec<Part> {
        let row_bytes = 4 * self.layout.row_words(self.groups());
        let most = (most_bytes as usize / row_bytes / unit).max(1) * unit;
        let part = |first_row| Part { first_row, rows: most.min(rows - first_row) };
        (0..rows).step_by(most).map(part).collect()
    }

    /// How many matrices are stacked.
    pub(crate) fn stacked_count(&self) -> usize {
        self.weights.len()
    }

    /// Whether each row has a multiple of 32 columns, and so no padding.
    pub(crate) fn is_aligned(&self) -> bool {
        self.cols.is_multiple_of(GROUP_COLS)
    }

    /// Groups of a row.
    pub(crate) fn groups(&self) -> usize {
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

    fn bytes(&self) -> WeightBytes {
        let of = |parts: &[Part]| parts.iter().map(|&part| 4 * self.words(part) as u64).sum();
        let (all, slots) = (of(&self.parts), of(&self.slots));
        match self.slots.is_empty() {
            true => WeightBytes { device: all, slots: 0, host: 0 },
            false => WeightBytes { device: slots, slots, host: all },
        }
    }

    /// The words of a part at which its scales and its factors begin.
    pub(crate) fn sections_at(&self, part: Part) -> [usize; 2] {
        let scales_at = part.rows * self.groups() * self.layout.group_words();
        [scales_at, self.words(part) - part.rows]
    }

    /// The parameters of `weight_params.wgsl`.
    pub(crate) fn params(&self, part: Part) -> Vec<u32> {
        let Part { first_row, rows } = part;
        let [scales_at, factors_at] = self.sections_at(part);
        let numbers = [self.groups(), scales_at, factors_at, self.cols, rows, first_row, 0, 0];
        [numbers.map(|x| x as u32).to_vec(), self.codebook.to_vec()].concat()
    }
}

/// The bytes of weights as they are stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct WeightBytes {
    /// On the device.
    pub(crate) device: u64,
    /// Of them, the slots of cached experts.
    pub(crate) slots: u64,
    /// Of cached experts, in memory of the host.
    pub(crate) host: u64,
}

/// The buffers of a weight.
#[derive(Default)]
pub(crate) struct WeightBuffers {
    pub(crate) parts: Vec<wgpu::Buffer>,
    pub(crate) slots: Vec<wgpu::Buffer>,
    /// In single precision.
    pub(crate) vector: Option<wgpu::Buffer>,
}

/// How each weight of the plan is stored as a matrix; none for those that are only vectors, and
/// those that are stacked below another.
pub(crate) fn matrices(
    plan: &Plan,
    stacks: &[Vec<WeightId>],
    caches: &ExpertCaches,
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
    let cached = |(id, matrix): (usize, Option<Matrix>)| {
        let (matrix, cache) = (matrix?, caches.of_weight(WeightId(id)));
        Some(match cache {
            Some(cache) => matrix.cached(plan, cache, most_bytes),
            None => matrix,
        })
    };
    matrices.into_iter().enumerate().map(cached).collect()
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
                let bytes = 4 * words.len() as u64;
                let buffer = match matrix.slots.is_empty() {
                    true => gpu.buffer(&weight.name, bytes)?,
                    false => gpu.host_buffer(&weight.name, bytes)?,
                };
                gpu.queue.write_buffer(&buffer, 0, bytemuck::cast_slice(&words));
                buffers.parts.push(buffer);
            }
            for &part in &matrix.slots {
                buffers.slots.push(gpu.buffer(&weight.name, 4 * matrix.words(part) as u64)?);
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
pub(crate) fn bytes(
    plan: &Plan,
    stacks: &[Vec<WeightId>],
    caches: &ExpertCaches,
    most_bytes: u64,
) -> WeightBytes {
    let mut sum = WeightBytes::default();
    for bytes in matrices(plan, stacks, caches, most_bytes).iter().flatten().map(Matrix::bytes) {
        sum.device += bytes.device;
        sum.slots += bytes.slots;
        sum.host += bytes.host;
    }
    let vectors = vectors(plan);
    let read = plan.weights.iter().zip(vectors).filter(|(_, is_vector)| *is_vector);
    sum.device += read.map(|(w, _)| 4 * (w.rows * w.cols) as u64).sum::<u64>();
    sum
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
