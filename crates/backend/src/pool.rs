//! A pool of threads that run one function together, with barriers. A step of the model is one call
//! of [`Pool::run`]. Barriers between its stages spin, because a stage takes microseconds. The
//! pools of a process that have several threads take turns, as threads that spin would take the
//! cores from each other: while one loads a model, the steps of others wait. The only module of
//! this crate with `unsafe` code.

#![allow(unsafe_code)]

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering::SeqCst};
use std::sync::atomic::{Ordering::Acquire, Ordering::Relaxed, Ordering::Release};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{JoinHandle, Result};

/// Iterations of a spinning wait before a thread yields: about 20 microseconds.
const SPINS: u32 = 4_000;
/// Times that an idle worker yields before it sleeps.
const YIELDS: u32 = 50;

/// Held by the pool that runs, unless it has one thread, which waits for no other.
static TURN: Mutex<()> = Mutex::new(());

/// A fixed number of threads; the caller of [`Pool::run`] is one of them.
pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
}

/// A thread of the pool while it runs a function.
pub struct Worker<'a> {
    /// The index of the thread; 0 is the caller.
    pub index: usize,
    /// The number of threads.
    pub threads: usize,
    barrier: &'a Barrier,
}

impl Worker<'_> {
    /// Returns when all threads have called it. Their earlier writes are visible afterwards.
    pub fn barrier(&self) {
        self.barrier.wait(self.threads, || (), || ());
    }

    /// As [`Worker::barrier`]. The last thread to arrive calls `serial` before it releases the
    /// others, so that serial work costs no barrier of its own. The others call `meanwhile`
    /// repeatedly.
    pub fn barrier_then(&self, serial: impl FnOnce(), meanwhile: impl FnMut()) {
        self.barrier.wait(self.threads, serial, meanwhile);
    }

    /// This thread's contiguous share of `0..n`.
    pub fn share(&self, n: usize) -> std::ops::Range<usize> {
        n * self.index / self.threads..n * (self.index + 1) / self.threads
    }
}

type Job = &'static (dyn Fn(&Worker<'_>) + Sync);

struct Shared {
    /// The number of calls of `run`. A worker that has seen fewer has work.
    epoch: AtomicUsize,
    /// The function that runs: it and the reference to it live until [`Pool::run`] ends.
    job: AtomicPtr<Job>,
    barrier: Barrier,
    sleepers: AtomicUsize,
    /// Workers that have ended because a thread panicked.
    ended: AtomicUsize,
    lock: Mutex<()>,
    wake: Condvar,
    stop: AtomicBool,
}

#[derive(Default)]
struct Barrier {
    arrived: AtomicUsize,
    round: AtomicUsize,
    /// A thread has panicked and will not arrive.
    is_broken: AtomicBool,
}

impl Barrier {
    fn wait(&self, threads: usize, serial: impl FnOnce(), mut meanwhile: impl FnMut()) {
        let round = self.round.load(Relaxed);
        if self.arrived.fetch_add(1, SeqCst) + 1 == threads {
            self.arrived.store(0, Relaxed);
            serial();
            self.round.store(round.wrapping_add(1), Release);
            return;
        }
        spin_while(|| {
            meanwhile();
            assert!(!self.is_broken.load(Relaxed), "another thread of the pool panicked");
            self.round.load(Acquire) == round
        });
    }
}

/// Spins, and yields now and then.
fn spin_while(mut condition: impl FnMut() -> bool) {
    let mut spins = 0;
    while condition() {
        spins += 1;
        if spins % SPINS == 0 { std::thread::yield_now() } else { std::hint::spin_loop() }
    }
}

impl Pool {
    /// Starts `threads - 1` workers, whose names begin with `name`.
    ///
    /// # Errors
    /// If the system has no more threads.
    pub fn new(name: &str, threads: usize) -> std::io::Result<Pool> {
        assert!(threads > 0, "the caller is a thread");
        let shared = Arc::new(Shared {
            epoch: AtomicUsize::new(0),
            job: AtomicPtr::new(std::ptr::null_mut()),
            barrier: Barrier::default(),
            sleepers: AtomicUsize::new(0),
            ended: AtomicUsize::new(0),
            lock: Mutex::new(()),
            wake: Condvar::new(),
            stop: AtomicBool::new(false),
        });
        let start = |index| {
            let shared = Arc::clone(&shared);
            let name = format!("{name}-{index}");
            std::thread::Builder::new().name(name).spawn(move || shared.work(index, threads))
        };
        // If a thread fails to start, dropping the pool ends the others.
        let mut pool = Pool { shared: Arc::clone(&shared), workers: Vec::new() };
        for index in 1..threads {
            pool.workers.push(start(index)?);
        }
        Ok(pool)
    }

