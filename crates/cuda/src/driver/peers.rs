//! What devices do with each other: they wait, and copy from each other's memory.

use std::ffi::c_int;
use std::ptr::{null, null_mut};

use bodkin_backend::{Activity, Result};
use cudarc::driver::sys;

use super::{Device, failed};

const UNIFIED: sys::CUmemorytype = sys::CUmemorytype::CU_MEMORYTYPE_UNIFIED;
const DEVICE: sys::CUmemorytype = sys::CUmemorytype::CU_MEMORYTYPE_DEVICE;

/// The same columns of rows in the memories of two devices.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Columns {
    pub(crate) from: u64,
    pub(crate) to: u64,
    /// Bytes of a row.
    pub(crate) bytes: usize,
    /// Bytes from row to row.
    pub(crate) stride: usize,
    pub(crate) rows: usize,
}

impl Device {
    /// Lets this device read and write another's memory without the host; whether the two can do
    /// that, while both run kernels.
    pub(crate) fn reach(&self, other: &Device) -> Result<bool> {
        if self.device == other.device {
            return Ok(false);
        }
        let mut can: c_int = 0;
        // SAFETY: the pointer is to a local variable; both devices are handles of the driver.
        unsafe { sys::cuDeviceCanAccessPeer(&mut can, self.device, other.device) }
            .result()
            .map_err(failed("no answer whether devices reach each other"))?;
        if can == 0 {
            return Ok(false);
        }
        self.make_current()?;
        // SAFETY: the other's context is alive.
        let enabled = unsafe { sys::cuCtxEnablePeerAccess(other.context, 0) };
        let already = sys::CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED;
        Ok(enabled == sys::CUresult::CUDA_SUCCESS || enabled == already)
    }

    /// Copies columns of another device, in this one's stream's order.
    ///
    /// # Safety
    ///
    /// They are in the memory of the other device and of this one, and nobody writes to the former
    /// until the stream has come here.
    pub(crate) unsafe fn pull(&self, other: &Device, columns: &Columns) -> Result<()> {
        self.make_current()?;
        self.traced(Activity::Transfer, Some("copy from another device"), || {
            let result = if self.context == other.context {
                // SAFETY: the caller's promise.
                unsafe { sys::cuMemcpy2DAsync_v2(&within(columns), self.stream) }
            } else {
                let copy = between([other.context, self.context], columns);
                // SAFETY: the caller's promise; both contexts are alive.
                unsafe { sys::cuMemcpy3DPeerAsync(&copy, self.stream) }
            };
            result.result().map_err(failed("nothing can be copied from another device"))
        })
    }
}

/// A copy within a device.
fn within(columns: &Columns) -> sys::CUDA_MEMCPY2D {
    sys::CUDA_MEMCPY2D {
        srcXInBytes: 0,
        srcY: 0,
        srcMemoryType: UNIFIED,
        srcHost: null(),
        srcDevice: columns.from,
        srcArray: null_mut(),
        srcPitch: columns.stride,
        dstXInBytes: 0,
        dstY: 0,
        dstMemoryType: UNIFIED,
        dstHost: null_mut(),
        dstDevice: columns.to,
        dstArray: null_mut(),
        dstPitch: columns.stride,
        WidthInBytes: columns.bytes,
        Height: columns.rows,
    }
}

/// A copy from one of two devices to the other.
fn between([from, to]: [sys::CUcontext; 2], columns: &Columns) -> sys::CUDA_MEMCPY3D_PEER {
    sys::CUDA_MEMCPY3D_PEER {
        srcXInBytes: 0,
        srcY: 0,
        srcZ: 0,
        srcLOD: 0,
        srcMemoryType: DEVICE,
        srcHost: null(),
        srcDevice: columns.from,
        srcArray: null_mut(),
        srcContext: from,
        srcPitch: columns.stride,
        srcHeight: columns.rows,
        dstXInBytes: 0,
        dstY: 0,
        dstZ: 0,
        dstLOD: 0,
        dstMemoryType: DEVICE,
        dstHost: null_mut(),
        dstDevice: columns.to,
        dstArray: null_mut(),
        dstContext: to,
        dstPitch: columns.stride,
        dstHeight: columns.rows,
        WidthInBytes: columns.bytes,
        Height: columns.rows,
        Depth: 1,
    }
}
