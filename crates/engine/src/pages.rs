//! Which pages and state slots hold which sequence. Counting only: this module touches no tensor
//! and can be tested with no model. A sequence with the same start as a finished one reuses its
//! pages, so that the next turn of a chat does not compute the earlier ones again.
//!
//! Keys and values can be cut to any shorter start; recurrent state cannot go back. So a sequence
//! of a plan with states can be taken over at two lengths only: at its very end, and where its
//! prompt ended. The end serves the next turn of a chat whose template repeats the answer as it
//! was generated. Templates that leave out the reasoning, or whose text falls into other tokens
//! than those drawn, part from the sequence within the answer: they go on from the prompt's end.

use bodkin_backend::{Model, PAGE_TOKENS, PageTable, Span};

/// The free pages of one window, and the window.
struct Group {
    window: Option<usize>,
    free: Vec<u32>,
    total: usize,
}

/// All pages and state slots of a model, and the sequences kept for their start.
pub struct Pages {
    groups: Vec<Group>,
    /// Whether sequences have recurrent state, each in a slot of its own.
    has_states: bool,
    free_state_slots: Vec<u32>,
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
    /// The slot of its recurrent state; none before its first token, or where the plan has none.
    pub state_slot: Option<u32>,
    /// A copy of the state that it once had.
    checkpoint: Option<Checkpoint>,
}

/// The state after the first tokens of a sequence.
#[derive(Clone, Copy, Debug)]
struct Checkpoint {
    /// How many tokens.
    len: usize,
    slot: u32,
}

impl Sequence {
    /// A span of the next `len` tokens, whose pages are reserved.
    pub fn span(&self, len: usize, is_prefill: bool) -> Span {
        // Where the plan has no recurrent state, the slot has no meaning.
        let state_slot = self.state_slot.unwrap_or_default();
        let (position, tables) = (self.tokens.len(), self.tables.clone());
        Span { len, position, tables, state_slot, is_prefill }
    }

    fn state_slots(&self) -> impl Iterator<Item = u32> {
        self.state_slot.into_iter().chain(self.checkpoint.map(|checkpoint| checkpoint.slot))
    }

    /// The longest start of up to `len` tokens after which there is recurrent state.
    fn longest_state_within(&self, len: usize) -> usize {
        let lengths = [Some(self.tokens.len()), self.checkpoint.map(|c| c.len)];
        lengths.into_iter().flatten().filter(|&l| l <= len).max().unwrap_or(0)
    }

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
    /// `windows` are those of the plan, `pages` are the number of each; no state slots where the
    /// plan has no recurrent state.
    fn new(windows: &[Option<usize>], pages: &[usize], state_slots: usize) -> Pages {
        let group = |(&window, &total): (&Option<usize>, &usize)| Group {
            window,
            free: (0..total as u32).rev().collect(),
            total,
        };
        Pages {
            groups: windows.iter().zip(pages).map(group).collect(),
            has_states: state_slots > 0,
            free_state_slots: (0..state_slots as u32).rev().collect(),
            kept: Vec::new(),
        }
    }

    /// Those that a model was loaded for.
    pub fn of(model: &dyn Model) -> Pages {
        let (plan, limits) = (model.plan(), model.limits());
        let state_slots = if plan.states.is_empty() { 0 } else { limits.state_slots };
        Pages::new(&plan.windows(), &limits.pages, state_slots)
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

    /// The state slots for `sequences` sequences at a time: each has one and a checkpoint. Finished
    /// ones keep theirs until a running one needs them, as they keep their pages.
    pub fn state_slots_needed(sequences: usize) -> usize {
        2 * sequences
    }

    /// A sequence for a prompt: the kept one that shares the longest start with it, cut to what
    /// they share, or an empty one. At least the last token is left to compute.
    pub fn start(&mut self, prompt: &[u32]) -> Sequence {
        let limit = prompt.len().saturating_sub(1);
        let shared = |s: &Sequence| {
            let same = s.tokens.iter().zip(prompt).take_while(|(a, b)| a == b).count();
            let same = same.min(limit);
            if self.has_states { s.longest_state_within(same) } else { same }
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
                Sequence { tables, ..Sequence::default() }
            }
        }
    }

