//! Words that may not come back, listed in `words.txt` with what the field says instead. A phrase
//! that is broken over two lines is not seen.

use std::collections::BTreeMap;

use super::ratchet::Excess;
use super::tree::Item;

/// A word or phrase, and what to write instead.
struct Word<'a> {
    /// In lower case, unless only its capitalised form is meant.
    word: &'a str,
    instead: &'a str,
    /// Phrases and beginnings of paths in which it may stand.
    unless: Vec<&'a str>,
}

/// Counts each listed word in each crate, or file outside of the crates.
pub(super) fn check(items: &[Item], list: &str) -> Vec<Excess> {
    const SOURCES: [&str; 4] = [".rs", ".cu", ".cuh", ".md"];
    // Its tests are about such words.
    const THIS: &str = "xtask/src/tidy/words.rs";
    let words: Vec<Word<'_>> = list.lines().filter_map(parse).collect();
    let mut places: BTreeMap<(&str, &str), (&str, Vec<String>)> = BTreeMap::new();
    for item in items {
        if !SOURCES.iter().any(|end| item.path.ends_with(end)) || item.path == THIS {
            continue;
        }
        let place = item.crate_name().unwrap_or(&item.path);
        for (number, line) in item.lines() {
            let lower = line.to_lowercase();
            for word in &words {
                if word.unless.iter().any(|start| item.path.starts_with(start)) {
                    continue;
                }
                let line = if word.word.chars().any(char::is_uppercase) { line } else { &lower };
                for _ in 0..word.count(line) {
                    let found = places.entry((word.word, place));
                    let (_, at) = found.or_insert((word.instead, Vec::new()));
                    at.push(format!("{}:{number}", item.path));
                }
            }
        }
    }
    let excess = |((word, place), (instead, at)): ((&str, &str), (&str, Vec<String>))| Excess {
        place: format!("`{word}` in {place}"),
        size: at.len(),
        detail: format!("write `{instead}` at {}", at.join(", ")),
    };
    places.into_iter().map(excess).collect()
}

/// Reads `word = what to write instead; phrase, phrase`.
fn parse(line: &str) -> Option<Word<'_>> {
    let (word, rest) = line.split_once(" = ")?;
    let (instead, unless) = rest.split_once("; ").unwrap_or((rest, ""));
    let unless = unless.split(", ").filter(|phrase| !phrase.is_empty()).collect();
    Some(Word { word, instead, unless })
}

impl Word<'_> {
    /// How often it stands in a line as a word, or as a part of a name between underscores.
    fn count(&self, line: &str) -> usize {
        let is_letter = |c: char| c.is_alphanumeric();
        let allowed = |at: usize| {
            self.unless.iter().any(|phrase| {
                let inside = phrase.match_indices(self.word).map(|(start, _)| start);
                inside.into_iter().any(|start| {
                    at.checked_sub(start).is_some_and(|from| line[from..].starts_with(phrase))
                })
            })
        };
        line.match_indices(self.word)
            .filter(|(at, word)| {
                !line[..*at].ends_with(is_letter)
                    && !line[at + word.len()..].starts_with(is_letter)
                    && !allowed(*at)
            })
            .count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIST: &str = "# why\nheated = divided by temperature\nKept = KV layout\n\
                        feed = step metadata; feed_forward, docs/\n";

    fn found(path: &str, text: &str) -> Vec<(String, usize)> {
        let item = Item { path: path.to_owned(), text: Some(text.to_owned()) };
        check(&[item], LIST).into_iter().map(|found| (found.place, found.size)).collect()
    }

    #[test]
    fn words_are_counted_where_they_are_not_allowed() {
        let expected = [("`heated` in cuda".to_owned(), 2)];
        assert_eq!(found("crates/cuda/kernels/a.cu", "Heated heated_row preheated\n"), expected);
        let expected = [("`Kept` in README.md".to_owned(), 1)];
        assert_eq!(found("README.md", "`Kept` is kept\n"), expected);
        let expected = [("`feed` in model".to_owned(), 1)];
        assert_eq!(found("crates/model/src/a.rs", "feed_forward(feed, feeds)\n"), expected);
        assert_eq!(found("docs/a.md", "feed\n"), []);
        assert_eq!(found("crates/cuda/a.txt", "feed\n"), []);
    }
}
