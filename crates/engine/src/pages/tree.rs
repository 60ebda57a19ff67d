//! The prefix tree: every full page of every sequence, and the last page of finished ones, by the
//! tokens that it holds and all tokens before it. A node is one page of tokens; its data is one
//! page for each window of the plan and may have a checkpoint of recurrent state. Pages in use
//! have a reference count; the others stay until their memory is needed, least recently used
//! first. This file must not know sequences.

use std::cmp::Reverse;
use std::collections::BTreeSet;

use bodkin_backend::PAGE_TOKENS;

use crate::prefix_store::{PageKey, page_key};

/// A node's index.
pub(super) type NodeId = usize;

/// The node before the first page.
pub(super) const ROOT: NodeId = 0;

/// The memory that no node and no sequence holds.
#[derive(Default)]
pub(super) struct FreeMemory {
    /// Pages of each window.
    pub(super) pages: Vec<Vec<u32>>,
    pub(super) state_slots: Vec<u32>,
}

/// One page of tokens.
#[derive(Default)]
struct Node {
    parent: NodeId,
    /// The hash of its tokens and all before them.
    key: PageKey,
    /// The number of pages before this one.
    depth: usize,
    /// [`PAGE_TOKENS`] of them; fewer at the end of a finished sequence.
    tokens: Vec<u32>,
    /// How many of them were computed as prefill rows; the later ones were generated.
    prefill: usize,
    children: Vec<NodeId>,
    /// The page of each window, where it has not been freed.
    pages: Vec<Option<NodePage>>,
    /// The state slot that holds the recurrent state after these tokens, and when it was used.
    checkpoint: Option<(u32, u64)>,
    /// Sequences that have this page and go on behind it.
    users: usize,
    /// No new sequence finds it; its memory is freed with its last user.
    is_unlinked: bool,
}

/// A page of memory that belongs to a node.
struct NodePage {
    page: u32,
    /// Sequences that still see it.
    users: usize,
    last_used: u64,
}

/// What the tree has of a sequence of tokens.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Match {
    /// The nodes of its first pages.
    pub(super) path: Vec<NodeId>,
    /// A node that holds the start of the page behind them, and how many tokens of it agree.
    pub(super) partial: Option<(NodeId, usize)>,
}

/// All nodes.
pub(super) struct Tree {
    nodes: Vec<Node>,
    unused: Vec<NodeId>,
    /// For each window, the pages without users. A parent was used no earlier than its children,
    /// so the first one here is never that of a node whose children have pages.
    evictable: Vec<BTreeSet<(u64, Reverse<usize>, NodeId)>>,
    /// The nodes with checkpoints.
    checkpoints: BTreeSet<(u64, NodeId)>,
    /// The window that keeps all pages; a node without that page is removed.
    full_window: Option<usize>,
    /// Counts uses.
    clock: u64,
}

impl Tree {
    pub(super) fn new(windows: &[Option<usize>]) -> Tree {
        Tree {
            nodes: vec![Node::default()],
            unused: Vec::new(),
            evictable: vec![BTreeSet::new(); windows.len()],
            checkpoints: BTreeSet::new(),
            full_window: windows.iter().position(Option::is_none),
            clock: 0,
        }
    }

    /// Begins a use: pages that are released together are equally old.
    pub(super) fn tick(&mut self) {
        self.clock += 1;
    }

    /// Finds the longest start of `tokens` in the tree. The first `prefill` of them belong to a
    /// prompt, which may go on from any rows with these tokens; the others were generated, and
    /// only rows that were generated, too, have the same bits.
    pub(super) fn find(&self, tokens: &[u32], prefill: usize) -> Match {
        let mut found = Match::default();
        let mut node = ROOT;
        loop {
            let start = found.path.len() * PAGE_TOKENS;
            let (rest, prefill) = (&tokens[start..], prefill.saturating_sub(start));
            let agreeing = self.nodes[node].children.iter().filter_map(|&id| {
                let child = &self.nodes[id];
                let len = child.tokens.iter().zip(rest).take_while(|(a, b)| a == b).count();
                let is_same = prefill >= len || child.prefill <= prefill;
                (len > 0 && is_same).then_some((len, child.prefill, id))
            });
            match agreeing.max() {
                Some((PAGE_TOKENS, _, id)) => {
                    found.path.push(id);
                    node = id;
                }
                best => {
                    found.partial = best.map(|(len, _, id)| (id, len));
                    return found;
                }
            }
        }
    }

