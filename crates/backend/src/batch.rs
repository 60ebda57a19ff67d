//! One step's work: tokens of any mix of sequences, and where their state is.

use bodkin_model::{Op, Plan};

use crate::Limits;
use crate::error::{Error, Result};

/// Tokens whose keys and values one page holds, in every slot of its window.
pub const PAGE_TOKENS: usize = 32;

/// Where the state of one sequence is, for the slots of one window.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PageTable {
    /// Pages that were given back because the window has passed them. Position `p` is in
    /// `pages[p / PAGE_TOKENS - skipped]`.
    pub skipped: usize,
    /// Page numbers in order of position.
    pub pages: Vec<u32>,
}

impl PageTable {
    /// The page that holds `position`.
    pub fn page(&self, position: usize) -> usize {
        self.pages[position / PAGE_TOKENS - self.skipped] as usize
    }
}

/// Consecutive tokens of one sequence.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Span {
    /// The number of tokens.
    pub len: usize,
    /// The position of the first one in its sequence.
    pub position: usize,
    /// One table for each of [`Plan::windows`]; they cover the new tokens too. The pages of the
    /// new tokens are this span's alone: they are written while others are read.
    pub tables: Vec<PageTable>,
    /// The slot of the sequence's recurrent state, its alone in this step; of no meaning where the
    /// plan has none. At position 0 the state begins as zero, whatever the slot holds.
    pub state_slot: u32,
    /// Whether the tokens are of a prompt, not generated. A backend may round a prompt's rows in
    /// another way, but in the same one however the prompt is cut and whatever runs beside it. Keys
    /// and values that a later prompt takes over stay as they were made.
    pub is_prefill: bool,
}

/// One step: the tokens of all spans, one span after the other.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Batch {
    /// `[rows]`.
    pub tokens: Vec<u32>,
    /// Their lengths add up to `rows`.
    pub spans: Vec<Span>,
    /// The rows whose logits are wanted, ascending. Of an encoder, a row stands for its span: the
    /// embedding is that of the whole sequence.
    pub outputs: Vec<u32>,
    /// The rows of [`bodkin_model::Op::Input`], `[rows, width]`; empty where the plan has none.
    pub inputs: Vec<f32>,
}

impl Batch {
    /// The position of every row in its sequence.
    pub fn positions(&self) -> impl Iterator<Item = usize> {
        self.spans.iter().flat_map(|s| s.position..s.position + s.len)
    }

    /// The first row and the number of rows of the span that a row belongs to.
    pub fn span_of(&self, row: usize) -> (usize, usize) {
        let mut start = 0;
        for span in &self.spans {
            if row < start + span.len {
                return (start, span.len);
            }
            start += span.len;
        }
        panic!("row {row} of {start}");
    }

    /// Checks the step against what the model was loaded for.
    pub fn check(&self, plan: &Plan, limits: &Limits) -> Result<()> {
        let at_most = |what, found, limit| {
            if found > limit { Err(Error::Limit { what, found, limit }) } else { Ok(()) }
        };
        at_most("tokens", self.tokens.len(), limits.tokens)?;
        at_most("rows of logits", self.outputs.len(), limits.outputs)?;
        let rows: usize = self.spans.iter().map(|s| s.len).sum();
        assert_eq!(rows, self.tokens.len(), "the spans cover the tokens");
        assert!(self.spans.iter().all(|s| s.len > 0), "every span has tokens");
        for &token in &self.tokens {
            at_most("as a token id", token as usize, plan.vocabulary - 1)?;
        }
        assert!(self.outputs.windows(2).all(|w| w[0] < w[1]), "outputs ascend");
        assert!(self.outputs.iter().all(|&row| (row as usize) < rows), "outputs are rows");
        let input = plan.ops.iter().position(|op| matches!(op, Op::Input));
        let width = input.map_or(0, |i| plan.widths[i]);
        assert_eq!(self.inputs.len(), rows * width, "as many rows of input as tokens");
        let positions = plan.max_positions();
        let is_whole = plan.needs_whole_sequences();
        for span in &self.spans {
            assert!(!is_whole || span.position == 0, "a sequence comes whole");
            at_most("tokens in a sequence", span.position + span.len, positions)?;
            assert_eq!(span.tables.len(), limits.pages.len(), "a table for each window");
            let windows = plan.distinct_windows();
            for ((table, window), &limit) in span.tables.iter().zip(windows).zip(&limits.pages) {
                let oldest = window.map_or(0, |w| (span.position + 1).saturating_sub(w));
                let pages = (span.position + span.len).div_ceil(PAGE_TOKENS);
                assert!(table.skipped * PAGE_TOKENS <= oldest, "the window's pages are there");
                assert!(table.skipped + table.pages.len() >= pages, "new tokens have pages");
                for &page in &table.pages {
                    at_most("as a page number", page as usize, limit.saturating_sub(1))?;
                }
            }
        }
        if !plan.states.is_empty() {
            for (i, span) in self.spans.iter().enumerate() {
                at_most(
                    "as a state slot",
                    span.state_slot as usize,
                    limits.state_slots.saturating_sub(1),
                )?;
                let is_apart =
                    self.spans[..i].iter().all(|other| other.state_slot != span.state_slot);
                assert!(is_apart, "a state slot belongs to one span");
            }
        }
        assert!(self.new_pages_are_apart(), "pages of new tokens belong to one span");
        Ok(())
    }

    /// Whether every page that a span writes occurs once in the whole batch.
    fn new_pages_are_apart(&self) -> bool {
        let count = |group: usize, page: u32| {
            let pages = self.spans.iter().flat_map(|s| &s.tables[group].pages);
            pages.filter(|&&p| p == page).count()
        };
        self.spans.iter().all(|span| {
            span.tables.iter().enumerate().all(|(group, table)| {
                let first = span.position / PAGE_TOKENS - table.skipped;
                table.pages[first..].iter().all(|&page| count(group, page) == 1)
            })
        })
    }
}
