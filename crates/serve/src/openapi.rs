//! The OpenAPI document of all paths: what fields there are, their types and ranges.

mod types;

use serde_json::{Map, Value, json};

use types::{
    TOKENS, boolean, constraints, format, input, integer, json_schema, keep_alive, limit, message,
    messages, number, object, prompt, schema, stop, stream_options, text, texts, tool_list, tools,
};

/// The largest numbers of fields without a natural end.
const LARGE: i64 = i32::MAX as i64;

/// The document.
pub(crate) fn document() -> Value {
    let mut paths = Map::new();
    for (path, summary, required, stream, fields) in POSTS {
        let operation = post(summary, required, fields(), stream);
        paths.insert((*path).to_owned(), json!({ "post": operation }));
    }
    for (path, summary, content) in GETS {
        let mut operation = json!({ "summary": summary, "responses": answer(content) });
        if path.contains("{id}") {
            let id = json!({ "name": "id", "in": "path", "required": true, "schema": text() });
            operation["parameters"] = json!([id]);
        }
        if let Some((_, names)) = PARAMETERS.iter().find(|(of, _)| of == path) {
            let parameter = |name| json!({ "name": name, "in": "query", "schema": text() });
            operation["parameters"] = names.iter().map(parameter).collect();
        }
        paths.insert((*path).to_owned(), json!({ "get": operation }));
    }
    let refused = json!({ "403": { "description": "Models are not deleted for a client." } });
    let delete = json!({ "summary": "Refused (Ollama)", "responses": refused });
    paths.insert("/api/delete".to_owned(), json!({ "delete": delete }));
    for (alias, path) in ALIASES {
        paths.insert((*alias).to_owned(), paths[*path].clone());
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

/// Other paths of the same operations.
const ALIASES: &[(&str, &str)] = &[
    ("/v1/health", "/health"),
    ("/models", "/v1/models"),
    ("/chat/completions", "/v1/chat/completions"),
    ("/chat/completions/input_tokens", "/v1/chat/completions/input_tokens"),
    ("/responses", "/v1/responses"),
    ("/responses/input_tokens", "/v1/responses/input_tokens"),
    ("/completions", "/completion"),
    ("/embeddings", "/embedding"),
    ("/rerank", "/v1/rerank"),
    ("/reranking", "/v1/rerank"),
    ("/v1/reranking", "/v1/rerank"),
];

/// The GET operations: their paths, what they return, and its formats.
const GETS: &[(&str, &str, &[&str])] = &[
    ("/", "That the server runs (Ollama)", &["text/plain"]),
    ("/health", "Whether the models answer", JSON),
    ("/v1/models", "All models (OpenAI)", JSON),
    ("/v1/models/{id}", "One model (OpenAI)", JSON),
    ("/openapi.json", "This document", JSON),
    ("/props", "What the server runs (llama-server)", JSON),
    ("/slots", "The places for requests (llama-server)", JSON),
    ("/metrics", "Prometheus metrics", &["text/plain", "application/openmetrics-text"]),
    ("/api/version", "The version (Ollama)", JSON),
    ("/api/tags", "All models (Ollama)", JSON),
    ("/api/ps", "The loaded models (Ollama)", JSON),
];

/// Parameters in the queries of GET operations.
const PARAMETERS: &[(&str, &[&str])] =
    &[("/props", &["model"]), ("/slots", &["model", "fail_on_no_slot"])];

/// The POST operations: their paths, what they do, the fields that must be there, the format in
/// which they may stream, and all fields.
type Post = (&'static str, &'static str, &'static [&'static str], &'static str, fn() -> Value);

const POSTS: &[Post] = &[
    ("/v1/chat/completions", "Answer a conversation (OpenAI)", &["messages"], SSE, chat),
    ("/v1/completions", "Continue a prompt (OpenAI)", &["prompt"], SSE, completions),
    ("/v1/responses", "Answer an input (OpenAI)", &["input"], SSE, responses),
    ("/v1/chat/completions/input_tokens", "Count tokens", &["messages"], "", template),
    ("/v1/responses/input_tokens", "Count tokens (OpenAI)", &["input"], "", responses_input),
    ("/v1/embeddings", "Embed texts (OpenAI)", &["input"], "", embeddings),
    ("/embedding", "Embed texts (llama-server)", &[], "", llama_embeddings),
    ("/v1/rerank", "Score documents (Jina)", &["query", "documents"], "", rerank),
    ("/completion", "Continue a prompt (llama-server)", &["prompt"], SSE, completion),
    ("/tokenize", "Token ids of a text (llama-server)", &[], "", tokenize),
    ("/detokenize", "The text of token ids (llama-server)", &[], "", detokenize),
    (
        "/apply-template",
        "The prompt of a conversation (llama-server)",
        &["messages"],
        "",
        apply_template,
    ),
    (
        "/api/show",
        "One model (Ollama)",
        &[],
        "",
        || json!({ "name": text(), "keep_alive": keep_alive() }),
    ),
    ("/api/generate", "Answer a prompt (Ollama)", &[], LINES, ollama_generate),
    ("/api/chat", "Answer a conversation (Ollama)", &[], LINES, ollama_chat),
    ("/api/embed", "Embed texts (Ollama)", &["input"], "", ollama_embed),
    (
        "/api/embeddings",
        "Embed a text, with a vector of any length (Ollama)",
        &["prompt"],
        "",
        ollama_embed_one,
    ),
    (
        "/api/pull",
        "Fetch a model of the server (Ollama)",
        &[],
        LINES,
        || json!({ "name": text(), "stream": boolean() }),
    ),
    ("/v1/messages", "Answer a conversation (Anthropic)", &["messages"], SSE, anthropic),
    (
        "/v1/messages/count_tokens",
        "Count tokens (Anthropic)",
        &["messages"],
        "",
        anthropic_messages,
    ),
];

const JSON: &[&str] = &["application/json"];
const SSE: &str = "text/event-stream";
const LINES: &str = "application/x-ndjson";

fn chat() -> Value {
    let mut fields = template();
    let own = json!({
        "max_completion_tokens": limit(),
        "max_tokens": limit(),
        "n_predict": limit(),
        "n": integer(1, 64),
        "logprobs": boolean(),
        "top_logprobs": integer(0, 20),
        "stream": boolean(),
        "stream_options": stream_options(),
        "reasoning_format": text(),
        "modalities": { "type": ["array", "null"], "items": { "const": "text" } },
    });
    add(&mut fields, own);
    add(&mut fields, constraints());
    add(&mut fields, tools());
    with_reports(fields)
}

fn completions() -> Value {
    let mut fields = json!({
        "prompt": prompt(),
        "max_tokens": integer(-2, TOKENS),
        "n_predict": integer(-2, TOKENS),
        "n": integer(1, 64),
        "best_of": integer(1, 64),
        "logprobs": integer(0, 20),
        "echo": boolean(),
        "stream": boolean(),
        "stream_options": stream_options(),
    });
    add(&mut fields, constraints());
    with_reports(fields)
}

/// An input, from which an answer's tokens can be counted, too.
fn responses_input() -> Value {
    json!({
        "input": { "oneOf": [{ "type": "string" }, messages()] },
        "instructions": text(),
        "reasoning": { "type": ["object", "null"], "properties": { "effort": text() } },
    })
}

fn responses() -> Value {
    let mut fields = responses_input();
    let own = json!({
        "max_output_tokens": limit(),
        "text": { "type": ["object", "null"], "properties": { "format": format("schema") } },
        "metadata": object(),
        "truncation": { "enum": ["disabled", null] },
        "top_logprobs": integer(0, 0),
        "include": { "type": ["array", "null"], "maxItems": 0 },
        "stream": boolean(),
    });
    add(&mut fields, own);
    add(&mut fields, tools());
    with_reports(fields)
}

fn completion() -> Value {
    with_reports(json!({
        "prompt": prompt(),
        "n_predict": integer(-2, TOKENS),
        "max_tokens": integer(-2, TOKENS),
        "n_probs": integer(0, 100),
        "json_schema": json_schema(),
        "grammar": text(),
        "return_tokens": boolean(),
        "response_fields": { "type": ["array", "null"], "items": { "type": "string" } },
        "stream": boolean(),
    }))
}

fn embeddings() -> Value {
    json!({
        "input": input(),
        "encoding_format": { "enum": ["float", "base64", null] },
        "dimensions": integer(1, TOKENS),
    })
}

fn llama_embeddings() -> Value {
    json!({ "input": input(), "content": input(), "embd_normalize": integer(-1, 2) })
}

fn rerank() -> Value {
    json!({
        "query": text(),
        "documents": { "type": "array", "minItems": 1, "items": { "type": "string" } },
        "top_n": integer(0, TOKENS),
        "return_documents": boolean(),
    })
}

fn ollama_embed() -> Value {
    json!({
        "input": input(),
        "truncate": boolean(),
        "dimensions": integer(1, TOKENS),
        "name": text(),
        "keep_alive": keep_alive(),
    })
}

fn ollama_embed_one() -> Value {
    json!({ "prompt": text(), "name": text(), "keep_alive": keep_alive() })
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

/// The fields of a conversation.
fn template() -> Value {
    json!({
        "messages": messages(),
        "chat_template_kwargs": object(),
        "continue_final_message": boolean(),
        "add_generation_prompt": boolean(),
        "reasoning_effort": text(),
    })
}

fn apply_template() -> Value {
    let mut fields = template();
    fields["tools"] = tool_list();
    fields
}

fn ollama_generate() -> Value {
    with_ollama(json!({ "prompt": text(), "system": text(), "raw": boolean() }))
}

fn ollama_chat() -> Value {
    let mut fields = with_ollama(template());
    fields["messages"] = json!({ "type": "array", "items": schema("Message") });
    fields["tools"] = tool_list();
    fields
}

/// The fields that both of Ollama's generating paths have, added to others.
fn with_ollama(mut fields: Value) -> Value {
    let options = with_sampling(json!({
        "num_predict": integer(-2, TOKENS),
        "num_ctx": integer(1, LARGE),
        "num_keep": integer(-1, LARGE),
        "num_batch": integer(1, LARGE),
        "num_gpu": integer(-1, LARGE),
        "num_thread": integer(0, LARGE),
        "use_mmap": boolean(),
    }));
    fields["options"] = json!({ "type": ["object", "null"], "properties": options });
    fields["keep_alive"] = keep_alive();
    fields["name"] = text();
    fields["stream"] = boolean();
    fields["logprobs"] = boolean();
    fields["top_logprobs"] = integer(0, 20);
    fields["format"] = json!({ "type": ["string", "object", "null"] });
    fields["think"] = json!({ "type": ["boolean", "string", "null"] });
    fields
}

/// The fields of Anthropic's conversations.
fn anthropic_messages() -> Value {
    let kind = json!({ "enum": ["enabled", "adaptive", "disabled", null] });
    let thinking = json!({ "type": ["object", "null"], "properties": { "type": kind } });
    json!({
        "messages": messages(),
        "system": { "type": ["string", "array", "null"], "items": { "type": "object" } },
        "thinking": thinking,
        "tools": tool_list(),
        "tool_choice": object(),
        "output_config": {
            "type": ["object", "null"],
            "properties": { "effort": text(), "format": format("schema") },
        },
    })
}

fn anthropic() -> Value {
    let mut fields = anthropic_messages();
    let own = json!({
        "max_tokens": limit(),
        "output_format": format("schema"),
        "stop_sequences": { "type": ["string", "array", "null"], "items": { "type": "string" } },
        "stream": boolean(),
    });
    add(&mut fields, own);
    with_sampling(fields)
}

/// An operation whose body has these fields, and which may stream in another format.
fn post(summary: &str, required: &[&str], mut fields: Value, stream: &str) -> Value {
    fields["model"] = text();
    let formats = [JSON[0], stream];
    let formats = if stream.is_empty() { &formats[..1] } else { &formats };
    let schema = json!({ "type": "object", "required": required, "properties": fields });
    let body = json!({ "application/json": { "schema": schema } });
    let mut responses = answer(formats);
    for status in ["400", "401", "403", "404", "408", "413", "429", "500", "503"] {
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

/// The response with an answer in one of these formats.
fn answer(formats: &[&str]) -> Value {
    let content: Map<String, Value> =
        formats.iter().map(|format| ((*format).to_owned(), json!({}))).collect();
    json!({ "200": { "description": "The answer.", "content": content } })
}

/// Adds fields to others.
fn add(fields: &mut Value, others: Value) {
    if let (Value::Object(fields), Value::Object(others)) = (fields, others) {
        fields.extend(others);
    }
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
        "top_n_sigma": number(-1e6, 1e6),
        "frequency_penalty": number(-100.0, 100.0),
        "presence_penalty": number(-100.0, 100.0),
        "repeat_penalty": number(0.01, 100.0),
        "repetition_penalty": number(0.01, 100.0),
        "repeat_last_n": integer(-1, LARGE),
        "dry_multiplier": number(0.0, 1e6),
        "dry_base": number(0.0, 1e6),
        "dry_allowed_length": integer(0, LARGE),
        "dry_penalty_last_n": integer(-1, LARGE),
        "dry_sequence_breakers": stop(TOKENS),
        "xtc_probability": number(0.0, 1.0),
        "xtc_threshold": number(0.0, 1.0),
        "mirostat": integer(0, 2),
        "mirostat_tau": number(0.0, 1e6),
        "mirostat_eta": number(0.0, 1e6),
        "min_keep": integer(0, TOKENS),
        "seed": integer(i64::MIN, i64::MAX),
        "logit_bias": {
            "type": ["object", "array", "null"],
            "additionalProperties": number(-100.0, 100.0),
            "items": { "type": "array", "minItems": 2, "maxItems": 2 },
        },
        "stop": stop(64),
        "ignore_eos": boolean(),
    });
    add(&mut fields, sampling);
    fields
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn the_document_has_the_routes_of_the_router_and_no_others() {
        // A router does not list its routes, and each stands on a line of its own.
        let lines = include_str!("router.rs").lines();
        let routes = lines.filter_map(|line| line.trim().strip_prefix(".route(\""));
        let routes: BTreeSet<(String, String)> = routes
            .map(|rest| {
                let (path, rest) = rest.split_once("\", ").unwrap();
                let method = rest.split('(').next().unwrap();
                (path.replace("{*", "{"), method.to_owned())
            })
            .collect();
        let document = document();
        let paths = document["paths"].as_object().unwrap().iter();
        let documented: BTreeSet<(String, String)> = paths
            .flat_map(|(path, item)| {
                item.as_object().unwrap().keys().map(|method| (path.clone(), method.clone()))
            })
            .collect();
        assert!(routes.len() > 30, "{routes:?}");
        assert_eq!(routes, documented);
    }
}
