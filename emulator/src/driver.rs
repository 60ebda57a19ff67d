//! The functions of the CUDA driver API that the CUDA backend calls. Streams are asynchronous: an
//! operation is queued, and executed while the host waits for a stream or an event, or frees
//! memory. All streams take random turns until what the host waits for is done, so launches of two
//! streams can wait for each other. Between such calls nothing is executed: a host that waits for a
//! launch must have enqueued what this launch waits for.

mod state;

use std::cell::Cell;
use std::ffi::{CStr, c_char, c_float, c_int, c_uint, c_void};
use std::sync::Arc;
use std::{ptr, slice};

use cudarc::driver::sys::{
    CUDA_MEMCPY2D, CUDA_MEMCPY3D_PEER, CUcontext, CUdevice, CUdevice_attribute, CUdeviceptr,
    CUevent, CUfunction, CUgraph, CUgraphExec, CUlaunchAttributeID, CUlaunchConfig, CUmodule,
    CUresult, CUstream,
};

use self::state::{SETTINGS, hopper_ptx, state};

use crate::launch::Launch;
use crate::parse::Module;
use crate::stream_op::StreamOp;

/// The number of devices. They are identical and share their memory.
const DEVICES: c_int = 3;
/// Memory of all devices together.
const MEMORY_BYTES: usize = 4 << 30;
/// The shared memory limit of a block, as on Hopper.
const SHARED_BYTES: c_int = 227 << 10;
/// The CUDA version that the driver reports.
const VERSION: c_int = 12040;

thread_local! {
    static CURRENT: Cell<CUcontext> = const { Cell::new(ptr::null_mut()) };
}

/// Writes a result to the caller's pointer.
///
/// # Safety
/// The pointer is valid for the value.
unsafe fn put<T>(to: *mut T, value: T) -> CUresult {
    // SAFETY: the caller's promise.
    unsafe { to.write(value) };
    CUresult::CUDA_SUCCESS
}

