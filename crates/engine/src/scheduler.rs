//! Which tokens run in the next step, and whose pages they go to: admission, prefix reuse, chunked
//! prefill, preemption and fairness. A pure state machine: it touches no tensor, asks no clock, and
//! is tested with a model that is a hash.
//!
//! Every request that decodes has a row in every step. Prompts share the rest of a step, which is
//! bounded so that decode rows do not wait long ([`PrefillBudget`]): half of it goes to the oldest
//! prompt, the other half to those with the fewest tokens left, so that neither a long prompt nor
//! a short one waits for ever. If pages run out, the youngest request is preempted: its pages stay
//! cached, and it is the next to be admitted.

use std::collections::VecDeque;

use bodkin_backend::{Batch, Limits, PAGE_TOKENS};

use crate::pages::{Copies, Copy, FullPage, Pages, Sequence};
use crate::prefill_budget::PrefillBudget;

/// The most steps of one multi-step decode.
const MULTI_STEPS: usize = PAGE_TOKENS;

/// A request, with what its owner keeps for it.
pub(crate) struct Task<T> {
    pub(crate) owner: T,
    /// All known tokens, the prompt first.
    pub(crate) tokens: Vec<u32>,
    /// How many of them are the prompt's.
    pub(crate) prompt: usize,
    /// Tokens of the prompt whose log-probabilities were returned; all where none are wanted. The
    /// first token has none.
    scored: usize,
    /// The most tokens that there will be.
    max_tokens: usize,
    /// What is stored of them.
    sequence: Sequence,
    /// How many were stored when it was first admitted; none before.
    cached: Option<usize>,
}

/// The work of one call of the model.
#[derive(Default)]
pub(crate) struct ScheduledStep {
    /// Blocks to copy before it.
    pub(crate) copies: Copies,
    pub(crate) batch: Batch,
    /// For each span, its running task and its number of tokens.
    pub(crate) spans: Vec<(usize, usize)>,
    /// One for each of the batch's.
    pub(crate) outputs: Vec<OutputRow>,
    /// Rows of tasks that decode; all others are prefill.
    decode_rows: usize,
    /// More than one is multi-step decode.
    pub(crate) steps: usize,
    /// The one running task, if the memory cannot hold its next token.
    pub(crate) impossible: Option<usize>,
}

/// A row of a step whose logits are read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OutputRow {
    /// The running task.
    pub(crate) task: usize,
    /// The index of the token behind it: of the prompt, or one to sample.
    pub(crate) next: usize,
}

/// All requests of a model.
pub(crate) struct Scheduler<T> {
    limits: Limits,
    /// The most running requests.
    parallel: usize,
    pages: Pages,
    budget: PrefillBudget,
    /// Oldest first.
    running: Vec<Task<T>>,
    /// In the order of admission.
    waiting: VecDeque<Task<T>>,
    /// Since the start.
    preemptions: u64,
}

impl<T> Task<T> {
    /// Tokens that are known and not stored.
    fn pending(&self) -> usize {
        self.tokens.len() - self.sequence.tokens.len()
    }

    /// Whether its next token is one that it generated last.
    fn is_decoding(&self) -> bool {
        self.pending() == 1 && self.tokens.len() > self.prompt
    }

    /// How many of its pending tokens may be in one span. A span holds tokens of the prompt or
    /// generated ones, so that a preempted task is computed again with the same rounding, and ends
    /// at a checkpoint.
    fn longest_span(&self) -> usize {
        let stored = self.sequence.tokens.len();
        let ends = [Some(self.prompt).filter(|&end| end > stored), self.sequence.next_checkpoint()];
        let end = ends.into_iter().flatten().fold(self.tokens.len(), usize::min);
        end - stored
    }

    /// Whether log-probabilities of its prompt are still to be computed.
    fn scores_prompt(&self) -> bool {
        self.scored < self.prompt
    }

    /// The most tokens of a span with one output row and `more` of them for the prompt.
    fn longest_scored_span(&self, more: usize) -> usize {
        match self.scores_prompt() {
            // The rows of tokens that were scored before it was preempted are no outputs.
            true => self.scored.saturating_sub(self.sequence.tokens.len()).max(1) + more,
            false => usize::MAX,
        }
    }

