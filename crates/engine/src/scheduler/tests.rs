//! A model that is a hash stands in for the real one: the hash of a token depends on all tokens
//! that it sees through its page tables, on recurrent state, and on whether it is of a prompt.

use std::collections::HashMap;

use bodkin_backend::{PageTable, StateBlock};

use super::*;

const WINDOW: usize = 40;
const WINDOWS: [Option<usize>; 2] = [None, Some(WINDOW)];
const VOCABULARY: u64 = 50;

fn mix(a: u64, b: u64) -> u64 {
    (a ^ b.wrapping_mul(0x9E37_79B9_7F4A_7C15)).rotate_left(23).wrapping_mul(0xD6E8_FEB8_6659_FD93)
}

/// The state of sequences as a model has it.
struct HashModel {
    /// For each window, the hashes of the tokens in its pages.
    cells: [Vec<u64>; 2],
    /// Recurrent state; empty if the model has none.
    slots: Vec<u64>,
    /// Whether rows of prompts have other hashes than generated ones.
    rounds_prefill: bool,
}

impl HashModel {
    fn new(limits: &Limits, rounds_prefill: bool) -> HashModel {
        let cells = [0, 1].map(|window| vec![0; limits.pages[window] * PAGE_TOKENS]);
        HashModel { cells, slots: vec![0; limits.state_slots], rounds_prefill }
    }

    fn copy(&mut self, copies: &Copies) {
        for copy in copies {
            match *copy {
                (StateBlock::StateSlot(from), StateBlock::StateSlot(to)) => {
                    self.slots[to as usize] = self.slots[from as usize];
                }
                (
                    StateBlock::Page { window_index: window, page },
                    StateBlock::Page { page: to, .. },
                ) => {
                    let from = page as usize * PAGE_TOKENS;
                    self.cells[window]
                        .copy_within(from..from + PAGE_TOKENS, to as usize * PAGE_TOKENS);
                }
                _ => panic!("blocks of one kind"),
            }
        }
    }

    /// Stores a token and returns the one that follows.
    fn row(
        &mut self,
        tables: &[PageTable],
        slot: u32,
        (position, token): (usize, u32),
        is_prefill: bool,
    ) -> u32 {
        let cell = |table: &PageTable, p: usize| table.page(p) * PAGE_TOKENS + p % PAGE_TOKENS;
        let mut hash = mix(u64::from(token), u64::from(is_prefill && self.rounds_prefill));
        if let Some(state) = self.slots.get_mut(slot as usize) {
            *state = mix(if position == 0 { 0 } else { *state }, u64::from(token));
            hash = mix(hash, *state);
        }
        for (i, (table, window)) in tables.iter().zip(WINDOWS).enumerate() {
            let oldest = window.map_or(0, |w| (position + 1).saturating_sub(w));
            for p in oldest..position {
                hash = mix(hash, self.cells[i][cell(table, p)]);
            }
        }
        for (cells, table) in self.cells.iter_mut().zip(tables) {
            cells[cell(table, position)] = hash;
        }
        (hash % VOCABULARY) as u32
    }
}

/// What follows each token of a prompt but the last, and what a request generates alone.
fn alone(prompt: &[u32], max_tokens: usize, like: &HashModel) -> (Vec<u32>, Vec<u32>) {
    let pages = max_tokens.div_ceil(PAGE_TOKENS);
    let state_slots = like.slots.len().min(1);
    let limits = Limits { tokens: 1, outputs: 1, pages: vec![pages; 2], state_slots };
    let mut model = HashModel::new(&limits, like.rounds_prefill);
    let table = PageTable { skipped: 0, pages: (0..pages as u32).collect() };
    let tables = [table.clone(), table];
    let (mut tokens, mut scored, mut generated) = (prompt.to_vec(), Vec::new(), Vec::new());
    let mut position = 0;
    while tokens.len() < max_tokens || position + 1 < prompt.len() {
        let is_prefill = position < prompt.len();
        let next = model.row(&tables, 0, (position, tokens[position]), is_prefill);
        position += 1;
        if position < prompt.len() {
            scored.push(next);
        } else if position == tokens.len() {
            tokens.push(next);
            generated.push(next);
        }
    }
    (scored, generated)
}

/// A request of the simulation.
struct Simulated {
    id: usize,
    prompt: Vec<u32>,
    max_tokens: usize,
    generated: Vec<u32>,
    /// What follows each token of the prompt but the last, if it is scored.
    scored: Option<Vec<u32>>,
    /// It is cancelled, or its results turn out wrong, at this step.
    cancelled_at: Option<usize>,
    fails_at: Option<usize>,
}

struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963);
        (self.0 >> 33) as usize % n
    }
}

/// A scheduler with its model, and what has come of its requests.
struct Simulation {
    scheduler: Scheduler<Simulated>,
    model: HashModel,
    step: ScheduledStep,
    now: usize,
    finished: Vec<Simulated>,
    /// When each request was submitted.
    submitted: HashMap<usize, usize>,
    /// The most steps that a request took from submission to its end, by its number of tokens.
    slowest: Vec<(usize, usize)>,
    cached: usize,
}

impl Simulation {
    fn new(limits: &Limits, rounds_prefill: bool) -> Simulation {
        let pages = Pages::new(&WINDOWS, &limits.pages, limits.state_slots);
        Simulation {
            scheduler: Scheduler::new(
                pages,
                limits.outputs,
                // A few more for prompts that are scored.
                Limits { outputs: limits.outputs + 3, ..limits.clone() },
            ),
            model: HashModel::new(limits, rounds_prefill),
            step: ScheduledStep::default(),
            now: 0,
            finished: Vec::new(),
            submitted: HashMap::new(),
            slowest: Vec::new(),
            cached: 0,
        }
    }

    fn submit(&mut self, request: Simulated) {
        self.submitted.insert(request.id, self.now);
        let (prompt, max_tokens) = (request.prompt.clone(), request.max_tokens);
        let scores_prompt = request.scored.is_some();
        self.scheduler.submit(request, prompt, max_tokens, scores_prompt);
    }

    /// Runs one call of the model.
    fn advance(&mut self) {
        self.now += 1;
        let now = self.now;
        self.scheduler.remove(|request| request.cancelled_at.is_some_and(|at| at <= now));
        self.scheduler.schedule(&mut self.step, |request| request.id % 3 > 0, |_| false);
        assert_eq!(self.step.impossible, None);
        self.model.copy(&self.step.copies);
        let mut ended = Vec::new();
        let mut tokens = self.step.batch.tokens.clone();
        let mut steps = 0;
        while steps < self.step.steps && ended.is_empty() {
            let next = self.run_rows(&tokens, steps);
            for (&OutputRow { task: index, next }, &token) in self.step.outputs.iter().zip(&next) {
                let task = &mut self.scheduler.running()[index];
                let (is_full, request) = (task.is_full(), &mut task.owner);
                if next < task.prompt {
                    let scored = request.scored.as_mut().unwrap();
                    assert_eq!(next, scored.len() + 1, "each row once and in order");
                    scored.push(token);
                    continue;
                }
                if request.fails_at.is_some_and(|at| at <= now) {
                    ended.push((index, true));
                    continue;
                }
                if is_full {
                    ended.push((index, false));
                    continue;
                }
                request.generated.push(token);
                if !self.scheduler.push_token(index, token) {
                    ended.push((index, false));
                }
            }
            tokens = next;
            steps += 1;
        }
        self.scheduler.end_step(&self.step, steps, 1e-3 + 1e-5 * tokens.len() as f64);
        ended.sort_unstable_by_key(|(index, _)| std::cmp::Reverse(*index));
        for (index, is_failed) in ended {
            if is_failed {
                self.scheduler.discard(index);
                continue;
            }
            let task = self.scheduler.finish(index);
            let steps = now - self.submitted[&task.owner.id];
            self.slowest.push((task.tokens.len(), steps));
            self.cached += task.cached();
            self.finished.push(task.owner);
        }
    }

    /// The tokens that follow the output rows of a step.
    fn run_rows(&mut self, tokens: &[u32], steps_before: usize) -> Vec<u32> {
        let ScheduledStep { batch, spans, .. } = &self.step;
        assert!(batch.tokens.len() <= self.scheduler.limits.tokens);
        assert!(batch.outputs.len() <= self.scheduler.limits.outputs);
        let (mut next, mut row) = (Vec::new(), 0);
        let mut checkpoints = Copies::new();
        for (span, &(index, len)) in batch.spans.iter().zip(spans) {
            for i in 0..len {
                let position = span.position + i + steps_before;
                let tables = &span.tables;
                let token = (position, tokens[row]);
                let found = self.model.row(tables, span.state_slot, token, span.is_prefill);
                if batch.outputs.contains(&(row as u32)) {
                    next.push(found);
                }
                row += 1;
            }
            checkpoints.extend(self.scheduler.store(index, len));
        }
        self.model.copy(&checkpoints);
        next
    }

