//! Embeddings of texts, as the clients of OpenAI, llama-server and Ollama ask for them.

use std::time::Instant;

use axum::Extension;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use bodkin::{Canceller, EmbeddingOptions, Encoder};
use serde_json::{Map, Value, json};
use tokio::sync::oneshot;
use tokio::task::spawn_blocking;

use crate::app::SharedApp;
use crate::auth::Caller;
use crate::error::{ApiError, Result};
use crate::fields::{Fields, Json, float, form};
use crate::models::Lease;
use crate::ollama;

/// The most texts of a request.
const TEXTS: usize = 4096;

/// What to embed.
enum Input {
    Text(String),
    Tokens(Vec<u32>),
}

/// The vectors of a request, and the tokens of all its texts.
pub(crate) struct Embedded {
    pub(crate) vectors: Vec<Vec<f32>>,
    pub(crate) tokens: usize,
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
    let ask =
        |options: &mut EmbeddingOptions| options.dimensions = dimensions.or(options.dimensions);
    let Embedded { vectors, tokens } = embed(&app, caller, lease, inputs, ask).await?;
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
    Ok(form(count(&vectors), || {
        Json(json!({
            "object": "list",
            "data": data.collect::<Value>(),
            "model": id,
            "usage": { "prompt_tokens": tokens, "total_tokens": tokens },
        }))
        .into_response()
    }))
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
    let norm = fields.integer("embd_normalize", -1..=2)?;
    if norm.is_some_and(|norm| norm == 0 || norm == 1) {
        let message = "embd_normalize: expected 2 for vectors of length 1, or -1";
        return Err(ApiError::field("embd_normalize", message));
    }
    let ask = |options: &mut EmbeddingOptions| {
        options.normalize = norm.map_or(options.normalize, |norm| norm == 2);
    };
    let embedded = embed(&app, caller, lease, inputs, ask).await?;
    let vectors = embedded.vectors.iter().enumerate();
    let vectors = vectors.map(|(index, v)| json!({ "index": index, "embedding": [numbers(v)] }));
    let all = || Json(vectors.collect::<Value>()).into_response();
    Ok(form(count(&embedded.vectors), all))
}

/// Ollama's form for several texts. Long ones are cut unless `truncate` is false.
pub(crate) async fn ollama(
    State(app): State<SharedApp>,
    Extension(caller): Extension<Caller>,
    mut fields: Fields,
) -> Result<Response> {
    let started = Instant::now();
    let lease = ollama::model(&app, &mut fields).await?;
    let inputs = inputs(&mut fields, "input")?;
    let dimensions = fields.count("dimensions", 1)?;
    let truncate = fields.boolean("truncate")?.unwrap_or(true);
    let (id, load) = (lease.id().to_owned(), lease.waited);
    let ask = |options: &mut EmbeddingOptions| {
        options.dimensions = dimensions.or(options.dimensions);
        options.truncate = truncate;
    };
    let Embedded { vectors, tokens } = embed(&app, caller, lease, inputs, ask).await?;
    Ok(form(count(&vectors), || {
        Json(json!({
            "model": id,
            "embeddings": vectors.iter().map(|vector| numbers(vector)).collect::<Value>(),
            "total_duration": started.elapsed().as_nanos() as u64,
            "load_duration": load.as_nanos() as u64,
            "prompt_eval_count": tokens,
        }))
        .into_response()
    }))
}

/// Ollama's older form for one text, whose vector has any length.
pub(crate) async fn ollama_one(
    State(app): State<SharedApp>,
    Extension(caller): Extension<Caller>,
    mut fields: Fields,
) -> Result<Response> {
    let lease = ollama::model(&app, &mut fields).await?;
    let text = fields.string("prompt")?.unwrap_or_default();
    let ask = |options: &mut EmbeddingOptions| {
        (options.normalize, options.truncate) = (false, true);
    };
    let embedded = embed(&app, caller, lease, vec![Input::Text(text)], ask).await?;
    let vector = embedded.vectors.first().map(|vector| numbers(vector));
    Ok(Json(json!({ "embedding": vector })).into_response())
}

