//! One adapter: its device, its queue, the compiled kernels, and what went wrong on it.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, mpsc};
use std::thread;

use bodkin_backend::{Error, Result};
use pollster::block_on;

use crate::adapters::{COOPERATIVE, DeviceMemory, check_limits, describe, is_cooperative};
use crate::program::{Activations, Arithmetic, Kernel};

/// What profiling needs.
const TIMESTAMPS: wgpu::Features =
    wgpu::Features::TIMESTAMP_QUERY.union(wgpu::Features::TIMESTAMP_QUERY_INSIDE_PASSES);

/// What memory of the host needs that kernels read.
const HOST_MEMORY: wgpu::Features = wgpu::Features::MAPPABLE_PRIMARY_BUFFERS;

/// A compiled kernel.
pub(crate) struct Compiled {
    pub(crate) pipeline: wgpu::ComputePipeline,
    /// Of the dispatch's own bind group. Those of kernels with the same bindings are compatible.
    pub(crate) operands: wgpu::BindGroupLayout,
}

/// An opened adapter. Models share its kernels.
pub(crate) struct Gpu {
    #[cfg(not(target_vendor = "apple"))]
    adapter: wgpu::Adapter,
    pub(crate) info: wgpu::AdapterInfo,
    pub(crate) device: wgpu::Device,
    pub(crate) queue: wgpu::Queue,
    pub(crate) limits: wgpu::Limits,
    /// Whether it measures times between dispatches.
    pub(crate) has_timestamps: bool,
    /// Whether kernels can read memory of the host, without a copy on the device.
    pub(crate) reads_host_memory: bool,
    pub(crate) arithmetic: Arithmetic,
    /// The layout of the bind group with the data of a step.
    pub(crate) batch_layout: wgpu::BindGroupLayout,
    /// Each kernel is compiled once, without keeping the others waiting.
    kernels: Mutex<HashMap<Kernel, Arc<OnceLock<Arc<Compiled>>>>>,
    /// The first error that the device reported.
    failure: Arc<OnceLock<String>>,
}

/// The permission to use cooperative matrices, the only feature here that wgpu calls experimental.
#[allow(unsafe_code)]
fn experimental() -> wgpu::ExperimentalFeatures {
    // SAFETY: such features may have undefined behaviour through bugs of wgpu. The kernels that
    // use it are compiled from texts of our own, whose loads stay in arrays of constant size.
    unsafe { wgpu::ExperimentalFeatures::enabled() }
}

/// Compiles a text of `shaders/`. Its accesses to memory are checked. Counters that end endless
/// loops are left out: with them, a step of 64 rows took a third longer.
#[allow(unsafe_code)]
fn shader_module(
    device: &wgpu::Device,
    text: wgpu::ShaderModuleDescriptor<'_>,
) -> wgpu::ShaderModule {
    let checked = wgpu::ShaderRuntimeChecks::checked();
    let checks = wgpu::ShaderRuntimeChecks { force_loop_bounding: false, ..checked };
    // SAFETY: every loop of `shaders/` counts up to a bound, in steps of at least one. One goes
    // from span to span of a batch, each of which has rows behind those of the last.
    unsafe { device.create_shader_module_trusted(text, checks) }
}

impl Gpu {
    /// Whether it is a program of the CPU.
    pub(crate) fn is_software(&self) -> bool {
        self.info.device_type == wgpu::DeviceType::Cpu
    }

    /// Whether its memory is a part of the host's.
    pub(crate) fn shares_host_memory(&self) -> bool {
        self.info.device_type != wgpu::DeviceType::DiscreteGpu
    }

    /// Its memory, if the driver tells.
    #[cfg(not(target_vendor = "apple"))]
    pub(crate) fn memory(&self) -> Option<DeviceMemory> {
        crate::vulkan::device_memory(&self.adapter)
    }

    /// Metal does not tell it through wgpu.
    #[cfg(target_vendor = "apple")]
    pub(crate) fn memory(&self) -> Option<DeviceMemory> {
        None
    }

