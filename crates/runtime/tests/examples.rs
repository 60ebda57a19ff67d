//! The example programs, run on tiny models as a user runs them.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

fn model(name: &str) -> String {
    format!("{}/../../tests/parity/models/{name}.gguf", env!("CARGO_MANIFEST_DIR"))
}

/// The program that cargo built beside this test.
fn example(name: &str) -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let profile = test.parent().and_then(Path::parent).unwrap();
    profile.join("examples").join(name).with_extension(std::env::consts::EXE_EXTENSION)
}

/// What an example prints to standard output, having read `input`.
fn run(name: &str, args: &[&str], input: &str) -> String {
    let mut command = Command::new(example(name));
    command.args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{name}: {error}");
    assert_eq!(error, "");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn chat_answers_every_line() {
    let printed = run("chat", &[&model("llama")], "Hello\nAnd again\n");
    assert!(printed.lines().count() >= 2 && printed.trim().len() > 1, "{printed:?}");
}

#[test]
fn generate_continues_the_prompt() {
    let args = &[&*model("llama"), "Hello world"];
    let printed = run("generate", args, "");
    assert!(printed.starts_with("Hello world"), "{printed:?}");
    assert!(printed.ends_with(" tokens\n"), "{printed:?}");
    assert_eq!(run("generate", args, ""), printed);
}

#[test]
fn embed_compares_texts() {
    let printed = run("embed", &[&model("bert"), "Hello world", "Hello world", "x"], "");
    let cosines: Vec<f32> =
        printed.lines().map(|line| line.split_once(' ').unwrap().0.parse().unwrap()).collect();
    assert_eq!(cosines[..2], [1.0, 1.0], "{printed}");
    assert!(cosines[2] < 0.999, "{printed}");
}

#[test]
fn logits_has_a_line_for_each_next_token() {
    let printed = run("logits", &[&model("llama"), "Hello world"], "");
    // Nine tokens, of which the first has no prediction.
    assert_eq!(printed.lines().count(), 8, "{printed}");
    assert!(printed.lines().all(|line| line.contains("log-probability -")), "{printed}");
}
