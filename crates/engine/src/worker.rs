//! The loop: admit, schedule, forward, sample, emit. One thread owns the model and runs it for
//! all requests; everything else talks to it through channels. While nothing happens but one more
//! token of each request, the model chooses them itself and need not wait for anybody.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, Sender};
use std::time::Instant;

use bodkin_backend::{Batch, Model, PAGE_TOKENS, SamplingParams, Span};

use crate::error::Error;
use crate::pages::{Pages, Sequence};
use crate::request::{Event, Finish, Request, Timings, Usage};
use crate::sampler::Sampler;
use crate::scheduler::{Waiting, schedule};
use crate::stats::{Stats, expert_counts};
use crate::stop::StopTexts;
use crate::stream::TextStream;
use crate::tokenizer::Tokenizer;

/// The most steps that a model runs by itself.
const STEPS_ALONE: usize = PAGE_TOKENS;

/// A request on its way to the worker.
pub(crate) struct Submission {
    pub(crate) request: Request,
    pub(crate) events: Sender<Event>,
    /// Set when the request is to end.
    pub(crate) cancelled: Arc<AtomicBool>,
}

/// What clients want of the worker.
pub(crate) enum Message {
    /// An answer.
    Submit(Box<Submission>),
    /// How the engine is, once the step that runs has ended.
    Stats(Sender<Stats>),
}

/// A request that is being worked on.
struct Running {
    request: Request,
    events: Sender<Event>,
    cancelled: Arc<AtomicBool>,
    sequence: Sequence,
    /// Tokens that are known and not yet stored.
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
    /// Requests that come next, oldest first.
    waiting: VecDeque<Submission>,
    /// Messages that came while the model ran by itself.
    inbox: Vec<Message>,
    /// Rows of logits of the last step.
    logits: Vec<f32>,
    batch: Batch,
    taken: Vec<usize>,
}

