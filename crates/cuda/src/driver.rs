//! The NVIDIA driver, opened at run time: a device with a stream, its memory, kernels, graphs. All
//! calls of the driver are here and nothing else is; this file must not know what is computed.

mod events;
mod graph;
mod peers;
mod pinned;
mod trace;

use std::ffi::{CString, c_int, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use bodkin_backend::{Activity, Error, Interval, Result};
use bytemuck::Pod;
use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys;

use crate::constants::GUARANTEED_SHARED_BYTES;

pub(crate) use events::{Event, Mark};
pub(crate) use graph::Graph;
pub(crate) use peers::Columns;
pub(crate) use pinned::Pinned;

/// The oldest driver interface that takes the kernels' PTX: that of CUDA 12.4.
const OLDEST: i32 = 12040;

/// An error of the driver, in words.
fn failed(what: &str) -> impl FnOnce(DriverError) -> Error {
    move |error| {
        let name = error.error_name().map_or("unknown", |name| name.to_str().unwrap_or("unknown"));
        Error::Config(format!("cuda: {what}: {name}"))
    }
}

/// The error of what ran in the stream. The only kernels that end themselves silently wait for
/// others.
fn kernel_failed(error: DriverError) -> Error {
    failed(match error.0 {
        sys::CUresult::CUDA_ERROR_LAUNCH_FAILED => {
            "a kernel failed, or has waited 10 s for another GPU"
        }
        _ => "a kernel failed",
    })(error)
}

/// Whether there is a driver on this machine.
pub(crate) fn is_installed() -> bool {
    // SAFETY: looks a library up.
    unsafe { sys::is_culib_present() }
}

/// Starts the driver and returns its number of devices.
fn start() -> Result<usize> {
    if !is_installed() {
        return Err(Error::Config("cuda: no NVIDIA driver is installed".to_owned()));
    }
    result::init().map_err(failed("the NVIDIA driver does not start"))?;
    let count = result::device::get_count().map_err(failed("no devices"))?;
    Ok(count as usize)
}

/// The names of all devices.
pub(crate) fn device_names() -> Result<Vec<String>> {
    (0..start()?).map(|ordinal| device_name(ordinal).map(|(_, name)| name)).collect()
}

fn device_name(ordinal: usize) -> Result<(sys::CUdevice, String)> {
    let device = result::device::get(ordinal as c_int).map_err(failed("no device"))?;
    let name = result::device::get_name(device).map_err(failed("no name of the device"))?;
    Ok((device, name))
}

/// One device and its only stream.
pub(crate) struct Device {
    ordinal: usize,
    device: sys::CUdevice,
    context: sys::CUcontext,
    stream: sys::CUstream,
    pub(crate) name: String,
    /// The CUDA version of the driver, such as `12.4`.
    pub(crate) driver_version: String,
    /// Multiprocessors.
    pub(crate) processors: u32,
    /// Compute capability: 90 for 9.0.
    pub(crate) capability: u32,
    /// The most shared memory of a block.
    pub(crate) shared_bytes: usize,
    tracer: trace::Tracer,
    /// Whether the next kernel starts after all before it, even if it could wait by itself.
    serializes_next: AtomicBool,
}

// SAFETY: the driver's handles may be used from any thread; every use sets the context first.
unsafe impl Send for Device {}
// SAFETY: as above; the stream orders what is in it.
unsafe impl Sync for Device {}

impl Device {
    /// Opens a device.
    ///
    /// # Errors
    /// If there is no driver, it is too old, or it has no such device.
    pub(crate) fn open(ordinal: usize) -> Result<Device> {
        let count = start()?;
        let mut version: c_int = 0;
        // SAFETY: the pointer is to a local variable of the type that the driver writes.
        unsafe { sys::cuDriverGetVersion(&mut version) }
            .result()
            .map_err(failed("no version of the driver"))?;
        if version < OLDEST {
            return Err(Error::Config(format!(
                "cuda: expected a driver for CUDA {} or later (550 or later), found one for {}",
                version_text(OLDEST),
                version_text(version)
            )));
        }
        if ordinal >= count {
            let text = format!("cuda: expected a device below {count}, found {ordinal}");
            return Err(Error::Config(text));
        }
        let (device, name) = device_name(ordinal)?;
        let attribute = |attribute| {
            // SAFETY: the device is one that the driver gave.
            unsafe { result::device::get_attribute(device, attribute) }
                .map_err(failed("no attribute of the device"))
        };
        use sys::CUdevice_attribute as A;
        let major = attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        let capability = (10 * major + minor) as u32;
        if capability < 80 {
            let found = format!("{major}.{minor} ({name})");
            let text = format!("cuda: expected compute capability 8.0 or later, found {found}");
            return Err(Error::Config(text));
        }
        let shared = attribute(A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)? as usize;
        if shared < GUARANTEED_SHARED_BYTES {
            let text = format!(
                "cuda: expected {GUARANTEED_SHARED_BYTES} bytes of shared memory a block (A100, \
                 H100 or later of that class), found {shared} ({name})"
            );
            return Err(Error::Config(text));
        }
        let processors = attribute(A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as u32;
        // SAFETY: the device is one that the driver gave; dropping releases its context.
        let context = unsafe { result::primary_ctx::retain(device) }
            .map_err(failed("the device cannot be used"))?;
        // SAFETY: the context was retained just now.
        unsafe { result::ctx::set_current(context) }.map_err(failed("no context"))?;
        let stream = result::stream::create(result::stream::StreamKind::NonBlocking)
            .map_err(failed("no stream"))?;
        Ok(Device {
            ordinal,
            device,
            context,
            stream,
            name,
            driver_version: version_text(version),
            processors,
            capability,
            shared_bytes: shared,
            tracer: trace::Tracer::default(),
            serializes_next: AtomicBool::new(false),
        })
    }

    /// The device's number.
    pub(crate) fn ordinal(&self) -> usize {
        self.ordinal
    }

    /// Makes this the device of the calling thread.
    pub(crate) fn make_current(&self) -> Result<()> {
        // SAFETY: the context lives as long as the device.
        unsafe { result::ctx::set_current(self.context) }.map_err(failed("no context"))
    }

    /// Bytes of memory that are free.
    pub(crate) fn free_memory(&self) -> Result<u64> {
        Ok(self.memory_info()?.0)
    }

    /// Bytes of memory that are free, and all of them.
    pub(crate) fn memory_info(&self) -> Result<(u64, u64)> {
        self.make_current()?;
        let (free, total) = result::mem_get_info().map_err(failed("no state of memory"))?;
        Ok((free as u64, total as u64))
    }

    /// Waits for everything that is in the stream.
    pub(crate) fn synchronize(&self) -> Result<()> {
        self.traced_wait(|| {
            // SAFETY: the stream lives as long as the device.
            unsafe { result::stream::synchronize(self.stream) }.map_err(kernel_failed)
        })
    }

    /// Starts to record a timeline, from nothing, or ends it.
    pub(crate) fn set_tracing(&self, on: bool) -> Result<()> {
        self.make_current()?;
        if on {
            return self.tracer.start(self.stream).map_err(failed("no event"));
        }
        self.tracer.stop();
        Ok(())
    }

    /// What happened since tracing began; the stream has done all that is in it.
    pub(crate) fn timeline(&self) -> Result<Vec<Interval>> {
        self.make_current()?;
        self.tracer.timeline(self.ordinal).map_err(failed("no time between events"))
    }

    /// Names the kernels that are launched from now on in the timeline.
    pub(crate) fn label(&self, name: &str) {
        self.tracer.label(name);
    }

    /// Enqueues an operation in the stream. Without a name it has that of the current label.
    fn traced(
        &self,
        activity: Activity,
        name: Option<&str>,
        operation: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let begun = self.tracer.begin(self.stream).map_err(failed("no event"))?;
        operation()?;
        self.tracer.end(begun, self.stream, activity, name).map_err(failed("no event"))
    }

    /// Waits for the stream, or for an event in it.
    fn traced_wait(&self, wait: impl FnOnce() -> Result<()>) -> Result<()> {
        let start = Instant::now();
        wait()?;
        self.tracer.waited(start);
        Ok(())
    }

    /// Lets the next kernel start when all before it are complete. It and those behind it may then
    /// read what they wrote before they wait for their predecessor.
    pub(crate) fn serialize_next_launch(&self) {
        self.serializes_next.store(true, Ordering::Relaxed);
    }

    /// Launches a kernel.
    ///
    /// # Safety
    ///
    /// The parameters are those of the kernel, and their addresses are valid for what it does.
    pub(crate) unsafe fn launch<P: Pod>(
        &self,
        kernel: Kernel,
        grid: [usize; 3],
        threads: usize,
        shared_bytes: usize,
        parameters: &P,
    ) -> Result<()> {
        use sys::CUlaunchAttributeID as Id;
        let attribute = |id, value| sys::CUlaunchAttribute { id, pad: [0; 4], value };
        let mut attributes = Vec::new();
        let serializes_next = self.serializes_next.swap(false, Ordering::Relaxed);
        if kernel.uses_pdl && !serializes_next {
            let value = sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 };
            let id = Id::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
            attributes.push(attribute(id, value));
        }
        if kernel.is_cooperative {
            let value = sys::CUlaunchAttributeValue { cooperative: 1 };
            attributes.push(attribute(Id::CU_LAUNCH_ATTRIBUTE_COOPERATIVE, value));
        }
        let config = sys::CUlaunchConfig {
            gridDimX: grid[0] as u32,
            gridDimY: grid[1] as u32,
            gridDimZ: grid[2] as u32,
            blockDimX: threads as u32,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: shared_bytes as u32,
            hStream: self.stream,
            attrs: attributes.as_mut_ptr(),
            numAttrs: attributes.len() as u32,
        };
        let mut arguments = [std::ptr::from_ref(parameters).cast_mut().cast::<c_void>()];
        self.traced(Activity::Compute, None, || {
            // SAFETY: the kernel's only parameter is the structure, which the driver copies; the
            // caller's promise for the rest.
            unsafe {
                let none = std::ptr::null_mut();
                sys::cuLaunchKernelEx(&config, kernel.function, arguments.as_mut_ptr(), none)
            }
            .result()
            .map_err(failed("a kernel cannot be started"))
        })
    }

    /// Copies to the device, in the stream's order.
    ///
    /// # Safety
    ///
    /// `to` has room, and `from` stays as it is until the stream has come here.
    pub(crate) unsafe fn copy_to_device<T: Pod>(&self, to: u64, from: &[T]) -> Result<()> {
        self.traced(Activity::Transfer, Some("copy to the device"), || {
            // SAFETY: the caller's promise.
            unsafe { result::memcpy_htod_async(to, from, self.stream) }
                .map_err(failed("nothing can be copied to the device"))
        })
    }

    /// Makes every byte of some memory of the device the same, in the stream's order.
    ///
    /// # Safety
    ///
    /// The range is memory of the device.
    pub(crate) unsafe fn fill(&self, address: u64, byte: u8, bytes: usize) -> Result<()> {
        self.traced(Activity::Compute, Some("fill"), || {
            // SAFETY: the caller's promise.
            unsafe { result::memset_d8_async(address, byte, bytes, self.stream) }
                .map_err(failed("memory cannot be filled"))
        })
    }

    /// Copies from the device, in the stream's order.
    ///
    /// # Safety
    ///
    /// `from` holds as much, and nobody reads `to` until the stream has come here.
    pub(crate) unsafe fn copy_to_host<T: Pod>(&self, to: &mut [T], from: u64) -> Result<()> {
        self.traced(Activity::Transfer, Some("copy to the host"), || {
            // SAFETY: the caller's promise.
            unsafe { result::memcpy_dtoh_async(to, from, self.stream) }
                .map_err(failed("nothing can be copied from the device"))
        })
    }

    /// Copies within the device, in the stream's order.
    ///
    /// # Safety
    ///
    /// Both ranges are memory of the device and do not overlap.
    pub(crate) unsafe fn copy(&self, to: u64, from: u64, bytes: usize) -> Result<()> {
        self.traced(Activity::Transfer, Some("copy on the device"), || {
            // SAFETY: the caller's promise.
            unsafe { result::memcpy_dtod_async(to, from, bytes, self.stream) }
                .map_err(failed("nothing can be copied on the device"))
        })
    }
}

fn version_text(version: i32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

impl Drop for Device {
    fn drop(&mut self) {
        // Nothing can be done about an error here.
        // SAFETY: nobody else has the stream, and the context was retained once.
        unsafe {
            let _ = result::ctx::set_current(self.context);
            let _ = result::stream::destroy(self.stream);
            let _ = result::primary_ctx::release(self.device);
        }
    }
}

/// Kernels that were loaded together.
pub(crate) struct Module {
    device: Arc<Device>,
    module: sys::CUmodule,
    uses_pdl: bool,
}

// SAFETY: as for `Device`.
unsafe impl Send for Module {}
// SAFETY: as for `Device`.
unsafe impl Sync for Module {}

/// A kernel of a [`Module`] that is alive.
#[derive(Clone, Copy)]
pub(crate) struct Kernel {
    function: sys::CUfunction,
    /// Programmatic dependent launch: it starts early, and waits itself for the kernel before it.
    uses_pdl: bool,
    /// Whether its blocks wait for each other, and so have to run at the same time.
    is_cooperative: bool,
}

impl Kernel {
    /// The same, launched cooperatively: its blocks wait for each other.
    pub(crate) fn cooperative(self) -> Kernel {
        Kernel { is_cooperative: true, ..self }
    }
}

// SAFETY: as for `Device`.
unsafe impl Send for Kernel {}
// SAFETY: as for `Device`.
unsafe impl Sync for Kernel {}

impl Module {
    /// Loads machine code or PTX. Kernels made for the device by name use programmatic dependent
    /// launch (PDL): they wait by themselves for those before them.
    pub(crate) fn load(device: &Arc<Device>, image: &[u8], uses_pdl: bool) -> Result<Module> {
        device.make_current()?;
        // The driver reads machine code in aligned words, and PTX up to a zero byte.
        let mut words = vec![0u64; image.len() / 8 + 1];
        bytemuck::cast_slice_mut(&mut words)[..image.len()].copy_from_slice(image);
        // SAFETY: the image is a whole cubin, or PTX with a zero behind it.
        let module = unsafe { result::module::load_data(words.as_ptr().cast()) }
            .map_err(failed("the kernels cannot be loaded"))?;
        Ok(Module { device: Arc::clone(device), module, uses_pdl })
    }

    /// A kernel by its name. Above 48 KiB, raises its limit of dynamic shared memory to this many
    /// bytes; 0 leaves the limit.
    pub(crate) fn kernel(&self, name: &str, max_shared_bytes: usize) -> Result<Kernel> {
        let c_name = CString::new(name).expect("a kernel's name has no zero");
        // SAFETY: the module is loaded.
        let function = unsafe { result::module::get_function(self.module, c_name) }
            .map_err(failed(&format!("no kernel {name}")))?;
        if max_shared_bytes > 48 << 10 {
            let most = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: the function is one of the module.
            unsafe {
                result::function::set_function_attribute(function, most, max_shared_bytes as c_int)
            }
            .map_err(failed(&format!("{name} needs {max_shared_bytes} bytes of shared memory")))?;
        }
        Ok(Kernel { function, uses_pdl: self.uses_pdl, is_cooperative: false })
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        // SAFETY: nobody launches its kernels any more; an error changes nothing.
        unsafe {
            let _ = self.device.make_current();
            let _ = result::module::unload(self.module);
        }
    }
}

/// Memory of the device.
pub(crate) struct Memory {
    device: Arc<Device>,
    pub(crate) address: u64,
}

impl Memory {
    /// Takes memory, all zero.
    pub(crate) fn zeroed(device: &Arc<Device>, bytes: usize, what: &str) -> Result<Memory> {
        device.make_current()?;
        let bytes = bytes.max(256);
        // SAFETY: plain memory, freed when dropped.
        let address = unsafe { result::malloc_sync(bytes) }.map_err(|error| {
            let free = device.free_memory().unwrap_or(0);
            match error.0 {
                sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => Error::Config(format!(
                    "cuda: out of memory: {what} need {bytes} bytes, {free} are free"
                )),
                _ => failed(what)(error),
            }
        })?;
        let memory = Memory { device: Arc::clone(device), address };
        // SAFETY: the memory was taken just now.
        unsafe { result::memset_d8_async(address, 0, bytes, device.stream) }
            .map_err(failed("memory cannot be cleared"))?;
        device.synchronize()?;
        Ok(memory)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: allocated by `zeroed`; the stream has ended, so that no kernel uses it any more.
        // An error changes nothing.
        unsafe {
            let _ = self.device.make_current();
            let _ = self.device.synchronize();
            let _ = result::free_sync(self.address);
        }
    }
}
