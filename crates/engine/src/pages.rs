//! Which pages hold which sequence. Counting only: this module touches no tensor and can be tested
//! with no model. Sequences with the same start as a finished one take over its pages, so that
//! the next turn of a chat does not compute the earlier ones again.

use bodkin_backend::{PAGE_TOKENS, PageTable};

/// The free pages of one window, and the window.
struct Group {
    window: Option<usize>,
    free: Vec<u32>,
    total: usize,
}

/// All pages of a model, and the sequences kept for their start.
pub struct Pages {
    groups: Vec<Group>,
    /// Finished sequences, the one used last at the end.
    kept: Vec<Sequence>,
}

/// The tokens of one sequence and where their state is.
#[derive(Clone, Debug, Default)]
pub struct Sequence {
    /// The tokens whose state is stored.
    pub tokens: Vec<u32>,
    /// One for each window.
    pub tables: Vec<PageTable>,
}

impl Sequence {
    /// Whether the state after `len` tokens can still be had by forgetting later ones.
    fn can_shrink_to(&self, len: usize, groups: &[Group]) -> bool {
        self.tables
            .iter()
            .zip(groups)
            .all(|(table, group)| table.skipped * PAGE_TOKENS <= oldest_needed(group.window, len))
    }
}

/// The first position that the token at `position` still sees.
fn oldest_needed(window: Option<usize>, position: usize) -> usize {
    window.map_or(0, |w| (position + 1).saturating_sub(w))
}

impl Pages {
    /// `windows` are those of the plan, `pages` those of the limits that its model was loaded
    /// with.
    pub fn new(windows: &[Option<usize>], pages: &[usize]) -> Pages {
        let group = |(&window, &total): (&Option<usize>, &usize)| Group {
            window,
            free: (0..total as u32).rev().collect(),
            total,
        };
        Pages { groups: windows.iter().zip(pages).map(group).collect(), kept: Vec::new() }
    }

    /// The most tokens that one sequence can have.
    pub fn longest_sequence(&self) -> usize {
        let unbounded = self.groups.iter().filter(|g| g.window.is_none());
        unbounded.map(|g| g.total * PAGE_TOKENS).min().unwrap_or(usize::MAX)
    }

    /// The pages that each window needs for `sequences` sequences of up to `len` tokens, in steps
    /// of at most `step` tokens.
    pub fn needed(
        windows: &[Option<usize>],
        len: usize,
        step: usize,
        sequences: usize,
    ) -> Vec<usize> {
        let tokens = |window: &Option<usize>| match window {
            None => len,
            // The window, the step's new tokens, and a page that is only partly needed.
            Some(w) => len.min(w + step + 2 * PAGE_TOKENS),
        };
        windows.iter().map(|w| sequences * (tokens(w).div_ceil(PAGE_TOKENS) + 1)).collect()
    }

    /// A sequence for a prompt: the kept one that shares the longest start with it, cut to what
    /// they share, or an empty one. At least the last token is left to compute.
    pub fn start(&mut self, prompt: &[u32]) -> Sequence {
        let limit = prompt.len().saturating_sub(1);
        let shared = |s: &Sequence| {
            let same = s.tokens.iter().zip(prompt).take_while(|(a, b)| a == b).count();
            same.min(limit)
        };
        let usable = |s: &Sequence| {
            let len = shared(s);
            // A long conversation is not given up for the few tokens that all prompts begin with.
            let is_worth_it = 2 * len >= s.tokens.len();
            if is_worth_it && s.can_shrink_to(len, &self.groups) { len } else { 0 }
        };
        let best = (0..self.kept.len()).max_by_key(|&i| usable(&self.kept[i]));
        match best.map(|i| (i, usable(&self.kept[i]))) {
            Some((i, len)) if len > 0 => {
                let mut sequence = self.kept.remove(i);
                self.shrink(&mut sequence, len);
                sequence
            }
            _ => {
                let tables = vec![PageTable::default(); self.groups.len()];
                Sequence { tokens: Vec::new(), tables }
            }
        }
    }

    fn shrink(&mut self, sequence: &mut Sequence, len: usize) {
        sequence.tokens.truncate(len);
        for (table, group) in sequence.tables.iter_mut().zip(&mut self.groups) {
            let pages = len.div_ceil(PAGE_TOKENS).saturating_sub(table.skipped);
            group.free.extend(table.pages.drain(pages.min(table.pages.len())..));
        }
    }

