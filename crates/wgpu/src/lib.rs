//! The Plan on GPUs through Vulkan, Metal and DX12. Every operation is a few dispatches of a
//! WGSL kernel (`shaders/`), recorded in one pass a step. This crate must not know architectures,
//! text or the engine.

#![deny(unsafe_code)]

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
use std::time::Instant;

use bodkin_backend::{
    Backend, DeviceInfo, DeviceKind, Error, KvType, Limits, Memory, Model, Progress, Result,
};
use bodkin_gguf::File;
use bodkin_model::Plan;

use gpu::Gpu;

/// Bytes of the buffer that the bandwidth is measured with: more than a GPU's caches hold.
const LARGE_BYTES: u64 = 512 << 20;
/// Of software.
const SMALL_BYTES: u64 = 64 << 20;
/// Copies of it.
const BANDWIDTH_COPIES: u64 = 8;

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
        let gpu = &self.gpu;
        let largest = gpu.limits.max_storage_buffer_binding_size.min(gpu.limits.max_buffer_size);
        // Software would take long, and its memory is the host's.
        let bytes = if gpu.is_software() { SMALL_BYTES } else { LARGE_BYTES }.min(largest / 4 * 4);
        let from = gpu.buffer("bandwidth", bytes)?;
        let to = gpu.buffer("bandwidth", bytes)?;
        let seconds = |copies: u64| -> Result<f64> {
            let mut encoder = gpu.device.create_command_encoder(&Default::default());
            for _ in 0..copies {
                encoder.copy_buffer_to_buffer(&from, 0, &to, 0, bytes);
            }
            let start = Instant::now();
            gpu.run(Some(encoder.finish()))?;
            Ok(start.elapsed().as_secs_f64())
        };
        seconds(1)?;
        // What a submission takes beside the copies is in both.
        let (few, many) = (seconds(1)?, seconds(1 + BANDWIDTH_COPIES)?);
        // Every byte is read and written.
        Ok((2 * BANDWIDTH_COPIES * bytes) as f64 / (many - few).max(1e-9))
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
