//! What a backend computes on.

/// The kind of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceKind {
    /// The cores of the host.
    Cpu,
    /// An NVIDIA GPU.
    Cuda,
    /// A GPU through Vulkan, Metal or DX12.
    Wgpu,
}

/// One device of a backend.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// What it is.
    pub kind: DeviceKind,
    /// Its name, such as `NVIDIA H200`.
    pub name: String,
    /// Its memory, if the system tells.
    pub total_bytes: Option<u64>,
    /// The part of its memory that is free now, if the system tells.
    pub free_bytes: Option<u64>,
}
