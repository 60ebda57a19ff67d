//! Which pages and state slots hold which sequence. Counting only: this module touches no tensor
//! and can be tested with no model. Full pages are shared: a new sequence uses the pages of any
//! other one, running or finished, that begins with the same tokens, and computes the rest.
//!
//! A page that agrees in part is copied before it is written (copy on write). Recurrent state
//! cannot go back, so a sequence of a plan with states goes on only where there is a checkpoint:
//! at the end of a finished sequence, and at page boundaries that [`Sequence::next_checkpoint`]
//! names: the last one of a prompt, and the one where a prompt parts from those before it.

mod reuse;
mod stored;
mod tree;

use bodkin_backend::{Model, PAGE_TOKENS, PageTable, Span, StateBlock};

pub(crate) use reuse::MIN_COPIED_TOKENS;
pub(crate) use stored::{FullPage, HeldPrefix};
use tree::{FreeMemory, NodeId, ROOT, Tree};

/// All pages and state slots of a model, and the prefixes that are cached in them.
pub struct Pages {
    /// The windows of the plan.
    windows: Vec<Option<usize>>,
    /// Whether sequences have recurrent state, each in a slot of its own.
    has_states: bool,
    /// The pages of each window.
    totals: Vec<usize>,
    free: FreeMemory,
    tree: Tree,
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
    /// How its pages are shared; none if they are its own alone.
    shared: Option<SharedPrefix>,
}

/// The pages that a sequence shares with others.
#[derive(Clone, Debug, Default)]
struct SharedPrefix {
    /// Tokens of the prompt, which are computed as prefill rows.
    prompt: usize,
    /// The nodes of its full pages.
    path: Vec<NodeId>,
    /// How many of them were there when it started.
    reused: usize,
    /// Lengths at which its recurrent state is to be copied, descending.
    checkpoints: Vec<usize>,
}

/// A block to copy, and the block to replace.
pub(crate) type Copy = (StateBlock, StateBlock);

/// Blocks to copy before the next step.
pub(crate) type Copies = Vec<Copy>;

impl Sequence {
    /// A span of the next `len` tokens, whose pages are reserved.
    pub fn span(&self, len: usize, is_prefill: bool) -> Span {
        // Where the plan has no recurrent state, the slot has no meaning.
        let state_slot = self.state_slot.unwrap_or_default();
        let (position, tables) = (self.tokens.len(), self.tables.clone());
        Span { len, position, tables, state_slot, is_prefill }
    }

    /// The length at which [`Pages::checkpoint`] is to be called next: no step may pass it.
    pub(crate) fn next_checkpoint(&self) -> Option<usize> {
        self.shared.as_ref()?.checkpoints.last().copied()
    }
}

/// The first position that the token at `position` still sees.
fn oldest_needed(window: Option<usize>, position: usize) -> usize {
    window.map_or(0, |w| (position + 1).saturating_sub(w))
}

impl Pages {
    /// `windows` are those of the plan, `totals` are the number of pages of each; no state slots
    /// where the plan has no recurrent state.
    pub(crate) fn new(windows: &[Option<usize>], totals: &[usize], state_slots: usize) -> Pages {
        let pages = |&total: &usize| (0..total as u32).rev().collect();
        Pages {
            windows: windows.to_vec(),
            has_states: state_slots > 0,
            totals: totals.to_vec(),
            free: FreeMemory {
                pages: totals.iter().map(pages).collect(),
                state_slots: (0..state_slots as u32).rev().collect(),
            },
            tree: Tree::new(windows),
        }
    }

    /// Those that a model was loaded for.
    pub fn of(model: &dyn Model) -> Pages {
        let (plan, limits) = (model.plan(), model.limits());
        let state_slots = if plan.states.is_empty() { 0 } else { limits.state_slots };
        Pages::new(&plan.windows(), &limits.pages, state_slots)
    }

    /// Whether sequences have recurrent state.
    pub(crate) fn has_states(&self) -> bool {
        self.has_states
    }

    /// The most tokens that one sequence can have.
    pub fn longest_sequence(&self) -> usize {
        let full = self.windows.iter().zip(&self.totals).filter(|(window, _)| window.is_none());
        full.map(|(_, total)| total * PAGE_TOKENS).min().unwrap_or(usize::MAX)
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

    /// The state slots for `sequences` sequences at a time, each with a checkpoint.
    pub fn state_slots_needed(sequences: usize) -> usize {
        2 * sequences
    }

    /// A sequence without tokens that shares no pages.
    pub fn unshared(&self) -> Sequence {
        let tables = vec![PageTable::default(); self.windows.len()];
        Sequence { tables, ..Sequence::default() }
    }

    /// Pages of a window that can be had now.
    fn available(&self, window: usize) -> usize {
        self.free.pages[window].len() + self.tree.evictable(window)
    }

    /// Takes available pages, evicting cached ones where free ones are short.
    fn take_pages(&mut self, window: usize, count: usize) -> std::vec::Drain<'_, u32> {
        while self.free.pages[window].len() < count {
            assert!(self.tree.evict_page(window, &mut self.free), "the pages are available");
        }
        let from = self.free.pages[window].len() - count;
        self.free.pages[window].drain(from..)
    }