    /// Opens an adapter with all that it can do.
    pub(crate) fn open(adapter: wgpu::Adapter) -> Result<Gpu> {
        let info = adapter.get_info();
        let limits = adapter.limits();
        check_limits(&info, &limits)?;
        let is_cooperative = is_cooperative(&adapter);
        let (cooperative, experimental_features) = match is_cooperative {
            true => (COOPERATIVE, experimental()),
            false => (wgpu::Features::empty(), wgpu::ExperimentalFeatures::disabled()),
        };
        let descriptor = wgpu::DeviceDescriptor {
            label: Some("bodkin"),
            required_features: (adapter.features() & (TIMESTAMPS | HOST_MEMORY)) | cooperative,
            required_limits: limits.clone(),
            experimental_features,
            ..wgpu::DeviceDescriptor::default()
        };
        let opened = block_on(adapter.request_device(&descriptor));
        let (device, queue) =
            opened.map_err(|e| Error::Config(format!("cannot open {}: {e}", describe(&info))))?;
        let failure = Arc::new(OnceLock::new());
        let (on_error, on_loss) = (Arc::clone(&failure), Arc::clone(&failure));
        device.on_uncaptured_error(Arc::new(move |error: wgpu::Error| {
            let _ = on_error.set(first_line(&error.to_string()));
        }));
        device.set_device_lost_callback(move |reason, message| {
            if reason != wgpu::DeviceLostReason::Destroyed {
                let _ = on_loss.set(format!("the device was lost: {}", first_line(&message)));
            }
        });
        let batch_layout = device.create_bind_group_layout(&wgpu::BindGroupLayoutDescriptor {
            label: Some("batch"),
            entries: &[storage(0, false)],
        });
        let kernels = Mutex::new(HashMap::new());
        let activations = match info.backend {
            // Apple's GPUs have no packed dot products.
            wgpu::Backend::Metal => Activations::Floats,
            _ => Activations::Bytes,
        };
        let arithmetic = Arithmetic { is_cooperative, activations };
        let has_timestamps = device.features().contains(TIMESTAMPS);
        let reads_host_memory = device.features().contains(HOST_MEMORY);
        Ok(Gpu {
            #[cfg(not(target_vendor = "apple"))]
            adapter,
            info,
            device,
            queue,
            limits,
            has_timestamps,
            reads_host_memory,
            arithmetic,
            batch_layout,
            kernels,
            failure,
        })
    }

    /// The compiled kernel; compiles it at its first use.
    pub(crate) fn kernel(&self, kernel: Kernel) -> Arc<Compiled> {
        let mut kernels = self.kernels.lock().unwrap_or_else(PoisonError::into_inner);
        let compiled = Arc::clone(kernels.entry(kernel).or_default());
        drop(kernels);
        Arc::clone(compiled.get_or_init(|| Arc::new(self.compile(kernel))))
    }

    /// Forgets compiled kernels that no model runs.
    pub(crate) fn forget(&self, kernels: impl IntoIterator<Item = Kernel>) {
        let mut compiled = self.kernels.lock().unwrap_or_else(PoisonError::into_inner);
        kernels.into_iter().for_each(|kernel| drop(compiled.remove(&kernel)));
    }

