//! What requests start from: `--default` and `--chat-template-file`.

use serde_json::{Value, json};

use crate::server::{Server, failure};

#[test]
fn requests_start_from_the_defaults_of_the_server() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("template.jinja");
    let template = "{{ word }} {% for m in messages %}{% if m.role != 'user' %}\
                    {{ m.role }}: {% endif %}{{ m.content }}{% endfor %}";
    std::fs::write(&file, template).unwrap();
    let defaults = ["max_tokens=3", "temperature=0.8", r#"chat_template_kwargs={"word":"So"}"#];
    let mut args = vec!["--chat-template-file", file.to_str().unwrap()];
    args.extend(defaults.iter().flat_map(|field| ["--default", field]));
    let server = Server::start(&args);
    let prompt = |body| server.post("/apply-template", &body).json()["prompt"].clone();
    let messages = json!([{ "role": "user", "content": "it is" }]);
    assert_eq!(prompt(json!({ "messages": messages })), "So it is");
    let own = json!({ "messages": messages, "chat_template_kwargs": { "word": "Is" } });
    assert_eq!(prompt(own), "Is it is");
    let messages = json!([{ "role": "developer", "content": "a" }]);
    assert_eq!(prompt(json!({ "messages": messages })), "So system: a");
    let count = |body| server.post("/completion", &body).json()["tokens_predicted"].clone();
    assert_eq!(count(json!({ "prompt": [5, 6], "ignore_eos": true })), 3);
    assert_eq!(count(json!({ "prompt": [5, 6], "ignore_eos": true, "n_predict": 4 })), 4);
    let props = server.get("/props");
    assert!(props.body.contains(r#""temperature":0.8,"#), "{}", props.body);
    assert_eq!(props.json()["chat_template"], template);
}

#[test]
fn minus_one_is_no_limit_of_tokens() {
    for default in [&[][..], &["--default", "max_tokens=3"]] {
        let server = Server::start(&[&["--ctx-size", "64"], default].concat());
        for (path, field, count) in [
            ("/v1/completions", "max_tokens", "/usage/completion_tokens"),
            ("/v1/chat/completions", "max_completion_tokens", "/usage/completion_tokens"),
            ("/v1/responses", "max_output_tokens", "/usage/output_tokens"),
            ("/completion", "n_predict", "/tokens_predicted"),
            ("/v1/messages", "max_tokens", "/usage/output_tokens"),
        ] {
            let mut body = json!({ "prompt": [5, 6], "ignore_eos": true });
            body["messages"] = json!([{ "role": "user", "content": "a" }]);
            if path == "/v1/responses" {
                body = json!({ "input": "a", "ignore_eos": true });
            }
            body[field] = (-1).into();
            let answer = server.post(path, &body).json();
            assert!(answer.pointer(count).unwrap().as_u64() > Some(16), "{path}: {answer}");
        }
    }
}

#[test]
fn minus_one_as_the_default_is_no_limit() {
    let args = ["--ctx-size", "64", "--default", "max_tokens=-1"];
    let server = Server::start(&args);
    let body = json!({ "prompt": [5, 6], "ignore_eos": true });
    for (path, count) in
        [("/v1/completions", "/usage/completion_tokens"), ("/completion", "/tokens_predicted")]
    {
        let answer = server.post(path, &body).json();
        assert!(answer.pointer(count).unwrap().as_u64() > Some(16), "{path}: {answer}");
    }
    let error = failure(&["--default", "max_tokens=0", "--port", "0", "x.gguf"]);
    assert!(error.contains("default.max_tokens: expected at least 1, or -1"), "{error}");
}

/// OpenAI's offsets count from the start of the prompt, whether it is repeated or not.
#[test]
fn offsets_of_tokens_count_from_the_start_of_the_prompt() {
    let server = Server::start(&["--ctx-size", "256"]);
    let mut body = json!({
        "prompt": ["abc de", [5, 6]], "max_tokens": 3, "logprobs": 0, "temperature": 0, "n": 2,
        "ignore_eos": true,
    });
    let choices = server.post("/v1/completions", &body).json()["choices"].clone();
    let texts = |tokens: &Value| -> Vec<String> {
        let texts = tokens.as_array().unwrap().iter();
        texts.map(|text| text.as_str().unwrap().to_owned()).collect()
    };
    let starts = [6, 6].map(Some).into_iter().chain([None, None]);
    for (choice, start) in choices.as_array().unwrap().iter().zip(starts) {
        let logprobs = &choice["logprobs"];
        let mut offset = start.unwrap_or_else(|| logprobs["text_offset"][0].as_u64().unwrap());
        assert!(offset > 0, "{choice}");
        for (i, text) in texts(&logprobs["tokens"]).iter().enumerate() {
            assert_eq!(logprobs["text_offset"][i], offset, "{choice}");
            offset += text.chars().count() as u64;
        }
    }
    body["stream"] = true.into();
    let streamed = server.post("/v1/completions", &body).body;
    let chunks = streamed.lines().filter_map(|line| line.strip_prefix("data: {"));
    let mut offsets = vec![Vec::new(); 4];
    for chunk in chunks {
        let chunk: Value = serde_json::from_str(&format!("{{{chunk}")).unwrap();
        let choice = &chunk["choices"][0];
        let found = choice["logprobs"]["text_offset"].as_array();
        offsets[choice["index"].as_u64().unwrap() as usize]
            .extend(found.into_iter().flatten().cloned());
    }
    for (choice, offsets) in choices.as_array().unwrap().iter().zip(offsets) {
        assert_eq!(choice["logprobs"]["text_offset"], Value::from(offsets), "{choice}");
    }
    // The prompt is repeated in front of each answer.
    body["stream"] = false.into();
    body["echo"] = true.into();
    body["logprobs"] = Value::Null;
    let choices = server.post("/v1/completions", &body).json()["choices"].clone();
    assert!(choices[1]["text"].as_str().unwrap().starts_with("abc de"), "{choices}");
    let ids = json!({ "tokens": [5, 6] });
    let text = server.post("/detokenize", &ids).json()["content"].as_str().unwrap().to_owned();
    assert!(choices[2]["text"].as_str().unwrap().starts_with(&text), "{choices}");
}

#[test]
fn a_response_repeats_options_and_counts_its_reasoning() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("template.jinja");
    std::fs::write(&file, "{% for m in messages %}{{ m.content }}{% endfor %}<think>").unwrap();
    let server = Server::start(&["--chat-template-file", file.to_str().unwrap()]);
    let body = json!({
        "input": "a", "max_output_tokens": 5, "ignore_eos": true, "temperature": 0.8, "top_p": 0.7,
    });
    let response = server.post("/v1/responses", &body);
    assert!(response.body.contains(r#""temperature":0.8,"#), "{response:?}");
    assert!(response.body.contains(r#""top_p":0.7,"#), "{response:?}");
    let details = &response.json()["usage"]["output_tokens_details"];
    assert_eq!(details["reasoning_tokens"], 5, "{response:?}");
}

#[test]
fn defaults_that_no_request_has_are_refused() {
    let refused = |default: &str| failure(&["--default", default, "--port", "0", "x.gguf"]);
    assert!(refused("tempreature=1").contains("default.tempreature"));
    assert!(refused("temperature=-1").contains("default.temperature: expected a number from 0"));
    assert!(refused("temperature").contains("expected FIELD=VALUE"));
}
