//! Experts that stay in the model's file, where the host has no memory for all of them either. Some
//! of them are packed in slots in memory of the host, none of which is also on the device. Behind
//! each choice of experts, the kernel `request_experts` (`kernels/expert_cache.cu`) requests those
//! that are neither there nor on the device, and polls until a thread of the host has read them
//! from the file. In prompts the thread then reads the next layer's ahead.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use bodkin_backend::{Error, Result};
use bodkin_gguf::{File, Format, Tensor};
use bodkin_model::{Plan, WeightId};

use crate::constants::{
    ANSWER, IS_READING_AHEAD, MAILBOX, READER_HAS_ENDED, REQUEST, REQUESTED_ROUTING,
};
use crate::driver::{Device, Pinned};
use crate::host_slots::{HostSlots, Taken, Victims};
use crate::packed::Shape;
use crate::packing::Piece;
use crate::parameters::expert_cache::RequestExperts;
use crate::threads::READERS;

/// Slots begin at multiples of it.
const ALIGNMENT: usize = 256;

/// How long the thread spins for the next request of a step, which one of the next layers makes,
/// and how long it sleeps between looks after that.
const SPIN_TIME: Duration = Duration::from_micros(500);
const POLL_TIME: Duration = Duration::from_micros(20);

/// Bytes of a slot for an expert whose matrices have these shapes.
pub(crate) fn slot_bytes<'a>(shapes: impl IntoIterator<Item = &'a Shape>) -> usize {
    let bytes = |shape: &Shape| shape.expert_bytes() + shape.expert_exponents();
    shapes.into_iter().map(bytes).sum::<usize>().next_multiple_of(ALIGNMENT)
}

/// The experts of a loaded model on one device.
pub(crate) struct MappedExperts {
    reader: Arc<Reader>,
    thread: Option<JoinHandle<()>>,
    /// The addresses of [`Buffers::used_at`], [`Buffers::tables`] and [`Buffers::mailbox`].
    used_at: u64,
    tables: u64,
    mailbox: u64,
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

/// Sets a word when it is dropped.
struct SetAtEnd<'a>(&'a AtomicU32);

impl Drop for SetAtEnd<'_> {
    fn drop(&mut self) {
        self.0.store(1, Ordering::Release);
    }
}