    /// The child with exactly these tokens, computed in the same way.
    pub(super) fn child(&self, parent: NodeId, tokens: &[u32], prefill: usize) -> Option<NodeId> {
        let is_same = |&&id: &&NodeId| {
            let child = &self.nodes[id];
            child.prefill == prefill && child.tokens == tokens
        };
        self.nodes[parent].children.iter().find(is_same).copied()
    }

    /// Adds a node without users, pages or checkpoint.
    pub(super) fn insert(&mut self, parent: NodeId, tokens: &[u32], prefill: usize) -> NodeId {
        let node = Node {
            parent,
            key: page_key(&self.nodes[parent].key, tokens),
            depth: if parent == ROOT { 0 } else { self.nodes[parent].depth + 1 },
            tokens: tokens.to_vec(),
            prefill,
            pages: self.evictable.iter().map(|_| None).collect(),
            is_unlinked: self.nodes[parent].is_unlinked,
            ..Node::default()
        };
        let id = match self.unused.pop() {
            Some(id) => {
                self.nodes[id] = node;
                id
            }
            None => {
                self.nodes.push(node);
                self.nodes.len() - 1
            }
        };
        self.nodes[parent].children.push(id);
        id
    }

    /// The tokens of a node.
    pub(super) fn tokens(&self, node: NodeId) -> &[u32] {
        &self.nodes[node].tokens
    }

    /// The hash of a node's tokens and all before them.
    pub(super) fn key(&self, node: NodeId) -> PageKey {
        self.nodes[node].key
    }

    /// How many of a node's tokens were computed as prefill rows.
    pub(super) fn prefill(&self, node: NodeId) -> usize {
        self.nodes[node].prefill
    }

    /// The page of a node for a window.
    pub(super) fn page(&self, node: NodeId, window: usize) -> Option<u32> {
        self.nodes[node].pages[window].as_ref().map(|page| page.page)
    }

    /// Adds a sequence that goes on behind a node.
    pub(super) fn enter(&mut self, node: NodeId) {
        self.nodes[node].users += 1;
    }

    /// Ends what [`Tree::enter`] began.
    pub(super) fn leave(&mut self, node: NodeId, free: &mut FreeMemory) {
        self.nodes[node].users -= 1;
        self.prune(node, free);
    }

    /// Gives a node a page that the caller uses.
    pub(super) fn put_page(&mut self, node: NodeId, window: usize, page: u32) {
        let page = NodePage { page, users: 1, last_used: self.clock };
        let old = self.nodes[node].pages[window].replace(page);
        assert!(old.is_none(), "a node has one page for each window");
    }

    /// Uses the page of a node.
    pub(super) fn use_page(&mut self, node: NodeId, window: usize) -> u32 {
        let depth = Reverse(self.nodes[node].depth);
        let page = self.nodes[node].pages[window].as_mut().expect("a page to use");
        if page.users == 0 {
            self.evictable[window].remove(&(page.last_used, depth, node));
        }
        page.users += 1;
        page.page
    }

    /// Ends one use of a node's page.
    pub(super) fn release_page(&mut self, node: NodeId, window: usize, free: &mut FreeMemory) {
        let Node { depth, is_unlinked, pages, .. } = &mut self.nodes[node];
        let page = pages[window].as_mut().expect("a page in use");
        page.users -= 1;
        page.last_used = self.clock;
        if page.users > 0 {
            return;
        }
        if *is_unlinked {
            free.pages[window].extend(pages[window].take().map(|page| page.page));
        } else {
            self.evictable[window].insert((self.clock, Reverse(*depth), node));
        }
    }

    /// The state slot with the recurrent state after a node.
    pub(super) fn checkpoint(&self, node: NodeId) -> Option<u32> {
        self.nodes[node].checkpoint.map(|(slot, _)| slot)
    }

    /// Gives a node a checkpoint. Returns the slot if it has one already.
    pub(super) fn put_checkpoint(&mut self, node: NodeId, slot: u32) -> Option<u32> {
        if self.nodes[node].checkpoint.is_some() || self.nodes[node].is_unlinked {
            return Some(slot);
        }
        self.nodes[node].checkpoint = Some((slot, self.clock));
        self.checkpoints.insert((self.clock, node));
        None
    }

    /// Makes a checkpoint the last one to be evicted.
    pub(super) fn use_checkpoint(&mut self, node: NodeId) {
        if let Some((slot, used)) = self.nodes[node].checkpoint {
            self.checkpoints.remove(&(used, node));
            self.checkpoints.insert((self.clock, node));
            self.nodes[node].checkpoint = Some((slot, self.clock));
        }
    }

