//! An engine as its clients see it: submit a request, read its events.

use std::sync::atomic::AtomicBool;
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;

use bodkin_backend::{Limits, Model};
use bodkin_model::Plan;

use crate::client::{Client, OpenRequest};
use crate::error::{Error, Result};
use crate::events::{EventDecoder, Events, UpdateSink};
use crate::grammar::{Compiler, Matcher};
use crate::pages::Pages;
use crate::prefix_store::PrefixStore;
use crate::request::Request;
use crate::restore::Restorer;
use crate::sampler::Sampler;
use crate::scheduler::Scheduler;
use crate::stats::{ExpertReport, Stats, Status};
use crate::tokenizer::Tokenizer;
use crate::worker::{Message, Worker};

/// The most logits of a step that are for the log-probabilities of prompts, in elements: 16 MiB.
const PROMPT_LOGITS: usize = 1 << 22;

/// How an engine is sized.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineOptions {
    /// The most tokens of a sequence, prompt and output together.
    pub context: usize,
    /// The most tokens of one step: how much of a prompt is read at once.
    pub step_tokens: usize,
    /// The most requests that run at the same time.
    pub parallel: usize,
    /// The most requests that wait for those to end.
    pub queue: usize,
    /// Tokens of all sequences in the KV cache, running and cached; by default those of `parallel`
    /// sequences of `context` tokens.
    pub cache_tokens: Option<usize>,
    /// Slots for checkpoints of recurrent state, beside one for each request.
    pub more_checkpoints: usize,
}

impl EngineOptions {
    /// Options for one request at a time.
    pub fn single(context: usize, step_tokens: usize) -> EngineOptions {
        EngineOptions {
            context,
            step_tokens,
            parallel: 1,
            queue: 0,
            cache_tokens: None,
            more_checkpoints: 0,
        }
    }

    /// What the model must be loaded for.
    pub fn limits(&self, plan: &Plan) -> Limits {
        let (len, step, windows) = (self.context, self.step_tokens, plan.windows());
        let mut pages = Pages::needed(&windows, len, step, self.parallel);
        if let Some(tokens) = self.cache_tokens {
            let all = Pages::needed(&windows, tokens.max(len), step, 1);
            let full = windows.iter().zip(pages.iter_mut().zip(all));
            full.filter(|(window, _)| window.is_none()).for_each(|(_, (pages, all))| *pages = all);
        }
        let state_slots = match plan.states.is_empty() {
            true => 0,
            false => Pages::state_slots_needed(self.parallel) + self.more_checkpoints,
        };
        let tokens = step.max(self.parallel);
        // Every request that decodes has a row in every step.
        let for_prompts = (PROMPT_LOGITS / plan.output_width()).max(1);
        let outputs = (self.parallel + for_prompts).min(tokens);
        Limits { tokens, outputs, pages, state_slots }
    }
}

/// A loaded model that answers requests.
pub struct Engine {
    tokenizer: Arc<Tokenizer>,
    /// Compiles constraints, from the first one on.
    compiler: OnceLock<std::result::Result<Compiler, String>>,
    context: usize,
    vocabulary: usize,
    /// The most requests at a time, running and waiting.
    most_open: usize,
    queue: usize,
    status: Arc<Status>,
    messages: Option<Arc<Sender<Message>>>,
    worker: Option<JoinHandle<()>>,
}

impl Engine {
    /// Starts the thread that runs `model`, which must have been loaded with
    /// [`EngineOptions::limits`]. Fails for an encoder.
    pub fn open(
        model: Box<dyn Model>,
        tokenizer: Arc<Tokenizer>,
        options: EngineOptions,
    ) -> Result<Engine> {
        Engine::open_with(model, tokenizer, options, None)
    }

