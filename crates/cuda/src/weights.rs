//! Weights on the device: matrices and tables in packed tiles, vectors in f32, all in one
//! allocation. All threads of the host read and pack one buffer while the previous one is copied.
//! Tiles of cached experts are in memory of the host, and some of them also in slots.

mod vector;

use std::ops::Range;
use std::sync::Arc;

use bodkin_backend::{Error, Progress, Result, StoredFormat};
use bodkin_gguf::{File, Tensor};
use bodkin_model::{Op, Plan, Weight};
use bytemuck::cast_slice_mut;

use crate::constants::{ON_HOST, SPARE_SLOTS, TILE_ROWS};
use crate::driver::{Device, Memory, Pinned};
use crate::expert_budget::{ExpertSlots, cached_at_first, can_be_cached};
use crate::lower::{matrix_of, shapes, sharded};
use crate::packed::{Shape, Shard};
use crate::packing::{Piece, pack_all};
use crate::staging::Staging;
use crate::threads::LOADERS;
use vector::Vector;

/// Bytes of the file whose pages a thread releases at once.
const RELEASED_BYTES: usize = 4 << 20;
/// Weights begin at multiples of it.
const ALIGNMENT: usize = 256;

/// The offsets of a weight, in bytes, in the forms that the plan needs.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Offsets {
    /// The shape, and the offsets of tiles and of the exponents of their rows' scales.
    matrix: Option<(Shape, usize, usize)>,
    /// The table of the addresses of each expert's tiles, and of spare slots.
    experts: Option<usize>,
    /// Of experts that are cached, the slots on the device, and the offset of all tiles in memory
    /// of the host. The tiles on the device are those in slots.
    cached: Option<(usize, usize)>,
    vector: Option<(Vector, usize)>,
}

impl Offsets {
    /// Packs a weight's matrices to their place on the device, or in memory of the host if they are
    /// experts that are cached: then the first of them are copied to the slots. Without such
    /// memory, only these are read.
    fn load_matrix(
        &self,
        staging: &mut Staging,
        host: Option<&mut Pinned<u8>>,
        (weight, data): (&Weight, &[u8]),
        at: impl Fn(usize) -> u64,
    ) -> Result<Option<Cached>> {
        let Some((shape, tiles, exponents)) = self.matrix else { return Ok(None) };
        let (tiles, exponents, table) = (at(tiles), at(exponents), self.experts.map_or(0, &at));
        let mut cached = None;
        if let Some((slots, start)) = self.cached {
            let host_address = host.as_ref().map_or(0, |host| host.address() + start as u64);
            cached = Some(Cached { slots, device: tiles, host: host_address, table });
            let first = cached_at_first(slots, host.is_none());
            if let Some(host) = host {
                let on_host = &mut host.slice_mut()[start..][..shape.packed_bytes()];
                pack_on_host(staging, &shape, weight, data, (on_host, exponents))?;
                let first = &on_host[..first * shape.expert_bytes()];
                // SAFETY: the allocation has room for the slots; the host's memory stays.
                unsafe { staging.device().copy_to_device(tiles, first) }?;
            } else {
                send_tiles(staging, &shape, weight, data, (first, [tiles, exponents]))?;
            }
        } else {
            let all = shape.matrices;
            send_tiles(staging, &shape, weight, data, (all, [tiles, exponents]))?;
        }
        if self.experts.is_some() {
            let cached = cached.as_ref();
            send_experts(staging, &shape, tiles, cached.map(|c| (c.slots, c.host)), table)?;
        }
        Ok(cached)
    }
}

/// The bytes of all weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct WeightBytes {
    pub(crate) device: usize,
    /// Of them, the slots of cached experts.
    pub(crate) slots: usize,
    /// Of cached experts, in memory of the host.
    pub(crate) host: usize,
}

/// Bytes of the table of the addresses of experts, and of spare slots if the experts are cached.
fn table_bytes(experts: usize, slots: Option<usize>) -> usize {
    size_of::<u64>() * (experts + slots.map_or(0, |_| SPARE_SLOTS))
}

/// Returns the offset of a new part.
fn take(bytes: &mut usize, part: usize) -> usize {
    let start = *bytes;
    *bytes += part.next_multiple_of(ALIGNMENT);
    start
}

