//! The merge loop: neighbouring symbols become one, best pair first, until no pair is left. It
//! knows neither vocabularies nor scores; byte-level BPE and SentencePiece differ only in the
//! pairs that they allow. The symbols are a linked list and the candidates a heap, so the cost is
//! n log n for any text.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// The pairs that may become one symbol.
pub(super) trait Pairs {
    /// The rank (lowest goes first) and the symbol that `left` and `right` make; `joined` is the
    /// text of both.
    fn join(&self, left: u32, right: u32, joined: &[u8]) -> Option<(u32, u32)>;
}

/// No neighbour.
const END: u32 = u32::MAX;
/// In the place of the left neighbour of a symbol that is none any more.
const MERGED: u32 = u32::MAX - 1;

/// Its text ends where that of its right neighbour starts. Long texts have one for each character,
/// so its size counts.
#[derive(Clone, Copy)]
struct Symbol {
    id: u32,
    /// Where its text starts, in bytes.
    start: u32,
    /// [`MERGED`] once it is part of its left neighbour.
    previous: u32,
    next: u32,
}

/// A pair that may be joined. The order of the fields is the order of merging: by rank, then from
/// left to right.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Candidate {
    rank: u32,
    left: u32,
    /// Length of both in bytes. A symbol only ever grows, so a candidate is out of date if `left`
    /// and its right neighbour are longer now.
    len: u32,
    id: u32,
}

/// The loop with its buffers, which one call of the tokenizer uses for all its words.
#[derive(Default)]
pub(super) struct Merger {
    symbols: Vec<Symbol>,
    queue: BinaryHeap<Reverse<Candidate>>,
}

impl Merger {
    /// Makes room for this many symbols, which is not more than will be pushed.
    pub(super) fn reserve(&mut self, symbols: usize) {
        self.symbols.reserve_exact(symbols);
    }

    /// Appends the first symbols: one after the other they are the text, less than 4 GiB of it.
    pub(super) fn push(&mut self, id: u32, start: usize) {
        let index = self.symbols.len() as u32;
        if let Some(last) = self.symbols.last_mut() {
            last.next = index;
        }
        let previous = index.checked_sub(1).unwrap_or(END);
        self.symbols.push(Symbol { id, start: start as u32, previous, next: END });
    }

    /// Merges the symbols that were pushed, calls `emit` with the id and the text of each that is
    /// left, and forgets them.
    pub(super) fn run(
        &mut self,
        text: &[u8],
        pairs: &impl Pairs,
        mut emit: impl FnMut(u32, &[u8]),
    ) {
        // A heap that is built of all at once takes less time than one that grows.
        let mut candidates = std::mem::take(&mut self.queue).into_vec();
        let lefts = 0..(self.symbols.len() as u32).saturating_sub(1);
        candidates.extend(lefts.filter_map(|left| self.candidate(left, text, pairs)));
        self.queue = candidates.into();
        while let Some(Reverse(best)) = self.queue.pop() {
            let Symbol { start, previous, next: right, .. } = self.symbols[best.left as usize];
            if previous == MERGED || right == END || self.end(right, text) - start != best.len {
                continue;
            }
            let next = self.symbols[right as usize].next;
            self.symbols[right as usize].previous = MERGED;
            let symbol = &mut self.symbols[best.left as usize];
            symbol.id = best.id;
            symbol.next = next;
            if next != END {
                self.symbols[next as usize].previous = best.left;
                let candidate = self.candidate(best.left, text, pairs);
                self.queue.extend(candidate);
            }
            if previous != END {
                let candidate = self.candidate(previous, text, pairs);
                self.queue.extend(candidate);
            }
        }
        for index in 0..self.symbols.len() as u32 {
            let Symbol { id, start, previous, .. } = self.symbols[index as usize];
            if previous != MERGED {
                emit(id, &text[start as usize..self.end(index, text) as usize]);
            }
        }
        self.symbols.clear();
    }

    /// Where the text of a symbol ends.
    fn end(&self, symbol: u32, text: &[u8]) -> u32 {
        match self.symbols[symbol as usize].next {
            END => text.len() as u32,
            next => self.symbols[next as usize].start,
        }
    }

    /// A symbol and its right neighbour, if they may be joined.
    fn candidate(&self, left: u32, text: &[u8], pairs: &impl Pairs) -> Option<Reverse<Candidate>> {
        let l = &self.symbols[left as usize];
        let joined = &text[l.start as usize..self.end(l.next, text) as usize];
        let (rank, id) = pairs.join(l.id, self.symbols[l.next as usize].id, joined)?;
        Some(Reverse(Candidate { rank, left, len: joined.len() as u32, id }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Joins texts that are in a list; the rank is the place in it.
    struct List(&'static [&'static str]);

    impl Pairs for List {
        fn join(&self, _: u32, _: u32, joined: &[u8]) -> Option<(u32, u32)> {
            let at = self.0.iter().position(|text| text.as_bytes() == joined)?;
            Some((at as u32, at as u32))
        }
    }

    fn merge(text: &str, list: &'static [&'static str]) -> Vec<String> {
        let mut merger = Merger::default();
        text.bytes().enumerate().for_each(|(at, byte)| merger.push(u32::from(byte), at));
        let mut out = Vec::new();
        merger.run(text.as_bytes(), &List(list), |_, text| {
            out.push(String::from_utf8_lossy(text).into_owned());
        });
        out
    }

    #[test]
    fn the_best_rank_goes_first_and_then_the_leftmost() {
        assert_eq!(merge("aaa", &["aa"]), ["aa", "a"]);
        assert_eq!(merge("abc", &["bc", "ab"]), ["a", "bc"]);
        assert_eq!(merge("abcd", &["bc", "ab", "abc", "abcd"]), ["abcd"]);
        assert_eq!(merge("abab", &["ab", "ba", "abab"]), ["abab"]);
        assert_eq!(merge("", &["a"]), [""; 0]);
    }
}
