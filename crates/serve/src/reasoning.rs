//! Separates a model's reasoning from its answer where the chat template marks it with
//! `<think>` and `</think>`.

const OPEN: &str = "<think>";
const CLOSE: &str = "</think>";

/// Pieces of a text.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Delta {
    pub(crate) reasoning: String,
    pub(crate) content: String,
}

/// Splits a text as it arrives.
#[derive(Debug)]
pub(crate) struct ReasoningSplitter {
    state: State,
    /// Text that may be the start of a marker, or white space that a marker may follow.
    held: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Nothing but white space so far.
    Start,
    Reasoning,
    /// Between the end of the reasoning and the first character of the answer.
    AfterReasoning,
    Content,
}

impl ReasoningSplitter {
    /// A splitter for the answer to `prompt`, if the template's `source` marks reasoning.
    pub(crate) fn new(source: &str, prompt: &str) -> Option<ReasoningSplitter> {
        if !source.contains(CLOSE) && !source.contains(OPEN) {
            return None;
        }
        // Some templates write the first marker themselves.
        let is_open = prompt.trim_end().ends_with(OPEN);
        let state = if is_open { State::Reasoning } else { State::Start };
        Some(ReasoningSplitter { state, held: String::new() })
    }

    /// Whether the text so far ends within the reasoning.
    pub(crate) fn is_reasoning(&self) -> bool {
        self.state == State::Reasoning
    }

    /// Adds text. With `is_last`, nothing is held back.
    pub(crate) fn push(&mut self, text: &str, is_last: bool) -> Delta {
        self.held.push_str(text);
        let mut delta = Delta::default();
        loop {
            match self.state {
                State::Start => {
                    let start = self.held.trim_start();
                    if let Some(rest) = start.strip_prefix(OPEN) {
                        self.held = rest.to_owned();
                        self.state = State::Reasoning;
                    } else if OPEN.starts_with(start) && !is_last {
                        return delta;
                    } else {
                        self.state = State::Content;
                    }
                }
                State::Reasoning => {
                    if let Some(at) = self.held.find(CLOSE) {
                        delta.reasoning.push_str(self.held[..at].trim_end());
                        self.held.drain(..at + CLOSE.len());
                        self.state = State::AfterReasoning;
                        continue;
                    }
                    let keep = if is_last { 0 } else { held_back(&self.held) };
                    let end = self.held.len() - keep;
                    delta.reasoning.extend(self.held.drain(..end));
                    return delta;
                }
                State::AfterReasoning => {
                    self.held = self.held.trim_start().to_owned();
                    if self.held.is_empty() {
                        return delta;
                    }
                    self.state = State::Content;
                }
                State::Content => {
                    delta.content.push_str(&std::mem::take(&mut self.held));
                    return delta;
                }
            }
        }
    }
}

/// Bytes at the end of a text that may be the start of the closing marker, with the white space
/// before it.
fn held_back(text: &str) -> usize {
    let marker = (1..CLOSE.len()).rev().find(|&n| text.ends_with(&CLOSE[..n])).unwrap_or(0);
    let before = &text[..text.len() - marker];
    marker + before.len() - before.trim_end().len()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOURCE: &str = "{% if '</think>' in content %}";

    fn split(prompt: &str, pieces: &[&str]) -> Vec<(String, String)> {
        let mut splitter = ReasoningSplitter::new(SOURCE, prompt).unwrap();
        let mut last = pieces.len();
        pieces
            .iter()
            .map(|piece| {
                last -= 1;
                let delta = splitter.push(piece, last == 0);
                (delta.reasoning, delta.content)
            })
            .collect()
    }

    fn pair(reasoning: &str, content: &str) -> (String, String) {
        (reasoning.to_owned(), content.to_owned())
    }

    #[test]
    fn markers_are_found_across_pieces() {
        let found =
            split("user: hi", &["\n<th", "ink>\nOne", " two \n</thi", "nk>\n\n", "Three", ""]);
        let wanted = [
            pair("", ""),
            pair("\nOne", ""),
            pair(" two", ""),
            pair("", ""),
            pair("", "Three"),
            pair("", ""),
        ];
        assert_eq!(found, wanted);
    }

    #[test]
    fn a_prompt_may_open_the_reasoning_and_an_answer_may_have_none() {
        assert_eq!(split("<think>\n", &["a<b", "</think>c"]), [pair("a<b", ""), pair("", "c")]);
        assert_eq!(split("", &["<table>", "x"]), [pair("", "<table>"), pair("", "x")]);
        assert_eq!(split("", &["<thin"]), [pair("", "<thin")]);
        assert_eq!(split("<think>", &["never ends </thi"]), [pair("never ends </thi", "")]);
        assert!(ReasoningSplitter::new("{{ messages }}", "<think>").is_none());
    }
}
