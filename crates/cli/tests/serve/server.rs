//! A server of a test: started on a free port, ended with the test; and a plain client.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

/// A tiny model with random weights.
pub(crate) const MODEL: &str = "llama.gguf";

/// What a server says when it is asked to stop.
pub(crate) const STOPPING: &str =
    "stopping: running requests have 30 s; stop again to end them now\n";

/// A file of the kit of tiny models.
pub(crate) fn kit(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/parity/models").join(file)
}

pub(crate) struct Server {
    pub(crate) address: SocketAddr,
    pub(crate) child: Child,
    pub(crate) stderr: BufReader<ChildStderr>,
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A response.
#[derive(Debug)]
pub(crate) struct Response {
    pub(crate) status: u16,
    pub(crate) head: String,
    pub(crate) body: String,
}

impl Response {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap()
    }
}

impl Server {
    /// Serves a model of the kit on a free port.
    pub(crate) fn start(args: &[&str]) -> Server {
        Server::of(&kit(MODEL), args)
    }

    pub(crate) fn of(model: &Path, args: &[&str]) -> Server {
        let model = model.to_str().unwrap();
        Server::with(&[&[model], args].concat())
    }

    /// Starts a server and waits until its models answer.
    pub(crate) fn with(args: &[&str]) -> Server {
        let server = Server::without_waiting(args);
        let start = Instant::now();
        while server.get("/health").status != 200 {
            assert!(start.elapsed() < Duration::from_secs(60), "the model is loaded");
            std::thread::sleep(Duration::from_millis(20));
        }
        server
    }

    /// Starts a server and waits until it listens.
    pub(crate) fn without_waiting(args: &[&str]) -> Server {
        Server::spawn(Command::new(env!("CARGO_BIN_EXE_bodkin")), args)
    }

    /// As [`Server::without_waiting`], by a command that runs bodkin with its arguments.
    pub(crate) fn spawn(mut command: Command, args: &[&str]) -> Server {
        let mut child = command
            .arg("serve")
            .args(args)
            .args(["--port", "0"])
            .args(if args.contains(&"--device") { &[][..] } else { &["--device", "cpu"] })
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut stderr = BufReader::new(child.stderr.take().unwrap());
        let mut line = String::new();
        while !line.starts_with("listening on ") {
            line.clear();
            assert!(stderr.read_line(&mut line).unwrap() > 0, "the server listens");
        }
        let address = line.trim().rsplit('/').next().unwrap().parse().unwrap();
        Server { address, child, stderr }
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    pub(crate) fn connect(&self) -> TcpStream {
        let socket = TcpStream::connect(self.address).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        socket
    }

    /// Sends a request to `/completion`, and waits until its answer begins.
    pub(crate) fn begin(&self, body: &Value) -> TcpStream {
        let body = body.to_string();
        let mut socket = self.connect();
        socket.write_all(post_head("/completion", body.len(), "").as_bytes()).unwrap();
        socket.write_all(body.as_bytes()).unwrap();
        socket.read_exact(&mut [0; 12]).unwrap();
        socket
    }

    pub(crate) fn get(&self, path: &str) -> Response {
        self.send(
            &format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"),
            b"",
        )
    }

    pub(crate) fn post(&self, path: &str, body: &Value) -> Response {
        self.post_bytes(path, body.to_string().as_bytes())
    }

    pub(crate) fn post_bytes(&self, path: &str, body: &[u8]) -> Response {
        self.send(&post_head(path, body.len(), ""), body)
    }

    /// Sends a head and a body, and reads the response.
    pub(crate) fn send(&self, head: &str, body: &[u8]) -> Response {
        let mut socket = self.connect();
        socket.write_all(head.as_bytes()).unwrap();
        // The server may answer before it has read all.
        let _ = socket.write_all(body);
        read_response(socket)
    }

    /// Requests that hold pages now.
    pub(crate) fn running(&self) -> usize {
        self.metric("bodkin_requests_running") as usize
    }

    /// A number of `/metrics`, summed over its labels.
    pub(crate) fn metric(&self, name: &str) -> f64 {
        let text = self.get("/metrics").body;
        let lines = text.lines().filter(|line| {
            let rest = line.strip_prefix(name);
            rest.is_some_and(|rest| rest.starts_with(['{', ' ']))
        });
        lines.map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap()).sum()
    }

    /// Waits until no request is running.
    pub(crate) fn wait_idle(&self) {
        let start = Instant::now();
        while self.running() > 0 || self.metric("bodkin_requests_waiting") > 0.0 {
            assert!(start.elapsed() < Duration::from_secs(20), "requests go on");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Sends SIGTERM.
    pub(crate) fn terminate(&self) {
        let pid = self.child.id().to_string();
        assert!(Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
    }

    /// What the server has printed since it listens; waits for its end.
    pub(crate) fn rest_of_stderr(&mut self) -> String {
        let mut text = String::new();
        self.stderr.read_to_string(&mut text).unwrap();
        text
    }
}

/// The last line of a server that cannot start.
pub(crate) fn failure(args: &[&str]) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_bodkin"));
    let output = command.arg("serve").args(args).output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(matches!(output.status.code(), Some(1 | 2)), "{stderr}");
    let mut lines = stderr.lines().filter(|line| line.starts_with("error: "));
    lines.next_back().unwrap_or(&stderr).to_owned()
}

/// The head of a POST.
pub(crate) fn post_head(path: &str, bytes: usize, headers: &str) -> String {
    format!(
        "POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\
         Content-Length: {bytes}\r\n{headers}\r\n"
    )
}

/// Reads a response to the end of the connection.
pub(crate) fn read_response(mut socket: TcpStream) -> Response {
    let mut bytes = Vec::new();
    // A server that refuses a request resets the connection under the rest of it.
    let _ = socket.read_to_end(&mut bytes);
    let text = String::from_utf8_lossy(&bytes).into_owned();
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or((&text, ""));
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or(0);
    let is_chunked = head.to_ascii_lowercase().contains("transfer-encoding: chunked");
    let body = if is_chunked { dechunked(body) } else { body.to_owned() };
    Response { status, head: head.to_owned(), body }
}

/// A body that came in chunks.
fn dechunked(mut body: &str) -> String {
    let mut whole = String::new();
    while let Some((size, rest)) = body.split_once("\r\n") {
        let size = usize::from_str_radix(size.trim(), 16).unwrap_or(0);
        if size == 0 || rest.len() < size || !rest.is_char_boundary(size) {
            break;
        }
        whole.push_str(&rest[..size]);
        body = rest[size..].trim_start_matches("\r\n");
    }
    whole
}
