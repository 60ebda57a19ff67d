//! Embeddings of texts, as OpenAI's and Ollama's clients ask for them. Models are encoders; vectors
//! have length 1.

use std::sync::Arc;
use std::time::Instant;

use axum::Extension;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use bodkin::Error as RuntimeError;
use bodkin_engine::Error as EngineError;
use serde_json::{Map, Value, json};
use tokio::task::spawn_blocking;

use crate::app::SharedApp;
use crate::auth::Caller;
use crate::error::{ApiError, Result};
use crate::fields::{Fields, Json, float};
use crate::generate::TokenCounter;
use crate::models::{Kind, Lease, Turn};
use crate::ollama;

/// The most texts of a request.
const TEXTS: usize = 4096;

/// What to embed.
enum Input {
    Text(String),
    Tokens(Vec<u32>),
}

/// The vectors of a request, and the tokens of all its texts.
struct Embedded {
    vectors: Vec<Vec<f32>>,
    tokens: usize,
}

/// OpenAI's form.
pub(crate) async fn openai(
    State(app): State<SharedApp>,
    Extension(caller): Extension<Caller>,
    mut fields: Fields,
) -> Result<Response> {
    let lease = app.model(fields.string("model")?.as_deref()).await?;
    let inputs = inputs(&mut fields, "input")?;
    let dimensions = fields.count("dimensions", 1)?;
    let format = fields.string("encoding_format")?;
    let is_base64 = match format.as_deref() {
        None | Some("float") => false,
        Some("base64") => true,
        Some(_) => {
            let message = "encoding_format: expected float or base64";
            return Err(ApiError::field("encoding_format", message));
        }
    };
    let id = lease.id().to_owned();
    let Embedded { vectors, tokens } = embed(&app, caller, lease, inputs, dimensions).await?;
    let data = vectors.iter().enumerate().map(|(index, vector)| {
        let embedding: Value = match is_base64 {
            true => {
                let bytes: Vec<u8> = vector.iter().flat_map(|x| x.to_le_bytes()).collect();
                BASE64_STANDARD.encode(bytes).into()
            }
            false => numbers(vector),
        };
        json!({ "object": "embedding", "index": index, "embedding": embedding })
    });
    Ok(Json(json!({
        "object": "list",
        "data": data.collect::<Value>(),
        "model": id,
        "usage": { "prompt_tokens": tokens, "total_tokens": tokens },
    }))
    .into_response())
}

/// llama-server's form: each embedding is an array of vectors, here of one.
pub(crate) async fn llama(
    State(app): State<SharedApp>,
    Extension(caller): Extension<Caller>,
    mut fields: Fields,
) -> Result<Response> {
    let lease = app.model(fields.string("model")?.as_deref()).await?;
    let name = if fields.has("input") { "input" } else { "content" };
    let inputs = inputs(&mut fields, name)?;
    if fields.integer("embd_normalize", i64::MIN..=i64::MAX)?.is_some_and(|norm| norm != 2) {
        let message = "embd_normalize: expected 2: vectors have length 1";
        return Err(ApiError::field("embd_normalize", message));
    }
    let embedded = embed(&app, caller, lease, inputs, None).await?;
    let vectors = embedded.vectors.iter().enumerate();
    let vectors = vectors.map(|(index, v)| json!({ "index": index, "embedding": [numbers(v)] }));
    Ok(Json(vectors.collect::<Value>()).into_response())
}

/// Ollama's form for several texts.
pub(crate) async fn ollama(
    State(app): State<SharedApp>,
    Extension(caller): Extension<Caller>,
    mut fields: Fields,
) -> Result<Response> {
    let started = Instant::now();
    let lease = ollama::model(&app, &mut fields).await?;
    let inputs = inputs(&mut fields, "input")?;
    let dimensions = fields.count("dimensions", 1)?;
    let (id, load) = (lease.id().to_owned(), lease.load_time);
    let Embedded { vectors, tokens } = embed(&app, caller, lease, inputs, dimensions).await?;
    Ok(Json(json!({
        "model": id,
        "embeddings": vectors.iter().map(|vector| numbers(vector)).collect::<Value>(),
        "total_duration": started.elapsed().as_nanos() as u64,
        "load_duration": load.as_nanos() as u64,
        "prompt_eval_count": tokens,
    }))
    .into_response())
}

/// Ollama's older form for one text.
pub(crate) async fn ollama_one(
    State(app): State<SharedApp>,
    Extension(caller): Extension<Caller>,
    mut fields: Fields,
) -> Result<Response> {
    let lease = ollama::model(&app, &mut fields).await?;
    let text = fields.string("prompt")?.unwrap_or_default();
    let embedded = embed(&app, caller, lease, vec![Input::Text(text)], None).await?;
    let vector = embedded.vectors.first().map(|vector| numbers(vector));
    Ok(Json(json!({ "embedding": vector })).into_response())
}

/// A vector as JSON.
fn numbers(vector: &[f32]) -> Value {
    vector.iter().map(|&x| float(x)).collect()
}

