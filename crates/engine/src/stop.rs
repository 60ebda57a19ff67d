//! Stop strings in a stream: text that may be the start of one is held back until that is known.

/// Looks for stop strings at the end of what has been said.
pub(crate) struct StopStrings {
    texts: Vec<String>,
    held: String,
}

impl StopStrings {
    pub(crate) fn new(texts: &[String]) -> StopStrings {
        let texts = texts.iter().filter(|t| !t.is_empty()).cloned().collect();
        StopStrings { texts, held: String::new() }
    }

    /// Adds text. Returns what can be shown, and the stop string if one has begun and ended.
    pub(crate) fn push(&mut self, text: &str) -> (String, Option<String>) {
        self.held.push_str(text);
        let first = self.texts.iter().filter_map(|t| self.held.find(t.as_str()).map(|at| (at, t)));
        if let Some((at, found)) = first.min_by_key(|(at, t)| (*at, std::cmp::Reverse(t.len()))) {
            let shown = self.held[..at].to_owned();
            let found = found.clone();
            self.held.clear();
            return (shown, Some(found));
        }
        let keep = self.texts.iter().map(|t| partial(&self.held, t)).max().unwrap_or(0);
        let rest = self.held.split_off(self.held.len() - keep);
        (std::mem::replace(&mut self.held, rest), None)
    }

    /// What is still held back, at the end.
    pub(crate) fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

/// The length of the longest end of `text` that is a proper start of `stop`.
fn partial(text: &str, stop: &str) -> usize {
    let lengths = (1..stop.len().min(text.len() + 1)).rev();
    lengths.filter(|&n| stop.is_char_boundary(n)).find(|&n| text.ends_with(&stop[..n])).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_start_is_held_back_until_it_is_clear() {
        let mut stop = StopStrings::new(&["\n\nUser:".into(), "END".into()]);
        assert_eq!(stop.push("one\n"), ("one".into(), None));
        assert_eq!(stop.push("\nUs"), (String::new(), None));
        assert_eq!(stop.push("e"), (String::new(), None));
        assert_eq!(stop.push(" it. EN"), ("\n\nUse it. ".into(), None));
        assert_eq!(stop.push("D, more"), (String::new(), Some("END".into())));
    }

    #[test]
    fn the_earliest_stop_counts_and_characters_stay_whole() {
        let mut stop = StopStrings::new(&["é!".into(), "b".into(), "bc".into()]);
        assert_eq!(stop.push("aé"), ("a".into(), None));
        assert_eq!(stop.finish(), "é");
        assert_eq!(stop.push("xbcé!"), ("x".into(), Some("bc".into())));
    }
}
