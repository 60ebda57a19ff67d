//! Weights on the device: matrices and tables in planes, vectors in f32, all in one piece of
//! memory. All threads of the host read and pack one piece while the one before is copied.

use std::ops::Range;
use std::sync::Arc;

use bodkin_backend::{Progress, Result};
use bodkin_gguf::File;
use bodkin_model::{Plan, Weight};
use bytemuck::cast_slice_mut;

use crate::driver::{Device, Memory};
use crate::lower::{Share, cuts, matrix_of, shapes};
use crate::planes::{Shape, TILE_ROWS, pack};
use crate::staging::Staging;

/// Parts of the memory begin at multiples of it.
const ALIGNMENT: usize = 256;
/// Bytes of planes that are worth a thread.
const THREAD_BYTES: usize = 128 << 10;

/// Where a weight lies, in bytes from the start, in the forms that the plan needs.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Layout {
    /// The shape, planes and rows' scales.
    planes: Option<(Shape, usize, usize)>,
    vector: Option<(Vector, usize)>,
}

/// What a device has of a vector: the same elements of each of so many pieces.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Vector {
    pieces: usize,
    own: Range<usize>,
}

impl Vector {
    /// Of a weight that may be cut as the product is whose bias it is.
    fn of(weight: &Weight, cut: Option<usize>, share: Share) -> Vector {
        let len = weight.rows * weight.cols;
        match cut {
            Some(pieces) => Vector { pieces, own: share.rows(len / pieces) },
            None => Vector { pieces: 1, own: 0..len },
        }
    }

    fn bytes(&self) -> usize {
        4 * self.pieces * self.own.len()
    }

    fn write(&self, weight: &Weight, data: &[u8], to: &mut [f32]) {
        let mut all = vec![0.0; weight.rows * weight.cols];
        weight.format.dequantize(data, &mut all);
        let (piece, len) = (all.len() / self.pieces, self.own.len());
        for i in 0..self.pieces {
            to[i * len..][..len].copy_from_slice(&all[i * piece..][self.own.clone()]);
        }
    }
}

