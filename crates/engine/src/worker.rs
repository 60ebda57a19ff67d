//! The worker's loop: admit, schedule, step, emit. One thread owns the model and runs it for all
//! requests; clients reach it through channels. While every request decodes, one call of the model
//! runs several steps, and may run ahead of the host.

use std::collections::VecDeque;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, Sender};
use std::time::Instant;

use bodkin_backend::{Batch, Model, PAGE_TOKENS, RowOutput, SamplingParams, Span, Step};

use crate::error::Error;
use crate::pages::{Pages, Sequence};
use crate::request::{Event, Finish, Request, Timings, Usage};
use crate::sampler::{Sampler, check_finite};
use crate::scheduler::{Waiting, schedule};
use crate::stats::Stats;
use crate::stop::StopTexts;
use crate::stream::TextStream;
use crate::tokenizer::Tokenizer;

/// The most steps of one multi-step decode.
const MULTI_STEPS: usize = PAGE_TOKENS;

/// A request that a client has submitted.
pub(crate) struct Submission {
    pub(crate) request: Request,
    pub(crate) events: Sender<Event>,
    /// Set when the request is to end.
    pub(crate) cancelled: Arc<AtomicBool>,
}

/// A message from a client to the worker.
pub(crate) enum Message {
    /// Runs a request.
    Submit(Box<Submission>),
    /// Replies with the engine's statistics after the current step.
    Stats(Sender<Stats>),
}

/// A request that the worker has admitted.
struct Running {
    request: Request,
    events: Sender<Event>,
    cancelled: Arc<AtomicBool>,
    sequence: Sequence,
    /// Tokens whose keys and values are not stored yet.
    pending: Vec<u32>,
    sampler: Sampler,
    stream: TextStream,
    stop: StopTexts,
    usage: Usage,
    started: Instant,
    first_token: Option<Instant>,
}

/// Owns the model.
pub(crate) struct Worker {
    model: Box<dyn Model>,
    tokenizer: Arc<Tokenizer>,
    context: usize,
    pages: Pages,
    running: Vec<Running>,
    /// Requests that are not admitted yet, oldest first.
    waiting: VecDeque<Submission>,
    /// Messages received during a step.
    inbox: Vec<Message>,
    /// The next step.
    batch: Batch,
    /// The pending tokens of each running request that are in the batch.
    taken: Vec<usize>,
    /// How the model samples each output row; none where the request's own sampler does.
    params: Vec<Option<SamplingParams>>,
}

impl Worker {
    /// `context` is the most tokens that a sequence may have.
    pub(crate) fn new(model: Box<dyn Model>, tokenizer: Arc<Tokenizer>, context: usize) -> Worker {
        let pages = Pages::of(&*model);
        let context = context.min(pages.longest_sequence());
        Worker {
            model,
            tokenizer,
            context,
            pages,
            running: Vec::new(),
            waiting: VecDeque::new(),
            inbox: Vec::new(),
            batch: Batch::default(),
            taken: Vec::new(),
            params: Vec::new(),
        }
    }

    /// Works until the other end of `messages` is gone and every request has ended.
    pub(crate) fn run(mut self, messages: &Receiver<Message>) {
        loop {
            for message in std::mem::take(&mut self.inbox) {
                self.take(message);
            }
            if self.running.is_empty() && self.waiting.is_empty() {
                match messages.recv() {
                    Ok(message) => self.take(message),
                    Err(_) => return,
                }
            }
            messages.try_iter().for_each(|message| self.take(message));
            while self.running.len() < self.model.limits().outputs
                && let Some(submission) = self.waiting.pop_front()
            {
                self.admit(submission);
            }
            self.drop_cancelled();
            if !self.running.is_empty()
                && let Err(error) = self.advance(messages)
            {
                self.fail(error);
            }
        }
    }

    fn take(&mut self, message: Message) {
        match message {
            Message::Submit(submission) => self.waiting.push_back(*submission),
            Message::Stats(reply) => {
                let stats = Stats {
                    running: self.running.len(),
                    waiting: self.waiting.len(),
                    free_pages: self.pages.free(),
                    experts: self.model.stats().experts,
                };
                // The client may have stopped waiting for the reply.
                let _ = reply.send(stats);
            }
        }
    }