    fn run_to_end(&mut self) {
        while !self.scheduler.is_idle() {
            self.advance();
        }
    }

    /// Every page and state slot is free or cached, and every text is what it is alone.
    fn check(&self, limits: &Limits) {
        let pages = self.scheduler.pages();
        let free = pages.free_pages().into_iter().zip(pages.cached_pages());
        assert_eq!(free.map(|(free, cached)| free + cached).collect::<Vec<_>>(), limits.pages);
        for request in &self.finished {
            let Simulated { prompt, max_tokens, generated, scored, .. } = request;
            let (wanted_scored, wanted) = alone(prompt, *max_tokens, &self.model);
            assert!(*generated == wanted, "request {} differs from itself alone", request.id);
            if let Some(scored) = scored {
                assert!(*scored == wanted_scored, "request {}: its prompt differs", request.id);
            }
        }
    }
}

/// Prompts that begin with one of a few system prompts.
fn prompt(random: &mut Random) -> Vec<u32> {
    let (system, len) = (random.below(5), 1 + random.below(150));
    let start = (0..system * 25).map(|i| (i * (system + 3)) as u32 % 50);
    start.chain((0..len).map(|_| random.below(50) as u32)).collect()
}

/// 10 000 requests arrive, some are cancelled at some moment, some fail. `pages` are enough for
/// two or three of the longest.
fn simulate(limits: &Limits, seed: u64) {
    let mut random = Random(seed);
    let mut simulation = Simulation::new(limits, true);
    let mut next = 0;
    while next < 10_000 / 4 {
        if random.below(3) > 0 {
            let prompt = prompt(&mut random);
            let scored = (random.below(6) == 0).then(Vec::new);
            let least = usize::from(scored.is_none());
            let max_tokens = prompt.len() + least + random.below(60);
            let now = simulation.now;
            let mut sometimes = |of: usize| (random.below(of) == 0).then(|| now + random.below(40));
            let (cancelled_at, fails_at) = (sometimes(8), sometimes(30));
            let generated = Vec::new();
            let id = next;
            simulation.submit(Simulated {
                id,
                prompt,
                max_tokens,
                generated,
                scored,
                cancelled_at,
                fails_at,
            });
            next += 1;
        }
        if simulation.scheduler.counts().1 > 20 || random.below(2) == 0 {
            simulation.advance();
        }
    }
    simulation.run_to_end();
    simulation.check(limits);
    assert!(simulation.finished.len() > 1500, "{} requests finished", simulation.finished.len());
    assert!(simulation.scheduler.preemptions() > 50, "{}", simulation.scheduler.preemptions());
    assert!(simulation.cached > 2000, "{} tokens were cached", simulation.cached);
}

#[test]
fn every_request_gets_what_it_gets_alone_with_few_pages() {
    simulate(&Limits { tokens: 24, outputs: 6, pages: vec![20, 20], state_slots: 0 }, 1);
    simulate(&Limits { tokens: 64, outputs: 5, pages: vec![24, 14], state_slots: 0 }, 2);
}

#[test]
fn every_request_gets_what_it_gets_alone_with_recurrent_state() {
    simulate(&Limits { tokens: 24, outputs: 6, pages: vec![20, 20], state_slots: 12 }, 3);
    simulate(&Limits { tokens: 40, outputs: 4, pages: vec![22, 16], state_slots: 5 }, 4);
}

fn request(id: usize, prompt: Vec<u32>, new: usize) -> Simulated {
    let max_tokens = prompt.len() + new;
    let generated = Vec::new();
    let (scored, cancelled_at, fails_at) = (None, None, None);
    Simulated { id, prompt, max_tokens, generated, scored, cancelled_at, fails_at }
}

fn numbers(from: u32, len: usize) -> Vec<u32> {
    (0..len as u32).map(|i| (from + i * 7 + i * i) % 50).collect()
}

