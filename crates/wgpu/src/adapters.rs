//! The adapters of this machine, and whether they have what kernels are written for.

mod messages;

use bodkin_backend::{Error, Result};
use pollster::block_on;

/// What kernels with cooperative matrices need.
pub(crate) const COOPERATIVE: wgpu::Features = wgpu::Features::EXPERIMENTAL_COOPERATIVE_MATRIX
    .union(wgpu::Features::SHADER_F16)
    .union(wgpu::Features::SUBGROUP);
/// Threads of a subgroup that they are written for, and the most bytes of shared memory.
const COOPERATIVE_SUBGROUP: u32 = 32;
pub(crate) const COOPERATIVE_SHARED_BYTES: u32 = 44 << 10;

/// The memory of an adapter, as its driver tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DeviceMemory {
    pub(crate) total_bytes: u64,
    /// What this process may still take.
    pub(crate) free_bytes: Option<u64>,
}

/// All adapters of the machine that compute, the fastest kinds first. Software comes last.
pub(crate) fn adapters() -> Vec<wgpu::Adapter> {
    let backends = wgpu::Backends::VULKAN | wgpu::Backends::METAL | wgpu::Backends::DX12;
    let descriptor = wgpu::InstanceDescriptor {
        backends,
        ..wgpu::InstanceDescriptor::new_without_display_handle()
    };
    let mut adapters = messages::filter(|| {
        let instance = wgpu::Instance::new(descriptor);
        block_on(instance.enumerate_adapters(backends))
    });
    let rank = |adapter: &wgpu::Adapter| match adapter.get_info().device_type {
        wgpu::DeviceType::DiscreteGpu => 0,
        wgpu::DeviceType::IntegratedGpu => 1,
        wgpu::DeviceType::VirtualGpu => 2,
        wgpu::DeviceType::Other => 3,
        wgpu::DeviceType::Cpu => 4,
    };
    adapters.sort_by_key(rank);
    adapters
}

/// An adapter in words.
pub(crate) fn describe(info: &wgpu::AdapterInfo) -> String {
    let kind = match info.device_type {
        wgpu::DeviceType::DiscreteGpu => "discrete",
        wgpu::DeviceType::IntegratedGpu => "integrated",
        wgpu::DeviceType::VirtualGpu => "virtual",
        wgpu::DeviceType::Cpu => "software",
        wgpu::DeviceType::Other => "unknown kind",
    };
    let driver = [info.driver.as_str(), info.driver_info.as_str()].join(" ");
    let (least, most) = (info.subgroup_min_size, info.subgroup_max_size);
    let subgroups = if least == most { least.to_string() } else { format!("{least} to {most}") };
    let driver = driver.trim();
    format!("{} ({kind}, {}, driver {driver}, subgroups of {subgroups})", info.name, info.backend)
}

/// As [`describe`], with what fast prompts need if it is there.
pub(crate) fn describe_whole(adapter: &wgpu::Adapter) -> String {
    let matrices = if is_cooperative(adapter) { ", cooperative matrices" } else { "" };
    format!("{}{matrices}", describe(&adapter.get_info()))
}

/// Kernels are written for the least that WebGPU guarantees, which some drivers do not have.
pub(crate) fn check_limits(info: &wgpu::AdapterInfo, limits: &wgpu::Limits) -> Result<()> {
    let least = wgpu::Limits::default();
    let needs = [
        (
            "storage buffers in a kernel",
            limits.max_storage_buffers_per_shader_stage,
            least.max_storage_buffers_per_shader_stage,
        ),
        (
            "bytes of shared memory",
            limits.max_compute_workgroup_storage_size,
            least.max_compute_workgroup_storage_size,
        ),
        (
            "threads in a workgroup",
            limits.max_compute_invocations_per_workgroup,
            least.max_compute_invocations_per_workgroup,
        ),
        (
            "workgroups in a dimension",
            limits.max_compute_workgroups_per_dimension,
            least.max_compute_workgroups_per_dimension,
        ),
    ];
    match needs.into_iter().find(|(_, found, needed)| found < needed) {
        Some((what, found, needed)) => Err(Error::Config(format!(
            "{}: expected at least {needed} {what}, found {found}",
            describe(info)
        ))),
        None => Ok(()),
    }
}

/// Whether the adapter multiplies 16 x 16 halves into single precision, in subgroups of 32.
pub(crate) fn is_cooperative(adapter: &wgpu::Adapter) -> bool {
    let (info, limits) = (adapter.get_info(), adapter.limits());
    let multiplies = |p: &wgpu::CooperativeMatrixProperties| {
        (p.m_size, p.n_size, p.k_size) == (16, 16, 16)
            && p.ab_type == wgpu::CooperativeScalarType::F16
            && p.cr_type == wgpu::CooperativeScalarType::F32
    };
    adapter.features().contains(COOPERATIVE)
        && [info.subgroup_min_size, info.subgroup_max_size] == [COOPERATIVE_SUBGROUP; 2]
        && limits.max_compute_workgroup_storage_size >= COOPERATIVE_SHARED_BYTES
        && adapter.cooperative_matrix_properties().iter().any(multiplies)
}

/// Whether an adapter is likely to be faster than the cores of the host: a GPU with memory of its
/// own, or Apple's.
pub(crate) fn is_fast(info: &wgpu::AdapterInfo) -> bool {
    let is_apple = info.backend == wgpu::Backend::Metal && cfg!(target_arch = "aarch64");
    info.device_type == wgpu::DeviceType::DiscreteGpu || is_apple
}

/// Whether there may be a GPU. Without one, loading all drivers for Vulkan only takes time.
pub(crate) fn may_have_gpu() -> bool {
    // Render nodes, NVIDIA's driver, and Windows' GPUs in its subsystem for Linux.
    let files = ["/dev/dri", "/dev/nvidiactl", "/dev/dxg"];
    !cfg!(target_os = "linux") || files.iter().any(|file| std::path::Path::new(file).exists())
}
