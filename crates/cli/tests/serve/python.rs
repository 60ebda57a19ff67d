//! Python environments that tests set up.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};

/// Tests of one process run in threads: one environment is made at a time.
static SETUP: Mutex<()> = Mutex::new(());

/// A Python with packages. The environment is made once and used again.
pub(crate) fn python(packages: &[&str]) -> PathBuf {
    let _setup = SETUP.lock().unwrap_or_else(PoisonError::into_inner);
    let name = packages.join("-").replace("==", "_");
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("clients-{name}"));
    let python = folder.join("bin/python3");
    let done = folder.join("done");
    if !done.exists() {
        let venv =
            Command::new("python3").args(["-m", "venv", "--clear"]).arg(&folder).status().unwrap();
        assert!(venv.success(), "python3 has the module venv");
        let pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"];
        let pip = Command::new(&python).args(pip).args(packages).status().unwrap();
        assert!(pip.success(), "pip installs {packages:?}");
        std::fs::write(done, "").unwrap();
    }
    python
}
