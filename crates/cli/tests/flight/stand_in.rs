//! The store of a test: a process with two ports.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Duration;

use crate::python::python;

/// The Arrow release that stores of this contract name, and the newest.
pub(crate) const VERSIONS: [&str; 2] = ["pyarrow==23.0.0", "pyarrow==26.0.1"];

const NUMPY: &str = "numpy==2.4.6";

/// A Python with a version of pyarrow.
pub(crate) fn pyarrow(version: &str) -> PathBuf {
    python(&[version, NUMPY])
}

/// A script of these tests.
pub(crate) fn script(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/flight").join(name)
}

/// Runs a script, which must succeed, and returns what it prints.
pub(crate) fn run_script(version: &str, name: &str, args: &[&str]) -> String {
    let output = Command::new(pyarrow(version)).arg(script(name)).args(args).output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{name}: {stderr}");
    String::from_utf8(output.stdout).unwrap()
}

pub(crate) struct Store {
    child: Child,
    out: BufReader<ChildStdout>,
    pub(crate) data: u16,
    pub(crate) meta: u16,
}

impl Drop for Store {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Store {
    pub(crate) fn start(version: &str, args: &[&str]) -> Store {
        let mut child = Command::new(pyarrow(version))
            .arg(script("store.py"))
            .args(args)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut out = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        out.read_line(&mut line).unwrap();
        let mut words = line.split_whitespace().skip(1).map(|port| port.parse().unwrap());
        let (data, meta) = (words.next().unwrap(), words.next().unwrap());
        Store { child, out, data, meta }
    }

    /// Starts it again, where it was, after its end.
    pub(crate) fn restart(mut self, version: &str, args: &[&str]) -> Store {
        self.wait();
        let (data, meta) = (self.data.to_string(), self.meta.to_string());
        Store::start(version, &[&["--data-port", &data, "--meta-port", &meta], args].concat())
    }

    /// Waits until it has died.
    pub(crate) fn wait(&mut self) {
        self.child.wait().unwrap();
    }

    /// Waits for the acknowledgement of a stream; its rows.
    pub(crate) fn next_put(&mut self) -> usize {
        self.next_timed_put().0
    }

    /// The same, and the time since the acknowledgement of the stream before.
    pub(crate) fn next_timed_put(&mut self) -> (usize, Duration) {
        let mut line = String::new();
        self.out.read_line(&mut line).unwrap();
        let (rows, idle) = line.trim().strip_prefix("put ").unwrap().split_once(' ').unwrap();
        (rows.parse().unwrap(), Duration::from_millis(idle.parse().unwrap()))
    }

    /// The flags of a command that uses it.
    pub(crate) fn flags(&self, dataset: &str) -> Vec<String> {
        let (data, meta) = (self.data, self.meta);
        [
            "--flight".to_owned(),
            format!("127.0.0.1:{data}"),
            "--flight-meta".to_owned(),
            format!("127.0.0.1:{meta}"),
            "--dataset".to_owned(),
            dataset.to_owned(),
        ]
        .into()
    }
}