    /// Its tokens, whose stored start it may go on from. Tokens to score need the row before them.
    fn reusable(&self) -> &[u32] {
        if self.scores_prompt() { &self.tokens[..self.scored] } else { &self.tokens }
    }

    /// Whether no token follows those that are known.
    pub(crate) fn is_full(&self) -> bool {
        self.tokens.len() >= self.max_tokens
    }

    /// How much of the prompt is stored, if it is not all.
    pub(crate) fn partial_prefill(&self) -> Option<usize> {
        Some(self.sequence.tokens.len()).filter(|&stored| stored < self.prompt)
    }

    /// Tokens of the prompt that were stored when it was first admitted.
    pub(crate) fn cached(&self) -> usize {
        self.cached.unwrap_or(0)
    }
}

impl ScheduledStep {
    fn clear(&mut self) {
        self.copies.clear();
        self.batch.clear();
        self.spans.clear();
        self.outputs.clear();
        self.decode_rows = 0;
        self.impossible = None;
        self.steps = 1;
    }

    /// Adds the next `len` tokens of a task, whose pages are reserved.
    fn push<T>(&mut self, index: usize, task: &Task<T>, len: usize) {
        let stored = task.sequence.tokens.len();
        let span = task.sequence.span(len, stored < task.prompt);
        self.batch.push(span, &task.tokens[stored..stored + len]);
        self.spans.push((index, len));
        self.decode_rows += usize::from(task.is_decoding());
        let first_row = self.batch.tokens.len() - len;
        for (row, next) in (stored + 1..=stored + len).enumerate() {
            let is_scored = (task.scored..task.prompt).contains(&next);
            if is_scored || next == task.tokens.len() {
                self.batch.outputs.push((first_row + row) as u32);
                self.outputs.push(OutputRow { task: index, next });
            }
        }
    }
}

impl<T> Scheduler<T> {
    /// For `parallel` running requests, each of which has an output row within the limits.
    pub(crate) fn new(pages: Pages, parallel: usize, limits: Limits) -> Scheduler<T> {
        Scheduler {
            budget: PrefillBudget::new(limits.tokens),
            parallel: parallel.min(limits.outputs),
            limits,
            pages,
            running: Vec::new(),
            waiting: VecDeque::new(),
            preemptions: 0,
        }
    }

    /// Queues a request for a prompt that has at least one token and at most `max_tokens`. If it
    /// `scores_prompt`, the rows of the prompt's tokens are outputs, each once.
    pub(crate) fn submit(
        &mut self,
        owner: T,
        tokens: Vec<u32>,
        max_tokens: usize,
        scores_prompt: bool,
    ) {
        let prompt = tokens.len();
        assert!((1..=max_tokens).contains(&prompt), "there is something to compute");
        let scored = if scores_prompt { 1 } else { prompt };
        let (sequence, cached) = (Sequence::default(), None);
        let task = Task { owner, tokens, prompt, scored, max_tokens, sequence, cached };
        self.waiting.push_back(task);
    }

    /// The pages, to restore some of them.
    pub(crate) fn pages_mut(&mut self) -> &mut Pages {
        &mut self.pages
    }

    /// The full pages of a running request.
    pub(crate) fn full_pages(&self, index: usize) -> Vec<FullPage> {
        self.pages.full_pages(&self.running[index].sequence)
    }

    /// The admitted requests, oldest first.
    pub(crate) fn running(&mut self) -> &mut [Task<T>] {
        &mut self.running
    }

    /// The number of requests that are running, and of those that are not admitted.
    pub(crate) fn counts(&self) -> (usize, usize) {
        (self.running.len(), self.waiting.len())
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.running.is_empty() && self.waiting.is_empty()
    }

    pub(crate) fn pages(&self) -> &Pages {
        &self.pages
    }

    /// How often a request had to give its pages up since the start.
    pub(crate) fn preemptions(&self) -> u64 {
        self.preemptions
    }

    /// Removes the requests that `is_cancelled`, running or not, and returns them.
    pub(crate) fn remove(&mut self, is_cancelled: impl Fn(&T) -> bool) -> Vec<Task<T>> {
        let mut removed = Vec::new();
        for _ in 0..self.waiting.len() {
            let task = self.waiting.pop_front().expect("one of those that wait");
            if is_cancelled(&task.owner) {
                removed.push(task)
            } else {
                self.waiting.push_back(task)
            }
        }
        for i in (0..self.running.len()).rev() {
            if is_cancelled(&self.running[i].owner) {
                removed.push(self.finish(i));
            }
        }
        removed
    }