impl Worker {
    /// `context` is the most tokens that a sequence may have.
    pub(crate) fn new(model: Box<dyn Model>, tokenizer: Arc<Tokenizer>, context: usize) -> Worker {
        let limits = model.limits();
        let pages = Pages::of(&*model);
        let logits = vec![0.0; limits.outputs * model.plan().output_width()];
        let context = context.min(pages.longest_sequence());
        Worker {
            model,
            tokenizer,
            context,
            pages,
            running: Vec::new(),
            waiting: VecDeque::new(),
            inbox: Vec::new(),
            logits,
            batch: Batch::default(),
            taken: Vec::new(),
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
                    experts: expert_counts(&*self.model),
                };
                // Whoever asked may have gone.
                let _ = reply.send(stats);
            }
        }
    }

    fn admit(&mut self, submission: Submission) {
        let events = submission.events.clone();
        match self.start(submission) {
            Ok(running) => self.running.push(running),
            // Nobody may be listening any more; then nobody needs to know.
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

    /// One step, or some that the model runs by itself.
    fn advance(&mut self, messages: &Receiver<Message>) -> Result<(), Error> {
        let steps = self.steps_alone();
        let rules: Option<Vec<SamplingParams>> = match steps {
            0 => None,
            _ => self.running.iter().map(|running| running.sampler.rule(steps)).collect(),
        };
        let result = match rules {
            Some(rules) if self.reserve(steps) => self.generate(&rules, steps, messages),
            _ => return self.step(),
        };
        self.running.iter_mut().for_each(|running| self.pages.trim(&mut running.sequence));
        result
    }

    /// How many steps may come in which every request has one more token, and none can have reached
    /// its length before the last; 0 if the next step is not such a one.
    fn steps_alone(&self) -> usize {
        let decodes = |r: &Running| r.first_token.is_some() && r.pending.len() == 1;
        if self.running.len() > self.model.limits().tokens || !self.running.iter().all(decodes) {
            return 0;
        }
        let left = self.running.iter().map(|running| running.tokens_left(self.context));
        left.min().unwrap_or(0).min(STEPS_ALONE)
    }

    /// Takes pages for so many more tokens of every request, or none.
    fn reserve(&mut self, tokens: usize) -> bool {
        let pages = &mut self.pages;
        let is_enough = self.running.iter_mut().all(|r| pages.reserve(&mut r.sequence, tokens));
        if !is_enough {
            self.running.iter_mut().for_each(|running| pages.trim(&mut running.sequence));
        }
        is_enough
    }

    /// Steps that the model runs by itself, until a request ends or somebody wants something.
    fn generate(
        &mut self,
        rules: &[SamplingParams],
        steps: usize,
        messages: &Receiver<Message>,
    ) -> Result<(), Error> {
        let Worker { model, tokenizer, context, pages, running, inbox, .. } = self;
        let batch = Batch {
            tokens: running.iter().map(|running| running.pending[0]).collect(),
            spans: running.iter().map(|running| running.span(1)).collect(),
            outputs: (0..running.len() as u32).collect(),
            ..Batch::default()
        };
        let mut ended = Vec::new();
        let result = model.generate(batch, rules, steps, &mut |tokens| {
            for (i, (running, &id)) in running.iter_mut().zip(tokens).enumerate() {
                pages.advance(&mut running.sequence, &running.pending);
                running.pending.clear();
                running.sampler.accept_chosen(id);
                if !running.say(id, tokenizer, *context) {
                    ended.push(i);
                }
            }
            inbox.extend(messages.try_iter());
            let is_cancelled = running.iter().any(|running| running.cancelled.load(Relaxed));
            ended.is_empty() && inbox.is_empty() && !is_cancelled
        });
        self.end(&ended);
        Ok(result?)
    }

    /// One step of the model, and what follows from its logits.
    fn step(&mut self) -> Result<(), Error> {
        self.fill_batch()?;
        let vocabulary = self.model.plan().vocabulary;
        let rows = &mut self.logits[..self.batch.outputs.len() * vocabulary];
        self.model.forward(&self.batch, rows)?;
        let mut rows = self.logits.chunks_exact(vocabulary);
        let mut ended = Vec::new();
        for (i, running) in self.running.iter_mut().enumerate() {
            let taken = self.taken[i];
            if taken == 0 {
                continue;
            }
            let stored: Vec<u32> = running.pending.drain(..taken).collect();
            self.pages.advance(&mut running.sequence, &stored);
            if running.sequence.tokens.len() == running.request.prompt.len()
                && let Some((from, to)) = self.pages.checkpoint(&mut running.sequence)
            {
                self.model.copy_state(from, to)?;
            }
            if running.pending.is_empty() {
                let logits = rows.next().expect("a row for each request that was read to its end");
                if !running.next(logits, &self.tokenizer, self.context) {
                    ended.push(i);
                }
            }
        }
        self.end(&ended);
        Ok(())
    }

    /// Takes requests out that have ended, ascending; what they have stored may serve others.
    fn end(&mut self, ended: &[usize]) {
        for &i in ended.iter().rev() {
            let mut running = self.running.remove(i);
            self.pages.trim(&mut running.sequence);
            self.pages.keep(running.sequence);
        }
    }

    /// Chooses the tokens of the next step. Where pages are short, requests wait for others to
    /// end; if all wait, the youngest gives its pages up and begins again later.
    fn fill_batch(&mut self) -> Result<(), Error> {
        loop {
            self.schedule_step();
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

    /// Fills the batch with what has pages.
    fn schedule_step(&mut self) {
        let waiting: Vec<Waiting> = self.running.iter().map(Running::waiting).collect();
        let limits = self.model.limits();
        schedule(&waiting, limits.tokens, limits.outputs, &mut self.taken);
        let batch = &mut self.batch;
        batch.tokens.clear();
        batch.spans.clear();
        batch.outputs.clear();
        for (running, taken) in self.running.iter_mut().zip(&mut self.taken) {
            // What is stored again after pages were given up may be a prompt and what followed it:
            // a span is of one or the other, so that it is rounded as the first time.
            let (prompt, stored) = (running.request.prompt.len(), running.sequence.tokens.len());
            if stored < prompt {
                *taken = (*taken).min(prompt - stored);
            }
            if *taken == 0 || !self.pages.reserve(&mut running.sequence, *taken) {
                *taken = 0;
                continue;
            }
            batch.tokens.extend(&running.pending[..*taken]);
            if *taken == running.pending.len() {
                batch.outputs.push(batch.tokens.len() as u32 - 1);
            }
            batch.spans.push(running.span(*taken));
        }
    }

    /// Ends requests that are not wanted any more; what they have stored may serve others.
    fn drop_cancelled(&mut self) {
        for i in (0..self.running.len()).rev() {
            if self.running[i].cancelled.load(Relaxed) {
                let mut running = self.running.remove(i);
                running.finish(Finish::Cancelled);
                self.pages.keep(running.sequence);
            }
        }
    }

    /// Ends every request: a step that failed leaves no state to go on from.
    fn fail(&mut self, error: Error) {
        let message = error.to_string();
        for running in self.running.drain(..) {
            // Nobody may be listening any more; then nobody needs to know.
            let _ = running.events.send(Event::Error(Error::Step(message.clone())));
            self.pages.release(running.sequence);
        }
    }
}

impl Running {
    fn waiting(&self) -> Waiting {
        Waiting { pending: self.pending.len(), decoding: self.first_token.is_some() }
    }

    /// So many of the tokens that come next.
    fn span(&self, len: usize) -> Span {
        let Sequence { tokens, tables, .. } = &self.sequence;
        let (position, tables) = (tokens.len(), tables.clone());
        let is_prefill = position < self.request.prompt.len();
        Span { len, position, tables, state_slot: self.sequence.state_slot(), is_prefill }
    }

    /// How many tokens can still be generated; at least one.
    fn tokens_left(&self, context: usize) -> usize {
        let room = context.saturating_sub(self.sequence.tokens.len() + 1);
        let most = self.request.max_tokens.unwrap_or(usize::MAX);
        room.min(most.saturating_sub(self.usage.generated_tokens)).max(1)
    }

    /// Draws the next token and says it. Returns whether the request goes on.
    fn next(&mut self, logits: &[f32], tokenizer: &Tokenizer, context: usize) -> bool {
        let now = Instant::now();
        self.first_token.get_or_insert(now);
        let id = self.sampler.sample(logits);
        self.sampler.accept(id);
        self.say(id, tokenizer, context)
    }

    /// Says a token that was chosen. Returns whether the request goes on.
    fn say(&mut self, id: u32, tokenizer: &Tokenizer, context: usize) -> bool {
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
        let is_last = self.request.max_tokens == Some(self.usage.generated_tokens);
        if is_last || length >= context {
            return self.finish(Finish::Length);
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
        // Nobody may be listening any more; then nobody needs to know.
        let _ = self.events.send(Event::Done { reason, text, usage: self.usage, timings });
        false
    }
}
