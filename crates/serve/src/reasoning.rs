//! Separates a model's reasoning from its answer where the chat template marks it, such as with
//! `<think>` and `</think>`.

use bodkin_engine::{Reasoning, ReasoningMarkers, ToolCall};

/// Pieces of a text.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Delta {
    pub(crate) reasoning: String,
    pub(crate) content: String,
    pub(crate) calls: Vec<ToolCall>,
}

/// Splits a text as it arrives.
#[derive(Debug)]
pub(crate) struct ReasoningSplitter {
    markers: &'static ReasoningMarkers,
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
    /// A splitter for an answer that may begin so.
    pub(crate) fn new(Reasoning { markers, is_open }: Reasoning) -> ReasoningSplitter {
        let state = if is_open { State::Reasoning } else { State::Start };
        ReasoningSplitter { markers, state, held: String::new() }
    }

    /// Whether the text so far ends within the reasoning.
    pub(crate) fn is_reasoning(&self) -> bool {
        self.state == State::Reasoning
    }

    /// Adds text. With `is_last`, nothing is held back.
    pub(crate) fn push(&mut self, text: &str, is_last: bool) -> Delta {
        self.held.push_str(text);
        let ReasoningMarkers { open, close, answer } = *self.markers;
        let mut delta = Delta::default();
        loop {
            match self.state {
                State::Start => {
                    let start = self.held.trim_start();
                    let may_be = |marker: &str| marker.starts_with(start);
                    if let Some(rest) = start.strip_prefix(open) {
                        self.held = rest.to_owned();
                        self.state = State::Reasoning;
                    } else if let Some(rest) = answer.and_then(|it| start.strip_prefix(it)) {
                        self.held = rest.to_owned();
                        self.state = State::Content;
                    } else if (may_be(open) || answer.is_some_and(may_be)) && !is_last {
                        return delta;
                    } else {
                        self.state = State::Content;
                    }
                }
                State::Reasoning => {
                    if let Some(at) = self.held.find(close) {
                        delta.reasoning.push_str(self.held[..at].trim_end());
                        self.held.drain(..at + close.len());
                        self.state = State::AfterReasoning;
                        continue;
                    }
                    let keep = if is_last { 0 } else { held_back(&self.held, close) };
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
fn held_back(text: &str, close: &str) -> usize {
    let marker = (1..close.len()).rev().find(|&n| text.ends_with(&close[..n])).unwrap_or(0);
    let before = &text[..text.len() - marker];
    marker + before.len() - before.trim_end().len()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use bodkin_engine::{TextStream, Tokenizer};
    use bodkin_gguf::{Array, Metadata, Value};

    use super::*;

    const SOURCE: &str = "{% if '</think>' in content %}";

    fn splitter(source: &str, prompt: &str) -> Option<ReasoningSplitter> {
        Reasoning::of(source, prompt).map(ReasoningSplitter::new)
    }

    fn split(prompt: &str, pieces: &[&str]) -> Vec<(String, String)> {
        let mut splitter = splitter(SOURCE, prompt).unwrap();
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
    fn each_family_has_markers_of_its_own() {
        let split = |source: &str, text: &str| {
            let mut splitter = splitter(source, "").unwrap();
            let mut whole = Delta::default();
            for (i, _) in text.char_indices() {
                let delta = splitter.push(&text[i..=i], i + 1 == text.len());
                whole.reasoning += &delta.reasoning;
                whole.content += &delta.content;
            }
            (whole.reasoning, whole.content)
        };
        let harmony =
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b";
        for (source, text) in [
            ("'<|channel|>analysis<|message|>'", harmony),
            ("'[THINK]'", "[THINK]a[/THINK]b"),
            ("'<seed:think>'", "<seed:think>a</seed:think>\nb"),
            ("split('<channel|>')", "<|channel>thoughta<channel|>b"),
        ] {
            assert_eq!(split(source, text), pair("a", "b"), "{source}");
        }
        let plain = "<|channel|>final<|message|>b";
        assert_eq!(split("'<|channel|>analysis<|message|>'", plain), pair("", "b"));
    }

    /// A tokenizer whose tokens with brackets are control tokens.
    fn tokenizer(texts: &[&str]) -> Tokenizer {
        let kinds = texts.iter().map(|text| if text.contains(['<', '[']) { 3 } else { 1 });
        let kinds = Array::I32(kinds.collect());
        let strings = texts.iter().map(|text| Box::from(text.as_bytes())).collect();
        let mut metadata = Metadata::new();
        metadata.insert("tokenizer.ggml.model", Value::String(b"llama".as_slice().into()));
        let scores = Array::F32(vec![0.0; texts.len()]);
        metadata.insert("tokenizer.ggml.scores", Value::Array(scores));
        metadata.insert("tokenizer.ggml.tokens", Value::Array(Array::String(strings)));
        metadata.insert("tokenizer.ggml.token_type", Value::Array(kinds));
        metadata.insert("tokenizer.ggml.eos_token_id", Value::U32(0));
        Tokenizer::from_metadata(&metadata).unwrap()
    }

    #[test]
    fn markers_that_are_control_tokens_reach_the_splitter() {
        for answer in [
            "<think> a </think> b",
            "<seed:think> a </seed:think> b",
            "[THINK] a [/THINK] b",
            "<|START_THINKING|> a <|END_THINKING|> <|START_RESPONSE|> b",
            "<|channel> thought a <channel|> b",
            "<|channel|> analysis <|message|> a <|end|> <|start|> assistant \
             <|channel|> final <|message|> b",
            "<|think|> a <|end|> <|begin|> assistant <|content|> b",
        ] {
            let mut tokens = vec!["</s>", "<|end|>", "<|call|>", "<|return|>"];
            let ids: Vec<usize> = answer
                .split(' ')
                .map(|text| {
                    let known = tokens.iter().position(|token| *token == text);
                    known.unwrap_or_else(|| {
                        tokens.push(text);
                        tokens.len() - 1
                    })
                })
                .collect();
            let mut stream = TextStream::new(Arc::new(tokenizer(&tokens)), false);
            let source = answer.replace(' ', "");
            let mut splitter = splitter(&source, "").unwrap();
            let mut whole = Delta::default();
            for (at, id) in ids.iter().enumerate() {
                let text = stream.push(*id as u32);
                let delta = splitter.push(&text, at + 1 == ids.len());
                whole.reasoning += &delta.reasoning;
                whole.content += &delta.content;
            }
            assert_eq!((whole.reasoning, whole.content), pair("a", "b"), "{answer}");
        }
    }

    #[test]
    fn a_prompt_may_open_the_reasoning_and_an_answer_may_have_none() {
        assert_eq!(split("<think>\n", &["a<b", "</think>c"]), [pair("a<b", ""), pair("", "c")]);
        assert_eq!(split("", &["<table>", "x"]), [pair("", "<table>"), pair("", "x")]);
        assert_eq!(split("", &["<thin"]), [pair("", "<thin")]);
        assert_eq!(split("<think>", &["never ends </thi"]), [pair("never ends </thi", "")]);
        assert!(splitter("{{ messages }}", "<think>").is_none());
    }
}
