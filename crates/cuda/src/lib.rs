//! The Plan on NVIDIA GPUs. A plan is lowered to stages, each a kernel; a step that generates is
//! recorded once as a graph and then sent whole. Only the driver is needed, and it is opened when
//! a device is asked for. This crate must not know architectures, text, or who asks.

mod arena;
mod constants;
mod driver;
mod expert_budget;
mod expert_cache;
mod expert_slots;
mod header;
mod host_slots;
mod kernels;
mod kv_layout;
mod lower;
mod mapped_experts;
mod model;
mod observe;
mod packed;
mod packing;
mod parameters;
mod persistent;
mod run_ahead;
mod shared_memory;
mod sizes;
mod staging;
mod step;
mod step_metadata;
mod tensor_parallel;
mod threads;
mod tuning;
mod watchdog;
mod weights;

use std::path::PathBuf;
use std::sync::Arc;

use bodkin_backend::{
    Backend, DeviceInfo, DeviceKind, Error, ExpertBudget, ExpertStore, KvType, Limits, Memory,
    Model, Progress, Result, StoredFormat, tuning as tuning_file,
};
use bodkin_gguf::File;
use bodkin_model::{DeltaRule, Op, Plan, RecurrentState, Scan};

use constants::{MAX_PEERS, MAX_RULE_DIM, MAX_SCAN_STATE};
use driver::Device;
use expert_budget::ExpertSlots;
pub use header::kernel_headers;
use kernels::Kernels;
use kv_layout::KvLayout;
use lower::Program;
use model::CudaModel;
use packed::Shard;
use sizes::Sizes;
use tensor_parallel::TensorParallel;
use tuning::Tuning;

/// The most pairs of rows and experts in a step: the height of a grid.
const MOST_PAIRS: usize = 65_535;
/// Bytes that are read to find the bandwidth, and how often.
const BANDWIDTH_BYTES: usize = 2 << 30;
const HOST_BANDWIDTH_BYTES: usize = 256 << 20;
const BANDWIDTH_PASSES: usize = 8;

/// An NVIDIA GPU, or several that share models.
pub struct Cuda {
    devices: Vec<(Arc<Device>, Arc<Kernels>)>,
    /// Whether all of several devices can store into each other's memory.
    are_connected: bool,
    fuse: bool,
    kv_type: KvType,
    expert_budget: ExpertBudget,
    expert_store: ExpertStore,
    /// Bytes of the host that are available, if it is known.
    host_memory: fn() -> Option<u64>,
    /// The most bytes of all devices that a model may take, if not all that are free.
    memory_limit: Option<u64>,
    /// The folder of measured launch shapes.
    tuning: Option<PathBuf>,
}

impl Cuda {
    /// Whether there is a driver on this machine.
    pub fn is_installed() -> bool {
        driver::is_installed()
    }

    /// Opens the device of this number.
    ///
    /// # Errors
    /// One line that says why there is none: no driver, one that is too old, no such device.
    pub fn open(ordinal: usize) -> Result<Cuda> {
        let device = Arc::new(Device::open(ordinal)?);
        let kernels = Arc::new(Kernels::load(&device)?);
        let devices = vec![(device, kernels)];
        Ok(Cuda {
            devices,
            are_connected: false,
            fuse: true,
            kv_type: KvType::Auto,
            expert_budget: ExpertBudget::Auto,
            expert_store: ExpertStore::Auto,
            host_memory: || None,
            memory_limit: None,
            tuning: None,
        })
    }

    /// Opens the devices of these numbers. Each gets a share of every model, and one whose number
    /// is there twice gets two.
    ///
    /// # Errors
    /// Those of [`Cuda::open`]; if there are no numbers.
    pub fn open_all(ordinals: &[usize]) -> Result<Cuda> {
        let mut all: Option<Cuda> = None;
        for &ordinal in ordinals {
            let one = Cuda::open(ordinal)?;
            match &mut all {
                None => all = Some(one),
                Some(all) => all.devices.extend(one.devices),
            }
        }
        let none = || Error::Config("cuda: expected the number of a device, found none".to_owned());
        let mut all = all.ok_or_else(none)?;
        all.are_connected = (2..=MAX_PEERS + 1).contains(&all.devices.len());
        for (i, (one, _)) in all.devices.iter().enumerate() {
            for (_, (other, _)) in all.devices.iter().enumerate().filter(|(j, _)| *j != i) {
                all.are_connected &= one.reach(other)?;
            }
        }
        Ok(all)
    }

