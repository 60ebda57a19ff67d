//! Experts that stay in the model's file, where the host has no memory for all of them either. Some
//! of them are packed in memory of the host, which has slots for experts of any layer. A kernel
//! behind each choice of experts asks for those that are neither there nor on the device
//! (`kernels/expert_cache.cu`), and waits. During steps a thread answers: it reads them from the
//! file, in the place of those that were used least recently (LRU).

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{self, JoinHandle};

use bodkin_backend::{Error, Result};
use bodkin_gguf::{File, Format, Tensor};
use bodkin_model::{Plan, WeightId};

use crate::constants::TILE_ROWS;
use crate::driver::{Device, Pinned};
use crate::packed::Shape;
use crate::packing::{Piece, pack_all};
use crate::parameters::expert_cache::RequestExperts;

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
    /// Answers requests.
    thread: Option<JoinHandle<()>>,
    /// The addresses of the buffers of these names.
    used_at: u64,
    addresses: u64,
    requests: u64,
    answers: u64,
}

/// Reads experts.
struct Reader {
    file: Arc<File>,
    /// Of each routing.
    layers: Vec<Layer>,
    slot_bytes: usize,
    buffers: Mutex<Buffers>,
    /// Steps that run: requests come from these alone.
    steps: AtomicUsize,
    has_ended: AtomicBool,
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
    /// Of the experts of all layers: the last request when each was chosen.
    used_at: Pinned<u32>,
    /// Of the matrices of all weights: their addresses in slots, or 0.
    addresses: Pinned<u64>,
    /// The number of the last request, and its routing.
    requests: Pinned<u32>,
    /// The number of the last request that was answered.
    answers: Pinned<u32>,
    /// The layer and the expert in each slot.
    experts: Vec<Option<(usize, usize)>>,
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
            used_at: Pinned::zeroed(device, experts)?,
            addresses: Pinned::zeroed(device, matrices)?,
            requests: Pinned::zeroed(device, 2)?,
            answers: Pinned::zeroed(device, 1)?,
            experts: vec![None; slots],
            reads: vec![0; layers.len()],
        };
        let (used_at, addresses) = (buffers.used_at.address(), buffers.addresses.address());
        let (requests, answers) = (buffers.requests.address(), buffers.answers.address());
        let reader = Arc::new(Reader {
            file: Arc::clone(file),
            layers,
            slot_bytes,
            buffers: Mutex::new(buffers),
            steps: AtomicUsize::new(0),
            has_ended: AtomicBool::new(false),
            failure: OnceLock::new(),
        });
        let answering = Arc::clone(&reader);
        let answer = move || answering.answer_all([requests, answers]);
        let thread = thread::Builder::new().name("experts".to_owned()).spawn(answer);
        let thread = thread.map_err(|error| Error::Config(format!("cuda: no thread: {error}")))?;
        Ok(MappedExperts { reader, thread: Some(thread), used_at, addresses, requests, answers })
    }

    /// Where the addresses of the experts of a routing's weight are.
    pub(crate) fn addresses(&self, routing: usize, weight: usize) -> u64 {
        self.addresses + 8 * self.reader.layers[routing].weights[weight].first as u64
    }

    /// The request for experts of a routing, whose layer is at this address.
    pub(crate) fn request(&self, routing: usize, layer: u64) -> RequestExperts {
        RequestExperts {
            layer,
            used_at: self.used_at + 4 * self.reader.layers[routing].first as u64,
            requests: self.requests,
            answers: self.answers,
            routing: routing as u32,
            padding: 0,
        }
    }

    /// Answers requests until the result is dropped.
    pub(crate) fn answer(&self) -> Answering {
        self.reader.steps.fetch_add(1, Ordering::Release);
        if let Some(thread) = &self.thread {
            thread.thread().unpark();
        }
        Answering(Arc::clone(&self.reader))
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

/// Requests are answered as long as it is there.
pub(crate) struct Answering(Arc<Reader>);

impl Drop for Answering {
    fn drop(&mut self) {
        self.0.steps.fetch_sub(1, Ordering::Release);
    }
}

impl Drop for MappedExperts {
    fn drop(&mut self) {
        self.reader.has_ended.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // What it has failed with was said.
            let _ = thread.join();
        }
    }
}

