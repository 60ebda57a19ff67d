//! The command line as a whole: help, version, completions, manual pages, and `--verbose`.

use std::process::Command;

use crate::place::{Place, failure, model, stderr};

/// The commands that help lists.
const COMMANDS: [&str; 17] = [
    "run",
    "pull",
    "list",
    "devices",
    "inspect",
    "bench",
    "embed",
    "tokenize",
    "detokenize",
    "logits",
    "quantize",
    "prune",
    "perplexity",
    "imatrix",
    "check",
    "completions",
    "man",
];

#[test]
fn help_fits_a_terminal() {
    let place = Place::new();
    let whole = place.text(&["--help"]);
    for command in COMMANDS {
        assert!(whole.contains(&format!("\n  {command} ")), "{whole}");
        for line in place.text(&[command, "--help"]).lines() {
            assert!(line.chars().count() <= 100 && !line.ends_with(' '), "{command}: {line}");
        }
    }
}

/// Machines without a GPU have Mesa's software driver.
#[test]
fn devices_have_a_bandwidth() {
    let devices = Place::new().text(&["devices"]);
    for kind in ["cpu ", "wgpu:0 "] {
        let line = devices.lines().find(|line| line.starts_with(kind));
        assert!(line.is_some_and(|line| line.ends_with(" GB/s")), "{devices}");
        assert!(line.is_some_and(|line| line.contains(" GB, ")), "{devices}");
    }
}

#[test]
fn devices_in_json_have_numbers() {
    let devices = Place::new().text(&["devices", "--json"]);
    let devices: serde_json::Value = serde_json::from_str(&devices).unwrap();
    assert_eq!(devices[0]["device"], "cpu");
    for field in ["total_bytes", "free_bytes", "bandwidth_bytes_per_second"] {
        assert!(devices[0][field].as_f64().unwrap() > 1e6, "{devices:#}");
    }
}

/// Mesa complains of sessions without a folder for Wayland, which those of servers are.
#[test]
fn drivers_that_are_looked_for_are_quiet() {
    let place = Place::new();
    let output = place.bodkin(&["devices"]).env_remove("XDG_RUNTIME_DIR").output().unwrap();
    assert_eq!(stderr(&output), "");
}

#[test]
fn a_software_adapter_is_called_slow() {
    let place = Place::new();
    if place.text(&["devices"]).contains("(software, ") {
        let args = ["run", &model("llama"), "Hello", "-n", "1", "-q", "--device", "wgpu"];
        let note = stderr(&place.run(&args));
        assert!(note.ends_with(" is a program of the CPU and slow; device `cpu` is faster\n"));
    }
}

#[test]
fn the_version_names_commit_and_devices() {
    let place = Place::new();
    let version = place.text(&["--version"]);
    let mut lines = version.lines();
    let first = lines.next().unwrap();
    assert!(first.starts_with(&format!("bodkin {}", env!("CARGO_PKG_VERSION"))), "{version}");
    let cpu = lines.next().unwrap();
    assert!(cpu.starts_with("  cpu (") && cpu.ends_with(" threads)"), "{version}");
    assert!(lines.next().unwrap().starts_with("  cuda"), "{version}");
    assert_eq!(place.text(&["run", "-V"]).lines().count(), version.lines().count());
    // An archive of the source has no repository.
    let git = |args: &[&str]| {
        let mut command = Command::new("git");
        command.arg("-C").arg(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")).args(args);
        command.output().ok().filter(|output| output.status.success())
    };
    if let Some(head) = git(&["rev-parse", "--short=9", "HEAD"]) {
        let head = String::from_utf8(head.stdout).unwrap();
        assert!(first.ends_with(&format!(" (commit {})", head.trim())), "{first} {head}");
    }
}

#[test]
fn shells_complete_commands_and_flags() {
    let place = Place::new();
    for shell in ["bash", "elvish", "fish", "powershell", "zsh"] {
        let script = place.text(&["completions", shell]);
        for word in ["perplexity", "kl-divergence-base", "context-shift"] {
            assert!(script.contains(word), "{shell}: {word}");
        }
    }
    // What bash proposes after `bodkin com`.
    let bash = Command::new("bash").args(["-c", "true"]).status();
    if bash.is_ok_and(|status| status.success()) {
        std::fs::write(place.path("script"), place.text(&["completions", "bash"])).unwrap();
        let ask = "source ./script; COMP_WORDS=(bodkin com); COMP_CWORD=1; _bodkin bodkin com; \
                   echo ${COMPREPLY[@]}";
        let mut command = Command::new("bash");
        let output = command.args(["-c", ask]).current_dir(place.path("")).output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stdout), "completions\n", "{}", stderr(&output));
    }
    assert_eq!(place.run(&["completions", "nonsense"]).status.code(), Some(2));
}

