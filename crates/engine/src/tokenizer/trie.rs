//! Tokens by their first bytes: all those that a text starts with, in one walk. It must not know
//! what tokens are for.

use std::collections::VecDeque;

/// No token.
const NONE: u32 = u32::MAX;

/// A prefix of some tokens. The children of one node lie side by side, by their bytes.
struct Node {
    /// What it adds to its parent's prefix.
    byte: u8,
    children: u16,
    first_child: u32,
    /// The token that this prefix is, or `NONE`.
    token: u32,
}

/// A set of tokens, none of them empty. The number of nodes is at most the number of bytes in all
/// tokens, and one more.
pub(super) struct Trie {
    nodes: Vec<Node>,
}

impl Trie {
    pub(super) fn memory_bytes(&self) -> usize {
        size_of::<Node>() * self.nodes.capacity()
    }

    /// Texts with the tokens that they are, less than 4 GiB of them. Of two tokens with one text
    /// the later is found.
    pub(super) fn new(mut texts: Vec<(&[u8], u32)>) -> Trie {
        // Most texts are short, so that most comparisons are of numbers.
        texts.sort_by_cached_key(|&(text, token)| (first_bytes(text), text, token));
        // There is room for the most that there may be, so that memory need not double.
        let bytes: usize = texts.iter().map(|(text, _)| text.len()).sum();
        let mut nodes = Vec::with_capacity(bytes + 1);
        nodes.push(Node { byte: 0, children: 0, first_child: 0, token: NONE });
        // Which texts start with a node's prefix, and how long that is.
        let mut pending = VecDeque::from([(0..texts.len(), 0)]);
        let mut node = 0;
        while let Some((mut range, depth)) = pending.pop_front() {
            nodes[node].first_child = nodes.len() as u32;
            while let Some(&(text, token)) = texts[range.clone()].first() {
                let Some(&byte) = text.get(depth) else {
                    nodes[node].token = if depth == 0 { NONE } else { token };
                    range.start += 1;
                    continue;
                };
                let same = texts[range.clone()].partition_point(|(text, _)| text[depth] == byte);
                pending.push_back((range.start..range.start + same, depth + 1));
                nodes.push(Node { byte, children: 0, first_child: 0, token: NONE });
                nodes[node].children += 1;
                range.start += same;
            }
            node += 1;
        }
        nodes.shrink_to_fit();
        Trie { nodes }
    }

    /// The tokens that `text` starts with, shortest first, each after its length in bytes.
    pub(super) fn prefixes(&self, text: &[u8]) -> impl Iterator<Item = (usize, u32)> {
        let walk = self.walk(text).enumerate();
        walk.filter_map(|(index, token)| Some((index + 1, token?)))
    }

    /// For each of the first bytes of `text` with which a token goes on, the token that ends there.
    pub(super) fn walk(&self, text: &[u8]) -> impl Iterator<Item = Option<u32>> {
        let mut node = &self.nodes[0];
        text.iter().map_while(move |&byte| {
            node = self.child(node, byte)?;
            Some(Some(node.token).filter(|&token| token != NONE))
        })
    }

    fn child(&self, node: &Node, byte: u8) -> Option<&Node> {
        let first = node.first_child as usize;
        let children = &self.nodes[first..first + usize::from(node.children)];
        let index = children.binary_search_by_key(&byte, |child| child.byte).ok()?;
        Some(&children[index])
    }
}

/// The first eight bytes as a number, in the order of the bytes.
fn first_bytes(text: &[u8]) -> u64 {
    let mut bytes = [0; 8];
    let count = text.len().min(8);
    bytes[..count].copy_from_slice(&text[..count]);
    u64::from_be_bytes(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_tokens_that_start_a_text_are_found() {
        let texts = ["abc", "a", "", "ab\0", "b", "abcdefghij", "abcdefghik", "a", "ab\0\0", "é"];
        let texts = texts.iter().zip(0..).map(|(text, id)| (text.as_bytes(), id)).collect();
        let trie = Trie::new(texts);
        let prefixes = |text: &str| trie.prefixes(text.as_bytes()).collect::<Vec<_>>();
        assert_eq!(prefixes("abcdefghikl"), [(1, 7), (3, 0), (10, 6)]);
        assert_eq!(prefixes("ab\0\0\0"), [(1, 7), (3, 3), (4, 8)]);
        assert_eq!(prefixes("bc"), [(1, 4)]);
        assert_eq!(prefixes("é"), [(2, 9)]);
        assert!(prefixes("è").is_empty() && prefixes("").is_empty());
        assert_eq!(Trie::new(Vec::new()).prefixes(b"a").count(), 0);
    }
}
