//! Pages without a model: sharing, eviction, checkpoints, and what random sequences find.

use std::hash::{DefaultHasher, Hash, Hasher};

use super::*;
use crate::prefix_store::StoredPage;

const WINDOWS: [Option<usize>; 2] = [None, Some(40)];

fn run(pages: &mut Pages, sequence: &mut Sequence, tokens: std::ops::Range<u32>, step: usize) {
    let tokens: Vec<u32> = tokens.collect();
    for chunk in tokens.chunks(step) {
        assert!(pages.reserve(sequence, chunk.len()));
        pages.advance(sequence, chunk);
    }
}

/// A finished sequence of these tokens, all of a prompt.
fn finish(pages: &mut Pages, tokens: std::ops::Range<u32>) {
    let all: Vec<u32> = tokens.clone().collect();
    let (mut sequence, _) = pages.start(&all, all.len());
    let from = tokens.start + sequence.tokens.len() as u32;
    run(pages, &mut sequence, from..tokens.end, 9);
    pages.release(sequence);
}

#[test]
fn windows_keep_only_what_they_see() {
    let mut pages = Pages::new(&WINDOWS, &Pages::needed(&WINDOWS, 1000, 7, 1), 0);
    let all = pages.free_pages();
    let mut sequence = pages.unshared();
    run(&mut pages, &mut sequence, 0..1000, 7);
    assert_eq!(sequence.tables[0].pages.len(), 32);
    assert!(sequence.tables[1].pages.len() <= 3);
    // The next token sees positions 961 to 1000.
    assert!(sequence.tables[1].skipped * PAGE_TOKENS <= 961);
    pages.release(sequence);
    assert_eq!(pages.free_pages(), all);
}

#[test]
fn running_sequences_share_full_pages() {
    let mut pages = Pages::new(&[None], &[8], 0);
    let prompt: Vec<u32> = (0..70).collect();
    let (mut first, copies) = pages.start(&prompt, 70);
    assert!(first.tokens.is_empty() && copies.is_empty());
    run(&mut pages, &mut first, 0..70, 20);
    // The second agrees with two pages and four tokens of the third, which is not full.
    let mut other = prompt.clone();
    other[68] = 9;
    let (second, copies) = pages.start(&other, 70);
    assert_eq!((second.tokens.len(), copies.len()), (64, 0));
    assert_eq!(second.tables[0].pages, first.tables[0].pages[..2]);
    assert_eq!(pages.free_pages(), [5]);
    pages.release(first);
    assert_eq!(pages.cached_pages(), [1], "two pages are still in use");
    pages.release(second);
    assert_eq!(pages.cached_pages(), [3]);
}

#[test]
fn the_next_turn_goes_on_from_a_copy_of_the_last_page() {
    let mut pages = Pages::new(&WINDOWS, &[40, 40], 0);
    finish(&mut pages, 0..50);
    let longer: Vec<u32> = (0..70).collect();
    let (sequence, copies) = pages.start(&longer, 70);
    assert_eq!(sequence.tokens.len(), 50);
    let own = |window_index: usize| StateBlock::Page {
        window_index,
        page: sequence.tables[window_index].pages[1],
    };
    assert_eq!(copies.iter().map(|copy| copy.1).collect::<Vec<_>>(), [own(0), own(1)]);
    assert!(copies.iter().all(|(from, to)| from != to));
    pages.release(sequence);
    // Another question after the same start; the last token is always left to compute.
    for (end, reused) in [(45, 44), (40, 32), (33, 32), (32, 31)] {
        let prompt: Vec<u32> = (0..end).collect();
        assert_eq!(pages.cached_tokens(&prompt, prompt.len()), reused);
        let (sequence, copies) = pages.start(&prompt, prompt.len());
        let is_partial = reused % PAGE_TOKENS > 0;
        assert_eq!((sequence.tokens.len(), copies.len()), (reused, 2 * usize::from(is_partial)));
        pages.release(sequence);
    }
}

