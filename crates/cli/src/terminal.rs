//! The terminal's echo, and messages on it.

use std::io::{IsTerminal, stderr};

use console::Term;

use crate::soft_wrap::SoftWrap;
#[cfg(unix)]
pub(crate) use unix::NoEcho;

/// Prints a message on standard error.
pub(crate) fn say(text: &str) {
    eprintln!("{}", wrapped(text));
}

/// A message for standard error. If that is a terminal, its lines break between words.
pub(crate) fn wrapped(text: &str) -> String {
    wrapped_at(text, columns())
}

/// A message whose lines break between words before this column.
pub(crate) fn wrapped_at(text: &str, columns: usize) -> String {
    let mut wrap = SoftWrap::default();
    wrap.push(text, columns) + &wrap.finish(columns)
}

/// The columns of standard error; endless if it is no terminal.
pub(crate) fn columns() -> usize {
    match stderr().is_terminal() {
        true => Term::stderr().size().1.into(),
        false => usize::MAX,
    }
}

#[cfg(unix)]
mod unix {
    use std::io::{IsTerminal, Write, stderr, stdin};
    use std::sync::mpsc::{self, RecvTimeoutError, Sender};
    use std::thread::{self, JoinHandle};
    use std::time::Duration;

    use bodkin::cleanup;
    use rustix::process::getpgrp;
    use rustix::termios::{LocalModes, OptionalActions, Termios, tcgetattr, tcgetpgrp, tcsetattr};

    /// How soon after Ctrl-Z and `fg` the terminal is quiet again.
    const CHECK: Duration = Duration::from_millis(100);
    /// A terminal that is asked for it puts marks around what is pasted.
    const MARKS_PASTES: &str = "\x1b[?2004h";
    const MARKS_NO_PASTES: &str = "\x1b[?2004l";

    /// Keeps the terminal from showing what is typed or pasted until it is dropped. Programs that
    /// read later get all of it, also after Ctrl-C.
    pub(crate) struct NoEcho {
        modes: Option<Modes>,
        _restored_by_signals: Option<cleanup::Guard>,
    }

    /// The terminal's modes before, and the thread that watches the present ones.
    struct Modes {
        before: Termios,
        end: Sender<()>,
        watcher: JoinHandle<()>,
    }

    impl NoEcho {
        pub(crate) fn new() -> NoEcho {
            let Ok(before) = tcgetattr(stdin()) else {
                return NoEcho { modes: None, _restored_by_signals: None };
            };
            let mut quiet = before.clone();
            // The system would drop all of a line but 4095 bytes.
            quiet.local_modes -= LocalModes::ECHO | LocalModes::ICANON;
            quiet.local_modes |= LocalModes::NOFLSH;
            let restored = before.clone();
            let guard = cleanup::register(move || set(&restored, MARKS_NO_PASTES));
            set(&quiet, MARKS_PASTES);
            let (end, ended) = mpsc::channel();
            let watcher = thread::spawn(move || {
                // A shell sets modes of its own when it stops and continues this process.
                while ended.recv_timeout(CHECK) == Err(RecvTimeoutError::Timeout) {
                    if is_in_foreground() && has_echo() {
                        set(&quiet, MARKS_PASTES);
                    }
                }
            });
            let modes = Some(Modes { before, end, watcher });
            NoEcho { modes, _restored_by_signals: Some(guard) }
        }
    }

    impl Drop for NoEcho {
        fn drop(&mut self) {
            let Some(Modes { before, end, watcher }) = self.modes.take() else { return };
            drop(end);
            // A watcher that panicked changes nothing any more.
            let _ = watcher.join();
            set(&before, MARKS_NO_PASTES);
        }
    }

    /// Modes that cannot be changed are no failure.
    fn set(modes: &Termios, pastes: &str) {
        let _ = tcsetattr(stdin(), OptionalActions::Now, modes);
        if stderr().is_terminal() {
            let _ = stderr().write_all(pastes.as_bytes());
        }
    }

    fn has_echo() -> bool {
        tcgetattr(stdin()).is_ok_and(|modes| modes.local_modes.contains(LocalModes::ECHO))
    }

    /// Changing the terminal's modes from the background would stop this process.
    fn is_in_foreground() -> bool {
        tcgetpgrp(stdin()).is_ok_and(|group| group == getpgrp())
    }
}

/// Other systems show what is typed.
#[cfg(not(unix))]
pub(crate) struct NoEcho;

#[cfg(not(unix))]
impl NoEcho {
    pub(crate) fn new() -> NoEcho {
        NoEcho
    }
}
