//! What `/metrics`, `/slots` and the log say of answers and of what they cost.

use std::time::Duration;

use serde_json::json;

use crate::server::Server;

/// How often answers ended for this reason.
fn ended(server: &Server, reason: &str) -> f64 {
    let text = server.get("/metrics").body;
    let label = format!("reason=\"{reason}\"");
    let line = text
        .lines()
        .find(|line| line.starts_with("bodkin_requests_ended_total{") && line.contains(&label));
    line.map_or(0.0, |line| line.rsplit(' ').next().unwrap().parse().unwrap())
}

#[test]
fn each_end_of_an_answer_is_counted_and_logged() {
    let mut server = Server::start(&["--device", "mock:error@4", "--log", "text"]);
    let ask = |tokens: u32| {
        let body =
            json!({ "prompt": [5], "n_predict": tokens, "ignore_eos": true, "stream": true });
        server.post("/completion", &body)
    };
    assert_eq!(ask(2).status, 200);
    // The stream has begun when the mock fails.
    let failed = ask(200);
    assert!(failed.status == 200 && failed.body.contains("the mock fails"), "{failed:?}");
    assert_eq!((ended(&server, "length"), ended(&server, "error")), (1.0, 1.0));
    server.terminate();
    server.child.wait().unwrap();
    let log = server.rest_of_stderr();
    let line = |reason: &str| {
        let reason = format!("reason=\"{reason}\"");
        log.lines().find(|line| line.contains("answer") && line.contains(&reason)).unwrap()
    };
    let whole = line("length");
    assert!(whole.contains("model=\"llama\"") && whole.contains("tokens=2"), "{whole}");
    assert!(line("error").contains("the mock fails"), "{log}");
}

#[test]
fn steps_are_counted_by_the_bytes_that_they_read() {
    let server = Server::start(&["--ctx-size", "1024", "--parallel", "1"]);
    let size = server.get("/api/tags").json()["models"][0]["size"].as_u64().unwrap() as f64;
    let prompt: Vec<u32> = (0..100).map(|i| 5 + i % 50).collect();
    let body = json!({ "prompt": prompt, "n_predict": 10, "ignore_eos": true });
    assert_eq!(server.post("/completion", &body).status, 200);
    let steps = server.metric("bodkin_steps_total");
    let read = server.metric("bodkin_read_bytes_total");
    assert!(steps >= 10.0 && read > steps * size / 4.0 && read < steps * size * 4.0, "{read}");
    // One request runs, whatever the rows of its prompt are.
    assert_eq!(server.metric("llamacpp:n_busy_slots_per_decode"), 1.0);
}

#[test]
fn slots_that_are_all_busy_are_a_503_if_one_must_be_free() {
    let server = Server::start(&["--ctx-size", "8192", "--parallel", "1"]);
    assert_eq!(server.get("/slots?fail_on_no_slot=1").status, 200);
    let body = json!({ "prompt": [5], "n_predict": 8000, "ignore_eos": true, "stream": true });
    let socket = server.begin(&body);
    // The head of the answer comes before the request runs.
    while server.running() == 0 {
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(server.get("/slots?fail_on_no_slot=1").status, 503);
    assert_eq!(server.get("/slots").status, 200);
    drop(socket);
    server.wait_idle();
    assert_eq!(ended(&server, "cancelled"), 1.0);
}
