//! Weights as the stages read them: matrices packed for the products, tables left in the file,
//! vectors in f32.

use std::collections::HashMap;
use std::sync::Arc;

use bodkin_backend::{Progress, WeightLayout};
use bodkin_gguf::{File, Format, Tensor};
use bodkin_model::{Op, Plan, Weight, WeightId};

use crate::linear::{
    ActivationFormat, PackedLayout, PackedWeight, SourceRows, float_layout, has_columns,
    pack_columns,
};
use crate::pool::Pool;
use crate::recurrent::transposed;
use crate::trial::{self, pack_dense, pack_sparse};
use crate::{Cpu, Sparse};

/// One weight, in every form that the plan needs.
#[derive(Default)]
pub(crate) struct Prepared {
    /// For products: one, or one for each expert.
    pub(crate) matrices: Vec<PackedWeight>,
    /// For everything else, in f32.
    pub(crate) vector: Option<Vec<f32>>,
}

/// How the plan uses a weight.
#[derive(Clone, Copy, Default)]
pub(crate) struct Uses {
    /// In products: the number of matrices that lie one after the other.
    pub(crate) matrices: usize,
    pub(crate) vector: bool,
    /// The taps of a convolution, if it is the weight of one.
    taps: usize,
}

/// How the plan uses each of its weights.
pub(crate) fn uses(plan: &Plan) -> Vec<Uses> {
    let mut uses = vec![Uses::default(); plan.weights.len()];
    for op in &plan.ops {
        let matrices = match op {
            Op::Embed { .. } => continue,
            Op::Linear { weight, .. } | Op::Logits { weight, .. } => Some((*weight, 1)),
            Op::ExpertLinear { weight, experts, .. } => Some((*weight, *experts)),
            _ => None,
        };
        if let Some((weight, count)) = matrices {
            uses[weight.0].matrices = count;
        }
        if let Op::Conv { weight, .. } = op {
            uses[weight.0].taps = plan.weight(*weight).cols;
        }
        let vectors = op.weights().filter(|id| matrices.is_none_or(|(matrix, _)| matrix != *id));
        vectors.for_each(|id| uses[id.0].vector = true);
    }
    uses
}

/// Reads all weights, on all threads, and says how the sparse ones are kept. With `cpu.repack`,
/// matrices are packed into memory and the file's pages given back one tensor after the other, so
/// that both are never held together; without, they stay in the file and are packed whenever they
/// are used, unless their format is sparse.
pub(crate) fn prepare(
    cpu: &Cpu,
    plan: &Plan,
    file: &Arc<File>,
    pool: &mut Pool,
    progress: Progress<'_>,
) -> (Vec<Prepared>, Vec<WeightLayout>) {
    let total = plan.cost().weight_bytes;
    let mut done = 0;
    let mut weights = Vec::with_capacity(plan.weights.len());
    let mut weight_layouts = Vec::new();
    let mut trials = Trials::default();
    let masked = masked(cpu, plan);
    for (id, (weight, uses)) in plan.weights.iter().zip(uses(plan)).enumerate() {
        let tensor = tensor(file, weight);
        let bytes = &*file.read(tensor);
        let mut prepared = Prepared::default();
        if uses.matrices > 0 {
            let choice = choose(cpu, weight, bytes, uses.matrices, (&mut trials, pool));
            let is_sparse = choice.as_ref().is_some_and(|choice| choice.sparse);
            prepared.matrices = if masked.contains(&WeightId(id)) && is_by_columns(cpu, weight) {
                let source = SourceRows::new(weight.format, bytes, weight.rows);
                vec![pack_columns(
                    PackedLayout::planned(weight.format),
                    source,
                    weight.rows,
                    weight.cols,
                )]
            } else if cpu.repack || choice.is_some() {
                pack(weight, bytes, uses.matrices, is_sparse, pool)
            } else {
                leave(weight, file, uses.matrices)
            };
            weight_layouts.extend(choice);
        }
        if uses.vector {
            let mut values = vec![0.0; weight.cols * weight.rows];
            weight.format.dequantize(bytes, &mut values);
            prepared.vector = Some(match uses.taps {
                0 => values,
                kernel => transposed(&values, kernel),
            });
        }
        weights.push(prepared);
        if cpu.repack {
            file.release(tensor);
        }
        done += weight.bytes;
        progress(done, total);
    }
    (weights, weight_layouts)
}

/// The products whose inputs have thresholds.
pub(crate) fn masked(cpu: &Cpu, plan: &Plan) -> Vec<WeightId> {
    if cpu.skip_inputs { plan.gated_matmuls() } else { Vec::new() }
}

/// Whether a weight is kept by columns if its input has a threshold. One without zeros is not: it
/// is short already.
pub(crate) fn is_by_columns(cpu: &Cpu, weight: &Weight) -> bool {
    cpu.repack
        && weight.format.base().is_none()
        && PackedLayout::native(weight.format).is_some_and(|layout| {
            has_columns(layout) && layout.activation_format(cpu.isa) != ActivationFormat::Bf16
        })
}

