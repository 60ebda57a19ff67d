//! Finds calls in a text as it arrives: what may be the start of one is held back, a block of calls
//! until it is whole, and what turns out to be none is content.

use std::sync::Arc;

use super::block::{self, Outcome};
use super::formats::ToolFormat;
use super::{Tool, ToolCall};

/// The most bytes of a block.
const BLOCK_BYTES: usize = 1 << 20;

/// The most calls of an answer; what comes behind them is content.
const CALLS: usize = 1024;

/// How often a block is read before the end of the answer: its end may stand in a string.
const READS: usize = 16;

/// The most texts of an answer that begin as blocks do and are none. Each costs a look at all that
/// has come.
const FAILURES: usize = 64;

/// What has become clear of an answer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ToolDelta {
    /// Text that is no part of a call.
    pub content: String,
    /// Whole calls.
    pub calls: Vec<ToolCall>,
}

/// Divides the text of an answer into content and calls.
#[derive(Debug)]
pub struct ToolParser {
    format: &'static ToolFormat,
    tools: Arc<[Tool]>,
    state: State,
    /// Text that is not decided yet; that of a block begins with its start.
    held: String,
    /// Whether there was content, and whether the last thing was a call: white space behind one is
    /// no content.
    has_content: bool,
    is_behind_call: bool,
    calls: usize,
    failures: usize,
    /// Whether the first call is the last of the answer.
    is_single: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Content,
    /// Within a block whose start, with the white space before it, has this length; how far its
    /// end was looked for, and how often it was read.
    Block {
        start: usize,
        searched: usize,
        reads: usize,
    },
}

/// What comes first in a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mark {
    /// The start of a block, of this length.
    Start(usize),
    /// A text that is not shown, of this length.
    Hidden(usize),
    /// Something that may become one of these.
    Undecided,
}

impl ToolParser {
    /// A parser of the answer to a prompt.
    pub fn new(format: &'static ToolFormat, tools: Arc<[Tool]>, prompt: &str) -> ToolParser {
        let is_open = format.is_open && prompt.ends_with(format.start);
        let held = if is_open { format.start.to_owned() } else { String::new() };
        ToolParser {
            format,
            tools,
            state: State::Content,
            held,
            has_content: false,
            is_behind_call: false,
            calls: 0,
            failures: 0,
            is_single: false,
        }
    }

    /// With `is_single`, the answer ends with its first call: whatever comes behind it is neither
    /// content nor a call. For answers that no grammar holds to one call.
    pub fn with_single_call(self, is_single: bool) -> ToolParser {
        ToolParser { is_single, ..self }
    }

    /// Adds text. With `is_last`, nothing is held back.
    pub fn push(&mut self, text: &str, is_last: bool) -> ToolDelta {
        self.held.push_str(text);
        let mut delta = ToolDelta::default();
        loop {
            if self.is_single && self.calls > 0 {
                self.held.clear();
                return delta;
            }
            let goes_on = match self.state {
                State::Content => self.content(is_last, &mut delta),
                State::Block { start, searched, reads } => {
                    self.block((start, searched, reads), is_last, &mut delta)
                }
            };
            if !goes_on {
                return delta;
            }
        }
    }

    /// Moves the first bytes that are held to the content.
    fn show(&mut self, bytes: usize, delta: &mut ToolDelta) {
        let text = &self.held[..bytes];
        let text = if self.is_behind_call { text.trim_start() } else { text };
        delta.content.push_str(text);
        self.has_content |= !text.trim().is_empty();
        self.is_behind_call &= text.is_empty();
        self.held.drain(..bytes);
    }

