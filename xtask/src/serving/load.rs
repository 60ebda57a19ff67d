//! A load: streams that send requests one after the other, and what is measured of them.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use serde_json::{Map, Value, json};

use super::client::{self, Times};
use crate::compare::median;

/// Token ids of prompts are below this; every vocabulary is larger.
const VOCABULARY: u64 = 20_000;

/// Set in the seeds of tokens that stand in for answers, and in that of the long prompt.
const ANSWER: u64 = 1 << 63;
const LONG: u64 = 1 << 62;

/// Streams at the same time, and their requests.
pub(super) struct Load {
    pub(super) streams: usize,
    /// Requests of each stream.
    pub(super) rounds: usize,
    /// Tokens of a prompt, those that all share included.
    pub(super) prompt: usize,
    pub(super) shared: usize,
    pub(super) generate: usize,
    /// Tokens of one long prompt beside the streams; 0 for none.
    pub(super) long: usize,
    /// Whether the requests of a stream are the turns of one conversation.
    pub(super) has_turns: bool,
    /// Texts of a request for embeddings; 0 for completions.
    pub(super) texts: usize,
    /// Further fields of each request.
    pub(super) fields: Map<String, Value>,
}

/// What one run gave.
#[derive(Clone, Debug)]
pub(super) struct Measured {
    /// Tokens of prompts and answers, a second. In a conversation, a prompt is what its turn adds.
    pub(super) total_tok_s: f64,
    /// Tokens of answers, a second.
    pub(super) output_tok_s: f64,
    /// Milliseconds to the first token of each request.
    pub(super) first_ms: Vec<f64>,
    /// Milliseconds between pieces.
    pub(super) inter_ms: Vec<f64>,
    /// The slowest answer of `/health`, in milliseconds.
    pub(super) health_ms: f64,
}

impl Load {
    /// `c16 pp128 tg128`, with what is special about it.
    pub(super) fn name(&self) -> String {
        let mut name = match self.texts {
            0 => format!("c{} pp{} tg{}", self.streams, self.prompt, self.generate),
            texts => format!("c{} embeddings of {texts} x {}", self.streams, self.prompt),
        };
        if self.shared > 0 {
            name.push_str(&format!(" shared{}", self.shared));
        }
        if self.long > 0 {
            name.push_str(&format!(" beside{}", self.long));
        }
        if self.has_turns {
            name.push_str(&format!(" turns{}", self.rounds));
        }
        for (field, value) in &self.fields {
            name.push_str(&format!(" {field}={value}"));
        }
        name
    }

    /// Runs all streams. Prompts follow from the seed.
    pub(super) fn run(&self, address: SocketAddr, seed: u64) -> Result<Measured> {
        let done = AtomicBool::new(false);
        let start = Instant::now();
        let (requests, health) = std::thread::scope(|scope| {
            let streams: Vec<_> = (0..self.streams)
                .map(|stream| scope.spawn(move || self.run_stream(address, seed, stream)))
                .collect();
            let long = (self.long > 0).then(|| scope.spawn(|| self.run_long(address, seed)));
            let health = scope.spawn(|| slowest_health(address, &done));
            let requests: Result<Vec<Vec<Times>>> =
                streams.into_iter().map(|stream| stream.join().expect("no panic")).collect();
            let elapsed = start.elapsed();
            done.store(true, Relaxed);
            if let Some(long) = long {
                long.join().expect("no panic")?;
            }
            let health = health.join().expect("no panic")?;
            Ok::<_, anyhow::Error>((requests.map(|requests| (requests, elapsed))?, health))
        })?;
        let (requests, elapsed) = requests;
        let requests: Vec<Times> = requests.into_iter().flatten().collect();
        if let Some(short) = requests.iter().find(|r| r.tokens != self.generate as u64) {
            bail!("an answer has {} tokens, not {}", short.tokens, self.generate);
        }
        let seconds = elapsed.as_secs_f64();
        let ms = |duration: Duration| duration.as_secs_f64() * 1e3;
        let first = requests.iter().filter_map(|r| Some(ms(*r.pieces.first()? - r.sent)));
        let inter = requests.iter().flat_map(|r| r.pieces.windows(2).map(|w| ms(w[1] - w[0])));
        let output = (requests.len() * self.generate) as f64;
        let prompts = (requests.len() * self.texts.max(1) * self.prompt) as f64;
        Ok(Measured {
            total_tok_s: (output + prompts) / seconds,
            output_tok_s: output / seconds,
            first_ms: first.collect(),
            inter_ms: inter.collect(),
            health_ms: ms(health),
        })
    }

    /// The first request with the shared tokens, which is not measured.
    pub(super) fn run_first(&self, address: SocketAddr) -> Result<()> {
        client::stream(address, &self.body(&tokens(u64::MAX, self.shared), 1)).map(drop)
    }

