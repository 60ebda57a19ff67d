//! Experts that stay in the model's file, where the host has no memory for all of them either. Some
//! of them are packed in memory of the host, which has slots for experts of any layer. Before a
//! layer's matmuls, a function of the host that runs in the stream reads those that the step's rows
//! have chosen and that are neither there nor on the device. They replace those that were used
//! least recently (LRU).

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use bodkin_backend::{Error, Result};
use bodkin_gguf::{File, Format, Tensor};
use bodkin_model::{Plan, WeightId};

use crate::constants::{NO_SLOT, TILE_ROWS};
use crate::driver::{Device, HostCall, Pinned};
use crate::expert_cache::CachedLayer;
use crate::packed::Shape;
use crate::packing::{Piece, pack_all};

/// Slots begin at multiples of it.
const ALIGNMENT: usize = 256;

/// Bytes of an expert's exponents.
fn exponent_bytes(shape: &Shape) -> usize {
    shape.tiles() * TILE_ROWS
}

/// Bytes of a slot for an expert whose matrices have these shapes.
pub(crate) fn slot_bytes<'a>(shapes: impl IntoIterator<Item = &'a Shape>) -> usize {
    let bytes = |shape: &Shape| shape.expert_bytes() + exponent_bytes(shape);
    shapes.into_iter().map(bytes).sum::<usize>().next_multiple_of(ALIGNMENT)
}

/// The experts of a loaded model on one device.
pub(crate) struct MappedExperts {
    reader: Arc<Reader>,
    /// What reads the experts of each routing.
    calls: Vec<HostCall>,
    /// The addresses of `Buffers::counts`, `Buffers::device_slots` and `Buffers::addresses`.
    counts: u64,
    device_slots: u64,
    addresses: u64,
}

/// Reads experts.
struct Reader {
    file: Arc<File>,
    /// Of each routing.
    layers: Vec<Layer>,
    slot_bytes: usize,
    buffers: Mutex<Buffers>,
    /// Why experts could not be read.
    failure: OnceLock<String>,
}

/// The experts of a routing.
struct Layer {
    experts: usize,
    /// The number of the first one among the experts of all layers.
    first: usize,
    weights: Vec<Matrices>,
}

/// The experts' matrices of one weight.
struct Matrices {
    tensor: Tensor,
    format: Format,
    shape: Shape,
    /// Bytes of one in the file.
    bytes: usize,
    /// Where it begins in a slot.
    offset: usize,
    /// The number of the first one among the addresses.
    first: usize,
}

struct Buffers {
    /// [slots, slot_bytes]: of each matrix of an expert its tiles, then their exponents.
    tiles: Pinned<u8>,
    /// Of the experts of all layers: how often each was chosen, as the device has counted.
    counts: Pinned<u32>,
    /// Their slots on the device, or `NO_SLOT`.
    device_slots: Pinned<u32>,
    /// Of the matrices of all weights: their addresses in slots, or where they were.
    addresses: Pinned<u64>,
    /// The counts before the last step.
    last_counts: Vec<u32>,
    /// The slot of each expert.
    slot_of: Vec<Option<usize>>,
    /// The expert in each slot.
    experts: Vec<Option<usize>>,
    /// When each slot was used, in layers of steps.
    used_at: Vec<u64>,
    now: u64,
    /// Experts of each routing that were read.
    reads: Vec<u64>,
}