/// How many times as fast weights are without their zeros, by format, rows, columns and share of
/// the dense size in [`SIZES`]: what weights that agree in these would say again.
type Trials = HashMap<(Format, usize, usize, usize), f64>;

/// Steps in which a share of the dense size is told apart.
const SIZES: usize = 32;

/// How a weight of a sparse format is kept; none for any other.
fn choose(
    cpu: &Cpu,
    weight: &Weight,
    bytes: &[u8],
    count: usize,
    (trials, pool): (&mut Trials, &mut Pool),
) -> Option<WeightLayout> {
    let base = weight.format.base()?;
    let speedup = (cpu.sparse == Sparse::Auto).then(|| {
        let (rows, cols) = (weight.rows / count, weight.cols);
        let dense = base.row_bytes(cols).expect("the weight was checked") * weight.rows;
        let size = weight.bytes as usize * SIZES / dense;
        *trials.entry((weight.format, rows, cols, size)).or_insert_with(|| {
            let source = SourceRows::new(weight.format, bytes, weight.rows);
            trial::speedup(cpu, PackedLayout::planned(weight.format), source, rows, cols, pool)
        })
    });
    let sparse = speedup.map_or(cpu.sparse == Sparse::Always, |speedup| speedup > 1.0);
    let (weight, format) = (weight.name.clone(), weight.format);
    Some(WeightLayout { weight, format, sparse, speedup })
}

/// The `count` matrices of a weight, packed.
fn pack(
    weight: &Weight,
    bytes: &[u8],
    count: usize,
    is_sparse: bool,
    pool: &mut Pool,
) -> Vec<PackedWeight> {
    let layout = PackedLayout::native(weight.format);
    let layout = layout.unwrap_or_else(|| float_layout(weight.format, bytes, weight.cols));
    let (rows, cols) = (weight.rows / count, weight.cols);
    let source = SourceRows::new(weight.format, bytes, weight.rows);
    let matrix = |i: usize| match is_sparse {
        true => pack_sparse(source.from(i * rows), rows, cols, pool),
        false => pack_dense(layout, source.from(i * rows), rows, cols, pool),
    };
    (0..count).map(matrix).collect()
}

/// A part of a tensor of an open file.
struct Part {
    file: Arc<File>,
    tensor: Tensor,
    bytes: std::ops::Range<usize>,
}

impl AsRef<[u8]> for Part {
    fn as_ref(&self) -> &[u8] {
        &self.file.data(&self.tensor)[self.bytes.clone()]
    }
}

/// The `count` matrices of a weight, left in the file.
fn leave(weight: &Weight, file: &Arc<File>, count: usize) -> Vec<PackedWeight> {
    let (rows, len) = (weight.rows / count, weight.bytes as usize / count);
    let matrix = |i: usize| {
        let (file, tensor) = (Arc::clone(file), tensor(file, weight).clone());
        let part = Part { file, tensor, bytes: i * len..(i + 1) * len };
        PackedWeight::unpacked(weight.format, Box::new(part), rows, weight.cols)
    };
    (0..count).map(matrix).collect()
}

/// The tables that a plan looks rows up in. They stay in the file, and with each row that is looked
/// up the system maps pages around it: in the end the process would hold the whole table.
pub(crate) struct Tables {
    ids: Vec<WeightId>,
    /// SourceRows that may be in memory.
    rows: usize,
}

/// SourceRows that are looked up before tables are given back; some hundred KiB may come with each.
const TABLE_ROWS: usize = 16;

impl Tables {
    /// Those of a plan whose products read packed weights; else products may need the same pages.
    pub(crate) fn new(cpu: &Cpu, plan: &Plan) -> Tables {
        let table = |op: &Op| match op {
            Op::Embed { table, .. } if cpu.repack => Some(*table),
            _ => None,
        };
        Tables { ids: plan.ops.iter().filter_map(table).collect(), rows: 0 }
    }

    /// To be told after each step how many rows it looked up.
    pub(crate) fn after_step(&mut self, file: &File, plan: &Plan, rows: usize) {
        self.rows += rows;
        if self.rows >= TABLE_ROWS {
            self.rows = 0;
            self.ids.iter().for_each(|id| file.release(tensor(file, plan.weight(*id))));
        }
    }
}

/// The values of one row of a weight that stays in the file: a token's embedding.
pub(crate) fn read_row(file: &File, weight: &Weight, row: usize, out: &mut [f32]) {
    let bytes = file.data(tensor(file, weight));
    weight.format.dequantize_row(weight.format.row(bytes, weight.rows, row), out);
}

fn tensor<'a>(file: &'a File, weight: &Weight) -> &'a Tensor {
    file.tensor(&weight.name).expect("the plan was made from this file")
}
