//! OpenAI's interface: chat completions, completions, responses and models, with the fields that
//! llama-server adds.

pub(crate) mod calls;
pub(crate) mod chat;
mod chunks;
pub(crate) mod completions;
pub(crate) mod models;
pub(crate) mod responses;

use bodkin::{FinishReason, Logprobs, Usage};
use serde_json::{Value, json};

use crate::error::Result;
use crate::fields::{Fields, float};
use crate::models::Lease;

/// What identifies the build that answered.
pub(crate) const FINGERPRINT: &str = concat!("bodkin-", env!("CARGO_PKG_VERSION"));

/// The most answers to one prompt.
const CHOICES: i64 = 64;

/// The most log-probabilities of one position.
pub(crate) const TOP_LOGPROBS: i64 = 20;

/// Seconds since 1970.
pub(crate) fn now() -> i64 {
    jiff::Timestamp::now().as_second()
}

/// An id such as `chatcmpl-` and 24 characters.
pub(crate) fn new_id(prefix: &str) -> String {
    let characters = std::iter::repeat_with(fastrand::alphanumeric).take(24);
    prefix.chars().chain(characters).collect()
}

/// The fields that ask for what the server does not have yet.
fn refuse_missing(fields: &mut Fields) -> Result<()> {
    ["audio", "prediction", "web_search_options", "lora"]
        .into_iter()
        .try_for_each(|name| fields.refuse(name))
}

/// How many answers.
fn choices(fields: &mut Fields) -> Result<usize> {
    Ok(fields.integer("n", 1..=CHOICES)?.unwrap_or(1) as usize)
}

/// Whether to stream, and whether a stream ends with the usage.
fn stream_options(fields: &mut Fields) -> Result<(bool, bool)> {
    let streams = fields.boolean("stream")?.unwrap_or(false);
    let mut options = fields.object("stream_options")?;
    Ok((streams, options.boolean("include_usage")?.unwrap_or(false)))
}

/// The reason of an end in OpenAI's words.
pub(crate) fn finish_reason(finish: &FinishReason) -> &'static str {
    match finish {
        FinishReason::End | FinishReason::Stop(_) | FinishReason::Cancelled => "stop",
        FinishReason::Length | FinishReason::Context => "length",
    }
}

/// The same for an answer that may have called tools.
fn chat_finish_reason(finish: &FinishReason, has_calls: bool) -> &'static str {
    match finish_reason(finish) {
        "stop" if has_calls => "tool_calls",
        reason => reason,
    }
}

/// Token counts of all answers.
pub(crate) fn usage(usage: &Usage) -> Value {
    let Usage { prompt_tokens, cached_tokens, generated_tokens } = *usage;
    json!({
        "prompt_tokens": prompt_tokens,
        "completion_tokens": generated_tokens,
        "total_tokens": prompt_tokens + generated_tokens,
        "prompt_tokens_details": { "cached_tokens": cached_tokens },
    })
}

/// The text and the bytes of a token.
pub(crate) fn piece(lease: &Lease, id: u32) -> (String, Vec<u8>) {
    let bytes = lease.tokenizer().map(|tokenizer| tokenizer.piece(id, true));
    let bytes = bytes.unwrap_or_default().to_vec();
    (String::from_utf8_lossy(&bytes).into_owned(), bytes)
}

/// The text of tokens, special ones included.
pub(crate) fn pieces(lease: &Lease, tokens: &[u32]) -> String {
    let bytes: Vec<u8> = tokens.iter().flat_map(|&id| piece(lease, id).1).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The log-probabilities of one token as the chat interface has them.
fn chat_logprobs(lease: &Lease, id: u32, logprobs: &Logprobs) -> Value {
    let entry = |id: u32, logprob: f32| {
        let (token, bytes) = piece(lease, id);
        json!({ "id": id, "token": token, "bytes": bytes, "logprob": float(logprob) })
    };
    let mut value = entry(id, logprobs.sampled);
    let top = logprobs.top.iter().map(|&(id, logprob)| entry(id, logprob));
    value["top_logprobs"] = top.collect();
    value
}
