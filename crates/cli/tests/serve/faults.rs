//! Clients that misbehave, keys, TLS, and the end of the server.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::server::{MODEL, STOPPING, Server, failure, kit, post_head, read_response};

#[test]
fn each_interface_has_errors_of_its_own_form() {
    let server = Server::start(&[]);
    let openai = server.post("/v1/completions", &json!({ "prompt": true })).json();
    assert_eq!(openai["error"]["code"], 400, "{openai}");
    let ollama = server.post("/api/generate", &json!({ "model": "m", "prompt": 5 })).json();
    assert!(ollama["error"].as_str().unwrap().contains("prompt: expected a string"), "{ollama}");
    let anthropic = server.post("/v1/messages", &json!({ "messages": 5 })).json();
    assert_eq!(anthropic["type"], "error", "{anthropic}");
    assert_eq!(anthropic["error"]["type"], "invalid_request_error", "{anthropic}");
    // Paths and methods that an interface does not have, too.
    for path in ["/v1/messages/none", "/v1/messages"] {
        let refused = server.get(path);
        assert_eq!(refused.json()["type"], "error", "{refused:?}");
        assert!(refused.head.to_ascii_lowercase().contains("\r\nrequest-id: "), "{refused:?}");
    }
    for path in ["/api/none", "/api/chat"] {
        let refused = server.get(path);
        assert!(refused.json()["error"].is_string(), "{refused:?}");
    }
    assert_eq!(server.get("/v1/none").json()["error"]["code"], 404);
}

#[test]
fn models_of_a_list_have_a_digest() {
    let tags = Server::start(&[]).get("/api/tags").json();
    let digest = tags["models"][0]["digest"].as_str().unwrap();
    assert!(digest.len() == 64 && digest.bytes().all(|byte| byte.is_ascii_hexdigit()), "{tags}");
}

/// Whatever a client sends, it gets a status, and the next one an answer.
#[test]
fn broken_requests_get_one_clear_error() {
    let server = Server::start(&["--ctx-size", "256", "--max-body", "8M"]);
    let path = "/v1/chat/completions";
    let deep = format!("{{\"messages\": {}{}}}", "[".repeat(100_000), "]".repeat(100_000));
    let many = format!("{{\"prompt\": [{}1]}}", "1,".repeat(2 << 20));
    let quoted = format!("{{\"prompt\": 1, \"x\": \"\\\"{}\"}}", ",".repeat(3 << 20));
    let bodies: [(&[u8], u16, &str); 14] = [
        (b"", 400, "not valid JSON"),
        (b"{", 400, "not valid JSON"),
        (b"[]", 400, "expected an object"),
        (b"{\"messages\": \"\xff\xfe\"}", 400, "not valid JSON"),
        (deep.as_bytes(), 400, "recursion limit"),
        (b"{\"messages\": [], \"temperature\": NaN}", 400, "not valid JSON"),
        (b"{\"messages\": [], \"temperature\": 1e999}", 400, "out of range"),
        (b"{\"messages\": [{\"role\": 1, \"content\": \"x\"}]}", 400, "messages[0].role"),
        (b"{\"messages\": [{\"role\": \"user\", \"content\": 1}]}", 400, "messages[0].content"),
        (b"{\"messages\": [{}], \"stop\": [1]}", 400, "messages[0].role"),
        (b"{\"model\": [1]}", 400, "model: expected a string"),
        (&[b' '; 8_500_000], 413, "limit"),
        (many.as_bytes(), 413, "more than 2097152 JSON values"),
        (quoted.as_bytes(), 400, "messages"),
    ];
    for (body, status, text) in bodies {
        let response = server.post_bytes(path, body);
        let shown = String::from_utf8_lossy(&body[..body.len().min(60)]).into_owned();
        assert_eq!(response.status, status, "{shown}: {response:?}");
        let message = response.json()["error"]["message"].as_str().unwrap().to_owned();
        assert!(message.contains(text) && message.len() < 500, "{shown}: {message}");
    }
    let long = "a".repeat(1 << 20);
    let head = format!("GET /health HTTP/1.1\r\nHost: localhost\r\nX-Long: {long}\r\n\r\n");
    assert_eq!(server.send(&head, b"").status, 431);
    let many = "X-A: b\r\n".repeat(300);
    let head = format!("GET /health HTTP/1.1\r\nHost: localhost\r\n{many}\r\n");
    assert_eq!(server.send(&head, b"").status, 431);
    assert_eq!(server.send("nonsense\r\n\r\n", b"").status, 400);
    assert_eq!(server.get("/no/such/path").status, 404);
    assert_eq!(server.get(path).status, 405);
    assert_eq!(server.get("/health").status, 200);
}

