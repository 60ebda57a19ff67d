//! Memory of the host that the device reads and writes by itself.

use std::sync::Arc;

use bodkin_backend::Result;
use bytemuck::Pod;
use cudarc::driver::sys;

use super::{Device, failed};

/// Memory of the host that the device copies from and to by itself.
pub(crate) struct Pinned<T> {
    device: Arc<Device>,
    start: *mut T,
    len: usize,
}

// SAFETY: it owns its memory, like a `Vec`.
unsafe impl<T: Send> Send for Pinned<T> {}

impl<T: Pod> Pinned<T> {
    /// Takes memory, all zero.
    pub(crate) fn zeroed(device: &Arc<Device>, len: usize) -> Result<Pinned<T>> {
        device.make_current()?;
        let len = len.max(1);
        let mut start = std::ptr::null_mut();
        // SAFETY: the pointer is to a local variable; the memory is freed when dropped.
        unsafe { sys::cuMemHostAlloc(&mut start, len * size_of::<T>(), 0) }
            .result()
            .map_err(failed("no memory of the host"))?;
        let start = start.cast::<T>();
        // SAFETY: the allocation has `len` elements, and zero is a value of every `Pod`.
        unsafe { std::ptr::write_bytes(start, 0, len) };
        Ok(Pinned { device: Arc::clone(device), start, len })
    }

    /// Where the device finds it.
    pub(crate) fn address(&self) -> u64 {
        self.start as u64
    }

    pub(crate) fn slice(&self) -> &[T] {
        // SAFETY: taken and filled by `zeroed`.
        unsafe { std::slice::from_raw_parts(self.start, self.len) }
    }

    pub(crate) fn slice_mut(&mut self) -> &mut [T] {
        // SAFETY: as above, and borrowed alone.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.len) }
    }
}

impl<T> Drop for Pinned<T> {
    fn drop(&mut self) {
        // SAFETY: taken by `zeroed`; an error changes nothing.
        unsafe {
            let _ = self.device.make_current();
            let _ = self.device.synchronize();
            let _ = sys::cuMemFreeHost(self.start.cast()).result();
        }
    }
}
