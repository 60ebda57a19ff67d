//! The OpenAPI document of all paths: what fields there are, their types and ranges.

use serde_json::{Map, Value, json};

/// The largest numbers of fields without a natural end.
const LARGE: i64 = i32::MAX as i64;
const TOKENS: i64 = u32::MAX as i64;

/// The document.
pub(crate) fn document() -> Value {
    let mut paths = Map::new();
    for (path, operation) in posts() {
        paths.insert(path.to_owned(), json!({ "post": operation }));
    }
    for (path, summary) in GETS {
        let content = match *path {
            "/metrics" => json!({ "application/openmetrics-text": {} }),
            _ => json!({ "application/json": {} }),
        };
        let responses = json!({ "200": { "description": "The answer.", "content": content } });
        let get = json!({ "summary": summary, "responses": responses });
        paths.insert((*path).to_owned(), json!({ "get": get }));
    }
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "bodkin",
            "version": env!("CARGO_PKG_VERSION"),
            "description": "Language models over HTTP: the interfaces of OpenAI, llama-server, \
                            Ollama and Anthropic. Unknown fields are ignored, and null is as good \
                            as absent.",
        },
        "paths": paths,
        "components": {
            "schemas": { "Message": message(), "Input": texts() },
            "securitySchemes": { "bearer": { "type": "http", "scheme": "bearer" } },
        },
        "security": [{ "bearer": [] }, {}],
    })
}

const GETS: &[(&str, &str)] = &[
    ("/health", "Whether the models answer"),
    ("/v1/models", "All models (OpenAI)"),
    ("/props", "What the server runs (llama-server)"),
    ("/slots", "The places for requests (llama-server)"),
    ("/metrics", "Prometheus metrics"),
    ("/api/version", "The version (Ollama)"),
    ("/api/tags", "All models (Ollama)"),
    ("/api/ps", "The loaded models (Ollama)"),
];

fn posts() -> Vec<(&'static str, Value)> {
    let one = || integer(1, TOKENS);
    let chat = with_sampling(json!({
        "messages": messages(),
        "max_completion_tokens": one(),
        "max_tokens": one(),
        "n": integer(1, 64),
        "logprobs": boolean(),
        "top_logprobs": integer(0, 20),
        "stream": boolean(),
        "stream_options": stream_options(),
        "chat_template_kwargs": object(),
        "reasoning_format": text(),
        "continue_final_message": boolean(),
    }));
    let completions = with_sampling(json!({
        "prompt": prompt(),
        "max_tokens": one(),
        "n": integer(1, 64),
        "logprobs": integer(0, 20),
        "echo": boolean(),
        "stream": boolean(),
        "stream_options": stream_options(),
    }));
    let responses = with_sampling(json!({
        "input": { "oneOf": [{ "type": "string" }, messages()] },
        "instructions": text(),
        "max_output_tokens": one(),
        "metadata": object(),
        "stream": boolean(),
    }));
    let completion = with_sampling(json!({
        "prompt": prompt(),
        "n_predict": integer(-2, TOKENS),
        "n_probs": integer(0, 100),
        "return_tokens": boolean(),
        "stream": boolean(),
    }));
    let embeddings = json!({
        "input": { "$ref": "#/components/schemas/Input" },
        "encoding_format": { "enum": ["float", "base64", null] },
        "dimensions": one(),
    });
    let options = with_sampling(json!({ "num_predict": integer(-2, TOKENS) }));
    let options = json!({ "type": ["object", "null"], "properties": options });
    let generate = json!({
        "prompt": text(),
        "system": text(),
        "raw": boolean(),
        "stream": boolean(),
        "think": boolean(),
        "keep_alive": { "type": ["string", "number", "null"] },
        "options": options,
    });
    let ollama_chat = json!({
        "messages": messages(),
        "stream": boolean(),
        "think": boolean(),
        "keep_alive": { "type": ["string", "number", "null"] },
        "options": options,
    });
    let anthropic = json!({
        "messages": messages(),
        "system": text(),
        "max_tokens": one(),
        "stop_sequences": { "type": "array", "items": { "type": "string" }, "maxItems": 16 },
        "stream": boolean(),
        "temperature": number(0.0, 100.0),
        "top_p": number(0.0, 1.0),
        "top_k": integer(0, LARGE),
    });
    let tokenize = json!({
        "content": text(),
        "add_special": boolean(),
        "parse_special": boolean(),
        "with_pieces": boolean(),
    });
    let ids = json!({ "type": "array", "items": { "type": "integer", "minimum": 0 } });
    let sse = "text/event-stream";
    let lines = "application/x-ndjson";
    vec![
        ("/v1/chat/completions", post("Answer a conversation (OpenAI)", &["messages"], chat, sse)),
        ("/v1/completions", post("Continue a prompt (OpenAI)", &["prompt"], completions, sse)),
        ("/v1/responses", post("Answer an input (OpenAI)", &["input"], responses, sse)),
        (
            "/v1/embeddings",
            post("Embed texts with an encoder (OpenAI)", &["input"], embeddings.clone(), ""),
        ),
        ("/completion", post("Continue a prompt (llama-server)", &["prompt"], completion, sse)),
        ("/tokenize", post("Token ids of a text (llama-server)", &[], tokenize, "")),
        (
            "/detokenize",
            post("The text of token ids (llama-server)", &[], json!({ "tokens": ids }), ""),
        ),
        (
            "/apply-template",
            post(
                "The prompt of a conversation (llama-server)",
                &["messages"],
                json!({ "messages": messages() }),
                "",
            ),
        ),
        ("/api/show", post("One model (Ollama)", &["model"], json!({}), "")),
        ("/api/generate", post("Answer a prompt (Ollama)", &["model"], generate, lines)),
        ("/api/chat", post("Answer a conversation (Ollama)", &["model"], ollama_chat, lines)),
        (
            "/api/embed",
            post("Embed texts with an encoder (Ollama)", &["model", "input"], embeddings, ""),
        ),
        (
            "/api/pull",
            post(
                "Fetch a model that the server was started with (Ollama)",
                &["model"],
                json!({ "stream": boolean() }),
                lines,
            ),
        ),
        ("/v1/messages", post("Answer a conversation (Anthropic)", &["messages"], anthropic, sse)),
        (
            "/v1/messages/count_tokens",
            post(
                "Count the tokens of a conversation (Anthropic)",
                &["messages"],
                json!({ "messages": messages(), "system": text() }),
                "",
            ),
        ),
    ]
}