    fn admit(&mut self, submission: Submission) {
        let events = submission.events.clone();
        match self.start(submission) {
            Ok(running) => {
                running.report_prefill();
                self.running.push(running);
            }
            // The client may have dropped its events.
            Err(error) => drop(events.send(Event::Error(error))),
        }
    }

    fn start(&mut self, submission: Submission) -> Result<Running, Error> {
        let Submission { request, events, cancelled } = submission;
        let prompt_tokens = request.prompt.len();
        if prompt_tokens == 0 {
            return Err(Error::EmptyPrompt);
        }
        if request.max_tokens == Some(0) {
            return Err(Error::NoTokens);
        }
        if prompt_tokens >= self.context {
            let limit = self.context - 1;
            return Err(Error::PromptTooLong { tokens: prompt_tokens, limit });
        }
        let vocabulary = self.model.plan().vocabulary;
        if let Some(&id) = request.prompt.iter().find(|&&id| id as usize >= vocabulary) {
            return Err(Error::UnknownToken { id, vocabulary });
        }
        let mut sampler = Sampler::new(request.sampling.clone(), &self.tokenizer)?;
        request.prompt.iter().for_each(|&id| sampler.accept(id));
        let sequence = self.pages.start(&request.prompt);
        let cached_tokens = sequence.tokens.len();
        let pending = request.prompt[cached_tokens..].to_vec();
        let stream = TextStream::new(Arc::clone(&self.tokenizer), request.show_special);
        Ok(Running {
            stop: StopTexts::new(&request.stop),
            usage: Usage { prompt_tokens, cached_tokens, generated_tokens: 0 },
            request,
            events,
            cancelled,
            sequence,
            pending,
            sampler,
            stream,
            started: Instant::now(),
            first_token: None,
        })
    }

    /// One call of the model: multi-step decode where every request has one more token in each
    /// step, one step otherwise.
    fn advance(&mut self, messages: &Receiver<Message>) -> Result<(), Error> {
        let steps = self.schedule_decode();
        if steps > 0 {
            let result = self.step(steps, messages);
            self.running.iter_mut().for_each(|running| self.pages.trim(&mut running.sequence));
            return result;
        }
        self.schedule_mixed()?;
        self.step(1, messages)
    }

    /// Fills the batch with a decode row of every request and reserves pages for several steps.
    /// Returns the number of steps; 0 if the next step is no multi-step decode.
    fn schedule_decode(&mut self) -> usize {
        let steps = self.decode_steps();
        if steps == 0 {
            return 0;
        }
        self.params.clear();
        self.params.extend(self.running.iter().map(|running| running.sampler.params(steps)));
        if self.params.iter().any(Option::is_none) || !self.reserve(steps) {
            return 0;
        }
        self.batch.clear();
        for running in &self.running {
            self.batch.push(running.span(1), &running.pending);
            self.batch.output_last();
        }
        self.taken.clear();
        self.taken.resize(self.running.len(), 1);
        steps
    }

    /// The number of steps until the first request reaches its maximal length; 0 if a request is
    /// still in prefill.
    fn decode_steps(&self) -> usize {
        let decodes = |r: &Running| r.first_token.is_some() && r.pending.len() == 1;
        if self.running.len() > self.model.limits().tokens || !self.running.iter().all(decodes) {
            return 0;
        }
        let left = self.running.iter().map(|running| running.tokens_left(self.context));
        left.min().unwrap_or(0).min(MULTI_STEPS)
    }

    /// Reserves pages for this many more tokens of every request, or none.
    fn reserve(&mut self, tokens: usize) -> bool {
        let pages = &mut self.pages;
        let is_enough = self.running.iter_mut().all(|r| pages.reserve(&mut r.sequence, tokens));
        if !is_enough {
            self.running.iter_mut().for_each(|running| pages.trim(&mut running.sequence));
        }
        is_enough
    }

