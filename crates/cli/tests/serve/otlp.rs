//! Traces of requests at a collector.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread;

use serde_json::json;

use crate::server::{STOPPING, Server, failure, post_head};

/// The name of a span of a text.
const ROUTE: &[u8] = b"POST /v1/completions";

/// Takes batches of spans, answers with `status`, and gives the first with a span of a text: a
/// protobuf message behind the head of a request.
fn collector(status: &'static str) -> (String, thread::JoinHandle<(String, Vec<u8>)>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let batch = thread::spawn(move || {
        loop {
            let (head, body) = take(listener.accept().unwrap().0, status);
            if body.windows(ROUTE.len()).any(|window| window == ROUTE) {
                return (head, body);
            }
        }
    });
    (url, batch)
}

/// Reads a request, and answers with `status`.
fn take(socket: TcpStream, status: &str) -> (String, Vec<u8>) {
    let mut reader = BufReader::new(socket);
    let (mut head, mut length) = (String::new(), 0);
    loop {
        let mut line = String::new();
        assert!(reader.read_line(&mut line).unwrap() > 0, "a whole request");
        if line.trim().is_empty() {
            break;
        }
        let line = line.to_ascii_lowercase();
        if let Some(bytes) = line.strip_prefix("content-length:") {
            length = bytes.trim().parse().unwrap();
        }
        head += &line;
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).unwrap();
    let answer = format!("HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
    reader.get_mut().write_all(answer.as_bytes()).unwrap();
    (head, body)
}

/// The bytes of a message after a text.
fn after<'a>(body: &'a [u8], text: &[u8]) -> &'a [u8] {
    let at = body.windows(text.len()).position(|window| window == text);
    let at = at.unwrap_or_else(|| panic!("`{}` in the batch", String::from_utf8_lossy(text)));
    &body[at + text.len()..]
}

/// The small number of an attribute: field 2 is the value, its field 3 an integer.
fn number(body: &[u8], attribute: &str) -> u8 {
    let rest = after(body, attribute.as_bytes());
    assert_eq!(rest[..3], [0x12, 2, 0x18], "{attribute} is a number below 128");
    rest[3]
}

/// Asks for a text of five tokens behind a prompt of three, and stops the server.
fn generate(server: &mut Server) {
    let body = json!({"prompt": [1, 5, 6], "max_tokens": 5, "stream": true, "ignore_eos": true});
    let body = body.to_string();
    let headers = "Content-Type: application/json\r\nX-Request-Id: my-id\r\n\
                   traceparent: 00-0123456789abcdef0123456789abcdef-1122334455667788-01\r\n";
    let head = post_head("/v1/completions", body.len(), headers);
    assert_eq!(server.send(&head, body.as_bytes()).status, 200);
    server.terminate();
}

#[test]
fn a_collector_gets_a_span_with_the_tokens_of_a_stream() {
    let (url, batch) = collector("200 OK");
    let mut server = Server::start(&["--otlp", &url]);
    generate(&mut server);
    let (head, body) = batch.join().unwrap();
    assert!(head.starts_with("post /v1/traces "), "{head}");
    // The client's trace and span.
    let trace = 0x0123_4567_89ab_cdef_0123_4567_89ab_cdef_u128.to_be_bytes();
    after(after(&body, &trace), &0x1122_3344_5566_7788_u64.to_be_bytes());
    let span = after(&body, ROUTE);
    assert_eq!(number(span, "gen_ai.usage.input_tokens"), 3);
    assert_eq!(number(span, "gen_ai.usage.output_tokens"), 5);
    after(span, b"gen_ai.response.time_to_first_token");
    after(after(span, b"http.request.id"), b"my-id");
    after(&body, b"service.name");
    assert_eq!(server.rest_of_stderr(), STOPPING);
}

#[test]
fn a_collector_that_refuses_is_said_once() {
    let (url, batch) = collector("503 Service Unavailable");
    let mut server = Server::start(&["--otlp", &format!("{url}/v1/traces")]);
    generate(&mut server);
    batch.join().unwrap();
    let line = format!("cannot export traces to {url}/v1/traces: 503 Service Unavailable\n");
    assert_eq!(server.rest_of_stderr(), STOPPING.to_owned() + &line);
}

#[test]
fn a_collector_needs_a_url() {
    for url in ["", "localhost:4318", "ftp://host", "http://"] {
        let error = failure(&["--otlp", url, "model"]);
        assert!(error.contains(&format!("a URL such as http://localhost:4318, found `{url}`")));
    }
}
