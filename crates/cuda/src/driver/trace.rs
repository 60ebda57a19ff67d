//! The timeline of a device: when it ran what was sent to it, and what the host did meanwhile. The
//! device's times come from events around each operation.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bodkin_backend::{Activity, Interval, Result, Track};
use cudarc::driver::{result, sys};

use super::{Device, failed};

/// The recorder of a device. Without tracing it costs one check an operation.
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
    base: Option<(Mark, Instant)>,
    /// The stage whose kernels are sent.
    label: Option<Arc<str>>,
    device: Vec<(Activity, Arc<str>, Mark, Mark)>,
    host: Vec<Interval>,
}

/// An event with a time.
struct Mark(sys::CUevent);

impl Mark {
    /// The moment when the stream has done all that was sent so far.
    fn record(device: &Device) -> Result<Mark> {
        let flags = sys::CUevent_flags::CU_EVENT_DEFAULT;
        let mark = Mark(result::event::create(flags).map_err(failed("no event"))?);
        // SAFETY: event and stream are alive, and of the current context.
        unsafe { result::event::record(mark.0, device.stream) }.map_err(failed("no event"))?;
        Ok(mark)
    }

    /// The time from an earlier mark to this one; the stream has come here.
    fn since(&self, earlier: &Mark) -> Result<Duration> {
        // SAFETY: both events are alive and were recorded.
        let milliseconds = unsafe { result::event::elapsed(earlier.0, self.0) }
            .map_err(failed("no time between events"))?;
        Ok(Duration::from_secs_f64(f64::from(milliseconds.max(0.0)) / 1e3))
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        // SAFETY: made by `record`; an error changes nothing.
        let _ = unsafe { result::event::destroy(self.0) };
    }
}

impl Device {
    /// Starts to record a timeline, from nothing, or ends it.
    pub(crate) fn set_tracing(&self, on: bool) -> Result<()> {
        self.enter()?;
        let mut recorded = Recorded::default();
        if on {
            let mark = Mark::record(self)?;
            self.finish()?;
            recorded.base = Some((mark, Instant::now()));
        }
        *self.recorded() = recorded;
        self.tracer.is_on.store(on, Relaxed);
        Ok(())
    }

    /// What happened since tracing began; the stream has done all that was sent.
    pub(crate) fn timeline(&self) -> Result<Vec<Interval>> {
        self.enter()?;
        let recorded = self.recorded();
        let Some((base, time)) = &recorded.base else { return Ok(Vec::new()) };
        let device = recorded.device.iter().map(|(activity, name, start, end)| {
            Ok(Interval {
                track: Track::Device(self.ordinal),
                activity: *activity,
                name: Arc::clone(name),
                start: *time + start.since(base)?,
                end: *time + end.since(base)?,
            })
        });
        let mut timeline = device.collect::<Result<Vec<Interval>>>()?;
        timeline.extend(recorded.host.iter().cloned());
        Ok(timeline)
    }

    /// Names the kernels that are sent from now on.
    pub(crate) fn label(&self, name: &str) {
        if self.is_traced() {
            self.recorded().label = Some(name.into());
        }
    }

    /// Leaves out what `send` sends: it is recorded for a graph, and does not run.
    pub(super) fn untraced<T>(&self, send: impl FnOnce() -> T) -> T {
        let is_on = self.tracer.is_on.swap(false, Relaxed);
        let sent = send();
        self.tracer.is_on.store(is_on, Relaxed);
        sent
    }

    /// Sends an operation to the stream. Without a name it has that of the current label.
    pub(super) fn traced(
        &self,
        activity: Activity,
        name: Option<&str>,
        send: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        if !self.is_traced() {
            return send();
        }
        let host_start = Instant::now();
        let start = Mark::record(self)?;
        send()?;
        let end = Mark::record(self)?;
        let mut recorded = self.recorded();
        let label = || recorded.label.clone().unwrap_or_else(|| "kernel".into());
        let name = name.map_or_else(label, Arc::from);
        recorded.host.push(Interval {
            track: Track::Host,
            activity: Activity::Launch,
            name: Arc::clone(&name),
            start: host_start,
            end: Instant::now(),
        });
        recorded.device.push((activity, name, start, end));
        Ok(())
    }

    /// Waits for the stream, or for an event in it.
    pub(super) fn traced_wait(&self, wait: impl FnOnce() -> Result<()>) -> Result<()> {
        let start = Instant::now();
        wait()?;
        if self.is_traced() {
            self.recorded().host.push(Interval {
                track: Track::Host,
                activity: Activity::Wait,
                name: "device".into(),
                start,
                end: Instant::now(),
            });
        }
        Ok(())
    }

    fn is_traced(&self) -> bool {
        self.tracer.is_on.load(Relaxed)
    }

    fn recorded(&self) -> MutexGuard<'_, Recorded> {
        self.tracer.recorded.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
