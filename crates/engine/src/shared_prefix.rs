//! Which texts to embed begin alike, so that one of them computes the prefix and the others wait
//! for it. Pure: it knows tokens, and how many of them are stored already.

use std::collections::VecDeque;
use std::ops::Range;

use crate::pages::MIN_COPIED_TOKENS;

/// The rows that a shared prefix must save before texts wait a step for it. A step of few rows
/// takes about as long as 16 of a large one on CPUs, and as 100 to 300 on GPUs.
const MIN_SAVED_ROWS: usize = 128;

/// Texts with whose prefixes a new text is compared, where no other text shares its own.
const RECENT_TEXTS: usize = 64;

/// The most tokens of a text that are remembered.
const RECENT_TOKENS: usize = 1024;

/// Texts that share a prefix which is not stored.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Group {
    /// Tokens of the prefix.
    pub(crate) len: usize,
    /// The indices of the texts.
    pub(crate) texts: Vec<usize>,
}

/// Groups texts so that computing the prefix of each group once saves the most rows. `cached` are
/// the tokens of each text that are stored already. A text is in one group at most.
pub(crate) fn group(texts: &[&[u32]], cached: &[usize]) -> Vec<Group> {
    // Texts that begin alike are neighbours.
    let mut order: Vec<usize> = (0..texts.len()).collect();
    order.sort_by_key(|&i| texts[i]);
    let shared = |pair: &[usize]| {
        let (a, b) = (texts[pair[0]], texts[pair[1]]);
        let len = common_prefix(a, b);
        // The last token of a text is always computed.
        let len = len.min(a.len() - 1).min(b.len() - 1);
        let saved = len.saturating_sub(cached[pair[0]].min(cached[pair[1]]));
        Shared { len, saved: if saved < MIN_COPIED_TOKENS { 0 } else { saved } }
    };
    let shared: Vec<Shared> = order.windows(2).map(shared).collect();
    let mut found = Vec::new();
    choose(&shared, 0..order.len(), &mut found);
    let group = |(range, len): (Range<usize>, usize)| Group { len, texts: order[range].to_vec() };
    found.into_iter().map(group).collect()
}

/// What two neighbours share.
struct Shared {
    /// Tokens.
    len: usize,
    /// Those of them that the second one need not compute; 0 if too few.
    saved: usize,
}

/// Adds the ranges of texts to group, each with the length of its prefix. Returns the rows that
/// they save: those of the whole range as one group, or of the parts on both sides of the
/// neighbours that share least. Calls itself no deeper than there are texts.
fn choose(shared: &[Shared], range: Range<usize>, found: &mut Vec<(Range<usize>, usize)>) -> usize {
    let pairs = range.start..range.end.saturating_sub(1);
    // None share less than nothing.
    let nothing = pairs.clone().find(|&i| shared[i].saved == 0);
    let least = nothing.or_else(|| pairs.clone().min_by_key(|&i| shared[i].saved));
    let Some(least) = least else { return 0 };
    let before = found.len();
    let parts =
        choose(shared, range.start..least + 1, found) + choose(shared, least + 1..range.end, found);
    let whole = pairs.len() * shared[least].saved;
    if whole < MIN_SAVED_ROWS || whole <= parts {
        return parts;
    }
    found.truncate(before);
    let len = shared[pairs].iter().map(|shared| shared.len).min().unwrap_or_default();
    found.push((range, len));
    whole
}

/// The starts of the texts that were computed last, to find prefixes that requests share one after
/// the other.
#[derive(Default)]
pub(crate) struct RecentTexts {
    texts: VecDeque<Vec<u32>>,
}

impl RecentTexts {
    /// The tokens that a text shares with one of them, if more than the `cached` ones are worth
    /// being stored; 0 if not.
    pub(crate) fn shared(&self, text: &[u32], cached: usize) -> usize {
        let shared = self.texts.iter().map(|recent| common_prefix(recent, text)).max();
        let shared = shared.unwrap_or_default().min(text.len() - 1);
        if shared < cached + MIN_COPIED_TOKENS { 0 } else { shared }
    }

