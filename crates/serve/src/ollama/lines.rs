//! Answers in Ollama's form: lines of JSON with durations in nanoseconds.

use std::time::Duration;

use bodkin::{FinishReason, Logprobs, Timings, Usage};
use bodkin_engine::ToolCall;
use serde_json::{Value, json};

use crate::fields::float;
use crate::generate::{AnswerToken, ChoiceEvent, EventKind, Running};
use crate::models::Lease;
use crate::openai::{finish_reason, new_id, piece};
use crate::reasoning::Delta;
use crate::stream::{StreamFormat, json as write_json};

pub(super) const NDJSON: &str = "application/x-ndjson";

/// The two forms of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shape {
    Generate,
    Chat,
}

impl Shape {
    /// A line with a piece of the answer.
    pub(super) fn line(self, model: &str, delta: &Delta) -> Value {
        let mut line = json!({
            "model": model,
            "created_at": jiff::Timestamp::now().to_string(),
            "done": false,
        });
        match self {
            Shape::Generate => {
                line["response"] = delta.content.as_str().into();
                if !delta.reasoning.is_empty() {
                    line["thinking"] = delta.reasoning.as_str().into();
                }
            }
            Shape::Chat => {
                line["message"] = json!({ "role": "assistant", "content": delta.content });
                if !delta.reasoning.is_empty() {
                    line["message"]["thinking"] = delta.reasoning.as_str().into();
                }
                if !delta.calls.is_empty() {
                    let call = |call: &ToolCall| {
                        let function = json!({ "name": call.name, "arguments": call.arguments });
                        json!({ "id": new_id("call_"), "function": function })
                    };
                    line["message"]["tool_calls"] = delta.calls.iter().map(call).collect();
                }
            }
        }
        line
    }
}

/// The lines of a streamed answer.
pub(super) struct LineStream {
    pub(super) shape: Shape,
    pub(super) load: Duration,
}

impl LineStream {
    /// The whole answer, or the last line of a streamed one.
    pub(super) fn last(
        &self,
        running: &Running,
        delta: &Delta,
        (finish, usage, timings): (&FinishReason, &Usage, &Timings),
    ) -> Value {
        let nanos = |ms: f64| (ms * 1e6) as u64;
        let load = self.load.as_nanos() as u64;
        let mut line = self.shape.line(running.lease.id(), delta);
        let statistics = [
            ("total_duration", load + nanos(timings.prompt_ms + timings.generate_ms)),
            ("load_duration", load),
            ("prompt_eval_count", usage.prompt_tokens as u64),
            ("prompt_eval_duration", nanos(timings.prompt_ms - timings.queue_ms)),
            ("eval_count", usage.generated_tokens as u64),
            ("eval_duration", nanos(timings.generate_ms)),
        ];
        line["done"] = true.into();
        line["done_reason"] = finish_reason(finish).into();
        for (name, value) in statistics {
            line[name] = value.into();
        }
        line
    }
}

impl StreamFormat for LineStream {
    const CONTENT_TYPE: &'static str = NDJSON;
    const PING: &'static [u8] = b"";

    fn begin(&mut self, _: &Running, _: &mut Vec<u8>) {}

    fn event(&mut self, running: &Running, event: ChoiceEvent, out: &mut Vec<u8>) {
        let ChoiceEvent { delta, kind, .. } = event;
        let line = match kind {
            EventKind::Prefill => return,
            EventKind::Token { logprobs: None, .. } if delta == Delta::default() => return,
            EventKind::Token { id, logprobs } => {
                let mut line = self.shape.line(running.lease.id(), &delta);
                if let Some(own) = logprobs {
                    line["logprobs"] = json!([logprob(&running.lease, id, &own)]);
                }
                line
            }
            EventKind::Done { finish, usage, timings } => {
                self.last(running, &delta, (&finish, &usage, &timings))
            }
            EventKind::Failed(error) => error.ollama(),
        };
        write_json(&line, out);
        out.push(b'\n');
    }

    fn end(&mut self, _: &Running, _: &mut Vec<u8>) {}
}

/// The log-probability of a token, with those of the alternatives if they are asked for.
fn logprob(lease: &Lease, id: u32, own: &Logprobs) -> Value {
    let entry = |id: u32, logprob: f32| {
        let (token, bytes) = piece(lease, id);
        json!({ "token": token, "logprob": float(logprob), "bytes": bytes })
    };
    let mut value = entry(id, own.sampled);
    if !own.top.is_empty() {
        value["top_logprobs"] = own.top.iter().map(|&(id, p)| entry(id, p)).collect();
    }
    value
}

/// The log-probabilities of a whole answer; none if they are not asked for.
pub(super) fn logprobs(lease: &Lease, tokens: &[AnswerToken]) -> Option<Value> {
    let with = tokens.iter().filter_map(|t| Some(logprob(lease, t.id, t.logprobs.as_deref()?)));
    let all: Vec<Value> = with.collect();
    (!all.is_empty()).then_some(all.into())
}
