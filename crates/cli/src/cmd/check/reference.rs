//! `--reference`: another server's greedy text, token by token, against the model's own
//! predictions. The model follows the server's tokens, so that one near tie does not end the
//! comparison.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use bodkin_backend::Model;
use bodkin_engine::Tokenizer;
use bodkin_eval::LogSoftmax;
use serde_json::{Value, json};

/// Tokens that the server generates for each prompt.
pub(super) const TOKENS: usize = 24;
/// Timeout of a request to the server.
const TIMEOUT: Duration = Duration::from_secs(300);
/// The server's token is compared with this number of the model's best tokens.
const CANDIDATES: usize = 20;

/// A server with OpenAI's completions API.
pub(super) struct Server {
    agent: ureq::Agent,
    url: String,
    model: String,
}

/// A token of the server's answer, and the most likely token at its position. They differ if the
/// server applies a repetition penalty, as some do by default.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Token {
    text: Vec<u8>,
    best: Vec<u8>,
    /// Log-probability of the most likely token.
    log_probability: f64,
}

impl Token {
    /// The sampled token, and the alternatives with their log-probabilities.
    fn among((text, log): (Vec<u8>, f64), others: impl Iterator<Item = (Vec<u8>, f64)>) -> Token {
        let (mut best, mut log_probability) = (text.clone(), log);
        for (other, log) in others.filter(|(other, _)| *other != text) {
            if log > log_probability {
                (best, log_probability) = (other, log);
            }
        }
        Token { text, best, log_probability }
    }
}

impl Server {
    /// The server at an address, with or without `/v1` at the end.
    pub(super) fn new(url: &str, model: &str) -> Server {
        let agent = ureq::Agent::config_builder().timeout_global(Some(TIMEOUT)).build().into();
        let base = url.trim_end_matches('/').trim_end_matches("/v1");
        Server { agent, url: format!("{base}/v1/completions"), model: model.to_owned() }
    }

    /// The server's greedy continuation; empty if it begins with an end token.
    pub(super) fn complete(&self, prompt: &str, tokens: usize) -> Result<Vec<Token>> {
        let body = json!({
            "model": self.model,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "logprobs": 1,
            "stream": false,
        });
        let ask = || -> Result<Value> {
            Ok(self.agent.post(&self.url).send_json(&body)?.body_mut().read_json()?)
        };
        let answer = ask().with_context(|| format!("--reference: {}", self.url))?;
        parse(&answer).with_context(|| format!("--reference: {}", self.url))
    }
}

/// The tokens of an answer. Their logprobs come in two forms: `tokens` and `token_logprobs` as
/// OpenAI's completions had them, or a list `content` as in its chats.
fn parse(answer: &Value) -> Result<Vec<Token>> {
    let logprobs = &answer["choices"][0]["logprobs"];
    if let Some(content) = logprobs["content"].as_array() {
        let tokens = content.iter().map(|entry| {
            let others = entry["top_logprobs"].as_array().into_iter().flatten();
            Some(Token::among(of_entry(entry)?, others.filter_map(of_entry)))
        });
        let tokens: Option<Vec<_>> = tokens.collect();
        return tokens.context("a token without its text, bytes or logprob");
    }
    let texts = logprobs["tokens"].as_array().context("no logprobs in the answer")?;
    let numbers = logprobs["token_logprobs"].as_array().context("no token_logprobs")?;
    ensure!(texts.len() == numbers.len(), "{} tokens, {} logprobs", texts.len(), numbers.len());
    let tokens = texts.iter().zip(numbers).enumerate().map(|(i, (text, number))| {
        let chosen = (text.as_str()?.as_bytes().to_vec(), number.as_f64()?);
        let others = logprobs["top_logprobs"][i].as_object().into_iter().flatten();
        let others = others.map(|(text, log)| Some((text.as_bytes().to_vec(), log.as_f64()?)));
        Some(Token::among(chosen, others.flatten()))
    });
    tokens.collect::<Option<Vec<_>>>().context("a token without its logprob")
}

/// Text and logprob of an entry in the chat format.
fn of_entry(entry: &Value) -> Option<(Vec<u8>, f64)> {
    let byte = |byte: &Value| byte.as_u64().and_then(|byte| u8::try_from(byte).ok());
    let text = match entry["bytes"].as_array() {
        Some(bytes) => bytes.iter().map(byte).collect::<Option<Vec<u8>>>()?,
        None => entry["token"].as_str()?.as_bytes().to_vec(),
    };
    Some((text, entry["logprob"].as_f64()?))
}

