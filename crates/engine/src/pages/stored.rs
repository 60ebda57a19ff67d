//! Pages that come from a store outside of the model's memory, and go there.

use bodkin_backend::{PAGE_TOKENS, StateBlock};

use super::tree::{NodeId, ROOT};
use super::{Pages, Sequence};
use crate::prefix_store::{PageKey, StoredPage, page_key};

/// The known pages of a prompt, which stay in memory while pages behind them are restored.
#[derive(Default)]
pub(crate) struct HeldPrefix {
    path: Vec<NodeId>,
    /// The pages of these nodes that are held, with their windows.
    pages: Vec<(NodeId, usize)>,
}

impl HeldPrefix {
    /// Full pages of the prompt that it has.
    pub(crate) fn len(&self) -> usize {
        self.path.len()
    }
}

/// A full page of a sequence.
pub(crate) struct FullPage {
    pub(crate) key: PageKey,
    pub(crate) prefill: u32,
    pub(crate) windows: Vec<Option<StateBlock>>,
    pub(crate) state: Option<StateBlock>,
}

impl Pages {
    /// Holds what is known of a prompt until [`Pages::release_prefix`].
    pub(crate) fn hold_prefix(&mut self, prompt: &[u32]) -> HeldPrefix {
        let mut held = HeldPrefix::default();
        for node in self.find(prompt, prompt.len()).path {
            self.hold(&mut held, node);
        }
        held
    }

    /// Holds a node, and the pages that it has.
    fn hold(&mut self, held: &mut HeldPrefix, node: NodeId) {
        self.tree.enter(node);
        held.path.push(node);
        for window in 0..self.windows.len() {
            if self.tree.page(node, window).is_some() {
                self.tree.use_page(node, window);
                held.pages.push((node, window));
            }
        }
    }

    /// Ends what [`Pages::hold_prefix`] began. All pages are released as one use: a page is never
    /// older than one behind it.
    pub(crate) fn release_prefix(&mut self, held: HeldPrefix) {
        self.tree.tick();
        for (node, window) in held.pages {
            self.tree.release_page(node, window, &mut self.free);
        }
        held.path.iter().rev().for_each(|&node| self.tree.leave(node, &mut self.free));
    }

    /// The key of the first full page of a prompt behind what is held.
    pub(crate) fn next_missing(&self, held: &HeldPrefix, prompt: &[u32]) -> Option<PageKey> {
        let tokens = missing_tokens(held, prompt)?;
        let parent = held.path.last().copied().unwrap_or(ROOT);
        Some(page_key(&self.tree.key(parent), tokens))
    }

    /// Takes memory for what is not there of that page. Returns the blocks to write, for each
    /// window that has it and for the recurrent state; none if memory is short.
    pub(crate) fn restore(
        &mut self,
        held: &mut HeldPrefix,
        prompt: &[u32],
        page: &StoredPage,
    ) -> Option<Vec<StateBlock>> {
        let tokens = missing_tokens(held, prompt)?;
        let parent = held.path.last().copied().unwrap_or(ROOT);
        let prefill = page.prefill as usize;
        // A request may have computed it meanwhile.
        let found = self.tree.child(parent, tokens, prefill);
        let is_missing = |&i: &usize| {
            let is_stored = page.windows.get(i).is_some_and(Option::is_some);
            is_stored && found.is_none_or(|node| self.tree.page(node, i).is_none())
        };
        let windows: Vec<usize> = (0..self.windows.len()).filter(is_missing).collect();
        if windows.iter().any(|&i| self.available(i) == 0) {
            return None;
        }
        self.tree.tick();
        let node = found.unwrap_or_else(|| self.tree.insert(parent, tokens, prefill));
        self.hold(held, node);
        let mut blocks = Vec::new();
        for window_index in windows {
            let page = self.take_pages(window_index, 1).next().expect("as checked");
            self.tree.put_page(node, window_index, page);
            held.pages.push((node, window_index));
            blocks.push(StateBlock::Page { window_index, page });
        }
        if page.state.is_some()
            && self.has_states
            && self.tree.checkpoint(node).is_none()
            && let Some(slot) = self.take_state_slot(None)
        {
            match self.tree.put_checkpoint(node, slot) {
                Some(slot) => self.free.state_slots.push(slot),
                None => blocks.push(StateBlock::StateSlot(slot)),
            }
        }
        Some(blocks)
    }

    /// The full pages of a sequence: for each its key, how many of its tokens are prefill rows, the
    /// block of each window, and that of its checkpoint.
    pub(crate) fn full_pages(&self, sequence: &Sequence) -> Vec<FullPage> {
        let path = sequence.shared.as_ref().map_or(&[][..], |shared| &shared.path);
        let page = |&node: &NodeId| FullPage {
            key: self.tree.key(node),
            prefill: self.tree.prefill(node) as u32,
            windows: (0..self.windows.len())
                .map(|window_index| {
                    let page = self.tree.page(node, window_index)?;
                    Some(StateBlock::Page { window_index, page })
                })
                .collect(),
            state: self.tree.checkpoint(node).map(StateBlock::StateSlot),
        };
        path.iter().map(page).collect()
    }
}

/// The tokens of the first full page behind what is held; at least one token is left to compute.
fn missing_tokens<'a>(held: &HeldPrefix, prompt: &'a [u32]) -> Option<&'a [u32]> {
    let start = held.len() * PAGE_TOKENS;
    prompt[..prompt.len().saturating_sub(1)].get(start..start + PAGE_TOKENS)
}
