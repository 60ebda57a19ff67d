//! Ctrl-C and the polite request to terminate: the first may end an answer, or let a server finish
//! its own; otherwise unfinished files are removed and the process ends.

use std::process::exit;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The exit status that shells give to a process ended by Ctrl-C.
pub(crate) const EXIT_INTERRUPTED: u8 = 130;

/// The error of a command that Ctrl-C ended early, after it has printed its results.
#[derive(Debug)]
pub(crate) struct Interrupted;

impl std::fmt::Display for Interrupted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("interrupted")
    }
}

impl std::error::Error for Interrupted {}

type Action = Box<dyn FnMut() + Send>;

/// The action of the first Ctrl-C while a [`Catch`] lives.
static CAUGHT: Mutex<Option<Action>> = Mutex::new(None);

/// Installs the signal handler.
pub(crate) fn install() {
    // Without a handler Ctrl-C ends the process at once, and the next fetch removes its files.
    ctrlc::set_handler(interrupted).unwrap_or_default();
}

/// Keeps the process running on Ctrl-C until it is dropped.
pub(crate) struct Catch(());

/// Catches the next Ctrl-C, which runs `action`, instead of what an earlier catch would run. One
/// more ends the process even if the first has no effect, unless `action` catches it again.
pub(crate) fn catch(action: impl FnMut() + Send + 'static) -> Catch {
    *caught() = Some(Box::new(action));
    Catch(())
}

impl Drop for Catch {
    fn drop(&mut self) {
        *caught() = None;
    }
}

fn caught() -> MutexGuard<'static, Option<Action>> {
    CAUGHT.lock().unwrap_or_else(PoisonError::into_inner)
}

fn interrupted() {
    let action = caught().take();
    if let Some(mut action) = action {
        return action();
    }
    end()
}

/// Removes unfinished files and ends the process, without waiting for its threads.
pub(crate) fn end() -> ! {
    crate::progress::clear();
    bodkin::cleanup::run();
    exit(EXIT_INTERRUPTED.into())
}