    /// Ends a running request. Its pages stay for others with the same start.
    pub(crate) fn finish(&mut self, index: usize) -> Task<T> {
        let mut task = self.running.remove(index);
        self.pages.release(std::mem::take(&mut task.sequence));
        task
    }

    /// Ends a running request whose results are wrong. Nobody may use its pages.
    pub(crate) fn discard(&mut self, index: usize) -> Task<T> {
        let mut task = self.running.remove(index);
        self.pages.discard(std::mem::take(&mut task.sequence));
        task
    }

    /// Ends everything, after the model has failed.
    pub(crate) fn drain(&mut self) -> impl Iterator<Item = T> {
        let tasks = self.running.drain(..).chain(self.waiting.drain(..));
        tasks.map(|task| task.owner)
    }

    /// Decides the next step. It is empty if no request is left. Only requests that
    /// `allows_multi_step` run several steps at a time. Before a request is preempted, `reclaim`
    /// frees pages that no running request has, and returns whether there were any.
    pub(crate) fn schedule(
        &mut self,
        step: &mut ScheduledStep,
        allows_multi_step: impl Fn(&T) -> bool,
        mut reclaim: impl FnMut(&mut Pages) -> bool,
    ) {
        step.clear();
        self.admit(&mut step.copies);
        let is_multi_step = self.running.iter().all(|task| allows_multi_step(&task.owner));
        if is_multi_step && self.schedule_multi_step(step) {
            return;
        }
        loop {
            self.schedule_decode(step, &mut reclaim);
            self.schedule_prefill(step);
            if !step.spans.is_empty() || self.running.is_empty() {
                return;
            }
            if !self.make_room(&mut reclaim) {
                step.impossible = Some(0);
                return;
            }
        }
    }

    /// Frees pages: those that `reclaim` finds, or those of the youngest request if it is not the
    /// only one. Returns whether there were any.
    fn make_room(&mut self, reclaim: &mut impl FnMut(&mut Pages) -> bool) -> bool {
        if reclaim(&mut self.pages) {
            return true;
        }
        let has_others = self.running.len() > 1;
        if has_others {
            self.preempt(self.running.len() - 1);
        }
        has_others
    }

    /// Admits requests in order while there are rows and pages for them. One that waits for another
    /// to compute a common prefix lets later ones pass.
    fn admit(&mut self, copies: &mut Copies) {
        let mut next = 0;
        while self.running.len() < self.parallel && next < self.waiting.len() {
            let task = &self.waiting[next];
            let cached = self.pages.cached_tokens(task.reusable(), task.prompt);
            if self.computes_prefix_of(task, cached) {
                next += 1;
                continue;
            }
            // One page more for each request that decodes.
            let new = task.tokens.len() - cached + PAGE_TOKENS * self.running.len();
            if !self.running.is_empty() && !self.pages.has_room(new, self.limits.tokens) {
                return;
            }
            let mut task = self.waiting.remove(next).expect("it is one of them");
            let (sequence, prefix) = self.pages.start(task.reusable(), task.prompt);
            copies.extend(prefix);
            task.cached.get_or_insert(sequence.tokens.len());
            task.sequence = sequence;
            self.running.push(task);
        }
    }

    /// Whether a running request is about to store pages that `task` could use, beyond those of
    /// its `cached` tokens.
    fn computes_prefix_of(&self, task: &Task<T>, cached: usize) -> bool {
        self.running.iter().any(|other| {
            let (stored, prompt) = (other.sequence.tokens.len(), &other.tokens[..other.prompt]);
            // One whose prompt is scored takes more steps than computing it again does.
            if self.pages.has_states() || stored >= prompt.len() || other.scores_prompt() {
                return false;
            }
            let limit = task.reusable().len() - 1;
            let pairs = prompt.iter().zip(&task.tokens[..limit]);
            let common = pairs.take_while(|(a, b)| a == b).count() / PAGE_TOKENS * PAGE_TOKENS;
            common > cached && common > stored
        })
    }

