//! The limits of a model, and the check of a step against them, in time linear in the size of the
//! batch and without allocation.

use bodkin_model::{Op, Plan};

use crate::error::{Error, Result};
use crate::{OutputRequest, PAGE_TOKENS, Span, Step};

/// What a model is sized for when it is loaded. A larger step is refused.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// The most tokens in one step.
    pub tokens: usize,
    /// The most output rows in one step.
    pub outputs: usize,
    /// Pages for each of [`Plan::windows`], in that order.
    pub pages: Vec<usize>,
    /// Slots of recurrent state, each for one sequence or one checkpoint; 0 where the plan
    /// has none.
    pub state_slots: usize,
}

/// What steps of one model are checked against, and the counters that a check needs.
#[derive(Default)]
pub struct StepCheck {
    limits: Limits,
    vocabulary: usize,
    /// Rows of a learned position table; without one there is no limit.
    max_positions: usize,
    needs_whole_sequences: bool,
    has_state: bool,
    /// The width of [`Op::Input`]; 0 where the plan has none.
    input_width: usize,
    windows: Vec<Option<usize>>,
    /// For each window, the number of tables that list each page. Zero between checks.
    page_uses: Vec<Vec<u32>>,
    /// Whether a span has each state slot. False between checks.
    slot_uses: Vec<bool>,
}

fn at_most(what: &'static str, found: usize, limit: usize) -> Result<()> {
    if found > limit { Err(Error::Limit { what, found, limit }) } else { Ok(()) }
}

impl StepCheck {
    /// Reads what checks need of a plan.
    pub fn new(plan: &Plan, limits: &Limits) -> StepCheck {
        let input = plan.ops.iter().position(|op| matches!(op, Op::Input));
        StepCheck {
            vocabulary: plan.vocabulary,
            max_positions: plan.max_positions(),
            needs_whole_sequences: plan.needs_whole_sequences(),
            has_state: !plan.states.is_empty(),
            input_width: input.map_or(0, |i| plan.widths[i]),
            windows: plan.windows(),
            page_uses: limits.pages.iter().map(|&pages| vec![0; pages]).collect(),
            slot_uses: vec![false; limits.state_slots],
            limits: limits.clone(),
        }
    }

    /// Checks a step.
    ///
    /// # Errors
    /// [`Error::Limit`] if the model was loaded for less.
    ///
    /// # Panics
    /// If the step contradicts itself: a caller's mistake, whatever the model.
    pub fn check(&mut self, step: &Step<'_>) -> Result<()> {
        let Step { batch, requests, steps, .. } = step;
        at_most("tokens", batch.tokens.len(), self.limits.tokens)?;
        at_most("output rows", batch.outputs.len(), self.limits.outputs)?;
        let len: usize = batch.spans.iter().map(|s| s.len).sum();
        assert_eq!(len, batch.tokens.len(), "the spans cover the tokens");
        assert!(batch.spans.iter().all(|s| s.len > 0), "every span has tokens");
        for &token in &batch.tokens {
            at_most("as a token id", token as usize, self.vocabulary - 1)?;
        }
        assert!(batch.outputs.windows(2).all(|w| w[0] < w[1]), "outputs ascend");
        assert!(batch.outputs.last().is_none_or(|&row| (row as usize) < len), "outputs are rows");
        assert_eq!(batch.inputs.len(), len * self.input_width, "one input row for each token");
        // Also that there is at least one step.
        self.check_rows(requests, step);
        for span in &batch.spans {
            self.check_span(span, steps - 1)?;
        }
        self.check_owners(&batch.spans);
        Ok(())
    }

    /// Checks what output rows ask for.
    fn check_rows(&self, rows: &[OutputRequest<'_>], step: &Step<'_>) {
        assert_eq!(rows.len(), step.batch.outputs.len(), "an `OutputRequest` for each output row");
        assert!(step.steps > 0, "at least one step");
        let has_uniforms = |row: &OutputRequest<'_>| match row {
            OutputRequest::Token(params) => {
                params.temperature <= 0.0 || params.uniforms.len() >= step.steps
            }
            OutputRequest::Logits => true,
        };
        assert!(rows.iter().all(has_uniforms), "one random number for each sampled token");
        if step.steps > 1 {
            let spans = &step.batch.spans;
            assert!(spans.iter().all(|s| s.len == 1 && !s.is_prefill), "spans are decode rows");
            assert_eq!(rows.len(), spans.len(), "every decode row is an output");
            let is_token = |row: &OutputRequest<'_>| matches!(row, OutputRequest::Token(_));
            assert!(rows.iter().all(is_token), "every decode row asks for a token");
        }
    }