/// The offsets of all weights, and the bytes of all. Each layer has `slots` for experts, or all of
/// them on the device.
fn offsets(plan: &Plan, shard: Shard, slots: Option<usize>) -> (Vec<Offsets>, WeightBytes) {
    let mut bytes = WeightBytes::default();
    let WeightBytes { device, slots: slot_bytes, host } = &mut bytes;
    let mut take_device = |part: usize| take(device, part);
    let weights = plan.weights.iter().zip(sharded(plan, shard.count));
    let weights = weights.zip(shapes(plan)).zip(vectors(plan)).zip(experts(plan));
    let weights = weights.zip(can_be_cached(plan));
    let offsets = weights.map(|(((((weight, pieces), shape), is_vector), experts), is_routed)| {
        let shape = shape.map(|shape| pieces.map_or(shape, |_| shape.shard(shard)));
        let slots = slots.filter(|_| is_routed).zip(shape);
        let slots = slots.filter(|(slots, shape)| *slots < shape.matrices);
        let cached = slots.map(|(slots, shape)| (slots, take(host, shape.packed_bytes())));
        let matrix = shape.map(|shape| {
            let in_slots = cached.map(|(slots, _)| slots * shape.expert_bytes());
            *slot_bytes += in_slots.unwrap_or(0);
            let tiles = in_slots.unwrap_or(shape.packed_bytes());
            (shape, take_device(tiles), take_device(shape.exponents()))
        });
        let experts =
            experts.map(|count| take_device(table_bytes(count, cached.map(|(slots, _)| slots))));
        let vector = is_vector.then(|| Vector::of(weight, pieces, shard));
        let vector = vector.map(|vector| {
            let at = take_device(vector.bytes());
            (vector, at)
        });
        Offsets { matrix, experts, cached, vector }
    });
    (offsets.collect(), bytes)
}

/// Whether the plan uses each weight as a vector, also if it uses it as a matrix too.
fn vectors(plan: &Plan) -> Vec<bool> {
    let mut are_vectors = vec![false; plan.weights.len()];
    for op in &plan.ops {
        let matrix = matrix_of(op).map(|(id, _)| id);
        let vectors = op.weights().filter(|id| Some(*id) != matrix);
        vectors.for_each(|id| are_vectors[id.0] = true);
    }
    are_vectors
}

/// The number of experts of each weight that has them.
fn experts(plan: &Plan) -> Vec<Option<usize>> {
    let mut counts = vec![None; plan.weights.len()];
    for op in &plan.ops {
        if let Op::ExpertLinear { weight, experts, .. } = op {
            counts[weight.0] = Some(*experts);
        }
    }
    counts
}

/// The bytes that a plan's weights take, with `slots` for the experts of each layer.
pub(crate) fn bytes(plan: &Plan, shard: Shard, slots: Option<usize>) -> WeightBytes {
    offsets(plan, shard, slots).1
}

/// How the plan's matrices are stored, format by format, on all `devices` together.
pub(crate) fn stored_formats(plan: &Plan, devices: usize) -> Vec<StoredFormat> {
    let shards = (0..devices).map(|index| offsets(plan, Shard { index, count: devices }, None).0);
    let shards: Vec<Vec<Offsets>> = shards.collect();
    let mut formats: Vec<StoredFormat> = Vec::new();
    for (i, weight) in plan.weights.iter().enumerate() {
        let matrices = shards.iter().filter_map(|offsets| offsets[i].matrix);
        let bytes = matrices.map(|(shape, ..)| shape.packed_bytes() + shape.exponents());
        let stored_bytes = bytes.sum::<usize>() as u64;
        if stored_bytes == 0 {
            continue;
        }
        let known = formats.iter().position(|stored| stored.format == weight.format);
        let at = known.unwrap_or(formats.len());
        if known.is_none() {
            let format = weight.format;
            let (tensors, elements, file_bytes, stored_bytes) = (0, 0, 0, 0);
            formats.push(StoredFormat { format, tensors, elements, file_bytes, stored_bytes });
        }
        let stored = &mut formats[at];
        stored.tensors += 1;
        stored.elements += (weight.rows * weight.cols) as u64;
        stored.file_bytes += weight.bytes;
        stored.stored_bytes += stored_bytes;
    }
    formats
}

