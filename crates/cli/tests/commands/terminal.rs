//! The binary behind a real pseudo-terminal, as a user sees it. It must not know the commands.

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::OFlags;
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};

/// Columns of a terminal where nothing wraps.
const WIDE: u16 = 200;

/// The binary behind a terminal.
pub(crate) struct Terminal {
    pub(crate) child: Child,
    pub(crate) keyboard: File,
    screen: Receiver<Vec<u8>>,
    /// What was shown and not yet expected.
    shown: String,
}

impl Terminal {
    /// A command whose standard streams are all the terminal.
    pub(crate) fn start(command: Command) -> Terminal {
        Terminal::with_columns(command, WIDE)
    }

    /// As [`Terminal::start`], with this width.
    pub(crate) fn with_columns(command: Command, columns: u16) -> Terminal {
        Terminal::open(columns, |end| {
            let mut command = command;
            command.env("TERM", "xterm").stdin(end()).stdout(end()).stderr(end());
            command
        })
    }

    /// A command whose standard error alone is the terminal.
    pub(crate) fn of_stderr(command: Command) -> Terminal {
        Terminal::open(WIDE, |end| {
            let mut command = command;
            command.env("TERM", "xterm").stdout(Stdio::piped()).stderr(end());
            command
        })
    }

    /// Starts the command that `connect` connects to an end of the terminal.
    fn open(columns: u16, connect: impl FnOnce(&dyn Fn() -> Stdio) -> Command) -> Terminal {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        grantpt(&master).unwrap();
        unlockpt(&master).unwrap();
        let size = Winsize { ws_row: 50, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
        tcsetwinsize(&master, size).unwrap();
        let name = ptsname(&master, Vec::new()).unwrap();
        let end = || {
            let mut options = File::options();
            options.read(true).write(true).custom_flags(OFlags::NOCTTY.bits().cast_signed());
            Stdio::from(options.open(std::ffi::OsStr::from_bytes(name.as_bytes())).unwrap())
        };
        let mut command = connect(&end);
        let child = command.spawn().unwrap();
        // The command holds the terminal's other end, which would keep it open.
        drop(command);
        let keyboard = File::from(master);
        let mut screen = keyboard.try_clone().unwrap();
        let (sender, receiver) = mpsc::channel();
        thread::spawn(move || {
            let mut buffer = [0; 4096];
            // When the last program has left the terminal, reading from it fails.
            while let Ok(len @ 1..) = screen.read(&mut buffer) {
                sender.send(buffer[..len].to_vec()).unwrap_or_default();
            }
        });
        Terminal { child, keyboard, screen: receiver, shown: String::new() }
    }

    /// Waits until `text` is shown, and gives what was shown before it.
    #[track_caller]
    pub(crate) fn expect(&mut self, text: &str) -> String {
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            if let Some(at) = self.shown.find(text) {
                let before = self.shown[..at].to_owned();
                self.shown.drain(..at + text.len());
                return before;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            match self.screen.recv_timeout(left) {
                Ok(bytes) => self.shown.push_str(&String::from_utf8_lossy(&bytes)),
                Err(error) => panic!("{text:?} is not shown ({error}), but {:?}", self.shown),
            }
        }
    }

    /// Waits for the prompt, types a line, and waits until `answer` is shown.
    #[track_caller]
    pub(crate) fn say(&mut self, line: &str, answer: &str) {
        self.expect(">>> ");
        self.press(&format!("{line}\r"));
        self.expect(answer);
    }

    /// Presses keys, whatever is shown.
    pub(crate) fn press(&mut self, keys: &str) {
        self.keyboard.write_all(keys.as_bytes()).unwrap();
    }

    /// Waits for the end, and gives all that was shown and not yet expected.
    pub(crate) fn rest(mut self) -> (String, Child) {
        self.child.wait().unwrap();
        while let Ok(bytes) = self.screen.recv_timeout(Duration::from_millis(200)) {
            self.shown.push_str(&String::from_utf8_lossy(&bytes));
        }
        (self.shown, self.child)
    }

    /// Waits for the prompt, types `keys`, and waits for the end.
    #[track_caller]
    pub(crate) fn leave(mut self, keys: &str) {
        self.expect(">>> ");
        self.press(keys);
        assert!(self.child.wait().unwrap().success());
    }
}
