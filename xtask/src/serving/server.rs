//! The servers that are measured: started on a free port, and ended with the measurement.

use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::{Args, client};

/// A server that takes longer to load its model has failed.
const START: Duration = Duration::from_secs(300);

/// A running server.
pub(super) struct Server {
    pub(super) name: String,
    pub(super) address: SocketAddr,
    child: Child,
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Server {
    /// bodkin, for this many streams.
    pub(super) fn bodkin(
        binary: &Path,
        model: &Path,
        streams: usize,
        args: &Args,
    ) -> Result<Server> {
        let port = free_port()?;
        let mut command = Command::new(binary);
        command.arg("serve").arg(model).args(["--port", &port.to_string()]);
        command.args(["--parallel", &(streams + 1).to_string()]);
        command.args(["--ctx-size", &args.ctx_size.to_string()]);
        command.args(["--threads", &args.threads.to_string()]);
        command.args(&args.serve_args);
        Server::start("bodkin".to_owned(), command, port)
    }

    /// llama.cpp's server, for this many streams: each has a slot with a context of its own.
    pub(super) fn llama(
        binary: &Path,
        model: &Path,
        streams: usize,
        args: &Args,
    ) -> Result<Server> {
        let port = free_port()?;
        let slots = streams + usize::from(args.long > 0);
        let mut command = Command::new(binary);
        command.arg("--model").arg(model).args(["--port", &port.to_string()]);
        command.args(["--parallel", &slots.to_string()]);
        command.args(["--ctx-size", &(slots * args.ctx_size).to_string()]);
        command.args(["--threads", &args.threads.to_string()]);
        command.args(["--threads-batch", &args.threads.to_string(), "--flash-attn", "on"]);
        command.args(["--n-gpu-layers", "99"]);
        Server::start(args.peer_name.clone(), command, port)
    }

    fn start(name: String, mut command: Command, port: u16) -> Result<Server> {
        let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn();
        let child = child.with_context(|| format!("cannot start {name}"))?;
        let address = SocketAddr::from(([127, 0, 0, 1], port));
        let mut server = Server { name, address, child };
        let start = Instant::now();
        while start.elapsed() < START {
            if client::get(address, "/health").is_ok_and(|(status, _)| status == 200) {
                return Ok(server);
            }
            if let Some(status) = server.child.try_wait()? {
                bail!("{} ended with {status}", server.name);
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        bail!("{} did not become healthy in {} s", server.name, START.as_secs())
    }
}

/// A port that nobody listens on.
fn free_port() -> Result<u16> {
    Ok(TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port())
}
