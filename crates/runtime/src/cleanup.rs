//! Cleanup before the process ends by a signal. Destructors do not run then, so unfinished
//! downloads register an action here, and a program's signal handler calls [`run`]. The runtime
//! installs no signal handler of its own.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};

type Action = Box<dyn FnMut() + Send>;

static ACTIONS: Mutex<Vec<(u64, Action)>> = Mutex::new(Vec::new());

/// Keeps an action registered until it is dropped.
#[derive(Debug)]
pub struct Guard(u64);

impl Drop for Guard {
    fn drop(&mut self) {
        actions().retain(|(id, _)| *id != self.0);
    }
}

/// Registers an action for [`run`] until the guard is dropped.
pub fn register(action: impl FnMut() + Send + 'static) -> Guard {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let id = NEXT.fetch_add(1, Relaxed);
    actions().push((id, Box::new(action)));
    Guard(id)
}

/// Runs the registered actions, newest first: stops downloads and removes their files. A signal
/// handler calls this before it ends the process.
pub fn run() {
    actions().iter_mut().rev().for_each(|(_, action)| action());
}

fn actions() -> MutexGuard<'static, Vec<(u64, Action)>> {
    ACTIONS.lock().unwrap_or_else(PoisonError::into_inner)
}
