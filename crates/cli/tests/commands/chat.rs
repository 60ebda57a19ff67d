//! `run` without a prompt: a chat over a real pseudo-terminal, as a user sees it.

use std::fs::{self, File};
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

use crate::place::{Place, model};

/// Presses Ctrl-C.
pub(crate) fn interrupt(child: &Child) {
    let id = child.id().to_string();
    assert!(Command::new("kill").args(["-INT", &id]).status().unwrap().success());
}

/// The binary behind a terminal.
struct Terminal {
    child: Child,
    keyboard: File,
    screen: Receiver<Vec<u8>>,
    /// What was shown and not yet expected.
    shown: String,
}

impl Terminal {
    fn start(mut command: Command) -> Terminal {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        grantpt(&master).unwrap();
        unlockpt(&master).unwrap();
        let size = Winsize { ws_row: 50, ws_col: 200, ws_xpixel: 0, ws_ypixel: 0 };
        tcsetwinsize(&master, size).unwrap();
        let name = ptsname(&master, Vec::new()).unwrap();
        let end = || {
            let mut options = File::options();
            options.read(true).write(true).custom_flags(OFlags::NOCTTY.bits().cast_signed());
            Stdio::from(options.open(std::ffi::OsStr::from_bytes(name.as_bytes())).unwrap())
        };
        command.env("TERM", "xterm").stdin(end()).stdout(end()).stderr(end());
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
    fn expect(&mut self, text: &str) -> String {
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
    fn say(&mut self, line: &str, answer: &str) {
        self.expect(">>> ");
        self.keyboard.write_all(format!("{line}\r").as_bytes()).unwrap();
        self.expect(answer);
    }

    /// Waits for the prompt, types `keys`, and waits for the end.
    #[track_caller]
    fn leave(mut self, keys: &str) {
        self.expect(">>> ");
        self.keyboard.write_all(keys.as_bytes()).unwrap();
        assert!(self.child.wait().unwrap().success());
    }
}

/// The end of an answer: an empty line.
const END: &str = "\r\n\r\n";

fn chat(place: &Place, model: &str, flags: &[&str]) -> Terminal {
    let flags = [&["run", model, "--temperature", "0", "--ignore-eos"], flags].concat();
    // Every token is an `x`, so that what is an answer and what is not can be told apart.
    Terminal::start(place.bodkin(&[&flags[..], &["--logit-bias", "93+1000"]].concat()))
}

#[test]
fn a_chat_remembers_until_it_is_cleared() {
    let place = Place::new();
    let mut chat = chat(&place, &model("llama"), &["-n", "4"]);
    chat.expect("/help shows the commands");
    chat.say("/stats", "no answer yet");
    chat.say("Hello there", "xxxx\r\n\r\n");
    chat.say("/stats", "prompt ");
    let first: usize = chat.expect(" tokens (0 cached)").parse().unwrap();
    chat.say("Good-bye", "xxxx\r\n\r\n");
    chat.say("/stats", "prompt ");
    let second: usize = chat.expect(" tokens (").parse().unwrap();
    let kept: usize = chat.expect(" cached)").parse().unwrap();
    assert!(second > first && kept >= first, "{first} {second} {kept}");
    chat.say("/clear", "");
    chat.say("Hello there", "xxxx\r\n\r\n");
    chat.say("/stats", &format!("prompt {first} tokens ("));
    chat.say("/system You are terse.", "");
    chat.say("Hello there", "xxxx\r\n\r\n");
    chat.say("/stats", "prompt ");
    let with_system: usize = chat.expect(" tokens (").parse().unwrap();
    assert!(with_system > first);
    // Clearing keeps the system message; an empty one removes it.
    chat.say("/clear", "");
    chat.say("Hello there", END);
    chat.say("/stats", &format!("prompt {with_system} tokens ("));
    chat.say("/system", "");
    chat.say("Hello there", END);
    chat.say("/stats", &format!("prompt {first} tokens ("));
    chat.leave("/exit\r");
    let history = fs::read_to_string(place.path("home/data/bodkin/history")).unwrap();
    assert!(history.contains("Good-bye\n") && history.contains("/system You are terse.\n"));
}

#[test]
fn commands_and_lines() {
    let place = Place::new();
    let mut chat = chat(&place, &model("llama"), &["-n", "2"]);
    for word in ["/system TEXT", "/clear", "/stats", "/exit"] {
        chat.say("/help", word);
    }
    chat.say("/nonsense", "unknown command /nonsense");
    chat.say("", "");
    chat.say("one line\\", "... ");
    chat.keyboard.write_all(b"and another\r").unwrap();
    chat.expect("xx\r\n\r\n");
    // Ctrl-C drops what was typed; Ctrl-D leaves.
    chat.expect(">>> ");
    chat.keyboard.write_all(b"half a line\x03").unwrap();
    chat.leave("\x04");
}

#[test]
fn ctrl_c_stops_an_answer_and_the_chat_goes_on() {
    let place = Place::new();
    let mut chat = chat(&place, &model("llama"), &["--ctx-size", "100000"]);
    chat.say("Hello", "xxx");
    interrupt(&chat.child);
    chat.expect(END);
    chat.say("/stats", "; answer ");
    chat.leave("/bye\r");
}

#[test]
fn a_model_without_a_template_goes_on_with_texts() {
    let place = Place::new();
    let bare = place.variant("llama", |m| drop(m.remove("tokenizer.chat_template")));
    let mut chat = chat(&place, &bare, &["-n", "3"]);
    chat.expect("no chat template");
    chat.say("Hello", "xxx\r\n\r\n");
    chat.say("/system You are terse.", "error: this model has no chat template");
    chat.say("x ".repeat(2000).trim_end(), "error: the prompt has ");
    chat.leave("/exit\r");
}

#[test]
fn json_needs_a_prompt() {
    let place = Place::new();
    let mut terminal = Terminal::start(place.bodkin(&["run", &model("llama"), "--json"]));
    terminal.expect("error: --json needs a prompt");
    assert_eq!(terminal.child.wait().unwrap().code(), Some(1));
}