/// The layout of all weights, and the bytes of all.
fn layout(plan: &Plan, share: Share) -> (Vec<Layout>, usize) {
    let mut bytes = 0;
    let mut take = |part: usize| {
        let start = bytes;
        bytes += part.next_multiple_of(ALIGNMENT);
        start
    };
    let weights = plan.weights.iter().zip(cuts(plan, share.of));
    let weights = weights.zip(shapes(plan)).zip(vectors(plan));
    let layouts = weights.map(|(((weight, cut), shape), is_vector)| {
        let shape = shape.map(|shape| cut.map_or(shape, |_| shape.share(share)));
        let planes =
            shape.map(|shape| (shape, take(shape.plane_bytes()), take(4 * shape.scales())));
        let vector = is_vector.then(|| Vector::of(weight, cut, share));
        let vector = vector.map(|vector| {
            let at = take(vector.bytes());
            (vector, at)
        });
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

/// The bytes that a plan's weights take on a device.
pub(crate) fn bytes(plan: &Plan, share: Share) -> u64 {
    layout(plan, share).1 as u64
}

/// A weight on the device: addresses, 0 for the forms that the plan does not need.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Placed {
    /// Of the rows that the device has.
    pub(crate) shape: Shape,
    pub(crate) planes: u64,
    pub(crate) scales: u64,
    /// Of a cut product's bias, what belongs to the device's rows.
    pub(crate) vector: u64,
    /// Elements of the whole vector.
    pub(crate) len: usize,
}

/// All weights of a plan.
pub(crate) struct Weights {
    pub(crate) placed: Vec<Placed>,
    _memory: Memory,
}

impl Weights {
    /// Reads, packs and copies what a device has of all weights.
    pub(crate) fn load(
        device: &Arc<Device>,
        plan: &Plan,
        share: Share,
        file: &File,
        progress: Progress<'_>,
    ) -> Result<Weights> {
        let (layouts, bytes) = layout(plan, share);
        let memory = Memory::zeroed(device, bytes, "the weights")?;
        let largest = layouts.iter().map(|layout| {
            let tile = layout.planes.map_or(0, |(shape, ..)| tile_bytes(&shape));
            tile.max(layout.vector.as_ref().map_or(0, |(vector, _)| vector.bytes()))
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
            if let Some((vector, address)) = &layout.vector {
                let bytes = vector.bytes();
                let fill = |to: &mut [u8]| vector.write(weight, data, cast_slice_mut(to));
                // SAFETY: the layout has room for all elements.
                unsafe { staging.send(bytes, fill, &[(at(*address), 0..bytes)]) }?;
            }
            placed.push(Placed {
                shape: layout.planes.map_or_else(|| Shape::of(weight, 1), |(shape, _, _)| shape),
                planes: layout.planes.map_or(0, |(_, planes, _)| at(planes)),
                scales: layout.planes.map_or(0, |(_, _, scales)| at(scales)),
                vector: layout.vector.map_or(0, |(_, vector)| at(vector)),
                len: weight.rows * weight.cols,
            });
            if share.number + 1 == share.of {
                file.release(tensor);
            }
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

#[cfg(test)]
mod tests {
    use bodkin_gguf::Format;

    use super::*;

    #[test]
    fn parts_of_biases_together_are_the_whole() {
        let (matrices, rows) = (3, 71);
        let values: Vec<f32> = (0..matrices * rows).map(|i| i as f32).collect();
        let data: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        let (name, bytes) = (String::new(), data.len() as u64);
        let weight = Weight { name, format: Format::F32, cols: rows, rows: matrices, bytes };
        let mut together = vec![Vec::<f32>::new(); matrices];
        for number in 0..3 {
            let vector = Vector::of(&weight, Some(matrices), Share { number, of: 3 });
            let mut own = vec![f32::NAN; vector.bytes() / 4];
            vector.write(&weight, &data, &mut own);
            let pieces = own.chunks_exact(own.len() / matrices);
            together.iter_mut().zip(pieces).for_each(|(all, piece)| all.extend(piece));
        }
        assert_eq!(together.concat(), values);
    }

    #[test]
    fn devices_hold_the_whole_once_and_what_is_not_cut_each() {
        for model in ["gpt-oss-mxfp4", "llama-q4_k_m", "qwen3moe-q4_k_m"] {
            let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/parity/models");
            let file = bodkin_model::open(format!("{folder}/{model}.gguf")).unwrap();
            let plan = bodkin_model::plan(file.metadata(), file.tensors()).unwrap();
            let held = |layout: &Layout| {
                let planes = layout.planes.map_or(0, |(shape, ..)| {
                    shape.plane_bytes() + size_of::<f32>() * shape.scales()
                });
                planes + layout.vector.as_ref().map_or(0, |(vector, _)| vector.bytes())
            };
            let (whole, _) = layout(&plan, Share { number: 0, of: 1 });
            for of in [2, 3] {
                let (cuts, mut sums) = (cuts(&plan, of), vec![0; whole.len()]);
                for number in 0..of {
                    let share = Share { number, of };
                    let (layouts, all) = layout(&plan, share);
                    assert_eq!(all as u64, bytes(&plan, share));
                    // Alignment takes less than a piece for each form of a weight.
                    let own: usize = layouts.iter().map(held).sum();
                    assert!((own..own + 3 * ALIGNMENT * layouts.len()).contains(&all), "{model}");
                    sums.iter_mut().zip(&layouts).for_each(|(sum, layout)| *sum += held(layout));
                }
                for ((sum, whole), cut) in sums.iter().zip(&whole).zip(&cuts) {
                    let times = if cut.is_some() { 1 } else { of };
                    assert_eq!(*sum, times * held(whole), "{model}: {whole:?}");
                }
                assert!(cuts.iter().any(Option::is_some), "{model} is cut");
            }
        }
    }
}
