//! The official clients, in a Python environment that the test sets up.

use std::path::Path;
use std::process::Command;

use crate::python::python;
use crate::server::{Server, kit};

pub(crate) const PACKAGES: [&str; 3] = ["openai==3.54.0", "anthropic==2.12.0", "ollama==0.6.3"];

#[test]
fn official_clients_get_what_they_expect() {
    let server = Server::start(&["--ctx-size", "1024", "--parallel", "4"]);
    let encoder = Server::of(&kit("bert.gguf"), &[]);
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/serve/clients.py");
    let output = Command::new(python(&PACKAGES))
        .arg(script)
        .args([server.url(), encoder.url()])
        .output()
        .unwrap();
    let stdout = String::from_utf8_lossy(&output.stdout);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{stdout}{stderr}");
}
