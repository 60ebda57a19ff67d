//! The OpenAPI document says what the server does.

use serde_json::{Map, Value, json};

use crate::reranker;
use crate::server::{Server, kit};

/// Fields that every request of the document may have, with values that are right.
fn body() -> Value {
    json!({
        "messages": [{ "role": "user", "content": "a" }],
        "prompt": "a",
        "input": "a",
        "content": "a",
        "query": "a",
        "documents": ["a"],
        "tokens": [5],
        "max_tokens": 1,
        "max_completion_tokens": 1,
        "max_output_tokens": 1,
        "n_predict": 1,
        "options": { "num_predict": 1 },
    })
}

/// The right fields of an operation.
fn right(fields: &Map<String, Value>) -> Value {
    let Value::Object(all) = body() else { unreachable!("an object") };
    all.into_iter().filter(|(name, _)| fields.contains_key(name)).collect::<Map<_, _>>().into()
}

/// Whatever is documented is there, and reads the fields that it is said to have: a wrong one is
/// refused with its name.
#[test]
fn the_openapi_document_is_true() {
    let text = Server::start(&["--ctx-size", "256", "--mock"]);
    let encoder = Server::of(&kit("bert.gguf"), &[]);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("reranker.gguf");
    reranker::write(&path);
    let ranker = Server::of(&path, &[]);
    let document = text.get("/openapi.json").json();
    let mut failures = Vec::new();
    for (path, operations) in document["paths"].as_object().unwrap() {
        let server = match path {
            path if path.contains("embed") => &encoder,
            path if path.contains("rerank") => &ranker,
            _ => &text,
        };
        if operations.get("get").is_some() {
            let path = path.replace("{id}", "llama");
            assert_eq!(server.get(&path).status, 200, "{path}");
        }
        let Some(post) = operations.get("post") else { continue };
        let schema = &post["requestBody"]["content"]["application/json"]["schema"];
        let fields = schema["properties"].as_object().unwrap();
        let response = server.post(path, &right(fields));
        assert_eq!(response.status, 200, "{path}: {response:?}");
        for (name, schema) in fields {
            // Metadata is repeated as it is.
            if name == "metadata" {
                continue;
            }
            let takes_objects = schema["type"].to_string().contains("object");
            let wrong = if takes_objects { json!(1.5) } else { json!({ "wrong": 1.5 }) };
            let mut body = right(fields);
            // The older of two names is read where the other one is missing.
            if name == "content" {
                body.as_object_mut().unwrap().remove("input");
            }
            body[name] = wrong;
            let response = server.post(path, &body);
            if response.status != 400 || !response.body.contains(name) {
                failures.push(format!("{path} {name}: {response:?}"));
            }
        }
    }
    assert!(failures.is_empty(), "{failures:#?}");
}
