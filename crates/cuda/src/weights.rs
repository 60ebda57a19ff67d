//! Weights on the device: matrices and tables in planes, vectors in f32, all in one piece of
//! memory. They are packed by all threads of the host, one tensor after the other.

use std::sync::Arc;

use bodkin_backend::{Progress, Result};
use bodkin_gguf::File;
use bodkin_model::{Op, Plan, Weight};

use crate::driver::{Device, Memory};
use crate::planes::{Shape, pack};

/// Parts of the memory begin at multiples of it.
const ALIGNMENT: usize = 256;

/// Where a weight lies, in bytes from the start, in the forms that the plan needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Layout {
    /// The shape, planes and rows' scales.
    planes: Option<(Shape, usize, usize)>,
    vector: Option<usize>,
}

/// The layout of all weights, and the bytes of all.
fn layout(plan: &Plan) -> (Vec<Layout>, usize) {
    let mut bytes = 0;
    let mut take = |part: usize| {
        let start = bytes;
        bytes += part.next_multiple_of(ALIGNMENT);
        start
    };
    let layouts = plan.weights.iter().zip(uses(plan)).map(|(weight, uses)| {
        let planes = (uses.matrices > 0).then(|| {
            let shape = Shape::of(weight, uses.matrices);
            (shape, take(shape.plane_bytes()), take(4 * shape.scales()))
        });
        let vector = uses.vector.then(|| take(4 * weight.rows * weight.cols));
        Layout { planes, vector }
    });
    (layouts.collect(), bytes)
}

/// How the plan uses a weight.
#[derive(Clone, Copy, Default)]
struct Uses {
    /// In products and as a table: the number of matrices that lie one after the other.
    matrices: usize,
    vector: bool,
}

fn uses(plan: &Plan) -> Vec<Uses> {
    let mut uses = vec![Uses::default(); plan.weights.len()];
    for op in &plan.ops {
        let matrices = match op {
            Op::Embed { table: weight, .. }
            | Op::Linear { weight, .. }
            | Op::Logits { weight, .. } => Some((*weight, 1)),
            Op::ExpertLinear { weight, experts, .. } => Some((*weight, *experts)),
            _ => None,
        };
        if let Some((weight, count)) = matrices {
            uses[weight.0].matrices = count;
        }
        let vectors = op.weights().filter(|id| matrices.is_none_or(|(matrix, _)| matrix != *id));
        vectors.for_each(|id| uses[id.0].vector = true);
    }
    uses
}

/// The bytes that a plan's weights take on the device.
pub(crate) fn bytes(plan: &Plan) -> u64 {
    layout(plan).1 as u64
}

/// A weight on the device: addresses, 0 for the forms that the plan does not need.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Placed {
    pub(crate) shape: Shape,
    pub(crate) planes: u64,
    pub(crate) scales: u64,
    pub(crate) vector: u64,
    /// Elements of the vector.
    pub(crate) len: usize,
}

/// All weights of a plan.
pub(crate) struct Weights {
    pub(crate) placed: Vec<Placed>,
    _memory: Memory,
}

impl Weights {
    /// Reads, packs and copies all weights.
    pub(crate) fn load(
        device: &Arc<Device>,
        plan: &Plan,
        file: &File,
        progress: Progress<'_>,
    ) -> Result<Weights> {
        let (layouts, bytes) = layout(plan);
        let memory = Memory::zeroed(device, bytes, "the weights")?;
        let total = plan.cost().weight_bytes;
        let mut done = 0;
        let mut placed = Vec::with_capacity(layouts.len());
        for (weight, layout) in plan.weights.iter().zip(layouts) {
            let tensor = file.tensor(&weight.name).expect("the plan was made from this file");
            let data = &*file.read(tensor);
            let at = |offset: usize| memory.address + offset as u64;
            if let Some((shape, planes_at, scales_at)) = layout.planes {
                let (planes, scales) = pack_all(&shape, weight, data);
                // SAFETY: the layout has room for both, and the copies are waited for.
                unsafe {
                    device.send(at(planes_at), &planes)?;
                    device.send(at(scales_at), &scales)?;
                }
                device.finish()?;
            }
            if let Some(vector_at) = layout.vector {
                let mut values = vec![0.0; weight.rows * weight.cols];
                weight.format.dequantize(data, &mut values);
                // SAFETY: as above.
                unsafe { device.send(at(vector_at), &values) }?;
                device.finish()?;
            }
            placed.push(Placed {
                shape: layout.planes.map_or_else(|| Shape::of(weight, 1), |(shape, _, _)| shape),
                planes: layout.planes.map_or(0, |(_, planes, _)| at(planes)),
                scales: layout.planes.map_or(0, |(_, _, scales)| at(scales)),
                vector: layout.vector.map_or(0, at),
                len: weight.rows * weight.cols,
            });
            file.release(tensor);
            done += weight.bytes;
            progress(done, total);
        }
        Ok(Weights { placed, _memory: memory })
    }
}

/// The planes and scales of a whole weight, packed by all threads.
fn pack_all(shape: &Shape, weight: &Weight, data: &[u8]) -> (Vec<u8>, Vec<f32>) {
    let tiles = shape.matrices * shape.tiles();
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let share = tiles.div_ceil(threads).max(1);
    let (mut planes, mut scales) = (vec![0; shape.plane_bytes()], vec![0.0; shape.scales()]);
    let tile_bytes = (planes.len() / tiles.max(1)).max(1);
    std::thread::scope(|scope| {
        let parts = planes.chunks_mut(share * tile_bytes).zip(scales.chunks_mut(share * 16));
        for (first, (planes, scales)) in (0..tiles).step_by(share).zip(parts) {
            let range = first..tiles.min(first + share);
            scope.spawn(move || pack(shape, weight.format, data, range, planes, scales));
        }
    });
    (planes, scales)
}
