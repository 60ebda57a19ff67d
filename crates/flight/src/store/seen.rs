//! Which ids the rows of an upload had, so that a second row of one id is refused.

use std::collections::{BTreeMap, HashMap};

use super::connection::hash;
use crate::batch::Id;

/// The most entries, which take about 64 bytes each.
const ENTRIES_MAX: usize = 4 << 20;

/// Ids with the numbers of their rows. Ids that follow one another as their rows do are one entry.
#[derive(Default)]
pub(crate) struct Seen {
    ranges: BTreeMap<i64, Range>,
    /// By the hash of the text.
    texts: HashMap<u64, u64>,
}

/// Ids from the key of the map on.
struct Range {
    last: i64,
    /// The row of the first id.
    row: u64,
}

impl Seen {
    /// Whether no more ids can be remembered.
    pub(crate) fn is_full(&self) -> bool {
        self.ranges.len() + self.texts.len() >= ENTRIES_MAX
    }

    /// Remembers the id of a row. The row that had it before, if any.
    pub(crate) fn insert(&mut self, id: &Id, row: u64) -> Option<u64> {
        let is_full = self.is_full();
        let id = match id {
            Id::Number(id) => *id,
            Id::Text(id) if is_full => return self.texts.get(&hash(id)).copied(),
            Id::Text(id) => return self.texts.insert(hash(id), row),
        };
        if let Some((&first, range)) = self.ranges.range_mut(..=id).next_back() {
            let offset = id.abs_diff(first);
            if id <= range.last {
                return Some(range.row + offset);
            }
            if range.last.checked_add(1) == Some(id) && range.row + offset == row {
                range.last = id;
                return None;
            }
        }
        if !is_full {
            self.ranges.insert(id, Range { last: id, row });
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_row_of_an_id_is_found() {
        let mut seen = Seen::default();
        for row in 0..1000 {
            assert_eq!(seen.insert(&Id::Number(row as i64 + 5), row), None);
        }
        assert_eq!(seen.ranges.len(), 1, "rows of one range take the memory of one");
        assert_eq!(seen.insert(&Id::Number(5), 1000), Some(0));
        assert_eq!(seen.insert(&Id::Number(1004), 1000), Some(999));
        // Right behind the range, but of a later row.
        assert_eq!(seen.insert(&Id::Number(1005), 1001), None);
        assert_eq!(seen.insert(&Id::Number(4), 1002), None);
        assert_eq!(seen.insert(&Id::Number(1005), 1003), Some(1001));
        assert_eq!(seen.insert(&Id::Number(i64::MAX), 1004), None);
        assert_eq!(seen.insert(&Id::Number(i64::MIN), 1005), None);
        assert_eq!(seen.insert(&Id::Text("5".into()), 1006), None);
        assert_eq!(seen.insert(&Id::Text("5".into()), 1007), Some(1006));
    }
}