    /// Remembers a text, and forgets the oldest.
    pub(crate) fn add(&mut self, text: &[u32]) {
        if self.texts.len() == RECENT_TEXTS {
            self.texts.pop_front();
        }
        self.texts.push_back(text[..text.len().min(RECENT_TOKENS)].to_vec());
    }
}

/// The tokens with which both texts begin.
fn common_prefix(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A text of a prefix, made of one token, and tokens of its own.
    fn text(prefix: &[(u32, usize)], own: u32) -> Vec<u32> {
        let mut text: Vec<u32> = prefix.iter().flat_map(|&(token, len)| vec![token; len]).collect();
        text.extend([1000 + own; 5]);
        text
    }

    /// The groups of texts, of each of which `cached` tokens are stored.
    fn groups(texts: &[Vec<u32>], cached: usize) -> Vec<(usize, Vec<usize>)> {
        let texts: Vec<&[u32]> = texts.iter().map(Vec::as_slice).collect();
        let groups = group(&texts, &vec![cached; texts.len()]).into_iter();
        let mut groups: Vec<_> = groups
            .map(|mut group| {
                group.texts.sort_unstable();
                (group.len, group.texts)
            })
            .collect();
        groups.sort_by_key(|(_, texts)| texts[0]);
        groups
    }

    #[test]
    fn texts_with_the_same_prefix_are_a_group() {
        // Two task prefixes, interleaved, and texts of their own.
        let mut texts: Vec<Vec<u32>> = (0..40).map(|i| text(&[(i % 2, 20)], 100 + i)).collect();
        texts.extend((0..40).map(|i| text(&[], 200 + i)));
        let of = |parity: usize| (0..40).filter(|i| i % 2 == parity).collect::<Vec<_>>();
        assert_eq!(groups(&texts, 0), [(20, of(0)), (20, of(1))]);
        // What is stored is no reason to wait, nor are a few tokens more.
        assert_eq!(groups(&texts, 20), []);
        assert_eq!(groups(&texts, 13), []);
        assert_eq!(groups(&texts, 12), [(20, of(0)), (20, of(1))]);
    }

    #[test]
    fn the_prefix_that_saves_most_is_chosen() {
        let texts = |inner: usize| -> Vec<Vec<u32>> {
            (0..40).map(|i| text(&[(7, 20), (i % 2, inner)], 100 + i)).collect()
        };
        let all: Vec<usize> = (0..40).collect();
        // 39 x 20 rows are more than 2 x 19 x 20, but less than 2 x 19 x 21.
        assert_eq!(groups(&texts(0), 0), [(20, all)]);
        assert_eq!(groups(&texts(1), 0).len(), 2);
        assert_eq!(groups(&texts(1), 0)[0].0, 21);
    }

    #[test]
    fn a_small_gain_is_not_waited_for() {
        let texts = |count: u32, len| -> Vec<Vec<u32>> {
            (0..count).map(|i| text(&[(7, len)], i)).collect()
        };
        assert_eq!(groups(&texts(9, 16), 0).len(), 1);
        assert_eq!(groups(&texts(8, 16), 0), [], "112 rows");
        assert_eq!(groups(&texts(100, 7), 0), [], "too few tokens to copy");
        // The last token of equal texts is computed for each.
        assert_eq!(groups(&vec![vec![5; 20]; 30], 0)[0].0, 19);
        assert_eq!(groups(&vec![vec![5]; 300], 0), []);
        assert_eq!(groups(&[], 0), []);
    }

    #[test]
    fn recent_texts_show_what_is_shared_and_are_few() {
        let mut recent = RecentTexts::default();
        assert_eq!(recent.shared(&[1; 30], 0), 0);
        recent.add(&text(&[(7, 20)], 1));
        assert_eq!(recent.shared(&text(&[(7, 20)], 2), 0), 20);
        assert_eq!(recent.shared(&text(&[(7, 20)], 2), 13), 0, "7 tokens more");
        assert_eq!(recent.shared(&[7; 15], 0), 14, "one is left to compute");
        (0..RECENT_TEXTS as u32).for_each(|i| recent.add(&vec![100 + i; 5000]));
        assert_eq!(recent.shared(&text(&[(7, 20)], 2), 0), 0, "it was forgotten");
        assert_eq!(recent.shared(&[100; 6000], 0), RECENT_TOKENS);
    }
}
