//! Moments in a device's stream: to be waited for, or to be timed.

use std::sync::Arc;

use bodkin_backend::Result;
use cudarc::driver::{result, sys};

use super::{Device, failed, kernel_failed};

/// A moment that others wait for, again and again.
pub(crate) struct Event {
    device: Arc<Device>,
    event: sys::CUevent,
}

// SAFETY: as for `Device`.
unsafe impl Send for Event {}

impl Event {
    /// One without a time, which a device takes 1 us to note.
    pub(crate) fn new(device: &Arc<Device>) -> Result<Event> {
        Event::with(device, sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)
    }

    fn with(device: &Arc<Device>, flags: sys::CUevent_flags) -> Result<Event> {
        device.make_current()?;
        let event = result::event::create(flags).map_err(failed("no event"))?;
        Ok(Event { device: Arc::clone(device), event })
    }

    /// The moment is that when the stream has done all that was enqueued so far.
    pub(crate) fn record(&self) -> Result<()> {
        self.device.make_current()?;
        // SAFETY: event and stream are alive, and of one context.
        unsafe { result::event::record(self.event, self.device.stream) }.map_err(failed("no event"))
    }

    /// Waits until the stream has come to where it was recorded last, if it was.
    pub(crate) fn wait(&self) -> Result<()> {
        self.device.traced_wait(|| {
            // SAFETY: the event is alive.
            unsafe { result::event::synchronize(self.event) }.map_err(kernel_failed)
        })
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: made by `with`; an error changes nothing.
        unsafe {
            let _ = self.device.make_current();
            let _ = result::event::destroy(self.event);
        }
    }
}

/// A moment whose time is noted.
pub(crate) struct Mark(Event);

impl Mark {
    /// The seconds from an earlier mark to this one; the stream has come here.
    pub(crate) fn seconds_since(&self, earlier: &Mark) -> Result<f64> {
        // SAFETY: both events are alive and were recorded.
        let milliseconds = unsafe { result::event::elapsed(earlier.0.event, self.0.event) }
            .map_err(failed("no time between events"))?;
        Ok(f64::from(milliseconds) / 1e3)
    }
}

impl Device {
    /// A mark in the stream.
    pub(crate) fn mark(self: &Arc<Device>) -> Result<Mark> {
        let event = Event::with(self, sys::CUevent_flags::CU_EVENT_DEFAULT)?;
        event.record()?;
        Ok(Mark(event))
    }

    /// What is enqueued from now on waits for an event as it was recorded last, of any device.
    pub(crate) fn wait_for(&self, event: &Event) -> Result<()> {
        self.make_current()?;
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: stream and event are alive.
        unsafe { result::stream::wait_event(self.stream, event.event, flags) }
            .map_err(failed("devices cannot wait for each other"))
    }
}
