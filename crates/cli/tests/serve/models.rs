//! Several models: loaded at first use, unloaded when idle or when memory is short.

use std::fs;
use std::io::{Read, Write};
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::server::{MODEL, Response, Server, kit, post_head};

fn status(server: &Server) -> Vec<(String, String)> {
    let health = server.get("/health").json();
    let models = health["models"].as_array().unwrap().iter();
    let text = |model: &Value, name: &str| model[name].as_str().unwrap().to_owned();
    models.map(|model| (text(model, "id"), text(model, "status"))).collect()
}

pub(crate) fn statuses(server: &Server) -> Vec<String> {
    status(server).into_iter().map(|(_, status)| status).collect()
}

pub(crate) fn complete(server: &Server, model: &str) -> u16 {
    let body = json!({ "model": model, "prompt": [5, 6], "max_tokens": 2 });
    server.post("/v1/completions", &body).status
}

/// Waits until all models have these states.
pub(crate) fn wait_for(server: &Server, wanted: &[&str]) {
    let start = Instant::now();
    while statuses(server) != wanted {
        assert!(start.elapsed() < Duration::from_secs(20), "{:?}", status(server));
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn models_load_at_first_use_and_unload_when_idle() {
    let (llama, qwen) = (kit("llama.gguf"), kit("qwen3.gguf"));
    let qwen = format!("other={}", qwen.display());
    let server = Server::with(&[llama.to_str().unwrap(), &qwen, "--keep-alive", "1s"]);
    assert_eq!(statuses(&server)[1], "unloaded");
    assert_eq!((complete(&server, "llama"), complete(&server, "other")), (200, 200));
    assert_eq!(statuses(&server), ["loaded", "loaded"]);
    assert_eq!(complete(&server, "third"), 404);
    wait_for(&server, &["unloaded", "unloaded"]);
    assert_eq!(complete(&server, "other"), 200, "it is loaded again");
}

#[test]
fn ollama_unloads_a_model_that_is_to_stay_for_no_time() {
    let (llama, qwen) = (kit("llama.gguf"), kit("qwen3.gguf"));
    let server = Server::with(&[llama.to_str().unwrap(), qwen.to_str().unwrap()]);
    // The first model is loaded while the server answers already.
    wait_for(&server, &["loaded", "unloaded"]);
    for (model, path) in
        [("llama", "/api/generate"), ("qwen3", "/api/generate"), ("qwen3", "/api/chat")]
    {
        let answer = server.post(path, &json!({ "model": model, "keep_alive": 0 })).json();
        assert_eq!(answer["done_reason"], "unload", "{path}: {answer}");
        assert_eq!(statuses(&server), ["unloaded", "unloaded"]);
    }
    let loads = server.get("/health").json()["models"][1]["loads"].clone();
    assert_eq!(loads, 0, "a model that is not loaded is not loaded to be unloaded");
    let answer = server.post("/api/chat", &json!({ "model": "qwen3" })).json();
    assert_eq!((&answer["done_reason"], statuses(&server)[1].as_str()), (&"load".into(), "loaded"));
}

#[test]
fn ollama_shows_the_licence_and_the_context_of_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let show = |licence: Option<&[u8]>| {
        let file = bodkin_gguf::File::open(kit(MODEL)).unwrap();
        let mut metadata = file.metadata().clone();
        let text = licence.map(|text| bodkin_gguf::Value::String(text.into()));
        text.into_iter().for_each(|text| metadata.insert("general.license", text));
        let path = folder.path().join("model.gguf");
        let mut writer = bodkin_gguf::Writer::new(&path, &metadata).unwrap();
        for tensor in file.tensors() {
            let data = file.data(tensor);
            writer.tensor(&tensor.name, tensor.format, &tensor.shape, data).unwrap();
        }
        writer.save().unwrap();
        // The context of the server is not the file's.
        let server = Server::of(&path, &["-c", "64"]);
        server.post("/api/show", &json!({ "model": "model" })).json()
    };
    let shown = show(Some(b"apache-2.0"));
    assert_eq!(shown["license"], "apache-2.0");
    assert_eq!(shown["model_info"]["llama.context_length"], 1024);
    assert_eq!(show(None)["license"], "");
}

/// What the file's header says is known before the model is loaded.
#[test]
fn questions_about_a_model_do_not_load_it() {
    let (llama, qwen) = (kit("llama.gguf"), kit("qwen3.gguf"));
    let server = Server::with(&[llama.to_str().unwrap(), qwen.to_str().unwrap()]);
    wait_for(&server, &["loaded", "unloaded"]);
    let tags = server.get("/api/tags").json();
    assert!(tags["models"][1]["size"].as_u64() > Some(0), "{tags}");
    assert_eq!(tags["models"][1]["details"]["family"], "qwen3", "{tags}");
    let shown = server.post("/api/show", &json!({ "model": "qwen3:latest" })).json();
    assert_eq!(shown["model_info"]["general.architecture"], "qwen3", "{shown}");
    assert_eq!(shown["modified_at"], tags["models"][1]["modified_at"], "{shown}");
    let props = server.get("/props?model=qwen3").json();
    assert_eq!(props["model_alias"], "qwen3", "{props}");
    assert_eq!(props["is_sleeping"], true, "{props}");
    assert_eq!(server.get("/slots?model=qwen3").status, 200);
    assert_eq!(server.get("/props?model=other").status, 404);
    assert_eq!(statuses(&server), ["loaded", "unloaded"]);
    assert_eq!(server.get("/props").json()["model_alias"], "llama");
}

#[test]
fn a_request_that_unloads_a_model_does_so_once() {
    let server = Server::start(&["--ctx-size", "256"]);
    let ask = |keep_alive: Value| {
        let options = json!({ "num_predict": 2 });
        let body = json!({ "prompt": "a", "raw": true, "stream": false, "options": options,
                           "keep_alive": keep_alive });
        assert_eq!(server.post("/api/generate", &body).status, 200);
    };
    ask(json!(0));
    wait_for(&server, &["unloaded"]);
    ask(Value::Null);
    // Idle models are looked for twice a second.
    std::thread::sleep(Duration::from_millis(1500));
    assert_eq!(statuses(&server), ["loaded"]);
}

/// A prompt is not read again by a server that was killed and started anew, and a torn page does
/// no harm.
#[test]
fn prompts_survive_the_server() {
    let folder = tempfile::tempdir().unwrap();
    let args = ["--ctx-size", "512", "--cache-dir", folder.path().to_str().unwrap()];
    let prompt: Vec<u32> = (0..200).map(|i| 10 + i * 7 % 300).collect();
    let body = json!({ "prompt": prompt, "n_predict": 4, "temperature": 0, "return_tokens": true });
    let pages = || -> Vec<std::path::PathBuf> {
        let models = std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().path());
        let files = models.flat_map(|model| std::fs::read_dir(model).unwrap());
        let paths = files.map(|entry| entry.unwrap().path());
        paths.filter(|path| path.extension().is_some_and(|end| end == "page")).collect()
    };
    let answer = |server: &Server| {
        let answer = server.post("/completion", &body).json();
        (answer["tokens"].clone(), answer["timings"]["cache_n"].as_u64().unwrap())
    };
    let mut server = Server::start(&args);
    let (tokens, cached) = answer(&server);
    assert_eq!(cached, 0);
    let start = Instant::now();
    while pages().len() < 6 {
        assert!(start.elapsed() < Duration::from_secs(10), "six full pages are written");
        std::thread::sleep(Duration::from_millis(10));
    }
    server.child.kill().unwrap();
    drop(server);
    assert_eq!(answer(&Server::start(&args)), (tokens.clone(), 192));
    for page in pages() {
        std::fs::File::options().write(true).open(page).unwrap().set_len(1000).unwrap();
    }
    assert_eq!(answer(&Server::start(&args)), (tokens, 0));
}