    /// The number of threads, the caller included.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Runs `function` on every thread and returns when all are done.
    ///
    /// # Panics
    /// If `function` panics on any thread. The pool cannot be used any more then.
    pub fn run(&mut self, function: &(dyn Fn(&Worker<'_>) + Sync)) {
        let threads = self.threads();
        let _turn = (threads > 1).then(|| TURN.lock().unwrap_or_else(PoisonError::into_inner));
        assert!(!self.shared.barrier.is_broken.load(SeqCst), "a thread of the pool has panicked");
        // SAFETY: only the lifetime changes; this function returns after the last use.
        let mut job: Job = unsafe {
            std::mem::transmute::<
                &(dyn Fn(&Worker<'_>) + Sync),
                &'static (dyn Fn(&Worker<'_>) + Sync),
            >(function)
        };
        let shared = &*self.shared;
        shared.job.store(&raw mut job, SeqCst);
        shared.epoch.fetch_add(1, SeqCst);
        shared.wake_sleepers();
        let worker = Worker { index: 0, threads, barrier: &shared.barrier };
        if let Err(panic) = shared.run(function, &worker) {
            // The function must live until the last worker has left it.
            spin_while(|| shared.ended.load(SeqCst) < self.workers.len());
            resume_unwind(panic);
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, SeqCst);
        self.shared.epoch.fetch_add(1, SeqCst);
        self.shared.wake_sleepers();
        for worker in self.workers.drain(..) {
            // Workers catch panics.
            let _ = worker.join();
        }
    }
}

impl Shared {
    /// Runs `function` to the last barrier. A panic ends the waits of all other threads.
    fn run(&self, function: &(dyn Fn(&Worker<'_>) + Sync), worker: &Worker<'_>) -> Result<()> {
        let result = catch_unwind(AssertUnwindSafe(|| {
            function(worker);
            worker.barrier();
        }));
        if result.is_err() {
            self.barrier.is_broken.store(true, SeqCst);
        }
        result
    }

    fn work(&self, index: usize, threads: usize) {
        let worker = Worker { index, threads, barrier: &self.barrier };
        let mut seen = 0;
        loop {
            self.wait_for_work(seen);
            seen += 1;
            if self.stop.load(SeqCst) {
                return;
            }
            // SAFETY: work comes with a function, and `run` waits for all threads at the barrier
            // below, or for their end, before that and the reference to it are gone.
            let function = unsafe { *self.job.load(SeqCst) };
            if self.run(function, &worker).is_err() {
                self.ended.fetch_add(1, SeqCst);
                return;
            }
        }
    }

    /// Spins for a while, then sleeps, until the epoch has passed `seen`.
    fn wait_for_work(&self, seen: usize) {
        for spin in 0..SPINS * YIELDS {
            if self.epoch.load(Acquire) != seen {
                return;
            }
            if spin % SPINS == SPINS - 1 {
                std::thread::yield_now()
            } else {
                std::hint::spin_loop()
            }
        }
        let mut guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        self.sleepers.fetch_add(1, SeqCst);
        while self.epoch.load(SeqCst) == seen {
            guard = self.wake.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
        self.sleepers.fetch_sub(1, SeqCst);
    }

    fn wake_sleepers(&self) {
        if self.sleepers.load(SeqCst) > 0 {
            let _guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
            self.wake.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_wait_at_every_barrier() {
        let mut pool = Pool::new("test", 3).unwrap();
        let counters: Vec<AtomicUsize> = (0..100).map(|_| AtomicUsize::new(0)).collect();
        for round in 1..50 {
            pool.run(&|worker| {
                for counter in &counters {
                    counter.fetch_add(1, SeqCst);
                    worker.barrier();
                    assert_eq!(counter.load(SeqCst), 3 * round);
                }
            });
        }
    }

    #[test]
    fn a_panic_on_any_thread_ends_the_run_and_the_pool() {
        for index in 0..3 {
            let mut pool = Pool::new("test", 3).unwrap();
            let fail = |worker: &Worker<'_>| {
                worker.barrier();
                assert!(worker.index != index, "on purpose");
                worker.barrier();
            };
            for _ in 0..2 {
                assert!(catch_unwind(AssertUnwindSafe(|| pool.run(&fail))).is_err());
            }
        }
    }

    #[test]
    fn sleeping_workers_wake() {
        let mut pool = Pool::new("test", 2).unwrap();
        for _ in 0..3 {
            std::thread::sleep(std::time::Duration::from_millis(30));
            let ran = AtomicUsize::new(0);
            pool.run(&|_| {
                ran.fetch_add(1, SeqCst);
            });
            assert_eq!(ran.load(SeqCst), 2);
        }
    }

    #[test]
    fn shares_cover_everything_once() {
        let barrier = Barrier::default();
        for n in 0..40 {
            let share = |index| Worker { index, threads: 7, barrier: &barrier }.share(n);
            assert_eq!((0..7).flat_map(share).collect::<Vec<_>>(), (0..n).collect::<Vec<_>>());
        }
    }
}
