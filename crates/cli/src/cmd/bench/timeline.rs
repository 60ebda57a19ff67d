//! The timeline of one run of a test: what each thread and device did when, where they were idle,
//! and how the time of a step is split.

use std::time::Instant;

use bodkin_backend::{Activity, Interval, Track};

/// A part of a run, in seconds since its start.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Part {
    pub(crate) track: Track,
    pub(crate) name: String,
    pub(crate) kind: Kind,
    pub(crate) start: f64,
    pub(crate) end: f64,
}

/// What happens in a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Compute,
    Transfer,
    Launch,
    Wait,
    /// The host works and sends nothing: it samples, and prepares the next step.
    Host,
    /// A device has nothing to do.
    Idle,
}

impl Kind {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Kind::Compute => "compute",
            Kind::Transfer => "transfer",
            Kind::Launch => "launch",
            Kind::Wait => "wait",
            Kind::Host => "host",
            Kind::Idle => "idle",
        }
    }
}

/// The parts of a run, and its length in seconds.
#[derive(Clone, Debug, Default)]
pub(crate) struct Timeline {
    pub(crate) parts: Vec<Part>,
    pub(crate) seconds: f64,
}

/// How the time of a run is split, in seconds; the mean of all threads and devices that compute.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Split {
    pub(crate) compute: f64,
    /// Copies between memories.
    pub(crate) transfers: f64,
    /// Idle while the host works.
    pub(crate) host: f64,
    /// Idle while others are waited for: other threads at a barrier, or the device's answer.
    pub(crate) waiting: f64,
}

impl Timeline {
    /// The timeline of a run that took `seconds` from `start`.
    pub(crate) fn new(intervals: &[Interval], start: Instant, seconds: f64) -> Timeline {
        let since = |time: Instant| time.saturating_duration_since(start).as_secs_f64();
        let mut parts: Vec<Part> = intervals.iter().map(|interval| part(interval, since)).collect();
        parts.retain(|part| part.start < seconds && part.end > part.start);
        parts.iter_mut().for_each(|part| part.end = part.end.min(seconds));
        parts.sort_by(|a, b| (a.track, a.start).partial_cmp(&(b.track, b.start)).expect("no NaN"));
        let mut timeline = Timeline { parts, seconds };
        timeline.fill_gaps();
        timeline
    }

    /// The threads and devices that compute.
    pub(crate) fn tracks(&self) -> Vec<Track> {
        let mut tracks: Vec<Track> = self.parts.iter().map(|part| part.track).collect();
        tracks.dedup();
        tracks
    }

    fn of(&self, track: Track) -> impl Iterator<Item = &Part> {
        self.parts.iter().filter(move |part| part.track == track)
    }

    /// Names what happens where nothing was recorded. Threads are the host's between two steps;
    /// devices are idle.
    fn fill_gaps(&mut self) {
        let mut gaps = Vec::new();
        for track in self.tracks() {
            let (kind, name) = match track {
                Track::Device(_) => (Kind::Idle, "idle"),
                Track::Thread(0) | Track::Host => (Kind::Host, "host"),
                Track::Thread(_) => (Kind::Idle, "idle"),
            };
            let mut last = 0.0;
            let mut push = |start: f64, end: f64| {
                if end > start {
                    gaps.push(Part { track, name: name.to_owned(), kind, start, end });
                }
            };
            for part in self.of(track) {
                push(last, part.start);
                last = part.end.max(last);
            }
            push(last, self.seconds);
        }
        self.parts.extend(gaps);
        let key = |part: &Part| (part.track, part.start);
        self.parts.sort_by(|a, b| key(a).partial_cmp(&key(b)).expect("no NaN"));
    }