    /// The same with every operation as a stage of its own, or not: no bit may differ.
    #[must_use]
    pub fn fusing(self, fuse: bool) -> Cuda {
        Cuda { fuse, ..self }
    }

    /// The same with keys and values of all models kept so.
    #[must_use]
    pub fn keeping(self, kv_type: KvType) -> Cuda {
        Cuda { kv_type, ..self }
    }

    /// The same with so much memory for the experts of a model. The others are in memory of the
    /// host, from where kernels read them.
    #[must_use]
    pub fn with_expert_budget(self, expert_budget: ExpertBudget) -> Cuda {
        Cuda { expert_budget, ..self }
    }

    /// The same with this place for the experts without a slot. `host_memory` tells how many bytes
    /// of the host are available, if that is known.
    #[must_use]
    pub fn with_expert_store(
        self,
        expert_store: ExpertStore,
        host_memory: fn() -> Option<u64>,
    ) -> Cuda {
        Cuda { expert_store, host_memory, ..self }
    }

    /// The same for models of at most this many bytes, on all devices together.
    #[must_use]
    pub fn with_memory_limit(self, memory_limit: Option<u64>) -> Cuda {
        Cuda { memory_limit, ..self }
    }

    /// The same with launch shapes of matmuls that are measured when a model is loaded, and kept in
    /// this folder. Without one they are built in: no bit may differ.
    #[must_use]
    pub fn with_tuning(self, tuning: Option<PathBuf>) -> Cuda {
        Cuda { tuning, ..self }
    }

    /// The launch shapes of a loaded model; those that no load has measured yet are measured.
    fn tune(&self, model: &CudaModel) -> Tuning {
        let Some(folder) = &self.tuning else { return Tuning::default() };
        let (device, kernels) = &self.devices[0];
        let driver = format!("cuda{}", device.driver_version);
        let path = tuning_file::path(folder, &device.name, &driver, kernels.checksum());
        let known = Tuning::parse(&tuning_file::read(&path));
        let mut tuning = known.clone();
        // Where there is no memory for its graphs, the other launch shapes are built in. A device
        // that is lost says so in the first step.
        let _ = model.tune(&mut tuning);
        if tuning != known {
            tuning_file::write(&path, &tuning.text());
        }
        tuning
    }

    /// What all shares can have where they are as large as the least.
    fn free_memory(&self) -> Option<u64> {
        let free = self.devices.iter().map(|(device, _)| {
            let free = device.free_memory().ok()?;
            Some(free / self.count(device) as u64)
        });
        let free: Vec<u64> = free.collect::<Option<_>>()?;
        Some(free.iter().min()? * free.len() as u64)
    }

    /// The shards of all devices.
    fn shards(&self) -> impl Iterator<Item = Shard> {
        let count = self.devices.len();
        (0..count).map(move |index| Shard { index, count })
    }

    fn lower(&self, plan: &Plan) -> Program {
        let are_connected = self.are_connected;
        Program { are_connected, ..lower::lower(plan, self.fuse, self.devices.len()) }
    }

    fn sizes(&self, plan: &Plan, program: &Program, limits: &Limits) -> Sizes {
        Sizes::new(plan, program, limits, KvLayout::of(self.kv_type, plan))
    }

    /// What this backend cannot run of a plan.
    fn unsupported(&self, plan: &Plan, limits: &Limits) -> Option<String> {
        let too_wide = plan.states.iter().find_map(|state| match state {
            RecurrentState::Scan(Scan { state, .. }) if *state > MAX_SCAN_STATE => {
                Some(format!("a scan with {state} elements a row (at most {MAX_SCAN_STATE})"))
            }
            RecurrentState::DeltaRule(DeltaRule { head_dim, .. }) if *head_dim > MAX_RULE_DIM => {
                Some(format!("a delta rule with heads of {head_dim} (at most {MAX_RULE_DIM})"))
            }
            _ => None,
        });
        if too_wide.is_some() {
            return too_wide;
        }
        let program = self.lower(plan);
        let kv_layout = KvLayout::of(self.kv_type, plan);
        let mut stages = program.stages.iter();
        let too_wide = stages.find_map(|stage| shared_memory::too_wide(plan, kv_layout, stage));
        if too_wide.is_some() {
            return too_wide;
        }
        let pairs = plan.ops.iter().filter_map(|op| match op {
            Op::ExpertLinear { route, experts, .. } => {
                Some(limits.tokens * route.map_or(*experts, |route| plan.width(route) / 2))
            }
            _ => None,
        });
        let pairs = pairs.max().filter(|&pairs| pairs > MOST_PAIRS);
        pairs.map(|pairs| format!("{pairs} pairs of tokens and experts (at most {MOST_PAIRS})"))
    }