    /// As [`Engine::open`], with pages of the KV cache on disk.
    pub fn open_with(
        model: Box<dyn Model>,
        tokenizer: Arc<Tokenizer>,
        options: EngineOptions,
        store: Option<PrefixStore>,
    ) -> Result<Engine> {
        let plan = model.plan();
        if plan.is_encoder() {
            return Err(Error::NoText { architecture: plan.architecture.clone() });
        }
        let pages = Pages::of(&*model);
        let context = options.context.min(pages.longest_sequence());
        let (vocabulary, status) = (plan.vocabulary, Arc::new(Status::new()));
        let (messages, receiver) = mpsc::channel();
        let with_restorer = |store| {
            let store = Arc::new(store);
            Restorer::new(Arc::clone(&store)).map(|restorer| (store, restorer))
        };
        let store = store.map(with_restorer).transpose().map_err(Error::Thread)?;
        let scheduler = Scheduler::new(pages, options.parallel, model.limits().clone());
        let (text, state) = (Arc::clone(&tokenizer), Arc::clone(&status));
        let worker = Worker::new(model, scheduler, text, state, store);
        let thread = std::thread::Builder::new().name("bodkin-engine".to_owned());
        let worker = thread.spawn(move || worker.run(&receiver)).map_err(Error::Thread)?;
        Ok(Engine {
            tokenizer,
            compiler: OnceLock::new(),
            context,
            vocabulary,
            most_open: options.parallel.saturating_add(options.queue),
            queue: options.queue,
            status,
            messages: Some(Arc::new(messages)),
            worker: Some(worker),
        })
    }

