//! Several models that do not all have room.

use std::path::Path;
use std::time::Duration;

use serde_json::json;

use crate::models::{complete, statuses};
use crate::server::{Server, kit};

#[test]
fn an_idle_model_makes_room_for_another() {
    let (llama, qwen) = (kit("llama.gguf"), kit("qwen3.gguf"));
    let paths = [llama.to_str().unwrap(), qwen.to_str().unwrap()];
    let small = ["--ctx-size", "256", "--parallel", "1"];
    let bytes = |server: &Server| server.metric("bodkin_model_bytes") as u64;
    let both = Server::with(&[&paths[..], &small].concat());
    assert_eq!(complete(&both, "qwen3"), 200);
    let memory = (bytes(&both) - 1).to_string();
    drop(both);
    let server = Server::with(&[&paths[..], &small, &["--memory", &memory]].concat());
    assert_eq!(complete(&server, "llama"), 200);
    for (name, wanted) in [("qwen3", ["unloaded", "loaded"]), ("llama", ["loaded", "unloaded"])] {
        assert_eq!(complete(&server, name), 200);
        assert_eq!(statuses(&server), wanted);
    }
    let server = Server::with(&[&paths[..1], &small, &["--memory", &memory]].concat());
    let limit = (bytes(&server) - 1).to_string();
    drop(server);
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_bodkin"));
    command.arg("serve").arg(paths[0]).args(small).args(["--memory", &limit, "--port", "0"]);
    let output = command.output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && stderr.contains("are missing"), "{stderr}");
}

/// Experts are cached beside an idle model only if they do not all fit without it.
#[test]
fn an_idle_model_makes_room_for_all_experts() {
    let (llama, moe) = (kit("llama.gguf"), kit("qwen3moe-q4_k_m.gguf"));
    let paths = [llama.to_str().unwrap(), moe.to_str().unwrap()];
    let small = ["--ctx-size", "256", "--parallel", "1", "--batch-size", "16"];
    let bytes = |paths: &[&str]| {
        let server = Server::with(&[paths, &small].concat());
        paths.iter().for_each(|path| {
            let name = Path::new(path).file_stem().unwrap().to_str().unwrap();
            assert_eq!(complete(&server, name), 200);
        });
        server.metric("bodkin_model_bytes") as u64
    };
    let (both, alone) = (bytes(&paths), bytes(&paths[1..]));
    assert!(alone < both);
    for (memory, has_all) in [(both - 1, true), (alone - 1, false)] {
        let memory = memory.to_string();
        let server = Server::with(&[&paths[..], &small, &["--memory", &memory]].concat());
        for name in ["llama", "qwen3moe-q4_k_m"] {
            assert_eq!(complete(&server, name), 200);
        }
        assert_eq!(statuses(&server), ["unloaded", "loaded"]);
        let metrics = server.get("/metrics").body;
        assert_eq!(metrics.contains("bodkin_expert_cache_slots{"), !has_all, "{metrics}");
    }
}

/// The bytes of both models of a server, loaded with these arguments.
fn bytes_of_both(args: &[&str]) -> u64 {
    let server = Server::with(args);
    assert_eq!((complete(&server, "llama"), complete(&server, "qwen3")), (200, 200));
    server.metric("bodkin_model_bytes") as u64
}

/// Begins an answer that takes long.
fn begin(server: &Server, model: &str) -> std::net::TcpStream {
    server.begin(&json!({
        "model": model, "prompt": [5, 6], "n_predict": 20000, "ignore_eos": true, "stream": true,
    }))
}

/// A model that needs the memory of a busy one waits for its requests. If they take too long, the
/// request fails, and the server is healthy all the same.
#[test]
fn a_model_waits_for_the_memory_of_a_busy_one() {
    let (llama, qwen) = (kit("llama.gguf"), kit("qwen3.gguf"));
    let paths = [llama.to_str().unwrap(), qwen.to_str().unwrap()];
    let args = [&paths[..], &["--ctx-size", "20100", "--parallel", "1"]].concat();
    let memory = (bytes_of_both(&args) - 1).to_string();
    let start = |wait: &str| {
        let limits = ["--memory", &memory, "--release-timeout", wait];
        Server::with(&[&args[..], &limits].concat())
    };
    let server = start("200ms");
    let busy = begin(&server, "llama");
    let body = json!({ "model": "qwen3", "prompt": [5, 6], "max_tokens": 2 });
    let refused = server.post("/v1/completions", &body);
    assert_eq!(refused.status, 503, "{refused:?}");
    let message = refused.json()["error"]["message"].as_str().unwrap().to_owned();
    assert!(message.starts_with("qwen3: needs ") && message.contains("missing"), "{message}");
    assert_eq!(server.get("/health").status, 200);
    assert_eq!(statuses(&server), ["loaded", "unloaded"]);
    drop(busy);
    server.wait_idle();
    assert_eq!(complete(&server, "qwen3"), 200);
    let server = start("60s");
    let busy = begin(&server, "llama");
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| complete(&server, "qwen3"));
        std::thread::sleep(Duration::from_millis(300));
        assert!(!waits.is_finished());
        assert_eq!(server.get("/health").status, 200);
        drop(busy);
        assert_eq!(waits.join().unwrap(), 200);
    });
    assert_eq!(statuses(&server), ["unloaded", "loaded"]);
}

/// A client that leaves out an answer's thoughts goes on from the end of its last prompt, also if
/// another conversation came between.
#[test]
fn conversations_with_recurrent_state_go_on_from_their_prompts() {
    for model in ["qwen35", "falcon-h1"] {
        let server =
            Server::of(&kit(&format!("{model}.gguf")), &["--parallel", "1", "--ctx-size", "640"]);
        let cached = |tokens: Vec<u32>| {
            let body = json!({
                "prompt": tokens, "max_tokens": 20, "temperature": 0, "ignore_eos": true,
            });
            let usage = server.post("/v1/completions", &body).json()["usage"].clone();
            usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
        };
        let prompt = |first: u32, turns: u32| (first..first + 100 * turns).map(|i| i % 200 + 10);
        assert_eq!([1, 70].map(|first| cached(prompt(first, 1).collect())), [0, 0], "{model}");
        // Three pages of a hundred tokens.
        assert_eq!([1, 70].map(|first| cached(prompt(first, 2).collect())), [96, 96], "{model}");
    }
}
