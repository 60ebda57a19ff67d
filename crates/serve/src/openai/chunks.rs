//! What chat completions and completions have in common: the fields around their choices, in whole
//! answers and in streamed ones.

use bodkin::{Timings, Usage};
use serde_json::{Map, Value, json};

use super::{FINGERPRINT, new_id, now, usage};
use crate::generate::{Answer, Running};
use crate::stream::sse_data;
use crate::timings::{LlamaTimings, add_report};

/// What every object of an answer begins with.
fn head(id_prefix: &str, object: &str, running: &Running) -> Value {
    json!({
        "id": new_id(id_prefix),
        "object": object,
        "created": now(),
        "model": running.lease.id(),
        "system_fingerprint": FINGERPRINT,
    })
}

/// The response of answers that are not streamed.
pub(super) fn whole(
    (id_prefix, object): (&str, &str),
    running: &Running,
    answers: &[Answer],
    choices: Value,
) -> Value {
    let mut body = head(id_prefix, object, running);
    body["choices"] = choices;
    body["usage"] = usage(&running.usage);
    body["timings"] = json!(answers.first().map(|a| LlamaTimings::new(&a.usage, &a.timings)));
    body
}

/// The chunks of a streamed answer.
pub(super) struct Chunks {
    /// The start of every chunk.
    head: Value,
    /// Whether the last chunk has the usage.
    include_usage: bool,
    timings: Option<LlamaTimings>,
}

impl Chunks {
    pub(super) fn new(include_usage: bool) -> Chunks {
        Chunks { head: Value::Null, include_usage, timings: None }
    }

    pub(super) fn begin(&mut self, id_prefix: &str, object: &str, running: &Running) {
        self.head = head(id_prefix, object, running);
    }

    fn chunk(&self, choices: impl Into<Value>) -> Value {
        let mut chunk = self.head.clone();
        chunk["choices"] = choices.into();
        chunk
    }

    /// Writes a chunk with a choice, or with none, and what is reported.
    pub(super) fn write(
        &self,
        choice: Option<Value>,
        report: Map<String, Value>,
        out: &mut Vec<u8>,
    ) {
        let mut chunk = self.chunk(Vec::from_iter(choice));
        add_report(&mut chunk, report);
        sse_data(&chunk, out);
    }

    /// Writes the last chunk of a choice.
    pub(super) fn done(
        &mut self,
        choice: Value,
        usage: &Usage,
        timings: &Timings,
        out: &mut Vec<u8>,
    ) {
        let timings = LlamaTimings::new(usage, timings);
        self.timings = Some(timings);
        let mut chunk = self.chunk([choice]);
        chunk["timings"] = json!(timings);
        sse_data(&chunk, out);
    }

    /// Writes what comes after all choices.
    pub(super) fn end(&self, running: &Running, out: &mut Vec<u8>) {
        if self.include_usage {
            let mut chunk = self.chunk(Vec::<Value>::new());
            chunk["usage"] = usage(&running.usage);
            chunk["timings"] = json!(self.timings);
            sse_data(&chunk, out);
        }
        out.extend_from_slice(b"data: [DONE]\n\n");
    }
}