    /// Checks the position, pages and state slot of a span that `more` steps follow.
    fn check_span(&self, span: &Span, more: usize) -> Result<()> {
        let end = span.position + span.len + more;
        assert!(!self.needs_whole_sequences || span.position == 0, "a sequence comes whole");
        at_most("tokens in a sequence", end, self.max_positions)?;
        assert_eq!(span.tables.len(), self.limits.pages.len(), "a table for each window");
        for ((table, window), &limit) in
            span.tables.iter().zip(&self.windows).zip(&self.limits.pages)
        {
            let oldest = window.map_or(0, |w| (span.position + 1).saturating_sub(w));
            let pages = end.div_ceil(PAGE_TOKENS);
            assert!(table.skipped * PAGE_TOKENS <= oldest, "the window's pages are there");
            assert!(table.skipped + table.pages.len() >= pages, "new tokens have pages");
            for &page in &table.pages {
                at_most("pages", page as usize + 1, limit)?;
            }
        }
        let slots = self.limits.state_slots;
        match self.has_state {
            true => at_most("state slots", span.state_slot as usize + 1, slots),
            false => Ok(()),
        }
    }

    /// Checks that the pages that a span writes, and its state slot, are not another span's too.
    fn check_owners(&mut self, spans: &[Span]) {
        let mut are_own = true;
        for (i, uses) in self.page_uses.iter_mut().enumerate() {
            let tables = || spans.iter().map(|span| (span, &span.tables[i]));
            tables().for_each(|(_, t)| t.pages.iter().for_each(|&page| uses[page as usize] += 1));
            are_own &= tables().all(|(span, table)| {
                let first = span.position / PAGE_TOKENS - table.skipped;
                table.pages[first..].iter().all(|&page| uses[page as usize] == 1)
            });
            tables().for_each(|(_, t)| t.pages.iter().for_each(|&page| uses[page as usize] = 0));
        }
        assert!(are_own, "pages of new tokens belong to one span");
        if self.has_state {
            let slots = || spans.iter().map(|span| span.state_slot as usize);
            let uses = &mut self.slot_uses;
            let are_own = slots().all(|slot| !std::mem::replace(&mut uses[slot], true));
            slots().for_each(|slot| uses[slot] = false);
            assert!(are_own, "a state slot belongs to one span");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;
    use crate::{Batch, PageTable};

    fn check() -> StepCheck {
        let limits = Limits { tokens: 8, outputs: 8, pages: vec![4], state_slots: 2 };
        StepCheck {
            vocabulary: 9,
            max_positions: usize::MAX,
            has_state: true,
            windows: vec![None],
            page_uses: vec![vec![0; 4]],
            slot_uses: vec![false; 2],
            limits,
            ..StepCheck::default()
        }
    }

    fn span(position: usize, pages: &[u32], state_slot: u32) -> Span {
        let tables = vec![PageTable { skipped: 0, pages: pages.to_vec() }];
        Span { len: 1, position, tables, state_slot, is_prefill: false }
    }

    /// Whether two spans of one token each may share a step; the second check of the same counters
    /// must agree.
    fn is_accepted(spans: [Span; 2]) -> bool {
        let batch = Batch { tokens: vec![1, 2], spans: spans.to_vec(), ..Batch::default() };
        let mut check = check();
        let mut found = || {
            let step = Step { batch: &batch, requests: &[], steps: 1, observer: None };
            catch_unwind(AssertUnwindSafe(|| check.check(&step).is_ok())).unwrap_or(false)
        };
        let first = found();
        assert_eq!(found(), first);
        first
    }

    #[test]
    fn a_model_without_pages_or_state_slots_has_no_number_0() {
        let batch = Batch { tokens: vec![1], spans: vec![span(0, &[0], 0)], ..Batch::default() };
        let step = Step { batch: &batch, requests: &[], steps: 1, observer: None };
        let limits = Limits { tokens: 8, outputs: 8, pages: vec![4], state_slots: 2 };
        for limits in
            [Limits { pages: vec![0], ..limits.clone() }, Limits { state_slots: 0, ..limits }]
        {
            let found = StepCheck { limits, ..check() }.check(&step);
            assert!(matches!(found, Err(Error::Limit { found: 1, limit: 0, .. })), "{found:?}");
        }
    }

    #[test]
    fn new_pages_and_state_slots_have_one_owner() {
        assert!(is_accepted([span(0, &[1], 0), span(0, &[2], 1)]));
        assert!(!is_accepted([span(0, &[1], 0), span(0, &[1], 1)]), "both write page 1");
        assert!(!is_accepted([span(0, &[1], 1), span(0, &[2], 1)]), "both have state slot 1");
        assert!(is_accepted([span(32, &[0, 1], 0), span(32, &[0, 2], 1)]), "page 0 is read");
        assert!(!is_accepted([span(31, &[0], 0), span(32, &[0, 2], 1)]), "page 0 is written, too");
    }
}
