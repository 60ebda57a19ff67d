//! The Plan on GPUs through Vulkan, Metal and DX12. Every operation is a few dispatches of a
//! WGSL kernel (`shaders/`), recorded in one pass a step. This crate must not know architectures,
//! text or the engine.

#![deny(unsafe_code)]

mod adapters;
mod bandwidth;
mod batch_data;
mod buffers;
mod dispatch;
mod expert_cache;
mod gpu;
mod kernels;
mod kv;
mod layout;
mod lower;
mod model;
mod observe;
mod program;
mod timestamps;
mod tuning;
mod unroll;
#[cfg(not(target_vendor = "apple"))]
mod vulkan;
mod weights;

use std::path::PathBuf;
use std::sync::Arc;

use bodkin_backend::{
    Backend, DeviceInfo, DeviceKind, Error, ExpertBudget, KvType, Limits, Memory, Model, Progress,
    Result,
};
use bodkin_gguf::File;
use bodkin_model::Plan;

use gpu::Gpu;

/// A GPU that Vulkan, Metal or DX12 drives. Clones share its compiled kernels.
#[derive(Clone)]
pub struct Wgpu {
    gpu: Arc<Gpu>,
    kv_type: KvType,
    expert_budget: ExpertBudget,
    memory_limit: Option<u64>,
    host_memory: Option<fn() -> Option<u64>>,
    fuse: bool,
    /// The folder of measured shapes.
    tuning: Option<PathBuf>,
}

/// The adapters of this machine, one line each, in the order of their numbers.
pub fn device_names() -> Vec<String> {
    adapters::adapters().iter().map(adapters::describe_whole).collect()
}

impl Wgpu {
    /// Opens the adapter of a number: discrete GPUs come first, software last.
    ///
    /// # Errors
    /// If there is no such adapter, or it cannot be opened.
    pub fn open(number: usize) -> Result<Wgpu> {
        let mut adapters = adapters::adapters();
        if number >= adapters.len() {
            return Err(Error::Config(match adapters.len() {
                0 => "no GPU with a driver for Vulkan, Metal or DX12 (on Debian, Vulkan needs \
                      libvulkan1 and a driver such as mesa-vulkan-drivers)"
                    .to_owned(),
                count => format!("expected a GPU below {count}, found wgpu:{number}"),
            }));
        }
        Wgpu::new(adapters.swap_remove(number))
    }

    /// Opens the first GPU that is likely to be faster than the host's cores, if there is one: a
    /// discrete GPU, or Apple's.
    ///
    /// # Errors
    /// If it cannot be opened.
    pub fn open_fast() -> Result<Option<Wgpu>> {
        if !adapters::may_have_gpu() {
            return Ok(None);
        }
        let fast = |adapter: &wgpu::Adapter| adapters::is_fast(&adapter.get_info());
        adapters::adapters().into_iter().find(fast).map(Wgpu::new).transpose()
    }

    fn new(adapter: wgpu::Adapter) -> Result<Wgpu> {
        let gpu = Arc::new(Gpu::open(adapter)?);
        Ok(Wgpu {
            gpu,
            kv_type: KvType::Auto,
            expert_budget: ExpertBudget::Auto,
            memory_limit: None,
            host_memory: None,
            fuse: true,
            tuning: None,
        })
    }

    /// Whether the adapter is a program of the CPU, such as Mesa's lavapipe.
    pub fn is_software(&self) -> bool {
        self.gpu.is_software()
    }

    /// Whether its memory is the host's: of integrated, Apple's and software adapters.
    pub fn shares_host_memory(&self) -> bool {
        self.gpu.shares_host_memory()
    }

    /// With another type of the KV cache.
    #[must_use]
    pub fn keeping(self, kv_type: KvType) -> Wgpu {
        Wgpu { kv_type, ..self }
    }

    /// Whether it can cache experts: kernels read those without a slot from memory of the host.
    pub fn caches_experts(&self) -> bool {
        self.gpu.reads_host_memory
    }

    /// With so much memory for the experts of a model. The others are in memory of the host.
    #[must_use]
    pub fn with_expert_budget(self, expert_budget: ExpertBudget) -> Wgpu {
        Wgpu { expert_budget, ..self }
    }

    /// Says how much memory of the host is free, which limits an adapter that shares it, or whose
    /// own memory is not known.
    #[must_use]
    pub fn with_host_memory(self, host_memory: fn() -> Option<u64>) -> Wgpu {
        Wgpu { host_memory: Some(host_memory), ..self }
    }

