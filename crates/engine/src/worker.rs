//! The worker's loop: schedule, step, report. One thread owns the model and runs it for all
//! requests; clients reach it through channels. While every request decodes, one call of the model
//! runs several steps, and may run ahead of the host.

use std::collections::VecDeque;
use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use bodkin_backend::{
    ExpertTimes, Model, OutputRequest, SamplingParams, Span, StateBlock, Step, Transfer,
};

use crate::client::{Client, RowError};
use crate::error::{Error, Result, panic_text};
use crate::logits_rows;
use crate::nonfinite;
use crate::pages::{Copies, FullPage};
use crate::prefix_store::{PrefixStore, StoredPage};
use crate::request::FinishReason;
use crate::restore::{READ_AHEAD, Restorer, Restoring};
use crate::scheduler::{OutputRow, ScheduledStep, Scheduler};
use crate::stats::{ExpertReport, Status, WeightReads};
use crate::tokenizer::Tokenizer;

/// How long an idle worker waits before it looks for cancelled requests among those whose pages are
/// read from disk.
const RESTORING_WAIT: Duration = Duration::from_millis(10);

/// A message from a client to the worker.
pub(crate) enum Message {
    /// Runs a request for `prompt`, up to `max_tokens` tokens of both. When pages of it are read
    /// from disk, [`Message::Restored`] comes through `messages`.
    Submit {
        client: Box<Client>,
        prompt: Vec<u32>,
        max_tokens: usize,
        messages: Weak<Sender<Message>>,
    },
    /// A page of a request was read from disk, or there are no more of it.
    Restored,
    /// Times the next step, and replies with what the model tells of its experts.
    ExpertStats(Sender<ExpertReport>),
}

/// Owns the model.
pub(crate) struct Worker {
    model: Box<dyn Model>,
    tokenizer: Arc<Tokenizer>,
    status: Arc<Status>,
    weight_reads: WeightReads,
    scheduler: Scheduler<Box<Client>>,
    /// Messages received during a step.
    inbox: VecDeque<Message>,
    step: ScheduledStep,
    /// Who waits for a step that is timed.
    reports: Vec<Sender<ExpertReport>>,
    /// How the model samples each output row; none where the request's own sampler does.
    params: Vec<Option<SamplingParams>>,
    /// The disk cache of prefixes, if there is one, and what reads it.
    store: Option<(Arc<PrefixStore>, Restorer)>,
}

impl Worker {
    pub(crate) fn new(
        model: Box<dyn Model>,
        scheduler: Scheduler<Box<Client>>,
        tokenizer: Arc<Tokenizer>,
        status: Arc<Status>,
        store: Option<(Arc<PrefixStore>, Restorer)>,
    ) -> Worker {
        status.stats().total_pages = model.limits().pages.clone();
        let weight_reads = WeightReads::of(model.plan());
        let worker = Worker {
            model,
            tokenizer,
            status,
            weight_reads,
            scheduler,
            inbox: VecDeque::new(),
            step: ScheduledStep::default(),
            reports: Vec::new(),
            params: Vec::new(),
            store,
        };
        worker.publish();
        worker
    }

    /// Works until the other end of `messages` is gone and every request has ended. If the model
    /// fails, all requests end with the cause, as the contents of the KV cache are undefined.
    pub(crate) fn run(mut self, messages: &Receiver<Message>) {
        let result = catch_unwind(AssertUnwindSafe(|| self.work(messages)));
        let cause = match result {
            Ok(Ok(())) => return,
            Ok(Err(error)) => error.to_string(),
            Err(panic) => format!("the engine's thread panicked: {}", panic_text(&*panic)),
        };
        self.status.end_step();
        // From here on, clients are refused.
        let cause = self.status.failure.get_or_init(|| cause);
        let inbox = self.inbox.drain(..).chain(messages.try_iter());
        let submitted = inbox.filter_map(|message| match message {
            Message::Submit { client, .. } => Some(client),
            Message::Restored | Message::ExpertStats(_) => None,
        });
        let restoring = self.store.iter_mut().flat_map(|(_, restorer)| restorer.drain());
        for client in self.scheduler.drain().chain(restoring).chain(submitted) {
            client.fail(Error::Failed(cause.clone()));
        }
        self.publish();
    }

