//! The threads that load weights and read experts. A program that uses the library may wait for a
//! model on all threads of rayon's own pool.

use std::sync::OnceLock;

use rayon::{ThreadPool, ThreadPoolBuilder};

static POOL: OnceLock<Option<ThreadPool>> = OnceLock::new();

/// Runs work whose parallel iterators use these threads; where the system has none, it runs on
/// rayon's own.
pub(crate) fn on_all<R: Send>(work: impl FnOnce() -> R + Send) -> R {
    let make = || ThreadPoolBuilder::new().thread_name(|i| format!("load-{i}")).build().ok();
    match POOL.get_or_init(make) {
        Some(pool) => pool.install(work),
        None => work(),
    }
}
