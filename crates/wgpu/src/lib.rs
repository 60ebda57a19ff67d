//! The Plan on GPUs through Vulkan, Metal and DX12. Every operation is a few dispatches of a
//! WGSL kernel (`shaders/`), recorded in one pass a step. This crate must not know architectures,
//! text or the engine.

#![deny(unsafe_code)]

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
mod unroll;
mod weights;

use std::sync::Arc;

use bodkin_backend::{
    Backend, DeviceInfo, DeviceKind, Error, KvType, Limits, Memory, Model, Progress, Result,
};
use bodkin_gguf::File;
use bodkin_model::Plan;

use gpu::Gpu;

/// A GPU that Vulkan, Metal or DX12 drives.
pub struct Wgpu {
    gpu: Arc<Gpu>,
    kv_type: KvType,
    fuse: bool,
}

/// The adapters of this machine, one line each, in the order of their numbers.
pub fn device_names() -> Vec<String> {
    gpu::adapters().iter().map(|adapter| gpu::describe(&adapter.get_info())).collect()
}

impl Wgpu {
    /// Opens the adapter of a number: discrete GPUs come first, software last.
    ///
    /// # Errors
    /// If there is no such adapter, or it cannot be opened.
    pub fn open(number: usize) -> Result<Wgpu> {
        let adapters = gpu::adapters();
        let Some(adapter) = adapters.get(number) else {
            return Err(Error::Config(match adapters.len() {
                0 => "no GPU with a driver for Vulkan, Metal or DX12 (on Debian, Vulkan needs \
                      libvulkan1 and a driver such as mesa-vulkan-drivers)"
                    .to_owned(),
                count => format!("expected a GPU below {count}, found wgpu:{number}"),
            }));
        };
        Ok(Wgpu { gpu: Arc::new(Gpu::open(adapter)?), kv_type: KvType::Auto, fuse: true })
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
        vec![DeviceInfo {
            kind: DeviceKind::Wgpu,
            name: self.gpu.info.name.clone(),
            total_bytes: None,
            free_bytes: None,
        }]
    }

    fn threads(&self) -> usize {
        1
    }

    fn kv_type(&self) -> KvType {
        self.kv_type
    }

    fn bandwidth(&self) -> Result<f64> {
        bandwidth::measure(&self.gpu)
    }

    fn available_memory(&self) -> Option<u64> {
        None
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
        let how = (self.kv_type, self.fuse);
        let model = model::WgpuModel::load(&self.gpu, plan, file, limits, how, progress)?;
        Ok(Box::new(model))
    }
}
