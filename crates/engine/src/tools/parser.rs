//! Finds calls in a text as it arrives: what may be the start of one is held back, a block of calls
//! until it is whole, and what turns out to be none is content.

use std::sync::Arc;

use super::block::{self, MAX_CALLS, Outcome};
use super::formats::ToolFormat;
use super::{Tool, ToolCall};

/// The most bytes of a block.
const MAX_BLOCK_BYTES: usize = 1 << 20;

/// How often a block is read before the end of the answer: its end may stand in a string.
const MAX_READS: usize = 16;

/// The most texts of an answer that begin as blocks do and are none. Each costs a look at all that
/// has come.
const MAX_FAILURES: usize = 64;

/// Up to this length, in bytes, a block is read whenever text comes, to see whether it is one; and
/// from there on, whenever its length has doubled.
const LOOK_BYTES: usize = 64;

/// The most white space that is held back because a block may follow it, in bytes.
const MAX_SPACE_BYTES: usize = 4096;

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
    /// Whether the text so far ends as a call may, and whether more has just come behind that.
    is_closed: bool,
    is_followed: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Content,
    Block(Block),
}

/// A block that is not whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Block {
    /// The length of its start, with the white space before it.
    start: usize,
    /// How far its end was looked for.
    searched: usize,
    /// How often an end was found and it was read.
    reads: usize,
    /// The length of the text behind the start at which it is read in any case.
    next_look: usize,
}

/// What comes first in a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Boundary {
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
            is_closed: false,
            is_followed: false,
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
        let shown = text.trim_end();
        self.is_followed = self.is_closed && !shown.is_empty();
        if !shown.is_empty() {
            self.is_closed = shown.ends_with(['}', ']', '>']);
        }
        let mut delta = ToolDelta::default();
        loop {
            if self.is_single && self.calls > 0 {
                self.held.clear();
                return delta;
            }
            let goes_on = match self.state {
                State::Content => self.content(is_last, &mut delta),
                State::Block(block) => self.block(block, is_last, &mut delta),
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
        let is_done = self.calls >= MAX_CALLS || self.failures >= MAX_FAILURES;
        let found = if is_done { None } else { self.next_boundary(is_last) };
        match found {
            Some((at, Boundary::Hidden(length))) => {
                let space = at - self.held[..at].trim_end().len();
                self.show(at - space, delta);
                self.held.drain(space..space + length);
                true
            }
            Some((at, Boundary::Start(length))) => {
                // White space before a block is no content.
                let space = at - self.held[..at].trim_end().len();
                self.show(at - space, delta);
                let start = space + length;
                let block = Block { start, searched: 0, reads: 0, next_look: LOOK_BYTES };
                self.state = State::Block(block);
                true
            }
            Some((at, Boundary::Undecided)) => {
                self.show(settled(&self.held[..at]), delta);
                false
            }
            None => {
                let is_all = is_last || is_done;
                let bytes = if is_all { self.held.len() } else { settled(&self.held) };
                self.show(bytes, delta);
                false
            }
        }
    }

    /// The first mark in what is held.
    fn next_boundary(&self, is_last: bool) -> Option<(usize, Boundary)> {
        let ToolFormat { start, hidden, bare, .. } = *self.format;
        let mut found: Option<(usize, Boundary)> = None;
        let mut add = |at: usize, mark: Boundary| {
            // Of two in one place, the longer one counts, and one that is not decided before all.
            let length = |mark| match mark {
                Boundary::Start(length) | Boundary::Hidden(length) => length,
                Boundary::Undecided => usize::MAX,
            };
            let is_first = found.is_none_or(|(first, other)| {
                at < first || at == first && length(mark) > length(other)
            });
            if is_first {
                found = Some((at, mark));
            }
        };
        let marks = hidden.iter().map(|text| (*text, Boundary::Hidden(text.len())));
        for (text, mark) in marks.chain([(start, Boundary::Start(start.len()))]) {
            if let Some(at) = self.held.find(text) {
                add(at, mark);
            }
            let partial = (1..text.len())
                .rev()
                .find(|&n| text.is_char_boundary(n) && self.held.ends_with(&text[..n]));
            if let Some(n) = partial.filter(|_| !is_last) {
                add(self.held.len() - n, Boundary::Undecided);
            }
        }
        if !self.has_content && self.failures == 0 && self.calls == 0 {
            let text = self.held.trim_start();
            let at = self.held.len() - text.len();
            if bare.iter().any(|bare| text.starts_with(bare)) {
                add(at, Boundary::Start(0));
            } else if !is_last && bare.iter().any(|bare| bare.starts_with(text)) {
                add(at, Boundary::Undecided);
            }
        }
        found
    }

    /// Reads a block if it may be whole, or to see whether it is one. Returns whether there is more
    /// to do.
    fn block(&mut self, mut block: Block, is_last: bool, delta: &mut ToolDelta) -> bool {
        let end = self.format.end;
        let has_end = block.reads < MAX_READS && {
            let from = self.held.floor_char_boundary(block.searched.max(block.start));
            // A block without an end is whole when something else follows.
            if end.is_empty() { self.is_followed } else { self.held[from..].contains(end) }
        };
        let length = self.held.len() - block.start;
        let is_look = length < LOOK_BYTES || length >= block.next_look;
        let is_too_long = self.held.len() > MAX_BLOCK_BYTES;
        block.searched = self.held.len().saturating_sub(end.len());
        if !has_end && !is_look && !is_last && !is_too_long {
            self.state = State::Block(block);
            return false;
        }
        match block::read(self.format, &self.tools, &self.held[block.start..], is_last) {
            Outcome::Whole(mut calls, bytes) => {
                calls.truncate(if self.is_single { 1 } else { calls.len() });
                self.calls += calls.len();
                delta.calls.extend(calls);
                self.held.drain(..block.start + bytes);
                self.state = State::Content;
                self.is_behind_call = true;
                true
            }
            Outcome::Partial if !is_too_long => {
                if has_end {
                    block.searched = self.held.len();
                    block.reads += 1;
                }
                block.next_look = LOOK_BYTES.max(2 * length);
                self.state = State::Block(block);
                false
            }
            Outcome::Partial | Outcome::Wrong => {
                self.failures += 1;
                self.state = State::Content;
                // Another block may begin behind the start of this one.
                self.show(block.start, delta);
                true
            }
        }
    }
}

/// How much of a text is shown: not the white space at its end, as a block may follow, unless there
/// is much of it, which would be searched whenever text comes.
fn settled(text: &str) -> usize {
    let shown = text.trim_end().len();
    if text.len() - shown > MAX_SPACE_BYTES { text.len() } else { shown }
}
