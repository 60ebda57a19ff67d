//! What clients do wrong. Each fault checks its own answer; leaks show at the end of the soak.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::time::Duration;

use anyhow::{Result, ensure};
use serde_json::{Value, json};

use super::traffic::Random;
use crate::serving::client;

/// A fault, and whether the server answered it as it should.
pub(super) type Fault = fn(SocketAddr, &mut Random) -> Result<()>;

/// All faults by name.
pub(super) const FAULTS: [(&str, Fault); 9] = [
    ("slow reader", slow_reader),
    ("half-open socket", half_open),
    ("1 MB of headers", headers),
    ("100 MB body", large_body),
    ("invalid UTF-8", invalid_utf8),
    ("deep JSON", deep_json),
    ("NaN and 1e999", numbers),
    ("cancel", cancel),
    ("body cut short", cut_body),
];

/// A request for a long stream.
fn long_stream() -> Value {
    json!({ "prompt": [21, 22, 23], "n_predict": 400, "ignore_eos": true, "stream": true })
}

/// Connects and sends a body.
fn open(address: SocketAddr, body: &str) -> Result<TcpStream> {
    let mut socket = TcpStream::connect(address)?;
    socket.set_read_timeout(Some(Duration::from_secs(60)))?;
    socket.write_all(client::head("/completion", body.len()).as_bytes())?;
    socket.write_all(body.as_bytes())?;
    Ok(socket)
}

/// Reads a few bytes at a time, and goes before the end.
fn slow_reader(address: SocketAddr, random: &mut Random) -> Result<()> {
    let mut socket = open(address, &long_stream().to_string())?;
    let mut byte = [0];
    for _ in 0..20 + random.below(60) {
        if socket.read(&mut byte)? == 0 {
            break;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// Sends half a head, is silent, and goes without a word.
fn half_open(address: SocketAddr, random: &mut Random) -> Result<()> {
    let mut socket = TcpStream::connect(address)?;
    socket.write_all(b"POST /v1/completions HTTP/1.1\r\nHost: local")?;
    std::thread::sleep(Duration::from_millis(random.below(2000)));
    Ok(())
}

fn headers(address: SocketAddr, _: &mut Random) -> Result<()> {
    let mut socket = TcpStream::connect(address)?;
    socket.set_read_timeout(Some(Duration::from_secs(60)))?;
    socket.write_all(b"GET /health HTTP/1.1\r\nHost: localhost\r\n")?;
    let line = format!("X-Long: {}\r\n", "x".repeat(10_000));
    for _ in 0..100 {
        // The server may have answered, and closed, already.
        if socket.write_all(line.as_bytes()).is_err() {
            break;
        }
    }
    let _ = socket.write_all(b"\r\n");
    // A reset may overtake the answer.
    if let Ok((status, _)) = client::response(socket) {
        ensure!(status == 431, "the status is {status}, not 431");
    }
    Ok(())
}

fn large_body(address: SocketAddr, _: &mut Random) -> Result<()> {
    let mut socket = TcpStream::connect(address)?;
    socket.set_read_timeout(Some(Duration::from_secs(60)))?;
    socket.write_all(client::head("/completion", 100 << 20).as_bytes())?;
    let block = vec![b' '; 1 << 20];
    for _ in 0..100 {
        if socket.write_all(&block).is_err() {
            break;
        }
    }
    if let Ok((status, _)) = client::response(socket) {
        ensure!(status == 413, "the status is {status}, not 413");
    }
    Ok(())
}

fn invalid_utf8(address: SocketAddr, _: &mut Random) -> Result<()> {
    refused(address, b"{\"prompt\": \"a \xff\xfe b\"}")
}

fn deep_json(address: SocketAddr, _: &mut Random) -> Result<()> {
    let (open, close) = ("[".repeat(100_000), "]".repeat(100_000));
    refused(address, format!("{{\"prompt\": {open}{close}}}").as_bytes())
}

fn numbers(address: SocketAddr, random: &mut Random) -> Result<()> {
    let numbers = ["NaN", "1e999", "-Infinity", "1e300", "-1"];
    let number = numbers[random.below(numbers.len() as u64) as usize];
    refused(address, format!("{{\"prompt\": \"a\", \"temperature\": {number}}}").as_bytes())
}

/// Goes at a random moment.
fn cancel(address: SocketAddr, random: &mut Random) -> Result<()> {
    let mut socket = open(address, &long_stream().to_string())?;
    match random.below(3) {
        0 => drop(socket.read(&mut [0; 300])?),
        1 => std::thread::sleep(Duration::from_millis(random.below(50))),
        _ => socket.shutdown(Shutdown::Both)?,
    }
    Ok(())
}

/// Announces more than it sends.
fn cut_body(address: SocketAddr, random: &mut Random) -> Result<()> {
    let body = long_stream().to_string();
    let mut socket = TcpStream::connect(address)?;
    socket.write_all(client::head("/completion", body.len()).as_bytes())?;
    socket.write_all(&body.as_bytes()[..random.below(body.len() as u64) as usize])?;
    Ok(())
}

fn refused(address: SocketAddr, body: &[u8]) -> Result<()> {
    let (status, answer) = client::post(address, "/completion", body)?;
    ensure!(status == 400 && answer.contains("\"error\""), "{status} {answer}");
    Ok(())
}