    /// The split of the whole run. None if nothing was recorded.
    pub(crate) fn split(&self) -> Option<Split> {
        let computes = |track: &Track| *track != Track::Host;
        let tracks: Vec<Track> = self.tracks().into_iter().filter(computes).collect();
        let waits: Vec<&Part> = self.of(Track::Host).filter(|p| p.kind == Kind::Wait).collect();
        let mut split = Split::default();
        for &track in &tracks {
            for part in self.of(track) {
                let length = part.end - part.start;
                match part.kind {
                    Kind::Compute => split.compute += length,
                    Kind::Transfer => split.transfers += length,
                    Kind::Wait => split.waiting += length,
                    Kind::Launch | Kind::Host | Kind::Idle => {
                        let waiting: f64 = waits.iter().map(|wait| overlap(part, wait)).sum();
                        split.waiting += waiting;
                        split.host += length - waiting;
                    }
                }
            }
        }
        let count = tracks.len() as f64;
        let Split { compute, transfers, host, waiting } = split;
        let [compute, transfers, host, waiting] =
            [compute, transfers, host, waiting].map(|seconds| seconds / count);
        (count > 0.0).then_some(Split { compute, transfers, host, waiting })
    }
}

/// Seconds that two parts have in common.
fn overlap(a: &Part, b: &Part) -> f64 {
    (a.end.min(b.end) - a.start.max(b.start)).max(0.0)
}

fn part(interval: &Interval, since: impl Fn(Instant) -> f64) -> Part {
    let kind = match interval.activity {
        Activity::Compute => Kind::Compute,
        Activity::Transfer => Kind::Transfer,
        Activity::Launch => Kind::Launch,
        Activity::Wait => Kind::Wait,
    };
    Part {
        track: interval.track,
        name: interval.name.to_string(),
        kind,
        start: since(interval.start),
        end: since(interval.end),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// Intervals in milliseconds.
    fn timeline(intervals: &[(Track, Activity, u64, u64)], all: u64) -> Timeline {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let interval = |&(track, activity, from, to): &(Track, Activity, u64, u64)| Interval {
            track,
            activity,
            name: "stage".into(),
            start: at(from),
            end: at(to),
        };
        let intervals: Vec<Interval> = intervals.iter().map(interval).collect();
        Timeline::new(&intervals, start, all as f64 / 1e3)
    }

    fn ms(split: Split) -> [u64; 4] {
        let Split { compute, transfers, host, waiting } = split;
        [compute, transfers, host, waiting].map(|seconds| (1e3 * seconds).round() as u64)
    }

    #[test]
    fn threads_wait_at_barriers_and_for_the_host() {
        let (first, second) = (Track::Thread(0), Track::Thread(1));
        let timeline = timeline(
            &[
                (second, Activity::Compute, 10, 50),
                (first, Activity::Compute, 10, 30),
                (first, Activity::Wait, 30, 50),
            ],
            60,
        );
        assert_eq!(ms(timeline.split().unwrap()), [30, 0, 20, 10]);
        let of = |track| timeline.of(track).map(|part| part.kind).collect::<Vec<_>>();
        assert_eq!(of(first), [Kind::Host, Kind::Compute, Kind::Wait, Kind::Host]);
        assert_eq!(of(second), [Kind::Idle, Kind::Compute, Kind::Idle]);
    }

    #[test]
    fn a_device_is_idle_while_the_host_works_or_waits() {
        let (host, device) = (Track::Host, Track::Device(0));
        let timeline = timeline(
            &[
                (host, Activity::Launch, 5, 8),
                (host, Activity::Wait, 10, 45),
                (device, Activity::Transfer, 12, 15),
                (device, Activity::Compute, 20, 40),
                // What came before the run, and goes on after it.
                (device, Activity::Transfer, 55, 80),
            ],
            60,
        );
        // Idle from 0 to 12, 15 to 20 and 40 to 55, of which the host waits for 2, 5 and 5.
        assert_eq!(ms(timeline.split().unwrap()), [20, 8, 20, 12]);
        assert_eq!(timeline.tracks(), [host, device]);
    }
}