/// Turns of chats go on from generated tokens, on a model that rounds prompts as it rounds these.
#[test]
fn turns_of_chats_go_on_from_what_is_stored() {
    let limits = Limits { tokens: 32, outputs: 4, pages: vec![60, 60], state_slots: 10 };
    let mut simulation = Simulation::new(&limits, false);
    let mut chats: Vec<Vec<u32>> = (0..4).map(|i| numbers(i, 30)).collect();
    for turn in 0..6 {
        for (i, chat) in chats.iter().enumerate() {
            simulation.submit(request(4 * turn + i, chat.clone(), 20));
        }
        simulation.run_to_end();
        simulation.check(&limits);
        for request in simulation.finished.drain(..) {
            let chat = &mut chats[request.id % 4];
            chat.extend(request.generated);
            chat.extend(numbers(turn as u32, 9));
        }
    }
    // All but the last token of each answer was stored, and the new question was not.
    assert_eq!(simulation.cached, 4 * (1..6).map(|turn| 29 * turn + 20).sum::<usize>());
}

#[test]
fn requests_with_one_system_prompt_compute_and_store_it_once() {
    let limits = Limits { tokens: 512, outputs: 8, pages: vec![60, 60], state_slots: 0 };
    let mut simulation = Simulation::new(&limits, true);
    for id in 0..8 {
        let prompt = [numbers(0, 320), numbers(id as u32 + 1, 5)].concat();
        simulation.submit(request(id, prompt, 20));
    }
    let mut fewest_free = usize::MAX;
    while !simulation.scheduler.is_idle() {
        simulation.advance();
        fewest_free = fewest_free.min(simulation.scheduler.pages().free_pages()[0]);
    }
    simulation.check(&limits);
    assert_eq!(simulation.cached, 7 * 320);
    assert!(fewest_free >= 60 - 10 - 8, "{fewest_free} pages were free");
}

#[test]
fn neither_short_nor_long_prompts_wait_for_ever() {
    let limits = Limits { tokens: 64, outputs: 6, pages: vec![400, 400], state_slots: 0 };
    // A prompt may happen to go on as another was answered.
    let mut simulation = Simulation::new(&limits, false);
    simulation.submit(request(0, numbers(1, 6000), 4));
    // Short ones keep coming, more than one every other step.
    for id in 1..800 {
        simulation.submit(request(id, numbers(id as u32, 10 + id % 20), 3));
        if simulation.scheduler.counts().1 > 3 {
            simulation.advance();
        }
    }
    simulation.run_to_end();
    simulation.check(&limits);
    let (_, long) = simulation.slowest.iter().find(|(len, _)| *len == 6004).unwrap();
    assert!(*long < 3 * 6000 / 64, "the long prompt took {long} steps");
    let short = simulation.slowest.iter().filter(|(len, _)| *len < 100).map(|(_, steps)| steps);
    assert!(short.max().unwrap() < &40, "short ones wait for a row and no more");
}

#[test]
fn a_cancelled_request_is_gone_in_every_state() {
    let limits = Limits { tokens: 32, outputs: 2, pages: vec![40, 40], state_slots: 0 };
    let mut simulation = Simulation::new(&limits, true);
    // One decodes, one is in prefill, one waits.
    simulation.submit(request(0, numbers(0, 10), 200));
    (0..3).for_each(|_| simulation.advance());
    simulation.submit(Simulated { cancelled_at: Some(7), ..request(1, numbers(1, 500), 5) });
    simulation.submit(Simulated { cancelled_at: Some(5), ..request(2, numbers(2, 20), 5) });
    simulation.advance();
    assert_eq!(simulation.scheduler.counts(), (2, 1));
    simulation.advance();
    assert_eq!(simulation.scheduler.counts(), (2, 0));
    simulation.advance();
    simulation.advance();
    assert_eq!(simulation.scheduler.counts(), (1, 0));
    simulation.run_to_end();
    simulation.check(&limits);
    assert_eq!(simulation.finished.len(), 1);
}

#[test]
fn a_prompt_of_one_token_is_measured_as_prefill() {
    let limits = Limits { tokens: 256, outputs: 4, pages: vec![20, 20], state_slots: 0 };
    let mut scheduler = Scheduler::new(Pages::new(&WINDOWS, &limits.pages, 0), 1, limits);
    let mut step = ScheduledStep::default();
    scheduler.submit((), vec![7], 8, false);
    // 10 ms for a prompt token, then a decode step of 1 s.
    for seconds in [0.01, 1.0] {
        scheduler.schedule(&mut step, |()| false, |_| false);
        assert_eq!(step.spans, [(0, 1)]);
        scheduler.store(0, 1);
        scheduler.push_token(0, 3);
        scheduler.end_step(&step, 1, seconds);
    }
    assert_eq!(scheduler.budget.tokens(1, 1), 80);
}
