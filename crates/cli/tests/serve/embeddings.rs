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
    let server = Server::of(&kit("bert.gguf"), &["--parallel", "1", "--queue", "1"]);
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
    std::fs::write(&file, "one tokens=6\n").unwrap();
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

#[test]
fn a_model_of_text_embeds_if_the_server_is_told_to() {
    let body = json!({ "input": ["a", [5, 6, 7]] });
    let text = Server::start(&["--ctx-size", "64", "--mock"]);
    let refused = text.post("/v1/embeddings", &body);
    assert!(refused.status == 400 && refused.body.contains("--embedding"), "{refused:?}");
    let vectors = |flags: &[&str]| {
        let server = Server::of(&kit("llama.gguf"), &[flags, &["--ctx-size", "64"]].concat());
        let refused = server.post("/v1/completions", &json!({ "prompt": "a" }));
        assert!(refused.status == 400 && refused.body.contains("no text"), "{refused:?}");
        server.post("/v1/embeddings", &body).json()["data"].clone()
    };
    let mean = vectors(&["--embedding"]);
    assert_eq!(mean, vectors(&["--pooling", "mean"]));
    assert_ne!(mean, vectors(&["--pooling", "last"]));
    assert_eq!(mean[1]["embedding"].as_array().unwrap().len(), 64);
}

#[test]
fn each_interface_scales_and_cuts_as_its_own_server_does() {
    let server = Server::of(&kit("bert.gguf"), &["--ctx-size", "16"]);
    let length = |vector: &Value| {
        let squares = vector.as_array().unwrap().iter().map(|x| x.as_f64().unwrap().powi(2));
        squares.sum::<f64>().sqrt()
    };
    let one = server.post("/api/embed", &json!({ "input": "a", "dimensions": 8 })).json();
    assert!((length(&one["embeddings"][0]) - 1.0).abs() < 1e-5, "{one}");
    let one = server.post("/api/embeddings", &json!({ "prompt": "a" })).json();
    assert!((length(&one["embedding"]) - 1.0).abs() > 0.1, "{one}");
    let raw = server.post("/embedding", &json!({ "content": "a", "embd_normalize": -1 })).json();
    assert_eq!(raw[0]["embedding"][0], one["embedding"]);
    let long = "hello ".repeat(20);
    let cut = server.post("/api/embed", &json!({ "input": long })).json();
    assert_eq!(cut["prompt_eval_count"], 16);
    let whole = json!({ "input": long, "truncate": false });
    for (path, body) in [("/api/embed", whole), ("/v1/embeddings", json!({ "input": long }))] {
        let refused = server.post(path, &body);
        let needle = "the model takes 16 at most";
        assert!(refused.status == 400 && refused.body.contains(needle), "{refused:?}");
    }
    let refused = server.post("/v1/embeddings", &json!({ "input": "a", "dimensions": 65 }));
    let needle = "dimensions: expected 1 to 64, found 65";
    assert!(refused.status == 400 && refused.body.contains(needle), "{refused:?}");
}
