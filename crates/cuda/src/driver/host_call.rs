//! Functions of the host in a stream.

use std::ffi::c_void;

use bodkin_backend::{Activity, Result};
use cudarc::driver::sys;

use super::{Device, failed};

/// A function that a thread of the driver calls. It must not call the driver, nor panic.
pub(crate) struct HostCall(Box<dyn Fn() + Send + Sync>);

impl HostCall {
    pub(crate) fn new(function: impl Fn() + Send + Sync + 'static) -> HostCall {
        HostCall(Box::new(function))
    }
}

unsafe extern "C" fn run(call: *mut c_void) {
    // SAFETY: what `Device::call` enqueued, which is still there.
    let HostCall(function) = unsafe { &*call.cast::<HostCall>() };
    function();
}

impl Device {
    /// Calls a function of the host, in the stream's order: it starts when all before it is
    /// complete, and what comes after it waits for its end.
    ///
    /// # Safety
    ///
    /// The call stays where it is until the stream has come here, and longer than any graph that
    /// it is recorded in.
    pub(crate) unsafe fn call(&self, call: &HostCall) -> Result<()> {
        let address = std::ptr::from_ref(call).cast_mut().cast::<c_void>();
        self.traced(Activity::Transfer, Some("read experts of the file"), || {
            // SAFETY: the caller's promise.
            unsafe { sys::cuLaunchHostFunc(self.stream, Some(run), address) }
                .result()
                .map_err(failed("no function of the host can be called"))
        })
    }
}