    /// Runs the batch until a request ends or a message arrives, and samples and sends the tokens
    /// of each step.
    fn step(&mut self, steps: usize, messages: &Receiver<Message>) -> Result<(), Error> {
        let Worker { model, tokenizer, context, pages, running, inbox, .. } = self;
        let width = model.plan().output_width();
        let rows = self.params.iter().map(|params| match params {
            Some(params) => RowOutput::Token(params),
            None => RowOutput::Logits,
        });
        let rows: Vec<RowOutput<'_>> = rows.collect();
        let mut ended = Vec::new();
        let step = Step { batch: &self.batch, rows: &rows, steps, observer: None };
        model.step(step, &mut |output| {
            let mut tokens = output.tokens.iter();
            let mut nonfinite = output.nonfinite.iter();
            let mut logits = output.logits.chunks_exact(width);
            let mut rows = rows.iter();
            let taken = running.iter_mut().zip(&self.taken).enumerate();
            for (i, (running, &taken)) in taken.filter(|(_, (_, taken))| **taken > 0) {
                pages.advance(&mut running.sequence, &running.pending[..taken]);
                running.pending.drain(..taken);
                if !running.pending.is_empty() {
                    running.report_prefill();
                    continue;
                }
                let token = match rows.next().expect("a row for each request without pending") {
                    RowOutput::Token(_) => {
                        let token = *tokens.next().expect("its token");
                        let nonfinite = nonfinite.next().copied().unwrap_or(0);
                        check_finite(nonfinite, width).map(|()| running.accept(token))
                    }
                    RowOutput::Logits => running.sample(logits.next().expect("its logits")),
                };
                let goes_on = match token {
                    Ok(token) => running.emit(token, tokenizer, *context),
                    Err(error) => {
                        // NaN in its KV cache would spread to requests with the same prefix.
                        let empty = pages.start(&[]);
                        pages.release(std::mem::replace(&mut running.sequence, empty));
                        running.send(Event::Error(error))
                    }
                };
                if !goes_on {
                    ended.push(i);
                }
            }
            inbox.extend(messages.try_iter());
            let is_cancelled = running.iter().any(|running| running.cancelled.load(Relaxed));
            match ended.is_empty() && inbox.is_empty() && !is_cancelled {
                true => ControlFlow::Continue(()),
                false => ControlFlow::Break(()),
            }
        })?;
        self.checkpoint()?;
        self.end(&ended);
        Ok(())
    }

    /// Copies the recurrent state of the requests whose prompt the step has completed.
    fn checkpoint(&mut self) -> Result<(), Error> {
        for (running, &taken) in self.running.iter_mut().zip(&self.taken) {
            let is_complete = running.sequence.tokens.len() == running.request.prompt.len();
            if taken > 0
                && is_complete
                && let Some((from, to)) = self.pages.checkpoint(&mut running.sequence)
            {
                self.model.copy_state(from, to)?;
            }
        }
        Ok(())
    }

    /// Removes the requests with these ascending indices and caches their pages for prefix reuse.
    fn end(&mut self, ended: &[usize]) {
        for &i in ended.iter().rev() {
            let mut running = self.running.remove(i);
            self.pages.trim(&mut running.sequence);
            self.pages.keep(running.sequence);
        }
    }

    /// Fills the batch with decode rows and prefill chunks. If pages are short, requests wait for
    /// others to end; if all wait, the youngest is preempted and recomputed later.
    fn schedule_mixed(&mut self) -> Result<(), Error> {
        loop {
            self.fill_batch();
            if !self.batch.tokens.is_empty() {
                return Ok(());
            }
            let stored = |r: &Running| !r.sequence.tokens.is_empty();
            let youngest = self.running.iter().rposition(stored).filter(|&i| i > 0);
            let Some(youngest) = youngest else {
                let tokens = self.running.iter().map(|r| r.sequence.tokens.len() + r.pending.len());
                return Err(Error::OutOfPages { tokens: tokens.sum() });
            };
            let running = &mut self.running[youngest];
            let fresh = self.pages.start(&[]);
            let mut stored = std::mem::replace(&mut running.sequence, fresh);
            running.pending.splice(0..0, stored.tokens.drain(..));
            self.pages.release(stored);
        }
    }

    /// Fills the batch with the requests for which pages can be reserved.
    fn fill_batch(&mut self) {
        let waiting: Vec<Waiting> = self.running.iter().map(Running::waiting).collect();
        let limits = self.model.limits();
        schedule(&waiting, limits.tokens, limits.outputs, &mut self.taken);
        self.batch.clear();
        self.params.clear();
        for (running, taken) in self.running.iter_mut().zip(&mut self.taken) {
            // A preempted request recomputes its prompt and its generated tokens. A span holds
            // only one of the two, so that rounding is the same as in the first computation.
            let (prompt, stored) = (running.request.prompt.len(), running.sequence.tokens.len());
            if stored < prompt {
                *taken = (*taken).min(prompt - stored);
            }
            if *taken == 0 || !self.pages.reserve(&mut running.sequence, *taken) {
                *taken = 0;
                continue;
            }
            self.batch.push(running.span(*taken), &running.pending[..*taken]);
            if *taken == running.pending.len() {
                self.batch.output_last();
                self.params.push(running.sampler.params(1));
            }
        }
    }

