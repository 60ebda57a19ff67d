//! The timeline of steps: what each thread does when. Threads record into lists of their own.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use bodkin_backend::{Activity, Interval, Track};
use bodkin_model::Plan;

use crate::profile::describe;
use crate::program::Program;

/// What is recorded of an interval: the stages that ran, or none for a wait.
struct Recorded {
    stages: Option<Range<usize>>,
    start: Instant,
    end: Instant,
}

/// The timeline since tracing began.
pub(crate) struct Trace {
    /// The name of each stage.
    names: Vec<Arc<str>>,
    threads: Vec<Mutex<Vec<Recorded>>>,
}

/// One thread's list during a step.
pub(crate) struct ThreadTrace<'a> {
    list: MutexGuard<'a, Vec<Recorded>>,
    /// The end of the interval before.
    last: Instant,
}

impl Trace {
    pub(crate) fn new(plan: &Plan, program: &Program, threads: usize) -> Trace {
        let names = program.stages.iter().map(|stage| describe(plan, stage).into());
        let threads = (0..threads).map(|_| Mutex::default());
        Trace { names: names.collect(), threads: threads.collect() }
    }

    /// The list of a thread that begins a step.
    pub(crate) fn thread(&self, index: usize) -> ThreadTrace<'_> {
        let list = self.threads[index].lock().unwrap_or_else(PoisonError::into_inner);
        ThreadTrace { list, last: Instant::now() }
    }

    /// All intervals, thread by thread.
    pub(crate) fn timeline(&self) -> Vec<Interval> {
        let mut timeline = Vec::new();
        for (index, list) in self.threads.iter().enumerate() {
            let list = list.lock().unwrap_or_else(PoisonError::into_inner);
            timeline.extend(list.iter().map(|recorded| self.interval(index, recorded)));
        }
        timeline
    }

    fn interval(&self, thread: usize, Recorded { stages, start, end }: &Recorded) -> Interval {
        let (activity, name) = match stages {
            None => (Activity::Wait, "barrier".into()),
            Some(stages) if stages.len() == 1 => {
                (Activity::Compute, Arc::clone(&self.names[stages.start]))
            }
            Some(stages) => (Activity::Compute, self.names[stages.clone()].join("; ").into()),
        };
        let track = Track::Thread(thread);
        Interval { track, activity, name, start: *start, end: *end }
    }
}

impl ThreadTrace<'_> {
    /// The thread has done its part of a stage.
    pub(crate) fn computed(&mut self, stage: usize) {
        self.record(Some(stage..stage + 1), Instant::now());
    }

    /// The barrier has released the thread. If it was the last to arrive, it has run the `serial`
    /// stages until `serial_end`.
    pub(crate) fn released(&mut self, serial: Range<usize>, serial_end: Option<Instant>) {
        if let Some(end) = serial_end.filter(|_| !serial.is_empty()) {
            self.record(Some(serial), end);
        }
        self.record(None, Instant::now());
    }

    fn record(&mut self, stages: Option<Range<usize>>, end: Instant) {
        let start = std::mem::replace(&mut self.last, end);
        self.list.push(Recorded { stages, start, end });
    }
}