    /// The model's tokenizer.
    pub fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.tokenizer
    }

    /// The most tokens of a sequence, prompt and output together.
    pub fn context(&self) -> usize {
        self.context
    }

    /// Queues a request.
    ///
    /// # Errors
    /// If the request can never run, its constraint is not valid, the queue is full, or the engine
    /// has failed.
    pub fn submit(&self, request: Request) -> Result<Events> {
        let (sender, receiver) = mpsc::channel();
        let sink = Box::new(move |update| sender.send(update).is_ok());
        Ok(Events { decoder: self.submit_to(request, sink)?, receiver })
    }

    /// Queues a request whose updates go to `sink`, for clients that wait for many requests at
    /// once. Returns what turns updates into events.
    ///
    /// # Errors
    /// As [`Engine::submit`].
    pub fn submit_to(&self, request: Request, sink: UpdateSink) -> Result<EventDecoder> {
        let max_tokens = self.check(&request)?;
        let place = OpenRequest::new(&self.status, self.most_open);
        let place = place.ok_or(Error::QueueFull { limit: self.queue })?;
        let matcher = self.compile(&request)?;
        self.enqueue(request, matcher, max_tokens, sink, place)
    }

    /// Queues requests that belong together: all of them, or none.
    ///
    /// # Errors
    /// As [`Engine::submit`], and if there are more than can ever run and wait.
    pub fn submit_all(&self, requests: Vec<(Request, UpdateSink)>) -> Result<Vec<EventDecoder>> {
        let (count, limit) = (requests.len(), self.most_open);
        self.check_count(count)?;
        let max_tokens = requests.iter().map(|(request, _)| self.check(request));
        let max_tokens = max_tokens.collect::<Result<Vec<_>>>()?;
        let places = OpenRequest::several(&self.status, count, limit)
            .ok_or(Error::QueueFull { limit: self.queue })?;
        let matchers = self.compile_all(requests.iter().map(|(request, _)| request))?;
        // If one is refused, dropping the decoders of those before it cancels them.
        let all = requests.into_iter().zip(matchers).zip(max_tokens).zip(places);
        all.map(|((((request, sink), matcher), max_tokens), place)| {
            self.enqueue(request, matcher, max_tokens, sink, place)
        })
        .collect()
    }

    /// Compiles a request's constraint, on the thread that submits it.
    fn compile(&self, request: &Request) -> Result<Option<Matcher>> {
        let Some(constraint) = &request.constraint else { return Ok(None) };
        let compiler = self.compiler.get_or_init(|| Compiler::new(&self.tokenizer));
        let wrong = |message: &String| Error::Constraint {
            field: constraint.field.clone(),
            message: message.clone(),
        };
        let compiler = compiler.as_ref().map_err(wrong)?;
        let matcher = compiler.compile(constraint, request.reasoning)?;
        // Without an answer there is nothing to mask.
        Ok(Some(matcher).filter(|_| request.max_tokens != Some(0)))
    }

    /// As [`Engine::compile`], once for requests in a row that have the same one.
    fn compile_all<'a>(
        &self,
        requests: impl Iterator<Item = &'a Request>,
    ) -> Result<Vec<Option<Matcher>>> {
        let mut matchers: Vec<Option<Matcher>> = Vec::new();
        let mut last: Option<&Request> = None;
        for request in requests {
            let constraints = [last, Some(request)].map(|it| it?.constraint.as_ref());
            let is_same = matches!(constraints, [Some(a), Some(b)] if Arc::ptr_eq(a, b))
                && last.is_some_and(|last| last.reasoning == request.reasoning);
            let matcher = match matchers.last() {
                Some(Some(matcher)) if is_same => Some(matcher.copy()),
                _ => self.compile(request)?,
            };
            matchers.push(matcher);
            last = Some(request);
        }
        Ok(matchers)
    }

    /// Refuses what [`Engine::submit_all`] would refuse of requests for `choices` answers to each
    /// of these prompts, before each has its copy of a prompt.
    ///
    /// # Errors
    /// As [`Engine::submit_all`].
    pub fn check_prompts<'a>(
        &self,
        prompts: impl ExactSizeIterator<Item = &'a [u32]>,
        choices: usize,
    ) -> Result<()> {
        self.check_count(prompts.len().saturating_mul(choices))?;
        prompts.into_iter().try_for_each(|prompt| self.check_prompt(prompt))
    }

    fn check_count(&self, count: usize) -> Result<()> {
        let limit = self.most_open;
        if count <= limit { Ok(()) } else { Err(Error::TooManyRequests { count, limit }) }
    }

    /// Queues a request that is checked and has a place; its sequence has at most `max_tokens`.
    fn enqueue(
        &self,
        mut request: Request,
        matcher: Option<Matcher>,
        max_tokens: usize,
        sink: UpdateSink,
        open: OpenRequest,
    ) -> Result<EventDecoder> {
        let mut sampler = Sampler::new(request.sampling.clone(), &self.tokenizer)?;
        request.prompt.iter().for_each(|&id| sampler.accept(id));
        let cancelled = Arc::new(AtomicBool::new(false));
        let decoder =
            EventDecoder::new(Arc::clone(&self.tokenizer), &request, Arc::clone(&cancelled));
        let prompt = std::mem::take(&mut request.prompt);
        let client = Client::new(request, (sampler, matcher), sink, cancelled, open);
        let (client, messages) = (Box::new(client), Arc::downgrade(self.messages()));
        let message = Message::Submit { client, prompt, max_tokens, messages };
        self.messages().send(message).map_err(|_| self.failure())?;
        Ok(decoder)
    }

    /// Checks what the worker relies on. Returns the most tokens of the request's sequence.
    fn check(&self, request: &Request) -> Result<usize> {
        if self.status.failure.get().is_some() {
            return Err(self.failure());
        }
        self.check_prompt(&request.prompt)?;
        let generated = request.max_tokens.unwrap_or(usize::MAX);
        Ok(self.context.min(request.prompt.len().saturating_add(generated)))
    }

    fn check_prompt(&self, prompt: &[u32]) -> Result<()> {
        let (tokens, vocabulary) = (prompt.len(), self.vocabulary);
        if tokens == 0 {
            return Err(Error::EmptyPrompt);
        }
        if tokens >= self.context {
            return Err(Error::PromptTooLong { tokens, limit: self.context - 1 });
        }
        match prompt.iter().find(|&&id| id as usize >= vocabulary) {
            Some(&id) => Err(Error::UnknownToken { id, vocabulary }),
            None => Ok(()),
        }
    }

    /// The state of the engine; does not wait for a step.
    pub fn stats(&self) -> Stats {
        self.status.snapshot()
    }

    /// Why the engine answers no more requests; none while it does.
    pub fn failed(&self) -> Option<&str> {
        self.status.failure.get().map(String::as_str)
    }

    /// What experts did since the model was loaded, layer by layer, and their times in one step.
    /// Waits for the current step and the next, which is timed; none if the engine has failed.
    pub fn expert_stats(&self) -> Option<ExpertReport> {
        let (reply, receiver) = mpsc::channel();
        self.messages().send(Message::ExpertStats(reply)).ok()?;
        receiver.recv().ok()
    }

    fn failure(&self) -> Error {
        let cause = self.failed().unwrap_or("the engine's thread has ended");
        Error::Failed(cause.to_owned())
    }

    fn messages(&self) -> &Arc<Sender<Message>> {
        self.messages.as_ref().expect("an engine takes messages until it drops")
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.messages = None;
        if let Some(worker) = self.worker.take() {
            // A worker that panicked has said so already.
            let _ = worker.join();
        }
    }
}
