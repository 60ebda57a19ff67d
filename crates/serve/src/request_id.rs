//! The id of the request that a task answers, for logs of what is done for it.

use std::future::Future;

tokio::task_local! {
    static CURRENT: String;
}

/// The id of the request that is being answered; empty if there is none.
pub(crate) fn current() -> String {
    CURRENT.try_with(String::clone).unwrap_or_default()
}

/// Runs the work of the request with this id.
pub(crate) fn within<F: Future>(id: String, work: F) -> impl Future<Output = F::Output> {
    CURRENT.scope(id, work)
}
