//! The timeline of a device: when it ran what was enqueued, and what the host did meanwhile. The
//! device's times come from events around each operation. It must not know what is enqueued.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bodkin_backend::{Activity, Interval, Track};
use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys;

/// The recorder of a device. Without tracing it costs one check an operation. The device's context
/// is the current one in all calls.
#[derive(Default)]
pub(super) struct Tracer {
    is_on: AtomicBool,
    recorded: Mutex<Recorded>,
}

// SAFETY: as for `Device`: the driver's events may be used from any thread.
unsafe impl Send for Tracer {}
// SAFETY: as above.
unsafe impl Sync for Tracer {}

#[derive(Default)]
struct Recorded {
    /// A moment by both clocks.
    base: Option<(TimedEvent, Instant)>,
    /// The stage whose kernels are launched.
    label: Option<Arc<str>>,
    device: Vec<(Activity, Arc<str>, TimedEvent, TimedEvent)>,
    host: Vec<Interval>,
}

/// The start of an operation that is traced.
pub(super) struct Begun {
    host: Instant,
    device: TimedEvent,
}

/// A moment in a stream whose time is noted.
struct TimedEvent(sys::CUevent);

impl TimedEvent {
    /// The moment when the stream has done all that was enqueued so far.
    fn record(stream: sys::CUstream) -> Result<TimedEvent, DriverError> {
        let event = TimedEvent(result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT)?);
        // SAFETY: event and stream are alive, and of the current context.
        unsafe { result::event::record(event.0, stream) }?;
        Ok(event)
    }

    /// The time from an earlier event to this one; the stream has come here.
    fn since(&self, earlier: &TimedEvent) -> Result<Duration, DriverError> {
        // SAFETY: both events are alive and were recorded.
        let milliseconds = unsafe { result::event::elapsed(earlier.0, self.0) }?;
        Ok(Duration::from_secs_f64(f64::from(milliseconds.max(0.0)) / 1e3))
    }
}

impl Drop for TimedEvent {
    fn drop(&mut self) {
        // SAFETY: made by `record`; an error changes nothing.
        let _ = unsafe { result::event::destroy(self.0) };
    }
}

impl Tracer {
    /// Starts to record a timeline, from nothing.
    pub(super) fn start(&self, stream: sys::CUstream) -> Result<(), DriverError> {
        let event = TimedEvent::record(stream)?;
        // SAFETY: the stream is alive.
        unsafe { result::stream::synchronize(stream) }?;
        let base = Some((event, Instant::now()));
        *self.recorded() = Recorded { base, ..Recorded::default() };
        self.is_on.store(true, Relaxed);
        Ok(())
    }

    /// Ends recording, and forgets the timeline.
    pub(super) fn stop(&self) {
        self.is_on.store(false, Relaxed);
        *self.recorded() = Recorded::default();
    }

    /// What happened since the start; the stream has done all that was enqueued. `device` is its
    /// number.
    pub(super) fn timeline(&self, device: usize) -> Result<Vec<Interval>, DriverError> {
        let recorded = self.recorded();
        let Some((base, time)) = &recorded.base else { return Ok(Vec::new()) };
        let intervals = recorded.device.iter().map(|(activity, name, start, end)| {
            Ok(Interval {
                track: Track::Device(device),
                activity: *activity,
                name: Arc::clone(name),
                start: *time + start.since(base)?,
                end: *time + end.since(base)?,
            })
        });
        let mut timeline = intervals.collect::<Result<Vec<Interval>, DriverError>>()?;
        timeline.extend(recorded.host.iter().cloned());
        Ok(timeline)
    }

    /// Names the kernels that are launched from now on.
    pub(super) fn label(&self, name: &str) {
        if self.is_on() {
            self.recorded().label = Some(name.into());
        }
    }

    /// Leaves out what `launch` enqueues: it is captured in a graph, and does not run.
    pub(super) fn paused<T>(&self, launch: impl FnOnce() -> T) -> T {
        let is_on = self.is_on.swap(false, Relaxed);
        let result = launch();
        self.is_on.store(is_on, Relaxed);
        result
    }

    /// Before an operation is enqueued.
    pub(super) fn begin(&self, stream: sys::CUstream) -> Result<Option<Begun>, DriverError> {
        if !self.is_on() {
            return Ok(None);
        }
        let host = Instant::now();
        Ok(Some(Begun { host, device: TimedEvent::record(stream)? }))
    }

    /// After an operation was enqueued. Without a name it has that of the current label.
    pub(super) fn end(
        &self,
        begun: Option<Begun>,
        stream: sys::CUstream,
        activity: Activity,
        name: Option<&str>,
    ) -> Result<(), DriverError> {
        let Some(begun) = begun else { return Ok(()) };
        let end = TimedEvent::record(stream)?;
        let mut recorded = self.recorded();
        let label = || recorded.label.clone().unwrap_or_else(|| "kernel".into());
        let name = name.map_or_else(label, Arc::from);
        let launch = host(Activity::Launch, Arc::clone(&name), begun.host);
        recorded.host.push(launch);
        recorded.device.push((activity, name, begun.device, end));
        Ok(())
    }

    /// After the host has waited for the device since `start`.
    pub(super) fn waited(&self, start: Instant) {
        if self.is_on() {
            let wait = host(Activity::Wait, "device".into(), start);
            self.recorded().host.push(wait);
        }
    }

    fn is_on(&self) -> bool {
        self.is_on.load(Relaxed)
    }

    fn recorded(&self) -> MutexGuard<'_, Recorded> {
        self.recorded.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An interval of the host from `start` to now.
fn host(activity: Activity, name: Arc<str>, start: Instant) -> Interval {
    Interval { track: Track::Host, activity, name, start, end: Instant::now() }
}
