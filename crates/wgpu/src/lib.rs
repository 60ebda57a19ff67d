//! The Plan on GPUs through Vulkan, Metal and DX12. Every operation is a few dispatches of a
//! WGSL kernel (`shaders/`), recorded in one pass a step. This crate must not know architectures,
//! text or the engine.

#![deny(unsafe_code)]

mod adapters;
mod bandwidth;
mod batch_data;
mod buffers;
mod dispatch;
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
    Backend, DeviceInfo, DeviceKind, Error, KvType, Limits, Memory, Model, Progress, Result,
};
use bodkin_gguf::File;
use bodkin_model::Plan;

use gpu::Gpu;

/// A GPU that Vulkan, Metal or DX12 drives. Clones share its compiled kernels.
#[derive(Clone)]
pub struct Wgpu {
    gpu: Arc<Gpu>,
    kv_type: KvType,
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

    /// With another type of the KV cache.
    #[must_use]
    pub fn keeping(self, kv_type: KvType) -> Wgpu {
        Wgpu { kv_type, ..self }
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

    fn available_memory(&self) -> Option<u64> {
        let memory = self.gpu.memory();
        let free = memory.map(|memory| memory.free_bytes.unwrap_or(memory.total_bytes));
        let is_of_host = memory.is_none() || self.gpu.shares_host_memory();
        let host = self.host_memory.filter(|_| is_of_host).and_then(|bytes| bytes());
        free.into_iter().chain(host).chain(self.memory_limit).min()
    }

    fn memory(&self, plan: &Plan, limits: &Limits) -> Memory {
        model::memory(&self.gpu, plan, limits, self.kv_type)
    }

    fn load(
        &self,
        plan: Arc<Plan>,
        file: &Arc<File>,
        limits: &Limits,
        progress: Progress<'_>,
    ) -> Result<Box<dyn Model>> {
        let how = (self.kv_type, self.fuse, self.tuning.as_deref());
        let model = model::WgpuModel::load(&self.gpu, plan, file, limits, how, progress)?;
        Ok(Box::new(model))
    }
}