    fn run_stream(&self, address: SocketAddr, seed: u64, stream: usize) -> Result<Vec<Times>> {
        if self.texts > 0 {
            return self.embed(address, seed << 32 | (stream as u64) << 16);
        }
        let own = |round: usize| seed << 32 | (stream as u64) << 16 | round as u64;
        let mut prompt = tokens(u64::MAX, self.shared);
        let request = |round: usize| {
            if !self.has_turns {
                prompt.truncate(self.shared);
            }
            prompt.extend(tokens(own(round), self.prompt - self.shared));
            let times = client::stream(address, &self.body(&prompt, self.generate));
            // The conversation goes on with other tokens than those of the answer, as clients
            // write answers of models that think.
            prompt.extend(tokens(ANSWER | own(round), self.generate));
            times
        };
        (0..self.rounds).map(request).collect()
    }

    /// A stream of requests for embeddings.
    fn embed(&self, address: SocketAddr, seed: u64) -> Result<Vec<Times>> {
        let request = |round: usize| {
            let seed = (seed | round as u64) << 16;
            let texts = (0..self.texts).map(|text| tokens(seed | text as u64, self.prompt));
            // As OpenAI's clients ask for them.
            let body = json!({ "input": texts.collect::<Vec<_>>(), "encoding_format": "base64" });
            let body = self.with_fields(body).to_string();
            let sent = Instant::now();
            let (status, answer) = client::post(address, "/v1/embeddings", body.as_bytes())?;
            ensure!(status == 200, "{status}: {answer}");
            Ok(Times { sent, pieces: vec![Instant::now()], tokens: 0 })
        };
        (0..self.rounds).map(request).collect()
    }

    /// One long prompt, a while after the streams have begun.
    fn run_long(&self, address: SocketAddr, seed: u64) -> Result<Times> {
        std::thread::sleep(Duration::from_millis(500));
        client::stream(address, &self.body(&tokens(LONG | seed, self.long), 4))
    }

    fn body(&self, tokens: &[u64], generate: usize) -> Value {
        self.with_fields(json!({
            "prompt": tokens,
            "max_tokens": generate,
            "temperature": 0,
            "ignore_eos": true,
            "stream": true,
        }))
    }

    fn with_fields(&self, mut body: Value) -> Value {
        for (field, value) in &self.fields {
            body[field] = value.clone();
        }
        body
    }
}

/// Token ids that follow from a seed.
fn tokens(seed: u64, count: usize) -> Vec<u64> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963);
        (state >> 33) % (VOCABULARY - 1000) + 1000
    };
    (0..count).map(|_| next()).collect()
}

/// The slowest answer of `/health` until `done`.
fn slowest_health(address: SocketAddr, done: &AtomicBool) -> Result<Duration> {
    let mut slowest = Duration::ZERO;
    while !done.load(Relaxed) {
        slowest = slowest.max(client::get(address, "/health")?.1);
        std::thread::sleep(Duration::from_millis(100));
    }
    Ok(slowest)
}

/// The value below which a share of the values lies.
fn percentile(values: &[f64], share: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let last = sorted.len().saturating_sub(1);
    sorted.get((share * last as f64).round() as usize).copied().unwrap_or(f64::NAN)
}

/// The numbers of a row: medians of the runs, and percentiles over all of them.
pub(super) fn medians(runs: &[Measured]) -> Value {
    let each = |number: fn(&Measured) -> f64| -> Vec<f64> { runs.iter().map(number).collect() };
    let all = |values: fn(&Measured) -> &Vec<f64>| -> Vec<f64> {
        runs.iter().flat_map(values).copied().collect()
    };
    let percentiles = |values: &[f64]| {
        json!({
            "p50": percentile(values, 0.5),
            "p95": percentile(values, 0.95),
            "p99": percentile(values, 0.99),
        })
    };
    json!({
        "total_tok_s": median(&each(|m| m.total_tok_s)),
        "output_tok_s": median(&each(|m| m.output_tok_s)),
        "first_token_ms": percentiles(&all(|m| &m.first_ms)),
        "inter_token_ms": percentiles(&all(|m| &m.inter_ms)),
        "health_ms": each(|m| m.health_ms).into_iter().fold(0.0, f64::max),
        "runs": runs.len(),
    })
}

/// The median of the ratios of neighbouring runs.
pub(super) fn ratio(ours: &[Measured], theirs: &[Measured]) -> f64 {
    let pairs = ours.iter().zip(theirs).map(|(a, b)| a.total_tok_s / b.total_tok_s);
    median(&pairs.collect::<Vec<f64>>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_load_is_named_after_what_is_special_about_it() {
        let fields = Map::from_iter([("logprobs".to_owned(), json!(5))]);
        let load = Load {
            streams: 16,
            rounds: 4,
            prompt: 128,
            shared: 100,
            generate: 256,
            long: 0,
            has_turns: true,
            texts: 0,
            fields,
        };
        assert_eq!(load.name(), "c16 pp128 tg256 shared100 turns4 logprobs=5");
        assert_eq!(load.body(&[1], 2)["logprobs"], 5);
        let load = Load { texts: 32, shared: 0, has_turns: false, fields: Map::new(), ..load };
        assert_eq!(load.name(), "c16 embeddings of 32 x 128");
    }

    #[test]
    fn percentiles_are_of_sorted_values() {
        let values: Vec<f64> = (0..=100).rev().map(f64::from).collect();
        assert_eq!((percentile(&values, 0.5), percentile(&values, 0.99)), (50.0, 99.0));
        assert!(percentile(&[], 0.5).is_nan());
    }
}
