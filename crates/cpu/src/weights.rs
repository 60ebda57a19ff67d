//! Weights as the stages read them: matrices packed for the products, tables left in the file,
//! vectors in f32.

use bodkin_backend::Progress;
use bodkin_gguf::{File, Tensor};
use bodkin_model::{Op, Plan, Weight};

use crate::linear::{Kind, PackedWeight, float_kind};
use crate::pool::Pool;

/// One weight, in every form that the plan needs.
#[derive(Default)]
pub(crate) struct Prepared {
    /// For products.
    pub(crate) matrix: Option<PackedWeight>,
    /// For norms, biases and rope factors.
    pub(crate) vector: Option<Vec<f32>>,
}

/// How the plan uses a weight.
#[derive(Clone, Copy, Default)]
pub(crate) struct Uses {
    pub(crate) matrix: bool,
    pub(crate) vector: bool,
}

/// How the plan uses each of its weights.
pub(crate) fn uses(plan: &Plan) -> Vec<Uses> {
    let mut uses = vec![Uses::default(); plan.weights.len()];
    for op in &plan.ops {
        match op {
            Op::Embed { .. } => {}
            Op::Linear { weight, bias, .. } | Op::Logits { weight, bias, .. } => {
                uses[weight.0].matrix = true;
                bias.iter().for_each(|id| uses[id.0].vector = true);
            }
            Op::Norm { .. } | Op::Rope { .. } => {
                op.weights().for_each(|id| uses[id.0].vector = true);
            }
            Op::Act { .. }
            | Op::Concat { .. }
            | Op::Route { .. }
            | Op::ExpertLinear { .. }
            | Op::ExpertSum { .. }
            | Op::Conv { .. }
            | Op::Scan { .. }
            | Op::Pool { .. }
            | Op::Attention { .. }
            | Op::Glu { .. }
            | Op::Add { .. }
            | Op::Scale { .. }
            | Op::Softcap { .. }
            | Op::Slice { .. } => {}
        }
    }
    uses
}

/// How a weight is packed. Whether a format without a kind of its own fits half precision can
/// only be told from its values; until they are read, this supposes that it does.
pub(crate) fn kind(weight: &Weight) -> Kind {
    Kind::native(weight.format).unwrap_or(Kind::F16)
}

/// Reads all weights, on all threads.
pub(crate) fn prepare(
    plan: &Plan,
    file: &File,
    pool: &mut Pool,
    progress: Progress<'_>,
) -> Vec<Prepared> {
    let total = plan.cost().weight_bytes;
    let mut done = 0;
    let mut weights = Vec::with_capacity(plan.weights.len());
    for (weight, uses) in plan.weights.iter().zip(uses(plan)) {
        let bytes = file.data(tensor(file, weight));
        let mut prepared = Prepared::default();
        if uses.matrix {
            prepared.matrix = Some(pack(weight, bytes, pool));
        }
        if uses.vector {
            let mut values = vec![0.0; weight.cols * weight.rows];
            weight.format.dequantize(bytes, &mut values);
            prepared.vector = Some(values);
        }
        weights.push(prepared);
        done += weight.bytes();
        progress(done, total);
    }
    weights
}

fn pack(weight: &Weight, bytes: &[u8], pool: &mut Pool) -> PackedWeight {
    let kind = Kind::native(weight.format);
    let kind = kind.unwrap_or_else(|| float_kind(weight.format, bytes, weight.cols));
    let mut packed = PackedWeight::zeroed(kind, weight.rows, weight.cols);
    let panels = packed.panels();
    let packer = packed.packer(weight.format, bytes);
    // SAFETY: the threads' shares do not overlap.
    pool.run(&|worker| unsafe { packer.pack(worker.share(panels)) });
    packed
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