#[cfg(unix)]
#[test]
fn tables_of_models_fit_the_terminal() {
    let place = Place::new();
    let list = ["list", "--known"];
    let whole = place.text(&list);
    assert!(whole.lines().any(|line| line.len() > 80), "{whole}");
    for columns in [120, 80, 40] {
        let command = place.bodkin(&list);
        let (shown, _) = crate::terminal::Terminal::with_columns(command, columns).rest();
        let width = |line: &str| line.chars().count();
        // Notes are behind the table, and a terminal breaks them.
        let is_note = |line: &&str| line.starts_with("gemma3-270m: ");
        let table: Vec<&str> = shown.lines().filter(|line| !is_note(line)).collect();
        assert!(table.iter().all(|line| width(line) <= usize::from(columns)), "{shown}");
        assert!(shown.contains("\r\nqwen3-embedding:0.6b "), "{shown}");
        assert_eq!(table.len(), whole.lines().count());
    }
}

#[test]
fn every_command_has_a_manual_page() {
    let place = Place::new();
    place.text(&["man", "pages"]);
    let page = |name: &str| std::fs::read_to_string(place.path("pages").join(name)).unwrap();
    assert!(page("bodkin.1").starts_with(".ie") && page("bodkin.1").contains(".TH bodkin 1"));
    for command in COMMANDS {
        let page = page(&format!("bodkin-{command}.1"));
        assert!(page.contains(".SH OPTIONS") && page.contains(".SH SYNOPSIS"), "{command}: {page}");
    }
    std::fs::write(place.path("file"), "").unwrap();
    let error = failure(&place.run(&["man", "file"]));
    assert!(error.starts_with("cannot write manual pages to file: "), "{error}");
}

#[test]
fn the_steps_of_a_load_are_printed_if_asked_for() {
    let place = Place::new();
    let args = ["run", &model("llama"), "Hello", "-n", "1", "-q", "--device", "cpu"];
    assert_eq!(stderr(&place.run(&args)), "");
    let steps = stderr(&place.run(&[&args[..], &["--verbose"]].concat()));
    let lines: Vec<&str> = steps.lines().collect();
    let steps_expected = [
        "llama.gguf: 724.61 kB, source: file",
        "header read: GGUF version 3, 30 tensors; llama: ",
        "tokenizer built: 384 tokens",
        "device opened: cpu (",
        "context of 1024 tokens, batches of 512",
        "memory: ",
        "weights loaded",
    ];
    assert_eq!(lines.len(), steps_expected.len(), "{steps}");
    for (line, expected) in lines.iter().zip(steps_expected) {
        assert!(line.starts_with("[  ") && line.contains(" s] "), "{line}");
        assert!(line.contains(expected), "{line}: {expected}");
    }
}

#[test]
fn commands_of_ollama_have_a_tip() {
    let place = Place::new();
    for (name, tip) in [
        ("ps", "`bodkin serve` lists its loaded models at /api/ps"),
        ("stop", "Ctrl-C ends `bodkin serve`"),
        ("create", "`bodkin run` takes a GGUF file"),
        ("cp", "`bodkin serve NAME=MODEL` serves a model under another name"),
        ("push", "bodkin uploads nothing"),
    ] {
        let output = place.run(&[name, "a", "b"]);
        let error = stderr(&output);
        assert_eq!(output.status.code(), Some(2), "{error}");
        let start = format!("error: unrecognized subcommand '{name}'\n\n  tip: {tip}");
        assert!(error.starts_with(&start) && !error.contains("similar"), "{error}");
    }
    let error = stderr(&place.run(&["quantise"]));
    assert!(error.contains("a similar subcommand exists: 'quantize'"), "{error}");
}

#[test]
fn numbers_are_asked_for_in_plain_words() {
    let place = Place::new();
    for (flags, expected) in [
        (["run", "x", "--temp", "warm"], "expected a number"),
        (["run", "x", "--top-k", "1.5"], "expected a whole number"),
        (["bench", "x", "-r", "0"], "expected a number of 1 or more"),
        (["run", "x", "--top-k", "99999999999999999999"], "the number is too large"),
    ] {
        let output = place.run(&flags);
        let error = stderr(&output);
        assert_eq!(output.status.code(), Some(2), "{flags:?}: {error}");
        assert!(error.contains(expected), "{flags:?}: {error}");
    }
}
