//! The threads that load weights and read experts. They spin for a moment before they sleep, so
//! that requests of a step which follow each other find them awake.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread::available_parallelism;

use bodkin_backend::Pool;

/// For loading: one for each core.
pub(crate) static LOADERS: Threads = Threads::new("load", 0);
/// For reads in a step, beside the thread that spins until the step ends, and others of the
/// program: threads without a core of their own would hold up all.
pub(crate) static READERS: Threads = Threads::new("read", 2);

/// Threads that are started when they are first used.
pub(crate) struct Threads {
    name: &'static str,
    /// Cores without one.
    spared: usize,
    /// None before its first use, and after a panic.
    pool: Mutex<Option<Pool>>,
}

impl Threads {
    const fn new(name: &'static str, spared: usize) -> Threads {
        Threads { name, spared, pool: Mutex::new(None) }
    }

    /// Passes each item to `work`, on all threads.
    ///
    /// # Panics
    /// If `work` does.
    pub(crate) fn for_each<T: Send>(
        &self,
        items: impl Iterator<Item = T>,
        work: impl Fn(T) + Sync,
    ) {
        // All threads start together, so one lock around the iterator would be contended.
        let items: Vec<Mutex<Option<T>>> = items.map(|item| Mutex::new(Some(item))).collect();
        let next = AtomicUsize::new(0);
        let mut shared = self.pool.lock().unwrap_or_else(PoisonError::into_inner);
        let mut pool = shared.take().unwrap_or_else(|| self.start());
        pool.run(&|_| {
            while let Some(item) = items.get(next.fetch_add(1, Ordering::Relaxed)) {
                let item = item.lock().unwrap_or_else(PoisonError::into_inner).take();
                work(item.expect("each item is taken once"));
            }
        });
        *shared = Some(pool);
    }

    /// Starts the threads; where the system has no more, the caller is the only one.
    fn start(&self) -> Pool {
        let cores = available_parallelism().map_or(1, usize::from);
        let threads = cores.saturating_sub(self.spared).max(1);
        let pool = Pool::new(self.name, threads).or_else(|_| Pool::new(self.name, 1));
        pool.expect("one thread is the caller")
    }
}