    fn work(&mut self, messages: &Receiver<Message>) -> Result<()> {
        loop {
            if self.scheduler.is_idle() && self.inbox.is_empty() {
                self.report_experts(0);
                // Requests whose pages are read can be cancelled.
                let limit = if self.restoring() > 0 { RESTORING_WAIT } else { Duration::MAX };
                match messages.recv_timeout(limit) {
                    Ok(message) => self.take(message)?,
                    Err(RecvTimeoutError::Timeout) => {}
                    Err(RecvTimeoutError::Disconnected) if self.submit_restoring() => {}
                    Err(RecvTimeoutError::Disconnected) => return Ok(()),
                }
            }
            self.take_all(messages)?;
            for task in self.scheduler.remove(|client| client.is_cancelled()) {
                task.owner.finish(FinishReason::Cancelled);
            }
            if let Some((_, restorer)) = &mut self.store {
                for (client, held) in restorer.take_cancelled() {
                    self.scheduler.pages_mut().release_prefix(held);
                    client.finish(FinishReason::Cancelled);
                }
            }
            let mut restorer = self.store.as_mut().map(|(_, restorer)| restorer);
            self.scheduler.schedule(
                &mut self.step,
                |client| client.is_model_sampled(),
                |pages| restorer.as_mut().is_some_and(|restorer| restorer.release_held(pages)),
            );
            if let Some(index) = self.step.impossible {
                let task = self.scheduler.discard(index);
                task.owner.fail(Error::OutOfPages { tokens: task.tokens.len() });
            }
            self.publish();
            if self.step.spans.is_empty() {
                continue;
            }
            if self.reports.is_empty() {
                self.run_step(messages)?;
                continue;
            }
            self.step.steps = 1;
            self.model.set_profiling(true);
            self.run_step(messages)?;
            self.report_experts(1);
            self.model.set_profiling(false);
        }
    }

    /// Takes the messages that are there, but no more pages than are read ahead: a step of the
    /// running requests comes first.
    fn take_all(&mut self, messages: &Receiver<Message>) -> Result<()> {
        let mut restored = 0;
        while restored < READ_AHEAD
            && let Some(message) = self.inbox.pop_front().or_else(|| messages.try_recv().ok())
        {
            restored += usize::from(matches!(message, Message::Restored));
            self.take(message)?;
        }
        Ok(())
    }

    fn take(&mut self, message: Message) -> Result<()> {
        match message {
            Message::Submit { client, prompt, max_tokens, messages } => {
                match client.scores_prompt() {
                    true => self.submit(client, prompt, max_tokens),
                    false => self.restore_and_submit(client, prompt, max_tokens, messages),
                }
            }
            Message::Restored => self.take_restored()?,
            Message::ExpertStats(reply) if self.model.plan().routed_layers().is_empty() => {
                // No step is worth timing. The client may have stopped waiting for the reply.
                let _ = reply.send(ExpertReport::default());
            }
            Message::ExpertStats(reply) => self.reports.push(reply),
        }
        Ok(())
    }

    /// Tells those who wait about the experts, with the times of the steps that were timed.
    fn report_experts(&mut self, steps: usize) {
        if self.reports.is_empty() {
            return;
        }
        let stats = self.model.stats();
        let times = ExpertTimes::of_layers(&stats.stages, steps);
        for reply in self.reports.drain(..) {
            // The client may have stopped waiting for the reply.
            let _ =
                reply.send(ExpertReport { layers: stats.experts.clone(), times: times.clone() });
        }
    }

    fn submit(&mut self, client: Box<Client>, prompt: Vec<u32>, max_tokens: usize) {
        let scores_prompt = client.scores_prompt();
        self.scheduler.submit(client, prompt, max_tokens, scores_prompt);
    }

    /// Submits a request, behind its pages that are on disk and not in memory.
    fn restore_and_submit(
        &mut self,
        client: Box<Client>,
        prompt: Vec<u32>,
        max_tokens: usize,
        messages: Weak<Sender<Message>>,
    ) {
        let Some((store, restorer)) = &mut self.store else {
            return self.submit(client, prompt, max_tokens);
        };
        let pages = self.scheduler.pages_mut();
        let held = pages.hold_prefix(&prompt);
        if pages.next_missing(&held, &prompt).is_some_and(|key| store.contains(&key)) {
            let notify = move || {
                messages.upgrade().is_some_and(|messages| messages.send(Message::Restored).is_ok())
            };
            restorer.start(client, (prompt, held), max_tokens, notify);
        } else {
            pages.release_prefix(held);
            self.submit(client, prompt, max_tokens);
        }
    }

    /// Takes the page that was read, or submits the request that has all of its pages.
    fn take_restored(&mut self) -> Result<()> {
        let Some((_, restorer)) = &mut self.store else { return Ok(()) };
        let pages = self.scheduler.pages_mut();
        let (found, request) = restorer.next();
        if let Some(page) = found {
            if request.is_stopped() {
                return Ok(());
            }
            let Some(blocks) = pages.restore(&mut request.held, &request.prompt, &page) else {
                // Pages behind it would have no memory either.
                request.stop();
                return Ok(());
            };
            for to in blocks {
                let bytes = match to {
                    StateBlock::Page { window_index, .. } => page.windows[window_index].as_deref(),
                    StateBlock::StateSlot(_) => page.state.as_deref(),
                };
                let from = bytes.expect("blocks are of what the page has");
                self.model.transfer(Transfer::Write { from, to })?;
            }
            return Ok(());
        }
        let request = restorer.pop().expect("the request of the message");
        self.submit_restored(request);
        Ok(())
    }