    /// How often a device is there.
    fn count(&self, device: &Device) -> usize {
        self.devices.iter().filter(|(other, _)| other.ordinal() == device.ordinal()).count()
    }
}

/// The devices of this machine, such as `cuda:0 (NVIDIA H200)`, without opening them.
///
/// # Errors
/// If there is no driver, or it does not start.
pub fn device_names() -> Result<Vec<String>> {
    let names = driver::device_names()?.into_iter().enumerate();
    Ok(names.map(|(ordinal, name)| format!("cuda:{ordinal} ({name})")).collect())
}

fn measure_bandwidth(device: &Arc<Device>, kernels: &Kernels) -> Result<f64> {
    device.make_current()?;
    let free = device.free_memory()? as usize / 2;
    let bytes = BANDWIDTH_BYTES.min(free) >> 20 << 20;
    let memory = driver::Memory::zeroed(device, bytes, "the test of bandwidth")?;
    measure_reads(device, kernels, memory.address, bytes)
}

/// How fast a device reads pinned memory of the host.
fn measure_host_bandwidth(device: &Arc<Device>, kernels: &Kernels) -> Result<f64> {
    let memory = driver::Pinned::<u8>::zeroed(device, HOST_BANDWIDTH_BYTES)?;
    measure_reads(device, kernels, memory.address(), HOST_BANDWIDTH_BYTES)
}

/// Bytes a second of the fastest of some passes over zeros, whose sum goes to their start.
fn measure_reads(device: &Arc<Device>, kernels: &Kernels, from: u64, bytes: usize) -> Result<f64> {
    let read = parameters::ReadAll { from, sums: from, count: bytes as u64 / 16 };
    let mut best = f64::MAX;
    for _ in 0..BANDWIDTH_PASSES {
        let start = device.mark()?;
        let grid = [8 * device.processors as usize, 1, 1];
        // SAFETY: the memory holds as much.
        unsafe { device.launch(kernels.read_all, grid, 256, 0, &read) }?;
        let end = device.mark()?;
        device.synchronize()?;
        best = best.min(end.seconds_since(&start)?);
    }
    Ok(bytes as f64 / best)
}

/// The numbers of devices in a list that commas divide; none if it is not one.
pub fn ordinals(list: &str) -> Option<Vec<usize>> {
    list.split(',').map(|number| number.parse().ok()).collect()
}

impl Backend for Cuda {
    fn name(&self) -> String {
        let devices = self.devices.iter().map(|(device, _)| device);
        let numbers: Vec<String> = devices.clone().map(|d| d.ordinal().to_string()).collect();
        let mut names: Vec<&str> = devices.map(|device| device.name.as_str()).collect();
        names.dedup();
        format!("cuda:{} ({})", numbers.join(","), names.join(", "))
    }

    fn devices(&self) -> Vec<DeviceInfo> {
        let info = |(device, _): &(Arc<Device>, _)| {
            let memory = device.memory_info().ok();
            DeviceInfo {
                kind: DeviceKind::Cuda,
                name: device.name.clone(),
                total_bytes: memory.map(|(_, total)| total),
                free_bytes: memory.map(|(free, _)| free),
            }
        };
        self.devices.iter().map(info).collect()
    }

    fn threads(&self) -> usize {
        1
    }

    fn kv_type(&self) -> KvType {
        self.kv_type
    }

    /// Of all devices together: they read their shares at the same time.
    fn measure_bandwidth(&self) -> Result<f64> {
        let speeds = self.devices.iter().map(|(device, kernels)| {
            // A device that has two shares reads them one after the other.
            Ok(measure_bandwidth(device, kernels)? / self.count(device) as f64)
        });
        speeds.sum()
    }

