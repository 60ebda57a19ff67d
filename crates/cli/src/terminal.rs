//! The terminal's echo, and messages on it.

use console::Term;

use crate::soft_wrap::SoftWrap;
#[cfg(unix)]
pub(crate) use unix::{NoEcho, restore_first};

/// Prints a message on standard error.
pub(crate) fn say(text: &str) {
    eprintln!("{}", wrapped(text));
}

/// A message for standard error. If that is a terminal, its lines break between words.
pub(crate) fn wrapped(text: &str) -> String {
    wrapped_at(text, columns(&Term::stderr()))
}

/// A message whose lines break between words before this column.
pub(crate) fn wrapped_at(text: &str, columns: usize) -> String {
    let mut wrap = SoftWrap::default();
    wrap.push(text, columns) + &wrap.finish(columns)
}

/// The columns of a stream now; endless if it is no terminal.
pub(crate) fn columns(stream: &Term) -> usize {
    if stream.is_term() { stream.size().1.into() } else { usize::MAX }
}

#[cfg(unix)]
mod unix {
    use std::io::{IsTerminal, Write, stderr, stdin};
    use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
    use std::thread::{self, JoinHandle};
    use std::time::Duration;

    use bodkin::cleanup;
    use nix::unistd::getpgrp;
    use rustix::termios::{
        LocalModes, OptionalActions, QueueSelector, Termios, tcflush, tcgetattr, tcgetpgrp,
        tcsetattr,
    };

    use crate::suspension;

    /// How soon the process stops after Ctrl-Z, and the terminal is quiet again after `fg`.
    const CHECK: Duration = Duration::from_millis(100);
    /// A terminal that is asked for it puts marks around what is pasted (bracketed paste).
    const MARKS_PASTES: &str = "\x1b[?2004h";
    const MARKS_NO_PASTES: &str = "\x1b[?2004l";
    /// Terminals on which no line is edited, so marks would become text.
    const UNEDITED: [&str; 3] = ["dumb", "emacs", "cons25"];

    /// The modes before they were changed first, and whether pastes were marked.
    static FIRST: OnceLock<(Termios, bool)> = OnceLock::new();

    /// Keeps the terminal from showing what is typed or pasted until it is dropped. Programs that
    /// read later get it.
    pub(crate) struct NoEcho(Option<Quiet>);

    struct Quiet {
        modes: Arc<Modes>,
        /// None if no thread could be started: then Ctrl-Z leaves the modes as they are, and `fg`
        /// ends the quiet.
        watcher: Option<JoinHandle<()>>,
        _restored_by_signals: cleanup::Guard,
    }

    /// The terminal's modes before and meanwhile.
    struct Modes {
        before: Termios,
        quiet: Termios,
        /// Whether pastes are marked meanwhile.
        marks_pastes: bool,
        is_over: Mutex<bool>,
    }

    impl NoEcho {
        /// For a chat, which reads all of what is typed or pasted, where it can also after Ctrl-C.
        pub(crate) fn in_chat() -> NoEcho {
            NoEcho::new(true, |modes| {
                // In lines that can be edited the system would keep 4095 bytes and drop the rest.
                *modes -= LocalModes::ECHO | LocalModes::ICANON;
                // At once Ctrl-Z would leave the shell what was typed before.
                modes.set(LocalModes::NOFLSH, suspension::is_deferrable());
            })
        }

        /// For a command after which a shell reads what was typed, as after any other.
        pub(crate) fn before_shell() -> NoEcho {
            NoEcho::new(false, |modes| *modes -= LocalModes::ECHO)
        }

