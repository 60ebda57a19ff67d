//! Weights as the stages read them: matrices packed for the products, tables left in the file,
//! vectors in f32.

use std::sync::Arc;

use bodkin_backend::Progress;
use bodkin_gguf::{File, Tensor};
use bodkin_model::{Op, Plan, Weight};

use crate::linear::{Kind, PackedWeight, float_kind};
use crate::pool::Pool;
use crate::recurrent::transposed;

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

/// How a weight is packed. Whether a format without a kind of its own fits half precision can
/// only be told from its values; until they are read, this supposes that it does.
pub(crate) fn kind(weight: &Weight) -> Kind {
    Kind::native(weight.format).unwrap_or(Kind::F16)
}

/// Reads all weights, on all threads. With `repack`, matrices are packed into memory and the file's
/// pages given back one tensor after the other, so that both are never held together; without, they
/// stay in the file and are packed whenever they are used.
pub(crate) fn prepare(
    plan: &Plan,
    file: &Arc<File>,
    repack: bool,
    pool: &mut Pool,
    progress: Progress<'_>,
) -> Vec<Prepared> {
    let total = plan.cost().weight_bytes;
    let mut done = 0;
    let mut weights = Vec::with_capacity(plan.weights.len());
    for (weight, uses) in plan.weights.iter().zip(uses(plan)) {
        let tensor = tensor(file, weight);
        let bytes = &*file.read(tensor);
        let mut prepared = Prepared::default();
        if uses.matrices > 0 {
            prepared.matrices = if repack {
                pack(weight, bytes, uses.matrices, pool)
            } else {
                leave(weight, file, uses.matrices)
            };
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
        if repack {
            file.release(tensor);
        }
        done += weight.bytes();
        progress(done, total);
    }
    weights
}

/// The `count` matrices of a weight, packed.
fn pack(weight: &Weight, bytes: &[u8], count: usize, pool: &mut Pool) -> Vec<PackedWeight> {
    let kind = Kind::native(weight.format);
    let kind = kind.unwrap_or_else(|| float_kind(weight.format, bytes, weight.cols));
    let rows = weight.rows / count;
    let matrix = |bytes: &[u8]| {
        let mut packed = PackedWeight::zeroed(kind, rows, weight.cols);
        let panels = packed.panels();
        let packer = packed.packer(weight.format, bytes);
        // SAFETY: the threads' shares do not overlap.
        pool.run(&|worker| unsafe { packer.pack(worker.share(panels)) });
        packed
    };
    bytes.chunks_exact(bytes.len() / count).map(matrix).collect()
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
    let (rows, len) = (weight.rows / count, weight.bytes() as usize / count);
    let matrix = |i: usize| {
        let (file, tensor) = (Arc::clone(file), tensor(file, weight).clone());
        let part = Part { file, tensor, bytes: i * len..(i + 1) * len };
        PackedWeight::unpacked(weight.format, Box::new(part), rows, weight.cols)
    };
    (0..count).map(matrix).collect()
}

/// The values of one row of a weight that stays in the file: a token's embedding.
pub(crate) fn read_row(file: &File, weight: &Weight, row: usize, out: &mut [f32]) {
    let bytes = file.data(tensor(file, weight));
    let len = bytes.len() / weight.rows;
    weight.format.dequantize(&bytes[row * len..][..len], out);
}

fn tensor<'a>(file: &'a File, weight: &Weight) -> &'a Tensor {
    file.tensor(&weight.name).expect("the plan was made from this file")
}
