//! What happened when: the intervals of steps on each thread and device.

use std::sync::Arc;
use std::time::Instant;

/// Where something happens. Intervals of one track do not overlap.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Track {
    /// The thread of the host that calls a device.
    Host,
    /// A thread that computes, by its number.
    Thread(usize),
    /// A device, by its number.
    Device(usize),
}

/// What happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activity {
    /// Arithmetic.
    Compute,
    /// A copy between memories.
    Transfer,
    /// The host sends work to a device.
    Launch,
    /// A thread waits for the others, or the host for a device.
    Wait,
}

/// One interval of a timeline.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Interval {
    /// Where.
    pub track: Track,
    /// What.
    pub activity: Activity,
    /// The stage, the copy, or what is waited for.
    pub name: Arc<str>,
    /// When it began, by the host's clock.
    pub start: Instant,
    /// When it ended.
    pub end: Instant,
}