/// The elements of all vectors.
fn count(vectors: &[Vec<f32>]) -> usize {
    vectors.iter().map(Vec::len).sum()
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

/// Embeds texts for a caller.
async fn embed(
    app: &SharedApp,
    caller: Caller,
    lease: Lease,
    inputs: Vec<Input>,
    ask: impl FnOnce(&mut EmbeddingOptions),
) -> Result<Embedded> {
    let encoder = lease.encoder()?;
    if encoder.is_reranker() {
        let message = format!("{} scores documents: see /v1/rerank", lease.id());
        return Err(ApiError::bad_request(message));
    }
    let mut options = encoder.options().clone();
    ask(&mut options);
    let tokenize = move |encoder: &Encoder| {
        let texts = inputs.into_iter().map(|input| match input {
            Input::Text(text) => encoder.tokenize(&text),
            Input::Tokens(tokens) => Ok(tokens),
        });
        texts.collect()
    };
    compute(app, caller, lease, options, tokenize).await
}

/// Embeds the texts that `tokenize` makes. Their tokens count against the limits of the caller's
/// key, and a client that goes away ends the request at its next step.
pub(crate) async fn compute(
    app: &SharedApp,
    caller: Caller,
    lease: Lease,
    options: EmbeddingOptions,
    tokenize: impl FnOnce(&Encoder) -> bodkin::Result<Vec<Vec<u32>>> + Send + 'static,
) -> Result<Embedded> {
    let counter = app.token_counter(caller);
    let task = spawn_blocking(move || {
        let encoder = lease.encoder()?;
        let texts = tokenize(encoder)?;
        let tokens = texts.iter().map(Vec::len).sum();
        counter.admit(tokens, 0, None)?;
        let (sender, vectors) = oneshot::channel();
        let sink = collector(texts.len(), sender);
        let submitted = encoder.submit_to(texts, &options, sink);
        let submitted = submitted.inspect_err(|_| counter.give_back(tokens))?;
        let request = Submitted { cancels: CancelOnDrop(submitted.canceller), vectors };
        Ok::<_, ApiError>((lease, request, submitted.tokens))
    });
    let tokenized = task.await.map_err(|_| ApiError::internal("tokenizing the texts panicked"))?;
    let (lease, request, tokens) = tokenized?;
    let ended = |_| ApiError::internal("the model was unloaded");
    let vectors = tokio::select! {
        vectors = request.vectors => vectors.map_err(ended)??,
        error = lease.hung() => return Err(error),
    };
    drop(request.cancels);
    app.metrics.embedded(lease.id(), tokens);
    Ok(Embedded { vectors, tokens })
}

/// A queued request; dropping it ends it.
struct Submitted {
    cancels: CancelOnDrop,
    vectors: oneshot::Receiver<bodkin::Result<Vec<Vec<f32>>>>,
}

struct CancelOnDrop(Canceller);

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        self.0.cancel();
    }
}

/// Collects the vectors of a request and sends all of them, or the first error.
fn collector(
    texts: usize,
    sender: oneshot::Sender<bodkin::Result<Vec<Vec<f32>>>>,
) -> impl FnMut(bodkin::Result<(usize, Vec<f32>)>) -> bool + Send {
    let (mut vectors, mut left, mut sender) = (vec![Vec::new(); texts], texts, Some(sender));
    move |vector| {
        let all = match vector {
            Ok((i, vector)) => {
                vectors[i] = vector;
                left -= 1;
                if left > 0 {
                    return sender.as_ref().is_some_and(|sender| !sender.is_closed());
                }
                Ok(std::mem::take(&mut vectors))
            }
            Err(error) => Err(error),
        };
        // The client may have gone.
        sender.take().is_some_and(|sender| sender.send(all).is_ok())
    }
}
