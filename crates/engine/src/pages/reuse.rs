//! How a new sequence uses what is stored of its start.

use bodkin_backend::StateBlock;

use super::tree::{Match, NodeId};
use super::{Copies, PAGE_TOKENS, Pages, Sequence, SharedPrefix, oldest_needed};

/// Fewer tokens of a page are computed again rather than copied: most prompts begin with the same
/// token.
pub(crate) const MIN_COPIED_TOKENS: usize = 8;

/// How much of a prefix a new sequence uses.
struct Reuse {
    /// Full pages.
    pages: usize,
    /// The node whose page is copied behind them.
    partial: Option<NodeId>,
    /// Tokens.
    len: usize,
}

impl Pages {
    /// A sequence for `tokens`, the first `prompt` of which are of a prompt, with the longest
    /// start of them that is stored; at least the last one is left to compute. The copies must be
    /// done before `self` is used again.
    pub(crate) fn start(&mut self, tokens: &[u32], prompt: usize) -> (Sequence, Copies) {
        let found = self.find(tokens, prompt);
        let reuse = self.longest_reuse(&found);
        let (mut sequence, copies) = self.reuse(&found, &reuse, tokens);
        let shared = sequence.shared.get_or_insert_default();
        shared.prompt = prompt;
        if self.has_states {
            let boundary = tokens.len().saturating_sub(1) / PAGE_TOKENS * PAGE_TOKENS;
            let known = found.path.len() * PAGE_TOKENS;
            let len = sequence.tokens.len();
            shared.checkpoints.extend([boundary, known].into_iter().filter(|&at| at > len));
            shared.checkpoints.dedup();
        }
        (sequence, copies)
    }

    /// How many of `tokens` [`Pages::start`] would find stored.
    pub(crate) fn cached_tokens(&self, tokens: &[u32], prompt: usize) -> usize {
        self.longest_reuse(&self.find(tokens, prompt)).len
    }

    pub(super) fn find(&self, tokens: &[u32], prompt: usize) -> Match {
        self.tree.find(&tokens[..tokens.len().saturating_sub(1)], prompt)
    }

    /// The longest start of what was found that has all pages and the recurrent state to go on.
    fn longest_reuse(&self, found: &Match) -> Reuse {
        let path = &found.path;
        if let Some((node, len)) = found.partial {
            let is_whole = len == self.tree.tokens(node).len();
            let is_usable = match self.has_states {
                true => is_whole && self.tree.checkpoint(node).is_some(),
                false => len >= MIN_COPIED_TOKENS,
            };
            let len = path.len() * PAGE_TOKENS + len;
            if is_usable && self.has_pages(path, Some(node), len) {
                return Reuse { pages: path.len(), partial: Some(node), len };
            }
        }
        let is_usable = |&pages: &usize| {
            let has_state = self.tree.checkpoint(path[pages - 1]).is_some();
            self.has_pages(&path[..pages], None, pages * PAGE_TOKENS)
                && (has_state || !self.has_states)
        };
        let pages = (1..=path.len()).rev().find(is_usable).unwrap_or(0);
        Reuse { pages, partial: None, len: pages * PAGE_TOKENS }
    }

    /// Whether every page that a token at position `len` sees is stored.
    fn has_pages(&self, path: &[NodeId], partial: Option<NodeId>, len: usize) -> bool {
        self.windows.iter().enumerate().all(|(i, &window)| {
            let first = oldest_needed(window, len) / PAGE_TOKENS;
            let mut nodes = path.iter().skip(first).chain(&partial);
            nodes.all(|&node| self.tree.page(node, i).is_some())
        })
    }

    /// A sequence with the stored start of `tokens`, or an empty one if memory for the copies is
    /// short.
    fn reuse(&mut self, found: &Match, reuse: &Reuse, tokens: &[u32]) -> (Sequence, Copies) {
        let path = &found.path[..reuse.pages];
        let (mut sequence, mut copies) = (self.unshared(), Copies::new());
        self.tree.tick();
        let source = reuse.partial.or(path.last().copied()).filter(|_| self.has_states);
        if let Some(source) = source {
            let Some(slot) = self.take_state_slot(Some(source)) else { return (sequence, copies) };
            self.tree.use_checkpoint(source);
            let from = self.tree.checkpoint(source).expect("it was not evicted");
            copies.push((StateBlock::StateSlot(from), StateBlock::StateSlot(slot)));
            sequence.state_slot = Some(slot);
        }
        for (table, (i, &window)) in sequence.tables.iter_mut().zip(self.windows.iter().enumerate())
        {
            table.skipped = path.len().min(oldest_needed(window, reuse.len) / PAGE_TOKENS);
            let nodes = path[table.skipped..].iter();
            table.pages.extend(nodes.map(|&node| self.tree.use_page(node, i)));
        }
        path.iter().for_each(|&node| self.tree.enter(node));
        let (path, reused) = (path.to_vec(), path.len());
        sequence.shared = Some(SharedPrefix { path, reused, ..SharedPrefix::default() });
        sequence.tokens.extend(&tokens[..reuse.pages * PAGE_TOKENS]);
        if let Some(node) = reuse.partial {
            if self.copy_page(&mut sequence, node, &mut copies) {
                sequence.tokens.extend(&tokens[sequence.tokens.len()..reuse.len]);
            } else if self.has_states {
                // Its state is that of the page that cannot be copied.
                self.free(sequence);
                return (self.unshared(), Copies::new());
            }
        }
        (sequence, copies)
    }

    /// Gives the sequence a page of its own for each window, to be copied from `node`. Returns
    /// false, with nothing taken, if there are not enough.
    fn copy_page(&mut self, sequence: &mut Sequence, node: NodeId, copies: &mut Copies) -> bool {
        let windows = 0..self.windows.len();
        // A page in use is not evicted.
        let sources: Vec<u32> = windows.clone().map(|i| self.tree.use_page(node, i)).collect();
        let is_enough = windows.clone().all(|i| self.available(i) > 0);
        if is_enough {
            for ((window_index, from), table) in
                windows.clone().zip(sources).zip(&mut sequence.tables)
            {
                let page = self.take_pages(window_index, 1).next().expect("as checked");
                copies.push((
                    StateBlock::Page { window_index, page: from },
                    StateBlock::Page { window_index, page },
                ));
                table.pages.push(page);
            }
        }
        windows.for_each(|i| self.tree.release_page(node, i, &mut self.free));
        is_enough
    }
}