    /// Compiles those of the kernels that are not compiled yet, on all cores.
    pub(crate) fn compile_all(&self, kernels: impl IntoIterator<Item = Kernel>) {
        let kernels: HashSet<Kernel> = kernels.into_iter().collect();
        let left = Mutex::new(kernels.into_iter());
        let next = || left.lock().unwrap_or_else(PoisonError::into_inner).next();
        let threads = thread::available_parallelism().map_or(1, usize::from);
        thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(|| {
                    while let Some(kernel) = next() {
                        self.kernel(kernel);
                    }
                });
            }
        });
    }

    fn compile(&self, kernel: Kernel) -> Compiled {
        let name = format!("{kernel:?}");
        let module = shader_module(
            &self.device,
            wgpu::ShaderModuleDescriptor {
                label: Some(&name),
                source: wgpu::ShaderSource::Wgsl(kernel.source(self.arithmetic.activations).into()),
            },
        );
        let uniform = wgpu::BindGroupLayoutEntry {
            binding: 0,
            visibility: wgpu::ShaderStages::COMPUTE,
            ty: wgpu::BindingType::Buffer {
                ty: wgpu::BufferBindingType::Uniform,
                has_dynamic_offset: false,
                min_binding_size: None,
            },
            count: None,
        };
        let operands = kernel.writes().iter().zip(1..).map(|(&writes, i)| storage(i, writes));
        let entries: Vec<_> = std::iter::once(uniform).chain(operands).collect();
        let operands = self.device.create_bind_group_layout(&wgpu::BindGroupLayoutDescriptor {
            label: Some(&name),
            entries: &entries,
        });
        let layout = self.device.create_pipeline_layout(&wgpu::PipelineLayoutDescriptor {
            label: Some(&name),
            bind_group_layouts: &[Some(&operands), Some(&self.batch_layout)],
            immediate_size: 0,
        });
        let pipeline = self.device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
            label: Some(&name),
            layout: Some(&layout),
            module: &module,
            entry_point: Some("main"),
            compilation_options: wgpu::PipelineCompilationOptions {
                // No kernel reads shared memory that it has not written.
                zero_initialize_workgroup_memory: false,
                ..wgpu::PipelineCompilationOptions::default()
            },
            cache: None,
        });
        Compiled { pipeline, operands }
    }

    /// A buffer of at least four bytes, zero at first.
    ///
    /// # Errors
    /// If no binding can be so large.
    pub(crate) fn buffer(&self, label: &str, bytes: u64) -> Result<wgpu::Buffer> {
        let copies = wgpu::BufferUsages::COPY_SRC | wgpu::BufferUsages::COPY_DST;
        self.storage_buffer(label, bytes, copies)
    }

    /// A buffer in memory of the host, which kernels read over the bus. It is one that the host
    /// may read: drivers put those that it may only write into memory of the device, where the host
    /// can reach that.
    ///
    /// # Errors
    /// As for [`Gpu::buffer`].
    pub(crate) fn host_buffer(&self, label: &str, bytes: u64) -> Result<wgpu::Buffer> {
        let usage = wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST;
        self.storage_buffer(label, bytes, usage)
    }

    /// A buffer that kernels use, and what else `usage` says.
    fn storage_buffer(
        &self,
        label: &str,
        bytes: u64,
        usage: wgpu::BufferUsages,
    ) -> Result<wgpu::Buffer> {
        let most = self.limits.max_storage_buffer_binding_size.min(self.limits.max_buffer_size);
        if bytes > most {
            return Err(Error::Config(format!(
                "{label} need {} MB, and {} takes at most {} MB in one buffer",
                bytes / 1_000_000,
                self.info.name,
                most / 1_000_000
            )));
        }
        Ok(self.device.create_buffer(&wgpu::BufferDescriptor {
            label: Some(label),
            size: bytes.next_multiple_of(16).max(16),
            usage: wgpu::BufferUsages::STORAGE | usage,
            mapped_at_creation: false,
        }))
    }

    /// A buffer that the host reads.
    pub(crate) fn staging(&self, bytes: u64) -> wgpu::Buffer {
        self.device.create_buffer(&wgpu::BufferDescriptor {
            label: Some("staging"),
            size: bytes.next_multiple_of(4).max(16),
            usage: wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST,
            mapped_at_creation: false,
        })
    }

    /// Runs work, and what was written to buffers before it, to its end.
    ///
    /// # Errors
    /// If the device does not answer any more, or could not do what it was asked for.
    pub(crate) fn run(&self, commands: Option<wgpu::CommandBuffer>) -> Result<()> {
        self.queue.submit(commands);
        self.wait(None)
    }

    /// Waits for all that was submitted, or for all up to a submission.
    fn wait(&self, submission_index: Option<wgpu::SubmissionIndex>) -> Result<()> {
        let waited = self.device.poll(wgpu::PollType::Wait { submission_index, timeout: None });
        self.check()?;
        waited.map(drop).map_err(|error| self.error(&error.to_string()))
    }

    /// Reads the first bytes of a staging buffer, when the work that writes them is done: all that
    /// was submitted, or all up to a submission.
    ///
    /// # Errors
    /// As for [`Gpu::run`].
    pub(crate) fn read(
        &self,
        staging: &wgpu::Buffer,
        bytes: u64,
        submission: Option<wgpu::SubmissionIndex>,
        read: impl FnOnce(&[u8]),
    ) -> Result<()> {
        let slice = staging.slice(..bytes.next_multiple_of(4));
        let (sender, mapped) = mpsc::channel();
        slice.map_async(wgpu::MapMode::Read, move |done| {
            let _ = sender.send(done);
        });
        self.wait(submission)?;
        // Another thread that waits for this device may be the one that calls back.
        match mapped.recv() {
            Ok(Ok(())) => {}
            Ok(Err(error)) => return Err(self.error(&error.to_string())),
            Err(_) => return Err(self.error("a buffer was not mapped")),
        }
        let view = slice.get_mapped_range().map_err(|error| self.error(&error.to_string()))?;
        read(&view[..bytes as usize]);
        drop(view);
        staging.unmap();
        Ok(())
    }

    /// What the device has reported, if anything.
    ///
    /// # Errors
    /// The first error since it was opened.
    pub(crate) fn check(&self) -> Result<()> {
        self.failure.get().map_or(Ok(()), |message| Err(self.error(message)))
    }

    fn error(&self, message: &str) -> Error {
        Error::Config(format!("{}: {message}", self.info.name))
    }
}

/// A storage buffer of a bind group.
fn storage(binding: u32, writes: bool) -> wgpu::BindGroupLayoutEntry {
    wgpu::BindGroupLayoutEntry {
        binding,
        visibility: wgpu::ShaderStages::COMPUTE,
        ty: wgpu::BindingType::Buffer {
            ty: wgpu::BufferBindingType::Storage { read_only: !writes },
            has_dynamic_offset: false,
            min_binding_size: None,
        },
        count: None,
    }
}

fn first_line(text: &str) -> String {
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    lines.take(3).collect::<Vec<_>>().join(": ")
}