/// What a thread does for a read.
enum Work<'a> {
    /// Asks the system to read a part of the file.
    Prefetch(&'a Tensor, Range<usize>),
    Pack(Piece<'a>),
}

/// The experts of a routing.
struct Layer {
    experts: usize,
    /// How many of them a row chooses.
    used: usize,
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
    /// The number of the first one in the tables.
    first: usize,
}

struct Buffers {
    /// [slots, slot_bytes]: of each matrix of an expert its tiles, then their exponents.
    tiles: Pinned<u8>,
    /// When each expert of all layers was chosen last without a slot on the device, by its clock of
    /// layers.
    used_at: Pinned<u32>,
    /// The address of each matrix of each weight in a slot, or 0.
    tables: Pinned<u64>,
    /// [MAILBOX]: what the kernel and the thread tell each other.
    mailbox: Pinned<u32>,
    slots: HostSlots,
    /// Experts that were read ahead. The device does not know it yet.
    read_ahead: Vec<Taken>,
    /// Experts of each routing that were read.
    reads: Vec<u64>,
}

impl MappedExperts {
    /// Takes memory of the host for `on_host` experts. The first `on_device` ones of each layer are
    /// on the device.
    ///
    /// # Errors
    /// If the driver has no such memory, or the file does not hold the bytes of an expert.
    pub(crate) fn new(
        device: &Arc<Device>,
        plan: &Plan,
        file: &Arc<File>,
        shapes: impl Fn(WeightId) -> Shape,
        (on_device, on_host): (usize, usize),
    ) -> Result<MappedExperts> {
        let (mut are_on_device, mut matrices) = (Vec::new(), 0);
        let mut layers = Vec::new();
        for (ids, routing) in plan.routed_weights().into_iter().zip(plan.routings()) {
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
                offset += shape.expert_bytes() + shape.expert_exponents();
                matrices += count;
            }
            let (used, first) = (routing.used, are_on_device.len());
            layers.push(Layer { experts: count, used, first, weights });
            are_on_device.extend((0..count).map(|expert| expert < on_device));
        }
        let of_layer = |layer: &Layer| slot_bytes(layer.weights.iter().map(|w| &w.shape));
        let slot_bytes = layers.iter().map(of_layer).max().unwrap_or(0);
        let tiles = Pinned::zeroed(device, on_host * slot_bytes);
        let buffers = Buffers {
            tiles: tiles.map_err(|error| Error::HostMemory(error.to_string()))?,
            used_at: Pinned::zeroed(device, are_on_device.len())?,
            tables: Pinned::zeroed(device, matrices)?,
            mailbox: Pinned::zeroed(device, MAILBOX)?,
            slots: HostSlots::new(on_host, are_on_device),
            read_ahead: Vec::new(),
            reads: vec![0; layers.len()],
        };
        let (used_at, tables) = (buffers.used_at.address(), buffers.tables.address());
        let mailbox = buffers.mailbox.address();
        let reader = Arc::new(Reader {
            file: Arc::clone(file),
            layers,
            slot_bytes,
            buffers: Mutex::new(buffers),
            steps: AtomicUsize::new(0),
            has_ended: AtomicBool::new(false),
            failure: OnceLock::new(),
        });
        let thread = {
            let reader = Arc::clone(&reader);
            thread::Builder::new()
                .name("experts".to_owned())
                .spawn(move || reader.serve_requests(mailbox))
        };
        let thread = thread.map_err(|error| Error::Config(format!("cuda: no thread: {error}")))?;
        Ok(MappedExperts { reader, thread: Some(thread), used_at, tables, mailbox })
    }

    /// Where the table of the addresses of the experts of a routing's weight is.
    pub(crate) fn table(&self, routing: usize, weight: usize) -> u64 {
        self.tables + 8 * self.reader.layers[routing].weights[weight].first as u64
    }

    /// The request for experts of a routing, whose layer is at this address.
    pub(crate) fn request(&self, routing: usize, layer: u64) -> RequestExperts {
        RequestExperts {
            layer,
            used_at: self.used_at + 4 * self.reader.layers[routing].first as u64,
            mailbox: self.mailbox,
            routing: routing as u32,
            padding: 0,
        }
    }

    /// Lets the thread look for requests until the result is dropped.
    pub(crate) fn begin_step(&self) -> StepGuard {
        self.reader.steps.fetch_add(1, Ordering::Release);
        if let Some(thread) = &self.thread {
            thread.thread().unpark();
        }
        StepGuard(Arc::clone(&self.reader))
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

/// A step that may request experts.
pub(crate) struct StepGuard(Arc<Reader>);

impl Drop for StepGuard {
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

    /// Reads what steps request, until the model is dropped.
    fn serve_requests(&self, mailbox: u64) {
        // SAFETY: the buffer is as long, and is there as long as this has a reader; the device and
        // this thread alone access these words while they run.
        let [request, routing, answer, has_ended, is_reading_ahead] =
            [REQUEST, REQUESTED_ROUTING, ANSWER, READER_HAS_ENDED, IS_READING_AHEAD]
                .map(|word| unsafe { AtomicU32::from_ptr((mailbox as *mut u32).add(word)) });
        // Kernels must not wait for a thread that has panicked.
        let _end = SetAtEnd(has_ended);
        let (mut answered, mut asked_at) = (0, Instant::now());
        while !self.has_ended.load(Ordering::Acquire) {
            let number = request.load(Ordering::Acquire);
            if number != answered {
                let routing = routing.load(Ordering::Relaxed) as usize;
                self.record_failure(|| self.read(routing, number));
                let reads_ahead = !self.buffers().read_ahead.is_empty();
                is_reading_ahead.store(u32::from(reads_ahead), Ordering::Relaxed);
                answer.store(number, Ordering::Release);
                if reads_ahead {
                    self.record_failure(|| self.read_ahead(routing + 1));
                }
                (answered, asked_at) = (number, Instant::now());
            } else if self.steps.load(Ordering::Acquire) == 0 {
                thread::park();
            } else if asked_at.elapsed() < SPIN_TIME {
                std::hint::spin_loop();
            } else {
                thread::sleep(POLL_TIME);
            }
        }
    }

    /// Reads, and remembers why that has failed: then the step fails.
    fn record_failure(&self, read: impl FnOnce() -> bodkin_gguf::Result<()>) {
        let text = match catch_unwind(AssertUnwindSafe(read)) {
            Ok(Ok(())) => return,
            Ok(Err(error)) => error.to_string(),
            Err(_) => "experts cannot be packed".to_owned(),
        };
        self.failure.get_or_init(|| text);
    }

    /// Reads the experts of a layer that were chosen now and are not here. Where rows have chosen
    /// most of its experts, they will choose most of the next layer's: those get slots, too, which
    /// are filled while the device computes this layer. (A layer that misses nothing makes no
    /// request, so nothing is read ahead for the one behind it.)
    fn read(&self, routing: usize, now: u32) -> bodkin_gguf::Result<()> {
        let layer = &self.layers[routing];
        let buffers = &mut *self.buffers();
        let start = buffers.tiles.address();
        // Experts that cannot be read have addresses, too: the step fails when it has ended.
        let read_ahead = std::mem::take(&mut buffers.read_ahead);
        read_ahead.iter().for_each(|taken| self.set_addresses(buffers, taken));
        let moved = self.moved(&buffers.slots, start, buffers.tables.slice());
        buffers.slots.follow(now, moved);
        let used_at = buffers.used_at.slice();
        let mut missing = buffers.slots.absent(layer.all());
        missing.retain(|&expert| used_at[expert] == now);
        let count = missing.len();
        let most_are_chosen = layer.most_are_chosen(now, used_at, &buffers.slots);
        let victims = if most_are_chosen { Victims::Newest } else { Victims::Oldest };
        let taken = buffers.slots.take(missing, now, used_at, victims, 0..0);
        assert_eq!(taken.len(), count, "slots for all experts that a layer misses");
        taken.iter().for_each(|taken| {
            self.forget_evicted(buffers, taken);
            self.set_addresses(buffers, taken);
        });
        self.pack(routing, buffers, &taken)?;
        if let Some(next) = self.layers.get(routing + 1).filter(|_| most_are_chosen) {
            let absent = buffers.slots.absent(next.all());
            let used_at = buffers.used_at.slice();
            let taken = buffers.slots.take(absent, now, used_at, Victims::Newest, next.all());
            taken.iter().for_each(|taken| self.forget_evicted(buffers, taken));
            buffers.read_ahead = taken;
        }
        Ok(())
    }

    /// Reads the experts of the layer behind the one that the device computes. It neither reads nor
    /// writes their slots before it has their addresses.
    fn read_ahead(&self, routing: usize) -> bodkin_gguf::Result<()> {
        let buffers = &mut *self.buffers();
        let taken = buffers.read_ahead.clone();
        self.pack(routing, buffers, &taken)
    }

    /// Packs experts of a layer in their slots, by which they are sorted.
    fn pack(
        &self,
        routing: usize,
        Buffers { tiles, reads, .. }: &mut Buffers,
        taken: &[Taken],
    ) -> bodkin_gguf::Result<()> {
        if taken.is_empty() {
            return Ok(());
        }
        let layer = &self.layers[routing];
        reads[routing] += taken.len() as u64;
        // Reading mapped pages behind the end of the file would end the process.
        self.file.check_unchanged()?;
        let parts = layer.parts(taken).map(|(tensor, range)| Work::Prefetch(tensor, range));
        let (mut slots, mut next) = (tiles.slice_mut().chunks_exact_mut(self.slot_bytes), 0);
        let pieces = taken.iter().flat_map(|&Taken { slot, expert, .. }| {
            let bytes = slots.nth(slot - next).expect("one of the slots");
            next = slot + 1;
            self.pieces(layer, expert - layer.first, bytes)
        });
        let pieces = pieces.flat_map(Piece::split).map(Work::Pack);
        READERS.for_each(parts.chain(pieces), |work| match work {
            Work::Prefetch(tensor, range) => self.file.will_need(tensor, range),
            Work::Pack(piece) => piece.pack(),
        });
        Ok(())
    }

    /// Removes the addresses of an expert that loses its slot.
    fn forget_evicted(&self, buffers: &mut Buffers, taken: &Taken) {
        let tables = buffers.tables.slice_mut();
        self.entries(taken.evicted).for_each(|(entry, _)| tables[entry] = 0);
    }

    /// Stores the addresses of an expert that has got a slot.
    fn set_addresses(&self, buffers: &mut Buffers, &Taken { slot, expert, .. }: &Taken) {
        let slot = buffers.tiles.address() + (slot * self.slot_bytes) as u64;
        let tables = buffers.tables.slice_mut();
        self.entries(Some(expert)).for_each(|(entry, at)| tables[entry] = slot + at);
    }

    /// The slots, from `start` on, that hold an expert by these tables but did not before, and the
    /// experts.
    fn moved(&self, slots: &HostSlots, start: u64, tables: &[u64]) -> Vec<(usize, usize)> {
        let address = |slot: usize| start + (slot * self.slot_bytes) as u64;
        let mut moved = Vec::new();
        for layer in &self.layers {
            let addresses = &tables[layer.weights[0].first..][..layer.experts];
            for (&at, expert) in addresses.iter().zip(layer.first..) {
                if at > 0 && slots.slot_of(expert).map(address) != Some(at) {
                    moved.push(((at - start) as usize / self.slot_bytes, expert));
                }
            }
        }
        moved
    }

    /// The entries of an expert in the tables, each with the offset of its matrix in a slot.
    fn entries(&self, expert: Option<usize>) -> impl Iterator<Item = (usize, u64)> {
        let found = expert.and_then(|expert| {
            let of = |layer: &&Layer| layer.all().contains(&expert);
            Some((self.layers.iter().find(of)?, expert))
        });
        found.into_iter().flat_map(|(layer, expert)| {
            let entry = move |w: &Matrices| (w.first + expert - layer.first, w.offset as u64);
            layer.weights.iter().map(entry)
        })
    }

    /// The matrices of an expert, to be packed in its slot.
    fn pieces<'a>(&'a self, layer: &'a Layer, expert: usize, slot: &'a mut [u8]) -> Vec<Piece<'a>> {
        let mut rest = slot;
        let piece = |weight: &'a Matrices| {
            let Matrices { tensor, format, shape, .. } = weight;
            let (packed, behind) = std::mem::take(&mut rest).split_at_mut(shape.expert_bytes());
            let (exponents, behind) = behind.split_at_mut(shape.expert_exponents());
            rest = behind;
            let tiles = expert * shape.tiles()..(expert + 1) * shape.tiles();
            let (format, data) = (*format, self.file.data(tensor));
            Piece { shape, format, data, tiles, packed, exponents }
        };
        layer.weights.iter().map(piece).collect()
    }
}

impl Layer {
    /// The numbers of its experts.
    fn all(&self) -> Range<usize> {
        self.first..self.first + self.experts
    }

    /// Whether rows have chosen most of the experts that are not on the device, and more than one
    /// row can.
    fn most_are_chosen(&self, now: u32, used_at: &[u32], slots: &HostSlots) -> bool {
        let chosen = self.all().filter(|&expert| used_at[expert] == now).count();
        let others = self.all().filter(|&expert| !slots.is_on_device(expert)).count();
        chosen > self.used && 2 * chosen >= others
    }

    /// The bytes of some of its experts in the file.
    fn parts<'a>(
        &'a self,
        taken: &'a [Taken],
    ) -> impl Iterator<Item = (&'a Tensor, Range<usize>)> + 'a {
        taken.iter().flat_map(|taken| {
            let expert = taken.expert - self.first;
            self.weights.iter().map(move |weight| (&weight.tensor, weight.range(expert)))
        })
    }
}

impl Matrices {
    /// The bytes of an expert in the tensor.
    fn range(&self, expert: usize) -> Range<usize> {
        expert * self.bytes..(expert + 1) * self.bytes
    }
}