impl MappedExperts {
    /// Takes memory of the host for this many experts.
    ///
    /// # Errors
    /// If the driver has no such memory, or the file does not hold the bytes of an expert.
    pub(crate) fn new(
        device: &Arc<Device>,
        plan: &Plan,
        file: &Arc<File>,
        shapes: impl Fn(WeightId) -> Shape,
        slots: usize,
    ) -> Result<MappedExperts> {
        let (mut experts, mut matrices) = (0, 0);
        let mut layers = Vec::new();
        for ids in plan.routed_weights() {
            let (mut weights, mut offset, mut count) = (Vec::new(), 0, 0);
            for id in ids {
                let (weight, shape) = (plan.weight(id), shapes(id));
                let tensor = file.tensor(&weight.name).expect("the plan was made from this file");
                if file.is_derived(tensor) {
                    return Err(Error::Config(format!(
                        "cuda: expected experts that the file holds as they are, found {}, which \
                         is made of other data; they cannot stay there",
                        weight.name
                    )));
                }
                count = shape.matrices;
                let bytes = weight.bytes as usize / count;
                let (tensor, format, first) = (tensor.clone(), weight.format, matrices);
                weights.push(Matrices { tensor, format, shape, bytes, offset, first });
                offset += shape.expert_bytes() + exponent_bytes(&shape);
                matrices += count;
            }
            layers.push(Layer { experts: count, first: experts, weights });
            experts += count;
        }
        let of_layer = |layer: &Layer| slot_bytes(layer.weights.iter().map(|w| &w.shape));
        let slot_bytes = layers.iter().map(of_layer).max().unwrap_or(0);
        let buffers = Buffers {
            tiles: Pinned::zeroed(device, slots * slot_bytes)?,
            counts: Pinned::zeroed(device, experts)?,
            device_slots: Pinned::zeroed(device, experts)?,
            addresses: Pinned::zeroed(device, matrices)?,
            last_counts: vec![0; experts],
            slot_of: vec![None; experts],
            experts: vec![None; slots],
            used_at: vec![0; slots],
            now: 0,
            reads: vec![0; layers.len()],
        };
        let [counts, device_slots] = [&buffers.counts, &buffers.device_slots].map(Pinned::address);
        let addresses = buffers.addresses.address();
        let (file, failure) = (Arc::clone(file), OnceLock::new());
        let routings = layers.len();
        let buffers = Mutex::new(buffers);
        let reader = Arc::new(Reader { file, layers, slot_bytes, buffers, failure });
        let call = |routing: usize| {
            let reader = Arc::clone(&reader);
            HostCall::new(move || reader.try_read(routing))
        };
        let calls = (0..routings).map(call).collect();
        Ok(MappedExperts { reader, calls, counts, device_slots, addresses })
    }

    /// Where the addresses of the experts of a routing's weight are.
    pub(crate) fn addresses(&self, routing: usize, weight: usize) -> u64 {
        self.addresses + 8 * self.reader.layers[routing].weights[weight].first as u64
    }

    /// Reads the experts of a layer that the step's rows have chosen, in the stream's order.
    pub(crate) fn read(&self, device: &Device, routing: usize, from: CachedLayer) -> Result<()> {
        let Layer { experts, first, .. } = self.reader.layers[routing];
        let at = |start: u64| start + 4 * first as u64;
        // SAFETY: both have a number for each expert of the layer, and so has the memory of the
        // host; graphs end before the experts.
        unsafe {
            device.copy(at(self.counts), from.counts, 4 * experts)?;
            device.copy(at(self.device_slots), from.slots, 4 * experts)?;
            device.call(&self.calls[routing])
        }
    }

    /// Experts of a routing that were read from the file.
    pub(crate) fn reads(&self, routing: usize) -> u64 {
        self.reader.buffers().reads[routing]
    }

    /// Why experts could not be read: then results are wrong.
    pub(crate) fn failure(&self) -> Option<Error> {
        self.reader.failure.get().map(|text| Error::Config(format!("cuda: {text}")))
    }
}

impl Reader {
    fn buffers(&self) -> MutexGuard<'_, Buffers> {
        self.buffers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn try_read(&self, routing: usize) {
        let result = catch_unwind(AssertUnwindSafe(|| self.read(routing)));
        let text = match result {
            Ok(Ok(())) => return,
            Ok(Err(error)) => error.to_string(),
            Err(_) => "experts cannot be packed".to_owned(),
        };
        self.failure.get_or_init(|| text);
    }

