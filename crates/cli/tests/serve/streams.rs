//! Many requests at once: each gets what it gets alone, and cancelled ones leave nothing behind.

use std::io::{Read, Write};
use std::time::Duration;

use serde_json::{Value, json};

use crate::server::{Server, post_head, read_response};

fn completion(prompt: &[u64], tokens: usize) -> Value {
    json!({
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": true,
        "return_tokens": true,
    })
}

fn prompt(seed: u64, len: usize) -> Vec<u64> {
    (0..len as u64).map(|i| 10 + (i * (seed * 2 + 3) + seed * seed) % 300).collect()
}

fn answer(server: &Server, prompt: &[u64], tokens: usize) -> Value {
    let response = server.post("/completion", &completion(prompt, tokens));
    assert_eq!(response.status, 200, "{response:?}");
    response.json()["tokens"].clone()
}

#[test]
fn sixty_four_canaries_at_once_are_equal_to_each_alone() {
    let prompts: Vec<Vec<u64>> = (0..64).map(|i| prompt(i, 3 + (i as usize * 7) % 90)).collect();
    let alone = Server::start(&["--ctx-size", "256", "--parallel", "1"]);
    let wanted: Vec<Value> = prompts.iter().map(|prompt| answer(&alone, prompt, 24)).collect();
    drop(alone);
    // The cache has room for all of them, whatever the order in which they come.
    let cache = ["--cache-tokens", "16384"];
    let args = ["--ctx-size", "256", "--parallel", "16", "--batch-size", "64"];
    let server = Server::start(&[&args[..], &cache].concat());
    // Twice: the second time prompts are in the cache.
    for _ in 0..2 {
        let found: Vec<Value> = std::thread::scope(|scope| {
            let threads: Vec<_> =
                prompts.iter().map(|prompt| scope.spawn(|| answer(&server, prompt, 24))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(found == wanted, "a text depends on what runs beside it");
    }
    assert!(server.metric("bodkin_cached_tokens_total") > 1000.0);
}

/// Connections, in groups that are open at the same time.
const CONNECTIONS: u64 = 10_000;
const AT_ONCE: u64 = 16;

/// Half of the connections break off at a random moment, the others get what they asked for.
#[test]
fn connections_that_break_off_leave_no_pages_behind() {
    let server = Server::start(&["--ctx-size", "512", "--parallel", "8", "--queue", "100000"]);
    let total = server.metric("bodkin_kv_pages");
    let memory = resident_bytes(server.child.id());
    let mut state = 7u64;
    let mut random = |below: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 33) % below
    };
    for _ in 0..CONNECTIONS / AT_ONCE {
        let mut sockets = Vec::new();
        for _ in 0..AT_ONCE {
            let breaks_off = random(2) == 0;
            let tokens = if breaks_off { 60 } else { 1 + random(4) };
            let prompt = prompt(random(50), 5 + random(60) as usize);
            let mut body = completion(&prompt, tokens as usize);
            body["stream"] = breaks_off.into();
            let body = body.to_string();
            let mut socket = server.connect();
            socket.write_all(post_head("/completion", body.len(), "").as_bytes()).unwrap();
            // Some break off within their body.
            let is_cut = breaks_off && random(4) == 0;
            let sent = if is_cut { random(body.len() as u64) as usize } else { body.len() };
            socket.write_all(&body.as_bytes()[..sent]).unwrap();
            sockets.push((socket, breaks_off.then(|| random(3)), tokens));
        }
        std::thread::sleep(Duration::from_millis(random(6)));
        for (mut socket, end, tokens) in sockets {
            match end {
                None => {
                    let answer = read_response(socket).json();
                    assert_eq!(answer["tokens"].as_array().unwrap().len() as u64, tokens);
                }
                Some(0) => drop(socket),
                Some(1) => {
                    // After a few bytes of the answer.
                    socket.set_read_timeout(Some(Duration::from_millis(5))).unwrap();
                    let _ = socket.read(&mut [0; 64]);
                }
                Some(_) => socket.shutdown(std::net::Shutdown::Both).unwrap(),
            }
        }
    }
    server.wait_idle();
    let unused = server.metric("bodkin_kv_pages_free") + server.metric("bodkin_kv_pages_cached");
    assert_eq!(unused, total, "all pages are free or cached");
    let grown = resident_bytes(server.child.id()).saturating_sub(memory);
    assert!(grown < 64 << 20, "memory grew by {grown} bytes");
    assert_eq!(answer(&server, &prompt(1, 20), 5).as_array().unwrap().len(), 5);
}

/// Memory of a process that is in use.
fn resident_bytes(process: u32) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{process}/statm")).unwrap_or_default();
    let pages: u64 = text.split(' ').nth(1).and_then(|n| n.parse().ok()).unwrap_or(0);
    pages * 4096
}

/// Requests that come while one decodes share its steps, and the queue has an end.
#[test]
fn requests_beyond_the_queue_are_refused_at_once() {
    let server = Server::start(&["--ctx-size", "1024", "--parallel", "1", "--queue", "1"]);
    let busy = json!({ "prompt": [11, 12], "n_predict": 900, "ignore_eos": true, "stream": true });
    let sockets = [server.begin(&busy), server.begin(&busy)];
    let refused = server.post("/completion", &busy);
    assert_eq!(refused.status, 503, "{refused:?}");
    assert!(refused.head.to_ascii_lowercase().contains("retry-after: 1"));
    let message = refused.json()["error"]["message"].as_str().unwrap().to_owned();
    assert_eq!(message, "the queue is full: 1 requests wait already");
    drop(sockets);
    server.wait_idle();
    assert_eq!(server.post("/completion", &completion(&[11, 12], 3)).status, 200);
}
