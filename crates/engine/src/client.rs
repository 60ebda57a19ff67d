//! A request as the worker has it: how its tokens are sampled and reported to its client.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Instant;

use bodkin_backend::{SamplingParams, are_samplable};

use crate::error::Error;
use crate::events::{Update, UpdateSink};
use crate::grammar::Matcher;
use crate::logprobs::logprobs;
use crate::request::{FinishReason, Logprobs, Request, Timings, Usage};
use crate::sampler::Sampler;
use crate::stats::Status;
use crate::tokenizer::Tokenizer;

/// Counts a request as open until it drops.
pub(crate) struct OpenRequest(Arc<Status>);

impl OpenRequest {
    /// None if `limit` requests are open.
    pub(crate) fn new(status: &Arc<Status>, limit: usize) -> Option<OpenRequest> {
        OpenRequest::several(status, 1, limit)?.pop()
    }

    /// The places of `count` requests; none if not all of them are within `limit`.
    pub(crate) fn several(
        status: &Arc<Status>,
        count: usize,
        limit: usize,
    ) -> Option<Vec<OpenRequest>> {
        let next = |open: usize| open.checked_add(count).filter(|open| *open <= limit);
        status.open.fetch_update(Relaxed, Relaxed, next).ok()?;
        Some((0..count).map(|_| OpenRequest(Arc::clone(status))).collect())
    }
}

impl Drop for OpenRequest {
    fn drop(&mut self) {
        self.0.open.fetch_sub(1, Relaxed);
    }
}

/// Everything of a request but its tokens and pages.
pub(crate) struct Client {
    /// Without its prompt.
    request: Request,
    sampler: Sampler,
    /// Follows its constraint.
    matcher: Option<Matcher>,
    sink: UpdateSink,
    cancelled: Arc<AtomicBool>,
    usage: Usage,
    submitted: Instant,
    admitted: Option<Instant>,
    first_token: Option<Instant>,
    open: OpenRequest,
}

/// Why a row of logits gives no token.
pub(crate) enum RowError {
    /// NaN or infinity.
    NonFinite,
    /// The request's constraint exceeds a limit, or allows none.
    Constraint(Error),
}

/// A token of a step's output row.
pub(crate) type RowToken = (u32, Option<Box<Logprobs>>);

impl Client {
    pub(crate) fn new(
        request: Request,
        (sampler, matcher): (Sampler, Option<Matcher>),
        sink: UpdateSink,
        cancelled: Arc<AtomicBool>,
        open: OpenRequest,
    ) -> Client {
        Client {
            request,
            sampler,
            matcher,
            sink,
            cancelled,
            usage: Usage::default(),
            submitted: Instant::now(),
            admitted: None,
            first_token: None,
            open,
        }
    }

    pub(crate) fn is_cancelled(&self) -> bool {
        self.cancelled.load(Relaxed)
    }

    /// Notes that the first tokens of the prompt run, unless they have before.
    pub(crate) fn admit(&mut self, prompt_tokens: usize, cached_tokens: usize, status: &Status) {
        if self.admitted.is_some() {
            return;
        }
        self.admitted = Some(Instant::now());
        self.usage = Usage { prompt_tokens, cached_tokens, generated_tokens: 0 };
        let mut stats = status.stats();
        stats.requests += 1;
        stats.prompt_tokens += prompt_tokens as u64;
        stats.cached_tokens += cached_tokens as u64;
        drop(stats);
        self.report_prefill(cached_tokens, prompt_tokens);
    }

    /// Reports how much of the prompt is stored. A preempted request has been told before.
    pub(crate) fn report_prefill(&mut self, done: usize, total: usize) {
        if self.first_token.is_none() {
            // The client may have stopped reading.
            let _ = (self.sink)(Update::Prefill { done, total });
        }
    }

    /// Whether the model can sample its tokens.
    pub(crate) fn is_model_sampled(&self) -> bool {
        self.request.logprobs.is_none()
            && self.matcher.is_none()
            && self.sampler.can_run_on_backend()
    }

