//! Memory of the host that the device reads and writes by itself.

use std::sync::Arc;

use bodkin_backend::Result;
use bytemuck::Pod;
use cudarc::driver::sys;
use memmap2::MmapMut;

use super::{Device, failed};
use crate::threads::LOADERS;

/// From this many bytes on, the system gives memory to all threads at once, and the driver pins it
/// then: 50 ms for a gigabyte. The driver takes 430 ms to allocate one, on one thread.
const LARGE_BYTES: usize = 2 << 20;
/// A page, or a part of a large one.
const PAGE_BYTES: usize = 4096;

/// Memory of the host that the device copies from and to by itself.
pub(crate) struct Pinned<T> {
    device: Arc<Device>,
    start: *mut T,
    len: usize,
    /// The memory, if the driver has not allocated it.
    registered: Option<MmapMut>,
}

// SAFETY: it owns its memory, like a `Vec`.
unsafe impl<T: Send> Send for Pinned<T> {}

impl<T: Pod> Pinned<T> {
    /// Takes memory, all zero.
    pub(crate) fn zeroed(device: &Arc<Device>, len: usize) -> Result<Pinned<T>> {
        device.make_current()?;
        let len = len.max(1);
        let bytes = len * size_of::<T>();
        if let Some(mut memory) = (bytes >= LARGE_BYTES).then(|| registered(bytes)).flatten() {
            let start = memory.as_mut_ptr().cast();
            return Ok(Pinned { device: Arc::clone(device), start, len, registered: Some(memory) });
        }
        let mut start = std::ptr::null_mut();
        // SAFETY: the pointer is to a local variable; the memory is freed when dropped.
        unsafe { sys::cuMemHostAlloc(&mut start, bytes, 0) }
            .result()
            .map_err(failed("no memory of the host"))?;
        let start = start.cast::<T>();
        // SAFETY: the allocation has `len` elements, and zero is a value of every `Pod`.
        unsafe { std::ptr::write_bytes(start, 0, len) };
        Ok(Pinned { device: Arc::clone(device), start, len, registered: None })
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

/// Memory of zeros that the device finds at the same address; none where the system or the driver
/// has no such memory.
fn registered(bytes: usize) -> Option<MmapMut> {
    let mut memory = MmapMut::map_anon(bytes).ok()?;
    #[cfg(target_os = "linux")]
    // Where there are no huge pages, small ones do. A child process would make the system copy a
    // page that is written to, and the device would go on with the old one.
    for advice in [memmap2::Advice::HugePage, memmap2::Advice::DontFork] {
        let _ = memory.advise(advice);
    }
    let touch = |part: &mut [u8]| part.iter_mut().step_by(PAGE_BYTES).for_each(|byte| *byte = 0);
    LOADERS.for_each(memory.chunks_mut(LARGE_BYTES), touch);
    let start = memory.as_mut_ptr().cast();
    let mut on_device = 0;
    // SAFETY: the memory is this long, and is unregistered before it is unmapped. The pointer is to
    // a local variable.
    unsafe {
        sys::cuMemHostRegister_v2(start, bytes, 0).result().ok()?;
        let found = sys::cuMemHostGetDevicePointer_v2(&mut on_device, start, 0).result();
        if found.is_err() || on_device != start as u64 {
            let _ = sys::cuMemHostUnregister(start).result();
            return None;
        }
    }
    Some(memory)
}

impl<T> Drop for Pinned<T> {
    fn drop(&mut self) {
        let start = self.start.cast();
        let _ = self.device.make_current();
        let _ = self.device.synchronize();
        match self.registered.take() {
            // SAFETY: registered by `zeroed`. If the driver keeps it, it stays.
            Some(memory) => match unsafe { sys::cuMemHostUnregister(start) }.result() {
                Ok(()) => drop(memory),
                Err(_) => std::mem::forget(memory),
            },
            // SAFETY: taken by `zeroed`; an error changes nothing.
            None => drop(unsafe { sys::cuMemFreeHost(start) }.result()),
        }
    }
}