    /// Ends cancelled requests and caches their pages for prefix reuse.
    fn drop_cancelled(&mut self) {
        for i in (0..self.running.len()).rev() {
            if self.running[i].cancelled.load(Relaxed) {
                let mut running = self.running.remove(i);
                running.finish(Finish::Cancelled);
                self.pages.keep(running.sequence);
            }
        }
    }

    /// Ends every request: after a failed step, the contents of the KV cache are undefined.
    fn fail(&mut self, error: Error) {
        let message = error.to_string();
        for running in self.running.drain(..) {
            running.send(Event::Error(Error::Step(message.clone())));
            self.pages.release(running.sequence);
        }
    }
}

impl Running {
    fn waiting(&self) -> Waiting {
        Waiting { pending: self.pending.len(), decoding: self.first_token.is_some() }
    }

    /// Tells the client how much of its prompt is read. A preempted request has been told before.
    fn report_prefill(&self) {
        let (done, total) = (self.sequence.tokens.len(), self.request.prompt.len());
        if self.first_token.is_none() {
            // The client may have dropped its events.
            let _ = self.events.send(Event::Prefill { done, total });
        }
    }

    /// A span of the next `len` pending tokens.
    fn span(&self, len: usize) -> Span {
        self.sequence.span(len, self.sequence.tokens.len() < self.request.prompt.len())
    }

    /// How many tokens can still be generated; at least one.
    fn tokens_left(&self, context: usize) -> usize {
        let room = context.saturating_sub(self.sequence.tokens.len() + 1);
        let most = self.request.max_tokens.unwrap_or(usize::MAX);
        room.min(most.saturating_sub(self.usage.generated_tokens)).max(1)
    }

    /// Samples the next token from its logits.
    fn sample(&mut self, logits: &[f32]) -> Result<u32, Error> {
        let token = self.sampler.sample(logits)?;
        self.sampler.accept(token);
        Ok(token)
    }

    /// Adds the next token, which the model sampled, to the sampler's history.
    fn accept(&mut self, token: u32) -> u32 {
        self.sampler.accept_sampled(token);
        token
    }

    /// Sends the next token to the client. Returns whether the request goes on.
    fn emit(&mut self, id: u32, tokenizer: &Tokenizer, context: usize) -> bool {
        self.first_token.get_or_insert_with(Instant::now);
        self.usage.generated_tokens += 1;
        let is_end = tokenizer.is_end_of_generation(id) && !self.request.ignore_end;
        if is_end || self.request.stop_tokens.contains(&id) {
            return self.finish(Finish::End);
        }
        let text = self.stream.push(id);
        let (text, stopped) = self.stop.push(&text);
        if self.events.send(Event::Token { id, text }).is_err() {
            return false;
        }
        if let Some(text) = stopped {
            return self.finish(Finish::Stop(text));
        }
        let length = self.sequence.tokens.len() + 1;
        if self.request.max_tokens == Some(self.usage.generated_tokens) {
            return self.finish(Finish::Length);
        }
        if length >= context {
            return self.finish(Finish::Context);
        }
        self.pending.push(id);
        true
    }

    fn finish(&mut self, reason: Finish) -> bool {
        let mut text = String::new();
        if !matches!(reason, Finish::Stop(_)) {
            let rest = self.stream.finish();
            text = self.stop.push(&rest).0 + &self.stop.finish();
        }
        let first = self.first_token.unwrap_or(self.started);
        let timings = Timings {
            prompt_ms: (first - self.started).as_secs_f64() * 1e3,
            generate_ms: first.elapsed().as_secs_f64() * 1e3,
        };
        self.send(Event::Done { reason, text, usage: self.usage, timings })
    }

    /// Sends the last event. Returns false: the request has ended.
    fn send(&self, last: Event) -> bool {
        // The client may have dropped its events.
        let _ = self.events.send(last);
        false
    }
}
