//! The official clients, in a Python environment that the test sets up.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::server::{Server, kit};

const PACKAGES: [&str; 3] = ["openai==3.54.0", "anthropic==2.12.0", "ollama==0.6.3"];

/// A Python with the clients. The environment is made once and used again.
pub(crate) fn python(packages: &[&str]) -> PathBuf {
    let name = packages.join("-").replace("==", "_");
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("clients-{name}"));
    let python = folder.join("bin/python3");
    let done = folder.join("done");
    if !done.exists() {
        let venv = Command::new("python3").args(["-m", "venv"]).arg(&folder).status().unwrap();
        assert!(venv.success(), "python3 has the module venv");
        let pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"];
        let pip = Command::new(&python).args(pip).args(packages).status().unwrap();
        assert!(pip.success(), "pip installs {packages:?}");
        std::fs::write(done, "").unwrap();
    }
    python
}

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
