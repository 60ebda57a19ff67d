//! Answers that must satisfy a schema, through each interface, whole and streamed: of a tiny model
//! with random weights, which writes nothing sensible by itself, and of a real one.

use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

use crate::server::Server;

/// Its answers end soon, whatever the model writes.
fn schema() -> Value {
    json!({
        "type": "object",
        "properties": {
            "name": { "type": "string", "maxLength": 6 },
            "count": { "type": "integer", "minimum": 1, "maximum": 99 },
        },
        "required": ["name", "count"],
        "additionalProperties": false,
    })
}

#[track_caller]
fn assert_satisfied(text: &str) {
    let value: Value = serde_json::from_str(text).unwrap_or_else(|error| panic!("{text}: {error}"));
    assert!(value["name"].as_str().unwrap().chars().count() <= 6, "{text}");
    assert!((1..=99).contains(&value["count"].as_u64().unwrap()), "{text}");
    assert_eq!(value.as_object().unwrap().len(), 2, "{text}");
}

/// The text that is in all events of a stream, or in a whole answer.
fn text_of(body: &str, paths: &[&str]) -> String {
    let lines = body.lines().map(|line| line.strip_prefix("data: ").unwrap_or(line));
    let values = lines.filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let text = |value: Value| {
        let found = paths.iter().find_map(|path| value.pointer(path).and_then(Value::as_str));
        found.unwrap_or_default().to_owned()
    };
    values.map(text).collect()
}

#[test]
fn every_interface_has_its_fields() {
    let server = Server::start(&["--ctx-size", "1024", "--parallel", "2"]);
    let flat = json!({ "type": "json_schema", "name": "a", "schema": schema() });
    let nested = json!({ "type": "json_schema", "json_schema": { "name": "a", "strict": true,
                         "schema": schema() } });
    let messages = json!([{ "role": "user", "content": "a" }]);
    let chat = json!({ "messages": messages, "max_tokens": 300, "temperature": 2 });
    let prompt = json!({ "prompt": "a", "max_tokens": 300, "temperature": 2 });
    let ollama = json!({ "messages": messages, "prompt": "a", "stream": false,
                         "options": { "temperature": 2, "num_predict": 300 } });
    let input = json!({ "input": "a", "max_output_tokens": 300, "temperature": 2 });
    let chat_paths = &["/choices/0/message/content", "/choices/0/delta/content"][..];
    let completion_paths = &["/choices/0/text"][..];
    for (path, body, field, value, paths) in [
        ("/v1/chat/completions", &chat, "response_format", nested.clone(), chat_paths),
        ("/v1/chat/completions", &chat, "json_schema", schema(), chat_paths),
        ("/v1/completions", &prompt, "response_format", nested, completion_paths),
        (
            "/v1/completions",
            &prompt,
            "structured_outputs",
            json!({ "json": schema() }),
            completion_paths,
        ),
        ("/v1/completions", &prompt, "guided_json", schema().to_string().into(), completion_paths),
        ("/completion", &prompt, "json_schema", schema(), &["/content"][..]),
        (
            "/v1/responses",
            &input,
            "text",
            json!({ "format": flat.clone() }),
            &["/output/0/content/0/text", "/delta"][..],
        ),
        ("/api/chat", &ollama, "format", schema(), &["/message/content"][..]),
        ("/api/generate", &ollama, "format", schema(), &["/response"][..]),
        (
            "/v1/messages",
            &chat,
            "output_format",
            flat.clone(),
            &["/content/0/text", "/delta/text"][..],
        ),
        (
            "/v1/messages",
            &chat,
            "output_config",
            json!({ "format": flat }),
            &["/content/0/text", "/delta/text"][..],
        ),
    ] {
        let mut body = body.clone();
        body[field] = value;
        for (seed, streams) in [(1, false), (2, false), (3, true)] {
            (body["seed"], body["stream"]) = (seed.into(), streams.into());
            let response = server.post(path, &body);
            assert_eq!(response.status, 200, "{path} {field}: {response:?}");
            let found = text_of(&response.body, paths);
            assert_satisfied(&found);
            if path == "/completion" || path.starts_with("/api") {
                continue;
            }
            let ends = ["\"stop\"", "\"end_turn\"", "\"completed\""];
            assert!(ends.iter().any(|end| response.body.contains(end)), "{path} {response:?}");
        }
    }
    server.wait_idle();
}