/// How a model's predictions and a server's tokens agree.
#[derive(Default)]
pub(super) struct Agreement {
    /// Tokens compared.
    pub(super) tokens: usize,
    /// Tokens that are the model's best too.
    pub(super) same: usize,
    /// Tokens within the tie threshold of its best.
    pub(super) near_ties: usize,
    /// The sum of the differences of their log-probabilities.
    difference: f64,
    /// The first disagreement of each prompt.
    disagreements: Vec<String>,
}

impl Agreement {
    /// Follows the server's tokens from a prompt to the first disagreement.
    pub(super) fn follow(
        &mut self,
        model: &mut dyn Model,
        tokenizer: &Tokenizer,
        mut ids: Vec<u32>,
        theirs: &[Token],
        near_tie: f64,
    ) -> Result<()> {
        let prompt = ids.len();
        if theirs.is_empty() {
            return self.follow_to_end(model, tokenizer, &ids, near_tie);
        }
        for token in theirs {
            let best = candidates(model, &ids)?;
            let Some(&(top, top_log)) = best.first() else { return Ok(()) };
            if tokenizer.is_end_of_generation(top) && token.text.is_empty() {
                return Ok(());
            }
            self.tokens += 1;
            let find = |text: &[u8]| best.iter().find(|(id, _)| tokenizer.piece(*id, true) == text);
            match find(&token.best) {
                Some(&(id, log)) if top_log - log <= near_tie => {
                    self.same += usize::from(id == top);
                    self.near_ties += usize::from(id != top);
                    self.difference += (log - token.log_probability).abs();
                    // The server's alternative need not be a token of this model.
                    let Some(&(next, _)) = find(&token.text) else { return Ok(()) };
                    ids.push(next);
                }
                _ => {
                    let number = ids.len() - prompt + 1;
                    self.disagreements.push(format!(
                        "reference: token {number} after `{}` is {:?}, here {:?}",
                        lossy(&tokenizer.decode(&ids[..prompt], false)),
                        lossy(&token.best),
                        lossy(&tokenizer.piece(top, true)),
                    ));
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    /// The server generated nothing, so the model's best token should be an end token.
    fn follow_to_end(
        &mut self,
        model: &mut dyn Model,
        tokenizer: &Tokenizer,
        prompt: &[u32],
        near_tie: f64,
    ) -> Result<()> {
        let best = candidates(model, prompt)?;
        let Some(&(top, top_log)) = best.first() else { return Ok(()) };
        self.tokens += 1;
        let end = best.iter().find(|(id, _)| tokenizer.is_end_of_generation(*id));
        match end {
            Some(&(id, log)) if top_log - log <= near_tie => {
                self.same += usize::from(id == top);
                self.near_ties += usize::from(id != top);
            }
            _ => self.disagreements.push(format!(
                "reference: nothing after `{}`, here {:?}",
                lossy(&tokenizer.decode(prompt, false)),
                lossy(&tokenizer.piece(top, true)),
            )),
        }
        Ok(())
    }

    /// The mean difference of the log-probabilities of tokens on which both agree.
    pub(super) fn mean_difference(&self) -> f64 {
        self.difference / (self.same + self.near_ties).max(1) as f64
    }

    /// One line for each failed check.
    pub(super) fn faults(&self, max_difference: f64) -> Vec<String> {
        let mut faults = self.disagreements.clone();
        let mean = self.mean_difference();
        if mean.is_nan() || mean > max_difference {
            faults.push(format!(
                "reference: log-probabilities differ by {mean:.3}, at most {max_difference}"
            ));
        }
        faults
    }
}

fn lossy(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// The model's best tokens after `ids`, the best first, with their log-probabilities.
fn candidates(model: &mut dyn Model, ids: &[u32]) -> Result<Vec<(u32, f64)>> {
    let mut best = Vec::new();
    let wanted = |position| position + 1 == ids.len();
    bodkin_engine::logits(model, ids, usize::MAX, wanted, |_, row| {
        let softmax = LogSoftmax::of(row);
        let mut order: Vec<u32> = (0..row.len() as u32).collect();
        let descending = |&a: &u32, &b: &u32| row[b as usize].total_cmp(&row[a as usize]);
        let kept = CANDIDATES.min(order.len());
        order.select_nth_unstable_by(kept - 1, descending);
        order.truncate(kept);
        order.sort_by(descending);
        let with_log = |id: u32| (id, softmax.log_probability(row[id as usize]));
        best = order.into_iter().map(with_log).collect();
    })?;
    Ok(best)
}
