//! `/v1/completions`.

use axum::Extension;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use bodkin::Logprobs;
use serde_json::{Map, Value, json};

use super::chunks::{self, Chunks};
use super::{CHOICES, choices, finish_reason, piece, pieces, refuse_missing, stream_options};
use crate::app::SharedApp;
use crate::auth::Caller;
use crate::constraint;
use crate::error::{ApiError, Result};
use crate::fields::{Fields, Json, float, form};
use crate::generate::{Answer, AnswerToken, ChoiceEvent, EventKind, Generation, Running};
use crate::models::Lease;
use crate::prompt::Prompt;
use crate::stream::{self, StreamFormat, sse_data};
use crate::timings::Reports;

/// The most tokens of an answer if the request does not say.
const DEFAULT_MAX_TOKENS: usize = 16;

/// The most log-probabilities of one position.
const LOGPROBS: i64 = 20;

/// The most prompts of a request.
const PROMPTS: usize = 256;

/// Continues prompts.
pub(crate) async fn create(
    State(app): State<SharedApp>,
    Extension(caller): Extension<Caller>,
    mut fields: Fields,
) -> Result<Response> {
    let model = fields.string("model")?;
    refuse_missing(&mut fields)?;
    fields.refuse("suffix")?;
    let constraint = constraint::openai(&mut fields)?;
    let lease = app.model(model.as_deref()).await?;
    let prompts = prompts_of(fields.take("prompt"))?;
    let mut request = lease.request(&mut fields)?;
    request.constraint = constraint;
    let (names, otherwise) = (["max_tokens", "n_predict"], Some(DEFAULT_MAX_TOKENS));
    request.max_tokens = lease.defaults.max_tokens(&mut fields, &names, 0, otherwise)?;
    request.logprobs = fields.integer("logprobs", 0..=LOGPROBS)?.map(|n| n as usize);
    let has_logprobs = request.logprobs.is_some();
    let choices = choices(&mut fields)?;
    // More answers than are returned, of which the best are chosen.
    let best_of = fields.integer("best_of", 1..=CHOICES)?;
    if best_of.is_some_and(|best_of| best_of as usize != choices) {
        let message = format!("best_of: expected n, which is {choices}: no answers are left out");
        return Err(ApiError::field("best_of", message));
    }
    let echoes = fields.boolean("echo")?.unwrap_or(false);
    request.prompt_logprobs = request.logprobs.filter(|_| echoes);
    let texts = if echoes || has_logprobs { texts(&prompts) } else { Vec::new() };
    let (streams, include_usage) = stream_options(&mut fields)?;
    let (separates_reasoning, reports) = (false, Reports::of(&mut fields)?);
    let generation = Generation { prompts, request, choices, separates_reasoning, reports };
    let running = app.generate(lease, caller, generation).await?;
    let texts = texts.into_iter().enumerate().flat_map(|(i, text)| {
        let text = text.unwrap_or_else(|| pieces(&running.lease, running.prompt(i * choices)));
        vec![text; choices]
    });
    let texts: Vec<String> = texts.collect();
    let offsets: Vec<usize> = texts.iter().map(|text| text.chars().count()).collect();
    let echo = if echoes { texts } else { Vec::new() };
    if streams {
        let echo = echo.into_iter().map(Some).collect();
        let chunks = Chunks::new(include_usage);
        let format = CompletionStream { chunks, echo, has_logprobs, offsets };
        return Ok(stream::response(running, format));
    }
    let (running, answers) = running.collect().await?;
    Ok(form(running.count_logprobs(&answers), || {
        whole(&running, &answers, &echo, has_logprobs.then_some(offsets))
    }))
}

/// The response of answers that are not streamed. `echo` has the prompts that they begin with,
/// `offsets` those of their first tokens, if they have log-probabilities.
fn whole(
    running: &Running,
    answers: &[Answer],
    echo: &[String],
    mut offsets: Option<Vec<usize>>,
) -> Response {
    let choices = answers.iter().enumerate().map(|(index, answer)| {
        let prompt = echo.get(index).map_or("", String::as_str);
        let logprobs = offsets.as_mut().map(|offsets| {
            let mut lists = LogprobLists::default();
            if !echo.is_empty() {
                lists.push_prompt(running, index, prompt);
            }
            lists.push_answer(running, &answer.tokens, &mut offsets[index]);
            lists.json()
        });
        json!({
            "index": index,
            "text": format!("{prompt}{}", answer.text.content),
            "logprobs": logprobs,
            "finish_reason": finish_reason(&answer.finish),
        })
    });
    let head = ("cmpl-", "text_completion");
    Json(chunks::whole(head, running, answers, choices.collect())).into_response()
}

