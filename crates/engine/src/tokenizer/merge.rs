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

struct Symbol {
    id: u32,
    /// Where its text starts, in bytes.
    start: u32,
    /// How long its text is, in bytes; 0 once it is part of its left neighbour.
    len: u32,
    previous: u32,
    next: u32,
}

/// A pair that may be joined. The order of the fields is the order of merging: by rank, then from
/// left to right.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Candidate {
    rank: u32,
    left: u32,
    right: u32,
    /// Length of both in bytes. A symbol only ever grows, so a candidate is out of date if its
    /// symbols are longer now.
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
    /// Appends the first symbols: one after the other they are the text, less than 4 GiB of it.
    pub(super) fn push(&mut self, id: u32, len: usize) {
        let index = self.symbols.len() as u32;
        let start = self.symbols.last().map_or(0, |last| last.start + last.len);
        if let Some(last) = self.symbols.last_mut() {
            last.next = index;
        }
        let previous = index.checked_sub(1).unwrap_or(END);
        self.symbols.push(Symbol { id, start, len: len as u32, previous, next: END });
    }

    /// Merges the symbols that were pushed, calls `emit` with the id and the text of each that is
    /// left, and forgets them.
    pub(super) fn run(
        &mut self,
        text: &[u8],
        pairs: &impl Pairs,
        mut emit: impl FnMut(u32, &[u8]),
    ) {
        for left in 1..self.symbols.len() as u32 {
            self.consider(left - 1, left, text, pairs);
        }
        while let Some(Reverse(best)) = self.queue.pop() {
            let (left, right) = (best.left as usize, best.right as usize);
            let (l, r) = (self.symbols[left].len, self.symbols[right].len);
            if l == 0 || r == 0 || l + r != best.len {
                continue;
            }
            let next = self.symbols[right].next;
            self.symbols[right].len = 0;
            let symbol = &mut self.symbols[left];
            symbol.id = best.id;
            symbol.len = best.len;
            symbol.next = next;
            let previous = symbol.previous;
            if next != END {
                self.symbols[next as usize].previous = best.left;
                self.consider(best.left, next, text, pairs);
            }
            if previous != END {
                self.consider(previous, best.left, text, pairs);
            }
        }
        for symbol in self.symbols.drain(..).filter(|symbol| symbol.len > 0) {
            let start = symbol.start as usize;
            emit(symbol.id, &text[start..start + symbol.len as usize]);
        }
    }

    fn consider(&mut self, left: u32, right: u32, text: &[u8], pairs: &impl Pairs) {
        let (l, r) = (&self.symbols[left as usize], &self.symbols[right as usize]);
        let (start, len) = (l.start as usize, l.len + r.len);
        let joined = &text[start..start + len as usize];
        if let Some((rank, id)) = pairs.join(l.id, r.id, joined) {
            self.queue.push(Reverse(Candidate { rank, left, right, len, id }));
        }
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
        text.bytes().for_each(|byte| merger.push(u32::from(byte), 1));
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