#[test]
fn idle_and_slow_connections_hold_nobody_up() {
    let server = Server::start(&["--ctx-size", "256"]);
    let idle: Vec<_> = (0..500).map(|_| server.connect()).collect();
    // One sends half a head, one half a body, one does not read its answer.
    let mut half_head = server.connect();
    half_head.write_all(b"POST /completion HTTP/1.1\r\nHost").unwrap();
    let mut half_body = server.connect();
    half_body.write_all(post_head("/completion", 1000, "").as_bytes()).unwrap();
    half_body.write_all(b"{\"prompt\": ").unwrap();
    let mut deaf = server.connect();
    let body = json!({ "prompt": [5, 6], "n_predict": 200, "stream": true }).to_string();
    deaf.write_all(post_head("/completion", body.len(), "").as_bytes()).unwrap();
    deaf.write_all(body.as_bytes()).unwrap();
    let start = Instant::now();
    let response = server.post("/completion", &json!({ "prompt": [5, 6], "n_predict": 3 }));
    assert_eq!(response.status, 200);
    assert!(start.elapsed() < Duration::from_secs(10));
    drop((idle, half_head, half_body));
    server.wait_idle();
    assert_eq!(read_response(deaf).status, 200);
}

/// A model is not kept by a client that does not read.
#[test]
fn a_client_that_takes_nothing_is_disconnected() {
    let server = Server::start(&["--ctx-size", "8192", "--write-timeout", "500ms"]);
    // More than the buffers of a socket hold.
    let body = json!({ "prompt": [5], "n_predict": 8000, "ignore_eos": true, "n_probs": 100,
                       "stream": true });
    let body = body.to_string();
    let mut deaf = server.connect();
    deaf.write_all(post_head("/completion", body.len(), "").as_bytes()).unwrap();
    deaf.write_all(body.as_bytes()).unwrap();
    let start = Instant::now();
    while server.metric("bodkin_requests_ended_total") == 0.0 {
        assert!(start.elapsed() < Duration::from_secs(60), "the client is waited for");
        std::thread::sleep(Duration::from_millis(50));
    }
    // As cancelled, or where the buffers of sockets are very large, whole.
    let text = server.get("/metrics").body;
    let ended: Vec<&str> =
        text.lines().filter(|line| line.starts_with("bodkin_requests_ended_total{")).collect();
    let is_expected =
        |line: &str| ["\"cancelled\"", "\"length\""].iter().any(|it| line.contains(it));
    assert!(ended.len() == 1 && is_expected(ended[0]), "{ended:?}");
    server.wait_idle();
    server.post("/api/generate", &json!({ "keep_alive": 0 }));
    assert_eq!(server.get("/health").json()["models"][0]["status"], "unloaded");
    drop(deaf);
}

#[test]
fn a_body_that_does_not_arrive_in_time_is_refused() {
    let server = Server::start(&["--ctx-size", "256", "--body-timeout", "300ms"]);
    let mut socket = server.connect();
    socket.write_all(post_head("/v1/completions", 1000, "").as_bytes()).unwrap();
    socket.write_all(b"{\"prompt\": ").unwrap();
    let refused = read_response(socket);
    assert_eq!(refused.status, 408, "{refused:?}");
    assert_eq!(refused.json()["error"]["message"], "the body took longer than 0.3 s");
    assert_eq!(server.post("/completion", &json!({ "prompt": [5], "n_predict": 1 })).status, 200);
}