#[test]
fn objects_expressions_choices_and_several_answers() {
    let server = Server::start(&["--ctx-size", "512", "--parallel", "4"]);
    let ask = |field: &str, value: Value| {
        let mut body = json!({ "prompt": "a", "max_tokens": 200, "temperature": 2, "n": 3,
                               "ignore_eos": true, "logprobs": 1 });
        body[field] = value;
        let answer = server.post("/v1/completions", &body);
        assert_eq!(answer.status, 200, "{field}: {answer:?}");
        let choices = answer.json()["choices"].as_array().unwrap().clone();
        assert_eq!(choices.len(), 3);
        choices.iter().map(|choice| choice["text"].as_str().unwrap().to_owned()).collect()
    };
    let texts: Vec<String> = ask("guided_choice", json!(["yes", "no", "a \"b\""]));
    assert!(
        texts.iter().all(|text| ["yes", "no", "a \"b\""].contains(&text.as_str())),
        "{texts:?}"
    );
    let texts: Vec<String> = ask("structured_outputs", json!({ "regex": "[0-9]{3}-[a-f]" }));
    let fits = |text: &String| {
        let bytes = text.as_bytes();
        bytes.len() == 5 && bytes[..3].iter().all(u8::is_ascii_digit) && bytes[3] == b'-'
    };
    assert!(texts.iter().all(fits), "{texts:?}");
    let nested = "root ::= \"(\" root \")\" | [a-c]{2}";
    for (field, value) in [
        ("grammar", json!(nested)),
        ("guided_grammar", json!(nested)),
        ("structured_outputs", json!({ "grammar": nested })),
    ] {
        let texts: Vec<String> = ask(field, value);
        let fits = |text: &String| {
            let inner = text.trim_start_matches('(');
            let letters = inner.trim_end_matches(')');
            let (opened, closed) = (text.len() - inner.len(), inner.len() - letters.len());
            // Parentheses may go on until the text is cut.
            letters.bytes().all(|byte| b"abc".contains(&byte))
                && (closed == opened && letters.len() == 2 || closed < opened && letters.len() <= 2)
        };
        assert!(texts.iter().all(fits), "{texts:?}");
    }
    // Any object begins as one, and may be cut.
    let texts: Vec<String> = ask("response_format", json!({ "type": "json_object" }));
    assert!(texts.iter().all(|text| text.starts_with('{')), "{texts:?}");
}

/// What strangers send is refused before the first token, by the name of its field.
#[test]
fn wrong_constraints_are_refused_by_their_names() {
    let server = Server::start(&["--ctx-size", "256"]);
    let messages = json!([{ "role": "user", "content": "a" }]);
    let deep = (0..100).fold(json!({}), |items, _| json!({ "type": "array", "items": items }));
    let names = (0..10_000).map(|i| (format!("property{i}"), json!({ "type": "string" })));
    let wide = json!({ "type": "object", "properties": names.collect::<serde_json::Map<_, _>>() });
    let format =
        |schema: Value| json!({ "type": "json_schema", "json_schema": { "schema": schema } });
    for (path, field, value, wanted) in [
        ("/v1/chat/completions", "response_format", json!("json"), "expected an object"),
        ("/v1/chat/completions", "response_format", json!({ "type": "xml" }), "json_schema"),
        ("/v1/chat/completions", "response_format", format(json!({ "not": {} })), "not"),
        ("/v1/chat/completions", "response_format", format(json!({ "type": "strin" })), "strin"),
        ("/v1/chat/completions", "response_format", format(wide), "2000 properties"),
        ("/v1/chat/completions", "grammar", json!("root ::= a"), "rule a is used"),
        ("/v1/completions", "guided_regex", json!("("), "unclosed group"),
        ("/v1/completions", "structured_outputs", json!({ "grammar": "a" }), "::="),
        ("/completion", "grammar", json!(["a"]), "a string"),
        ("/completion", "json_schema", json!({ "$ref": "#/a" }), "not found"),
        ("/v1/responses", "text", json!({ "format": { "type": "json_schema" } }), "schema"),
        ("/v1/messages", "output_format", json!({ "type": "json_schema" }), "schema"),
        ("/v1/messages", "output_config", json!({ "format": 1 }), "an object"),
        ("/api/chat", "format", json!("yaml"), "json"),
        ("/api/generate", "format", json!({ "$ref": "#" }), "nothing can satisfy it"),
    ] {
        for streams in [false, true] {
            let mut body = match path {
                "/v1/responses" => json!({ "input": "a" }),
                _ => json!({ "prompt": "a", "messages": messages, "max_tokens": 4 }),
            };
            body["stream"] = streams.into();
            body[field] = value.clone();
            let refused = server.post(path, &body);
            assert_eq!(refused.status, 400, "{path} {field}: {refused:?}");
            let message = refused.json()["error"].to_string();
            assert!(message.contains(field) && message.contains(wanted), "{path}: {message}");
        }
    }
    let mut body = json!({ "prompt": "a", "max_tokens": 4, "json_schema": deep });
    assert_eq!(server.post("/v1/completions", &body).status, 200);
    // A body that is nested deeper is no JSON for the server.
    let deeper = format!("{}1{}", "[".repeat(200), "]".repeat(200));
    body["json_schema"] = "HERE".into();
    let bytes = body.to_string().replace("\"HERE\"", &deeper);
    assert_eq!(server.post_bytes("/v1/completions", bytes.as_bytes()).status, 400);
}

