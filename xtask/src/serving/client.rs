//! A client that streams completions and notes when tokens come: plain sockets, so that it takes
//! little of the processor that the server needs.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

/// A server that says nothing for this long has failed.
const TIMEOUT: Duration = Duration::from_secs(600);

/// When the pieces of a streamed answer came.
#[derive(Clone, Debug)]
pub(crate) struct Times {
    /// When the request was sent.
    pub(crate) sent: Instant,
    /// When each piece came.
    pub(crate) pieces: Vec<Instant>,
    /// Tokens of the answer, as the server counts them.
    pub(crate) tokens: u64,
}

/// Sends a request and reads its events.
pub(crate) fn stream(address: SocketAddr, body: &Value) -> Result<Times> {
    let mut socket = TcpStream::connect(address)?;
    socket.set_nodelay(true)?;
    socket.set_read_timeout(Some(TIMEOUT))?;
    let body = body.to_string();
    let sent = Instant::now();
    write!(socket, "{}{body}", head("/v1/completions", body.len()))?;
    let mut reader = BufReader::new(socket);
    let mut line = String::new();
    reader.read_line(&mut line)?;
    if !line.contains(" 200 ") {
        let mut rest = String::new();
        reader.read_to_string(&mut rest)?;
        bail!("{}: {rest}", line.trim());
    }
    let (mut pieces, mut tokens) = (Vec::new(), None);
    loop {
        line.clear();
        if reader.read_line(&mut line)? == 0 {
            break;
        }
        let Some(data) = line.trim_end().strip_prefix("data: ") else { continue };
        if data == "[DONE]" {
            break;
        }
        pieces.push(Instant::now());
        // Only the last chunks have counts; the others are not parsed.
        if data.contains("\"predicted_n\"") || data.contains("\"error\"") {
            let value: Value = serde_json::from_str(data)?;
            ensure!(value.get("error").is_none(), "{data}");
            tokens = value["timings"]["predicted_n"].as_u64();
        }
    }
    let tokens = tokens.context("the stream ended without counts")?;
    Ok(Times { sent, pieces, tokens })
}

/// The status of a GET, and how long it took.
pub(crate) fn get(address: SocketAddr, path: &str) -> Result<(u16, Duration)> {
    let start = Instant::now();
    let mut socket = TcpStream::connect(address)?;
    socket.set_read_timeout(Some(TIMEOUT))?;
    write!(socket, "GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")?;
    let mut line = String::new();
    BufReader::new(socket).read_line(&mut line)?;
    let status = line.split(' ').nth(1).and_then(|status| status.parse().ok());
    Ok((status.context("an HTTP response")?, start.elapsed()))
}

/// The body of a GET.
pub(crate) fn text(address: SocketAddr, path: &str) -> Result<String> {
    let mut socket = TcpStream::connect(address)?;
    socket.set_read_timeout(Some(TIMEOUT))?;
    write!(socket, "GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")?;
    let (status, body) = response(socket)?;
    ensure!(status == 200, "{path}: {status} {body}");
    Ok(body)
}

/// Sends a body. Returns the status and the body of the response.
pub(crate) fn post(address: SocketAddr, path: &str, body: &[u8]) -> Result<(u16, String)> {
    let mut socket = TcpStream::connect(address)?;
    socket.set_read_timeout(Some(TIMEOUT))?;
    socket.write_all(head(path, body.len()).as_bytes())?;
    // The server may answer, and close, before it has read all.
    let _ = socket.write_all(body);
    response(socket)
}

/// The head of a POST.
pub(crate) fn head(path: &str, bytes: usize) -> String {
    format!(
        "POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n\
         Connection: close\r\nContent-Length: {bytes}\r\n\r\n"
    )
}

/// The status and the body of a response, which ends with the connection.
pub(crate) fn response(mut socket: TcpStream) -> Result<(u16, String)> {
    let mut bytes = Vec::new();
    // A server that refuses a request resets the connection under the rest of it.
    let end = socket.read_to_end(&mut bytes);
    let text = String::from_utf8_lossy(&bytes);
    let status = text.split(' ').nth(1).and_then(|status| status.parse().ok());
    let Some((status, (_, body))) = status.zip(text.split_once("\r\n\r\n")) else {
        bail!("no HTTP response: {end:?}");
    };
    Ok((status, body.to_owned()))
}