    /// Takes pages for `new` more tokens, giving up kept sequences where pages are short, oldest
    /// first. Returns false, with nothing taken or given up, if there are not enough even so.
    pub fn reserve(&mut self, sequence: &mut Sequence, new: usize) -> bool {
        let pages = (sequence.tokens.len() + new).div_ceil(PAGE_TOKENS);
        let missing = |table: &PageTable| pages.saturating_sub(table.skipped + table.pages.len());
        let is_enough = |pages: &Pages, kept: bool| {
            sequence.tables.iter().zip(&pages.groups).enumerate().all(|(i, (table, group))| {
                let held = pages.kept.iter().filter(|_| kept).map(|s| s.tables[i].pages.len());
                missing(table) <= group.free.len() + held.sum::<usize>()
            })
        };
        if !is_enough(self, true) {
            return false;
        }
        while !is_enough(self, false) {
            let oldest = self.kept.remove(0);
            self.release(oldest);
        }
        for (table, group) in sequence.tables.iter_mut().zip(&mut self.groups) {
            let from = group.free.len() - missing(table);
            table.pages.extend(group.free.drain(from..));
        }
        true
    }

    /// Notes tokens as stored, and frees the pages that the windows have passed.
    pub fn advance(&mut self, sequence: &mut Sequence, tokens: &[u32]) {
        sequence.tokens.extend(tokens);
        let next = sequence.tokens.len();
        for (table, group) in sequence.tables.iter_mut().zip(&mut self.groups) {
            let passed = oldest_needed(group.window, next) / PAGE_TOKENS;
            let count = passed.saturating_sub(table.skipped).min(table.pages.len());
            group.free.extend(table.pages.drain(..count));
            table.skipped += count;
        }
    }

    /// Keeps a finished sequence for others that start as it does.
    pub fn keep(&mut self, sequence: Sequence) {
        if !sequence.tokens.is_empty() {
            self.kept.push(sequence);
        }
    }

    /// Gives all pages of a sequence back.
    pub fn release(&mut self, sequence: Sequence) {
        for (table, group) in sequence.tables.into_iter().zip(&mut self.groups) {
            group.free.extend(table.pages);
        }
    }

    /// Free pages of each window, for tests and metrics.
    pub fn free(&self) -> Vec<usize> {
        self.groups.iter().map(|g| g.free.len()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WINDOWS: [Option<usize>; 2] = [None, Some(40)];

    fn run(pages: &mut Pages, sequence: &mut Sequence, tokens: std::ops::Range<u32>, step: usize) {
        let tokens: Vec<u32> = tokens.collect();
        for chunk in tokens.chunks(step) {
            assert!(pages.reserve(sequence, chunk.len()));
            pages.advance(sequence, chunk);
        }
    }

    #[test]
    fn windows_keep_only_what_they_see() {
        let mut pages = Pages::new(&WINDOWS, &Pages::needed(&WINDOWS, 1000, 7, 1));
        let all = pages.free();
        let mut sequence = pages.start(&[]);
        run(&mut pages, &mut sequence, 0..1000, 7);
        assert_eq!(sequence.tables[0].pages.len(), 32);
        assert!(sequence.tables[1].pages.len() <= 3);
        // The next token sees positions 961 to 1000.
        assert!(sequence.tables[1].skipped * PAGE_TOKENS <= 961);
        pages.release(sequence);
        assert_eq!(pages.free(), all);
    }

    #[test]
    fn the_next_turn_takes_over_the_pages_of_the_last() {
        let mut pages = Pages::new(&WINDOWS, &[40, 40]);
        let all = pages.free();
        let mut sequence = pages.start(&[]);
        run(&mut pages, &mut sequence, 0..50, 9);
        pages.keep(sequence);
        let longer: Vec<u32> = (0..70).collect();
        let sequence = pages.start(&longer);
        assert_eq!(sequence.tokens.len(), 50);
        pages.keep(sequence);
        // The same prompt again leaves one token to compute.
        let sequence = pages.start(&longer[..50]);
        assert_eq!(sequence.tokens.len(), 49);
        pages.release(sequence);
        assert_eq!(pages.free(), all);
    }

    #[test]
    fn a_window_that_has_moved_on_cannot_go_back() {
        let mut pages = Pages::new(&WINDOWS, &[40, 40]);
        let mut sequence = pages.start(&[]);
        run(&mut pages, &mut sequence, 0..300, 9);
        pages.keep(sequence);
        assert_eq!(pages.start(&[0, 1, 2, 3, 999]).tokens.len(), 0);
    }

    #[test]
    fn kept_sequences_make_room() {
        let mut pages = Pages::new(&WINDOWS, &[4, 4]);
        let mut first = pages.start(&[]);
        run(&mut pages, &mut first, 0..100, 10);
        pages.keep(first);
        let mut second = pages.start(&[7]);
        assert!(pages.reserve(&mut second, 128));
        let mut third = pages.start(&[8]);
        assert!(!pages.reserve(&mut third, 1));
        assert_eq!(pages.longest_sequence(), 128);
    }
}