/// An operation whose body has these fields, and which may stream in another format.
fn post(summary: &str, required: &[&str], mut fields: Value, stream: &str) -> Value {
    fields["model"] = text();
    let mut content = json!({ "application/json": {} });
    if !stream.is_empty() {
        content[stream] = json!({});
    }
    let schema = json!({ "type": "object", "required": required, "properties": fields });
    let mut responses = json!({ "200": { "description": "The answer.", "content": content } });
    for status in ["400", "401", "403", "404", "413", "429", "503"] {
        let error = json!({ "application/json": {} });
        let description = "The request is refused; the body says why.";
        responses[status] = json!({ "description": description, "content": error });
    }
    json!({
        "summary": summary,
        "requestBody": { "required": true, "content": { "application/json": { "schema": schema } } },
        "responses": responses,
    })
}

/// The fields about sampling, added to others.
fn with_sampling(mut fields: Value) -> Value {
    let sampling = json!({
        "temperature": number(0.0, 100.0),
        "top_k": integer(-LARGE, LARGE),
        "top_p": number(0.0, 1.0),
        "min_p": number(0.0, 1.0),
        "typical_p": number(0.0, 1.0),
        "frequency_penalty": number(-100.0, 100.0),
        "presence_penalty": number(-100.0, 100.0),
        "repeat_penalty": number(0.01, 100.0),
        "repeat_last_n": integer(-1, LARGE),
        "dry_multiplier": number(0.0, 1e6),
        "dry_base": number(0.0, 1e6),
        "dry_allowed_length": integer(0, LARGE),
        "xtc_probability": number(0.0, 1.0),
        "xtc_threshold": number(0.0, 1.0),
        "mirostat": integer(0, 2),
        "mirostat_tau": number(0.0, 1e6),
        "mirostat_eta": number(0.0, 1e6),
        "seed": integer(i64::MIN, i64::MAX),
        "logit_bias": { "type": ["object", "null"], "additionalProperties": number(-100.0, 100.0) },
        "stop": { "type": ["string", "array", "null"], "items": { "type": "string" }, "maxItems": 64 },
        "ignore_eos": boolean(),
    });
    for (name, schema) in sampling.as_object().into_iter().flatten() {
        fields[name] = schema.clone();
    }
    fields
}

fn integer(least: i64, most: i64) -> Value {
    json!({ "type": ["integer", "null"], "minimum": least, "maximum": most })
}

fn number(least: f64, most: f64) -> Value {
    json!({ "type": ["number", "null"], "minimum": least, "maximum": most })
}

fn boolean() -> Value {
    json!({ "type": ["boolean", "null"] })
}

fn text() -> Value {
    json!({ "type": ["string", "null"] })
}

fn object() -> Value {
    json!({ "type": ["object", "null"] })
}

fn stream_options() -> Value {
    json!({ "type": ["object", "null"], "properties": { "include_usage": boolean() } })
}

/// A text or token ids.
fn prompt() -> Value {
    json!({ "type": ["string", "array"], "items": { "type": "integer", "minimum": 0 } })
}

/// A text, several texts, or token ids.
fn texts() -> Value {
    json!({
        "type": ["string", "array"],
        "minItems": 1,
        "minLength": 1,
        "items": { "type": ["string", "integer"], "minLength": 1, "minimum": 0 },
    })
}

fn messages() -> Value {
    let item = json!({ "$ref": "#/components/schemas/Message" });
    json!({ "type": "array", "minItems": 1, "items": item })
}

fn message() -> Value {
    let part = json!({
        "type": "object",
        "required": ["type", "text"],
        "properties": { "type": { "const": "text" }, "text": { "type": "string" } },
    });
    json!({
        "type": "object",
        "required": ["role", "content"],
        "properties": {
            "role": { "enum": ["system", "user", "assistant"] },
            "content": { "type": ["string", "array"], "items": part },
        },
    })
}