    /// Fills the step with a row of every request and reserves pages for several steps, if all of
    /// them decode.
    fn schedule_multi_step(&mut self, step: &mut ScheduledStep) -> bool {
        let left = self.running.iter().map(|task| task.max_tokens - task.tokens.len());
        let steps = left.min().unwrap_or(0).min(MULTI_STEPS);
        let is_decode = self.running.iter().all(Task::is_decoding);
        if steps < 2 || !is_decode || self.running.len() > self.limits.tokens {
            return false;
        }
        let (running, pages) = (&mut self.running, &mut self.pages);
        if !running.iter_mut().all(|task| pages.reserve(&mut task.sequence, steps)) {
            running.iter_mut().for_each(|task| pages.trim(&mut task.sequence));
            return false;
        }
        step.steps = steps;
        running.iter().enumerate().for_each(|(i, task)| step.push(i, task, 1));
        true
    }

    /// Adds a row of every request that decodes. Where pages are short, the youngest requests are
    /// preempted.
    fn schedule_decode(
        &mut self,
        step: &mut ScheduledStep,
        reclaim: &mut impl FnMut(&mut Pages) -> bool,
    ) {
        let mut i = 0;
        while i < self.running.len() && step.batch.tokens.len() < self.limits.tokens {
            let task = &mut self.running[i];
            if task.is_decoding() {
                if self.pages.reserve(&mut task.sequence, 1) {
                    step.push(i, task, 1);
                } else if self.make_room(reclaim) {
                    continue;
                }
            }
            i += 1;
        }
    }

    /// Adds chunks of prompts.
    fn schedule_prefill(&mut self, step: &mut ScheduledStep) {
        let is_prefilling = |&i: &usize| !self.running[i].is_decoding();
        let mut order: Vec<usize> = (0..self.running.len()).filter(is_prefilling).collect();
        let decode_rows = step.decode_rows;
        let budget = self.budget.tokens(decode_rows, order.len());
        let budget = budget.min(self.limits.tokens - decode_rows);
        let Some((&mut oldest, others)) = order.split_first_mut() else { return };
        others.sort_by_key(|&i| self.running[i].pending());
        let others_pending: usize = others.iter().map(|&i| self.running[i].pending()).sum();
        let mut left = budget;
        // Each running request has an output row; those that are left are for prompts.
        let mut more_outputs = self.limits.outputs - self.running.len();
        for i in std::iter::once(oldest).chain(others.iter().copied()) {
            let share = if i == oldest { budget - others_pending.min(budget / 2) } else { left };
            let task = &mut self.running[i];
            let len = task.longest_span().min(share).min(task.longest_scored_span(more_outputs));
            if len > 0 && self.pages.reserve(&mut task.sequence, len) {
                let outputs = step.outputs.len();
                step.push(i, task, len);
                left -= len;
                more_outputs -= (step.outputs.len() - outputs).saturating_sub(1);
            }
        }
    }

    /// Takes the pages of a running request. It is computed again, but for what stays cached.
    fn preempt(&mut self, index: usize) {
        let task = self.finish(index);
        self.preemptions += 1;
        self.waiting.push_front(task);
    }

    /// Notes that the tokens of a span are stored. Returns the blocks to copy as a checkpoint.
    pub(crate) fn store(&mut self, index: usize, len: usize) -> Option<Copy> {
        let Task { tokens, sequence, scored, prompt, .. } = &mut self.running[index];
        let stored = sequence.tokens.len();
        *scored = (stored + len + 1).max(*scored).min(*prompt);
        self.pages.advance(sequence, &tokens[stored..stored + len]);
        self.pages.checkpoint(sequence)
    }

    /// Adds the token that was sampled for a running request. Returns whether there may be more.
    pub(crate) fn push_token(&mut self, index: usize, token: u32) -> bool {
        let task = &mut self.running[index];
        task.tokens.push(token);
        !task.is_full()
    }

    /// Ends a call of the model that took `seconds` and ran `steps` steps of those scheduled.
    pub(crate) fn end_step(&mut self, step: &ScheduledStep, steps: usize, seconds: f64) {
        if step.steps > 1 {
            self.running.iter_mut().for_each(|task| self.pages.trim(&mut task.sequence));
        }
        let prefill_rows = step.batch.tokens.len() - step.decode_rows;
        self.budget.observe(prefill_rows, step.decode_rows, seconds / steps.max(1) as f64);
    }
}

#[cfg(test)]
mod tests;