/// The addresses of a weight, 0 for the forms that the plan does not need.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Placed {
    /// Of the rows that the device holds.
    pub(crate) shape: Shape,
    /// Of the packed tiles; of experts, of the table of their addresses.
    pub(crate) packed: u64,
    /// Of the scales of rows.
    pub(crate) exponents: u64,
    /// Of a sharded bias, the elements of the device's rows.
    pub(crate) vector: u64,
    /// Elements of the whole vector.
    pub(crate) len: usize,
    /// Of experts that are cached.
    pub(crate) cached: Option<Cached>,
}

/// The addresses of experts that are cached.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cached {
    /// Slots on the device.
    pub(crate) slots: usize,
    /// Of the tiles in slots.
    pub(crate) device: u64,
    /// Of the tiles of all experts, in memory of the host; 0 if they stay in the file.
    pub(crate) host: u64,
    /// Of the table of their addresses.
    pub(crate) table: u64,
}

/// All weights of a plan.
pub(crate) struct Weights {
    pub(crate) placed: Vec<Placed>,
    _memory: Memory,
    _host: Option<Pinned<u8>>,
}

impl Weights {
    /// Reads, packs and copies a device's shard of all weights.
    pub(crate) fn load(
        device: &Arc<Device>,
        plan: &Plan,
        (shard, slots): (Shard, ExpertSlots),
        file: &File,
        progress: Progress<'_>,
    ) -> Result<Weights> {
        let (offsets, bytes) = offsets(plan, shard, slots.on_device);
        let memory = Memory::zeroed(device, bytes.device, "the weights")?;
        let mut host = match (bytes.host, slots.on_host) {
            (0, _) | (_, Some(_)) => None,
            (bytes, None) => {
                let memory = Pinned::<u8>::zeroed(device, bytes);
                Some(memory.map_err(|error| Error::HostMemory(error.to_string()))?)
            }
        };
        let largest = offsets.iter().map(|offsets| {
            let tile = offsets.matrix.map_or(0, |(shape, ..)| tile_bytes(&shape));
            let experts = offsets
                .matrix
                .map_or(0, |(shape, ..)| table_bytes(shape.matrices, offsets.cached.map(|c| c.0)));
            tile.max(experts).max(offsets.vector.as_ref().map_or(0, |(vector, _)| vector.bytes()))
        });
        let mut staging = Staging::new(device, largest.max().unwrap_or(0), bytes.device)?;
        let total = plan.cost().weight_bytes;
        let mut done = 0;
        let mut placed = Vec::with_capacity(offsets.len());
        for (weight, offsets) in plan.weights.iter().zip(offsets) {
            let tensor = file.tensor(&weight.name).expect("the plan was made from this file");
            let data = &*file.read(tensor);
            let at = |offset: usize| memory.address + offset as u64;
            let cached = offsets.load_matrix(&mut staging, host.as_mut(), (weight, data), at)?;
            if let Some((vector, address)) = &offsets.vector {
                let bytes = vector.bytes();
                let fill = |to: &mut [u8]| vector.write(weight, data, cast_slice_mut(to));
                // SAFETY: the allocation has room for all elements.
                unsafe { staging.send(bytes, fill, &[(at(*address), 0..bytes)]) }?;
            }
            placed.push(Placed {
                shape: offsets.matrix.map_or_else(|| Shape::of(weight, 1), |(shape, _, _)| shape),
                packed: match (offsets.experts, offsets.matrix) {
                    (Some(table), _) => at(table),
                    (None, matrix) => matrix.map_or(0, |(_, tiles, _)| at(tiles)),
                },
                exponents: offsets.matrix.map_or(0, |(_, _, exponents)| at(exponents)),
                vector: offsets.vector.map_or(0, |(_, vector)| at(vector)),
                len: weight.rows * weight.cols,
                cached,
            });
            if shard.index + 1 == shard.count {
                release(file, tensor);
            }
            done += weight.bytes;
            progress(done, total);
        }
        device.synchronize()?;
        Ok(Weights { placed, _memory: memory, _host: host })
    }
}

