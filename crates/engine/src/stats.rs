//! What an engine reports about itself while it runs.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use bodkin_backend::{ExpertStats, ExpertTimes};
use bodkin_model::Plan;

/// What experts do.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ExpertReport {
    /// Since the model was loaded, layer by layer.
    pub layers: Vec<ExpertStats>,
    /// In one step, layer by layer; empty if there was no step.
    pub times: Vec<ExpertTimes>,
}

/// The state of an engine after its latest step, and totals since it was opened.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Stats {
    /// Requests that have pages.
    pub running: usize,
    /// Requests that wait for pages or for one of those to end.
    pub waiting: usize,
    /// Pages of each window of the plan.
    pub total_pages: Vec<usize>,
    /// Pages of each window that hold nothing.
    pub free_pages: Vec<usize>,
    /// Pages of each window that no request uses, kept for prefix reuse until they are needed.
    pub cached_pages: Vec<usize>,
    /// Requests that were admitted.
    pub requests: u64,
    /// Tokens of their prompts.
    pub prompt_tokens: u64,
    /// Tokens of their prompts that were found in the KV cache.
    pub cached_tokens: u64,
    /// Tokens that were generated.
    pub generated_tokens: u64,
    /// Requests that gave up their pages and were computed again.
    pub preemptions: u64,
    /// Steps of the model.
    pub steps: u64,
    /// Rows of all steps: tokens that were computed.
    pub rows: u64,
    /// Requests in each step, summed over the steps.
    pub sequences: u64,
    /// Weight bytes that the steps had to read, in the file's formats, by the plan's cost.
    pub weight_bytes: u64,
    /// KV cache elements that the steps had to read, by the plan's cost.
    pub kv_elements: u64,
    /// Time in steps.
    pub step_seconds: f64,
    /// How long the step that runs now has been running; none between steps.
    pub step_age: Option<Duration>,
}

impl Stats {
    /// Adds the totals of another engine, and nothing of its state.
    pub fn add_totals(&mut self, other: &Stats) {
        self.requests += other.requests;
        self.prompt_tokens += other.prompt_tokens;
        self.cached_tokens += other.cached_tokens;
        self.generated_tokens += other.generated_tokens;
        self.preemptions += other.preemptions;
        self.steps += other.steps;
        self.rows += other.rows;
        self.sequences += other.sequences;
        self.weight_bytes += other.weight_bytes;
        self.kv_elements += other.kv_elements;
        self.step_seconds += other.step_seconds;
    }
}

/// What a step has to read of the weights, by the plan's cost.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WeightReads {
    /// By every step, in bytes.
    always: u64,
    /// The experts that one token chooses, in bytes.
    by_token: u64,
    /// The most that a step reads, in bytes.
    all: u64,
}

impl WeightReads {
    pub(crate) fn of(plan: &Plan) -> WeightReads {
        let cost = plan.cost();
        let always = cost.step_weight_bytes - cost.step_expert_bytes;
        let all = cost.weight_bytes.max(cost.step_weight_bytes);
        WeightReads { always, by_token: cost.step_expert_bytes, all }
    }

    /// By a step of `rows` tokens, in bytes. Tokens are taken to choose different experts, until
    /// all are chosen.
    pub(crate) fn step(&self, rows: usize) -> u64 {
        let experts = self.by_token.saturating_mul(rows as u64);
        self.always.saturating_add(experts).min(self.all)
    }
}

/// What the worker shares with its clients.
pub(crate) struct Status {
    started: Instant,
    /// Requests that were submitted and have not ended.
    pub(crate) open: AtomicUsize,
    /// When the running step began, in milliseconds since the start, plus 1; 0 between steps.
    step_began: AtomicU64,
    stats: Mutex<Stats>,
    /// Why the worker ended.
    pub(crate) failure: OnceLock<String>,
}

impl Status {
    pub(crate) fn new() -> Status {
        Status {
            started: Instant::now(),
            open: AtomicUsize::new(0),
            step_began: AtomicU64::new(0),
            stats: Mutex::default(),
            failure: OnceLock::new(),
        }
    }

    fn now(&self) -> u64 {
        self.started.elapsed().as_millis() as u64
    }

    /// A step begins now.
    pub(crate) fn begin_step(&self) {
        self.step_began.store(self.now() + 1, Relaxed);
    }

    /// No step runs.
    pub(crate) fn end_step(&self) {
        self.step_began.store(0, Relaxed);
    }

    /// The statistics to change.
    pub(crate) fn stats(&self) -> MutexGuard<'_, Stats> {
        // Statistics are plain numbers: those of a thread that panicked are as good.
        self.stats.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A copy of the statistics.
    pub(crate) fn snapshot(&self) -> Stats {
        let step_age = match self.step_began.load(Relaxed) {
            0 => None,
            began => Some(Duration::from_millis((self.now() + 1).saturating_sub(began))),
        };
        Stats { step_age, ..self.stats().clone() }
    }
}
