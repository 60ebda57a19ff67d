//! Times and counts of an answer as llama-server reports them, at its end and while it runs.

use std::time::Instant;

use bodkin::{Timings, Usage};
use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::error::Result;
use crate::fields::Fields;

/// Times as llama-server reports them.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct LlamaTimings {
    cache_n: usize,
    prompt_n: usize,
    prompt_ms: f64,
    prompt_per_token_ms: f64,
    prompt_per_second: f64,
    predicted_n: usize,
    predicted_ms: f64,
    predicted_per_token_ms: f64,
    predicted_per_second: f64,
}

impl LlamaTimings {
    pub(crate) fn new(usage: &Usage, timings: &Timings) -> LlamaTimings {
        let prompt_n = usage.prompt_tokens.saturating_sub(usage.cached_tokens);
        let prompt_ms = timings.prompt_ms - timings.queue_ms;
        let predicted_n = usage.generated_tokens;
        // The first token came with the prompt.
        let decoded = predicted_n.saturating_sub(1);
        let per = |ms: f64, n: usize| if n > 0 { ms / n as f64 } else { 0.0 };
        let rate = |n: usize, ms: f64| if ms > 0.0 { n as f64 / ms * 1e3 } else { 0.0 };
        LlamaTimings {
            cache_n: usage.cached_tokens,
            prompt_n,
            prompt_ms,
            prompt_per_token_ms: per(prompt_ms, prompt_n),
            prompt_per_second: rate(prompt_n, prompt_ms),
            predicted_n,
            predicted_ms: timings.generate_ms,
            predicted_per_token_ms: per(timings.generate_ms, decoded),
            predicted_per_second: rate(decoded, timings.generate_ms),
        }
    }
}

/// What a streamed answer reports beside its text.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Reports {
    /// How much of the prompt is stored, each time that a part of it is.
    progress: bool,
    /// The times until then, with every token.
    timings: bool,
}

impl Reports {
    /// What a request asks for.
    pub(crate) fn of(fields: &mut Fields) -> Result<Reports> {
        let progress = fields.boolean("return_progress")?.unwrap_or(false);
        let timings = fields.boolean("timings_per_token")?.unwrap_or(false);
        Ok(Reports { progress, timings })
    }
}

/// Follows one answer while it runs.
#[derive(Debug, Default)]
pub(crate) struct Clock {
    reports: Reports,
    usage: Usage,
    /// Tokens of the whole prompt.
    total: usize,
    admitted: Option<Instant>,
    first_token: Option<Instant>,
}

impl Clock {
    pub(crate) fn new(reports: Reports) -> Clock {
        Clock { reports, ..Clock::default() }
    }

    /// Notes how much of the prompt is stored. Returns what to report; none if nothing.
    pub(crate) fn prefill(&mut self, done: usize, total: usize) -> Option<Map<String, Value>> {
        if self.admitted.is_none() {
            self.admitted = Some(Instant::now());
            self.usage.cached_tokens = done;
        }
        (self.usage.prompt_tokens, self.total) = (done, total);
        self.reports.progress.then(|| self.report(true))
    }

    /// Notes a token. Returns what to report with it.
    pub(crate) fn token(&mut self) -> Map<String, Value> {
        let is_first = self.first_token.is_none();
        if is_first {
            self.first_token = Some(Instant::now());
            self.usage.prompt_tokens = self.total;
        }
        self.usage.generated_tokens += 1;
        self.report(is_first)
    }

    fn report(&self, has_progress: bool) -> Map<String, Value> {
        let mut report = Map::new();
        if !self.reports.progress && !self.reports.timings {
            return report;
        }
        let now = Instant::now();
        let ms = |from: Instant, to: Instant| (to - from).as_secs_f64() * 1e3;
        let Usage { prompt_tokens, cached_tokens, .. } = self.usage;
        let read = |from: Instant| match prompt_tokens > cached_tokens {
            true => ms(from, self.first_token.unwrap_or(now)),
            false => 0.0,
        };
        let prompt_ms = self.admitted.map_or(0.0, read);
        if self.reports.progress && has_progress {
            let progress = json!({
                "total": self.total,
                "cache": cached_tokens,
                "processed": prompt_tokens,
                "time_ms": prompt_ms as u64,
            });
            report.insert("prompt_progress".to_owned(), progress);
        }
        if self.reports.timings {
            let generate_ms = self.first_token.map_or(0.0, |first| ms(first, now));
            let timings = Timings { queue_ms: 0.0, prompt_ms, generate_ms };
            let timings = LlamaTimings::new(&self.usage, &timings);
            report.insert("timings".to_owned(), json!(timings));
        }
        report
    }
}

/// Adds what is reported to a chunk of an answer.
pub(crate) fn add_report(chunk: &mut Value, report: Map<String, Value>) {
    for (name, value) in report {
        chunk[name] = value;
    }
}