    /// Whether any node has a checkpoint.
    pub(super) fn has_checkpoints(&self) -> bool {
        !self.checkpoints.is_empty()
    }

    /// Pages of a window that can be evicted.
    pub(super) fn evictable(&self, window: usize) -> usize {
        self.evictable[window].len()
    }

    /// Frees the least recently used page of a window that no sequence uses, with everything that
    /// is of no use without it. Returns false if there is none.
    pub(super) fn evict_page(&mut self, window: usize, free: &mut FreeMemory) -> bool {
        let Some((.., node)) = self.evictable[window].pop_first() else { return false };
        free.pages[window].extend(self.nodes[node].pages[window].take().map(|page| page.page));
        if self.full_window == Some(window) {
            self.remove(node, free);
        } else {
            self.prune(node, free);
        }
        true
    }

    /// Frees the least recently used checkpoint but that of `except`. Returns false if there is
    /// none.
    pub(super) fn evict_checkpoint(
        &mut self,
        except: Option<NodeId>,
        free: &mut FreeMemory,
    ) -> bool {
        let oldest = self.checkpoints.iter().find(|(_, node)| Some(*node) != except).copied();
        let Some((used, node)) = oldest else { return false };
        self.checkpoints.remove(&(used, node));
        free.state_slots.extend(self.nodes[node].checkpoint.take().map(|(slot, _)| slot));
        self.prune(node, free);
        true
    }

    /// Hides a node and all behind it from new sequences; memory without users is freed.
    pub(super) fn unlink(&mut self, node: NodeId, free: &mut FreeMemory) {
        if self.nodes[node].is_unlinked {
            return;
        }
        let mut subtree = vec![node];
        let mut next = 0;
        while let Some(&id) = subtree.get(next) {
            self.nodes[id].is_unlinked = true;
            subtree.extend(&self.nodes[id].children);
            next += 1;
        }
        let parent = self.nodes[node].parent;
        self.nodes[parent].children.retain(|&child| child != node);
        // Children before their parents.
        for &id in subtree.iter().rev() {
            self.free_unused(id, free);
            if self.nodes[id].users == 0 && self.nodes[id].children.is_empty() {
                self.remove(id, free);
            }
        }
        self.prune(parent, free);
    }

    /// Removes nodes that hold nothing, from this one towards the root.
    fn prune(&mut self, mut node: NodeId, free: &mut FreeMemory) {
        while node != ROOT {
            let Node { users, children, pages, checkpoint, .. } = &self.nodes[node];
            let is_empty = pages.iter().all(Option::is_none) && checkpoint.is_none();
            if *users > 0 || !children.is_empty() || !is_empty {
                return;
            }
            let parent = self.nodes[node].parent;
            self.remove(node, free);
            node = parent;
        }
    }

    /// Removes a node without users and children.
    fn remove(&mut self, node: NodeId, free: &mut FreeMemory) {
        assert!(self.nodes[node].users == 0 && self.nodes[node].children.is_empty(), "a leaf");
        self.free_unused(node, free);
        let removed = std::mem::take(&mut self.nodes[node]);
        assert!(removed.pages.iter().all(Option::is_none), "a page has no users but its node's");
        self.nodes[removed.parent].children.retain(|&child| child != node);
        self.unused.push(node);
    }

    /// Frees the memory of a node that no sequence uses.
    fn free_unused(&mut self, node: NodeId, free: &mut FreeMemory) {
        let Node { depth, pages, checkpoint, .. } = &mut self.nodes[node];
        for (window, page) in pages.iter_mut().enumerate() {
            if let Some(unused) = page.take_if(|page| page.users == 0) {
                self.evictable[window].remove(&(unused.last_used, Reverse(*depth), node));
                free.pages[window].push(unused.page);
            }
        }
        if let Some((slot, used)) = checkpoint.take() {
            self.checkpoints.remove(&(used, node));
            free.state_slots.push(slot);
        }
    }

    /// Pages of a window that nodes hold, and checkpoints, for tests.
    #[cfg(test)]
    pub(super) fn held(&self) -> (Vec<usize>, usize) {
        let held = |window: usize| {
            self.nodes.iter().filter(|n| n.pages.get(window).is_some_and(Option::is_some)).count()
        };
        let windows = (0..self.evictable.len()).map(held).collect();
        (windows, self.checkpoints.len())
    }
}