/// A text, token ids, an object with a text as llama-server takes it, or an array of these.
fn inputs(fields: &mut Fields, name: &str) -> Result<Vec<Input>> {
    let expected = "a text, token ids, or an array of these";
    let Some(value) = fields.take(name) else {
        return Err(ApiError::field(name, format!("{name}: expected {expected}, found none")));
    };
    let wrong = |value: &Value| fields.mismatch(name, expected, value);
    let tokens = |values: &[Value]| {
        let id =
            |v: &Value| v.as_u64().and_then(|id| u32::try_from(id).ok()).ok_or_else(|| wrong(v));
        Ok(Input::Tokens(values.iter().map(id).collect::<Result<_>>()?))
    };
    let inputs = match value {
        Value::String(text) => vec![Input::Text(text)],
        Value::Array(values) if values.first().is_some_and(Value::is_number) => {
            vec![tokens(&values)?]
        }
        Value::Array(values) => {
            let one = |value: Value| match value {
                Value::String(text) => Ok(Input::Text(text)),
                Value::Array(values) => tokens(&values),
                Value::Object(map) => object(name, map),
                other => Err(wrong(&other)),
            };
            values.into_iter().map(one).collect::<Result<_>>()?
        }
        Value::Object(map) => vec![object(name, map)?],
        other => return Err(wrong(&other)),
    };
    let is_empty = |input: &Input| match input {
        Input::Text(text) => text.is_empty(),
        Input::Tokens(tokens) => tokens.is_empty(),
    };
    if let Some(i) = inputs.iter().position(is_empty) {
        return Err(ApiError::field(name, format!("{name}[{i}]: expected a text, found none")));
    }
    match inputs.len() {
        1..=TEXTS => Ok(inputs),
        n => {
            let message = format!("{name}: expected 1 to {TEXTS} texts, found {n}");
            Err(ApiError::field(name, message))
        }
    }
}

/// The text of an object: `prompt_string`, or `content` of parts, which are one text.
fn object(name: &str, map: Map<String, Value>) -> Result<Input> {
    let mut fields = Fields::within(name, map);
    if let Some(text) = fields.string("prompt_string")? {
        return Ok(Input::Text(text));
    }
    let parts = fields.array("content")?.unwrap_or_default();
    let mut text = String::new();
    for (i, part) in parts.iter().enumerate() {
        let Some(piece) = part["text"].as_str().filter(|_| part["type"] == "text") else {
            let at = format!("{}[{i}]", fields.field("content"));
            return Err(ApiError::field(&at, format!("{at}: expected a part of type text")));
        };
        text.push_str(piece);
    }
    Ok(Input::Text(text))
}

/// Embeds texts when it is the turn of the request. Its tokens count against the limits of its key,
/// and a client that goes away ends it at the next step.
async fn embed(
    app: &SharedApp,
    caller: Caller,
    lease: Lease,
    inputs: Vec<Input>,
    dimensions: Option<usize>,
) -> Result<Embedded> {
    let Kind::Encoder(queue) = &lease.kind else {
        let message = format!("{} makes text and no embeddings", lease.id());
        return Err(ApiError::bad_request(message));
    };
    let turn = queue.turn().await?;
    let counter = app.token_counter(caller);
    let id = lease.id().to_owned();
    // Dropped with this future when the client goes away.
    let client = Arc::new(());
    let gone = Arc::downgrade(&client);
    let task = spawn_blocking(move || {
        let _lease = lease;
        compute(turn, inputs, dimensions, &counter, &|| gone.strong_count() == 0)
    });
    let embedded = task.await;
    drop(client);
    let embedded =
        embedded.map_err(|_| ApiError::internal("computing the embeddings panicked"))??;
    app.metrics.embedded(&id, embedded.tokens);
    Ok(embedded)
}

/// Computes a request, or a part of it if `is_cancelled`.
fn compute(
    mut turn: Turn,
    inputs: Vec<Input>,
    dimensions: Option<usize>,
    counter: &TokenCounter,
    is_cancelled: &dyn Fn() -> bool,
) -> Result<Embedded> {
    let texts = inputs.into_iter().map(|input| match input {
        Input::Text(text) => Ok(turn.tokenize(&text)?),
        Input::Tokens(tokens) => Ok(tokens),
    });
    let texts = texts.collect::<Result<Vec<Vec<u32>>>>()?;
    let tokens = texts.iter().map(Vec::len).sum();
    counter(tokens);
    let progress = turn.progress();
    progress.admit(tokens);
    let ends = || {
        let ends = is_cancelled();
        if !ends {
            progress.begin_step();
        }
        ends
    };
    let mut vectors = Vec::with_capacity(texts.len());
    let computed = turn.embed_tokens_until(&texts, ends, |i, vector| {
        progress.add_rows(texts[i].len());
        vectors.push(vector.to_vec());
    });
    if let Err(RuntimeError::Engine { source, .. }) = &computed
        && matches!(**source, EngineError::Backend(_))
    {
        progress.fail(source.to_string());
    }
    computed?;
    if let Some(dimensions) = dimensions {
        vectors.iter_mut().try_for_each(|vector| shorten(vector, dimensions))?;
    }
    Ok(Embedded { vectors, tokens })
}

/// Cuts a vector to its first dimensions and scales it to length 1 again (Matryoshka).
fn shorten(vector: &mut Vec<f32>, dimensions: usize) -> Result<()> {
    if dimensions > vector.len() {
        let most = vector.len();
        let message = format!("dimensions: expected 1 to {most}, found {dimensions}");
        return Err(ApiError::field("dimensions", message));
    }
    vector.truncate(dimensions);
    let length = vector.iter().map(|x| x * x).sum::<f32>().sqrt();
    if length > 0.0 {
        vector.iter_mut().for_each(|x| *x /= length);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shortened_vectors_have_length_one() {
        let mut vector = vec![3.0, 4.0, 12.0];
        shorten(&mut vector, 2).unwrap();
        assert_eq!(vector, [0.6, 0.8]);
        assert!(shorten(&mut vector, 3).is_err());
    }
}
