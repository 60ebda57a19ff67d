//! Fields that are refused by their name, and those that are followed.

use serde_json::{Value, json};

use crate::server::{Server, kit};

/// What would change the result and is not there is never ignored.
#[test]
fn fields_of_missing_features_are_refused_by_their_names() {
    let server = Server::start(&["--ctx-size", "256"]);
    let messages = json!([{ "role": "user", "content": "a" }]);
    let with_images = json!([{ "role": "user", "content": "a", "images": "abc" }]);
    for (path, field, value) in [
        ("/v1/messages", "mcp_servers", json!([{}])),
        ("/v1/chat/completions", "functions", json!([{}])),
        ("/api/generate", "images", "abc".into()),
        ("/completion", "image_data", "abc".into()),
        ("/api/chat", "messages", with_images),
        ("/v1/responses", "tool_choice", "required".into()),
        ("/v1/responses", "tools", json!([{ "type": "web_search" }])),
        ("/v1/responses", "include", json!(["reasoning.encrypted_content"])),
        ("/v1/responses", "top_logprobs", 3.into()),
        ("/v1/responses", "truncation", "auto".into()),
        ("/v1/responses", "max_tool_calls", 3.into()),
        ("/v1/responses", "metadata", 5.into()),
        ("/v1/completions", "best_of", 2.into()),
        ("/v1/completions", "best_of", "two".into()),
        ("/v1/chat/completions", "modalities", json!(["text", "audio"])),
        ("/v1/chat/completions", "lora", json!([{ "id": 0 }])),
        ("/completion", "n", 2.into()),
        ("/completion", "n_cmpl", 2.into()),
        ("/completion", "samplers", json!(["top_k"])),
        ("/completion", "dynatemp_range", 0.5.into()),
        ("/completion", "t_max_predict_ms", 10.into()),
        ("/api/generate", "options", json!({ "num_ctx": "abc" })),
        ("/api/generate", "options", json!({ "num_ctx": -5 })),
        ("/api/generate", "options", json!({ "num_keep": "x" })),
        ("/api/generate", "raw", true.into()),
    ] {
        let mut body = match path {
            "/v1/responses" => json!({ "input": "a" }),
            _ => json!({ "prompt": "a", "messages": messages, "max_tokens": 1 }),
        };
        if field == "raw" {
            body["system"] = "b".into();
        }
        body[field] = value;
        let refused = server.post(path, &body);
        assert_eq!(refused.status, 400, "{path} {field}: {refused:?}");
        let name = if field == "raw" { "system" } else { field };
        let message = refused.json()["error"].to_string();
        assert!(message.contains(name), "{path} {field}: {message}");
    }
    for (path, body) in [
        ("/v1/completions", json!({ "n": 2, "best_of": 2, "modalities": ["text"] })),
        ("/completion", json!({ "n": 1, "dynatemp_range": 0.0, "image_data": [] })),
        ("/api/generate", json!({ "images": [], "options": { "num_ctx": 100, "num_gpu": -1 } })),
    ] {
        let mut body = body;
        (body["prompt"], body["n_predict"], body["max_tokens"]) = ("a".into(), 1.into(), 1.into());
        body["stream"] = false.into();
        let answer = server.post(path, &body);
        assert_eq!(answer.status, 200, "{path}: {answer:?}");
    }
}

#[test]
fn a_batch_that_never_fits_is_refused_with_both_numbers() {
    let server = Server::start(&["--ctx-size", "256", "--parallel", "2", "--queue", "1"]);
    let ask = |n: usize| {
        let body = json!({ "prompt": ["a", "b"], "n": n, "max_tokens": 1, "ignore_eos": true });
        server.post("/v1/completions", &body)
    };
    let refused = ask(2);
    assert_eq!(refused.status, 400, "{refused:?}");
    let message = refused.json()["error"]["message"].as_str().unwrap().to_owned();
    assert_eq!(message, "4 answers in one request: at most 3 run and wait at a time");
    assert_eq!(ask(1).status, 200);
}

#[test]
fn items_of_a_cut_response_are_incomplete() {
    let server = Server::start(&["--ctx-size", "256"]);
    let mut body = json!({ "input": "a", "max_output_tokens": 3, "ignore_eos": true });
    let response = server.post("/v1/responses", &body).json();
    assert_eq!(response["status"], "incomplete", "{response}");
    assert_eq!(response["output"][0]["status"], "incomplete", "{response}");
    body["stream"] = true.into();
    let events = server.post("/v1/responses", &body).body;
    let done = events.lines().find(|line| line.contains("response.output_item.done\""));
    assert!(done.unwrap().contains("\"status\":\"incomplete\""), "{events}");
}

