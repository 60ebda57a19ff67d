//! What goes wrong with the machine that a server runs on: its clock is set back, its disk is full,
//! another process cuts or replaces the model's file, and clients connect and say nothing.

use std::fs;
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::json;

use crate::serving::client;

/// Connections that say nothing, at the same time.
pub(super) const IDLE_CONNECTIONS: usize = 2000;

/// How long the wall clock is right, and then an hour behind.
const CLOCK_PERIOD: Duration = Duration::from_secs(10);

/// How long a server may take to notice what happened to its model.
const NOTICE: Duration = Duration::from_secs(60);

/// A library that sets the wall clock of a process back while the file named by `CLOCK_BACK` is
/// there.
const CLOCK_SOURCE: &str = r#"#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

int clock_gettime(clockid_t id, struct timespec *time) {
    static int (*system_clock)(clockid_t, struct timespec *);
    if (!system_clock) *(void **)&system_clock = dlsym(RTLD_NEXT, "clock_gettime");
    int status = system_clock(id, time);
    const char *file = getenv("CLOCK_BACK");
    if (id == CLOCK_REALTIME && file && access(file, F_OK) == 0) time->tv_sec -= 3600;
    return status;
}
"#;

/// A folder with what the faults need.
pub(super) struct Machine {
    folder: tempfile::TempDir,
}

impl Machine {
    pub(super) fn new() -> Result<Machine> {
        Ok(Machine { folder: tempfile::tempdir()? })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Makes a folder in its own.
    pub(super) fn folder(&self, name: &str) -> Result<PathBuf> {
        let folder = self.path(name);
        fs::create_dir(&folder)?;
        Ok(folder)
    }

    /// A copy of the model, for files that are cut and replaced.
    pub(super) fn copy_of(&self, model: &Path) -> Result<PathBuf> {
        let copy = self.path("model.gguf");
        fs::copy(model, &copy).with_context(|| model.display().to_string())?;
        Ok(copy)
    }

    /// A program that runs `binary` with a clock that [`Machine::turn_clock`] sets back, and two
    /// arenas of the C library, as under `deploy/`.
    pub(super) fn with_clock(&self, binary: &Path) -> Result<PathBuf> {
        let (source, library) = (self.path("clock.c"), self.path("clock.so"));
        fs::write(&source, CLOCK_SOURCE)?;
        let mut compiler = Command::new("cc");
        compiler.args(["-shared", "-fPIC", "-O1", "-o"]).arg(&library).arg(&source).arg("-ldl");
        ensure!(compiler.status().context("cc")?.success(), "cc cannot compile {CLOCK_SOURCE}");
        let (library, file) = (library.display(), self.clock_file());
        let set = format!(
            "export MALLOC_ARENA_MAX=2 LD_PRELOAD='{library}' CLOCK_BACK='{}'",
            file.display()
        );
        self.script("with-clock", &format!("{set}\nexec '{}' \"$@\"", binary.display()))
    }

    /// A program that runs `binary` with a file system of 1 MB, which is full, in `folder`.
    pub(super) fn with_full_disk(&self, binary: &Path, folder: &Path) -> Result<PathBuf> {
        let (binary, folder) = (binary.display(), folder.display());
        let fill = format!("head -c 2M /dev/zero > '{folder}/other' 2> /dev/null");
        let mount = format!("mount -t tmpfs -o size=1M none '{folder}'");
        let run = format!("{mount} && {{ {fill}; exec '{binary}' \"$@\"; }}");
        let quoted = run.replace('\'', r"'\''");
        self.script("with-full-disk", &format!("exec unshare -Urm sh -c '{quoted}' sh \"$@\""))
    }

    /// Turns the clock of the program back, and forth, until `is_over`. Returns how often.
    pub(super) fn turn_clock(&self, is_over: impl Fn() -> bool) -> Result<u64> {
        let file = self.clock_file();
        let mut turns = 0;
        while !is_over() {
            match turns % 2 {
                0 => fs::write(&file, "")?,
                _ => fs::remove_file(&file)?,
            }
            turns += 1;
            let begun = Instant::now();
            while begun.elapsed() < CLOCK_PERIOD && !is_over() {
                std::thread::sleep(Duration::from_millis(100));
            }
        }
        let _ = fs::remove_file(&file);
        Ok(turns)
    }

    fn clock_file(&self) -> PathBuf {
        self.path("clock-is-back")
    }

    fn script(&self, name: &str, text: &str) -> Result<PathBuf> {
        let path = self.path(name);
        fs::write(&path, format!("#!/bin/sh\n{text}\n"))?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755))?;
        Ok(path)
    }
}

/// Holds connections that say nothing until `is_over`, and opens those again that the server has
/// closed. Returns how many it has opened.
pub(super) fn hold_idle(address: SocketAddr, is_over: impl Fn() -> bool) -> Result<u64> {
    let mut opened = 0;
    let mut sockets: Vec<TcpStream> = Vec::new();
    while !is_over() {
        sockets.retain(is_open);
        while sockets.len() < IDLE_CONNECTIONS && !is_over() {
            let socket = TcpStream::connect(address).context("an idle connection")?;
            socket.set_nonblocking(true)?;
            sockets.push(socket);
            opened += 1;
        }
        std::thread::sleep(Duration::from_millis(500));
    }
    Ok(opened)
}

/// Whether a connection that has sent nothing is still open.
fn is_open(socket: &TcpStream) -> bool {
    let found = socket.peek(&mut [0]);
    found.is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock)
}

/// Cuts the model's file, and makes it whole again. The server must refuse requests and say why in
/// between, and load the model again afterwards.
pub(super) fn cut_model(address: SocketAddr, model: &Path) -> Result<()> {
    let whole = fs::read(model)?;
    fs::File::options().write(true).open(model)?.set_len(whole.len() as u64 / 2)?;
    let is_refused = |(status, text): &(u16, String)| *status >= 500 && text.contains("model");
    until("a cut model's requests fail", || completion(address).map(|found| is_refused(&found)))?;
    until("/health tells of it", || Ok(client::get(address, "/health")?.0 == 503))?;
    fs::write(model, whole)?;
    until("the whole model answers", || Ok(completion(address)?.0 == 200))?;
    until("/health is 200", || Ok(client::get(address, "/health")?.0 == 200))
}

/// Puts another file in the place of the model's, as downloads do. Requests are answered meanwhile.
pub(super) fn replace_model(address: SocketAddr, model: &Path) -> Result<()> {
    let copy = model.with_extension("new");
    fs::copy(model, &copy)?;
    fs::rename(&copy, model)?;
    let (status, text) = completion(address)?;
    ensure!(status == 200, "the model's file was replaced: {status} {text}");
    let (status, _) = client::get(address, "/health")?;
    ensure!(status == 200, "the model's file was replaced: /health says {status}");
    Ok(())
}

/// A request that needs the model's weights.
fn completion(address: SocketAddr) -> Result<(u16, String)> {
    let body = json!({ "prompt": [21, 22, 23, 24], "n_predict": 2 }).to_string();
    client::post(address, "/completion", body.as_bytes())
}

/// Waits until something holds.
fn until(what: &str, holds: impl Fn() -> Result<bool>) -> Result<()> {
    let begun = Instant::now();
    while !holds()? {
        ensure!(begun.elapsed() < NOTICE, "waited {} s for: {what}", NOTICE.as_secs());
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}
