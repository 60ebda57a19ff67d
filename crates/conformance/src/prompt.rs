//! A prompt fed to a model in different ways, all of which must give the same rows; and the pages
//! for it, handed out and taken back as an engine would.

use std::ops::ControlFlow;

use bodkin_backend::{
    Batch, Model, Observer, OutputRequest, PAGE_TOKENS, PageTable, Result, Span, StateBlock, Step,
};

use super::case::Case;
use super::random::Random;

/// How a prompt is cut into steps, if the plan lets it, and what is beside it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Feeding {
    /// All tokens in one step.
    Whole,
    /// Steps of this many tokens.
    Chunks(usize),
    /// Steps of seven tokens, with another sequence's tokens before or behind them.
    Beside,
    /// Steps of thirteen tokens, in pages of no order.
    OddPages,
    /// Steps of four tokens, with the logits of every seventh row only.
    SomeOutputs,
    /// One token after the other, as if they were generated.
    Generated,
    /// Likewise nine at a time, with tokens of another sequence's prompt before or behind them.
    AmongPrompts,
}

impl Feeding {
    /// All that must agree with [`Feeding::Whole`] and, like it, come as a prompt.
    pub(super) const OTHERS: [Feeding; 5] = [
        Feeding::Chunks(1),
        Feeding::Chunks(5),
        Feeding::Beside,
        Feeding::OddPages,
        Feeding::SomeOutputs,
    ];

    fn is_prefill(self) -> bool {
        !matches!(self, Feeding::Generated | Feeding::AmongPrompts)
    }

    fn has_neighbour(self) -> bool {
        matches!(self, Feeding::Beside | Feeding::AmongPrompts)
    }

    /// The rows whose logits are asked for.
    pub(super) fn rows(self, tokens: usize) -> std::iter::StepBy<std::ops::Range<usize>> {
        (0..tokens).step_by(if self == Feeding::SomeOutputs { 7 } else { 1 })
    }

    fn step(self, tokens: usize) -> usize {
        match self {
            Feeding::Whole => tokens,
            Feeding::Chunks(step) => step,
            Feeding::Beside => 7,
            Feeding::OddPages => 13,
            Feeding::SomeOutputs => 4,
            Feeding::Generated => 1,
            Feeding::AmongPrompts => 9,
        }
    }
}

/// The logits of [`Feeding::rows`], `[rows, vocabulary]`.
pub(super) fn run_prompt(model: &mut dyn Model, case: &Case, feeding: Feeding) -> Result<Vec<f32>> {
    let mut pages = Pages::new(model, feeding == Feeding::OddPages);
    let (mut ours, mut other) = (pages.start(case.position), pages.start(case.position));
    ours.is_prefill = feeding.is_prefill();
    let wanted = feeding.rows(case.tokens.len());
    let step = match case.plan.needs_whole_sequences() || case.plan.gives_sums() {
        true => case.tokens.len(),
        false => feeding.step(case.tokens.len()),
    };
    // A text has one embedding: its last rows give it, however many ask.
    let is_pooled_in_chunks = case.plan.is_encoder() && step < case.tokens.len();
    let mut found = Vec::new();
    for (chunk, from) in case.tokens.chunks(step).zip((0..).step_by(step)) {
        let mut neighbour: Vec<u32> = Vec::new();
        if feeding.has_neighbour() {
            neighbour.extend(chunk.iter().rev().take(3).map(|token| token / 2));
        }
        let mut batch = Batch::default();
        // The neighbour comes alternately first and last.
        let is_first = (from / step).is_multiple_of(2);
        if is_first {
            pages.append(&mut other, &neighbour, &mut batch);
        }
        let start = batch.tokens.len();
        pages.append(&mut ours, chunk, &mut batch);
        if !is_first {
            pages.append(&mut other, &neighbour, &mut batch);
        }
        let end = from + chunk.len();
        batch.outputs = match is_pooled_in_chunks {
            true if end < case.tokens.len() => Vec::new(),
            true => vec![start as u32],
            false => {
                let rows = wanted.clone().filter(|row| (from..end).contains(row));
                rows.map(|row| (start + row - from) as u32).collect()
            }
        };
        let mut logits = vec![f32::NAN; batch.outputs.len() * case.plan.output_width()];
        model.forward(&batch, &mut logits)?;
        found.extend(logits);
        pages.release(&mut ours);
        pages.release(&mut other);
    }
    Ok(if is_pooled_in_chunks { found.repeat(wanted.len()) } else { found })
}