#[test]
fn a_window_that_has_passed_the_prefix_cannot_go_back() {
    let mut pages = Pages::new(&WINDOWS, &[64, 7], 0);
    finish(&mut pages, 0..500);
    let mut prompt: Vec<u32> = (0..500).collect();
    prompt[300] = 9;
    // Positions 261 to 300 are needed; the window had no room to keep them.
    assert_eq!(pages.cached_tokens(&prompt, 500), 0);
    prompt[300] = 300;
    prompt[480] = 9;
    assert_eq!(pages.cached_tokens(&prompt, 500), 480);
}

#[test]
fn generated_tokens_are_not_taken_for_a_prompts_and_prompts_may_go_on_from_them() {
    let mut pages = Pages::new(&[None], &[16], 0);
    finish(&mut pages, 0..64);
    let tokens: Vec<u32> = (0..65).collect();
    // A preempted sequence that generated the last 25 of its tokens computes these again.
    let (sequence, _) = pages.start(&tokens, 40);
    assert_eq!(sequence.tokens.len(), 32);
    let mut sequence = sequence;
    run(&mut pages, &mut sequence, 32..64, 32);
    assert_eq!(pages.free_pages(), [16 - 3], "both forms of the second page are stored");
    pages.release(sequence);
    assert_eq!(pages.start(&tokens, 40).0.tokens.len(), 64);
    let mut pages = Pages::new(&[None], &[16], 0);
    let (mut sequence, _) = pages.start(&tokens[..40], 40);
    run(&mut pages, &mut sequence, 0..64, 8);
    pages.release(sequence);
    assert_eq!(pages.cached_tokens(&tokens, 65), 64);
}

#[test]
fn the_least_recently_used_is_evicted_from_its_end() {
    let mut pages = Pages::new(&[None], &[8], 0);
    finish(&mut pages, 0..96);
    finish(&mut pages, 1000..1064);
    finish(&mut pages, 0..40);
    let cached = |pages: &Pages, from: u32, len: u32| {
        let prompt: Vec<u32> = (from..from + len).collect();
        pages.cached_tokens(&prompt, prompt.len())
    };
    // 3 + 2 + 1 pages are held, and five are needed. Two pages of the first go, which are oldest,
    // then the second page of the second.
    let mut sequence = pages.unshared();
    assert!(pages.reserve(&mut sequence, 5 * PAGE_TOKENS));
    assert_eq!((cached(&pages, 0, 97), cached(&pages, 1000, 65)), (40, 32));
    assert!(!pages.reserve(&mut sequence, 9 * PAGE_TOKENS), "there are eight pages");
    assert_eq!(cached(&pages, 0, 97), 40, "nothing was evicted in vain");
    pages.release(sequence);
}

#[test]
fn a_failed_sequence_leaves_nothing_behind() {
    let mut pages = Pages::new(&[None], &[16], 0);
    finish(&mut pages, 0..40);
    let prompt: Vec<u32> = (0..100).collect();
    let (mut failed, _) = pages.start(&prompt, 100);
    run(&mut pages, &mut failed, 40..100, 30);
    let (follower, _) = pages.start(&prompt, 100);
    assert_eq!(follower.tokens.len(), 96);
    pages.discard(failed);
    assert_eq!(pages.cached_tokens(&prompt, 100), 40);
    pages.release(follower);
    assert_eq!(pages.cached_tokens(&prompt, 100), 40, "nor what goes on from it");
    assert_eq!((pages.free_pages(), pages.cached_pages()), (vec![14], vec![2]));
}

#[test]
fn recurrent_state_goes_on_from_checkpoints() {
    let mut pages = Pages::new(&[None], &[32], 6);
    let prompt: Vec<u32> = (0..70).collect();
    let (mut sequence, _) = pages.start(&prompt, 70);
    assert_eq!(sequence.next_checkpoint(), Some(64));
    run(&mut pages, &mut sequence, 0..64, 32);
    let slot = sequence.state_slot.map(StateBlock::StateSlot).unwrap();
    let (from, to) = pages.checkpoint(&mut sequence).unwrap();
    assert!(from == slot && to != slot);
    assert_eq!(sequence.next_checkpoint(), None);
    run(&mut pages, &mut sequence, 64..90, 1);
    pages.release(sequence);
    // The whole sequence, or its prompt without the end.
    let longer: Vec<u32> = (0..99).collect();
    let (next, copies) = pages.start(&longer, 99);
    assert_eq!((next.tokens.len(), copies.len()), (90, 2));
    assert_eq!(copies[0], (slot, StateBlock::StateSlot(next.state_slot.unwrap())));
    pages.release(next);
    let mut parted = longer.clone();
    parted[80] = 1;
    let (next, copies) = pages.start(&parted, 99);
    assert_eq!((next.tokens.len(), copies.len()), (64, 1));
    assert_eq!((copies[0].0, next.next_checkpoint()), (to, Some(96)));
    pages.release(next);
    // A prompt that parts earlier sets its state aside there, for the next one that does.
    parted[40] = 1;
    let (next, _) = pages.start(&parted, 99);
    assert_eq!((next.tokens.len(), next.next_checkpoint()), (0, Some(32)));
    pages.release(next);
}

