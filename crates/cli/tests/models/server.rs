//! A server on this machine that answers as model registries and the hosts of their files do, and
//! that fails as networks and hosts do. It must not know which registry it stands in for.

use std::collections::{HashMap, VecDeque};
use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

/// What a path answers.
#[derive(Clone)]
pub(crate) enum Answer {
    /// A file, of which a range may be asked.
    File(Vec<u8>),
    /// The address of the host that has the file.
    Redirect(String),
}

/// What goes wrong with a request of a file.
#[derive(Clone)]
pub(crate) enum Fault {
    /// The connection ends after this many bytes.
    Cut(usize),
    /// Nothing comes after this many bytes.
    Stall(usize),
    /// A status, and a header with it.
    Status(&'static str, &'static str),
    /// The range is ignored and the whole file sent.
    NoRange,
    /// The version is ignored and the range sent of another one.
    NoIfRange,
}

/// A request.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Seen {
    pub(crate) path: String,
    /// The first byte of the range, if one was asked.
    pub(crate) from: Option<usize>,
    /// The version that the range is to be of.
    pub(crate) if_range: Option<String>,
    pub(crate) authorization: Option<String>,
}

#[derive(Default)]
struct State {
    answers: HashMap<String, Answer>,
    faults: VecDeque<Fault>,
    etag: Option<String>,
    seen: Vec<Seen>,
}

/// A server, which stops with the test's process.
pub(crate) struct Server {
    address: SocketAddr,
    state: Arc<Mutex<State>>,
}

impl Server {
    pub(crate) fn new() -> Server {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let state = Arc::new(Mutex::new(State::default()));
        let shared = Arc::clone(&state);
        thread::spawn(move || {
            for stream in listener.incoming() {
                let shared = Arc::clone(&shared);
                // A client may be killed at any time.
                thread::spawn(move || drop(serve(stream.unwrap(), &shared)));
            }
        });
        Server { address, state }
    }

    /// The address under a host's name: `127.0.0.1` and `localhost` are different hosts.
    pub(crate) fn url(&self, host: &str) -> String {
        format!("http://{host}:{}", self.address.port())
    }

    pub(crate) fn answer(&self, path: &str, answer: Answer) {
        self.state.lock().unwrap().answers.insert(path.to_owned(), answer);
    }

    /// The faults of the next requests of files, one each.
    pub(crate) fn fail(&self, faults: &[Fault]) {
        self.state.lock().unwrap().faults.extend(faults.iter().cloned());
    }

    /// The ETag of all files.
    pub(crate) fn tag(&self, etag: &str) {
        self.state.lock().unwrap().etag = Some(etag.to_owned());
    }

    /// All requests since the last call.
    pub(crate) fn seen(&self) -> Vec<Seen> {
        std::mem::take(&mut self.state.lock().unwrap().seen)
    }
}

/// Reads the head of a request.
fn read_head(stream: &TcpStream) -> std::io::Result<Seen> {
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    reader.read_line(&mut line)?;
    let path = line.split(' ').nth(1).unwrap_or_default().to_owned();
    let mut seen = Seen { path, from: None, if_range: None, authorization: None };
    loop {
        line.clear();
        reader.read_line(&mut line)?;
        let Some((name, value)) = line.trim().split_once(": ") else { break };
        match name.to_ascii_lowercase().as_str() {
            "authorization" => seen.authorization = Some(value.to_owned()),
            "if-range" => seen.if_range = Some(value.to_owned()),
            "range" => {
                let from = value.strip_prefix("bytes=").unwrap().strip_suffix('-').unwrap();
                seen.from = Some(from.parse().unwrap());
            }
            _ => {}
        }
    }
    Ok(seen)
}

fn serve(mut stream: TcpStream, state: &Mutex<State>) -> std::io::Result<()> {
    let seen = read_head(&stream)?;
    let path = seen.path.clone();
    let (from, if_range) = (seen.from, seen.if_range.clone());
    let (answer, fault, etag) = {
        let mut state = state.lock().unwrap();
        state.seen.push(seen);
        let answer = state.answers.get(&path).cloned();
        let fault = match answer {
            Some(Answer::File(_)) => state.faults.pop_front(),
            _ => None,
        };
        (answer, fault, state.etag.clone())
    };
    let mut head = |status: &str, headers: &str| {
        write!(stream, "HTTP/1.1 {status}\r\nConnection: close\r\n{headers}\r\n")
    };
    match (answer, fault) {
        (None, _) => head("404 Not Found", "Content-Length: 0\r\n"),
        (Some(Answer::Redirect(to)), _) => {
            head("307 Temporary Redirect", &format!("Location: {to}\r\nContent-Length: 0\r\n"))
        }
        (_, Some(Fault::Status(status, header))) => {
            head(status, &format!("Content-Length: 0\r\n{header}\r\n"))
        }
        (Some(Answer::File(file)), fault) => {
            let (all, ignores) = (file.len(), matches!(fault, Some(Fault::NoRange)));
            let is_blind = matches!(fault, Some(Fault::NoIfRange));
            let is_other = if_range.is_some() && if_range != etag && !is_blind;
            let from = from.filter(|_| !ignores && !is_other);
            let body = &file[from.unwrap_or(0).min(all)..];
            let etag = etag.map_or(String::new(), |etag| format!("ETag: {etag}\r\n"));
            let length = format!("{etag}Content-Length: {}\r\n", body.len());
            match from {
                Some(from) if from >= all => {
                    let range = format!("Content-Range: bytes */{all}\r\nContent-Length: 0\r\n");
                    return head("416 Range Not Satisfiable", &range);
                }
                Some(from) => {
                    let range = format!("Content-Range: bytes {from}-{}/{all}\r\n", all - 1);
                    head("206 Partial Content", &(range + &length))?;
                }
                None => head("200 OK", &length)?,
            }
            match fault {
                Some(Fault::Cut(bytes)) => stream.write_all(&body[..bytes]),
                Some(Fault::Stall(bytes)) => {
                    stream.write_all(&body[..bytes])?;
                    stream.flush()?;
                    thread::sleep(Duration::from_secs(60));
                    Ok(())
                }
                _ => stream.write_all(body),
            }
        }
    }
}
