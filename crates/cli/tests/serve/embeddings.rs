//! Requests for embeddings: their queue, their end when the client goes away, and their keys.

use std::io::Write;
use std::net::TcpStream;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::server::{Server, kit, post_head};

/// Enough texts to take a while.
fn long() -> Value {
    json!({ "input": vec![vec![5; 60]; 4096] })
}

fn open(server: &Server, body: &Value) -> TcpStream {
    let body = body.to_string();
    let mut socket = server.connect();
    socket.write_all(post_head("/v1/embeddings", body.len(), "").as_bytes()).unwrap();
    socket.write_all(body.as_bytes()).unwrap();
    socket
}

fn wait_for(server: &Server, metric: &str, wanted: f64) {
    let start = Instant::now();
    while server.metric(metric) != wanted {
        assert!(start.elapsed() < Duration::from_secs(30), "{metric} becomes {wanted}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn embeddings_have_a_queue_that_clients_leave() {
    let server = Server::of(&kit("bert.gguf"), &["--queue", "1"]);
    let start = Instant::now();
    assert_eq!(server.post("/v1/embeddings", &long()).status, 200);
    let alone = start.elapsed();
    let start = Instant::now();
    let running = open(&server, &long());
    wait_for(&server, "bodkin_requests_running", 1.0);
    let waiting = open(&server, &long());
    wait_for(&server, "bodkin_requests_waiting", 1.0);
    for path in ["/v1/embeddings", "/embedding", "/api/embed"] {
        let refused = server.post(path, &json!({ "input": "a" }));
        assert_eq!(refused.status, 503, "{path}: {refused:?}");
        assert!(refused.head.to_ascii_lowercase().contains("retry-after: 1"));
        assert!(refused.body.contains("the queue is full: 1 requests wait already"), "{refused:?}");
    }
    // One that waits leaves the queue, and one that runs ends at its next step.
    drop(waiting);
    wait_for(&server, "bodkin_requests_waiting", 0.0);
    drop(running);
    wait_for(&server, "bodkin_requests_running", 0.0);
    assert!(start.elapsed() < alone, "{:?} of {alone:?}", start.elapsed());
    let whole = server.metric("bodkin_embedded_tokens_total");
    assert_eq!(server.post("/v1/embeddings", &json!({ "input": [[5, 6]] })).status, 200);
    assert_eq!(server.metric("bodkin_embedded_tokens_total"), whole + 2.0);
}

#[test]
fn tokens_of_embedded_texts_count_for_the_key() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("keys");
    std::fs::write(&file, "one tokens=5\n").unwrap();
    let server = Server::of(&kit("bert.gguf"), &["--api-key-file", file.to_str().unwrap()]);
    let ask = || {
        let body = json!({ "input": [[5, 6, 7]] }).to_string();
        let head = post_head("/v1/embeddings", body.len(), "X-Api-Key: one\r\n");
        server.send(&head, body.as_bytes())
    };
    assert_eq!([ask().status, ask().status], [200, 200]);
    let refused = ask();
    assert_eq!(refused.status, 429, "{refused:?}");
    assert!(refused.body.contains("tokens of this minute"), "{refused:?}");
}
