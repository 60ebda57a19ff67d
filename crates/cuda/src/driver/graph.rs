//! Work that is captured once and launched again.

use std::sync::Arc;

use bodkin_backend::{Activity, Result};
use cudarc::driver::{result, sys};

use super::{Device, failed};

/// Work that was recorded.
pub(crate) struct Graph {
    device: Arc<Device>,
    executable: sys::CUgraphExec,
}

// SAFETY: as for `Device`.
unsafe impl Send for Graph {}

impl Graph {
    /// Sends all of it.
    pub(crate) fn launch(&self) -> Result<()> {
        self.device.traced(Activity::Compute, Some("graph of a step"), || {
            // SAFETY: graph and stream are alive.
            unsafe { result::graph::launch(self.executable, self.device.stream) }
                .map_err(failed("a graph cannot be started"))
        })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: made by `record`; an error changes nothing.
        unsafe {
            let _ = self.device.make_current();
            let _ = result::graph::exec_destroy(self.executable);
        }
    }
}

impl Device {
    /// Everything that `launch` enqueues, as a graph that can be launched at once, and again.
    pub(crate) fn record(self: &Arc<Device>, launch: impl FnOnce() -> Result<()>) -> Result<Graph> {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream lives as long as the device.
        unsafe { result::stream::begin_capture(self.stream, mode) }
            .map_err(failed("no graph can be recorded"))?;
        let launched = self.tracer.paused(launch);
        // SAFETY: recording began just now.
        let graph = unsafe { result::stream::end_capture(self.stream) };
        let graph = graph.map_err(failed("no graph was recorded"));
        if let (Err(_), Ok(graph)) = (&launched, &graph) {
            // SAFETY: nothing was made of the graph; an error could change nothing.
            let _ = unsafe { result::graph::destroy(*graph) };
        }
        launched?;
        let graph = graph?;
        let mut executable = std::ptr::null_mut();
        // SAFETY: the graph is the one just recorded, and not needed any more afterwards.
        let made = unsafe {
            let made = sys::cuGraphInstantiateWithFlags(&mut executable, graph, 0).result();
            result::graph::destroy(graph).map_err(failed("a graph stays"))?;
            made
        };
        made.map_err(failed("no graph can be made"))?;
        Ok(Graph { device: Arc::clone(self), executable })
    }
}