fn truncate(path: &Path) {
    fs::File::options().write(true).open(path).unwrap().set_len(4096).unwrap();
}

#[test]
fn a_truncated_file_fails_requests_until_it_is_whole_again() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("cut.gguf");
    fs::copy(kit("llama.gguf"), &path).unwrap();
    let server = Server::of(&path, &["--ctx-size", "256"]);
    assert_eq!(complete(&server, "cut"), 200);
    truncate(&path);
    let body = json!({ "model": "cut", "prompt": [5, 6], "max_tokens": 2 });
    let response = server.post("/v1/completions", &body);
    let message = response.json()["error"]["message"].as_str().unwrap().to_owned();
    assert_eq!(response.status, 500, "{message}");
    // Clients are not told where files are.
    let folder = folder.path().to_str().unwrap();
    assert!(message.starts_with("cut: truncated") && !message.contains(folder), "{message}");
    fs::copy(kit("llama.gguf"), &path).unwrap();
    assert_eq!(complete(&server, "cut"), 200);
    assert_eq!(statuses(&server), ["loaded"]);
}

#[test]
fn a_file_that_is_written_to_is_loaded_again() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("written.gguf");
    fs::copy(kit("llama.gguf"), &path).unwrap();
    let server = Server::of(&path, &["--ctx-size", "256"]);
    assert_eq!(complete(&server, "written"), 200);
    // Clocks of file systems are coarse.
    std::thread::sleep(Duration::from_millis(50));
    fs::copy(kit("llama.gguf"), &path).unwrap();
    let body = json!({ "model": "written", "prompt": [5, 6], "max_tokens": 2 });
    let response = server.post("/v1/completions", &body);
    // Unless the server has seen it, and loaded the file again, before the request came.
    if response.status != 200 {
        assert_eq!(response.status, 500, "{response:?}");
        assert!(response.json()["error"].to_string().contains("another process"), "{response:?}");
        assert_eq!(complete(&server, "written"), 200);
    }
    assert_eq!(server.get("/health").json()["models"][0]["loads"], 2);
}