    /// Of all devices together, as [`Cuda::measure_bandwidth`] is.
    fn measure_host_bandwidth(&self) -> Result<Option<f64>> {
        let speeds = self.devices.iter().map(|(device, kernels)| {
            Ok(measure_host_bandwidth(device, kernels)? / self.count(device) as f64)
        });
        speeds.sum::<Result<f64>>().map(Some)
    }

    fn available_memory(&self) -> Option<u64> {
        self.free_memory().map(|all| all.min(self.memory_limit.unwrap_or(u64::MAX)))
    }

    fn memory(&self, plan: &Plan, limits: &Limits) -> Memory {
        let program = self.lower(plan);
        let sizes = self.sizes(plan, &program, limits);
        let devices = self.devices.len() as u64;
        let slots = self.expert_slots(plan, &sizes);
        // All need what the one with the largest share does.
        let weights = self.shards().map(|shard| weights::bytes(plan, shard, slots.on_device));
        let weights = weights.max_by_key(|bytes| bytes.device).unwrap_or_default();
        let cache = slots.on_device.map_or(0, |slots| {
            expert_cache::table_bytes(&program) + self.streamed(plan, slots).bytes() as u64
        });
        let host = slots.on_host.map_or(weights.host, |slots| slots * self.host_slot_bytes(plan));
        Memory {
            weight_bytes: devices * (weights.device as u64 + cache),
            state_bytes: devices * sizes.state(),
            scratch_bytes: devices * sizes.scratch(),
            cached_expert_bytes: devices * weights.slots as u64,
            host_expert_bytes: devices * host as u64,
            maps_experts: slots.on_host.is_some(),
            expert_slots: slots.on_device,
        }
    }

    fn stored_formats(&self, plan: &Plan) -> Vec<StoredFormat> {
        weights::stored_formats(plan, self.devices.len())
    }

    fn load(
        &self,
        plan: Arc<Plan>,
        file: &Arc<File>,
        limits: &Limits,
        progress: Progress<'_>,
    ) -> Result<Box<dyn Model>> {
        if let Some(what) = self.unsupported(&plan, limits) {
            return Err(Error::Unsupported { backend: self.name(), what });
        }
        let program = self.lower(&plan);
        let sizes = self.sizes(&plan, &program, limits);
        let slots = self.expert_slots(&plan, &sizes);
        let load = |slots| {
            let parts = self.devices.iter().zip(self.shards()).map(|((device, kernels), shard)| {
                let made = (program.clone(), sizes.clone(), Arc::clone(kernels), (shard, slots));
                let (index, count) = (shard.index as u64, shard.count as u64);
                let report = |done, total| progress((index * total + done) / count, total);
                let part = CudaModel::load(device, Arc::clone(&plan), file, limits, made, &report);
                part.map_err(|error| match error {
                    Error::Config(text) if count > 1 => {
                        Error::Config(format!("device {}: {text}", device.ordinal()))
                    }
                    error => error,
                })
            });
            parts.collect::<Result<Vec<CudaModel>>>()
        };
        let mut parts = load(slots);
        let (least, all) = self.host_slots(&plan, slots.on_device.unwrap_or(0));
        let mut on_host = slots.on_host.unwrap_or(all);
        // Some systems let a driver have less of the host's memory than is free.
        while matches!(parts, Err(Error::HostMemory(_))) && on_host > least {
            on_host = (on_host / 2).max(least);
            parts = load(ExpertSlots { on_host: Some(on_host), ..slots });
        }
        let mut parts = parts?;
        // Connected parts wait for each other. All have nearly the same shapes.
        let tuning = Arc::new(self.tune(&parts[0]));
        parts.iter_mut().for_each(|part| part.tuning = Arc::clone(&tuning));
        match parts.len() {
            1 => {
                let mut only = parts.remove(0);
                only.list_persistent_stages()?;
                Ok(Box::new(only))
            }
            _ => Ok(Box::new(TensorParallel::new(parts, self.are_connected)?)),
        }
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn commas_divide_numbers_of_devices() {
        assert_eq!(super::ordinals("0"), Some(vec![0]));
        assert_eq!(super::ordinals("2,0,0"), Some(vec![2, 0, 0]));
        for wrong in ["", "0,", ",1", "0;1", "0, 1", "-1", "one"] {
            assert_eq!(super::ordinals(wrong), None, "{wrong}");
        }
    }
}
