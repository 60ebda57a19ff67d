//! The OpenAPI document of all paths: what fields there are, their types and ranges.

use serde_json::{Map, Value, json};

/// The largest numbers of fields without a natural end.
const LARGE: i64 = i32::MAX as i64;
const TOKENS: i64 = u32::MAX as i64;

/// The document.
pub(crate) fn document() -> Value {
    let mut paths = Map::new();
    for (path, summary, required, stream, fields) in POSTS {
        let operation = post(summary, required, fields(), stream);
        paths.insert((*path).to_owned(), json!({ "post": operation }));
    }
    for (path, summary) in GETS {
        let content = match *path {
            "/metrics" => json!({ "text/plain": {}, "application/openmetrics-text": {} }),
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

/// The POST operations: their paths, what they do, the fields that must be there, the format in
/// which they may stream, and all fields.
type Post = (&'static str, &'static str, &'static [&'static str], &'static str, fn() -> Value);

const POSTS: &[Post] = &[
    ("/v1/chat/completions", "Answer a conversation (OpenAI)", &["messages"], SSE, chat),
    ("/v1/completions", "Continue a prompt (OpenAI)", &["prompt"], SSE, completions),
    ("/v1/responses", "Answer an input (OpenAI)", &["input"], SSE, responses),
    ("/v1/chat/completions/input_tokens", "Count tokens", &["messages"], "", template),
    ("/v1/responses/input_tokens", "Count tokens (OpenAI)", &["input"], "", responses),
    ("/v1/embeddings", "Embed texts with an encoder (OpenAI)", &["input"], "", embeddings),
    ("/embedding", "Embed texts with an encoder (llama-server)", &["input"], "", embeddings),
    ("/completion", "Continue a prompt (llama-server)", &["prompt"], SSE, completion),
    ("/tokenize", "Token ids of a text (llama-server)", &[], "", tokenize),
    ("/detokenize", "The text of token ids (llama-server)", &[], "", detokenize),
    ("/apply-template", "The prompt of a conversation (llama-server)", &["messages"], "", template),
    ("/api/show", "One model (Ollama)", &["model"], "", || json!({})),
    ("/api/generate", "Answer a prompt (Ollama)", &["model"], LINES, ollama_generate),
    ("/api/chat", "Answer a conversation (Ollama)", &["model"], LINES, ollama_chat),
    ("/api/embed", "Embed texts with an encoder (Ollama)", &["model", "input"], "", embeddings),
    (
        "/api/pull",
        "Fetch a model of the server (Ollama)",
        &["model"],
        LINES,
        || json!({ "stream": boolean() }),
    ),
    ("/v1/messages", "Answer a conversation (Anthropic)", &["messages"], SSE, anthropic),
    ("/v1/messages/count_tokens", "Count tokens (Anthropic)", &["messages"], "", anthropic),
];

const SSE: &str = "text/event-stream";
const LINES: &str = "application/x-ndjson";

fn chat() -> Value {
    with_reports(json!({
        "messages": messages(),
        "max_completion_tokens": integer(1, TOKENS),
        "max_tokens": integer(1, TOKENS),
        "n": integer(1, 64),
        "logprobs": boolean(),
        "top_logprobs": integer(0, 20),
        "stream": boolean(),
        "stream_options": stream_options(),
        "chat_template_kwargs": object(),
        "reasoning_format": text(),
        "continue_final_message": boolean(),
    }))
}

fn completions() -> Value {
    with_reports(json!({
        "prompt": prompt(),
        "max_tokens": integer(1, TOKENS),
        "n": integer(1, 64),
        "logprobs": integer(0, 20),
        "echo": boolean(),
        "stream": boolean(),
        "stream_options": stream_options(),
    }))
}

fn responses() -> Value {
    with_sampling(json!({
        "input": { "oneOf": [{ "type": "string" }, messages()] },
        "instructions": text(),
        "max_output_tokens": integer(1, TOKENS),
        "metadata": object(),
        "stream": boolean(),
    }))
}

fn completion() -> Value {
    with_reports(json!({
        "prompt": prompt(),
        "n_predict": integer(-2, TOKENS),
        "n_probs": integer(0, 100),
        "return_tokens": boolean(),
        "stream": boolean(),
    }))
}

fn embeddings() -> Value {
    json!({
        "input": { "$ref": "#/components/schemas/Input" },
        "encoding_format": { "enum": ["float", "base64", null] },
        "dimensions": integer(1, TOKENS),
    })
}

fn tokenize() -> Value {
    json!({
        "content": text(),
        "add_special": boolean(),
        "parse_special": boolean(),
        "with_pieces": boolean(),
    })
}

fn detokenize() -> Value {
    json!({ "tokens": { "type": "array", "items": { "type": "integer", "minimum": 0 } } })
}

fn template() -> Value {
    json!({ "messages": messages() })
}

fn ollama_generate() -> Value {
    with_ollama(json!({ "prompt": text(), "system": text(), "raw": boolean() }))
}

fn ollama_chat() -> Value {
    with_ollama(json!({ "messages": messages() }))
}

/// The fields that both of Ollama's generating paths have, added to others.
fn with_ollama(mut fields: Value) -> Value {
    let options = with_sampling(json!({ "num_predict": integer(-2, TOKENS) }));
    fields["options"] = json!({ "type": ["object", "null"], "properties": options });
    fields["keep_alive"] = json!({ "type": ["string", "number", "null"] });
    fields["stream"] = boolean();
    fields["think"] = boolean();
    fields
}

fn anthropic() -> Value {
    json!({
        "messages": messages(),
        "system": text(),
        "max_tokens": integer(1, TOKENS),
        "stop_sequences": { "type": "array", "items": { "type": "string" }, "maxItems": 16 },
        "stream": boolean(),
        "temperature": number(0.0, 100.0),
        "top_p": number(0.0, 1.0),
        "top_k": integer(0, LARGE),
    })
}

/// An operation whose body has these fields, and which may stream in another format.
fn post(summary: &str, required: &[&str], mut fields: Value, stream: &str) -> Value {
    fields["model"] = text();
    let mut content = json!({ "application/json": {} });
    if !stream.is_empty() {
        content[stream] = json!({});
    }
    let schema = json!({ "type": "object", "required": required, "properties": fields });
    let body = json!({ "application/json": { "schema": schema } });
    let mut responses = json!({ "200": { "description": "The answer.", "content": content } });
    for status in ["400", "401", "403", "404", "413", "429", "503"] {
        let error = json!({ "application/json": {} });
        let description = "The request is refused; the body says why.";
        responses[status] = json!({ "description": description, "content": error });
    }
    json!({
        "summary": summary,
        "requestBody": { "required": true, "content": body },
        "responses": responses,
    })
}

/// The fields about sampling and about what streams report, added to others.
fn with_reports(mut fields: Value) -> Value {
    fields["return_progress"] = boolean();
    fields["timings_per_token"] = boolean();
    with_sampling(fields)
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
        "stop": {
            "type": ["string", "array", "null"],
            "items": { "type": "string" },
            "maxItems": 64,
        },
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

/// A text, several texts, or token ids.
fn prompt() -> Value {
    json!({
        "type": ["string", "array"],
        "minItems": 1,
        "maxItems": 256,
        "items": { "type": ["string", "integer"], "minimum": 0 },
    })
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
