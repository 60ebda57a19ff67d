//! Where an answer appears: its text on standard output, and the progress of its prompt on
//! standard error.

use std::io::{IsTerminal, Result, StdoutLock, Write, stdout};

use console::Term;

use super::prefill::PrefillProgress;
use crate::errors::printable_text;
use crate::soft_wrap::SoftWrap;
use crate::terminal::columns;

/// Shows one answer.
pub(super) struct Screen {
    /// None if the progress is not shown.
    pub(super) prefill: Option<PrefillProgress>,
    pub(super) text: AnswerText,
}

/// The text of an answer on its way to standard output.
pub(super) struct AnswerText {
    /// None if the text is not shown.
    out: Option<StdoutLock<'static>>,
    /// Where lines break, if standard output is a terminal.
    wrap: Option<SoftWrap>,
}

impl Screen {
    pub(super) fn new(shows_text: bool, shows_progress: bool) -> Screen {
        let out = shows_text.then(|| stdout().lock());
        let wrap = stdout().is_terminal().then(SoftWrap::default);
        let prefill = shows_progress.then(PrefillProgress::default);
        Screen { prefill, text: AnswerText { out, wrap } }
    }

    /// Shows all of the answer so far. Its last line has no newline.
    pub(super) fn finish(&mut self) -> Result<()> {
        let rest = self.text.wrap.as_mut().map(|wrap| wrap.finish(columns(&Term::stdout())));
        self.text.print(&rest.unwrap_or_default())
    }

    /// Goes to the start of a line of the terminal, for a message on standard error in the middle
    /// of an answer. A word that is not complete yet comes after the message.
    pub(super) fn break_line(&mut self) -> Result<()> {
        let is_inside = self.text.wrap.as_mut().is_some_and(SoftWrap::break_line);
        if is_inside { self.text.print("\n") } else { Ok(()) }
    }
}

impl AnswerText {
    /// Shows more of the text.
    pub(super) fn push(&mut self, text: &str) -> Result<()> {
        match &mut self.wrap {
            Some(wrap) => {
                // A carriage return before a newline says nothing more.
                let text = printable_text(&text.replace('\r', ""));
                let ready = wrap.push(&text, columns(&Term::stdout()));
                self.print(&ready)
            }
            None => self.print(text),
        }
    }

    fn print(&mut self, text: &str) -> Result<()> {
        let Some(out) = &mut self.out else { return Ok(()) };
        out.write_all(text.as_bytes())?;
        out.flush()
    }
}