macro_rules! driver {
    ($($(#[$of:meta])* fn $name:ident($($arg:ident: $ty:ty),*) $body:block)*) => {
        $(
            $(#[$of])*
            #[unsafe(no_mangle)]
            unsafe extern "C" fn $name($($arg: $ty),*) -> CUresult $body
        )*
    };
}

/// Enqueues a copy after a check of its device addresses.
fn copy(to: u64, from: u64, bytes: usize, stream: CUstream, device: &[u64]) -> CUresult {
    let mut state = state();
    match device.iter().try_for_each(|&at| state.memory.allocation(at, bytes).map(|_| ())) {
        Ok(()) => state.enqueue(stream, StreamOp::Copy { to, from, bytes }),
        Err(fault) => state.fail(&fault),
    }
}

const DONE: CUresult = CUresult::CUDA_SUCCESS;

// SAFETY, of all functions: the caller's promises to the driver, among them that result pointers
// are valid and that handles come from this driver.
driver! {
    fn cuInit(_flags: c_uint) {
        DONE
    }
    fn cuDriverGetVersion(to: *mut c_int) {
        // SAFETY: see above.
        unsafe { put(to, VERSION) }
    }
    fn cuGetErrorName(error: CUresult, to: *mut *const c_char) {
        let name = match error {
            CUresult::CUDA_ERROR_OUT_OF_MEMORY => c"CUDA_ERROR_OUT_OF_MEMORY",
            CUresult::CUDA_ERROR_LAUNCH_FAILED => c"CUDA_ERROR_LAUNCH_FAILED",
            CUresult::CUDA_ERROR_NOT_FOUND => c"CUDA_ERROR_NOT_FOUND",
            CUresult::CUDA_ERROR_INVALID_IMAGE => c"CUDA_ERROR_INVALID_IMAGE",
            _ => c"CUDA_ERROR_UNKNOWN",
        };
        // SAFETY: see above.
        unsafe { put(to, name.as_ptr()) }
    }
    fn cuDeviceGetCount(to: *mut c_int) {
        // SAFETY: see above.
        unsafe { put(to, DEVICES) }
    }
    fn cuDeviceGet(to: *mut CUdevice, ordinal: c_int) {
        // SAFETY: see above.
        unsafe { put(to, ordinal) }
    }
    fn cuDeviceGetName(to: *mut c_char, len: c_int, _device: CUdevice) {
        let name = c"emulated".to_bytes_with_nul();
        assert!(len as usize >= name.len(), "a buffer for the device's name");
        // SAFETY: see above.
        unsafe { ptr::copy(name.as_ptr().cast(), to, name.len()) };
        DONE
    }
    fn cuDeviceGetAttribute(to: *mut c_int, attribute: CUdevice_attribute, _device: CUdevice) {
        use CUdevice_attribute as A;
        let value = match attribute {
            A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR => {
                if SETTINGS.hopper.is_some() { 9 } else { 8 }
            }
            A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN => SHARED_BYTES,
            A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT => SETTINGS.processors,
            _ => 0,
        };
        // SAFETY: see above.
        unsafe { put(to, value) }
    }
    fn cuDevicePrimaryCtxRetain(to: *mut CUcontext, device: CUdevice) {
        // SAFETY: see above.
        unsafe { put(to, (device as usize + 1) as CUcontext) }
    }
    fn cuDevicePrimaryCtxRelease_v2(_device: CUdevice) {
        DONE
    }
    fn cuDeviceCanAccessPeer(to: *mut c_int, _device: CUdevice, _other: CUdevice) {
        // SAFETY: see above.
        unsafe { put(to, 1) }
    }
    fn cuCtxEnablePeerAccess(_other: CUcontext, _flags: c_uint) {
        DONE
    }
    fn cuCtxSetCurrent(context: CUcontext) {
        CURRENT.set(context);
        DONE
    }
    fn cuCtxGetCurrent(to: *mut CUcontext) {
        // SAFETY: see above.
        unsafe { put(to, CURRENT.get()) }
    }
    fn cuStreamCreate(to: *mut CUstream, _flags: c_uint) {
        // SAFETY: see above.
        unsafe { put(to, state().handle()) }
    }
    fn cuStreamDestroy_v2(stream: CUstream) {
        state().finish(stream)
    }
    fn cuStreamSynchronize(stream: CUstream) {
        state().finish(stream)
    }
    fn cuStreamWaitEvent(stream: CUstream, event: CUevent, _flags: c_uint) {
        state().wait_for(stream, event)
    }
    fn cuEventCreate(to: *mut CUevent, _flags: c_uint) {
        // SAFETY: see above.
        unsafe { put(to, state().handle()) }
    }
    fn cuEventDestroy_v2(event: CUevent) {
        state().destroy_event(event);
        DONE
    }
    fn cuEventRecord(event: CUevent, stream: CUstream) {
        state().record(event, stream)
    }
    fn cuEventSynchronize(event: CUevent) {
        state().finish_event(event)
    }
    fn cuEventElapsedTime(to: *mut c_float, start: CUevent, end: CUevent) {
        match state().milliseconds(start, end) {
            // SAFETY: see above.
            Ok(milliseconds) => unsafe { put(to, milliseconds) },
            Err(result) => result,
        }
    }
    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) {
        // SAFETY: see above.
        unsafe {
            put(free, MEMORY_BYTES - state().memory.bytes());
            put(total, MEMORY_BYTES)
        }
    }
    fn cuMemAlloc_v2(to: *mut CUdeviceptr, bytes: usize) {
        let mut state = state();
        if state.has_failed {
            return CUresult::CUDA_ERROR_LAUNCH_FAILED;
        }
        match state.memory.allocate(bytes, MEMORY_BYTES) {
            // SAFETY: see above.
            Some(address) => unsafe { put(to, address) },
            None => CUresult::CUDA_ERROR_OUT_OF_MEMORY,
        }
    }
    fn cuMemFree_v2(address: CUdeviceptr) {
        state().free(address)
    }
    fn cuMemHostAlloc(to: *mut *mut c_void, bytes: usize, _flags: c_uint) {
        let mut state = state();
        if state.has_failed {
            return CUresult::CUDA_ERROR_LAUNCH_FAILED;
        }
        match state.memory.allocate(bytes, MEMORY_BYTES) {
            // SAFETY: see above.
            Some(address) => unsafe { put(to, address as *mut c_void) },
            None => CUresult::CUDA_ERROR_OUT_OF_MEMORY,
        }
    }
    fn cuMemFreeHost(address: *mut c_void) {
        state().free(address as u64)
    }
    fn cuMemHostRegister_v2(address: *mut c_void, bytes: usize, _flags: c_uint) {
        let mut state = state();
        if state.has_failed {
            return CUresult::CUDA_ERROR_LAUNCH_FAILED;
        }
        match state.memory.register(address as u64, bytes, MEMORY_BYTES) {
            true => DONE,
            false => CUresult::CUDA_ERROR_OUT_OF_MEMORY,
        }
    }
    fn cuMemHostGetDevicePointer_v2(to: *mut CUdeviceptr, address: *mut c_void, _flags: c_uint) {
        // SAFETY: see above.
        unsafe { put(to, address as CUdeviceptr) }
    }
    fn cuMemHostUnregister(address: *mut c_void) {
        state().unregister(address as u64)
    }
    fn cuMemsetD8Async(to: CUdeviceptr, byte: u8, bytes: usize, stream: CUstream) {
        state().enqueue(stream, StreamOp::Fill { to, byte, bytes })
    }
    fn cuMemcpyHtoDAsync_v2(to: CUdeviceptr, from: *const c_void, bytes: usize, stream: CUstream) {
        copy(to, from as u64, bytes, stream, &[to])
    }
    fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: CUdeviceptr, bytes: usize, stream: CUstream) {
        copy(to as u64, from, bytes, stream, &[from])
    }
    fn cuMemcpyDtoDAsync_v2(to: CUdeviceptr, from: CUdeviceptr, bytes: usize, stream: CUstream) {
        copy(to, from, bytes, stream, &[from, to])
    }
    fn cuMemcpy2DAsync_v2(copy: *const CUDA_MEMCPY2D, stream: CUstream) {
        // SAFETY: see above.
        let copy = unsafe { &*copy };
        let (to, from, bytes) = (copy.dstDevice, copy.srcDevice, copy.WidthInBytes);
        let (rows, pitches) = (copy.Height, [copy.dstPitch, copy.srcPitch]);
        state().enqueue(stream, StreamOp::CopyRows { to, from, bytes, rows, pitches })
    }
    fn cuMemcpy3DPeerAsync(copy: *const CUDA_MEMCPY3D_PEER, stream: CUstream) {
        // SAFETY: see above.
        let copy = unsafe { &*copy };
        let (to, from, bytes) = (copy.dstDevice, copy.srcDevice, copy.WidthInBytes);
        let (rows, pitches) = (copy.Height, [copy.dstPitch, copy.srcPitch]);
        state().enqueue(stream, StreamOp::CopyRows { to, from, bytes, rows, pitches })
    }
    fn cuModuleLoadData(to: *mut CUmodule, image: *const c_void) {
        // SAFETY: see above: an ELF image (a cubin), or PTX that ends with a zero.
        let is_cubin = unsafe { slice::from_raw_parts(image.cast::<u8>(), 4) } == b"\x7fELF";
        let text = match (&SETTINGS.hopper, is_cubin) {
            // SAFETY: see above.
            (Some(folder), true) => unsafe { hopper_ptx(folder, image.cast()) },
            (_, true) => None,
            // SAFETY: see above.
            (_, false) => unsafe { CStr::from_ptr(image.cast()) }.to_str().ok().map(str::to_owned),
        };
        let Some(text) = text else { return CUresult::CUDA_ERROR_INVALID_IMAGE };
        let mut state = state();
        let module = state.handle();
        state.modules.insert(module as usize, Arc::new(Module::new(&text)));
        // SAFETY: see above.
        unsafe { put(to, module) }
    }
    fn cuModuleUnload(module: CUmodule) {
        state().modules.remove(&(module as usize));
        DONE
    }
    fn cuModuleGetFunction(to: *mut CUfunction, module: CUmodule, name: *const c_char) {
        // SAFETY: see above.
        let name = unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned();
        let mut state = state();
        let module = Arc::clone(&state.modules[&(module as usize)]);
        if !module.has(&name) {
            return CUresult::CUDA_ERROR_NOT_FOUND;
        }
        let function = state.handle();
        state.functions.insert(function as usize, (module, name));
        // SAFETY: see above.
        unsafe { put(to, function) }
    }
    fn cuFuncSetAttribute(_function: CUfunction, _attribute: c_uint, value: c_int) {
        if value <= SHARED_BYTES { DONE } else { CUresult::CUDA_ERROR_INVALID_VALUE }
    }
    fn cuLaunchKernelEx(
        config: *const CUlaunchConfig,
        function: CUfunction,
        parameters: *mut *mut c_void,
        _extra: *mut *mut c_void
    ) {
        // SAFETY: see above.
        let config = unsafe { &*config };
        let attributes = match config.numAttrs {
            0 => &[],
            // SAFETY: see above.
            count => unsafe { slice::from_raw_parts(config.attrs, count as usize) },
        };
        let cooperative = CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
        let mut state = state();
        let kernel = match state.kernel(function) {
            Ok(kernel) => kernel,
            Err(fault) => return state.fail(&fault),
        };
        // SAFETY: see above; all parameters are in one structure.
        let parameters = unsafe {
            slice::from_raw_parts((*parameters).cast::<u8>(), kernel.parameter_bytes)
        };
        let launch = Launch {
            kernel,
            parameters: parameters.to_vec(),
            grid: [config.gridDimX, config.gridDimY, config.gridDimZ],
            threads: config.blockDimX,
            dynamic_shared: config.sharedMemBytes as usize,
            cooperative: attributes.iter().any(|attribute| attribute.id == cooperative),
        };
        let is_empty = launch.grid.contains(&0);
        let shared_bytes = launch.kernel.shared_bytes + launch.dynamic_shared;
        let is_too_large = shared_bytes > SHARED_BYTES as usize;
        if is_empty || is_too_large || launch.threads == 0 || launch.threads > 1024 {
            return CUresult::CUDA_ERROR_INVALID_VALUE;
        }
        state.enqueue(config.hStream, StreamOp::Launch(launch))
    }
    fn cuStreamBeginCapture_v2(stream: CUstream, _mode: c_uint) {
        state().recording.insert(stream as usize, Vec::new());
        DONE
    }
    fn cuStreamEndCapture(stream: CUstream, to: *mut CUgraph) {
        let mut state = state();
        let Some(recorded) = state.recording.remove(&(stream as usize)) else {
            return CUresult::CUDA_ERROR_INVALID_VALUE;
        };
        let graph = state.handle();
        state.graphs.insert(graph as usize, recorded);
        // SAFETY: see above.
        unsafe { put(to, graph) }
    }
    fn cuGraphInstantiateWithFlags(to: *mut CUgraphExec, graph: CUgraph, _flags: u64) {
        let mut state = state();
        let recorded = state.graphs[&(graph as usize)].clone();
        let executable = state.handle();
        state.graphs.insert(executable as usize, recorded);
        // SAFETY: see above.
        unsafe { put(to, executable) }
    }
    fn cuGraphLaunch(executable: CUgraphExec, stream: CUstream) {
        let mut state = state();
        let recorded = state.graphs[&(executable as usize)].clone();
        let enqueued = recorded.into_iter().map(|op| state.enqueue(stream, op));
        let mut failed = enqueued.filter(|result| *result != DONE);
        failed.next().unwrap_or(DONE)
    }
    fn cuGraphDestroy(graph: CUgraph) {
        state().graphs.remove(&(graph as usize));
        DONE
    }
    fn cuGraphExecDestroy(executable: CUgraphExec) {
        state().graphs.remove(&(executable as usize));
        DONE
    }
}