/// Bytes of a tile with the exponents of its rows' scales.
fn tile_bytes(shape: &Shape) -> usize {
    shape.tile_bytes() + TILE_ROWS
}

/// Packs the first matrices of a weight and sends them to the addresses of its tiles and exponents,
/// one staging buffer at a time.
fn send_tiles(
    staging: &mut Staging,
    shape: &Shape,
    weight: &Weight,
    data: &[u8],
    (matrices, [tiles_at, exponents_at]): (usize, [u64; 2]),
) -> Result<()> {
    let all = matrices * shape.tiles();
    let most = staging.len() / tile_bytes(shape);
    for first in (0..all).step_by(most) {
        let tiles = first..all.min(first + most);
        let packed = tiles.len() * shape.tile_bytes();
        let bytes = packed + tiles.len() * TILE_ROWS;
        let parts = [
            (tiles_at + (first * shape.tile_bytes()) as u64, 0..packed),
            (exponents_at + (first * TILE_ROWS) as u64, packed..bytes),
        ];
        let fill = |to: &mut [u8]| {
            let (packed, exponents) = to.split_at_mut(packed);
            pack_tiles(shape, weight, data, tiles, (packed, exponents));
        };
        // SAFETY: the allocation has room for all tiles and their exponents.
        unsafe { staging.send(bytes, fill, &parts) }?;
    }
    Ok(())
}

/// Packs a weight to memory of the host, and sends the exponents of its tiles to their address.
fn pack_on_host(
    staging: &mut Staging,
    shape: &Shape,
    weight: &Weight,
    data: &[u8],
    (on_host, exponents_at): (&mut [u8], u64),
) -> Result<()> {
    let all = shape.matrices * shape.tiles();
    let most = staging.len() / tile_bytes(shape);
    let parts = on_host.chunks_mut(most * shape.tile_bytes());
    for (first, packed) in (0..all).step_by(most).zip(parts) {
        let tiles = first..all.min(first + most);
        let (bytes, at) = (tiles.len() * TILE_ROWS, exponents_at + (first * TILE_ROWS) as u64);
        let fill = |to: &mut [u8]| pack_tiles(shape, weight, data, tiles, (packed, to));
        // SAFETY: the allocation has room for all exponents.
        unsafe { staging.send(bytes, fill, &[(at, 0..bytes)]) }?;
    }
    Ok(())
}

/// Sends the address of each expert's tiles to a table. They lie one behind the other from `tiles`
/// on. Of `cached` experts, those without a slot lie in memory of the host, and the spare slots'
/// addresses follow.
fn send_experts(
    staging: &mut Staging,
    shape: &Shape,
    tiles: u64,
    cached: Option<(usize, u64)>,
    table: u64,
) -> Result<()> {
    let bytes = table_bytes(shape.matrices, cached.map(|(slots, _)| slots));
    let of = |start: u64, number: usize| start + (number * shape.expert_bytes()) as u64;
    let (slots, host) = cached.unwrap_or((shape.matrices, 0));
    let first = if cached.is_some() { cached_at_first(slots, host == 0) } else { slots };
    let address = |entry: usize| match entry.checked_sub(shape.matrices) {
        None if entry < first => of(tiles, entry),
        None => of(host, entry) | ON_HOST,
        Some(spare) if first + spare < slots => of(tiles, first + spare),
        Some(_) => 0,
    };
    let fill = |to: &mut [u8]| {
        let entries = cast_slice_mut::<u8, u64>(to).iter_mut().enumerate();
        entries.for_each(|(entry, to)| *to = address(entry));
    };
    // SAFETY: the allocation has room for the table.
    unsafe { staging.send(bytes, fill, &[(table, 0..bytes)]) }
}

/// Packs some tiles and their exponents, on the host's threads.
fn pack_tiles(
    shape: &Shape,
    weight: &Weight,
    data: &[u8],
    tiles: Range<usize>,
    (packed, exponents): (&mut [u8], &mut [u8]),
) {
    let piece = Piece { shape, format: weight.format, data, tiles, packed, exponents };
    pack_all(std::iter::once(piece));
}