/// A router sends no request to a server whose `/health` is 503.
#[test]
fn a_failed_model_is_loaded_again_without_a_request() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("cut.gguf");
    fs::copy(kit("llama.gguf"), &path).unwrap();
    let server = Server::of(&path, &["--ctx-size", "256"]);
    truncate(&path);
    let wait_for = |wanted: (u16, &str)| {
        let start = Instant::now();
        loop {
            let response = server.get("/health");
            let model = response.json()["models"][0].clone();
            if (response.status, model["status"].as_str().unwrap()) == wanted {
                return model;
            }
            assert!(start.elapsed() < Duration::from_secs(30), "{wanted:?}: {response:?}");
            std::thread::sleep(Duration::from_millis(20));
        }
    };
    let failed = wait_for((503, "failed"));
    let cause = failed["error"].as_str().unwrap();
    let folder_name = folder.path().to_str().unwrap();
    assert!(cause.contains("truncated") && !cause.contains(folder_name), "{failed}");
    assert!(failed["retry_in_ms"].as_u64().unwrap() <= 60_000, "{failed}");
    let whole = folder.path().join("whole.gguf");
    fs::copy(kit("llama.gguf"), &whole).unwrap();
    fs::rename(&whole, &path).unwrap();
    let loaded = wait_for((200, "loaded"));
    assert_eq!((&loaded["loads"], &loaded["retry_in_ms"]), (&2.into(), &Value::Null), "{loaded}");
}

#[test]
fn a_step_that_takes_too_long_makes_health_fail_until_it_ends() {
    let server = Server::start(&["--ctx-size", "1024", "--step-timeout", "0s"]);
    let body = json!({ "prompt": [5], "n_predict": 1000, "ignore_eos": true, "stream": true });
    let body = body.to_string();
    let mut socket = server.connect();
    socket.write_all(post_head("/completion", body.len(), "").as_bytes()).unwrap();
    socket.write_all(body.as_bytes()).unwrap();
    let start = Instant::now();
    let hung = loop {
        assert!(start.elapsed() < Duration::from_secs(30), "a step is seen");
        let response = server.get("/health");
        if response.status != 200 {
            break response;
        }
    };
    let model = &hung.json()["models"][0];
    assert_eq!((hung.status, &model["status"]), (503, &"hung".into()), "{hung:?}");
    assert!(model["error"].as_str().unwrap().contains("a step has been running"), "{hung:?}");
    drop(socket);
    server.wait_idle();
    assert_eq!(server.get("/health").status, 200);
}