/// What a model would have stored: in each cell of a page, and in each state slot, the hash of all
/// tokens up to there.
struct Contents {
    cells: Vec<Vec<u64>>,
    slots: Vec<u64>,
}

fn prefix_hash(tokens: &[u32]) -> u64 {
    let mut hasher = DefaultHasher::new();
    tokens.hash(&mut hasher);
    hasher.finish()
}

impl Contents {
    fn copy(&mut self, (from, to): (StateBlock, StateBlock)) {
        match (from, to) {
            (StateBlock::StateSlot(from), StateBlock::StateSlot(to)) => {
                self.slots[to as usize] = self.slots[from as usize];
            }
            (
                StateBlock::Page { window_index: window, page },
                StateBlock::Page { page: to, .. },
            ) => {
                let start = page as usize * PAGE_TOKENS;
                let range = start..start + PAGE_TOKENS;
                self.cells[window].copy_within(range, to as usize * PAGE_TOKENS);
            }
            _ => panic!("blocks of one kind"),
        }
    }

    /// Checks what the next token sees, then stores some.
    fn advance(&mut self, pages: &mut Pages, sequence: &mut Sequence, tokens: &[u32]) {
        let len = sequence.tokens.len();
        for (i, (table, window)) in sequence.tables.iter().zip(WINDOWS).enumerate() {
            for position in oldest_needed(window, len)..len {
                let cell = table.page(position) * PAGE_TOKENS + position % PAGE_TOKENS;
                let wanted = prefix_hash(&sequence.tokens[..=position]);
                assert_eq!(self.cells[i][cell], wanted, "position {position} of {len}");
            }
        }
        let slot = sequence.state_slot.unwrap() as usize;
        assert!(len == 0 || self.slots[slot] == prefix_hash(&sequence.tokens), "state of {len}");
        let mut all = sequence.tokens.clone();
        for &token in tokens {
            all.push(token);
            let position = all.len() - 1;
            for (i, table) in sequence.tables.iter().enumerate() {
                let cell = table.page(position) * PAGE_TOKENS + position % PAGE_TOKENS;
                self.cells[i][cell] = prefix_hash(&all);
            }
        }
        self.slots[slot] = prefix_hash(&all);
        pages.advance(sequence, tokens);
    }
}

/// Sequences that begin alike start, grow, fail and end at random: each sees what it has stored or
/// what an equal one has, and no page is lost.
#[test]
fn pages_hold_what_their_sequences_stored() {
    const TOTALS: [usize; 2] = [40, 24];
    const SLOTS: usize = 7;
    let mut pages = Pages::new(&WINDOWS, &TOTALS, SLOTS);
    let mut contents = Contents {
        cells: TOTALS.map(|total| vec![0; total * PAGE_TOKENS]).to_vec(),
        slots: vec![0; SLOTS],
    };
    let mut state = 7u64;
    let mut random = |below: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 33) as usize % below
    };
    let mut running: Vec<(Vec<u32>, Sequence)> = Vec::new();
    let mut reused = 0;
    for _ in 0..20_000 {
        if running.len() < 3 && random(4) == 0 {
            // Texts fork at a few places, so that prefixes of all lengths are shared.
            let mut fork = 0;
            let tokens: Vec<u32> = (0..20 + random(280) as u32)
                .map(|i| {
                    fork += u32::from(i % 23 == 19 && random(4) == 0);
                    i + 1000 * fork
                })
                .collect();
            let (sequence, copies) = pages.start(&tokens, tokens.len());
            copies.into_iter().for_each(|copy| contents.copy(copy));
            reused += sequence.tokens.len();
            running.push((tokens, sequence));
        }
        if running.is_empty() {
            continue;
        }
        let i = random(running.len());
        let (tokens, sequence) = &mut running[i];
        let stored = sequence.tokens.len();
        let stop = sequence.next_checkpoint().unwrap_or(usize::MAX).min(tokens.len());
        let len = (1 + random(40)).min(stop - stored);
        let is_reserved = pages.reserve(sequence, len);
        if is_reserved {
            contents.advance(&mut pages, sequence, &tokens[stored..stored + len]);
            if let Some(copy) = pages.checkpoint(sequence) {
                contents.copy(copy);
            }
        }
        let is_done = sequence.tokens.len() == tokens.len();
        if is_done || !is_reserved || random(40) == 0 {
            let (_, sequence) = running.swap_remove(i);
            if random(20) == 0 { pages.discard(sequence) } else { pages.release(sequence) }
        }
        check_totals(&pages, &running, &TOTALS, SLOTS);
    }
    assert!(reused > 50_000, "{reused} tokens were reused");
}