    /// A free state slot, or that of the oldest checkpoint, but not that of `except`.
    fn take_state_slot(&mut self, except: Option<NodeId>) -> Option<u32> {
        if self.free.state_slots.is_empty() {
            self.tree.evict_checkpoint(except, &mut self.free);
        }
        self.free.state_slots.pop()
    }

    /// Takes pages for `new` more tokens, and a slot for the first of them, evicting cached ones
    /// where either is short. Returns false, with nothing taken or evicted, if there are not
    /// enough even so.
    pub fn reserve(&mut self, sequence: &mut Sequence, new: usize) -> bool {
        let pages = (sequence.tokens.len() + new).div_ceil(PAGE_TOKENS);
        let missing = |table: &PageTable| pages.saturating_sub(table.skipped + table.pages.len());
        let mut tables = sequence.tables.iter().enumerate();
        let has_pages = tables.all(|(i, table)| missing(table) <= self.available(i));
        let needs_slot = self.has_states && sequence.state_slot.is_none();
        if !has_pages || (needs_slot && !self.has_state_slot()) {
            return false;
        }
        for (i, table) in sequence.tables.iter_mut().enumerate() {
            let count = missing(table);
            table.pages.extend(self.take_pages(i, count));
        }
        if needs_slot {
            sequence.state_slot = self.take_state_slot(None);
        }
        true
    }

    /// Whether a state slot can be had now.
    fn has_state_slot(&self) -> bool {
        !self.free.state_slots.is_empty() || self.tree.has_checkpoints()
    }

    /// Whether `tokens` tokens more, of a sequence in steps of at most `step` tokens, can be
    /// stored now.
    pub(crate) fn has_room(&self, tokens: usize, step: usize) -> bool {
        let needed = Pages::needed(&self.windows, tokens, step, 1);
        let mut needed = needed.into_iter().zip(&self.totals).enumerate();
        needed.all(|(i, (pages, &total))| pages.min(total) <= self.available(i))
            && (!self.has_states || self.has_state_slot())
    }

    /// Gives the pages back that were taken for tokens that have not come.
    pub fn trim(&mut self, sequence: &mut Sequence) {
        let pages = sequence.tokens.len().div_ceil(PAGE_TOKENS);
        for (table, free) in sequence.tables.iter_mut().zip(&mut self.free.pages) {
            let used = pages.saturating_sub(table.skipped).min(table.pages.len());
            free.extend(table.pages.drain(used..));
        }
    }

    /// Where [`Sequence::next_checkpoint`] is reached: the blocks to copy to set the recurrent
    /// state aside, if it is not there already and there is a slot.
    pub(crate) fn checkpoint(&mut self, sequence: &mut Sequence) -> Option<Copy> {
        let shared = sequence.shared.as_mut()?;
        shared.checkpoints.pop_if(|at| *at == sequence.tokens.len())?;
        let (from, node) = (sequence.state_slot?, *shared.path.last()?);
        self.tree.tick();
        if self.tree.checkpoint(node).is_some() {
            self.tree.use_checkpoint(node);
            return None;
        }
        let slot = self.take_state_slot(None)?;
        if let Some(slot) = self.tree.put_checkpoint(node, slot) {
            self.free.state_slots.push(slot);
            return None;
        }
        Some((StateBlock::StateSlot(from), StateBlock::StateSlot(slot)))
    }

    /// Notes tokens as stored, shares the pages that are full now, and frees those that the
    /// windows have passed.
    pub fn advance(&mut self, sequence: &mut Sequence, tokens: &[u32]) {
        sequence.tokens.extend(tokens);
        let next = sequence.tokens.len();
        self.tree.tick();
        while sequence.shared.as_ref().is_some_and(|s| (s.path.len() + 1) * PAGE_TOKENS <= next) {
            self.share_next_page(sequence);
        }
        let path = sequence.shared.as_ref().map_or(&[][..], |shared| &shared.path);
        for (i, table) in sequence.tables.iter_mut().enumerate() {
            let passed = oldest_needed(self.windows[i], next) / PAGE_TOKENS;
            let count = passed.saturating_sub(table.skipped).min(table.pages.len());
            for page in table.pages.drain(..count) {
                match path.get(table.skipped) {
                    Some(&node) => self.tree.release_page(node, i, &mut self.free),
                    None => self.free.pages[i].push(page),
                }
                table.skipped += 1;
            }
        }
    }