    /// Cuts a sequence to its first `len` tokens, after which there must be recurrent state, if
    /// the plan has any.
    fn shrink(&mut self, sequence: &mut Sequence, len: usize) {
        if self.has_states && len < sequence.tokens.len() {
            let checkpoint = sequence.checkpoint.take().filter(|c| c.len == len);
            let checkpoint = checkpoint.expect("recurrent state goes back to a checkpoint only");
            self.free_state_slots.extend(sequence.state_slot.replace(checkpoint.slot));
        }
        sequence.tokens.truncate(len);
        self.trim(sequence);
    }

    /// Takes pages for `new` more tokens, and a slot for the first of them, giving up kept
    /// sequences where either is short, oldest first. Returns false, with nothing taken or given
    /// up, if there are not enough even so.
    pub fn reserve(&mut self, sequence: &mut Sequence, new: usize) -> bool {
        let pages = (sequence.tokens.len() + new).div_ceil(PAGE_TOKENS);
        let missing = |table: &PageTable| pages.saturating_sub(table.skipped + table.pages.len());
        let needs_slot = self.has_states && sequence.state_slot.is_none();
        let is_enough = |pages: &Pages, kept: bool| {
            let has_slot = !pages.free_state_slots.is_empty() || kept && !pages.kept.is_empty();
            let has_pages =
                sequence.tables.iter().zip(&pages.groups).enumerate().all(|(i, (table, group))| {
                    let held = pages.kept.iter().filter(|_| kept).map(|s| s.tables[i].pages.len());
                    missing(table) <= group.free.len() + held.sum::<usize>()
                });
            has_pages && (has_slot || !needs_slot)
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
        if needs_slot {
            sequence.state_slot = self.free_state_slots.pop();
        }
        true
    }

    /// Gives the pages back that were taken for tokens that have not come.
    pub fn trim(&mut self, sequence: &mut Sequence) {
        let pages = sequence.tokens.len().div_ceil(PAGE_TOKENS);
        for (table, group) in sequence.tables.iter_mut().zip(&mut self.groups) {
            let used = pages.saturating_sub(table.skipped).min(table.pages.len());
            group.free.extend(table.pages.drain(used..));
        }
    }

    /// Sets a slot aside for the state that the sequence has now, in the place of an earlier
    /// checkpoint if it has one, giving up the oldest kept sequence if slots are short. Returns
    /// the slot to copy from and the one to copy to; none if there is no slot or no state.
    pub fn checkpoint(&mut self, sequence: &mut Sequence) -> Option<(u32, u32)> {
        let from = sequence.state_slot?;
        let earlier = sequence.checkpoint.map(|checkpoint| checkpoint.slot);
        if earlier.is_none() && self.free_state_slots.is_empty() && !self.kept.is_empty() {
            let oldest = self.kept.remove(0);
            self.release(oldest);
        }
        let slot = earlier.or_else(|| self.free_state_slots.pop())?;
        sequence.checkpoint = Some(Checkpoint { len: sequence.tokens.len(), slot });
        Some((from, slot))
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

    /// Gives all pages and state slots of a sequence back.
    pub fn release(&mut self, sequence: Sequence) {
        self.free_state_slots.extend(sequence.state_slots());
        for (table, group) in sequence.tables.into_iter().zip(&mut self.groups) {
            group.free.extend(table.pages);
        }
    }

    /// Free pages of each window, for tests and metrics.
    pub fn free(&self) -> Vec<usize> {
        self.groups.iter().map(|g| g.free.len()).collect()
    }

    /// Free state slots, for tests and metrics.
    pub fn free_state_slots(&self) -> usize {
        self.free_state_slots.len()
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
        let mut pages = Pages::new(&WINDOWS, &Pages::needed(&WINDOWS, 1000, 7, 1), 0);
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
        let mut pages = Pages::new(&WINDOWS, &[40, 40], 0);
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
        let mut pages = Pages::new(&WINDOWS, &[40, 40], 0);
        let mut sequence = pages.start(&[]);
        run(&mut pages, &mut sequence, 0..300, 9);
        pages.keep(sequence);
        assert_eq!(pages.start(&[0, 1, 2, 3, 999]).tokens.len(), 0);
    }

    /// Runs the prompt and some more, with a checkpoint between them.
    fn answer(pages: &mut Pages, prompt: &[u32], generated: std::ops::Range<u32>) -> Sequence {
        let mut sequence = pages.start(prompt);
        let rest = prompt[sequence.tokens.len()..].to_vec();
        assert!(pages.reserve(&mut sequence, rest.len()));
        pages.advance(&mut sequence, &rest);
        pages.checkpoint(&mut sequence);
        run(pages, &mut sequence, generated, 1);
        sequence
    }

    #[test]
    fn recurrent_state_goes_on_from_the_end_or_from_the_end_of_the_prompt() {
        let prompt: Vec<u32> = (0..60).collect();
        let shared = |next: &[u32]| {
            let mut pages = Pages::new(&[None], &[40], 4);
            let sequence = answer(&mut pages, &prompt, 60..70);
            let (end, checkpoint) = (sequence.state_slot, sequence.checkpoint.map(|c| c.slot));
            assert_eq!((pages.free_state_slots(), end == checkpoint), (2, false));
            pages.keep(sequence);
            let sequence = pages.start(next);
            let len = sequence.tokens.len();
            match len {
                0 => assert_eq!((sequence.state_slot, pages.free_state_slots()), (None, 2)),
                60 => assert_eq!((sequence.state_slot, pages.free_state_slots()), (checkpoint, 3)),
                _ => assert_eq!((sequence.state_slot, pages.free_state_slots()), (end, 2)),
            }
            assert_eq!(sequence.tables[0].pages.len(), len.div_ceil(PAGE_TOKENS));
            let held = sequence.state_slots().count();
            let free = pages.free_state_slots();
            pages.release(sequence);
            assert_eq!(pages.free_state_slots(), free + held);
            len
        };
        let next: Vec<u32> = (0..100).collect();
        assert_eq!(shared(&next), 70);
        assert_eq!(shared(&next[..71]), 70);
        // One token would be left to compute, but the state after 69 is gone.
        assert_eq!(shared(&next[..70]), 60);
        let other_answer: Vec<u32> = (0..65).chain([999; 20]).collect();
        assert_eq!(shared(&other_answer), 60);
        assert_eq!(shared(&next[..60]), 0);
        let other_prompt: Vec<u32> = (0..59).chain([999; 20]).collect();
        assert_eq!(shared(&other_prompt), 0);
    }

    #[test]
    fn a_checkpoint_moves_with_the_turns_of_a_chat() {
        let mut pages = Pages::new(&[None], &[40], 4);
        for turn in 1..5 {
            let prompt: Vec<u32> = (0..100 * turn - 20).collect();
            let sequence = answer(&mut pages, &prompt, 100 * turn - 20..100 * turn);
            assert_eq!(sequence.checkpoint.map(|c| c.len), Some(prompt.len()));
            pages.keep(sequence);
            assert_eq!(pages.free_state_slots(), 2);
        }
    }

    #[test]
    fn a_window_that_has_moved_on_cannot_go_back_to_a_checkpoint() {
        let mut pages = Pages::new(&WINDOWS, &[40, 40], 4);
        let prompt: Vec<u32> = (0..200).collect();
        let sequence = answer(&mut pages, &prompt, 200..300);
        pages.keep(sequence);
        let next: Vec<u32> = (0..250).chain([999; 20]).collect();
        assert_eq!(pages.start(&next).tokens.len(), 0);
    }

    #[test]
    fn kept_sequences_give_up_their_state_slots() {
        let mut pages = Pages::new(&[None], &[40], 2);
        let first = answer(&mut pages, &[1, 2, 3], 4..6);
        pages.keep(first);
        assert_eq!(pages.free_state_slots(), 0);
        let mut second = pages.start(&[7, 8]);
        assert!(pages.reserve(&mut second, 2));
        let mut third = pages.start(&[9]);
        assert!(pages.reserve(&mut third, 1), "the checkpoint of the first was free");
        pages.advance(&mut third, &[9]);
        assert_eq!(pages.checkpoint(&mut third), None, "no slot, and no harm");
        let mut fourth = pages.start(&[10]);
        assert!(!pages.reserve(&mut fourth, 1));
        assert_eq!(fourth.tables[0].pages.len(), 0, "nothing is taken");
        pages.keep(third);
        assert!(pages.reserve(&mut fourth, 1));
        assert!(pages.start(&[9, 1]).tokens.is_empty());
    }

    #[test]
    fn kept_sequences_make_room() {
        let mut pages = Pages::new(&WINDOWS, &[4, 4], 0);
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
