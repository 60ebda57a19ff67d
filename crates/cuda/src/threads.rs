//! The threads that load weights and read experts. They spin for a moment before they sleep, so
//! that requests of a step which follow each other find them awake.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread::available_parallelism;

use bodkin_backend::Pool;

/// None before its first use, and after a panic.
static POOL: Mutex<Option<Pool>> = Mutex::new(None);

/// Passes each item to `work`, on all threads.
///
/// # Panics
/// If `work` does.
pub(crate) fn for_each<T: Send>(items: impl Iterator<Item = T>, work: impl Fn(T) + Sync) {
    // Threads that start together would wait for a lock of all items.
    let items: Vec<Mutex<Option<T>>> = items.map(|item| Mutex::new(Some(item))).collect();
    let next = AtomicUsize::new(0);
    let mut shared = POOL.lock().unwrap_or_else(PoisonError::into_inner);
    let mut pool = shared.take().unwrap_or_else(start);
    pool.run(&|_| {
        while let Some(item) = items.get(next.fetch_add(1, Ordering::Relaxed)) {
            let item = item.lock().unwrap_or_else(PoisonError::into_inner).take();
            work(item.expect("each item is taken once"));
        }
    });
    *shared = Some(pool);
}

/// A thread for each core; only the caller where the system has no more.
fn start() -> Pool {
    let threads = available_parallelism().map_or(1, usize::from);
    let pool = Pool::new("load", threads).or_else(|_| Pool::new("load", 1));
    pool.expect("one thread is the caller")
}