    /// Looks for the next mark. Returns whether there is more to do.
    fn content(&mut self, is_last: bool, delta: &mut ToolDelta) -> bool {
        let is_done = self.calls >= CALLS || self.failures >= FAILURES;
        let found = if is_done { None } else { self.next_mark(is_last) };
        match found {
            Some((at, Mark::Hidden(length))) => {
                let space = at - self.held[..at].trim_end().len();
                self.show(at - space, delta);
                self.held.drain(space..space + length);
                true
            }
            Some((at, Mark::Start(length))) => {
                // White space before a block is no content.
                let space = at - self.held[..at].trim_end().len();
                self.show(at - space, delta);
                self.state = State::Block { start: space + length, searched: 0, reads: 0 };
                true
            }
            Some((at, Mark::Undecided)) => {
                self.show(self.held[..at].trim_end().len(), delta);
                false
            }
            None => {
                let shown = self.held.trim_end();
                let is_space = is_last && self.is_behind_call && shown.is_empty();
                let bytes = if is_last || is_done { self.held.len() } else { shown.len() };
                if is_space {
                    self.held.clear()
                } else {
                    self.show(bytes, delta)
                }
                false
            }
        }
    }

    /// The first mark in what is held.
    fn next_mark(&self, is_last: bool) -> Option<(usize, Mark)> {
        let ToolFormat { start, hidden, bare, .. } = *self.format;
        let mut found: Option<(usize, Mark)> = None;
        let mut add = |at: usize, mark: Mark| {
            // Of two in one place, the longer one counts, and one that is not decided before all.
            let length = |mark| match mark {
                Mark::Start(length) | Mark::Hidden(length) => length,
                Mark::Undecided => usize::MAX,
            };
            let is_first = found.is_none_or(|(first, other)| {
                at < first || at == first && length(mark) > length(other)
            });
            if is_first {
                found = Some((at, mark));
            }
        };
        let marks = hidden.iter().map(|text| (*text, Mark::Hidden(text.len())));
        for (text, mark) in marks.chain([(start, Mark::Start(start.len()))]) {
            if let Some(at) = self.held.find(text) {
                add(at, mark);
            }
            let partial = (1..text.len())
                .rev()
                .find(|&n| text.is_char_boundary(n) && self.held.ends_with(&text[..n]));
            if let Some(n) = partial.filter(|_| !is_last) {
                add(self.held.len() - n, Mark::Undecided);
            }
        }
        if !self.has_content && self.failures == 0 && self.calls == 0 {
            let text = self.held.trim_start();
            let at = self.held.len() - text.len();
            if bare.iter().any(|bare| text.starts_with(bare)) {
                add(at, Mark::Start(0));
            } else if !is_last && bare.iter().any(|bare| bare.starts_with(text)) {
                add(at, Mark::Undecided);
            }
        }
        found
    }

    /// Reads a block if it may be whole. Returns whether there is more to do.
    fn block(
        &mut self,
        (start, searched, reads): (usize, usize, usize),
        is_last: bool,
        delta: &mut ToolDelta,
    ) -> bool {
        let end = self.format.end;
        let may_be_whole = !end.is_empty() && reads < READS && {
            let from = self.held.floor_char_boundary(searched.max(start));
            self.held[from..].contains(end)
        };
        let is_too_long = self.held.len() > BLOCK_BYTES;
        if !may_be_whole && !is_last && !is_too_long {
            let searched = self.held.len().saturating_sub(end.len());
            self.state = State::Block { start, searched, reads };
            return false;
        }
        match block::read(self.format, &self.tools, &self.held[start..], is_last) {
            Outcome::Whole(mut calls, bytes) => {
                calls.truncate(if self.is_single { 1 } else { calls.len() });
                self.calls += calls.len();
                delta.calls.extend(calls);
                self.held.drain(..start + bytes);
                self.state = State::Content;
                self.is_behind_call = true;
                true
            }
            Outcome::Partial if !is_too_long => {
                let searched = self.held.len();
                self.state = State::Block { start, searched, reads: reads + 1 };
                false
            }
            Outcome::Partial | Outcome::Wrong => {
                self.failures += 1;
                self.state = State::Content;
                // Another block may begin behind the start of this one.
                self.show(start, delta);
                true
            }
        }
    }
}
