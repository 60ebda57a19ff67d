//! Model files that another process truncates while they are mapped: one line names the file.

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use rustix::termios::tcgetattr;

use crate::place::{Place, failure, model};
use crate::terminal::Terminal;

/// The metadata of a header begins in what is left, and no weight does.
const LEFT: u64 = 4096;

/// Puts a copy of a tiny model into the place.
fn copy(place: &Place, of: &str) -> String {
    let path = place.path("cut.gguf");
    fs::copy(model(of), &path).unwrap();
    path.into_os_string().into_string().unwrap()
}

fn truncate(path: impl AsRef<Path>) {
    File::options().write(true).open(path).unwrap().set_len(LEFT).unwrap();
}

#[test]
fn a_chat_names_its_truncated_file() {
    for of in ["llama", "llama-q4_k_m"] {
        let place = Place::new();
        let path = copy(&place, of);
        let mut chat = Terminal::start(place.bodkin(&["run", &path, "-n", "4"]));
        let keyboard = chat.keyboard.try_clone().unwrap();
        let modes = tcgetattr(&keyboard).unwrap().local_modes;
        chat.expect(">>> ");
        truncate(&path);
        chat.press("Hello\r");
        let (shown, mut child) = chat.rest();
        let line = format!("error: {path}: truncated by another process while in use\r\n");
        assert!(shown.contains(&line), "{of}: {shown}");
        assert_eq!(child.wait().unwrap().code(), Some(1));
        assert_eq!(tcgetattr(&keyboard).unwrap().local_modes, modes);
    }
}

#[cfg(target_os = "linux")]
#[test]
fn embed_names_its_truncated_file() {
    let place = Place::new();
    let path = copy(&place, "bert");
    let mut command = place.bodkin(&["embed", &path]);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    // It maps the file and waits for the text.
    let maps = format!("/proc/{}/maps", child.id());
    while !fs::read_to_string(&maps).unwrap().contains("cut.gguf") {
        std::thread::sleep(Duration::from_millis(10));
    }
    std::thread::sleep(Duration::from_millis(200));
    truncate(&path);
    child.stdin.take().unwrap().write_all(b"Hello there").unwrap();
    let line = failure(&child.wait_with_output().unwrap());
    assert_eq!(line, format!("{path}: truncated by another process while in use"));
}