/// The schema of an answer that reasons applies behind its reasoning.
#[test]
fn reasoning_is_no_part_of_the_answer() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("template.jinja");
    let template = "{% for m in messages %}{{ m.content }}{% endfor %}<think>\n{# </think> #}";
    std::fs::write(&file, template).unwrap();
    let args = ["--ctx-size", "1024", "--chat-template-file", file.to_str().unwrap()];
    let server = Server::start(&args);
    // Characters of the marker are what the model likes best.
    let body = json!({ "messages": [{ "role": "user", "content": "a" }], "max_tokens": 900,
                       "temperature": 3, "seed": 5, "logit_bias": [["</think>", 6]],
                       "json_schema": schema() });
    let answer = server.post("/v1/chat/completions", &body);
    assert_eq!(answer.status, 200, "{answer:?}");
    let answer = answer.json();
    let message = &answer["choices"][0]["message"];
    match answer["choices"][0]["finish_reason"].as_str().unwrap() {
        "stop" => assert_satisfied(message["content"].as_str().unwrap()),
        _ => assert_eq!(message["content"], "", "{answer}"),
    }
    assert!(message["reasoning_content"].is_string(), "{answer}");
}

/// A real model fills a form: what its answers say is its own, their form is not.
#[test]
fn a_real_model_fills_a_form() {
    let output =
        Command::new(env!("CARGO_BIN_EXE_bodkin")).args(["pull", "smollm2"]).output().unwrap();
    let path = String::from_utf8(output.stdout).unwrap();
    let server = Server::of(Path::new(path.trim()), &["--ctx-size", "512", "--parallel", "2"]);
    let form = json!({
        "type": "object",
        "properties": {
            "city": { "type": "string", "maxLength": 40 },
            "country": { "enum": ["France", "Italy", "Spain"] },
            "inhabitants": { "type": "integer", "minimum": 1000, "maximum": 99_000_000 },
        },
        "required": ["city", "country", "inhabitants"],
        "additionalProperties": false,
    });
    let question = "Which city is the capital of France? Answer in JSON.";
    let body = json!({
        "messages": [{ "role": "user", "content": question }],
        "max_tokens": 120,
        "temperature": 0,
        "response_format": { "type": "json_schema", "json_schema": { "schema": form } },
    });
    let answer = server.post("/v1/chat/completions", &body).json();
    assert_eq!(answer["choices"][0]["finish_reason"], "stop", "{answer}");
    let text = answer["choices"][0]["message"]["content"].as_str().unwrap();
    let value: Value = serde_json::from_str(text).unwrap();
    assert_eq!(value["city"], "Paris", "{text}");
    assert_eq!(value["country"], "France", "{text}");
    assert!(value["inhabitants"].as_u64().unwrap() >= 1000, "{text}");
}