/// `/health` when it has this status and the model this state.
fn wait_for_health(server: &Server, wanted: (u16, &str)) -> Value {
    let start = Instant::now();
    loop {
        let response = server.get("/health");
        let model = response.json()["models"][0].clone();
        if (response.status, model["status"].as_str().unwrap()) == wanted {
            return model;
        }
        assert!(start.elapsed() < Duration::from_secs(30), "{wanted:?}: {response:?}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Texts of one token each, of which two share a step.
fn embed_texts(server: &Server, count: usize) -> Response {
    let body = json!({ "input": vec!["a"; count] });
    server.post("/v1/embeddings", &body)
}

#[test]
fn an_encoder_that_fails_in_a_request_is_loaded_again() {
    for (fault, cause) in [("error@3", "the mock fails"), ("panic@3", "the mock panics")] {
        let device = format!("mock:{fault}");
        let args = ["--device", &device, "--batch-size", "8", "--parallel", "2"];
        let server = Server::of(&kit("bert.gguf"), &args);
        assert_eq!(embed_texts(&server, 1).status, 200, "the first step");
        // Others that wait end too, and the one that is half done.
        let ended: Vec<Response> = std::thread::scope(|scope| {
            let threads: Vec<_> =
                (0..2).map(|_| scope.spawn(|| embed_texts(&server, 400))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        // One of them may have come when the model was there again, and failed like the first.
        for response in ended {
            let message = response.json()["error"]["message"].as_str().unwrap().to_owned();
            assert_eq!(response.status, 500, "{message}");
            assert!(message.contains(cause), "{message}");
        }
        let model = wait_for_health(&server, (200, "loaded"));
        assert!(model["loads"].as_u64().unwrap() > 1, "{model}");
        assert_eq!(embed_texts(&server, 1).status, 200, "{fault}");
    }
}

#[test]
fn requests_of_a_model_that_hangs_end_and_so_does_the_server() {
    for (model, path, body) in [
        (kit(MODEL), "/completion", json!({ "prompt": [5], "n_predict": 9, "ignore_eos": true })),
        (kit("bert.gguf"), "/v1/embeddings", json!({ "input": "a" })),
    ] {
        let args = ["--device", "mock:hang@2", "--step-timeout", "100ms", "--ctx-size", "64"];
        let mut server = Server::of(&model, &args);
        let first = json!({ "prompt": [5], "n_predict": 1, "input": "a" });
        assert_eq!(server.post(path, &first).status, 200);
        let start = Instant::now();
        // One runs, the other one waits for it.
        std::thread::scope(|scope| {
            let ask = || server.post(path, &body);
            let threads = [(); 2].map(|()| scope.spawn(ask));
            wait_for_health(&server, (503, "hung"));
            for response in threads.map(|thread| thread.join().unwrap()) {
                let message = response.json()["error"]["message"].as_str().unwrap().to_owned();
                assert_eq!(response.status, 503, "{message}");
                assert!(message.starts_with("a step has been running for "), "{message}");
            }
        });
        assert!(start.elapsed() >= Duration::from_secs(1), "ten times the limit of a step");
        server.terminate();
        assert_eq!(server.child.wait().unwrap().code(), Some(0));
        assert!(start.elapsed() < Duration::from_secs(25), "nobody waits for the model");
    }
}

#[cfg(unix)]
#[test]
fn a_file_truncated_in_a_request_ends_the_server_with_its_name() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("cut.gguf");
    fs::copy(kit("llama.gguf"), &path).unwrap();
    let mut server = Server::of(&path, &["--parallel", "1"]);
    let body = json!({ "prompt": [5, 6], "n_predict": -1, "ignore_eos": true, "stream": true });
    let mut socket = server.connect();
    let body = body.to_string();
    socket.write_all(post_head("/completion", body.len(), "").as_bytes()).unwrap();
    socket.write_all(body.as_bytes()).unwrap();
    socket.read_exact(&mut [0; 16]).unwrap();
    truncate(&path);
    let text = server.rest_of_stderr();
    let line = format!("error: {}: truncated by another process while in use\n", path.display());
    assert!(text.contains(&line), "{text}");
    assert_eq!(server.child.wait().unwrap().code(), Some(1));
}

/// The counters of `/metrics`.
fn counters(server: &Server) -> Vec<(String, f64)> {
    let text = server.get("/metrics").body;
    let names = text.lines().filter_map(|line| line.strip_prefix("# TYPE "));
    let names: Vec<&str> = names.filter_map(|line| line.strip_suffix(" counter")).collect();
    let samples = text.lines().filter_map(|line| line.rsplit_once(' '));
    let samples = samples.filter(|(name, _)| names.contains(&name.split('{').next().unwrap()));
    samples.map(|(name, value)| (name.to_owned(), value.parse().unwrap())).collect()
}

#[test]
fn counters_never_fall() {
    let (moe, bert) = (kit("mixtral.gguf"), kit("bert.gguf"));
    let server = Server::with(&[moe.to_str().unwrap(), bert.to_str().unwrap()]);
    let ask = || {
        assert_eq!(complete(&server, "mixtral"), 200);
        let body = json!({ "model": "bert", "input": "a" });
        assert_eq!(server.post("/v1/embeddings", &body).status, 200);
        counters(&server)
    };
    let unload = || {
        for model in ["mixtral", "bert"] {
            server.post("/api/generate", &json!({ "model": model, "keep_alive": 0 }));
        }
        assert_eq!(statuses(&server), ["unloaded", "unloaded"]);
        counters(&server)
    };
    let mut before = ask();
    let has =
        |name: &str| before.iter().any(|(found, value)| found.starts_with(name) && *value > 0.0);
    for name in [
        "llamacpp:tokens_predicted_total",
        "llamacpp:prompt_tokens_total",
        "bodkin_steps_total{model=\"bert\"}",
        "bodkin_expert_selections_total",
    ] {
        assert!(has(name), "{name}: {before:?}");
    }
    for after in [unload(), ask(), unload(), ask()] {
        for (name, value) in &before {
            let found = after.iter().find(|(found, _)| found == name);
            assert!(found.is_some_and(|(_, found)| found >= value), "{name} {value}: {found:?}");
        }
        before = after;
    }
    let total = |name: &str| server.metric(&format!("{name}_total"));
    assert_eq!(total("bodkin_generated_tokens"), 6.0);
    assert_eq!(total("llamacpp:tokens_predicted"), 6.0);
}

#[test]
fn metrics_count_the_experts_of_each_layer() {
    let server = Server::of(&kit("mixtral.gguf"), &["--ctx-size", "256"]);
    assert_eq!(complete(&server, "mixtral"), 200);
    assert!(server.metric("bodkin_expert_selections_total") > 0.0);
    let shares = server.metric("bodkin_expert_utilization_ratio");
    let text = server.get("/metrics").body;
    let layers = text.lines().filter(|line| {
        line.starts_with("bodkin_expert_selections_total") && line.contains("expert=\"0\"")
    });
    assert!((shares - layers.count() as f64).abs() < 1e-3, "the shares of a layer sum to one");
    assert_eq!(server.metric("bodkin_expert_layer_seconds_count"), 0.0, "no step was timed");
    let open = "GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\
                Accept: application/openmetrics-text\r\n\r\n";
    assert!(server.send(open, b"").body.ends_with("# EOF\n"));
    assert!(!text.contains("# EOF"));
}

/// Reading the metrics of a busy server times a step, whose layers count once.
#[test]
fn metrics_time_routing_and_experts_in_a_step() {
    let server = Server::of(&kit("mixtral.gguf"), &["--ctx-size", "8192"]);
    let body = json!({ "prompt": [5, 6], "n_predict": 8000, "ignore_eos": true, "stream": true });
    let body = body.to_string();
    let mut socket = server.connect();
    socket.write_all(post_head("/completion", body.len(), "").as_bytes()).unwrap();
    socket.write_all(body.as_bytes()).unwrap();
    socket.read_exact(&mut [0; 12]).unwrap();
    server.get("/metrics");
    let start = Instant::now();
    while server.metric("bodkin_expert_routing_seconds_count") == 0.0 {
        assert!(start.elapsed() < Duration::from_secs(20), "a step is timed");
        std::thread::sleep(Duration::from_millis(20));
    }
    for part in ["layer", "routing"] {
        let metric = |end: &str| server.metric(&format!("bodkin_expert_{part}_seconds_{end}"));
        assert_eq!(metric("count"), 2.0, "the model's layers");
        assert!(metric("sum") > 0.0 && metric("sum") < 1.0, "{}", metric("sum"));
    }
}
