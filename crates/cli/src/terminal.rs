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
    use std::io::stdin;

    use bodkin::cleanup;
    use rustix::termios::{LocalModes, OptionalActions, Termios, tcgetattr, tcsetattr};

    /// Keeps the terminal from showing what is typed until it is dropped. Programs that read later
    /// get it all the same, also after Ctrl-C.
    pub(crate) struct NoEcho {
        before: Option<Termios>,
        _restored_by_signals: Option<cleanup::Guard>,
    }

    impl NoEcho {
        pub(crate) fn new() -> NoEcho {
            let before = tcgetattr(stdin()).ok();
            if let Some(before) = &before {
                let mut quiet = before.clone();
                quiet.local_modes -= LocalModes::ECHO;
                quiet.local_modes |= LocalModes::NOFLSH;
                set(&quiet);
            }
            let restored = before.clone();
            let guard = restored.map(|before| cleanup::register(move || set(&before)));
            NoEcho { before, _restored_by_signals: guard }
        }
    }

    impl Drop for NoEcho {
        fn drop(&mut self) {
            self.before.iter().for_each(set);
        }
    }

    /// An echo that cannot be changed is no failure.
    fn set(modes: &Termios) {
        let _ = tcsetattr(stdin(), OptionalActions::Now, modes);
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
