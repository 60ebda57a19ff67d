//! From a request of any interface to the events of its answers. Templates are rendered and texts
//! are tokenized on threads that may block; the events of all answers come through one channel.

use bodkin::{Event, FinishReason, Logprobs, Request, Timings, Usage};
use bodkin_engine::{EventDecoder, Reasoning, ToolParser, Update, UpdateSink};
use serde_json::{Map, Value};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::sync::watch;
use tokio::task::spawn_blocking;

use crate::auth::TokenCounter;
use crate::error::{ApiError, Result};
use crate::metrics::RequestMetrics;
use crate::models::Lease;
use crate::prompt::{Prompt, tokenize};
use crate::reasoning::{Delta, ReasoningSplitter};
use crate::timings::{Clock, Reports};
use crate::tools::Calling;

/// The most log-probabilities of prompts in one answer: those of their tokens, and of alternatives.
/// As JSON, one takes about 200 bytes.
const PROMPT_LOGPROBS: usize = 1 << 17;

/// A request in the engine's terms.
#[derive(Clone, Debug)]
pub(crate) struct Generation {
    pub(crate) prompts: Vec<Prompt>,
    /// Its prompt is filled in.
    pub(crate) request: Request,
    /// How many answers to each prompt.
    pub(crate) choices: usize,
    /// Whether reasoning is separated from the answer.
    pub(crate) separates_reasoning: bool,
    pub(crate) reports: Reports,
}

/// An event of one answer.
#[derive(Debug)]
pub(crate) struct ChoiceEvent {
    /// Which answer: those to the first prompt come first.
    pub(crate) index: usize,
    pub(crate) delta: Delta,
    pub(crate) kind: EventKind,
    /// Fields that the request asks for in streamed answers.
    pub(crate) report: Map<String, Value>,
}

/// What an event says beside its text.
#[derive(Debug)]
pub(crate) enum EventKind {
    /// A part of the prompt is stored; only for requests that ask for its report.
    Prefill,
    Token {
        id: u32,
        logprobs: Option<Box<Logprobs>>,
    },
    Done {
        finish: FinishReason,
        usage: Usage,
        timings: Timings,
    },
    Failed(ApiError),
}

/// A running request. Dropping it cancels all its answers.
pub(crate) struct Running {
    pub(crate) lease: Lease,
    /// Token counts of the answers that have ended; those of a prompt are counted once.
    pub(crate) usage: Usage,
    /// The tokens of each prompt.
    prompts: Vec<Vec<u32>>,
    receiver: UnboundedReceiver<(usize, Update)>,
    choices: Vec<Choice>,
    /// Answers that have not ended.
    open: usize,
    metrics: RequestMetrics,
    counter: TokenCounter,
    /// Whether the server ends its requests.
    cancelled: watch::Receiver<bool>,
}

struct Choice {
    decoder: EventDecoder,
    /// Of the prompt's tokens from the second on, if they are asked for.
    prompt_logprobs: Vec<Logprobs>,
    /// Tokens that have been counted.
    counted: usize,
    has_ended: bool,
    clock: Clock,
    splitter: Option<ReasoningSplitter>,
    /// What finds the calls behind the reasoning.
    parser: Option<ToolParser>,
    /// Tokens of the reasoning and of its marks.
    reasoning_tokens: usize,
}

/// A whole answer.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) text: Delta,
    pub(crate) tokens: Vec<AnswerToken>,
    pub(crate) finish: FinishReason,
    pub(crate) usage: Usage,
    pub(crate) timings: Timings,
}

/// A token of an answer.
#[derive(Debug)]
pub(crate) struct AnswerToken {
    pub(crate) id: u32,
    pub(crate) logprobs: Option<Box<Logprobs>>,
}

impl Generation {
    /// Submits the request. `counter` receives its tokens, also if its client goes away.
    pub(crate) async fn start(
        self,
        lease: Lease,
        metrics: RequestMetrics,
        counter: TokenCounter,
        cancelled: watch::Receiver<bool>,
    ) -> Result<Running> {
        let task = spawn_blocking(move || self.submit(lease, metrics, counter, cancelled));
        task.await.map_err(|_| ApiError::internal("preparing the request panicked"))?
    }