    /// Moves the first full page that is the sequence's own to the tree. If another sequence has
    /// computed the same page, that one is used.
    fn share_next_page(&mut self, sequence: &mut Sequence) {
        let shared = sequence.shared.as_mut().expect("a sequence that shares pages");
        let start = shared.path.len() * PAGE_TOKENS;
        let tokens = &sequence.tokens[start..start + PAGE_TOKENS];
        let prefill = shared.prompt.saturating_sub(start).min(PAGE_TOKENS);
        let parent = shared.path.last().copied().unwrap_or(ROOT);
        let node = self.tree.child(parent, tokens, prefill);
        let node = node.unwrap_or_else(|| self.tree.insert(parent, tokens, prefill));
        for (i, table) in sequence.tables.iter_mut().enumerate() {
            let own = &mut table.pages[shared.path.len() - table.skipped];
            if self.tree.page(node, i).is_some() {
                self.free.pages[i].push(std::mem::replace(own, self.tree.use_page(node, i)));
            } else {
                self.tree.put_page(node, i, *own);
            }
        }
        self.tree.enter(node);
        shared.path.push(node);
    }

    /// Ends a sequence. What it has stored stays for others with the same start until its memory
    /// is needed.
    pub fn release(&mut self, mut sequence: Sequence) {
        self.trim(&mut sequence);
        self.tree.tick();
        if let Some(shared) = &sequence.shared {
            let start = shared.path.len() * PAGE_TOKENS;
            let prefill = shared.prompt.saturating_sub(start);
            let parent = shared.path.last().copied().unwrap_or(ROOT);
            let end =
                self.share_tail(&mut sequence.tables, parent, &sequence.tokens[start..], prefill);
            if end != ROOT
                && let Some(slot) = sequence.state_slot
            {
                sequence.state_slot = self.tree.put_checkpoint(end, slot);
            }
            self.tree.leave(end, &mut self.free);
        }
        self.free(sequence);
    }

    /// Moves the last page of a sequence, which `tokens` do not fill, to the tree. Returns the
    /// sequence's last node, which it has entered.
    fn share_tail(
        &mut self,
        tables: &mut [PageTable],
        parent: NodeId,
        tokens: &[u32],
        prefill: usize,
    ) -> NodeId {
        let prefill = prefill.min(tokens.len());
        let known = match tokens {
            [] => Some(parent),
            _ => self.tree.child(parent, tokens, prefill),
        };
        let node = known.unwrap_or_else(|| self.tree.insert(parent, tokens, prefill));
        self.tree.enter(node);
        if known.is_none() {
            for (i, table) in tables.iter_mut().enumerate() {
                let page = table.pages.pop().expect("the page of the last tokens");
                self.tree.put_page(node, i, page);
                self.tree.release_page(node, i, &mut self.free);
            }
        }
        node
    }

    /// Ends a sequence that failed: no other sequence may use what it has computed.
    pub(crate) fn discard(&mut self, sequence: Sequence) {
        self.tree.tick();
        if let Some(shared) = &sequence.shared
            && let Some(&first) = shared.path.get(shared.reused)
        {
            self.tree.unlink(first, &mut self.free);
        }
        self.free(sequence);
    }

    /// Gives up everything that a sequence holds.
    fn free(&mut self, sequence: Sequence) {
        self.free.state_slots.extend(sequence.state_slot);
        let path = sequence.shared.map_or_else(Vec::new, |shared| shared.path);
        for (i, table) in sequence.tables.into_iter().enumerate() {
            let own = path.len().saturating_sub(table.skipped).min(table.pages.len());
            self.free.pages[i].extend(&table.pages[own..]);
            for &node in path.iter().skip(table.skipped) {
                self.tree.release_page(node, i, &mut self.free);
            }
        }
        path.iter().rev().for_each(|&node| self.tree.leave(node, &mut self.free));
    }

    /// Free pages of each window.
    pub(crate) fn free_pages(&self) -> Vec<usize> {
        self.free.pages.iter().map(Vec::len).collect()
    }

    /// Pages of each window that no sequence uses and that are kept for new ones.
    pub(crate) fn cached_pages(&self) -> Vec<usize> {
        (0..self.windows.len()).map(|i| self.tree.evictable(i)).collect()
    }

    /// Free state slots.
    #[cfg(test)]
    fn free_state_slots(&self) -> usize {
        self.free.state_slots.len()
    }
}

#[cfg(test)]
mod tests;