/// Releases the pages of a tensor on the host's threads: one alone takes 20 us for a megabyte.
fn release(file: &File, tensor: &Tensor) {
    let all = tensor.bytes as usize;
    let parts = (0..all).step_by(RELEASED_BYTES);
    let parts = parts.map(|start| start..all.min(start + RELEASED_BYTES));
    LOADERS.for_each(parts, |part| file.release_part(tensor, part));
}

#[cfg(test)]
mod tests {
    use bodkin_gguf::Format;

    use super::*;

    #[test]
    fn formats_of_few_bits_are_stored_in_few_bits() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/parity/models");
        let file = bodkin_model::open(format!("{folder}/llama-q4_k_m.gguf")).unwrap();
        let plan = bodkin_model::plan(file.metadata(), file.tensors()).unwrap();
        for (format, most) in [
            ("Q2_K", "4.00"),
            ("MXFP4", "4.25"),
            ("IQ4_XS", "4.50"),
            ("IQ4_NL", "4.50"),
            ("Q4_K", "5.00"),
            ("Q3_K", "5.00"),
            ("TQ2_0", "5.00"),
            ("IQ2_XS", "5.25"),
            ("IQ3_XXS", "5.25"),
            ("Q5_0", "6.00"),
            ("Q5_K", "6.00"),
            ("Q6_K", "7.00"),
            ("Q8_0", "8.50"),
            ("BF16", "16.00"),
        ] {
            let format = Format::from_name(format).unwrap();
            let mut plan = plan.clone();
            let is_q4_k = |weight: &&mut Weight| weight.format == Format::Q4_K;
            for weight in plan.weights.iter_mut().filter(is_q4_k) {
                (weight.format, weight.rows, weight.cols) = (format, 2048, 2048);
            }
            let others = |weight: &&mut Weight| weight.cols != 2048 && weight.format == format;
            plan.weights.iter_mut().filter(others).for_each(|w| w.format = Format::F16);
            let formats = stored_formats(&plan, 1);
            let stored = formats.iter().find(|stored| stored.format == format).unwrap();
            let bits = 8.0 * stored.stored_bytes as f64 / stored.elements as f64;
            assert_eq!(format!("{bits:.2}"), most, "{}", format.name());
            let matrices: u64 = formats.iter().map(|stored| stored.stored_bytes).sum();
            let all = bytes(&plan, Shard { index: 0, count: 1 }, None);
            assert!(matrices as usize <= all.device);
        }
    }

    #[test]
    fn devices_hold_sharded_weights_once_and_others_each() {
        for model in ["gpt-oss-mxfp4", "llama-q4_k_m", "qwen3moe-q4_k_m"] {
            let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/parity/models");
            let file = bodkin_model::open(format!("{folder}/{model}.gguf")).unwrap();
            let plan = bodkin_model::plan(file.metadata(), file.tensors()).unwrap();
            let held = |offsets: &Offsets| {
                let matrix = offsets
                    .matrix
                    .map_or(0, |(shape, ..)| shape.packed_bytes() + shape.exponents());
                matrix + offsets.vector.as_ref().map_or(0, |(vector, _)| vector.bytes())
            };
            let (whole, _) = offsets(&plan, Shard { index: 0, count: 1 }, None);
            for count in [2, 3] {
                let (sharded, mut sums) = (sharded(&plan, count), vec![0; whole.len()]);
                for index in 0..count {
                    let shard = Shard { index, count };
                    let (own, all) = offsets(&plan, shard, None);
                    let all = all.device;
                    // Alignment takes less than a piece for each form of a weight.
                    let bytes: usize = own.iter().map(held).sum();
                    let most = bytes + 3 * ALIGNMENT * own.len();
                    assert!((bytes..most).contains(&all), "{model}");
                    sums.iter_mut().zip(&own).for_each(|(sum, own)| *sum += held(own));
                }
                for ((sum, whole), sharded) in sums.iter().zip(&whole).zip(&sharded) {
                    let times = if sharded.is_some() { 1 } else { count };
                    assert_eq!(*sum, times * held(whole), "{model}: {whole:?}");
                }
                assert!(sharded.iter().any(Option::is_some), "{model} is sharded");
            }
        }
    }
}
