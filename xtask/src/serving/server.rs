//! The servers that are measured: started on a free port, and ended with the measurement.

use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use super::client;

/// A server that takes longer to load its model has failed.
const START: Duration = Duration::from_secs(120);

/// Bytes of a server's output that an error shows.
const LAST_BYTES: usize = 2000;

/// What both servers get.
pub(crate) struct Setup<'a> {
    pub(crate) model: &'a Path,
    pub(crate) streams: usize,
    /// Whether one long prompt runs beside the streams.
    pub(crate) has_long: bool,
    /// Whether requests are for embeddings.
    pub(crate) embeds: bool,
    /// Tokens of each request.
    pub(crate) context: usize,
    /// CPU threads, on the CPU; without them a GPU, or all cores.
    pub(crate) threads: Option<usize>,
}

/// A running server.
pub(crate) struct Server {
    pub(crate) name: String,
    pub(crate) address: SocketAddr,
    child: Child,
    /// What it has printed.
    log: tempfile::NamedTempFile,
}

impl Setup<'_> {
    /// Requests at the same time.
    fn requests(&self) -> usize {
        self.streams + usize::from(self.has_long)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Server {
    /// bodkin, with further arguments.
    pub(crate) fn bodkin(binary: &Path, setup: &Setup<'_>, more: &[String]) -> Result<Server> {
        let port = free_port()?;
        let mut command = Command::new(binary);
        command.arg("serve").arg(setup.model).args(["--port", &port.to_string()]);
        command.args(["--parallel", &setup.requests().to_string()]);
        command.args(["--ctx-size", &setup.context.to_string()]);
        if let Some(threads) = setup.threads {
            command.args(["--device", "cpu", "--threads", &threads.to_string()]);
        }
        command.args(more);
        let name = ["bodkin"].into_iter().chain(more.iter().map(String::as_str));
        Server::start(name.collect::<Vec<_>>().join(" "), command, port)
    }

    /// llama.cpp's server: each request has a slot with a context of its own.
    pub(crate) fn llama(binary: &Path, name: &str, setup: &Setup<'_>) -> Result<Server> {
        let port = free_port()?;
        let slots = setup.requests();
        let mut command = Command::new(binary);
        command.arg("--model").arg(setup.model).args(["--port", &port.to_string()]);
        command.args(["--parallel", &slots.to_string()]);
        command.args(["--ctx-size", &(slots * setup.context).to_string()]);
        match setup.threads.map(|threads| threads.to_string()) {
            Some(threads) => {
                command.args(["--threads", &threads, "--threads-batch", &threads]);
                command.args(["--n-gpu-layers", "0"]);
            }
            None => {
                command.args(["--flash-attn", "on", "--n-gpu-layers", "99"]);
            }
        }
        if setup.embeds {
            // A text must fit a batch; with the default of 512 tokens a GPU is slower.
            command.args(["--embeddings", "--batch-size", "8192", "--ubatch-size", "8192"]);
        }
        Server::start(name.to_owned(), command, port)
    }

    /// Its process.
    pub(crate) fn process(&self) -> u32 {
        self.child.id()
    }

    /// Sends it a signal, such as `TERM`.
    pub(crate) fn signal(&self, name: &str) -> Result<()> {
        let process = self.process().to_string();
        let status = Command::new("kill").args(["-s", name, &process]).status()?;
        ensure!(status.success(), "cannot send {name} to {}", self.name);
        Ok(())
    }

    /// Waits for its end.
    pub(crate) fn wait(&mut self, limit: Duration) -> Result<ExitStatus> {
        let start = Instant::now();
        while start.elapsed() < limit {
            if let Some(status) = self.child.try_wait()? {
                return Ok(status);
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        bail!("{} did not end in {} s", self.name, limit.as_secs())
    }

    fn start(name: String, mut command: Command, port: u16) -> Result<Server> {
        let log = tempfile::NamedTempFile::new()?;
        let child = command.stdout(Stdio::null()).stderr(log.reopen()?).spawn();
        let child = child.with_context(|| format!("cannot start {name}"))?;
        let address = SocketAddr::from(([127, 0, 0, 1], port));
        let mut server = Server { name, address, child, log };
        let start = Instant::now();
        while start.elapsed() < START {
            if client::get(address, "/health").is_ok_and(|(status, _)| status == 200) {
                let seconds = start.elapsed().as_secs_f64();
                eprintln!("{}: healthy after {seconds:.1} s", server.name);
                return Ok(server);
            }
            if let Some(status) = server.child.try_wait()? {
                bail!("{} ended with {status}: {}", server.name, server.last_words());
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        let (name, seconds) = (&server.name, START.as_secs());
        bail!("{name} did not become healthy in {seconds} s: {}", server.last_words())
    }

    /// The end of what it has printed.
    fn last_words(&self) -> String {
        let text = std::fs::read(self.log.path()).unwrap_or_default();
        let start = text.len().saturating_sub(LAST_BYTES);
        String::from_utf8_lossy(&text[start..]).trim().to_owned()
    }
}

/// A free port.
fn free_port() -> Result<u16> {
    Ok(TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port())
}