/// The texts of prompts that are texts.
fn texts(prompts: &[Prompt]) -> Vec<Option<String>> {
    let text = |prompt: &Prompt| match prompt {
        Prompt::Text(text) => Some(text.clone()),
        _ => None,
    };
    prompts.iter().map(text).collect()
}

/// One prompt or several. An array with numbers is one prompt.
pub(crate) fn prompts_of(value: Option<Value>) -> Result<Vec<Prompt>> {
    let prompts = match value {
        Some(Value::Array(values)) if !values.iter().any(Value::is_number) => {
            values.into_iter().map(prompt_of).collect::<Result<_>>()?
        }
        Some(value) => vec![prompt_of(value)?],
        None => Vec::new(),
    };
    match prompts.len() {
        1..=PROMPTS => Ok(prompts),
        n => {
            let message = format!("prompt: expected 1 to {PROMPTS} prompts, found {n}");
            Err(ApiError::field("prompt", message))
        }
    }
}

/// A prompt of a text, or of token ids and texts; as llama-server takes it, the text may be in an
/// object with the field `prompt_string`.
fn prompt_of(value: Value) -> Result<Prompt> {
    let wrong = || {
        let expected = "a string, or an array of token ids and strings";
        ApiError::field("prompt", format!("prompt: expected {expected}"))
    };
    match value {
        Value::String(text) => Ok(Prompt::Text(text)),
        Value::Object(map) => {
            let mut fields = Fields::within("prompt", map);
            fields.refuse("multimodal_data")?;
            fields.string("prompt_string")?.map(Prompt::Text).ok_or_else(wrong)
        }
        Value::Array(values) => {
            let mut parts: Vec<Prompt> = Vec::new();
            for value in values {
                if let Value::String(text) = value {
                    parts.push(Prompt::Text(text));
                    continue;
                }
                let id = value.as_u64().and_then(|id| u32::try_from(id).ok()).ok_or_else(wrong)?;
                match parts.last_mut() {
                    Some(Prompt::Tokens(tokens)) => tokens.push(id),
                    _ => parts.push(Prompt::Tokens(vec![id])),
                }
            }
            Ok(Prompt::Mixed(parts))
        }
        _ => Err(wrong()),
    }
}

/// Log-probabilities as this interface has them: one list for each kind of fact. Offsets are in
/// characters from the start of the prompt, whether it is repeated or not.
#[derive(Default)]
struct LogprobLists {
    tokens: Vec<String>,
    token_logprobs: Vec<Value>,
    top_logprobs: Vec<Value>,
    text_offset: Vec<usize>,
}

impl LogprobLists {
    /// Adds a token. The first of a prompt has no log-probability.
    fn push(&mut self, lease: &Lease, text: String, own: Option<&Logprobs>, offset: usize) {
        let top = own.map(|own| {
            let mut top = Map::new();
            for &(id, logprob) in &own.top {
                // Where tokens have one text, the most probable one stands for it.
                top.entry(piece(lease, id).0).or_insert_with(|| float(logprob));
            }
            top
        });
        self.tokens.push(text);
        self.token_logprobs.push(own.map_or(Value::Null, |own| float(own.sampled)));
        self.top_logprobs.push(top.into());
        self.text_offset.push(offset);
    }

    /// Adds the tokens of an answer's prompt, whose text is `text`.
    fn push_prompt(&mut self, running: &Running, index: usize, text: &str) {
        let (mut rest, mut offset) = (text.as_bytes(), 0);
        let own = running.prompt_logprobs(index).iter().map(Some);
        for (&id, own) in running.prompt(index).iter().zip(std::iter::once(None).chain(own)) {
            let (text, bytes) = piece(&running.lease, id);
            self.push(&running.lease, text, own, offset);
            let (covered, left) = rest.split_at(covered_bytes(rest, &bytes));
            offset += begun_characters(covered);
            rest = left;
        }
    }

