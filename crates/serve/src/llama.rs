//! llama-server's own interface: completion with all its options, tokens, templates, properties and
//! slots.

pub(crate) mod server;

use std::sync::Arc;

use axum::Extension;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use bodkin::{FinishReason, Logprobs, Request, Timings, Usage};
use serde::Serialize;
use serde_json::{Value, json};
use tokio::task::spawn_blocking;

use crate::app::SharedApp;
use crate::auth::Caller;
use crate::constraint;
use crate::error::{ApiError, Result};
use crate::fields::{Fields, Json, float, form};
use crate::generate::{Answer, AnswerToken, ChoiceEvent, EventKind, Generation, Running};
use crate::models::Lease;
use crate::openai::chat::chat;
use crate::openai::completions::prompts_of;
use crate::openai::{piece, pieces};
use crate::prompt::{Chat, render};
use crate::stream::{self, StreamFormat, sse_data};
use crate::timings::{LlamaTimings, Reports, add_report};
use crate::tools;

/// The most log-probabilities of one position.
const PROBS: i64 = 100;

/// Continues prompts.
pub(crate) async fn completion(
    State(app): State<SharedApp>,
    Extension(caller): Extension<Caller>,
    mut fields: Fields,
) -> Result<Response> {
    let model = fields.string("model")?;
    fields.refuse_images("image_data")?;
    ["lora", "post_sampling_probs"].into_iter().try_for_each(|f| fields.refuse(f))?;
    let constraint = constraint::llama(&mut fields)?;
    refuse_unlike_defaults(&mut fields)?;
    let lease = app.model(model.as_deref()).await?;
    let prompts = prompts_of(fields.take("prompt"))?;
    let mut request = lease.request(&mut fields)?;
    request.constraint = constraint;
    if request.ignore_end {
        let ends = lease.text()?.engine().tokenizer().ends_of_generation();
        request.sampling.logit_bias.extend(ends.iter().map(|&id| (id, f32::NEG_INFINITY)));
    }
    let names = ["n_predict", "max_tokens"];
    let limit = lease.defaults.max_tokens(&mut fields, &names, 0, None)?;
    request.max_tokens = limit;
    request.logprobs = fields.integer("n_probs", 0..=PROBS)?.filter(|&n| n > 0).map(|n| n as usize);
    let streams = fields.boolean("stream")?.unwrap_or(false);
    let returns_tokens = fields.boolean("return_tokens")?.unwrap_or(false);
    let settings = settings(&request);
    let shown_fields = fields.strings("response_fields")?;
    let (separates_reasoning, reports) = (false, Reports::of(&mut fields)?);
    let generation = Generation { prompts, request, choices: 1, separates_reasoning, reports };
    let running = app.generate(lease, caller, generation).await?;
    let format = CompletionFormat { settings, returns_tokens, shown_fields };
    if streams {
        let tokens = (0..running.choices()).map(|_| Vec::new()).collect();
        return Ok(stream::response(running, CompletionStream { format, tokens }));
    }
    let (running, answers) = running.collect().await?;
    Ok(form(running.count_logprobs(&answers), || {
        let mut bodies = answers.iter().enumerate().map(|(index, answer)| {
            let Answer { text, finish, usage, timings, tokens } = answer;
            format.last(&running, index, (&text.content, finish, usage, timings), tokens)
        });
        // One prompt has one answer, several have an array.
        let body = match bodies.len() {
            1 => bodies.next().unwrap_or_default(),
            _ => bodies.collect(),
        };
        Json(body).into_response()
    }))
}

/// The order of samplers, which is the one that llama-server has by default.
const SAMPLERS: [&str; 9] =
    ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"];

/// Refuses llama-server's options that the server does not have, unless they change nothing.
fn refuse_unlike_defaults(fields: &mut Fields) -> Result<()> {
    for name in ["n", "n_cmpl"] {
        fields.refuse_unless(name, &[1.into()])?;
    }
    fields.refuse_unless("samplers", &[json!(SAMPLERS), json!("edskypmxt")])?;
    fields.refuse_unless("dynatemp_range", &[0.into(), 0.0.into()])?;
    // No limit of time.
    fields.refuse_unless("t_max_predict_ms", &[(-1).into(), 0.into()])
}

/// What the last object of an answer repeats of the request.
struct CompletionFormat {
    settings: Value,
    returns_tokens: bool,
    /// The only fields of the last object, such as `timings/predicted_n`; all if there are none.
    shown_fields: Vec<String>,
}