/// As [`run_prompt`] of [`Feeding::Whole`], with an observer.
pub(super) fn run_prompt_observed(
    model: &mut dyn Model,
    case: &Case,
    observer: &mut dyn Observer,
) -> Result<Vec<f32>> {
    let mut pages = Pages::new(model, false);
    let mut sequence = pages.start(case.position);
    let mut batch = Batch::default();
    pages.append(&mut sequence, &case.tokens, &mut batch);
    batch.outputs = (0..case.tokens.len() as u32).collect();
    let rows = vec![OutputRequest::Logits; batch.outputs.len()];
    let step = Step { batch: &batch, requests: &rows, steps: 1, observer: Some(observer) };
    let mut logits = Vec::new();
    model.step(step, &mut |output| {
        logits.extend_from_slice(output.logits);
        ControlFlow::Break(())
    })?;
    Ok(logits)
}

/// One sequence's length, pages and state slot.
pub(super) struct Sequence {
    pub(super) position: usize,
    tables: Vec<PageTable>,
    pub(super) state_slot: u32,
    /// Whether its tokens are those of a prompt.
    pub(super) is_prefill: bool,
}

/// The free pages of every window, and the free state slots.
pub(super) struct Pages {
    windows: Vec<Option<usize>>,
    free: Vec<Vec<u32>>,
    state_slots: Vec<u32>,
}

impl Pages {
    pub(super) fn new(model: &dyn Model, is_shuffled: bool) -> Pages {
        let mut random = Random::of("pages");
        let all = model.limits().pages.iter().map(|&pages| {
            let mut pages: Vec<u32> = (0..pages as u32).rev().collect();
            if is_shuffled {
                (1..pages.len()).for_each(|i| pages.swap(i, random.below(i + 1)));
            }
            pages
        });
        let free = all.collect();
        let mut state_slots: Vec<u32> = (0..model.limits().state_slots as u32).collect();
        if !is_shuffled {
            state_slots.reverse();
        }
        Pages { free, windows: model.plan().windows(), state_slots }
    }

    /// An empty sequence; its state slot holds what the last one left there.
    pub(super) fn start(&mut self, position: usize) -> Sequence {
        let tables = vec![PageTable::default(); self.windows.len()];
        let state_slot = self.state_slots.pop().expect("state slots for two sequences");
        Sequence { position, tables, state_slot, is_prefill: true }
    }

    /// Adds a span with pages for it to a step; no span for no tokens.
    pub(super) fn append(&mut self, sequence: &mut Sequence, tokens: &[u32], batch: &mut Batch) {
        if tokens.is_empty() {
            return;
        }
        let end = sequence.position + tokens.len();
        for (table, free) in sequence.tables.iter_mut().zip(&mut self.free) {
            while (table.skipped + table.pages.len()) * PAGE_TOKENS < end {
                table.pages.push(free.pop().expect("pages for two sequences"));
            }
        }
        let (len, position, tables) = (tokens.len(), sequence.position, sequence.tables.clone());
        let (state_slot, is_prefill) = (sequence.state_slot, sequence.is_prefill);
        batch.push(Span { len, position, tables, state_slot, is_prefill }, tokens);
        sequence.position = end;
    }

    /// Gives `copy` pages in the places of `first`'s. Returns the blocks of both.
    pub(super) fn copied(
        &mut self,
        first: &Sequence,
        copy: &mut Sequence,
    ) -> Vec<(StateBlock, StateBlock)> {
        let mut blocks =
            vec![(StateBlock::StateSlot(first.state_slot), StateBlock::StateSlot(copy.state_slot))];
        copy.tables.clone_from(&first.tables);
        for (window_index, (table, free)) in copy.tables.iter_mut().zip(&mut self.free).enumerate()
        {
            for page in &mut table.pages {
                let from = StateBlock::Page { window_index, page: *page };
                *page = free.pop().expect("pages for two sequences");
                blocks.push((from, StateBlock::Page { window_index, page: *page }));
            }
        }
        blocks
    }

    /// Takes back the pages that no later token sees; the next one that needs a page gets them.
    fn release(&mut self, sequence: &mut Sequence) {
        let windows = self.windows.iter().zip(&mut self.free);
        for (table, (window, free)) in sequence.tables.iter_mut().zip(windows) {
            let oldest = window.map_or(0, |w| (sequence.position + 1).saturating_sub(w));
            while (table.skipped + 1) * PAGE_TOKENS <= oldest && !table.pages.is_empty() {
                free.push(table.pages.remove(0));
                table.skipped += 1;
            }
        }
    }
}
