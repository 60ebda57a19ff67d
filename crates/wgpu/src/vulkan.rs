//! What Vulkan tells about an adapter and wgpu does not.

#![allow(unsafe_code)]

use ash::{ext, vk};
use wgpu::hal::api;

use crate::adapters::DeviceMemory;

/// The memory of an adapter that Vulkan drives: its largest local heap.
pub(crate) fn device_memory(adapter: &wgpu::Adapter) -> Option<DeviceMemory> {
    // SAFETY: the adapter is only read.
    let adapter = unsafe { adapter.as_hal::<api::Vulkan>() }?;
    let instance = adapter.shared_instance();
    let has_budget = instance.instance_api_version() >= vk::API_VERSION_1_1
        && adapter.physical_device_capabilities().supports_extension(ext::memory_budget::NAME);
    let (instance, device) = (instance.raw_instance(), adapter.raw_physical_device());
    let mut budget = vk::PhysicalDeviceMemoryBudgetPropertiesEXT::default();
    let memory = if has_budget {
        let mut properties = vk::PhysicalDeviceMemoryProperties2::default().push_next(&mut budget);
        // SAFETY: the device is one of the instance, both know the query, and the device knows the
        // structure that is chained.
        unsafe { instance.get_physical_device_memory_properties2(device, &mut properties) };
        properties.memory_properties
    } else {
        // SAFETY: the device is one of the instance.
        unsafe { instance.get_physical_device_memory_properties(device) }
    };
    let heaps = memory.memory_heaps_as_slice().iter().enumerate();
    let local = heaps.filter(|(_, heap)| heap.flags.contains(vk::MemoryHeapFlags::DEVICE_LOCAL));
    let (i, heap) = local.max_by_key(|(_, heap)| heap.size)?;
    let free = budget.heap_budget[i].saturating_sub(budget.heap_usage[i]).min(heap.size);
    Some(DeviceMemory { total_bytes: heap.size, free_bytes: has_budget.then_some(free) })
}