impl CompletionFormat {
    /// The whole answer, or the end of a streamed one.
    fn last(
        &self,
        running: &Running,
        index: usize,
        (text, finish, usage, timings): (&str, &FinishReason, &Usage, &Timings),
        tokens: &[AnswerToken],
    ) -> Value {
        let (stop_type, stopping_word) = match finish {
            FinishReason::End => ("eos", ""),
            FinishReason::Stop(word) => ("word", word.as_str()),
            FinishReason::Length | FinishReason::Context => ("limit", ""),
            FinishReason::Cancelled => ("none", ""),
        };
        let ids: Vec<u32> = match self.returns_tokens {
            true => tokens.iter().map(|token| token.id).collect(),
            false => Vec::new(),
        };
        let mut body = json!({
            "index": index,
            "content": text,
            "tokens": ids,
            "id_slot": 0,
            "stop": true,
            "model": running.lease.id(),
            "tokens_predicted": usage.generated_tokens,
            "tokens_evaluated": usage.prompt_tokens,
            "generation_settings": self.settings,
            "prompt": pieces(&running.lease, running.prompt(index)),
            "has_new_line": text.contains('\n'),
            "truncated": false,
            "stop_type": stop_type,
            "stopping_word": stopping_word,
            "tokens_cached": usage.prompt_tokens + usage.generated_tokens,
            "timings": LlamaTimings::new(usage, timings),
        });
        let probabilities = probabilities(&running.lease, tokens);
        if !probabilities.is_empty() {
            body["completion_probabilities"] = probabilities.into();
        }
        if self.shown_fields.is_empty() {
            return body;
        }
        let field = |path: &String| {
            let found = body.pointer(&format!("/{path}"))?.clone();
            Some((path.clone(), found))
        };
        Value::Object(self.shown_fields.iter().filter_map(field).collect())
    }
}

/// The chunks of a streamed answer.
struct CompletionStream {
    format: CompletionFormat,
    /// Those of each answer.
    tokens: Vec<Vec<AnswerToken>>,
}

impl StreamFormat for CompletionStream {
    const CONTENT_TYPE: &'static str = "text/event-stream; charset=utf-8";
    const PING: &'static [u8] = b":\n\n";

    fn begin(&mut self, _: &Running, _: &mut Vec<u8>) {}

    fn event(&mut self, running: &Running, event: ChoiceEvent, out: &mut Vec<u8>) {
        let ChoiceEvent { index, delta, kind, report } = event;
        let text = delta.content;
        let tokens = &mut self.tokens[index];
        let chunk = |ids: &[u32], predicted: usize| {
            let mut chunk = json!({
                "index": index,
                "content": text,
                "tokens": ids,
                "stop": false,
                "id_slot": -1,
                "tokens_predicted": predicted,
                "tokens_evaluated": running.prompt(index).len(),
            });
            add_report(&mut chunk, report);
            chunk
        };
        match kind {
            EventKind::Prefill => sse_data(&chunk(&[], 0), out),
            EventKind::Token { id, logprobs } => {
                let token = AnswerToken { id, logprobs };
                let mut chunk = chunk(&[id], tokens.len() + 1);
                let probabilities = probabilities(&running.lease, std::slice::from_ref(&token));
                if !probabilities.is_empty() {
                    chunk["completion_probabilities"] = probabilities.into();
                }
                tokens.push(AnswerToken { id, logprobs: None });
                sse_data(&chunk, out);
            }
            EventKind::Done { finish, usage, timings } => {
                let ended = (text.as_str(), &finish, &usage, &timings);
                sse_data(&self.format.last(running, index, ended, tokens), out);
            }
            EventKind::Failed(error) => sse_data(&error.openai(), out),
        }
    }

    fn end(&mut self, _: &Running, _: &mut Vec<u8>) {}
}

/// The log-probabilities of tokens that have them.
fn probabilities(lease: &Lease, tokens: &[AnswerToken]) -> Vec<Value> {
    let entry = |id: u32, logprob: f32| {
        let (token, bytes) = piece(lease, id);
        json!({ "id": id, "token": token, "bytes": bytes, "logprob": float(logprob) })
    };
    let with_top = |id: u32, logprobs: &Logprobs| {
        let mut value = entry(id, logprobs.sampled);
        value["top_logprobs"] = logprobs.top.iter().map(|&(id, p)| entry(id, p)).collect();
        value
    };
    let tokens = tokens.iter().filter_map(|t| Some(with_top(t.id, t.logprobs.as_deref()?)));
    tokens.collect()
}