    fn submit_restored(&mut self, request: Restoring) {
        self.scheduler.pages_mut().release_prefix(request.held);
        if let Some(client) = request.client {
            self.submit(client, request.prompt, request.max_tokens);
        }
    }

    /// Submits the requests whose pages are read, without waiting for them any longer: the engine
    /// ends. Returns whether there are any.
    fn submit_restoring(&mut self) -> bool {
        let pop = |worker: &mut Worker| worker.store.as_mut()?.1.pop();
        let mut has_any = false;
        while let Some(request) = pop(self) {
            request.stop();
            self.submit_restored(request);
            has_any = true;
        }
        has_any
    }

    /// Requests whose pages are read.
    fn restoring(&self) -> usize {
        self.store.as_ref().map_or(0, |(_, restorer)| restorer.waiting())
    }

    /// Writes the full pages of a running request to disk that are not there.
    fn save(&mut self, index: usize) -> Result<()> {
        let Some((store, _)) = &self.store else { return Ok(()) };
        for FullPage { key, prefill, windows, state } in self.scheduler.full_pages(index) {
            if store.contains(&key) {
                continue;
            }
            // A page behind one that is not stored cannot be found.
            if !store.has_room() {
                break;
            }
            let mut read = |from: Option<StateBlock>| -> Result<Option<Vec<u8>>> {
                let Some(from) = from else { return Ok(None) };
                let mut to = Vec::new();
                self.model.transfer(Transfer::Read { from, to: &mut to })?;
                Ok(Some(to))
            };
            let windows = windows.into_iter().map(&mut read).collect::<Result<_>>()?;
            store.save(key, StoredPage { prefill, windows, state: read(state)? });
        }
        Ok(())
    }

    /// Runs the scheduled step, or several of them in multi-step decode, until a request ends or a
    /// message arrives.
    fn run_step(&mut self, messages: &Receiver<Message>) -> Result<()> {
        copy(&mut *self.model, &self.step.copies)?;
        let tasks = self.scheduler.running();
        for &(index, _) in &self.step.spans {
            let (prompt, cached) = (tasks[index].prompt, tasks[index].cached());
            tasks[index].owner.admit(prompt, cached, &self.status);
        }
        self.params.clear();
        self.params.extend(self.step.outputs.iter().map(|row| {
            let task = &tasks[row.task];
            (row.next >= task.prompt).then(|| task.owner.params(self.step.steps)).flatten()
        }));
        let started = Instant::now();
        let mut results = StepResults::default();
        self.call_model(messages, &mut results)?;
        let seconds = started.elapsed().as_secs_f64();
        self.scheduler.end_step(&self.step, results.steps, seconds);
        copy(&mut *self.model, &results.checkpoints)?;
        self.count_step(&results, seconds);
        // A prompt that is scored has several rows, each of which may end it.
        results.ended.sort_unstable_by_key(|(index, end)| (std::cmp::Reverse(*index), end.is_ok()));
        results.ended.dedup_by_key(|(index, _)| *index);
        let (mut ended, mut saved) = (Vec::new(), Ok(()));
        for (index, end) in results.ended {
            let end = match end {
                Ok(reason) => {
                    saved = saved.and_then(|()| self.save(index));
                    Ok(reason)
                }
                Err(RowError::Constraint(error)) => Err(error),
                Err(RowError::NonFinite) => {
                    ended.push(self.discard_non_finite(index));
                    continue;
                }
            };
            ended.push((self.scheduler.finish(index).owner, end));
        }
        // Who reads that a request has ended sees it in the statistics, too.
        self.publish();
        for (client, end) in ended {
            match end {
                Ok(reason) => client.finish(reason),
                Err(error) => client.fail(error),
            }
        }
        saved
    }

    /// Ends a running request whose logits are not finite. NaN in its KV cache would spread to
    /// requests with the same prefix.
    fn discard_non_finite(&mut self, index: usize) -> (Box<Client>, Result<FinishReason>) {
        let task = self.scheduler.discard(index);
        let pages = self.scheduler.pages_mut();
        let error = nonfinite::error(&mut *self.model, pages, &task.tokens);
        (task.owner, Err(error))
    }

