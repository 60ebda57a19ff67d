//! Weights on the device: matrices and tables in planes, vectors in f32, all in one piece of
//! memory. All threads of the host read and pack one piece while the one before is copied.

use std::ops::Range;
use std::sync::Arc;

use bodkin_backend::{Progress, Result};
use bodkin_gguf::File;
use bodkin_model::{Plan, Weight};
use bytemuck::cast_slice_mut;

use crate::driver::{Device, Memory};
use crate::lower::{matrix_of, shapes};
use crate::planes::{Shape, TILE_ROWS, pack};
use crate::staging::Staging;

/// Parts of the memory begin at multiples of it.
const ALIGNMENT: usize = 256;
/// Bytes of planes that are worth a thread.
const THREAD_BYTES: usize = 128 << 10;

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
    let weights = plan.weights.iter().zip(shapes(plan)).zip(vectors(plan));
    let layouts = weights.map(|((weight, shape), is_vector)| {
        let planes =
            shape.map(|shape| (shape, take(shape.plane_bytes()), take(4 * shape.scales())));
        let vector = is_vector.then(|| take(4 * weight.rows * weight.cols));
        Layout { planes, vector }
    });
    (layouts.collect(), bytes)
}

/// Whether the plan uses each weight as a vector, be it as a matrix too.
fn vectors(plan: &Plan) -> Vec<bool> {
    let mut are_vectors = vec![false; plan.weights.len()];
    for op in &plan.ops {
        let matrix = matrix_of(op).map(|(id, _)| id);
        let vectors = op.weights().filter(|id| Some(*id) != matrix);
        vectors.for_each(|id| are_vectors[id.0] = true);
    }
    are_vectors
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
        let largest = plan.weights.iter().zip(&layouts).map(|(weight, layout)| {
            let tile = layout.planes.map_or(0, |(shape, ..)| tile_bytes(&shape));
            tile.max(layout.vector.map_or(0, |_| 4 * weight.rows * weight.cols))
        });
        let mut staging = Staging::new(device, largest.max().unwrap_or(0), bytes)?;
        let total = plan.cost().weight_bytes;
        let mut done = 0;
        let mut placed = Vec::with_capacity(layouts.len());
        for (weight, layout) in plan.weights.iter().zip(layouts) {
            let tensor = file.tensor(&weight.name).expect("the plan was made from this file");
            let data = &*file.read(tensor);
            let at = |offset: usize| memory.address + offset as u64;
            if let Some((shape, planes, scales)) = layout.planes {
                send_planes(&mut staging, &shape, weight, data, [at(planes), at(scales)])?;
            }
            if let Some(vector) = layout.vector {
                let bytes = 4 * weight.rows * weight.cols;
                let fill = |to: &mut [u8]| weight.format.dequantize(data, cast_slice_mut(to));
                // SAFETY: the layout has room for all elements.
                unsafe { staging.send(bytes, fill, &[(at(vector), 0..bytes)]) }?;
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
        device.finish()?;
        Ok(Weights { placed, _memory: memory })
    }
}

/// Bytes of a tile with its rows' scales.
fn tile_bytes(shape: &Shape) -> usize {
    shape.tile_bytes() + 4 * TILE_ROWS
}

/// Packs a weight and sends it to the addresses of its planes and scales, as many tiles at a time
/// as staging holds.
fn send_planes(
    staging: &mut Staging,
    shape: &Shape,
    weight: &Weight,
    data: &[u8],
    [planes_at, scales_at]: [u64; 2],
) -> Result<()> {
    let all = shape.matrices * shape.tiles();
    let most = staging.len() / tile_bytes(shape);
    for first in (0..all).step_by(most) {
        let tiles = first..all.min(first + most);
        let planes = tiles.len() * shape.tile_bytes();
        let bytes = planes + tiles.len() * 4 * TILE_ROWS;
        let parts = [
            (planes_at + (first * shape.tile_bytes()) as u64, 0..planes),
            (scales_at + (first * 4 * TILE_ROWS) as u64, planes..bytes),
        ];
        let fill = |to: &mut [u8]| {
            let (planes, scales) = to.split_at_mut(planes);
            pack_tiles(shape, weight, data, tiles, (planes, cast_slice_mut(scales)));
        };
        // SAFETY: the layout has room for all tiles and their scales.
        unsafe { staging.send(bytes, fill, &parts) }?;
    }
    Ok(())
}

/// The planes and scales of some tiles, packed by as many threads as there is work for.
fn pack_tiles(
    shape: &Shape,
    weight: &Weight,
    data: &[u8],
    tiles: Range<usize>,
    (planes, scales): (&mut [u8], &mut [f32]),
) {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = threads.min(planes.len() / THREAD_BYTES + 1);
    let share = tiles.len().div_ceil(threads).max(1);
    let parts = planes.chunks_mut(share * shape.tile_bytes());
    let parts = parts.zip(scales.chunks_mut(share * TILE_ROWS));
    std::thread::scope(|scope| {
        for (first, (planes, scales)) in tiles.clone().step_by(share).zip(parts) {
            let range = first..tiles.end.min(first + share);
            let work = move || {
                planes.fill(0);
                scales.fill(0.0);
                pack(shape, weight.format, data, range, planes, scales);
            };
            if threads == 1 { work() } else { drop(scope.spawn(work)) }
        }
    });
}