/// The sampling options of a request, by llama-server's names.
fn settings(request: &Request) -> Value {
    let Request { sampling: options, max_tokens, stop, ignore_end, .. } = request;
    let n_predict = max_tokens.map_or(-1, |n| n as i64);
    let biases = options.logit_bias.iter();
    let biases: Vec<Value> =
        biases.map(|(id, bias)| json!({ "token": id, "bias": float(*bias) })).collect();
    json!({
        "n_predict": n_predict,
        "max_tokens": n_predict,
        "seed": options.seed,
        "temperature": float(options.temperature),
        "top_k": options.top_k,
        "top_p": float(options.top_p),
        "min_p": float(options.min_p),
        "typical_p": float(options.typical_p),
        "top_n_sigma": float(options.top_n_sigma),
        "repeat_last_n": options.repeat_last_n,
        "repeat_penalty": float(options.repeat_penalty),
        "presence_penalty": float(options.presence_penalty),
        "frequency_penalty": float(options.frequency_penalty),
        "dry_multiplier": float(options.dry_multiplier),
        "dry_base": float(options.dry_base),
        "dry_allowed_length": options.dry_allowed_length,
        "dry_penalty_last_n": options.dry_penalty_last_n,
        "dry_sequence_breakers": options.dry_sequence_breakers,
        "xtc_probability": float(options.xtc_probability),
        "xtc_threshold": float(options.xtc_threshold),
        "mirostat": options.mirostat,
        "mirostat_tau": float(options.mirostat_tau),
        "mirostat_eta": float(options.mirostat_eta),
        "min_keep": options.min_keep,
        "stop": stop,
        "ignore_eos": ignore_end,
        "logit_bias": biases,
    })
}

/// Token ids of a text.
pub(crate) async fn tokenize(State(app): State<SharedApp>, mut fields: Fields) -> Result<Response> {
    let lease = app.model(fields.string("model")?.as_deref()).await?;
    let text = fields.string("content")?.unwrap_or_default();
    let adds_special = fields.boolean("add_special")?.unwrap_or(false);
    let parses_special = fields.boolean("parse_special")?.unwrap_or(true);
    let with_pieces = fields.boolean("with_pieces")?.unwrap_or(false);
    blocking(move || {
        let ids = lease.tokenizer()?.try_encode(&text, adds_special, parses_special)?;
        Ok(match with_pieces {
            false => Tokens::Ids { tokens: ids },
            true => {
                let piece = |&id: &u32| json!({ "id": id, "piece": exact_piece(&lease, id) });
                Tokens::Pieces { tokens: ids.iter().map(piece).collect() }
            }
        })
    })
    .await
}

/// What `/tokenize` answers. As JSON values the ids of a long text would take eight times as much.
#[derive(Serialize)]
#[serde(untagged)]
enum Tokens {
    Ids { tokens: Vec<u32> },
    Pieces { tokens: Vec<Value> },
}

/// The text of a token, or its bytes if they are no text.
fn exact_piece(lease: &Lease, id: u32) -> Value {
    let (text, bytes) = piece(lease, id);
    if text.as_bytes() == bytes { text.into() } else { bytes.into() }
}

/// The text of token ids.
pub(crate) async fn detokenize(
    State(app): State<SharedApp>,
    mut fields: Fields,
) -> Result<Response> {
    let lease = app.model(fields.string("model")?.as_deref()).await?;
    let values = fields.array("tokens")?.unwrap_or_default();
    let vocabulary = lease.tokenizer()?.vocab_size();
    let id = |value: &Value| {
        let id = value.as_u64().filter(|&id| id < vocabulary as u64);
        let expected = format!("token ids below {vocabulary}");
        id.map(|id| id as u32).ok_or_else(|| fields.mismatch("tokens", &expected, value))
    };
    let ids = values.iter().map(id).collect::<Result<Vec<u32>>>()?;
    blocking(move || {
        let text = lease.tokenizer()?.decode(&ids, true);
        Ok(json!({ "content": String::from_utf8_lossy(&text) }))
    })
    .await
}

/// The prompt that the chat template makes of a conversation.
pub(crate) async fn apply_template(
    State(app): State<SharedApp>,
    mut fields: Fields,
) -> Result<Response> {
    let lease = app.model(fields.string("model")?.as_deref()).await?;
    let tools = tools::openai(&mut fields)?.map(Arc::new);
    let chat = Chat { tools, ..chat(&mut fields)? };
    blocking(move || Ok(json!({ "prompt": render(&lease, &chat)? }))).await
}

/// Runs work that may take long, and writes its result.
async fn blocking<T: Serialize + Send + 'static>(
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<Response> {
    let result = spawn_blocking(work).await;
    let value = result.map_err(|_| ApiError::internal("the request's work panicked"))??;
    Ok(Json(value).into_response())
}