    /// Adds generated tokens; `offset` is that of the first, and becomes that of the next one.
    fn push_answer(&mut self, running: &Running, tokens: &[AnswerToken], offset: &mut usize) {
        for token in tokens {
            let Some(own) = token.logprobs.as_deref() else { continue };
            let (text, bytes) = piece(&running.lease, token.id);
            self.push(&running.lease, text, Some(own), *offset);
            *offset += begun_characters(&bytes);
        }
    }

    fn json(self) -> Value {
        json!({
            "tokens": self.tokens,
            "token_logprobs": self.token_logprobs,
            "top_logprobs": self.top_logprobs,
            "text_offset": self.text_offset,
        })
    }
}

/// How many bytes of the rest of a prompt's text a token stands for. Tokenizers may put a token
/// before the text, or a space.
fn covered_bytes(rest: &[u8], token: &[u8]) -> usize {
    let without_space = token.strip_prefix(b" ").unwrap_or(token);
    match rest {
        _ if rest.starts_with(token) => token.len(),
        _ if rest.starts_with(without_space) => without_space.len(),
        _ => 0,
    }
}

/// The characters that begin in a token's bytes: tokens may divide one.
fn begun_characters(bytes: &[u8]) -> usize {
    bytes.iter().filter(|&&byte| byte & 0b1100_0000 != 0b1000_0000).count()
}

/// The chunks of a streamed answer.
struct CompletionStream {
    chunks: Chunks,
    /// What each answer is to begin with, if it repeats its prompt.
    echo: Vec<Option<String>>,
    has_logprobs: bool,
    /// The offset of the next token of each answer, if it has log-probabilities.
    offsets: Vec<usize>,
}

impl CompletionStream {
    /// Writes the prompt of an answer, if it is to be repeated and has not been.
    fn repeat_prompt(&mut self, running: &Running, index: usize, out: &mut Vec<u8>) {
        let Some(text) = self.echo.get_mut(index).and_then(Option::take) else { return };
        let mut choice = json!({ "index": index, "text": text, "finish_reason": null });
        form(running.count_logprobs(&[]), || {
            if self.has_logprobs {
                let mut lists = LogprobLists::default();
                lists.push_prompt(running, index, &text);
                choice["logprobs"] = lists.json();
            }
            self.chunks.write(Some(choice), Map::new(), out);
        });
    }
}

impl StreamFormat for CompletionStream {
    const CONTENT_TYPE: &'static str = "text/event-stream; charset=utf-8";
    const PING: &'static [u8] = b":\n\n";

    fn begin(&mut self, running: &Running, out: &mut Vec<u8>) {
        self.chunks.begin("cmpl-", "text_completion", running);
        // The log-probabilities of a prompt come before the first token.
        let ready = if self.has_logprobs { 0 } else { self.echo.len() };
        (0..ready).for_each(|index| self.repeat_prompt(running, index, out));
    }

    fn event(&mut self, running: &Running, event: ChoiceEvent, out: &mut Vec<u8>) {
        let ChoiceEvent { index, delta, kind, report } = event;
        let text = delta.content;
        if matches!(kind, EventKind::Token { .. } | EventKind::Done { .. }) {
            self.repeat_prompt(running, index, out);
        }
        match kind {
            EventKind::Prefill => self.chunks.write(None, report, out),
            EventKind::Token { id, logprobs: own } => {
                if text.is_empty() && own.is_none() && report.is_empty() {
                    return;
                }
                let logprobs = own.map(|own| {
                    let token = AnswerToken { id, logprobs: Some(own) };
                    let mut lists = LogprobLists::default();
                    lists.push_answer(running, &[token], &mut self.offsets[index]);
                    lists.json()
                });
                let choice = json!({
                    "index": index, "text": text, "logprobs": logprobs, "finish_reason": null,
                });
                self.chunks.write(Some(choice), report, out);
            }
            EventKind::Done { finish, usage, timings } => {
                let finish = finish_reason(&finish);
                let choice = json!({ "index": index, "text": text, "finish_reason": finish });
                self.chunks.done(choice, &usage, &timings, out);
            }
            EventKind::Failed(error) => sse_data(&error.openai(), out),
        }
    }

    fn end(&mut self, running: &Running, out: &mut Vec<u8>) {
        self.chunks.end(running, out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_character_that_tokens_divide_counts_once() {
        let bytes = "né🦀".as_bytes();
        for at in 0..=bytes.len() {
            let (left, right) = bytes.split_at(at);
            assert_eq!(begun_characters(left) + begun_characters(right), 3, "{at}");
        }
    }
}