    /// How the model samples the next `steps` tokens; none if the request's own sampler does.
    pub(crate) fn params(&self, steps: usize) -> Option<SamplingParams> {
        self.is_model_sampled().then(|| self.sampler.params(steps))
    }

    /// Takes a token that the model sampled.
    pub(crate) fn accept(&mut self, token: u32) -> RowToken {
        self.sampler.accept_sampled(token);
        (token, None)
    }

    /// Samples a token from its logits, of which a constraint masks some.
    pub(crate) fn sample(&mut self, logits: &mut [f32]) -> Result<RowToken, RowError> {
        let top = self.request.logprobs;
        if let Some(matcher) = &mut self.matcher {
            if !are_samplable(logits) {
                return Err(RowError::NonFinite);
            }
            if top.is_some() {
                matcher.keep(logits);
            }
            matcher.mask(logits).map_err(RowError::Constraint)?;
        }
        let token = self.sampler.sample(logits).ok_or(RowError::NonFinite)?;
        self.sampler.accept(token);
        let mut logits = &*logits;
        if let Some(matcher) = &mut self.matcher {
            if logits[token as usize] == f32::NEG_INFINITY {
                return Err(RowError::Constraint(matcher.excluded()));
            }
            matcher.accept(token).map_err(RowError::Constraint)?;
            logits = matcher.unmasked();
        }
        Ok((token, top.map(|top| Box::new(logprobs(logits, token, top)))))
    }

    /// Whether it wants the log-probabilities of its prompt.
    pub(crate) fn scores_prompt(&self) -> bool {
        self.request.prompt_logprobs.is_some()
    }

    /// How many most probable tokens it wants the log-probabilities of, beside each token of its
    /// prompt.
    pub(crate) fn prompt_logprobs(&self) -> usize {
        self.request.prompt_logprobs.unwrap_or(0)
    }

    /// Reports a token of the prompt.
    pub(crate) fn report_prompt(&mut self, (id, logprobs): RowToken) {
        if let Some(logprobs) = logprobs {
            // The client may have stopped reading.
            let _ = (self.sink)(Update::PromptToken { id, logprobs });
        }
    }

    /// Reports a token. Returns why the request ends with it, if it does.
    pub(crate) fn report(
        &mut self,
        (id, logprobs): RowToken,
        tokenizer: &Tokenizer,
    ) -> Option<FinishReason> {
        self.first_token.get_or_insert_with(Instant::now);
        self.usage.generated_tokens += 1;
        let is_complete = self.matcher.as_ref().is_some_and(Matcher::is_complete);
        let is_end_token = tokenizer.is_end_of_generation(id);
        let is_end_token = is_end_token && (is_complete || !self.request.ignore_end);
        let is_end_token = is_end_token || self.request.stop_tokens.contains(&id);
        let is_reported = !is_end_token || self.scores_prompt();
        if is_reported && !(self.sink)(Update::Token { id, logprobs, is_end_token }) {
            return Some(FinishReason::Cancelled);
        }
        if is_end_token || is_complete {
            return Some(FinishReason::End);
        }
        let is_last = self.request.max_tokens == Some(self.usage.generated_tokens);
        is_last.then_some(FinishReason::Length)
    }

    /// Ends the request.
    pub(crate) fn finish(self, reason: FinishReason) {
        let ms = |from: Instant, to: Instant| (to - from).as_secs_f64() * 1e3;
        let now = Instant::now();
        let first = self.first_token.unwrap_or(now);
        let timings = Timings {
            queue_ms: ms(self.submitted, self.admitted.unwrap_or(now)),
            prompt_ms: ms(self.submitted, first),
            generate_ms: ms(first, now),
        };
        let usage = self.usage;
        self.send_last(Update::Done { reason, usage, timings });
    }

    /// Ends the request with an error.
    pub(crate) fn fail(self, error: Error) {
        self.send_last(Update::Error(error));
    }

    fn send_last(self, update: Update) {
        let Client { mut sink, open, .. } = self;
        // A client that submits its next request at once finds room in the queue.
        drop(open);
        // The client may have stopped reading.
        let _ = sink(update);
    }
}