        fn new(marks_pastes: bool, change: impl FnOnce(&mut LocalModes)) -> NoEcho {
            if is_in_background() {
                return NoEcho(None);
            }
            let Ok(before) = tcgetattr(stdin()) else { return NoEcho(None) };
            let mut quiet = before.clone();
            change(&mut quiet.local_modes);
            let is_edited = std::env::var("TERM").is_ok_and(|name| !UNEDITED.contains(&&*name));
            let marks_pastes = marks_pastes && is_edited && stderr().is_terminal();
            let _ = FIRST.set((before.clone(), marks_pastes));
            let modes = Modes { before, quiet, marks_pastes, is_over: Mutex::new(false) };
            let modes = Arc::new(modes);
            let (restored, watched) = (Arc::clone(&modes), Arc::clone(&modes));
            let guard = cleanup::register(move || restored.restore());
            let watch = move || {
                while watched.poll() {
                    thread::park_timeout(CHECK);
                }
            };
            // The watcher waits for this lock. A signal that is first has ended the quiet.
            let is_over = modes.is_over();
            let watcher = thread::Builder::new().spawn(watch).ok();
            if !*is_over {
                watcher.iter().for_each(|_| suspension::defer());
                modes.begin();
            }
            drop(is_over);
            NoEcho(Some(Quiet { modes, watcher, _restored_by_signals: guard }))
        }
    }

    impl Drop for NoEcho {
        fn drop(&mut self) {
            let Some(Quiet { modes, watcher, .. }) = &self.0 else { return };
            modes.restore();
            if suspension::end_deferral() {
                suspend();
            }
            watcher.iter().for_each(|watcher| watcher.thread().unpark());
        }
    }

    impl Modes {
        fn begin(&self) {
            self.set(&self.quiet, MARKS_PASTES);
        }

        fn restore(&self) {
            let mut is_over = self.is_over();
            *is_over = true;
            self.set_before();
        }

        fn set_before(&self) {
            // A shell that continues this process in the background has restored them.
            if !is_in_background() {
                self.set(&self.before, MARKS_NO_PASTES);
            }
        }

        /// Stops the process if Ctrl-Z asks for it, and makes the terminal quiet again if a shell
        /// that continued this process has set its own modes. False at the end.
        fn poll(&self) -> bool {
            let is_over = self.is_over();
            if *is_over {
                return false;
            }
            if suspension::take_request() {
                self.set_before();
                suspend();
            } else if !is_in_background() && self.are_changed() {
                self.begin();
            }
            true
        }

        fn are_changed(&self) -> bool {
            tcgetattr(stdin()).is_ok_and(|now| now.local_modes != self.quiet.local_modes)
        }

        /// Modes that cannot be changed are no failure.
        fn set(&self, modes: &Termios, pastes: &str) {
            let _ = tcsetattr(stdin(), OptionalActions::Now, modes);
            if self.marks_pastes {
                let _ = stderr().write_all(pastes.as_bytes());
            }
        }

        fn is_over(&self) -> MutexGuard<'_, bool> {
            self.is_over.lock().unwrap_or_else(PoisonError::into_inner)
        }
    }

    /// Sets the modes back that were before the first quiet, in a handler of a signal that ends the
    /// process: it takes no lock and no memory.
    pub(crate) fn restore_first() {
        let Some((before, marks_pastes)) = FIRST.get() else { return };
        if is_in_background() {
            return;
        }
        let _ = tcsetattr(stdin(), OptionalActions::Now, before);
        if *marks_pastes {
            let _ = rustix::io::write(stderr(), MARKS_NO_PASTES.as_bytes());
        }
    }

    /// Stops the process. What was typed is not for the shell, and as after any Ctrl-Z it is gone.
    fn suspend() {
        if !is_in_background() {
            let _ = tcflush(stdin(), QueueSelector::IFlush);
        }
        suspension::stop();
    }

    /// Changing the terminal's modes from the background would stop this process.
    fn is_in_background() -> bool {
        tcgetpgrp(stdin()).is_ok_and(|id| id.as_raw_nonzero().get() != getpgrp().as_raw())
    }
}

/// Other systems show what is typed.
#[cfg(not(unix))]
pub(crate) struct NoEcho;

#[cfg(not(unix))]
pub(crate) fn restore_first() {}

#[cfg(not(unix))]
impl NoEcho {
    pub(crate) fn in_chat() -> NoEcho {
        NoEcho
    }

    pub(crate) fn before_shell() -> NoEcho {
        NoEcho
    }
}