#[test]
fn large_bodies_together_have_a_limit() {
    let limits = ["--max-body", "1M", "--max-bodies", "1M"];
    let server = Server::start(&[&["--ctx-size", "256"], &limits[..]].concat());
    let mut body = json!({ "prompt": [5], "n_predict": 1 }).to_string();
    body.extend(std::iter::repeat_n(' ', 200_000));
    let ask = || server.post_bytes("/completion", body.as_bytes());
    let start = Instant::now();
    let (large, refused) = loop {
        let mut large = server.connect();
        large.write_all(post_head("/completion", 1_000_000, "").as_bytes()).unwrap();
        large.write_all(&[b' '; 900_000]).unwrap();
        // Until the server has read it; if it has not, the other one may be accepted.
        std::thread::sleep(Duration::from_millis(100));
        let response = ask();
        if response.status == 503 {
            break (large, response);
        }
        assert!(start.elapsed() < Duration::from_secs(20), "{response:?}");
    };
    assert!(refused.head.to_ascii_lowercase().contains("retry-after: 1"), "{refused:?}");
    let message = &refused.json()["error"]["message"];
    assert_eq!(message, "the bodies of all requests are too large together");
    drop(large);
    while ask().status != 200 {
        assert!(start.elapsed() < Duration::from_secs(20), "its bytes are free again");
    }
}

#[test]
fn keys_are_asked_for_where_they_matter() {
    let server = Server::start(&["--api-key", "one", "--api-key", "two"]);
    let body = json!({ "prompt": [5], "n_predict": 1 }).to_string();
    let with = |headers: &str| {
        let head = post_head("/completion", body.len(), headers);
        server.send(&head, body.as_bytes())
    };
    assert_eq!(with("Authorization: Bearer two\r\n").status, 200);
    assert_eq!(with("X-Api-Key: one\r\n").status, 200);
    for headers in ["", "Authorization: Bearer three\r\n", "Authorization: one\r\n"] {
        let refused = with(headers);
        assert_eq!(refused.status, 401, "{headers}");
        assert_eq!(refused.json()["error"]["type"], "authentication_error");
    }
    for (path, status) in
        [("/health", 200), ("/v1/models", 200), ("/metrics", 401), ("/slots", 401)]
    {
        assert_eq!(server.get(path).status, status, "{path}");
    }
}

#[test]
fn tokens_of_a_key_count_when_its_client_goes_away() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("keys");
    std::fs::write(&file, "long tokens=60\nmany tokens=60\nbatch tokens=60\n").unwrap();
    let server = Server::start(&["--ctx-size", "1024", "--api-key-file", file.to_str().unwrap()]);
    let open = |key: &str, prompt: &[u32], more: Value| {
        let mut body =
            json!({ "prompt": prompt, "max_tokens": 900, "ignore_eos": true, "stream": true });
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let body = body.to_string();
        let mut socket = server.connect();
        let head = post_head("/v1/completions", body.len(), &format!("X-Api-Key: {key}\r\n"));
        socket.write_all(head.as_bytes()).unwrap();
        socket.write_all(body.as_bytes()).unwrap();
        socket
    };
    // One goes away within its prompt; the answer of another ends where its key is used up.
    open("long", &[5; 59], json!({})).read_exact(&mut [0; 12]).unwrap();
    let usage = json!({ "stream_options": { "include_usage": true } });
    let whole = read_response(open("many", &[5], usage));
    assert!(whole.body.contains("\"completion_tokens\":59"), "{whole:?}");
    for key in ["long", "many"] {
        let refused = read_response(open(key, &[5], json!({})));
        assert_eq!(refused.status, 429, "{key}: {refused:?}");
        assert!(refused.body.contains("tokens of this minute"), "{refused:?}");
        let head = refused.head.to_ascii_lowercase();
        let seconds = head.split("retry-after: ").nth(1).unwrap().split("\r\n").next().unwrap();
        assert!((30..=60).contains(&seconds.parse::<u64>().unwrap()), "{head}");
    }
    // The answers of one request divide the remaining tokens among them; one with more answers than
    // tokens is refused.
    let answer = read_response(open("batch", &[5; 10], json!({ "n": 5, "stream": false })));
    assert_eq!(answer.json()["usage"]["completion_tokens"], 50, "{answer:?}");
    let refused = read_response(open("batch", &[5; 10], json!({ "n": 51 })));
    assert_eq!(refused.status, 429, "{refused:?}");
}