    fn submit(
        self,
        lease: Lease,
        metrics: RequestMetrics,
        counter: TokenCounter,
        cancelled: watch::Receiver<bool>,
    ) -> Result<Running> {
        let Generation { prompts, mut request, choices, separates_reasoning, reports } = self;
        let tools = prompts.iter().find_map(Prompt::tools);
        let calling = tools.map(|tools| Calling::new(tools, &lease)).transpose()?;
        if let Some(calling) = &calling {
            request.constraint = calling.constraint(request.constraint.as_deref())?;
        }
        let prompts = prompts.into_iter().map(|prompt| tokenize(&lease, prompt));
        let prompts = prompts.collect::<Result<Vec<_>>>()?;
        check_prompt_logprobs(&prompts, &request, choices)?;
        let model = lease.text()?;
        // Before each answer has a copy of its prompt.
        let tokens = prompts.iter().map(|(tokens, _)| tokens.as_slice());
        model.engine().check_prompts(tokens, choices)?;
        // The answers to a prompt read it once, unless each has its log-probabilities.
        let readers = if request.prompt_logprobs.is_some() { choices } else { 1 };
        let read = readers * prompts.iter().map(|(tokens, _)| tokens.len()).sum::<usize>();
        request.max_tokens = counter.admit(read, prompts.len() * choices, request.max_tokens)?;
        let (sender, receiver) = unbounded_channel();
        let mut requests = Vec::with_capacity(prompts.len() * choices);
        let mut reasoning = Vec::with_capacity(prompts.len());
        for (tokens, text) in &prompts {
            request.reasoning = match text {
                Some(text) => reasoning_of(&lease, calling.as_ref(), text)?,
                // A text that no template made has no reasoning.
                None => None,
            };
            reasoning.push(request.reasoning);
            for n in 0..choices {
                let mut request = request.clone();
                request.prompt.clone_from(tokens);
                // Answers differ, and each is what its seed gives alone.
                request.sampling.seed = request.sampling.seed.map(|s| s.wrapping_add(n as u64));
                let (sender, index) = (sender.clone(), requests.len());
                let sink = Box::new(move |update| sender.send((index, update)).is_ok());
                requests.push((request, sink as UpdateSink));
            }
        }
        let decoders = model.engine().submit_all(requests);
        let decoders = decoders.inspect_err(|_| counter.give_back(read))?;
        let mut running = Vec::with_capacity(decoders.len());
        for (i, decoder) in decoders.into_iter().enumerate() {
            // Calls within the reasoning are none.
            let is_separated = separates_reasoning || calling.is_some();
            let reasoning = reasoning[i / choices].filter(|_| is_separated);
            let prompt = prompts[i / choices].1.as_deref().unwrap_or_default();
            let parser = calling.as_ref().map(|calling| calling.parser(prompt));
            running.push(Choice::new(decoder, reasoning, parser, reports));
        }
        Ok(Running {
            usage: Usage::default(),
            prompts: prompts.into_iter().map(|(tokens, _)| tokens).collect(),
            receiver,
            open: running.len(),
            choices: running,
            metrics,
            counter,
            cancelled,
            lease,
        })
    }
}

impl Choice {
    fn new(
        decoder: EventDecoder,
        reasoning: Option<Reasoning>,
        parser: Option<ToolParser>,
        reports: Reports,
    ) -> Choice {
        Choice {
            decoder,
            prompt_logprobs: Vec::new(),
            counted: 0,
            has_ended: false,
            clock: Clock::new(reports),
            splitter: reasoning.map(ReasoningSplitter::new),
            parser,
            reasoning_tokens: 0,
        }
    }
}

/// How the answer to a rendered prompt may begin with reasoning.
fn reasoning_of(
    lease: &Lease,
    calling: Option<&Calling>,
    prompt: &str,
) -> Result<Option<Reasoning>> {
    match calling.and_then(|calling| calling.format.reasoning) {
        Some(markers) => Ok(Some(Reasoning::marked(markers, prompt))),
        None => Ok(Reasoning::of(lease.text()?.template()?.source(), prompt)),
    }
}

