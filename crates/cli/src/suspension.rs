//! Ctrl-Z while the terminal's modes are changed: the process stops after they are set back. At all
//! other times it stops at once, as other programs do.

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, LazyLock};

use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, getpgid, getpgrp, getpid, getppid, getsid};
use signal_hook::consts::SIGTSTP;
use signal_hook::flag;

struct Flags {
    stops_at_once: Arc<AtomicBool>,
    is_requested: Arc<AtomicBool>,
}

/// None where Ctrl-Z keeps the system's meaning.
static FLAGS: LazyLock<Option<Flags>> = LazyLock::new(install);

fn install() -> Option<Flags> {
    if !is_job_of_parent() {
        return None;
    }
    let flags = Flags {
        stops_at_once: Arc::new(AtomicBool::new(true)),
        is_requested: Arc::new(AtomicBool::new(false)),
    };
    flag::register_conditional_default(SIGTSTP, Arc::clone(&flags.stops_at_once)).ok()?;
    flag::register(SIGTSTP, Arc::clone(&flags.is_requested)).ok()?;
    Some(flags)
}

/// Whether the parent is a job-control shell that waits for this process itself. In a script the
/// shell waits for the script, and would take the terminal back before the modes are restored.
fn is_job_of_parent() -> bool {
    // In a container a parent, a session or a group of the outside is number 0.
    let outside = Pid::from_raw(0);
    let parent = getppid();
    if parent == outside || getsid(None) == Ok(outside) || getpgrp() == outside {
        return false;
    }
    getsid(Some(parent)) == getsid(None) && getpgid(Some(parent)).is_ok_and(|id| id != getpgrp())
}

/// Whether Ctrl-Z can be deferred here.
pub(crate) fn is_deferrable() -> bool {
    FLAGS.is_some()
}

/// From now on Ctrl-Z is only a request, which [`take_request`] returns.
pub(crate) fn defer() {
    if let Some(flags) = &*FLAGS {
        flags.is_requested.store(false, SeqCst);
        flags.stops_at_once.store(false, SeqCst);
    }
}

/// From now on Ctrl-Z stops the process at once. Whether it was pressed before and not obeyed.
pub(crate) fn end_deferral() -> bool {
    FLAGS.as_ref().is_some_and(|flags| {
        !flags.stops_at_once.swap(true, SeqCst) && flags.is_requested.swap(false, SeqCst)
    })
}

/// Whether Ctrl-Z was pressed since the last call and not obeyed.
pub(crate) fn take_request() -> bool {
    FLAGS.as_ref().is_some_and(|flags| {
        !flags.stops_at_once.load(SeqCst) && flags.is_requested.swap(false, SeqCst)
    })
}

/// Stops the process until a shell continues it.
pub(crate) fn stop() {
    let _ = kill(getpid(), Signal::SIGSTOP);
}