    /// Adds a call of the model to the totals.
    fn count_step(&self, results: &StepResults, seconds: f64) {
        let (batch, steps) = (&self.step.batch, results.steps as u64);
        let plan = self.model.plan();
        // A sequence grows by a token in each step of the call.
        let grown = results.steps / 2;
        let elements = |span: &Span| plan.kv_elements(span.position + span.len + grown);
        let elements: u64 = batch.spans.iter().map(elements).sum();
        let mut stats = self.status.stats();
        stats.steps += steps;
        stats.rows += steps * batch.tokens.len() as u64;
        stats.sequences += steps * batch.spans.len() as u64;
        stats.weight_bytes += steps * self.weight_reads.step(batch.tokens.len());
        stats.kv_elements += steps * elements;
        stats.step_seconds += seconds;
        stats.generated_tokens += results.generated as u64;
    }

    fn call_model(
        &mut self,
        messages: &Receiver<Message>,
        results: &mut StepResults,
    ) -> Result<()> {
        let Worker { model, tokenizer, status, scheduler, inbox, step, params, .. } = self;
        let rows = params.iter().map(|params| match params {
            Some(params) => OutputRequest::Token(params),
            None => OutputRequest::Logits,
        });
        let rows: Vec<OutputRequest<'_>> = rows.collect();
        let width = model.plan().output_width();
        let call = Step { batch: &step.batch, requests: &rows, steps: step.steps, observer: None };
        status.begin_step();
        model.step(call, &mut |output| {
            status.begin_step();
            results.steps += 1;
            for &(index, len) in &step.spans {
                results.checkpoints.extend(scheduler.store(index, len));
                let task = &mut scheduler.running()[index];
                if let Some(done) = task.partial_prefill() {
                    task.owner.report_prefill(done, task.prompt);
                }
            }
            let mut tokens = output.tokens.iter().copied();
            let asked = rows.iter().zip(&step.outputs);
            let asked = asked.filter(|(row, _)| **row == OutputRequest::Logits);
            let outputs = asked.map(|(_, output)| output);
            let logits = (output.logits, width);
            let computed = logits_rows::tokens(scheduler.running(), outputs, logits);
            let mut computed = computed.into_iter();
            for (row, &OutputRow { task: index, next }) in rows.iter().zip(&step.outputs) {
                let task = &mut scheduler.running()[index];
                let (is_full, client) = (task.is_full(), &mut task.owner);
                let token = match row {
                    OutputRequest::Token(_) => {
                        let token = tokens.next().expect("a token for each row that asks for one");
                        token.map(|token| client.accept(token)).ok_or(RowError::NonFinite)
                    }
                    OutputRequest::Logits => computed.next().expect("the token of its logits"),
                };
                let token = token.map_err(|error| results.ended.push((index, Err(error))));
                let Ok(token) = token else { continue };
                if next < task.prompt {
                    client.report_prompt(token);
                    continue;
                }
                if is_full {
                    results.ended.push((index, Ok(FinishReason::Length)));
                    continue;
                }
                results.generated += 1;
                let (id, end) = (token.0, client.report(token, tokenizer));
                let is_full = end.is_none() && !scheduler.push_token(index, id);
                let end = end.or_else(|| is_full.then_some(FinishReason::Context));
                results.ended.extend(end.map(|end| (index, Ok(end))));
            }
            inbox.extend(messages.try_iter());
            let is_cancelled = scheduler.running().iter().any(|task| task.owner.is_cancelled());
            match results.ended.is_empty() && inbox.is_empty() && !is_cancelled {
                true => ControlFlow::Continue(()),
                false => ControlFlow::Break(()),
            }
        })?;
        status.end_step();
        Ok(())
    }

    /// Shows the state of the scheduler to clients.
    fn publish(&self) {
        let mut stats = self.status.stats();
        let (scheduler, pages) = (&self.scheduler, self.scheduler.pages());
        (stats.running, stats.waiting) = scheduler.counts();
        stats.waiting += self.restoring();
        (stats.free_pages, stats.cached_pages) = (pages.free_pages(), pages.cached_pages());
        stats.preemptions = scheduler.preemptions();
    }
}

/// What a call of the model leads to.
#[derive(Default)]
struct StepResults {
    /// Steps that have run.
    steps: usize,
    /// Tokens that were sampled.
    generated: usize,
    /// Blocks to copy.
    checkpoints: Copies,
    /// Running tasks that end, and how.
    ended: Vec<(usize, std::result::Result<FinishReason, RowError>)>,
}

/// Copies blocks of the state of sequences.
pub(crate) fn copy(model: &mut dyn Model, copies: &Copies) -> Result<()> {
    for &(from, to) in copies {
        model.transfer(Transfer::Copy { from, to })?;
    }
    Ok(())
}