#[test]
fn ollama_has_log_probabilities() {
    let server = Server::start(&["--ctx-size", "256"]);
    let options = json!({ "num_predict": 3, "temperature": 0 });
    let mut body = json!({ "prompt": "a", "raw": true, "stream": false, "logprobs": true,
                           "top_logprobs": 2, "options": options });
    let answer = server.post("/api/generate", &body).json();
    let whole = answer["logprobs"].as_array().unwrap();
    let count = answer["eval_count"].as_u64().unwrap();
    assert!(!whole.is_empty() && whole.len() as u64 <= count, "{answer}");
    for token in whole {
        assert!(token["logprob"].as_f64().unwrap() <= 0.0 && token["token"].is_string());
        assert_eq!(token["top_logprobs"].as_array().unwrap().len(), 2, "{token}");
        assert_eq!(token["top_logprobs"][0]["logprob"], token["logprob"], "greedy");
    }
    body["stream"] = true.into();
    let lines = server.post("/api/generate", &body).body;
    let lines = lines.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let streamed: Vec<Value> =
        lines.filter_map(|line| line.get("logprobs")?.as_array().cloned()).flatten().collect();
    assert_eq!(&streamed, whole);
}

#[test]
fn templates_see_refusals_and_the_effort() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("template.jinja");
    let template = "{% for m in messages %}{{ m.content }};{% endfor %}\
                    {{ reasoning_effort }} {{ enable_thinking }}";
    std::fs::write(&file, template).unwrap();
    let server = Server::start(&["--chat-template-file", file.to_str().unwrap()]);
    let part = json!([{ "type": "refusal", "refusal": "never" }]);
    let messages = json!([
        { "role": "user", "content": "a" },
        { "role": "assistant", "content": null, "refusal": "no" },
        { "role": "user", "content": "b" },
        { "role": "assistant", "content": part },
        { "role": "user", "content": "c" },
    ]);
    let body = json!({ "messages": messages, "reasoning_effort": "high" });
    let prompt = server.post("/apply-template", &body).json()["prompt"].clone();
    assert_eq!(prompt, "a;no;b;never;c;high ");
    // Each interface has its own name for it; the mock's tokens are those of its prompt.
    let tokens = |path: &str, body: Value, count: &str| {
        server.post(path, &body).json().pointer(count).and_then(Value::as_u64).unwrap()
    };
    let messages = json!([{ "role": "user", "content": "a" }]);
    let long = "e".repeat(40);
    let plain = json!({ "messages": messages, "input": "a" });
    for (path, field, value) in [
        ("/v1/chat/completions/input_tokens", "reasoning_effort", json!(long)),
        ("/v1/messages/count_tokens", "output_config", json!({ "effort": long })),
        ("/v1/responses/input_tokens", "reasoning", json!({ "effort": long })),
    ] {
        let mut body = plain.clone();
        body[field] = value;
        let (without, with) =
            (tokens(path, plain.clone(), "/input_tokens"), tokens(path, body, "/input_tokens"));
        assert!(with > without, "{path}: {with} and {without}");
    }
    let mut body =
        json!({ "messages": messages, "stream": false, "options": { "num_predict": 1 } });
    let without = tokens("/api/chat", body.clone(), "/prompt_eval_count");
    body["think"] = long.into();
    assert!(tokens("/api/chat", body, "/prompt_eval_count") > without);
}

#[test]
fn ollamas_tag_is_no_other_model() {
    let server = Server::start(&["--ctx-size", "256"]);
    let pull = |name: &str| server.post("/api/pull", &json!({ "model": name })).status;
    assert_eq!((pull("llama"), pull("llama:latest"), pull("other")), (200, 200, 403));
}

#[test]
fn an_encoder_tells_its_properties_and_tokenizes() {
    let server = Server::of(&kit("bert.gguf"), &[]);
    let props = server.get("/props").json();
    assert!(props["default_generation_settings"]["n_ctx"].as_u64() > Some(0), "{props}");
    assert_eq!(server.get("/slots").status, 200);
    let tokens = server.post("/tokenize", &json!({ "content": "a b" })).json()["tokens"].clone();
    assert!(!tokens.as_array().unwrap().is_empty(), "{tokens}");
    let text = server.post("/detokenize", &json!({ "tokens": tokens })).json();
    assert!(text["content"].is_string(), "{text}");
    let body = json!({ "content": "a", "with_pieces": true });
    let pieces = server.post("/tokenize", &body).json();
    assert!(!pieces["tokens"][0]["piece"].to_string().is_empty(), "{pieces}");
}
