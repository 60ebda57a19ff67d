//! One step's work: tokens of any mix of sequences, and where their state is.

/// Tokens whose keys and values one page holds, in every slot of its window.
pub const PAGE_TOKENS: usize = 32;

/// Where the state of one sequence is, for the slots of one window.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PageTable {
    /// Pages that were freed because the window has passed them. Position `p` is in
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
    /// One table for each of [`bodkin_model::Plan::windows`], which covers the new tokens too. No
    /// other span lists the pages of the new tokens: they are written while others are read.
    pub tables: Vec<PageTable>,
    /// The slot of the sequence's recurrent state, which no other span of the step has. Not read
    /// where the plan has no such state. At position 0 the state starts from zero, whatever the
    /// slot holds.
    pub state_slot: u32,
    /// Whether the tokens are a prompt's, not generated ones. A backend may round prefill rows and
    /// decode rows differently, but never by how the prompt is cut into chunks or by what else is
    /// in the batch. A cached prefix keeps the keys and values that it was computed with.
    pub is_prefill: bool,
}

/// One step: the tokens of all spans, one span after the other.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Batch {
    /// `[rows]`.
    pub tokens: Vec<u32>,
    /// Their lengths add up to `rows`.
    pub spans: Vec<Span>,
    /// The output rows, ascending: those that give logits or a token. For an encoder, any row of a
    /// span gives the embedding of the whole sequence.
    pub outputs: Vec<u32>,
    /// The value of [`bodkin_model::Op::Input`], `[rows, width]`; empty where the plan has none.
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

    /// Adds a span and its tokens.
    pub fn push(&mut self, span: Span, tokens: &[u32]) {
        assert_eq!(span.len, tokens.len(), "the tokens of the span");
        self.spans.push(span);
        self.tokens.extend(tokens);
    }

    /// Makes the last row an output.
    pub fn output_last(&mut self) {
        self.outputs.push(self.tokens.len() as u32 - 1);
    }

    /// Removes everything and keeps the memory.
    pub fn clear(&mut self) {
        self.tokens.clear();
        self.spans.clear();
        self.outputs.clear();
        self.inputs.clear();
    }
}