#[test]
fn web_pages_of_named_origins_may_call() {
    let ask = |server: &Server, origin: &str| {
        let head = format!(
            "OPTIONS /v1/models HTTP/1.1\r\nHost: localhost\r\nOrigin: {origin}\r\n\
             Access-Control-Request-Method: GET\r\nConnection: close\r\n\r\n"
        );
        server.send(&head, b"").head.to_ascii_lowercase().contains("access-control-allow-origin")
    };
    let server = Server::start(&["--cors-origin", "http://one.example"]);
    assert!(ask(&server, "http://one.example") && !ask(&server, "http://two.example"));
    let post = |server: &Server, origin: &str| {
        let body = json!({ "prompt": [5], "n_predict": 1 }).to_string();
        let headers = format!("Content-Type: text/plain\r\nOrigin: {origin}\r\n");
        server.send(&post_head("/completion", body.len(), &headers), body.as_bytes()).status
    };
    assert_eq!(post(&server, "http://one.example"), 200);
    assert_eq!((post(&server, "http://x"), post(&server, "http://two.example")), (403, 403));
    assert_eq!(post(&Server::start(&["--cors-origin", "*"]), "http://two.example"), 200);
    let closed = Server::start(&[]);
    assert!(!ask(&closed, "http://one.example"), "off by default");
    assert_eq!((post(&closed, "http://X"), post(&closed, "null")), (403, 403));
    let own = |host: &str| {
        let head = format!(
            "GET /v1/models HTTP/1.1\r\nHost: {host}\r\nOrigin: http://{host}\r\n\
             Connection: close\r\n\r\n"
        );
        closed.send(&head, b"").status
    };
    assert_eq!((own("127.0.0.1:8080"), own("localhost"), own("evil.example")), (200, 200, 403));
    // A page under a name that leads here by now reads the server as its own, without `Origin`.
    let read = |server: &Server, host: &str| {
        let head = format!("GET /slots HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
        server.send(&head, b"").status
    };
    assert_eq!((read(&closed, "localhost:1"), read(&closed, "evil.example")), (200, 403));
    assert_eq!((read(&server, "one.example"), read(&server, "two.example")), (200, 403));
    assert_eq!(
        (read(&closed, "caf\u{e9}"), read(&Server::start(&["--host", "0.0.0.0"]), "x")),
        (403, 200)
    );
    let without_host = closed.send("GET /health HTTP/1.0\r\n\r\n", b"");
    assert_eq!(without_host.status, 200, "as HAProxy checks health");
    // Where a key is needed, such a page has none.
    assert_eq!(read(&Server::start(&["--api-key", "secret"]), "gpu-box"), 401);
    // Browsers send a key, and show the time to wait, only if the server says so.
    let head = "OPTIONS /v1/models HTTP/1.1\r\nHost: localhost\r\nOrigin: http://one.example\r\n\
                Access-Control-Request-Method: GET\r\n\
                Access-Control-Request-Headers: authorization\r\nConnection: close\r\n\r\n";
    let head = server.send(head, b"").head.to_ascii_lowercase();
    assert!(head.contains("access-control-allow-headers: authorization"), "{head}");
    let head = "GET /v1/models HTTP/1.1\r\nHost: localhost\r\nOrigin: http://one.example\r\n\
                Connection: close\r\n\r\n";
    let head = server.send(head, b"").head.to_ascii_lowercase();
    assert!(head.contains("access-control-expose-headers: retry-after,x-request-id"), "{head}");
}

#[test]
fn https_is_spoken_with_a_certificate() {
    let made = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: String| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let certificate = write("certificate.pem", made.cert.pem());
    let key = write("key.pem", made.signing_key.serialize_pem());
    let model = kit(MODEL);
    let args = [model.to_str().unwrap(), "--tls-cert", &certificate, "--tls-key", &key];
    let server = Server::without_waiting(&args);
    let root = ureq::tls::Certificate::from_der(made.cert.der()).to_owned();
    let roots = ureq::tls::RootCerts::new_with_certs(&[root]);
    let tls = ureq::tls::TlsConfig::builder().root_certs(roots).build();
    let agent: ureq::Agent = ureq::Agent::config_builder().tls_config(tls).build().into();
    let url = format!("https://localhost:{}/v1/models", server.address.port());
    let body = agent.get(&url).call().unwrap().body_mut().read_to_string().unwrap();
    assert!(body.contains("\"llama\""), "{body}");
    // Without the certificate as a root, a client does not trust it; plain HTTP gets nothing.
    assert!(ureq::get(&url).call().is_err());
    assert_eq!(server.get("/v1/models").status, 0);
}

/// SIGTERM lets a running request finish; a second signal does not wait.
#[cfg(unix)]
#[test]
fn a_stopped_server_finishes_what_runs() {
    let mut server = Server::start(&["--ctx-size", "1024"]);
    let body = json!({ "prompt": [5, 6], "n_predict": 300, "ignore_eos": true, "stream": true });
    let body = body.to_string();
    let mut socket = server.connect();
    socket.write_all(post_head("/completion", body.len(), "").as_bytes()).unwrap();
    socket.write_all(body.as_bytes()).unwrap();
    socket.read_exact(&mut [0; 12]).unwrap();
    server.terminate();
    let rest = read_response(socket);
    assert!(rest.head.contains("\"stop\":true") || rest.body.contains("\"stop\":true"), "{rest:?}");
    assert!(server.child.wait().unwrap().success());
    assert_eq!(server.rest_of_stderr(), STOPPING);
}

/// Requests that are cancelled say so as any other error.
#[cfg(unix)]
#[test]
fn a_stopped_server_says_why_it_cuts_an_answer() {
    let paths = [
        ("/v1/chat/completions", "data: {\"error\":{\"code\":503,"),
        ("/v1/messages", "event: error\ndata: {\"type\":\"error\","),
        ("/completion", "data: {\"error\":{\"code\":503,"),
    ];
    for is_second_signal in [true, false] {
        let drain = if is_second_signal { "30s" } else { "100ms" };
        let mut server =
            Server::start(&["--ctx-size", "30000", "--parallel", "4", "--drain", drain]);
        let open = |path: &str, streams: bool| {
            let message = json!([{ "role": "user", "content": "a" }]);
            let body = json!({ "messages": message, "prompt": "a", "max_tokens": 20000,
                               "ignore_eos": true, "stream": streams });
            let body = body.to_string();
            let mut socket = server.connect();
            socket.write_all(post_head(path, body.len(), "").as_bytes()).unwrap();
            socket.write_all(body.as_bytes()).unwrap();
            socket
        };
        let mut sockets = paths.map(|(path, _)| open(path, true));
        sockets.iter_mut().for_each(|socket| socket.read_exact(&mut [0; 12]).unwrap());
        let whole = open(paths[0].0, false);
        while server.running() < 4 {
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        server.terminate();
        if is_second_signal {
            std::thread::sleep(std::time::Duration::from_millis(100));
            server.terminate();
        }
        for (socket, (path, needle)) in sockets.into_iter().zip(paths) {
            let rest = read_response(socket).body;
            assert!(rest.contains("the server stops") && rest.contains(needle), "{path}: {rest}");
        }
        let refused = read_response(whole);
        assert_eq!(refused.status, 503, "{refused:?}");
        assert!(server.child.wait().unwrap().success());
    }
}

#[test]
fn what_cannot_start_says_so_in_one_line() {
    let model = kit(MODEL);
    let model = model.to_str().unwrap();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let error = failure(&[model, "--port", &port]);
    assert!(error.starts_with("error: cannot listen on 127.0.0.1:"), "{error}");
    assert!(error.contains("; --port takes another"), "{error}");
    let text = format!("{}/Cargo.toml", env!("CARGO_MANIFEST_DIR"));
    for (path, reason) in [("no-such-model.gguf", "No such file"), (&text, "not a GGUF")] {
        let error = failure(&[model, path, "--port", "0"]);
        assert!(error.starts_with("error: ") && error.contains(path), "{error}");
        assert!(error.contains(reason), "{error}");
    }
    let error = failure(&[model, "--port", "0", "--api-key-file", "/no/such/file"]);
    assert!(error.contains("/no/such/file"), "{error}");
    let error = failure(&[model, "--port", "0", "--tls-cert", model, "--tls-key", model]);
    assert!(error.contains(MODEL), "{error}");
    for origin in ["one.example", "http://one.example/", "http://a b"] {
        let error = failure(&[model, "--port", "0", "--cors-origin", origin]);
        assert!(error.contains(&format!("`{origin}`: expected * or an origin")), "{error}");
    }
    let error = failure(&[model, "--port", "0", "--api-key", ""]);
    assert!(error.contains("expected a key, found an empty text"), "{error}");
    let error = failure(&[model, model, "--port", "0"]);
    assert!(error.contains("two models have the name"), "{error}");
}

#[test]
fn images_are_refused_in_every_interface() {
    let server = Server::start(&["--ctx-size", "256"]);
    let message = |part: Value| json!([{ "role": "user", "content": [part] }]);
    let url = json!({ "type": "image_url", "image_url": { "url": "x" } });
    let block = json!({ "type": "image", "source": { "type": "base64", "data": "x" } });
    let input = json!({ "type": "input_image", "image_url": "x" });
    let ollama = json!([{ "role": "user", "content": "a", "images": ["x"] }]);
    for (path, body) in [
        ("/v1/chat/completions", json!({ "messages": message(url) })),
        ("/v1/messages", json!({ "max_tokens": 1, "messages": message(block) })),
        ("/v1/responses", json!({ "input": message(input) })),
        ("/api/chat", json!({ "messages": ollama })),
        ("/api/generate", json!({ "prompt": "a", "images": ["x"] })),
        ("/completion", json!({ "prompt": "a", "image_data": [{ "data": "x" }] })),
    ] {
        let refused = server.post(path, &body);
        assert_eq!(refused.status, 400, "{path}: {refused:?}");
        let needle = "images need a vision projector (mmproj)";
        assert!(refused.body.contains(needle), "{path}: {refused:?}");
    }
}

/// Each connection is a file, and many systems begin with 1024 of them.
#[cfg(unix)]
#[test]
fn the_limit_of_open_files_is_raised() {
    let mut shell = Command::new("sh");
    shell.args(["-c", "ulimit -Sn 100 && exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_bodkin")]);
    let server = Server::spawn(shell, &[kit(MODEL).to_str().unwrap()]);
    let idle: Vec<TcpStream> = (0..300).map(|_| server.connect()).collect();
    let start = Instant::now();
    assert_eq!(server.get("/v1/models").status, 200);
    // Idle connections are closed after 30 s.
    assert!(start.elapsed() < Duration::from_secs(15), "answered beside idle connections");
    drop(idle);
}