fn check_totals(
    pages: &Pages,
    running: &[(Vec<u32>, Sequence)],
    totals: &[usize],
    state_slots: usize,
) {
    let (held, checkpoints) = pages.tree.held();
    for (i, &total) in totals.iter().enumerate() {
        let own = running.iter().map(|(_, sequence)| {
            let path = sequence.shared.as_ref().map_or(0, |shared| shared.path.len());
            let table = &sequence.tables[i];
            table.pages.len() - path.saturating_sub(table.skipped).min(table.pages.len())
        });
        assert_eq!(pages.free.pages[i].len() + held[i] + own.sum::<usize>(), total);
    }
    let running = running.iter().filter(|(_, sequence)| sequence.state_slot.is_some()).count();
    assert_eq!(pages.free_state_slots() + checkpoints + running, state_slots);
}

/// Restores all of a prompt for which there is memory.
fn restore(pages: &mut Pages, prompt: &[u32], page: &StoredPage) -> usize {
    let mut held = pages.hold_prefix(prompt);
    let mut restored = 0;
    while pages.next_missing(&held, prompt).is_some() {
        let Some(blocks) = pages.restore(&mut held, prompt, page) else { break };
        restored += 1;
        assert!(restored < 100 && blocks.len() <= 3);
    }
    pages.release_prefix(held);
    restored
}

#[test]
fn restored_pages_are_evicted_from_their_end() {
    let page = StoredPage { prefill: 32, windows: vec![Some(Vec::new())], state: None };
    let mut pages = Pages::new(&[None], &[4], 0);
    let prompt: Vec<u32> = (0..200).collect();
    assert_eq!(restore(&mut pages, &prompt, &page), 4, "no more fit, and none pushes another out");
    assert_eq!((pages.free_pages(), pages.cached_pages()), (vec![0], vec![4]));
    assert_eq!(pages.cached_tokens(&prompt, 200), 128);
    finish(&mut pages, 1000..1040);
    assert_eq!(pages.cached_tokens(&prompt, 200), 64, "the last two pages made room");
    // The known start stays while the rest is restored in the place of the other sequence.
    assert_eq!(restore(&mut pages, &prompt, &page), 2);
    assert_eq!(pages.cached_tokens(&prompt, 200), 128);
    assert_eq!(restore(&mut pages, &prompt, &page), 0);
}

#[test]
fn states_are_restored_with_the_pages_before_them() {
    // A plan without attention has no pages, and pages without a checkpoint hold nothing.
    let stored = |state| StoredPage { prefill: 32, windows: Vec::new(), state };
    let mut pages = Pages::new(&[], &[], 4);
    let prompt: Vec<u32> = (0..70).collect();
    assert_eq!(restore(&mut pages, &prompt, &stored(None)), 2, "each page is read once");
    assert_eq!(pages.cached_tokens(&prompt, 70), 0);
    assert_eq!(restore(&mut pages, &prompt, &stored(Some(Vec::new()))), 2);
    assert_eq!(pages.cached_tokens(&prompt, 70), 64);
}