/// Refuses a request whose answer would have too many log-probabilities of prompts.
fn check_prompt_logprobs(
    prompts: &[(Vec<u32>, Option<String>)],
    request: &Request,
    choices: usize,
) -> Result<()> {
    let Some(top) = request.prompt_logprobs else { return Ok(()) };
    let tokens: usize = prompts.iter().map(|(tokens, _)| choices * tokens.len()).sum();
    let limit = PROMPT_LOGPROBS / (1 + top);
    if tokens <= limit {
        return Ok(());
    }
    let message = format!(
        "the prompts of all answers have {tokens} tokens; with {top} alternatives of each, at most \
         {limit} can have log-probabilities in one request"
    );
    Err(ApiError::bad_request(message))
}

impl Running {
    /// The number of answers.
    pub(crate) fn choices(&self) -> usize {
        self.choices.len()
    }

    /// How many of them each prompt has.
    fn choices_per_prompt(&self) -> usize {
        self.choices.len() / self.prompts.len().max(1)
    }

    /// The tokens of an answer's prompt.
    pub(crate) fn prompt(&self, index: usize) -> &[u32] {
        &self.prompts[index / self.choices_per_prompt()]
    }

    /// The log-probabilities of an answer's prompt, from its second token on. All have come with
    /// the first token of the answer, or with its end.
    pub(crate) fn prompt_logprobs(&self, index: usize) -> &[Logprobs] {
        &self.choices[index].prompt_logprobs
    }

    /// How many log-probabilities the response to these answers has.
    pub(crate) fn count_logprobs(&self, answers: &[Answer]) -> usize {
        let tokens = answers.iter().flat_map(|answer| &answer.tokens);
        let own = tokens.filter_map(|token| token.logprobs.as_deref());
        let prompts = self.choices.iter().flat_map(|choice| &choice.prompt_logprobs);
        own.chain(prompts).map(|logprobs| 1 + logprobs.top.len()).sum()
    }

    /// The tokens of an answer so far that are reasoning.
    pub(crate) fn reasoning_tokens(&self, index: usize) -> usize {
        self.choices[index].reasoning_tokens
    }

    /// Whether all answers have ended, and their events were read.
    pub(crate) fn has_ended(&self) -> bool {
        self.open == 0
    }

    /// The next event; none when all answers have ended.
    pub(crate) async fn next(&mut self) -> Option<ChoiceEvent> {
        while self.open > 0 {
            let update = tokio::select! {
                update = self.receiver.recv() => {
                    update.ok_or_else(|| ApiError::internal("the engine has stopped"))
                }
                _ = self.cancelled.wait_for(|cancelled| *cancelled) => {
                    Err(ApiError::unavailable("the server stops"))
                }
                error = self.lease.hung() => Err(error),
            };
            let (index, update) = match update {
                Ok(update) => update,
                Err(error) => {
                    let open = self.choices.iter_mut().filter(|choice| !choice.has_ended);
                    for choice in open {
                        choice.has_ended = true;
                        self.metrics.failed(choice.counted, &error);
                    }
                    self.open = 0;
                    let (delta, kind) = (Delta::default(), EventKind::Failed(error));
                    return Some(ChoiceEvent { index: 0, delta, kind, report: Map::new() });
                }
            };
            if let Some(event) = self.decode(index, update) {
                return Some(event);
            }
        }
        None
    }

    /// An event that is there already.
    pub(crate) fn try_next(&mut self) -> Option<ChoiceEvent> {
        while self.open > 0 {
            let (index, update) = self.receiver.try_recv().ok()?;
            if let Some(event) = self.decode(index, update) {
                return Some(event);
            }
        }
        None
    }