    fn read(&self, routing: usize) -> bodkin_gguf::Result<()> {
        let layer = &self.layers[routing];
        let mut buffers = self.buffers();
        let missing = buffers.missing(layer);
        if missing.is_empty() {
            return Ok(());
        }
        let expert_parts =
            || missing.iter().flat_map(|&e| layer.weights.iter().map(move |w| (e, w)));
        for (expert, weight) in expert_parts() {
            self.file.will_need(&weight.tensor, weight.range(expert));
        }
        let slots: Vec<usize> =
            missing.iter().map(|&expert| buffers.take_slot(layer.first + expert)).collect();
        for (&slot, &expert) in slots.iter().zip(&missing) {
            let start = buffers.tiles.address() + (slot * self.slot_bytes) as u64;
            for weight in &layer.weights {
                let address = start + weight.offset as u64;
                buffers.addresses.slice_mut()[weight.first + expert] = address;
            }
        }
        buffers.reads[routing] += missing.len() as u64;
        // Reading mapped pages behind the end of the file would end the process.
        self.file.check_unchanged()?;
        let all = buffers.tiles.slice_mut().chunks_exact_mut(self.slot_bytes);
        let mut all: Vec<Option<&mut [u8]>> = all.map(Some).collect();
        let of_slots = slots.iter().zip(&missing).flat_map(|(&slot, &expert)| {
            let bytes = all[slot].take().expect("each expert has a slot of its own");
            self.pieces(layer, expert, bytes)
        });
        pack_all(of_slots);
        for (expert, weight) in expert_parts() {
            self.file.release_part(&weight.tensor, weight.range(expert));
        }
        Ok(())
    }

    /// The matrices of an expert, to be packed in its slot.
    fn pieces<'a>(&'a self, layer: &'a Layer, expert: usize, slot: &'a mut [u8]) -> Vec<Piece<'a>> {
        let mut rest = slot;
        let piece = |weight: &'a Matrices| {
            let Matrices { tensor, format, shape, .. } = weight;
            let (packed, behind) = std::mem::take(&mut rest).split_at_mut(shape.expert_bytes());
            let (exponents, behind) = behind.split_at_mut(exponent_bytes(shape));
            rest = behind;
            let tiles = expert * shape.tiles()..(expert + 1) * shape.tiles();
            let (format, data) = (*format, self.file.data(tensor));
            Piece { shape, format, data, tiles, packed, exponents }
        };
        layer.weights.iter().map(piece).collect()
    }
}

impl Matrices {
    /// The bytes of an expert in the tensor.
    fn range(&self, expert: usize) -> std::ops::Range<usize> {
        expert * self.bytes..(expert + 1) * self.bytes
    }
}

impl Buffers {
    /// The experts of a layer that the step has chosen and that are neither here nor on the device.
    /// Those that are here have been used now.
    fn missing(&mut self, layer: &Layer) -> Vec<usize> {
        self.now += 1;
        let mut missing = Vec::new();
        for expert in 0..layer.experts {
            let number = layer.first + expert;
            let count = self.counts.slice()[number];
            let was_chosen = std::mem::replace(&mut self.last_counts[number], count) != count;
            if !was_chosen || self.device_slots.slice()[number] != NO_SLOT {
                continue;
            }
            match self.slot_of[number] {
                Some(slot) => self.used_at[slot] = self.now,
                None => missing.push(expert),
            }
        }
        missing
    }

    /// Gives an expert the slot that was used least recently.
    fn take_slot(&mut self, number: usize) -> usize {
        let slots = 0..self.experts.len();
        let slot = slots.min_by_key(|&slot| self.used_at[slot]).expect("there is a slot");
        assert!(self.used_at[slot] < self.now, "there are slots for all missed experts of a layer");
        self.used_at[slot] = self.now;
        if let Some(victim) = self.experts[slot].replace(number) {
            self.slot_of[victim] = None;
        }
        self.slot_of[number] = Some(slot);
        slot
    }
}
