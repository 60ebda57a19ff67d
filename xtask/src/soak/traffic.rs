//! Requests as clients send them, over all interfaces, and what their answers must end with.

use std::net::SocketAddr;

use anyhow::{Result, ensure};
use serde_json::{Value, json};

use crate::serving::client;

/// Tokens of a canary's answer.
const CANARY_TOKENS: usize = 24;

/// Random numbers that follow from a seed.
pub(super) struct Random(pub(super) u64);

impl Random {
    /// A number below `end`.
    pub(super) fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.0 >> 33) % end
    }
}

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    Answered,
    /// The queue was full.
    Refused,
}

/// Sends a request of a random interface and checks its answer.
pub(super) fn request(address: SocketAddr, random: &mut Random) -> Result<Outcome> {
    let words = 1 + random.below(60) as usize;
    let text = format!("{} {}", "word ".repeat(words), random.below(1000));
    let tokens = 1 + random.below(40);
    let streams = random.below(2) == 0;
    let messages = json!([{ "role": "user", "content": text }]);
    let (path, body, end) = match random.below(8) {
        0 => {
            let body = json!({ "messages": messages, "max_tokens": tokens, "n": 2 });
            ("/v1/chat/completions", body, ["[DONE]", "\"usage\""])
        }
        1 => {
            let body = json!({ "prompt": text, "max_tokens": tokens, "logprobs": 2 });
            ("/v1/completions", body, ["[DONE]", "\"usage\""])
        }
        2 => {
            let body = json!({ "input": text, "max_output_tokens": tokens });
            ("/v1/responses", body, ["response.", "\"output\""])
        }
        3 => {
            let body = json!({ "model": "any", "messages": messages, "max_tokens": tokens });
            ("/v1/messages", body, ["message_stop", "\"stop_reason\""])
        }
        4 => {
            let options = json!({ "num_predict": tokens });
            let body = json!({ "model": "any", "messages": messages, "options": options });
            ("/api/chat", body, ["\"done\":true"; 2])
        }
        5 => {
            let options = json!({ "num_predict": tokens, "temperature": 0 });
            let body = json!({ "model": "any", "prompt": text, "options": options });
            ("/api/generate", body, ["\"done\":true"; 2])
        }
        6 => {
            let body = json!({ "prompt": [text, text], "n_predict": tokens });
            ("/completion", body, ["\"stop\":true"; 2])
        }
        _ => ("/tokenize", json!({ "content": text }), ["\"tokens\""; 2]),
    };
    let mut body = body;
    body["stream"] = streams.into();
    let (status, answer) = client::post(address, path, body.to_string().as_bytes())?;
    if status == 503 {
        ensure!(answer.contains("queue is full"), "{path}: 503 {answer}");
        return Ok(Outcome::Refused);
    }
    let end = if streams { end[0] } else { end[1] };
    ensure!(status == 200 && answer.contains(end), "{path}: {status} {answer}");
    Ok(Outcome::Answered)
}

/// The prompt of a canary, whose answer is known.
fn canary_prompt(index: usize) -> Vec<usize> {
    (0..5 + index * 11).map(|i| 20 + (i * (index * 2 + 3) + index * index) % 200).collect()
}

/// The tokens of a canary's greedy answer; none if the queue was full.
pub(super) fn canary(address: SocketAddr, index: usize) -> Result<Option<Value>> {
    let body = json!({
        "prompt": canary_prompt(index),
        "n_predict": CANARY_TOKENS,
        "temperature": 0,
        "ignore_eos": true,
        "return_tokens": true,
    });
    let (status, answer) = client::post(address, "/completion", body.to_string().as_bytes())?;
    if status == 503 {
        return Ok(None);
    }
    ensure!(status == 200, "a canary: {status} {answer}");
    let answer: Value = serde_json::from_str(&answer)?;
    Ok(Some(answer["tokens"].clone()))
}