    fn decode(&mut self, index: usize, update: Update) -> Option<ChoiceEvent> {
        let is_first_of_prompt = index.is_multiple_of(self.choices_per_prompt());
        let choice = &mut self.choices[index];
        let mut report = Map::new();
        let (text, kind) = match choice.decoder.decode(update)? {
            Event::Prefill { done, total } => {
                report = choice.clock.prefill(done, total)?;
                (String::new(), EventKind::Prefill)
            }
            Event::PromptToken { logprobs, .. } => {
                choice.prompt_logprobs.push(*logprobs);
                return None;
            }
            Event::Token { id, text, logprobs } => {
                report = choice.clock.token();
                choice.counted += 1;
                self.counter.count(1);
                self.metrics.token(index);
                (text, EventKind::Token { id, logprobs })
            }
            Event::Done { reason: finish, text, usage, timings } => {
                (self.open, choice.has_ended) = (self.open - 1, true);
                self.metrics.done(&finish, &usage, &timings);
                self.usage.generated_tokens += usage.generated_tokens;
                if is_first_of_prompt {
                    self.usage.prompt_tokens += usage.prompt_tokens;
                    self.usage.cached_tokens += usage.cached_tokens;
                }
                if self.open == 0 {
                    self.metrics.all_done(&self.usage);
                }
                // Tokens without an event, such as the end of the answer.
                self.counter.count(usage.generated_tokens.saturating_sub(choice.counted));
                (text, EventKind::Done { finish, usage, timings })
            }
            Event::Error(error) => {
                (self.open, choice.has_ended) = (self.open - 1, true);
                let error = ApiError::from(error);
                self.metrics.failed(choice.counted, &error);
                (String::new(), EventKind::Failed(error))
            }
        };
        let is_token = matches!(kind, EventKind::Token { .. });
        let is_last = matches!(kind, EventKind::Done { .. } | EventKind::Failed(_));
        let mut delta = match &mut choice.splitter {
            Some(splitter) => {
                let was_reasoning = splitter.is_reasoning();
                let delta = splitter.push(&text, is_last);
                let is_counted = was_reasoning || splitter.is_reasoning();
                choice.reasoning_tokens += usize::from(is_counted && is_token);
                delta
            }
            None => Delta { content: text, ..Delta::default() },
        };
        if let Some(parser) = &mut choice.parser {
            let found = parser.push(&delta.content, is_last);
            (delta.content, delta.calls) = (found.content, found.calls);
        }
        Some(ChoiceEvent { index, delta, kind, report })
    }

    /// Counts the answers that have not ended as failed with one of them.
    fn fail_open(&mut self, error: &ApiError) {
        for choice in self.choices.iter_mut().filter(|choice| !choice.has_ended) {
            choice.has_ended = true;
            self.metrics.failed(choice.counted, error);
        }
    }

    /// Waits for all answers.
    pub(crate) async fn collect(mut self) -> Result<(Running, Vec<Answer>)> {
        let mut texts: Vec<(Delta, Vec<AnswerToken>)> = Vec::new();
        texts.resize_with(self.choices.len(), Default::default);
        let mut answers: Vec<Option<Answer>> = Vec::new();
        answers.resize_with(self.choices.len(), || None);
        while let Some(ChoiceEvent { index, delta, kind, .. }) = self.next().await {
            let (text, tokens) = &mut texts[index];
            text.reasoning.push_str(&delta.reasoning);
            text.content.push_str(&delta.content);
            text.calls.extend(delta.calls);
            match kind {
                EventKind::Prefill => {}
                EventKind::Token { id, logprobs } => tokens.push(AnswerToken { id, logprobs }),
                EventKind::Done { finish, usage, timings } => {
                    let (text, tokens) = std::mem::take(&mut texts[index]);
                    answers[index] = Some(Answer { text, tokens, finish, usage, timings });
                }
                EventKind::Failed(error) => {
                    self.fail_open(&error);
                    return Err(error);
                }
            }
        }
        let answers = answers.into_iter().collect::<Option<Vec<_>>>();
        let answers = answers.ok_or_else(|| ApiError::internal("the engine has stopped"))?;
        Ok((self, answers))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // The client has gone.
        for choice in self.choices.iter().filter(|choice| !choice.has_ended) {
            self.metrics.cancelled(choice.counted);
        }
    }
}