impl Reader {
    fn buffers(&self) -> MutexGuard<'_, Buffers> {
        self.buffers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Answers requests of steps, until the model is dropped.
    fn answer_all(&self, [requests, answers]: [u64; 2]) {
        // SAFETY: the buffers are as long as this has a reader; they are aligned, and the device
        // and this thread alone access these words while they run.
        let [request, routing, answer] = [requests, requests + 4, answers]
            .map(|at| unsafe { AtomicU32::from_ptr(at as *mut u32) });
        let mut answered = 0;
        while !self.has_ended.load(Ordering::Acquire) {
            let number = request.load(Ordering::Acquire);
            if number != answered {
                self.try_read(routing.load(Ordering::Relaxed) as usize, number);
                answered = number;
                answer.store(number, Ordering::Release);
            } else if self.steps.load(Ordering::Acquire) == 0 {
                thread::park();
            } else {
                thread::yield_now();
            }
        }
    }

    fn try_read(&self, routing: usize, now: u32) {
        let result = catch_unwind(AssertUnwindSafe(|| self.read(routing, now)));
        let text = match result {
            Ok(Ok(())) => return,
            Ok(Err(error)) => error.to_string(),
            Err(_) => "experts cannot be packed".to_owned(),
        };
        self.failure.get_or_init(|| text);
    }

    /// Reads the experts of a layer that were chosen at this request and are not here.
    fn read(&self, routing: usize, now: u32) -> bodkin_gguf::Result<()> {
        let layer = &self.layers[routing];
        let mut buffers = self.buffers();
        let taken = buffers.take_slots(&self.layers, routing, now);
        for &(slot, expert) in &taken {
            let start = buffers.tiles.address() + (slot * self.slot_bytes) as u64;
            for weight in &layer.weights {
                let address = start + weight.offset as u64;
                buffers.addresses.slice_mut()[weight.first + expert] = address;
            }
        }
        buffers.reads[routing] += taken.len() as u64;
        // Reading mapped pages behind the end of the file would end the process.
        self.file.check_unchanged()?;
        let parts = || taken.iter().flat_map(|&(_, e)| layer.weights.iter().map(move |w| (e, w)));
        for (expert, weight) in parts() {
            self.file.will_need(&weight.tensor, weight.range(expert));
        }
        let all = buffers.tiles.slice_mut().chunks_exact_mut(self.slot_bytes);
        let mut all: Vec<Option<&mut [u8]>> = all.map(Some).collect();
        pack_all(taken.iter().flat_map(|&(slot, expert)| {
            let bytes = all[slot].take().expect("each expert has a slot of its own");
            self.pieces(layer, expert, bytes)
        }));
        for (expert, weight) in parts() {
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
    fn range(&self, expert: usize) -> Range<usize> {
        expert * self.bytes..(expert + 1) * self.bytes
    }
}

impl Buffers {
    /// Gives slots to the experts of a layer that were chosen at this request and have none, those
    /// that were used least recently. Returns the slots with their experts.
    fn take_slots(&mut self, layers: &[Layer], routing: usize, now: u32) -> Vec<(usize, usize)> {
        let layer = &layers[routing];
        let used_at = &self.used_at.slice()[layer.first..][..layer.experts];
        let addresses = &self.addresses.slice()[layer.weights[0].first..][..layer.experts];
        let is_missing = |&expert: &usize| used_at[expert] == now && addresses[expert] == 0;
        let missing: Vec<usize> = (0..layer.experts).filter(is_missing).collect();
        // Requests of a very long time ago seem new when their number overflows.
        let age = |&(_, expert): &(usize, &Option<(usize, usize)>)| match *expert {
            None => u32::MAX,
            Some((of, expert)) => {
                let used_at = self.used_at.slice()[layers[of].first + expert];
                // Those of this layer are read in this step.
                if of == routing && used_at == now { 0 } else { 1 + now.wrapping_sub(used_at) / 2 }
            }
        };
        let mut slots: Vec<(u32, usize)> =
            self.experts.iter().enumerate().map(|slot| (age(&slot), slot.0)).collect();
        slots.sort_unstable_by(|a, b| b.cmp(a));
        assert!(
            missing.is_empty() || slots[missing.len() - 1].0 > 0,
            "there are slots for all missed experts of a layer"
        );
        let taken = slots.into_iter().map(|(_, slot)| slot).zip(missing);
        let taken: Vec<(usize, usize)> = taken.collect();
        for &(slot, expert) in &taken {
            if let Some((of, victim)) = self.experts[slot].replace((routing, expert)) {
                for weight in &layers[of].weights {
                    self.addresses.slice_mut()[weight.first + victim] = 0;
                }
            }
        }
        taken
    }
}
