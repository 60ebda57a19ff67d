//! The sums of hidden states over prefixes of texts, with which a text that begins with such a
//! prefix goes on to its mean.

use std::collections::VecDeque;

/// The most prefixes whose sums are stored.
const PREFIXES: usize = 64;

/// Sums by prefix, the least recently used first.
#[derive(Default)]
pub(crate) struct PrefixSums {
    sums: VecDeque<(Vec<u32>, Vec<f32>)>,
}

impl PrefixSums {
    /// The lengths of the prefixes of a text whose sums are stored, the longest first. None is
    /// the whole text.
    pub(crate) fn lengths(&self, text: &[u32]) -> Vec<usize> {
        let prefixes = self.sums.iter().map(|(prefix, _)| prefix);
        let own = prefixes.filter(|prefix| prefix.len() < text.len() && text.starts_with(prefix));
        let mut lengths: Vec<usize> = own.map(Vec::len).collect();
        lengths.sort_unstable_by(|a, b| b.cmp(a));
        lengths
    }

    /// The sum of a prefix, `[width]`.
    pub(crate) fn get(&mut self, prefix: &[u32]) -> Option<&[f32]> {
        let at = self.sums.iter().position(|(stored, _)| stored == prefix)?;
        let used = self.sums.remove(at)?;
        self.sums.push_back(used);
        self.sums.back().map(|(_, sum)| sum.as_slice())
    }

    /// Stores the sum of a prefix, and forgets the one that was used least recently.
    pub(crate) fn insert(&mut self, prefix: Vec<u32>, sum: Vec<f32>) {
        self.sums.retain(|(stored, _)| *stored != prefix);
        if self.sums.len() == PREFIXES {
            self.sums.pop_front();
        }
        self.sums.push_back((prefix, sum));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_prefix_comes_first_and_the_least_recently_used_is_forgotten() {
        let mut sums = PrefixSums::default();
        sums.insert(vec![1], vec![0.5]);
        sums.insert(vec![1, 2, 3], vec![1.5]);
        sums.insert(vec![1, 2], vec![1.0]);
        assert_eq!(sums.lengths(&[1, 2, 3, 4]), [3, 2, 1]);
        assert_eq!(sums.lengths(&[1, 2, 3]), [2, 1], "the last token is always computed");
        assert_eq!(sums.get(&[1, 2]), Some(&[1.0][..]));
        assert_eq!(sums.get(&[2]), None);
        (1..PREFIXES as u32).for_each(|i| sums.insert(vec![7, i], vec![0.0]));
        assert_eq!(sums.lengths(&[1, 2, 3, 4]), [2], "it was used last");
        assert_eq!(sums.sums.len(), PREFIXES);
    }
}