    /// With a limit on the bytes of memory, if there is one.
    #[must_use]
    pub fn with_memory_limit(self, memory_limit: Option<u64>) -> Wgpu {
        Wgpu { memory_limit, ..self }
    }

    /// With shapes of kernels that are measured when a model is loaded, and kept in this folder.
    /// Without one they are built in: the results are the same.
    #[must_use]
    pub fn with_tuning(self, tuning: Option<PathBuf>) -> Wgpu {
        Wgpu { tuning, ..self }
    }

    /// With or without operations that run together, for comparison: the results are the same.
    #[must_use]
    pub fn fusing(self, fuse: bool) -> Wgpu {
        Wgpu { fuse, ..self }
    }

    /// Checks that all experts in memory of the host and what is on the device fit there together,
    /// where that is the same memory.
    fn check_shared_memory(&self, memory: &Memory) -> Result<()> {
        let on_device = memory.weight_bytes + memory.state_bytes + memory.scratch_bytes;
        let all = on_device + memory.host_expert_bytes;
        let free = self.available_memory().unwrap_or(u64::MAX);
        if memory.host_expert_bytes == 0 || !self.gpu.shares_host_memory() || all <= free {
            return Ok(());
        }
        Err(Error::Config(format!(
            "{} shares the host's memory: with --expert-budget all experts, their slots and the \
             rest of the model need {} MB, and {} MB are free; without it they need less",
            self.gpu.info.name,
            all / 1_000_000,
            free / 1_000_000
        )))
    }

    /// The slots for experts in each layer of a model, or none if all experts are on the device.
    /// Without a limit they are where their memory is the host's anyway, or is not known.
    fn expert_slots(&self, plan: &Plan, limits: &Limits) -> Option<usize> {
        let experts = expert_cache::expert_bytes(plan);
        if !self.caches_experts() || experts.experts == 0 {
            return None;
        }
        if self.expert_budget == ExpertBudget::Auto && self.gpu.shares_host_memory() {
            return None;
        }
        let memory = self.gpu.memory();
        let free = memory.map(|memory| memory.free_bytes.unwrap_or(memory.total_bytes));
        let all = model::memory(&self.gpu, plan, limits, self.kv_type, None);
        let model = all.weight_bytes + all.state_bytes + all.scratch_bytes;
        experts.slots_on_device(self.expert_budget, model, (free, self.memory_limit), |_| 0)
    }
}

impl Backend for Wgpu {
    fn name(&self) -> String {
        format!("wgpu ({}, {})", self.gpu.info.name, self.gpu.info.backend)
    }

    fn devices(&self) -> Vec<DeviceInfo> {
        let memory = self.gpu.memory();
        vec![DeviceInfo {
            kind: DeviceKind::Wgpu,
            name: self.gpu.info.name.clone(),
            total_bytes: memory.map(|memory| memory.total_bytes),
            free_bytes: memory.and_then(|memory| memory.free_bytes),
        }]
    }

    fn threads(&self) -> usize {
        1
    }

    fn kv_type(&self) -> KvType {
        self.kv_type
    }

    fn measure_bandwidth(&self) -> Result<f64> {
        bandwidth::measure(&self.gpu)
    }

    fn measure_host_bandwidth(&self) -> Result<Option<f64>> {
        bandwidth::measure_host(&self.gpu)
    }

    fn available_memory(&self) -> Option<u64> {
        let memory = self.gpu.memory();
        let free = memory.map(|memory| memory.free_bytes.unwrap_or(memory.total_bytes));
        let is_of_host = memory.is_none() || self.gpu.shares_host_memory();
        let host = self.host_memory.filter(|_| is_of_host).and_then(|bytes| bytes());
        free.into_iter().chain(host).chain(self.memory_limit).min()
    }

    fn memory(&self, plan: &Plan, limits: &Limits) -> Memory {
        let slots = self.expert_slots(plan, limits);
        model::memory(&self.gpu, plan, limits, self.kv_type, slots)
    }

    fn load(
        &self,
        plan: Arc<Plan>,
        file: &Arc<File>,
        limits: &Limits,
        progress: Progress<'_>,
    ) -> Result<Box<dyn Model>> {
        let slots = self.expert_slots(&plan, limits);
        self.check_shared_memory(&model::memory(&self.gpu, &plan, limits, self.kv_type, slots))?;
        let how = (self.kv_type, self.fuse, self.tuning.as_deref(), slots);
        let model = model::WgpuModel::load(&self.gpu, plan, file, limits, how, progress)?;
        Ok(Box::new(model))
    }
}
