//! What happens on Ctrl-C (and on a polite request to terminate). Destructors do not run when a
//! process ends by a signal, so whoever holds something to undo registers an action here. This
//! module must not know what the actions do.

use std::process::exit;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, Once, PoisonError};

/// The exit status that shells give to a process ended by Ctrl-C.
pub(crate) const EXIT_INTERRUPTED: u8 = 130;

/// Work that Ctrl-C ended early, after everything that there is to say about it was said.
#[derive(Debug)]
pub(crate) struct Interrupted;

impl std::fmt::Display for Interrupted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("interrupted")
    }
}

impl std::error::Error for Interrupted {}

type Action = Box<dyn FnMut() + Send>;

static ACTIONS: Mutex<Vec<(u64, Action)>> = Mutex::new(Vec::new());

/// Keeps an action registered for as long as it lives.
pub(crate) struct Guard(u64);

impl Drop for Guard {
    fn drop(&mut self) {
        actions().retain(|(id, _)| *id != self.0);
    }
}

fn install() {
    static HANDLER: Once = Once::new();
    // Without a handler Ctrl-C ends the process at once, and the next fetch tidies up after it.
    HANDLER.call_once(|| ctrlc::set_handler(interrupted).unwrap_or_default());
}

/// Registers `action` to run on Ctrl-C before the process ends (newest first), until the guard is
/// dropped.
pub(crate) fn on_interrupt(action: impl FnMut() + Send + 'static) -> Guard {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    install();
    let id = NEXT.fetch_add(1, Ordering::Relaxed);
    actions().push((id, Box::new(action)));
    Guard(id)
}

/// Catches Ctrl-C for as long as it lives: the process goes on.
pub(crate) struct Catch(());

/// What the first Ctrl-C does while a catch lives.
static CAUGHT: Mutex<Option<Action>> = Mutex::new(None);

/// Begins to catch Ctrl-C, which then runs `action`, once; a second Ctrl-C ends the process even
/// if the first is not heeded. Only one catch lives at a time.
pub(crate) fn catch(action: impl FnMut() + Send + 'static) -> Catch {
    install();
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

fn actions() -> MutexGuard<'static, Vec<(u64, Action)>> {
    ACTIONS.lock().unwrap_or_else(PoisonError::into_inner)
}

fn interrupted() {
    let action = caught().take();
    if let Some(mut action) = action {
        return action();
    }
    for (_, action) in actions().iter_mut().rev() {
        action();
    }
    exit(EXIT_INTERRUPTED.into())
}
