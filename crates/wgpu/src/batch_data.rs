//! The data of a step as the shaders read them (`shaders/batch.wgsl`), in words: a header, three
//! words for each row, the spans, the page tables, and the lists of rows.

use bodkin_backend::Batch;

use crate::program::{Depth, List};

const HEADER_WORDS: usize = 8 + LIST_WORDS * List::COUNT;
/// Of a list: where it begins, its length, and its first pair, which decode needs at once.
const LIST_WORDS: usize = 4;

/// The words, and how many rows there are of each kind.
#[derive(Default)]
pub(crate) struct BatchData {
    pub(crate) words: Vec<u32>,
    tokens: usize,
    outputs: usize,
    spans: usize,
    lists: [usize; List::COUNT],
    /// Of each output: its row, its number, and whether the row is of a prompt.
    outputs_of: Vec<(usize, usize, bool)>,
}

impl BatchData {
    /// Writes a step.
    pub(crate) fn set(&mut self, batch: &Batch) {
        self.words.clear();
        self.words.resize(HEADER_WORDS, 0);
        (self.tokens, self.outputs) = (batch.tokens.len(), batch.outputs.len());
        self.spans = batch.spans.len();
        let windows = batch.spans.first().map_or(0, |span| span.tables.len());
        self.words[..3].copy_from_slice(&[self.tokens, self.outputs, self.spans].map(word));
        self.words[3] = word(self.words.len());
        let mut tokens = batch.tokens.iter();
        for (i, span) in batch.spans.iter().enumerate() {
            for position in span.position..span.position + span.len {
                let token = *tokens.next().expect("a token for each row");
                self.words.extend([token, word(position), word(i)]);
            }
        }
        self.words[4] = word(self.words.len());
        self.words[5] = word(4 + 2 * windows);
        let spans_end = self.words.len() + self.spans * (4 + 2 * windows);
        let (mut row, mut table_at) = (0, spans_end);
        for span in &batch.spans {
            self.words.extend([word(row), word(span.len), word(span.position), span.state_slot]);
            for table in &span.tables {
                self.words.extend([word(table.skipped), word(table_at)]);
                table_at += table.pages.len();
            }
            row += span.len;
        }
        for table in batch.spans.iter().flat_map(|span| &span.tables) {
            self.words.extend_from_slice(&table.pages);
        }
        self.lists(batch);
    }

    fn lists(&mut self, batch: &Batch) {
        let rows = || {
            let spans = batch.spans.iter();
            let are_prefill = spans.flat_map(|span| std::iter::repeat_n(span.is_prefill, span.len));
            are_prefill.enumerate()
        };
        let mut is_prefill = rows();
        let mut outputs = std::mem::take(&mut self.outputs_of);
        outputs.clear();
        for (i, &row) in batch.outputs.iter().enumerate() {
            let (_, is_prefill) =
                is_prefill.find(|(r, _)| *r == row as usize).expect("outputs are rows, ascending");
            outputs.push((row as usize, i, is_prefill));
        }
        let tokens = |wanted| {
            let of_kind = rows().filter(move |(_, is_prefill)| *is_prefill == wanted);
            of_kind.map(|(row, _)| (row, row))
        };
        self.list(List::Decode, tokens(false));
        self.list(List::Prefill, tokens(true));
        let all = || outputs.iter().copied();
        let pair = |(row, i, _): (usize, usize, bool)| (row, i);
        self.list(List::DecodeOutputs, all().filter(|(.., is)| !is).map(pair));
        self.list(List::PrefillOutputs, all().filter(|(.., is)| *is).map(pair));
        self.list(List::Outputs, all().map(pair));
        self.outputs_of = outputs;
    }

    fn list(&mut self, list: List, pairs: impl Iterator<Item = (usize, usize)>) {
        let start = self.words.len();
        self.words.extend(pairs.flat_map(|(row, out)| [word(row), word(out)]));
        let count = (self.words.len() - start) / 2;
        let first = self.words.get(start..start + 2).map_or([0; 2], |pair| [pair[0], pair[1]]);
        let header = [word(start), word(count), first[0], first[1]];
        let at = 8 + LIST_WORDS * list as usize;
        self.words[at..at + LIST_WORDS].copy_from_slice(&header);
        self.lists[list as usize] = count;
    }

    /// The byte at which the token of a row is.
    pub(crate) fn token_at(&self, row: usize) -> u64 {
        4 * (self.words[3] as usize + 3 * row) as u64
    }

    /// Workgroups in the first dimension.
    pub(crate) fn depth(&self, depth: Depth) -> usize {
        match depth {
            Depth::Step => 1,
            Depth::Tokens => self.tokens,
            Depth::Outputs => self.outputs,
            Depth::Spans => self.spans,
            Depth::List(list, rows) => self.lists[list as usize].div_ceil(rows),
            Depth::Experts(list, tiles) => tiles.most(self.lists[list as usize]),
        }
    }

    /// The length of a list.
    pub(crate) fn list_len(&self, list: List) -> usize {
        self.lists[list as usize]
    }
}

fn word(x: usize) -> u32 {
    u32::try_from(x).expect("a step is smaller than 2^32")
}
